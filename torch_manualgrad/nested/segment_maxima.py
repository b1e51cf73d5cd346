"""The operator amax on segments; see `segments`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.rule import formula
from .segments import largest, repeated, segment_sum, with_backward

__all__ = ["maxima", "segment_amax", "segment_amax_backward"]


@formula(kernel=("cpu", "cuda"))
def segment_amax(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """The largest entry of each segment; nan if it holds one, $-inf$ if it is empty.

    Args:
        values: $x$, (*, T, *), $T$ long in ``dim``; real.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        As `segment_sum`.

    Raises:
        RuntimeError: as `segment_sum`.

    Note:
        Where not differentiable: at ties, whose entries share the gradient equally, as in ATen's amax.

    References:
        ATen amax.
    """
    return largest(values, offsets, dim)


def _attained(values: Tensor, result: Tensor, offsets: Tensor, dim: int) -> Tensor:
    result = repeated(result.detach(), offsets, values.shape[dim], dim)
    values = values.detach()
    return ((values == result) | values.isnan()).to(values.dtype)


@formula
def segment_amax_backward(grad: Tensor, values: Tensor, result: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of its segments' maxima: $g / count$ on the entries that attain them, else 0.

    Args:
        grad: $g$, (*, B, *), $B$ long in ``dim``.
        values: $x$, (*, T, *); a constant.
        result: the maxima; only compared with $x$, a constant.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        The shape and dtype of ``values``.

    Raises:
        RuntimeError: as `segment_sum`.

    Note:
        Where not differentiable: as `segment_amax`.

    References:
        ATen scale_grad_by_count.
    """
    attained = _attained(values, result, offsets, dim)
    share = grad / segment_sum(attained, offsets, dim).clamp(min=1)
    return repeated(share, offsets, values.shape[dim], dim) * attained


maxima = with_backward(
    segment_amax,
    ("values", "result"),
    lambda grad, values, result, offsets, count, dim: segment_amax_backward(grad, values, result, offsets, dim),
)


@segment_amax.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    values, offsets, dim = inputs
    t = tangents.values
    if t is None:
        return None
    attained = _attained(values, output, offsets, dim)
    return segment_sum(attained * t, offsets, dim) / segment_sum(attained, offsets, dim).clamp(min=1)
