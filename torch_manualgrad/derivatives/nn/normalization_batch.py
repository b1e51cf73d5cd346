"""Batch normalization; the rules are in `normalization_batch_rules`, the mathematics is in `normalization`.

In training, the statistics are those of the batch, functions of the input; the running ones are not read. In evaluation
they are the running ones, with tangents in forward mode, and constants in reverse mode. The mean and the inverse deviation that the operators return are constants to every
derivative, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

from .normalization import (
    Standardized,
    gradient_format,
    norm_backward,
    norm_backward_jvp,
    norm_double_backward,
    norm_jvp,
    standardized,
    wide,
)


def _dims(input: Tensor) -> list[int]:
    """All but the channels."""
    return [d for d in range(input.dim()) if d != 1]


def _by_channel(x: Tensor | None, input: Tensor) -> Any:
    """One entry a channel, wide, for broadcasting."""
    return None if x is None else wide(x).reshape(-1, *[1] * (input.dim() - 2))


def _standardized(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, training: bool, eps: float
) -> Standardized:
    if training:
        return standardized(input, _dims(input), eps)
    mean, variance = _by_channel(running_mean, input), _by_channel(running_var, input)
    rstd = (variance + eps).rsqrt()
    return Standardized((wide(input) - mean) * rstd, rstd, None)


def _statistics_fit(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
) -> str:
    """What is wrong with the statistics that are read, which the kernel trusts."""
    saved = {"save_mean": save_mean, "save_invstd": save_invstd}
    running = {"running_mean": running_mean, "running_var": running_var}
    for name, x in (saved if train else running).items():
        if x is None or list(x.shape) != [input.shape[1]]:
            got = None if x is None else list(x.shape)
            return f"{name}: expected shape [{input.shape[1]}], as train is {train}, got {got}"
    return ""


@formula(kernel=("default",), requires=_statistics_fit)
def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and bias, given that of batch_norm: P(g w), sum g x^, sum g; in evaluation r g w.

    Args:
        grad_out: g, the shape of ``input``.
        input: x, (N, C, *), real.
        weight: w, (C,), or None for 1.
        running_mean, running_var: the statistics in evaluation, (C,); not read in training, and constants.
        save_mean, save_invstd: as native_batch_norm returns them in training; where this is differentiated they are
            functions of ``input``.
        train: whether the statistics are those of the batch.
        eps: added to the variance.
        output_mask: which of the three are wanted; the others come back empty.

    Returns:
        The gradients, of the shapes of ``input``, (C,) and (C,); the first has its layout.

    Note:
        Where not differentiable: nowhere for eps > 0; with eps = 0, where a channel is constant, the result is nan.

    References:
        ATen native_batch_norm_backward; Ioffe, Szegedy, Batch Normalization, arXiv:1502.03167.
    """
    s = _standardized(input, running_mean, running_var, train, eps)
    found = norm_backward(s, wide(grad_out), _by_channel(weight, input), summed=_dims(input))
    dtype = input.dtype if weight is None else weight.dtype
    of_x, *parameters = [f if yes else input.new_zeros(0) for f, yes in zip(found, output_mask)]
    return (of_x.to(input.dtype), *[p.to(dtype) for p in parameters])  # type: ignore[return-value]


def _zeros(input: Tensor, weight: Tensor | None, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """The results for an input without elements; for any other their shapes, dtypes and strides."""
    of_x = torch.zeros_like(input, memory_format=gradient_format(input))
    of_channels = (input if weight is None else weight).new_zeros(input.shape[1])
    return tuple(
        f if yes else input.new_zeros(0) for f, yes in zip((of_x, of_channels, of_channels.clone()), output_mask)
    )


@native_batch_norm_backward.impl("default")
def _(*given: Any) -> tuple[Tensor, ...]:
    grad, input, weight, *statistics, train, eps, output_mask = given
    if not input.numel():  # on which PyTorch's ends the process
        return _zeros(input, weight, output_mask)
    # PyTorch's reads vectors as if they were contiguous
    weight, *statistics = (x if x is None else x.contiguous() for x in (weight, *statistics))
    found = torch.ops.aten.native_batch_norm_backward(grad, input, weight, *statistics, train, eps, output_mask)
    return tuple(f if yes else input.new_zeros(0) for f, yes in zip(found, output_mask))


@native_batch_norm_backward.impl_fake
def _(*given: Any) -> tuple[Tensor, ...]:
    _, input, weight, *_, output_mask = given
    return _zeros(input, weight, output_mask)


@formula
def batchnorm_double_backward(
    input: Tensor,
    gamma: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    ggB: Tensor | None,
    gO: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and grad_out of the backward, given those of its three results.

    Args:
        input: x, (N, C, *), real.
        gamma: the weight, (C,), or None.
        ggI, ggG, ggB: cotangents of the gradients of input, weight and bias; None for zero.
        gO: the cotangent of batch_norm that the backward was given, the shape of x.
        running_mean, running_var, training, eps: see `native_batch_norm_backward`.

    Returns:
        The shapes of x, (C,), and of x.

    Note:
        Where not differentiable: as `native_batch_norm_backward`.

    References:
        ATen batchnorm_double_backward, which takes the statistics for constants.
    """
    s = _standardized(input, running_mean, running_var, training, eps)
    given = (None if ggI is None else wide(ggI), *[_by_channel(x, input) for x in (ggG, ggB)])
    of_x, of_weight, of_g = norm_double_backward(s, wide(gO), _by_channel(gamma, input), *given, summed=_dims(input))
    return of_x.to(input.dtype), of_weight.to(input.dtype if gamma is None else gamma.dtype), of_g.to(gO.dtype)


def _moved(
    s: Standardized, input: Tensor, input_t: Tensor | None, mean_t: Tensor | None, var_t: Tensor | None
) -> Tensor | None:
    """The tangent of x that moves x^ as those of x and, in evaluation, of the statistics do: dx - dm - x^ r dv / 2."""
    found = None if input_t is None else wide(input_t)
    if s.dims is None and mean_t is not None:
        found = (torch.zeros_like(s.values) if found is None else found) - _by_channel(mean_t, input)
    if s.dims is None and var_t is not None:
        found = torch.zeros_like(s.values) if found is None else found
        found = found - s.values * s.rstd * _by_channel(var_t, input) / 2
    return found


@formula
def batch_norm_backward_jvp(
    grad_out: Tensor,
    grad_out_t: Tensor | None,
    input: Tensor,
    input_t: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    train: bool,
    eps: float,
    running_mean_t: Tensor | None = None,
    running_var_t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the three results of the backward of batch_norm.

    Args:
        grad_out, input, weight, running_mean, running_var, train, eps: see `native_batch_norm_backward`.
        grad_out_t, input_t, weight_t: tangents; None for zero.
        running_mean_t, running_var_t: tangents of the statistics in evaluation; None for zero. Not read in training.

    Returns:
        The shapes of ``input``, (C,) and (C,).

    Note:
        Where not differentiable: as `native_batch_norm_backward`.

    References:
        The transpose of ATen batchnorm_double_backward.
    """
    s = _standardized(input, running_mean, running_var, train, eps)
    of_x, *parameters = norm_backward_jvp(
        s,
        wide(grad_out),
        _by_channel(weight, input),
        None if grad_out_t is None else wide(grad_out_t),
        _moved(s, input, input_t, running_mean_t, running_var_t),
        _by_channel(weight_t, input),
        summed=_dims(input),
    )
    if not train and running_var_t is not None:  # of r in r g w
        g = wide(grad_out) if weight is None else wide(grad_out) * _by_channel(weight, input)
        of_x = of_x - g * s.rstd**3 * _by_channel(running_var_t, input) / 2
    dtype = input.dtype if weight is None else weight.dtype
    return (of_x.to(input.dtype), *[p.to(dtype) for p in parameters])  # type: ignore[return-value]


@formula
def batch_norm_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    train: bool,
    eps: float,
    running_mean_t: Tensor | None = None,
    running_var_t: Tensor | None = None,
) -> Tensor:
    """Tangent of batch_norm: (P dx) w + x^ dw + db; in evaluation r dx w + x^ dw + db.

    Args:
        input_p: x, (N, C, *), real.
        input_t: tangent of x; None for zero.
        weight_p: w, (C,), or None.
        weight_t, bias_t: tangents of the parameters; None for zero.
        running_mean_t, running_var_t: tangents of the statistics in evaluation; None for zero. Not read in training.
        running_mean, running_var, train, eps: see `native_batch_norm_backward`.

    Returns:
        The shape of x.

    Note:
        Where not differentiable: as `native_batch_norm_backward`.

    References:
        ATen batch_norm_jvp, which takes the statistics for constants in evaluation.
    """
    s = _standardized(input_p, running_mean, running_var, train, eps)
    affine = [_by_channel(x, input_p) for x in (weight_p, weight_t, bias_t)]
    return norm_jvp(s, _moved(s, input_p, input_t, running_mean_t, running_var_t), *affine).to(input_p.dtype)
