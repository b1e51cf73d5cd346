"""Group normalization: native_group_norm and its backward. The mathematics is in `normalization`.

The mean and the rstd that native_group_norm returns are differentiable, as in PyTorch. native_group_norm_backward has
no derivative in PyTorch; here it is a function of the cotangent, the input and the weight, and the statistics are those of
the input.

Args:
    N, C, HxW: the sizes of $x$, where HxW is the product of the sizes after $C$.
    group: the number of groups.
    eps: added to the variance.
    input, input_p: $x$, (N, C, *), real.
    weight, weight_p: $w$, (C,), or None for 1.
    grad_out: the cotangent of group_norm that the backward was given, the shape of $x$.
    rstd: as native_group_norm returns it, (N, group); in further derivatives it is a function of $x$.
    grad_out_t, input_t, weight_t, bias_t: tangents; None for zero.

Note:
    Where not differentiable: with $eps = 0$, where a group is constant. All results except the tangent of the mean are
    nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, is_sharded, rule

from .normalization import (
    Standardized,
    gradient_format,
    norm_backward,
    norm_backward_jvp,
    norm_double_backward,
    norm_jvp,
    standardized,
    standardized_by,
    wide,
)

_DIMS = (2, 3)  # of the result of `_grouped`
_SUMMED = (0, 3)


def _grouped(x: Tensor | None, N: int, C: int, HxW: int, group: int) -> Any:
    """(N, C, *) as (N, group, C / group, HxW), in at least float32."""
    return None if x is None else wide(x).reshape(N, group, C // group, HxW)


def _by_channel(x: Tensor | None, C: int, group: int) -> Any:
    """(C,) as (group, C / group, 1), in at least float32."""
    return None if x is None else wide(x).reshape(group, C // group, 1)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """$N$, $C$ and HxW."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _statistics_backward(s: Standardized, dmean: Tensor | None, drstd: Tensor | None) -> Tensor:
    """Cotangent of $x$, given those of $m$ and $r$."""
    count = s.values.shape[2] * s.values.shape[3]
    found = torch.zeros_like(s.values)
    if dmean is not None:
        found = found + wide(dmean).reshape(s.rstd.shape) / count
    if drstd is not None:
        found = found - wide(drstd).reshape(s.rstd.shape) * s.rstd.square() * s.values / count
    return found


@formula
def infinitely_differentiable_native_group_norm_backward(
    dY: Tensor | None,
    dmean: Tensor | None,
    drstd: Tensor | None,
    X: Tensor,
    gamma: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and bias, given those of group_norm, its mean and its rstd.

    $P(g w) + gm / n - gr r^2 x^ / n$, $sum g x^$ and $sum g$, where $n$ is the number of entries of a group.

    Args:
        dY: $g$, the shape of ``X``; None for zero.
        dmean, drstd: (N, group); None for zero.
        X: $x$, (N, C, *), real.
        gamma: $w$, (C,), or None for 1.

    Returns:
        The shapes of $x$, (C,) and (C,).

    References:
        ATen infinitely_differentiable_native_group_norm_backward; Wu, He, Group Normalization, arXiv:1803.08494.
    """
    s = standardized(_grouped(X, N, C, HxW, group), _DIMS, eps)
    g = torch.zeros_like(s.values) if dY is None else _grouped(dY, N, C, HxW, group)
    of_x, *parameters = norm_backward(s, g, _by_channel(gamma, C, group), summed=_SUMMED)
    of_x = of_x + _statistics_backward(s, dmean, drstd)
    dtype = X.dtype if gamma is None else gamma.dtype
    return (of_x.reshape(X.shape).to(X.dtype), *[p.reshape(C).to(dtype) for p in parameters])  # type: ignore[return-value]


@formula
def group_norm_double_backward(
    input: Tensor,
    weight: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    ggB: Tensor | None,
    grad_out: Tensor,
    rstd: Tensor,
    N: int,
    C: int,
    HxW: int,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and grad_out of the backward, given those of its three results.

    Args:
        ggI, ggG, ggB: cotangents of the gradients of input, weight and bias; None for zero.

    Returns:
        The shapes of $x$, (C,), and of $x$.

    References:
        ATen native_group_norm_backward has no derivative; Wu, He, Group Normalization, arXiv:1803.08494.
    """
    sizes = (N, C, HxW, group)
    s = standardized_by(_grouped(input, *sizes), _DIMS, rstd)
    affine = [_by_channel(x, C, group) for x in (weight, ggG, ggB)]
    of_x, of_weight, of_g = norm_double_backward(
        s, _grouped(grad_out, *sizes), affine[0], _grouped(ggI, *sizes), *affine[1:], summed=_SUMMED
    )
    dtype = input.dtype if weight is None else weight.dtype
    return (
        of_x.reshape(input.shape).to(input.dtype),
        of_weight.reshape(C).to(dtype),
        of_g.reshape(input.shape).to(grad_out.dtype),
    )


@formula
def group_norm_backward_jvp(
    grad_out: Tensor,
    grad_out_t: Tensor | None,
    input: Tensor,
    input_t: Tensor | None,
    weight: Tensor | None,
    weight_t: Tensor | None,
    rstd: Tensor,
    N: int,
    C: int,
    HxW: int,
    group: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the three results of the backward of group_norm.

    Returns:
        The shapes of ``input``, (C,) and (C,).

    References:
        The transpose of `group_norm_double_backward`.
    """
    sizes = (N, C, HxW, group)
    s = standardized_by(_grouped(input, *sizes), _DIMS, rstd)
    g, g_t, x_t = (_grouped(x, *sizes) for x in (grad_out, grad_out_t, input_t))
    w, w_t = (_by_channel(x, C, group) for x in (weight, weight_t))
    of_x, *parameters = norm_backward_jvp(s, g, w, g_t, x_t, w_t, summed=_SUMMED)
    dtype = input.dtype if weight is None else weight.dtype
    return (of_x.reshape(input.shape).to(input.dtype), *[p.reshape(C).to(dtype) for p in parameters])  # type: ignore[return-value]


@formula
def group_norm_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor | None,
    weight_t: Tensor | None,
    bias_t: Tensor | None,
    group: int,
    eps: float,
) -> Tensor:
    """Tangent of group_norm: $(P dx) w + x^ dw + db$.

    Returns:
        The shape of $x$.
    """
    sizes = (*_sizes(input_p), group)
    s = standardized(_grouped(input_p, *sizes), _DIMS, eps)
    affine = [_by_channel(x, sizes[1], group) for x in (weight_p, weight_t, bias_t)]
    return norm_jvp(s, _grouped(input_t, *sizes), *affine).reshape(input_p.shape).to(input_p.dtype)


@formula
def group_norm_mean_jvp(input_t: Tensor, mean_p: Tensor, group: int) -> Tensor:
    """Tangent of the mean of each group: the mean of the tangent.

    Args:
        input_t: tangent of the input, (N, C, *).
        mean_p: the mean, (N, group).

    Returns:
        (N, group), in the dtype of the mean.
    """
    return _grouped(input_t, *_sizes(input_t), group).mean(_DIMS).to(mean_p.dtype)


@formula
def group_norm_invstd_jvp(input_p: Tensor, input_t: Tensor, invstd_p: Tensor, group: int, eps: float) -> Tensor:
    """Tangent of the rstd of each group: $-r^2 <x^ dx>$.

    Args:
        input_t: tangent of $x$.
        invstd_p: $r$, (N, group); only its dtype is used.

    Returns:
        (N, group).
    """
    sizes = (*_sizes(input_p), group)
    s = standardized(_grouped(input_p, *sizes), _DIMS, eps)
    found = -s.rstd.square() * s.mean(s.values * _grouped(input_t, *sizes))
    return found.reshape(invstd_p.shape).to(invstd_p.dtype)


def _vjp(
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_result2: Tensor | None,
    input: Tensor,
    result1: Tensor,
    result2: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    mask, sizes = list(output_mask), (N, C, HxW, group)
    of_others = grad_result0 is None or grad_result1 is not None or grad_result2 is not None
    # PyTorch's own backward fails for a bias without a weight, returns nan for the weight if there is nothing to normalize,
    # and receives the sizes of the whole tensor for a rank's shard of a distributed one
    if torch.is_grad_enabled() or of_others or mask[1] != mask[2] or input.numel() == 0 or is_sharded(input):
        given = (grad_result0, grad_result1, grad_result2, input, weight, *sizes, eps)
        found = infinitely_differentiable_native_group_norm_backward(*given)
    else:  # PyTorch's own, which the compiler fuses
        assert grad_result0 is not None
        kept = gradient_format(input) if input.device.type == "cpu" else torch.contiguous_format
        g, x = (t.contiguous(memory_format=kept) for t in (grad_result0, input))
        found = torch.ops.aten.native_group_norm_backward(g, x, result1, result2, weight, *sizes, mask)
    return found


# -- the rules --------------------------------------------------------------------------------------------------------


_SOURCE = "Wu, He, Group Normalization, arXiv:1803.08494"

rule(
    "aten::native_group_norm",
    vjp={("input", "weight", "bias"): _vjp},
    jvp={
        "result0": group_norm_jvp,
        "result1": group_norm_mean_jvp.bind(mean_p="result1"),
        "result2": group_norm_invstd_jvp.bind(invstd_p="result2"),
    },
    source=f"ATen infinitely_differentiable_native_group_norm_backward, group_norm_jvp; {_SOURCE}",
)
rule(
    "aten::native_group_norm_backward",
    vjp={
        ("input", "weight", "grad_out"): group_norm_double_backward.bind(
            ggI="grad_result0", ggG="grad_result1", ggB="grad_result2"
        ),
        ("mean", "rstd"): lambda: (None, None),
    },
    jvp={("result0", "result1", "result2"): group_norm_backward_jvp},
    improves="missing",
    source=f"ATen has none; {_SOURCE}",
)
