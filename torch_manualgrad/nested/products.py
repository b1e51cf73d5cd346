"""The two matrix products of packed rows with one matrix per component; each is the derivative of the other.

With $s(t)$ the component that position $t$ belongs to,

    rows:  $y_t = x_t w_s(t)$,                           inner:  $z_s = sum_(s(t) = s) x_t^T y_t$.

Both are bilinear. The vjps, $(g w^H, x^H g)$, are taken component by component: `nested_rows` gives the first,
`nested_inner` the second.

On the CPU a loop over the components reads the offsets. Elsewhere the computation does not synchronize: components are
cut into tiles of one size $b$, at most $T // b + B$ of them, however the rows are distributed. $b$ is about the mean
length, so the work is at most three times the minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.rule import formula
from .packing import segments

__all__ = ["matmul_backward_nested", "nested_inner", "nested_rows"]

_LARGEST_TILE = 128


class _Tiles:
    """Rows of components of unequal lengths as tiles of equal ones, without reading the lengths."""

    def __init__(self, offsets: Tensor, count: int) -> None:
        components = offsets.shape[0] - 1
        mean = max(count // components, 1)
        size = min(1 << (mean - 1).bit_length(), _LARGEST_TILE)
        tiles = count // size + components
        of_each = (offsets.diff() + (size - 1)) // size
        ends = of_each.cumsum(0)
        first = ends - of_each
        numbers = torch.arange(tiles, device=offsets.device)
        self.which = torch.bucketize(numbers, ends, right=True).clamp(max=components - 1)
        starts = offsets[self.which] + (numbers - first[self.which]) * size
        positions = starts[:, None] + torch.arange(size, device=offsets.device)
        self.empty = (positions >= offsets[self.which + 1][:, None]).flatten()
        self.positions = positions.flatten().clamp(0, count - 1)
        ids = segments(offsets, count)
        slots = first[ids] * size + torch.arange(count, device=offsets.device) - offsets[ids]
        self.slots = slots.clamp(0, tiles * size - 1)
        self.shape = (tiles, size)

    def cut(self, x: Tensor) -> Tensor:
        """(P, T, k) -> (P, tiles, b, k), zeros where a tile has no row."""
        filled = x.index_select(1, self.positions).masked_fill(self.empty[:, None], 0)
        return filled.reshape(x.shape[0], *self.shape, x.shape[2])

    def joined(self, y: Tensor) -> Tensor:
        """The inverse of `cut`."""
        return y.flatten(1, 2).index_select(1, self.slots)


def _lead(x: Tensor, kept: int) -> Tensor:
    """All dims but the last ``kept`` flattened into one."""
    lead = x.shape[: x.dim() - kept].numel()
    return x.resolve_conj().reshape(lead, *x.shape[x.dim() - kept :])


@formula(kernel=("default",))
def nested_rows(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """Each packed row times its component's matrix, $y_t = x_t w_s(t)$.

    Args:
        x: (*b, T, k).
        w: (*b, B, k, m), the dtype of $x$.
        offsets: (B + 1,), int32 or int64.

    Returns:
        (*b, T, m).

    Note:
        Where not differentiable: nowhere, it is bilinear.

    References:
        ATen matmul_nested, one matrix product per component.
    """
    ids = segments(offsets, x.shape[-2])
    return (x.unsqueeze(-2) @ w.index_select(-3, ids)).squeeze(-2).contiguous()


@nested_rows.impl("default")
def _(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    shape = (*x.shape[:-1], w.shape[-1])
    if 0 in shape or not x.shape[-1]:
        return x.new_zeros(shape)
    rows, matrices = _lead(x, 2), _lead(w, 3)
    if x.device.type != "cpu":
        tiles = _Tiles(offsets, x.shape[-2])
        return tiles.joined(tiles.cut(rows) @ matrices.index_select(1, tiles.which)).reshape(shape)
    result = rows.new_empty(rows.shape[0], *shape[-2:])
    lengths = offsets.diff().tolist()
    if len(rows) == 1:
        for a, m, out in zip(rows[0].split(lengths), matrices[0].unbind(), result[0].split(lengths)):
            torch.mm(a, m, out=out)
    else:
        for a, m, out in zip(rows.split(lengths, 1), matrices.unbind(1), result.split(lengths, 1)):
            out.copy_(torch.bmm(a, m))
    return result.reshape(shape)


@formula(kernel=("default",))
def nested_inner(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Each component's $x^T y$, the sum over its packed rows of $x_t^T y_t$; nothing is conjugated.

    Args:
        x: (*b, T, k).
        y: (*b, T, m), the dtype of $x$.
        offsets: (B + 1,), int32 or int64.

    Returns:
        (*b, B, k, m), 0 for a component without rows.

    Note:
        Where not differentiable: nowhere, it is bilinear.

    References:
        ATen matmul_nested, one matrix product per component.
    """
    products = x.unsqueeze(-1) * y.unsqueeze(-2)
    zeros = products.new_zeros(*x.shape[:-2], offsets.shape[0] - 1, x.shape[-1], y.shape[-1])
    return zeros.index_add(-3, segments(offsets, x.shape[-2]), products)


@nested_inner.impl("default")
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    shape = (*x.shape[:-2], offsets.shape[0] - 1, x.shape[-1], y.shape[-1])
    if 0 in shape or not x.shape[-2]:
        return x.new_zeros(shape)
    left, right = _lead(x, 2), _lead(y, 2)
    if x.device.type != "cpu":
        tiles = _Tiles(offsets, x.shape[-2])
        products = tiles.cut(left).mT @ tiles.cut(right)
        return products.new_zeros(len(left), *shape[-3:]).index_add_(1, tiles.which, products).reshape(shape)
    result = left.new_empty(len(left), *shape[-3:])
    lengths = offsets.diff().tolist()
    if len(left) == 1:
        for a, b, out in zip(left[0].split(lengths), right[0].split(lengths), result[0].unbind()):
            torch.mm(a.T, b, out=out)
    else:
        for a, b, out in zip(left.split(lengths, 1), right.split(lengths, 1), result.unbind(1)):
            out.copy_(torch.bmm(a.mT, b))
    return result.reshape(shape)


@formula
def matmul_backward_nested(
    grad: Tensor, self: Tensor | None, other: Tensor | None, offsets: Tensor, grad_input_mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Cotangents of packed rows $x$ and of one matrix $w$ per component, given that of $x w$: $g w^H$ and $x^H g$.

    Args:
        grad: $g$, (*b, T, m).
        self: $x$, (*b, T, k); None if the cotangent of $w$ is not wanted.
        other: $w$, (*b, B, k, m); None if the cotangent of $x$ is not wanted.
        offsets: (B + 1,), int32 or int64.
        grad_input_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The shapes of $x$ and of $w$.

    Note:
        Where not differentiable: nowhere; differentiable in every mode.

    References:
        ATen matmul_backward_nested.
    """
    grad_self = grad_other = grad.new_zeros(0)
    if grad_input_mask[0]:
        assert other is not None
        grad_self = nested_rows(grad, other.mH, offsets)
    if grad_input_mask[1]:
        assert self is not None
        grad_other = nested_inner(self.conj(), grad, offsets)
    return grad_self, grad_other


def _save(inputs: Any, output: Tensor) -> Any:
    """Save each operand whose counterpart needs a gradient; others may be written to before the backward."""
    first, second, offsets = inputs
    return first if second.requires_grad else None, second if first.requires_grad else None, offsets


def _batched(op: Any) -> Callable[..., Any]:
    """The vmap rule, which adds one dim in front of both operands."""

    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
        *operands, offsets = args
        if in_dims[2] is not None:
            raise ValueError("offsets: vmap goes over a dim of the values, with the same offsets for all")
        front = [
            x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(operands, in_dims)
        ]
        return op(*front, offsets), 0

    return vmap


def _bilinear_jvp(op: Any) -> Callable[..., Any]:
    def jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
        first, second, offsets = inputs
        terms = []
        if tangents[0] is not None:
            terms.append(op(tangents[0], second, offsets))
        if tangents[1] is not None:
            terms.append(op(first, tangents[1], offsets))
        return sum(terms[1:], terms[0]) if terms else None

    return jvp


for _op in (nested_rows, nested_inner):
    _op.impl_save_for_backward(_save)
    _op.impl_vmap(_batched(_op.op))
    _op.impl_jvp(_bilinear_jvp(_op.op))


@nested_rows.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    x, w, offsets = saved
    needed = ctx.needs_input_grad
    wanted = (needed["x"], needed["w"])
    found = matmul_backward_nested(grad, x, w, offsets, wanted)
    grad_x, grad_w = (g if yes else None for g, yes in zip(found, wanted))
    return {"x": grad_x, "w": grad_w, "offsets": None}


@nested_inner.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    x, y, offsets = saved
    needed = ctx.needs_input_grad
    return {
        "x": nested_rows(y.conj(), grad.mT, offsets) if needed["x"] else None,
        "y": nested_rows(x.conj(), grad, offsets) if needed["y"] else None,
        "offsets": None,
    }
