"""Norms of nested tensors: layer_norm and rms_norm.

Both norms are x^ = r (x - m) over the last dims, with r = (mean of |x - m|^2 + eps)^(-1/2); m is the mean of x for
layer_norm and 0 for rms_norm. For a change t of x,

    dx^ = r (t - mean(t) - x^ mean(x^ t)),        dr = -r^2 mean(x^ t),        dm = mean(t),

without mean(t) for rms_norm. t -> dx^ is self-adjoint: the same expression is the vjp. m and r are outputs of the
operators here, differentiable like the rest, so formulas in terms of x, m and r are right in every order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.formula import formula
from ..core.internals import entry
from .conversion import on_nested
from .fast_path import fast_path, is_plain_call
from .ragged import Ragged

__all__ = ["layer_norm", "rms_norm"]

# -- norms over dense dims --------------------------------------------------------------------------------------------


def _dims(normalized_shape: Sequence[int]) -> list[int]:
    return list(range(-len(normalized_shape), 0))


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _normalization_jvp(t: Tensor, normalized: Tensor, r: Tensor, dims: list[int], centred: bool) -> Tensor:
    """dx^ of the module's docstring, for the change t; r broadcasts."""
    along = (normalized * t).mean(dims, keepdim=True)
    return r * (t - t.mean(dims, keepdim=True) - normalized * along if centred else t - normalized * along)


def _affine(normalized: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normalized if weight is None else normalized * weight
    return scaled if bias is None else scaled + bias


def _parameter_gradient(per_place: Tensor, parameter: Tensor | None, normalized_shape: Sequence[int]) -> Tensor:
    """The sum over the positions in front of the normalized dims."""
    total = per_place.reshape(-1, *normalized_shape).sum(0) if per_place.dim() > len(normalized_shape) else per_place
    return total if parameter is None else total.to(parameter.dtype)


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
    """Cotangents of x, weight and bias, given that of layer_norm.

    r (h - mean(h) - x^ mean(x^ h)), sum g x^ and sum g, with h = g weight.

    Args:
        grad: g, the shape of ``input``.
        input: x, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        mean: m and r as `layer_norm_nested` returns them, (*, 1, ..., 1); differentiable.
        rstd: m and r as `layer_norm_nested` returns them, (*, 1, ..., 1); differentiable.
        weight: of shape ``normalized_shape``, or None for 1.
        grad_input_mask: which of the three are wanted; the others come back empty.

    Returns:
        The gradients, of the shapes of x and of ``normalized_shape`` twice.

    Note:
        Where not differentiable: nowhere for eps > 0; with eps = 0, where all x are equal, the result is nan.

    References:
        ATen layer_norm_backward_nested; Ba, Kiros, Hinton, Layer Normalization (2016).
    """
    wanted_x, wanted_weight, wanted_bias = grad_input_mask
    g, r = _wide(grad), _wide(rstd)
    normalized = (_wide(input) - _wide(mean)) * r
    grad_x = grad_weight = grad_bias = input.new_zeros(0)
    if wanted_x:
        h = g if weight is None else g * weight
        grad_x = _normalization_jvp(h, normalized, r, _dims(normalized_shape), True).to(input.dtype)
    like = input if weight is None else weight
    if wanted_weight:
        grad_weight = _parameter_gradient(g * normalized, like, normalized_shape)
    if wanted_bias:
        grad_bias = _parameter_gradient(g, like, normalized_shape)
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
    bias = input.new_empty(normalized_shape) if weight is None else weight  # read for its shape and dtype only
    found = torch.ops.aten.native_layer_norm_backward(
        grad, input, normalized_shape, mean, rstd, weight, bias, grad_input_mask
    )
    return tuple(input.new_zeros(0) if g is None else g for g in found)


@formula(kernel=("default",))
def layer_norm_nested(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm of packed values: x^ weight + bias, m and r, all three differentiable in every mode.

    Args:
        input: x, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.

    Returns:
        The shape of x, and twice (*, 1, ..., 1).

    Note:
        Where not differentiable: as `layer_norm_backward_nested`.

    References:
        ATen native_layer_norm, whose own second derivatives are wrong in forward mode.
    """
    dims = _dims(normalized_shape)
    x = _wide(input)
    m = x.mean(dims, keepdim=True)
    r = ((x - m).square().mean(dims, keepdim=True) + eps).rsqrt()
    mixed = weight if weight is not None else bias
    kept = input.dtype if mixed is None or mixed.dtype == input.dtype else x.dtype
    return _affine((x - m) * r, weight, bias).to(input.dtype).contiguous(), m.to(kept), r.to(kept)


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
    if grad_mean is not None or grad_rstd is not None:  # only where the backward itself is differentiated
        more = torch.zeros_like(_wide(rstd)) if grad_mean is None else _wide(grad_mean)
        if grad_rstd is not None:
            more = more - _wide(grad_rstd) * _wide(rstd).pow(3) * (_wide(input) - _wide(mean))
        more = (more / max(_count(shape), 1)).expand(input.shape).to(input.dtype)
        found[0] = more if found[0] is None else found[0] + more
    return dict(zip(names, found))


@layer_norm_nested.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    dims = _dims(inputs.normalized_shape)
    x, m, r = _wide(inputs.input), _wide(output[1]), _wide(output[2])
    normalized = (x - m) * r
    change = dm = dr = None
    if tangents.input is not None:
        t = _wide(tangents.input)
        along, dm = (normalized * t).mean(dims, keepdim=True), t.mean(dims, keepdim=True)
        dr = (-r.square() * along).to(output[2].dtype)
        change = _affine(r * (t - dm - normalized * along), inputs.weight, None)
        dm = dm.to(output[1].dtype)
    change = _parameters_change(change, normalized, tangents.weight, tangents.bias, output[0])
    return change, dm, dr


def _count(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _parameters_change(
    change: Tensor | None, normalized: Tensor, weight_t: Tensor | None, bias_t: Tensor | None, like: Tensor
) -> Tensor | None:
    """The tangent ``change`` plus the parts of the parameters' tangents, in the shape and dtype of the result."""
    if weight_t is not None:
        change = normalized * weight_t if change is None else change + normalized * weight_t
    if bias_t is not None:
        change = bias_t if change is None else change + bias_t
    return None if change is None else change.expand(like.shape).to(like.dtype)


_native_layer_norm_backward = entry(torch.ops.aten.native_layer_norm_backward.default)


def _layer_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int], eps: float) -> Any:
    result, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
    return result, (input, weight, bias, mean, rstd)


def _layer_norm_backward(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    input, weight, bias, mean, rstd = saved
    return _native_layer_norm_backward(grad, input, shape, mean, rstd, weight, bias, needed)


def _layer_norm_backward_again(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    """The backward with m and r computed again, as functions of x."""
    input, weight, bias, _, _ = saved
    _, mean, rstd = layer_norm_nested.op(input, shape, weight, bias, eps)
    found = layer_norm_backward_nested(grad, input, shape, mean, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


_fast_layer_norm = fast_path("layer_norm_nested", 3, _layer_norm, _layer_norm_backward, _layer_norm_backward_again)


@formula(kernel=("default",))
def rms_norm_backward_nested(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    grad_input_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Cotangents of x and weight, given that of rms_norm.

    r (h - x^ mean(x^ h)) with x^ = r x and h = g weight, and sum g x^.

    Args:
        grad: g, the shape of ``input``.
        input: x, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        rstd: r as `rms_norm_nested` returns it, (*, 1, ..., 1); differentiable.
        weight: of shape ``normalized_shape``, or None for 1.
        grad_input_mask: which of the two are wanted; the other comes back empty.

    Returns:
        The gradients, of the shapes of x and of ``normalized_shape``.

    Note:
        Where not differentiable: nowhere for eps > 0; with eps = 0, where all x are 0, the result is nan.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019); ATen _fused_rms_norm_backward.
    """
    wanted_x, wanted_weight = grad_input_mask
    g, r = _wide(grad), _wide(rstd)
    normalized = _wide(input) * r
    grad_x = grad_weight = input.new_zeros(0)
    if wanted_x:
        h = g if weight is None else g * weight
        grad_x = _normalization_jvp(h, normalized, r, _dims(normalized_shape), False).to(input.dtype)
    if wanted_weight:
        grad_weight = _parameter_gradient(g * normalized, input if weight is None else weight, normalized_shape)
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
    dims = _dims(normalized_shape)
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
    """rms_norm of packed values: r x weight, and r = (mean x^2 + eps)^(-1/2), both differentiable in every mode.

    Args:
        input: x, packed, (*, *normalized_shape), real.
        normalized_shape: the sizes of the last dims.
        weight: of shape ``normalized_shape``, or None.
        eps: added to the mean square.

    Returns:
        The shape of x, and (*, 1, ..., 1).

    Note:
        Where not differentiable: as `rms_norm_backward_nested`.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    x = _wide(input)
    r = (x.square().mean(_dims(normalized_shape), keepdim=True) + eps).rsqrt()
    return _affine(x * r, weight, None).to(input.dtype).contiguous(), r


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
    if grad_rstd is not None:  # only where the backward itself is differentiated
        more = (-(grad_rstd * rstd.pow(3) / max(_count(shape), 1)) * _wide(input)).to(input.dtype)
        found[0] = more if found[0] is None else found[0] + more
    return {"input": found[0], "weight": found[1]}


@rms_norm_nested.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    x, r = _wide(inputs.input), output[1]
    normalized = x * r
    change = dr = None
    if tangents.input is not None:
        t = _wide(tangents.input)
        along = (normalized * t).mean(_dims(inputs.normalized_shape), keepdim=True)
        dr = -r.square() * along
        change = _affine(r * (t - normalized * along), inputs.weight, None)
    return _parameters_change(change, normalized, tangents.weight, None, output[0]), dr


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float) -> Any:
    result, rstd = rms_norm_nested.reference(input, shape, weight, eps)
    return result, (input, weight, rstd)


def _rms_norm_backward(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    input, weight, rstd = saved
    found = _rms_norm_gradients(grad, input, shape, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


def _rms_norm_backward_again(needed: Any, grad: Tensor, saved: Any, shape: Sequence[int], eps: float) -> Any:
    """The backward with r computed again, as a function of x."""
    input, weight, _ = saved
    _, rstd = rms_norm_nested.op(input, shape, weight, eps)
    found = rms_norm_backward_nested(grad, input, shape, rstd, weight, needed)
    return [g if yes else None for g, yes in zip(found, needed)]


_fast_rms_norm = fast_path("rms_norm_nested", 2, _rms_norm, _rms_norm_backward, _rms_norm_backward_again)


# -- public functions -------------------------------------------------------------------------------------------------


def _dense_tail(
    x: Ragged, normalized_shape: int | Sequence[Any], *parameters: Tensor | None
) -> tuple[list[int], Tensor]:
    """The normalized dims' sizes, and the values with these dims last.

    Raises:
        ValueError: they do not fit.
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


@on_nested
def layer_norm(
    input: Ragged,
    normalized_shape: int | Sequence[int | None],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Ragged:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dims of each component, right in all six modes.

    Args:
        input: real; every ragged dim is in front of the normalized ones, or ``normalized_shape`` has None in its place.
        normalized_shape: the sizes of the last dims. With a None, mean and variance are over the whole of each
            component's last dims, the ragged one included, and there is no weight and no bias.
        weight: of shape ``normalized_shape``, or None.
        bias: of shape ``normalized_shape``, or None.
        eps: added to the variance.

    Returns:
        The components of ``input``.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: a dtype that is not floating point.

    Note:
        Where not differentiable: nowhere for eps > 0.

    References:
        `layer_norm_nested`.
    """
    if not isinstance(normalized_shape, int) and None in normalized_shape:
        return _ragged_layer_norm(input, normalized_shape, weight, bias, eps)
    shape, values = _dense_tail(input, normalized_shape, weight, bias)
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
        raise ValueError("weight and bias: a ragged dim is normalized, and they can have none; expected None")
    if not x.values.is_floating_point():
        raise TypeError(f"input: expected a floating point dtype, got {x.values.dtype}")
    values, dim = _wide(x.values), x.packed_dim
    ids = x.segment_ids().long()
    others = [d for d in range(values.dim() - len(shape), values.dim()) if d != dim]
    dense = _count([values.shape[d] for d in others])
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


@on_nested
def rms_norm(
    input: Ragged, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Ragged:
    """x / sqrt(mean(x^2) + eps) * weight over the last dims of each component, right in all six modes.

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
        Where not differentiable: nowhere for eps > 0.

    References:
        `rms_norm_nested`.
    """
    shape, values = _dense_tail(input, normalized_shape, weight)
    if eps is None:
        eps = torch.finfo(torch.promote_types(values.dtype, torch.float32)).eps
    if is_plain_call(values, weight):
        normalized = _fast_rms_norm(values, weight, shape, eps)
    else:
        normalized, _ = rms_norm_nested.op(values, shape, weight, eps)
    return input.like(normalized if input.sizes is None else normalized.reshape(input.values.shape))
