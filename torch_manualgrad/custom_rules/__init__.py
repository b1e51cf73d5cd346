"""Python functions with custom derivatives, in all modes and at every order: ``custom_vjp`` and ``custom_jvp``."""

from ..core.captures import HiddenTensorError
from . import bodies  # noqa: F401 calls of functions with rules in compiled graphs
from .jvp import CustomJvp, custom_jvp
from .vjp import CustomVjp, custom_vjp

__all__ = ["CustomJvp", "CustomVjp", "HiddenTensorError", "custom_jvp", "custom_vjp"]
