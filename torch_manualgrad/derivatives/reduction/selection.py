"""What returns entries of its input with their indices: max, min, median and others along a dim, sort, topk, cummax.

The entry at an index gets the cotangent and gives the tangent; of entries that are equal, the forward has chosen one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, formula, rule

from .dims import restore_reduced_dims
from .norm import spread


@formula
def value_selecting_reduction_backward(
    grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool
) -> Tensor:
    """Cotangent of x, given that of selected entries: zero, with the cotangents at the indices, all of them distinct.

    Args:
        grad: cotangent of the entries.
        dim: along which they were selected.
        indices: of the entries along ``dim``, the shape of ``grad``.
        sizes: the shape of x.
        keepdim: whether ``grad`` and ``indices`` have ``dim``.

    Returns:
        ``sizes``, in the dtype of ``grad``.

    References:
        ATen value_selecting_reduction_backward.
    """
    grad, indices = (restore_reduced_dims(y, len(sizes), [dim], keepdim) for y in (grad, indices))
    return grad.new_zeros(sizes).scatter(dim, indices, grad)


@formula
def gather_with_keepdimed_indices(input: Tensor, dim: int, indices: Tensor, keepdim: bool) -> Tensor:
    """Tangent of selected entries: the tangent of x at the indices.

    Args:
        input: tangent of x.
        dim: along which the entries were selected.
        indices: of the entries along ``dim``.
        keepdim: whether ``indices`` has ``dim``.

    Returns:
        The shape of ``indices``.

    References:
        ATen gather_with_keepdimed_indices.
    """
    found = input.gather(dim, restore_reduced_dims(indices, input.dim(), [dim], keepdim))
    return found if keepdim or not input.dim() else found.squeeze(dim)


@formula
def cummaxmin_backward(grad: Tensor, sizes: Sequence[int], indices: Tensor, dim: int) -> Tensor:
    """Cotangent of x, given that of its cumulative maxima or minima: for each entry, the sum over where it is the extremum.

    Args:
        grad: cotangent of the extrema.
        sizes: the shape of x.
        indices: of the extrema along ``dim``.
        dim: along which they run.

    Returns:
        ``sizes``, in the dtype of ``grad``.

    References:
        ATen cummaxmin_backward.
    """
    return grad.new_zeros(sizes).scatter_add(dim, indices, grad)


def _samples(*arguments: dict[str, Any], empty: dict[str, Any] | None = None) -> Callable[..., Iterable[Sample]]:
    """A matrix with each of the arguments, a number with what is left of the first, and an empty matrix."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = spread((3, 4), dtype, device)
        for position, given in enumerate(arguments):
            yield Sample(x.mT if position % 2 else x, **given)
        first = {name: value for name, value in arguments[0].items() if name not in ("dim", "k")}
        if "k" in arguments[0]:
            first["k"] = 1
        yield Sample(spread((), dtype, device), **first, dim=-1)
        if empty is not None:
            yield Sample(spread((0, 3), dtype, device), **empty)

    return samples


def _reduction(name: str, samples: Callable[..., Iterable[Sample]], **constants: Any) -> None:
    rule(
        f"aten::{name}",
        vjp={"self": value_selecting_reduction_backward.bind(grad="grad_values", sizes="self_sizes", **constants)},
        jvp={"values": gather_with_keepdimed_indices.bind(input="self_t", **constants)},
        source="ATen value_selecting_reduction_backward, gather_with_keepdimed_indices",
        samples=samples,
        finite=True,
    )


_along_dim = _samples({"dim": 0}, {"dim": -1, "keepdim": True}, empty={"dim": 1})
for name in ("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode"):
    _reduction(name, _along_dim)
_reduction("kthvalue", _samples({"k": 2, "dim": 0}, {"k": 3, "keepdim": True}, empty={"k": 1, "dim": 1}))
_reduction("sort", _samples({"dim": 0}, {"descending": True}, empty={"dim": 0}), keepdim=True)
_reduction(
    "sort.stable",
    _samples({"stable": True, "dim": 0}, {"stable": None, "descending": True}, empty={"stable": False, "dim": 0}),
    keepdim=True,
)
_reduction("topk", _samples({"k": 2, "dim": 0}, {"k": 3, "largest": False}, empty={"k": 2, "dim": 1}), keepdim=True)
for name in ("cummax", "cummin"):
    rule(
        f"aten::{name}",
        vjp={"self": cummaxmin_backward.bind(grad="grad_values", sizes="self_sizes")},
        jvp={"values": gather_with_keepdimed_indices.bind(input="self_t", keepdim=True)},
        source="ATen cummaxmin_backward",
        samples=_samples({"dim": 0}, {"dim": -1}, empty={"dim": 0}),
        finite=True,
    )
