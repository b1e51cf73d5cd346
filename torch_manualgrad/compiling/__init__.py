"""torch.compile with derivatives of every order: ``backend="manualgrad"``."""

from .backend import backend, compile

__all__ = ["backend", "compile"]
