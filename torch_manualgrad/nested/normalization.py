"""Shared parts of layer_norm and rms_norm.

Both norms are $x^ = r (x - m)$ over the last dims, with $r = (mean(|x - m|^2) + eps)^(-1/2)$; $m$ is the mean
of $x$ for layer_norm and 0 for rms_norm. For a change $t$ of $x$,

    dx^ = r (t - mean(t) - x^ mean(x^ t)),        dr = -r^2 mean(x^ t),        dm = mean(t),

without $mean(t)$ for rms_norm. $t -> dx^$ is self-adjoint: the same expression is the vjp. $m$ and $r$ are outputs of
the operators here, differentiable like the rest, so formulas in terms of $x$, $m$ and $r$ are right in every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .ragged import Ragged

__all__ = ["affine", "dense_tail", "last_dims", "normalization_jvp", "parameter_gradient", "parameters_change"]


def last_dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def normalization_jvp(t: Tensor, normalized: Tensor, r: Tensor, dims: list[int], centred: bool) -> Tensor:
    """$dx^$ of the module's docstring, for the change $t$; $r$ broadcasts."""
    along = (normalized * t).mean(dims, keepdim=True)
    return r * (t - t.mean(dims, keepdim=True) - normalized * along if centred else t - normalized * along)


def affine(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias


def parameter_gradient(per_place: Tensor, parameter: Tensor | None, normalized_shape: Sequence[int]) -> Tensor:
    """The sum over the positions in front of the normalized dims."""
    total = per_place.reshape(-1, *normalized_shape).sum(0) if per_place.dim() > len(normalized_shape) else per_place
    return total if parameter is None else total.to(parameter.dtype)


def parameters_change(
    change: Tensor | None, normalized: Tensor, weight_t: Tensor | None, bias_t: Tensor | None, like: Tensor
) -> Tensor | None:
    """The tangent ``change`` plus the contributions of the parameters' tangents, in the shape and dtype of the result."""
    if weight_t is not None:
        change = normalized * weight_t if change is None else change + normalized * weight_t
    if bias_t is not None:
        change = bias_t if change is None else change + bias_t
    return None if change is None else change.expand(like.shape).to(like.dtype)


def dense_tail(
    x: Ragged, normalized_shape: int | Sequence[Any], *parameters: Tensor | None
) -> tuple[list[int], Tensor]:
    """The normalized dims' sizes, and the values with these dims last.

    Raises:
        ValueError: the sizes or the parameters do not fit.
        TypeError: a dtype that is not floating point.
    """
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or len(shape) >= x.dim() or tuple(shape) != x.shape[-len(shape) :]:
        raise ValueError(f"normalized_shape: {shape} is not the end of a nested tensor's shape {x.shape}")
    if not (x.values.is_floating_point()):
        raise TypeError(f"input: expected a floating point dtype, got {x.values.dtype}")
    for name, parameter in zip(("weight", "bias"), parameters):
        if parameter is not None and list(parameter.shape) != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {list(parameter.shape)}")
    return shape, x.values if x.sizes is None else x.values.reshape(-1, *shape)
