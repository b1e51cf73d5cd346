"""Arithmetic on a jagged nested tensor: one node of autograd's graph, from buffer to buffer; see `jagged`.

The other operand is a jagged tensor with the same offsets, or a number, which PyTorch passes as a tensor without dims.
A node keeps what its gradients are made of, and a product with a number does not keep its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.internals import (
    PLAIN,
    SingleLevelFunction,
    below_autograd,
    is_plain_jagged,
    jagged_nested,
    jagged_structure,
    set_autocast_off,
)
from . import arithmetic
from .jagged import has_plain_buffer, is_untracked, same_structure

__all__ = ["ARITHMETIC", "arithmetic_call"]

Pair = tuple[Any, Any]


class _Operator(NamedTuple):
    """An operator of two arguments, x and other.

    Attributes:
        forward: of two buffers.
        backward: ``(module, grad, needed, x, other) -> gradients`` by the functions of ``module``: torch, for buffers, or
            `arithmetic`, for nested tensors and with derivatives.
        keeps: ``(needed) -> kept``: whether x and other are needed for these gradients.
    """

    forward: Callable[..., Tensor]
    backward: Callable[[Any, Any, Sequence[bool], Any, Any], Pair]
    keeps: Callable[[Sequence[bool]], tuple[bool, bool]]


class _OnBuffers(SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, operator: _Operator, x: Any, other: Any) -> Any:
        structure, nested = jagged_structure(x), is_plain_jagged(other)
        a, b = x._values, other._values if nested else other
        with below_autograd():
            values = operator.forward(a, b)
        keep_x, keep_other = operator.keeps(ctx.needs_input_grad[1:])
        kept = (a if keep_x else None, b if keep_other and isinstance(b, Tensor) else None)
        # dense ones first: they say what was changed in place, where a nested one fails to
        ctx.save_for_backward(*kept, x if keep_x else None, other if keep_other and nested else None)
        ctx.operator, ctx.structure, ctx.with_itself = operator, structure, other is x
        ctx.number = None if isinstance(other, Tensor) else other
        return jagged_nested(values, structure)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        needed, structure, (a, b, x, other) = ctx.needs_input_grad[1:], ctx.structure, ctx.saved_tensors
        b = ctx.number if b is None else b
        if is_untracked(grad, structure):
            g = grad._values
            with below_autograd():
                found = ctx.operator.backward(torch, g, needed, a, b)
                if ctx.with_itself:  # autograd would add the two as nested tensors
                    found = torch.add(*found), None
            # a gradient that is the cotangent itself stays so
            return None, *[grad if f is g else f if f is None else jagged_nested(f, structure) for f in found]
        with set_autocast_off():
            return None, *ctx.operator.backward(arithmetic, grad, needed, x, b if other is None else other)


def arithmetic_call(name: str, x: Any, other: Any, **options: Any) -> Any:
    """Make a call by one node.

    Args:
        name: of the aten operator, one of `ARITHMETIC`.
        x: what it is called with.
        other: what it is called with.
        options: what it is called with.

    Returns:
        The result; None where this does not take the call.
    """
    if any(value not in (None, 1) for value in options.values()) or not has_plain_buffer(x):
        return None
    if is_plain_jagged(other):
        a, b = x._values, other._values
        if type(b) not in PLAIN or a.dtype is not b.dtype or a.shape != b.shape:
            return None
        if not same_structure(jagged_structure(x), jagged_structure(other)):
            return None
        if not (x.requires_grad or other.requires_grad):
            return None
    elif not x.requires_grad or not _is_number(other):
        return None
    apply: Callable[..., Any] = _OnBuffers.apply  # type: ignore[attr-defined]
    return apply(ARITHMETIC[name], x, other)


def _is_number(x: Any) -> bool:
    """Whether it is real, and a constant."""
    if isinstance(x, Tensor):
        return type(x) in PLAIN and not (x.is_nested or x.dim() or x.requires_grad or x.is_complex())
    return type(x) in (int, float)


def _nothing(needed: Sequence[bool]) -> tuple[bool, bool]:
    return False, False


def _add_backward(module: Any, g: Any, needed: Sequence[bool], x: Any, other: Any) -> Pair:
    return g if needed[0] else None, g if needed[1] else None


def _sub_backward(module: Any, g: Any, needed: Sequence[bool], x: Any, other: Any) -> Pair:
    return g if needed[0] else None, module.mul(g, -1) if needed[1] else None


def _mul_backward(module: Any, g: Any, needed: Sequence[bool], x: Any, other: Any) -> Pair:
    return module.mul(g, other) if needed[0] else None, module.mul(g, x) if needed[1] else None


def _div_backward(module: Any, g: Any, needed: Sequence[bool], x: Any, other: Any) -> Pair:
    of_x = module.div(g, other) if needed[0] else None
    if not needed[1]:
        return of_x, None
    return of_x, module.mul(module.mul(g, -1), module.div(module.div(x, other), other))


_ADD = _Operator(torch.add, _add_backward, _nothing)
_SUB = _Operator(torch.sub, _sub_backward, _nothing)
_MUL = _Operator(torch.mul, _mul_backward, lambda needed: (needed[1], needed[0]))
_DIV = _Operator(torch.div, _div_backward, lambda needed: (needed[1], True))

ARITHMETIC = {
    "add.Tensor": _ADD,
    "add.Scalar": _ADD,
    "sub.Tensor": _SUB,
    "sub.Scalar": _SUB,
    "mul.Tensor": _MUL,
    "div.Tensor": _DIV,
}
