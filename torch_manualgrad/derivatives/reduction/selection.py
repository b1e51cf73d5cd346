"""Operators that return entries of their input with the indices: max, min, median and others along a dim, sort, topk, cummax.

The entry at an index receives the cotangent and provides the tangent. Of equal entries, the forward has chosen one.

Args:
    sizes: the shape of $x$.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .dims import restore_reduced_dims


@formula
def value_selecting_reduction_backward(
    grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool
) -> Tensor:
    """Cotangent of $x$, given that of selected entries: zero, with the cotangents at the indices, all of them distinct.

    Args:
        grad: cotangent of the entries.
        dim: the dim along which they were selected.
        indices: the indices of the entries along ``dim``, the shape of ``grad``.
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
    """Tangent of selected entries: the tangent of $x$ at the indices.

    Args:
        input: tangent of $x$.
        dim: the dim along which the entries were selected.
        indices: the indices of the entries along ``dim``.
        keepdim: whether ``indices`` has ``dim``.

    Returns:
        The shape of ``indices``.
    """
    found = input.gather(dim, restore_reduced_dims(indices, input.dim(), [dim], keepdim))
    return found if keepdim or not input.dim() else found.squeeze(dim)


@formula
def cummaxmin_backward(grad: Tensor, sizes: Sequence[int], indices: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of its cumulative maxima or minima: each entry gets the sum where it was chosen.

    Args:
        grad: cotangent of the extrema.
        indices: the indices of the extrema along ``dim``.
        dim: the dim along which they run.

    Returns:
        ``sizes``, in the dtype of ``grad``.
    """
    return grad.new_zeros(sizes).scatter_add(dim, indices, grad)


# -- the rules --------------------------------------------------------------------------------------------------------

_MAY_KEEP_DIM: tuple[str, ...] = ("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode", "kthvalue")
for _names, _constants in ((_MAY_KEEP_DIM, {}), (("sort", "sort.stable", "topk"), {"keepdim": True})):
    for _name in _names:
        rule(
            f"aten::{_name}",
            vjp={"self": value_selecting_reduction_backward.bind(grad="grad_values", sizes="self_sizes", **_constants)},
            jvp={"values": gather_with_keepdimed_indices.bind(input="self_t", **_constants)},
            source="ATen value_selecting_reduction_backward, gather_with_keepdimed_indices",
            finite=True,
        )
for _name in ("cummax", "cummin"):
    rule(
        f"aten::{_name}",
        vjp={"self": cummaxmin_backward.bind(grad="grad_values", sizes="self_sizes")},
        jvp={"values": gather_with_keepdimed_indices.bind(input="self_t", keepdim=True)},
        source="ATen cummaxmin_backward",
        finite=True,
    )
