"""layer_norm of nested tensors; see `normalization`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import entry
from ..core.rule import formula
from .conversion import on_nested
from .fast_path import fast_path, is_plain_call
from .normalization import affine, dense_tail, last_dims, normalization_jvp, parameter_gradient, parameters_change
from .ragged import Ragged
from .segments import wide

__all__ = ["layer_norm", "layer_norm_backward_again", "layer_norm_backward_nested"]


@formula(kernel=("default",))
def layer_norm_backward_nested(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, weight and bias, given that of layer_norm.

    $r (h - mean(h) - x^ mean(x^ h))$, $sum g x^$ and $sum g$, with $h = g weight$.

    Args:
        grad: $g$, the shape of ``input``.
        input: $x$, packed, (*rows, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        mean: $m$ as `layer_norm_nested` returns it, (*rows, 1, ..., 1); differentiable.
        rstd: $r$ as `layer_norm_nested` returns it, (*rows, 1, ..., 1); differentiable.
        weight: of shape ``normalized_shape``, or None for 1.
        grad_input_mask: which of the three are wanted; the others come back empty.

    Returns:
        The gradients, of the shapes of $x$ and of ``normalized_shape`` twice.

    Note:
        Where not differentiable: nowhere for $eps > 0$; with $eps = 0$, where all $x$ are equal, the result is nan.

    References:
        ATen layer_norm_backward_nested; Ba, Kiros, Hinton, Layer Normalization (2016).
    """
    wanted_x, wanted_weight, wanted_bias = grad_input_mask
    g, r = wide(grad), wide(rstd)
    normalized = (wide(input) - wide(mean)) * r
    grad_x = grad_weight = grad_bias = input.new_zeros(0)
    if wanted_x:
        h = g if weight is None else g * weight
        grad_x = normalization_jvp(h, normalized, r, last_dims(normalized_shape), True).to(input.dtype)
    like = input if weight is None else weight
    if wanted_weight:
        grad_weight = parameter_gradient(g * normalized, like, normalized_shape)
    if wanted_bias:
        grad_bias = parameter_gradient(g, like, normalized_shape)
    return grad_x, grad_weight, grad_bias


@layer_norm_backward_nested.impl("default")
def _(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    if weight is None and grad_input_mask[1]:  # PyTorch's kernel returns no tensor for it
        return layer_norm_backward_nested.reference(grad, input, normalized_shape, mean, rstd, weight, grad_input_mask)
    bias = input.new_empty(normalized_shape) if weight is None else weight  # read for its shape and dtype only
    # PyTorch's kernel reads the statistics as if they were contiguous
    found = torch.ops.aten.native_layer_norm_backward(
        grad, input, normalized_shape, mean.contiguous(), rstd.contiguous(), weight, bias, grad_input_mask
    )
    return tuple(input.new_zeros(0) if g is None else g for g in found)


@formula(kernel=("default",))
def layer_norm_nested(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm of packed values: $x^ weight + bias$, $m$ and $r$, all three differentiable in every mode.

    Args:
        input: $x$, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.

    Returns:
        The shape of $x$, and twice (*, 1, ..., 1).

    Note:
        Where not differentiable: as `layer_norm_backward_nested`.

    References:
        ATen native_layer_norm, whose own second derivatives are wrong in forward mode.
    """
    dims = last_dims(normalized_shape)
    x = wide(input)
    m = x.mean(dims, keepdim=True)
    r = ((x - m).square().mean(dims, keepdim=True) + eps).rsqrt()
    mixed = weight if weight is not None else bias
    kept = input.dtype if mixed is None or mixed.dtype == input.dtype else x.dtype
    return affine((x - m) * r, weight, bias).to(input.dtype).contiguous(), m.to(kept), r.to(kept)


@layer_norm_nested.impl("default")
@layer_norm_nested.impl_fake
def _(input: Tensor, *rest: Any) -> Any:
    return torch.ops.aten.native_layer_norm(input, *rest)


@layer_norm_nested.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return inputs.input, inputs.weight, inputs.normalized_shape, *output[1:]


@layer_norm_nested.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor | None, grad_mean: Tensor | None, grad_rstd: Tensor | None) -> Any:
    input, weight, shape, mean, rstd = saved
    names = ("input", "weight", "bias")
    wanted = [ctx.needs_input_grad[n] for n in names]
    found: list[Any] = [None] * 3
    if grad is not None:
        given = layer_norm_backward_nested(grad, input, shape, mean, rstd, weight, wanted)
        found = [g if yes else None for g, yes in zip(given, wanted)]
    if grad_mean is not None or grad_rstd is not None:  # only if the backward itself is differentiated
        more = torch.zeros_like(wide(rstd)) if grad_mean is None else wide(grad_mean)
        if grad_rstd is not None:
            more = more - wide(grad_rstd) * wide(rstd).pow(3) * (wide(input) - wide(mean))
        more = (more / max(math.prod(shape), 1)).expand(input.shape).to(input.dtype)
        found[0] = more if found[0] is None else found[0] + more
    return dict(zip(names, found))


@layer_norm_nested.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    dims = last_dims(inputs.normalized_shape)
    x, m, r = wide(inputs.input), wide(output[1]), wide(output[2])
    normalized = (x - m) * r
    change = dm = dr = None
    if tangents.input is not None:
        t = wide(tangents.input)
        along, dm = (normalized * t).mean(dims, keepdim=True), t.mean(dims, keepdim=True)
        dr = (-r.square() * along).to(output[2].dtype)
        change = affine(r * (t - dm - normalized * along), inputs.weight, None)
        dm = dm.to(output[1].dtype)
    change = parameters_change(change, normalized, tangents.weight, tangents.bias, output[0])
    return change, dm, dr


_native_layer_norm_backward = entry(torch.ops.aten.native_layer_norm_backward.default)


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float) -> Any:
    result, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
    return result, (input, weight, bias, mean, rstd)


def _layer_norm_backward(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    input, weight, bias, mean, rstd = saved
    return _native_layer_norm_backward(grad, input, shape, mean, rstd, weight, bias, needed)


def layer_norm_backward_again(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    """The backward with $m$ and $r$ computed again, as functions of $x$."""
    input, weight, bias, _, _ = saved
    _, mean, rstd = layer_norm_nested.op(input, shape, weight, bias, eps)
    found = layer_norm_backward_nested(grad, input, shape, mean, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


_fast_layer_norm = fast_path("layer_norm_nested", 3, _layer_norm, _layer_norm_backward, layer_norm_backward_again)


@on_nested
def layer_norm(
    input: Ragged,
    normalized_shape: int | Sequence[int | None],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Ragged:
    """$(x - mean) / sqrt(var + eps) * weight + bias$ over the last dims of each component, right in all six modes.

    Args:
        input: real; every ragged dim is in front of the normalized dims, or ``normalized_shape`` has None in its place.
        normalized_shape: the sizes of the last dims. With a None, mean and variance are taken over all of each
            component's last dims, including the ragged one, and weight and bias must be None.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.

    Returns:
        The components of ``input``.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a dtype that is not floating point.

    Note:
        Where not differentiable: nowhere for $eps > 0$.

    References:
        `layer_norm_nested`.
    """
    if not isinstance(normalized_shape, int) and None in normalized_shape:
        return _ragged_layer_norm(input, normalized_shape, weight, bias, eps)
    shape, values = dense_tail(input, normalized_shape, weight, bias)
    if is_plain_call(values, weight, bias):
        normalized = _fast_layer_norm(values, weight, bias, shape, eps)
    else:
        normalized, _, _ = layer_norm_nested.op(values, shape, weight, bias, eps)
    return input.like(normalized if input.sizes is None else normalized.reshape(input.values.shape))


def _ragged_layer_norm(x: Ragged, normalized_shape: Sequence[Any], weight: Any, bias: Any, eps: float) -> Ragged:
    shape = list(normalized_shape)
    if len(shape) >= x.dim() or tuple(shape) != x.shape[-len(shape) :] or x.sizes is not None:
        raise ValueError(f"normalized_shape: {shape} is not the end of the shape {x.shape}, with one ragged dim")
    if weight is not None or bias is not None:
        raise ValueError("weight and bias: expected None, as a ragged dim is normalized and they cannot be ragged")
    if not x.values.is_floating_point():
        raise TypeError(f"input: expected a floating point dtype, got {x.values.dtype}")
    values, dim = wide(x.values), x.packed_dim
    ids = x.segment_ids().long()
    others = [d for d in range(values.dim() - len(shape), values.dim()) if d != dim]
    dense = math.prod([values.shape[d] for d in others])
    expanded = [-1 if d == dim else 1 for d in range(values.dim())]
    counts = (x.lengths * dense).clamp(min=1).to(values.dtype).reshape(expanded)

    def average(t: Tensor) -> Tensor:
        """The mean over each component, at all of its positions."""
        partial = t.sum(others, keepdim=True) if others else t
        sizes = [len(x.offsets) - 1 if d == dim else n for d, n in enumerate(partial.shape)]
        total = partial.new_zeros(sizes).index_add(dim, ids, partial)
        return (total / counts).index_select(dim, ids)

    centred = values - average(values)
    return x.like((centred * (average(centred.square()) + eps).rsqrt()).to(x.values.dtype))
