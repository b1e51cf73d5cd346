"""The backwards of views, and scatters of views: zeros, or a copy, in which the entries of a view are overwritten.

Args:
    size, stride, storage_offset: of the view of the storage; without an offset, it starts where $x$ does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, real, rule

from .common import of_dtype

__all__ = ["as_strided_backward", "as_strided_scatter_backward", "as_strided_scatter_jvp", "permute_backwards"]


def _places(size: Sequence[int], stride: Sequence[int], storage_offset: int | None, start: int, like: Tensor) -> Tensor:
    """Where the entries of a strided view lie in the flattened tensor, which is contiguous and starts at ``start``."""
    found = torch.full((), 0 if storage_offset is None else storage_offset - start, device=like.device)
    for n, step in zip(size, stride):
        found = found[..., None] + step * torch.arange(n, device=like.device)
    return found.reshape(-1)


def _end(size: Sequence[int], stride: Sequence[int], storage_offset: int) -> int:
    """One more than the last place of a strided view, or 0 if it has no entries."""
    return storage_offset + 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(n > 0 for n in size) else 0


def _may_overlap(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two entries may share a place: in ascending order, some stride is no larger than the extent so far."""
    extent = 0
    for step, n in sorted((s, n) for s, n in zip(stride, size) if n > 1):
        if step <= extent:
            return True
        extent += step * (n - 1)
    return False


@formula
def as_strided_backward(
    grad: Tensor,
    self_sizes: Sequence[int],
    self_strides: Sequence[int],
    self_offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None,
) -> Tensor:
    """Cotangent of $x$, given that of a strided view of its storage: at each place, the sum over the view's entries there.

    Args:
        grad: cotangent of the view, of shape ``size``.
        self_sizes, self_strides, self_offset: where $x$ lies in its storage.

    Returns:
        Of shape ``self_sizes``. Where several entries of $x$ share a place, they share its cotangent equally; places
        outside of $x$ have none.

    References:
        ATen as_strided_backward.
    """
    offset = self_offset if storage_offset is None else storage_offset
    start = min(offset, self_offset)
    end = max(_end(size, stride, offset), _end(self_sizes, self_strides, self_offset), start)
    shown = _places(size, stride, offset, start, grad)
    own = _places(self_sizes, self_strides, self_offset, start, grad)
    found = grad.new_zeros(end - start).index_add(0, shown, grad.reshape(-1))
    if _may_overlap(self_sizes, self_strides):
        count = torch.zeros_like(found).index_add(0, own, grad.new_ones(own.shape))
        found = found / torch.where(count == 0, 1, count)
    return found.index_select(0, own).reshape(self_sizes)


def _is_permutation(grad: Tensor, fwd_dims: Sequence[int]) -> str:
    n = grad.dim()
    if sorted(d % n if -n <= d < n else d for d in fwd_dims) == list(range(n)):
        return ""
    return f"fwd_dims: expected each of {n} dims once, got {list(fwd_dims)}"


@formula(requires=_is_permutation)
def permute_backwards(grad: Tensor, fwd_dims: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given that of ``x.permute(fwd_dims)``: permuted back.

    Args:
        grad: cotangent of the result.
        fwd_dims: the dims of $x$ in the order of the result's; negative ones count from the last.

    Returns:
        The shape of $x$.

    References:
        ATen permute_backwards.
    """
    n = len(fwd_dims)
    place = {d % n: k for k, d in enumerate(fwd_dims)}
    return grad.permute([place[d] for d in range(n)])


@formula
def as_strided_scatter_backward(
    grad: Tensor,
    self_offset: int,
    src_sizes: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of $x$ and $y$, given that of $x$ with $y$ written to a strided view of it: each where it is visible.

    Args:
        grad: cotangent of the result.
        self_offset: where $x$, which is contiguous, starts in its storage.
        src_sizes: of $y$.

    Returns:
        The shape of ``grad``, and ``src_sizes``.

    Note:
        Where not differentiable: where two entries of $y$ share a place, one remains, and both get the cotangent.

    References:
        ATen as_strided_scatter_backward, which returns for x the cotangent that belongs to y.
    """
    places = _places(size, stride, storage_offset, self_offset, grad)
    flat = grad.reshape(-1)
    of_self = flat.index_fill(0, places, 0).reshape(grad.shape)
    return of_self, flat.index_select(0, places).reshape(src_sizes)


@formula
def as_strided_scatter_jvp(
    self_p: Tensor,
    self_t: Tensor | None,
    src_p: Tensor,
    src_t: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None,
) -> Tensor:
    """Tangent of $x$ with $y$ written to a strided view of it: that of $x$ with that of $y$ written there.

    Args:
        self_p: $x$, contiguous.
        src_p: $y$, of shape ``size``.
        self_t, src_t: tangents; None for zero.

    Returns:
        The shape of $x$.

    Note:
        Where not differentiable: as `as_strided_scatter_backward`.

    References:
        derivatives.yaml, as_strided_scatter, which is linear.
    """
    dx = torch.zeros_like(self_p) if self_t is None else self_t
    dy = torch.zeros_like(src_p) if src_t is None else src_t.to(self_p.dtype)
    places = _places(size, stride, storage_offset, self_p.storage_offset(), self_p)
    return dx.reshape(-1).index_copy(0, places, dy.to(dx.dtype).reshape(-1)).reshape(self_p.shape)


def _as_strided_scatter_vjp(
    grad: Tensor,
    self_storage_offset: int,
    src_sizes: Any,
    src_dtype: torch.dtype,
    size: Any,
    stride: Any,
    storage_offset: int | None,
) -> tuple[Tensor, Tensor]:
    of_self, of_src = as_strided_scatter_backward(grad, self_storage_offset, src_sizes, size, stride, storage_offset)
    return of_self, of_dtype(of_src, src_dtype)


linear_in("aten::select_backward", {"grad_output": lambda grad, dim, index: grad.select(dim, index)})
linear_in(
    "aten::slice_backward",
    {"grad_output": lambda grad, dim, start, end, step: torch.ops.aten.slice(grad, dim, start, end, step)},
)
linear_in(
    "aten::diagonal_backward", {"grad_output": lambda grad, offset, dim1, dim2: grad.diagonal(offset, dim1, dim2)}
)
linear_in("aten::unfold_backward", {"grad_in": lambda grad, dim, size, step: grad.unfold(dim, size, step)})
linear_in(
    "aten::select_scatter",
    {
        "self": lambda grad, dim, index, src_sizes: grad.select_scatter(grad.new_zeros(src_sizes), dim, index),
        "src": lambda grad, dim, index, src_dtype: of_dtype(grad.select(dim, index), src_dtype),
    },
    improves="missing",
    defer_to_stock=real,
)
linear_in(
    "aten::slice_scatter",
    {
        "self": lambda grad, dim, start, end, step, src_sizes: grad.slice_scatter(
            grad.new_zeros(src_sizes), dim, start, end, step
        ),
        "src": lambda grad, dim, start, end, step, src_dtype: of_dtype(
            torch.ops.aten.slice(grad, dim, start, end, step), src_dtype
        ),
    },
    improves="missing",
    defer_to_stock=real,
)
linear_in(
    "aten::diagonal_scatter",
    {
        "self": lambda grad, offset, dim1, dim2, src_sizes: grad.diagonal_scatter(
            grad.new_zeros(src_sizes), offset, dim1, dim2
        ),
        "src": lambda grad, offset, dim1, dim2, src_dtype: of_dtype(grad.diagonal(offset, dim1, dim2), src_dtype),
    },
)
rule(
    "aten::as_strided_scatter",
    vjp={("self", "src"): _as_strided_scatter_vjp},
    jvp={"result": as_strided_scatter_jvp},
    kind="linear",
    improves="values",
    source="ATen derivatives.yaml; the cotangent of self is that of a copy in which the view is written to",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator"),
)
