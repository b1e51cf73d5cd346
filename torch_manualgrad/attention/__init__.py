"""PyTorch's flexible attention, with derivatives of every order and mode on every device."""

from .flexible import flex_attention

__all__ = ["flex_attention"]
