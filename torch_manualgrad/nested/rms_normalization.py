"""rms_norm of nested tensors; see `normalization`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.rule import formula
from .conversion import on_nested
from .fast_path import fast_path, is_plain_call
from .normalization import affine, dense_tail, last_dims, normalization_jvp, parameter_gradient, parameters_change
from .ragged import Ragged
from .segments import wide

__all__ = ["rms_norm"]


@formula(kernel=("default",))
def rms_norm_backward_nested(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Cotangents of $x$ and weight, given that of rms_norm.

    $r (h - x^ mean(x^ h))$ with $x^ = r x$ and $h = g weight$, and $sum g x^$.

    Args:
        grad: $g$, the shape of ``input``.
        input: $x$, packed, (*rows, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        rstd: $r$ as `rms_norm_nested` returns it, (*rows, 1, ..., 1); differentiable.
        weight: of shape ``normalized_shape``, or None for 1.
        grad_input_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The gradients, of the shapes of $x$ and of ``normalized_shape``.

    Note:
        Where not differentiable: nowhere for $eps > 0$; with $eps = 0$, where all $x$ are 0, the result is nan.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019); ATen _fused_rms_norm_backward.
    """
    wanted_x, wanted_weight = grad_input_mask
    g, r = wide(grad), wide(rstd)
    normalized = wide(input) * r
    grad_x = grad_weight = input.new_zeros(0)
    if wanted_x:
        h = g if weight is None else g * weight
        grad_x = normalization_jvp(h, normalized, r, last_dims(normalized_shape), False).to(input.dtype)
    if wanted_weight:
        grad_weight = parameter_gradient(g * normalized, input if weight is None else weight, normalized_shape)
    return grad_x, grad_weight


@rms_norm_backward_nested.impl("default")
def _rms_norm_gradients(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    if input.dtype in (torch.float16, torch.bfloat16) or (weight is not None and weight.dtype != input.dtype):
        reference = rms_norm_backward_nested.reference
        return reference(grad, input, normalized_shape, rstd, weight, grad_input_mask)
    wanted_x, wanted_weight = grad_input_mask
    dims = last_dims(normalized_shape)
    # sum g x^ and mean x^ h share x g; working in place saves as much time as the arithmetic costs
    grad_x = grad_weight = input.new_zeros(0)
    product = grad * input
    if wanted_weight:
        grad_weight = torch.mul(product, rstd).reshape(-1, *normalized_shape).sum(0)
    if wanted_x:
        if weight is not None:
            product.mul_(weight)
        factor = product.mean(dims, keepdim=True).mul_(rstd.square())
        h = grad if weight is None else grad * weight
        grad_x = torch.addcmul(h, input, factor, value=-1).mul_(rstd)
    return grad_x, grad_weight


@formula(kernel=("default",))
def rms_norm_nested(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """rms_norm of packed values: $r x weight$, and $r = (mean x^2 + eps)^(-1/2)$, both differentiable in every mode.

    Args:
        input: $x$, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        weight: of shape ``normalized_shape``, or None.
        eps: added to the mean square.

    Returns:
        The shape of $x$, and (*, 1, ..., 1).

    Note:
        Where not differentiable: as `rms_norm_backward_nested`.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    x = wide(input)
    r = (x.square().mean(last_dims(normalized_shape), keepdim=True) + eps).rsqrt()
    return affine(x * r, weight, None).to(input.dtype).contiguous(), r


@rms_norm_nested.impl("default")
def _(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> Any:
    return rms_norm_nested.reference(input, normalized_shape, weight, eps)


@rms_norm_nested.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return inputs.input, inputs.weight, inputs.normalized_shape, output[1]


@rms_norm_nested.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor | None, grad_rstd: Tensor | None) -> Any:
    input, weight, shape, rstd = saved
    wanted = [ctx.needs_input_grad[n] for n in ("input", "weight")]
    found: list[Any] = [None] * 2
    if grad is not None:
        given = rms_norm_backward_nested(grad, input, shape, rstd, weight, wanted)
        found = [g if yes else None for g, yes in zip(given, wanted)]
    if grad_rstd is not None:  # only if the backward itself is differentiated
        more = (-(grad_rstd * rstd.pow(3) / max(math.prod(shape), 1)) * wide(input)).to(input.dtype)
        found[0] = more if found[0] is None else found[0] + more
    return {"input": found[0], "weight": found[1]}


@rms_norm_nested.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    x, r = wide(inputs.input), output[1]
    normalized = x * r
    change = dr = None
    if tangents.input is not None:
        t = wide(tangents.input)
        along = (normalized * t).mean(last_dims(inputs.normalized_shape), keepdim=True)
        dr = -r.square() * along
        change = affine(r * (t - normalized * along), inputs.weight, None)
    return parameters_change(change, normalized, tangents.weight, None, output[0]), dr


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float) -> Any:
    result, rstd = rms_norm_nested.reference(input, shape, weight, eps)
    return result, (input, weight, rstd)


def _rms_norm_backward(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    input, weight, rstd = saved
    found = _rms_norm_gradients(grad, input, shape, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


def _rms_norm_backward_again(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    """The backward with $r$ computed again, as a function of $x$."""
    input, weight, _ = saved
    _, rstd = rms_norm_nested.op(input, shape, weight, eps)
    found = rms_norm_backward_nested(grad, input, shape, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


_fast_rms_norm = fast_path("rms_norm_nested", 2, _rms_norm, _rms_norm_backward, _rms_norm_backward_again)


@on_nested
def rms_norm(
    input: Ragged, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Ragged:
    """$x / sqrt(mean(x^2) + eps) * weight$ over the last dims of each component, right in all six modes.

    Args:
        input: real; every ragged dim is in front of the normalized ones.
        normalized_shape: the sizes of the last dims.
        weight: of shape ``normalized_shape``, or None.
        eps: added to the mean square; None for the dtype's machine epsilon (float32's for half precision).

    Returns:
        The components of ``input``.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a dtype that is not floating point.

    Note:
        Where not differentiable: nowhere for $eps > 0$.

    References:
        `rms_norm_nested`.
    """
    shape, values = dense_tail(input, normalized_shape, weight)
    if eps is None:
        eps = torch.finfo(torch.promote_types(values.dtype, torch.float32)).eps
    if is_plain_call(values, weight):
        normalized = _fast_rms_norm(values, weight, shape, eps)
    else:
        normalized, _ = rms_norm_nested.op(values, shape, weight, eps)
    return input.like(normalized if input.sizes is None else normalized.reshape(input.values.shape))
