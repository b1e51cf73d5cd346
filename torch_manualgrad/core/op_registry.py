"""Every op of ours, by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .autograd import Derivative
    from .op import CustomOp

__all__ = ["active_derivative", "defined", "defined_ops"]

defined_ops: dict[str, CustomOp] = {}


def defined(name: str) -> CustomOp | None:
    """The op of ours of that name, if there is one."""
    return defined_ops.get(name)


def active_derivative(name: str) -> Derivative | None:
    """The derivative that the op of ours of this name has now; None for another operator, or where it has none."""
    return defined_ops[name]._active_rules.derivative if name in defined_ops else None
