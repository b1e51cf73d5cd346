"""RMS normalization, $x r w$ with $r = (<x^2> + eps)^(-1/2)$: the formulas of _fused_rms_norm, an operator of GPUs.

On the CPU, `torch.nn.functional.rms_norm` is composed of other operators, so all its derivatives are right. The
mathematics is in `normalization`, with $m = 0$. The rstd that the operator returns is differentiable, as in PyTorch.
_fused_rms_norm itself cannot have a rule, because PyTorch declares it composite. Its backward has a rule, which is registered
on a machine with a GPU; elsewhere, the operator is an entry of the catalogue.

Args:
    input, input_p: $x$, (*rows, *normalized_shape), real.
    normalized_shape: the sizes of the last dims, whose product is $n$.
    rstd, saved_rstd: $r$ as _fused_rms_norm returns it, (*rows, 1, ..., 1); in further derivatives it is a
        function of $x$.
    weight, weight_opt, weight_p: $w$, of shape ``normalized_shape``, or None for 1.
    input_t, weight_t: tangents; None for zero.

Note:
    Where not differentiable: with $eps = 0$, where all entries are zero. The result is nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import exists, formula, rule, rules
from torch_manualgrad.core.rule.catalogue import gap

from .normalization import (
    Standardized,
    last_dims,
    norm_backward,
    norm_double_backward,
    norm_jvp,
    other_dims,
    standardized_by,
    wide,
    widened,
)


def _standardized(input: Tensor, normalized_shape: Sequence[int], rstd: Tensor) -> Standardized:
    return standardized_by(input, last_dims(normalized_shape), rstd, centered=False)


@formula
def infinitely_differentiable_native_rms_norm_backward(
    dY: Tensor | None,
    drstd: Tensor | None,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight_opt: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of input and weight, given those of rms_norm and its rstd: $P(g w) - gr r^2 x^ / n$, and $sum g x^$.

    Args:
        dY: $g$, the shape of ``input``; None for zero.
        drstd: $gr$, (*rows, 1, ..., 1); None for zero.

    Returns:
        The shapes of ``input`` and ``normalized_shape``.

    References:
        ATen infinitely_differentiable_native_rms_norm_backward; Zhang, Sennrich, Root Mean Square Layer Normalization,
        arXiv:1910.07467.
    """
    s = _standardized(input, normalized_shape, rstd)
    g = torch.zeros_like(s.values) if dY is None else wide(dY)
    of_x, of_weight, _ = norm_backward(s, g, *widened(weight_opt), summed=other_dims(input, normalized_shape))
    if drstd is not None:
        count = s.values[(0,) * (input.dim() - len(normalized_shape))].numel() if s.values.numel() else 1
        of_x = of_x - wide(drstd).reshape(s.rstd.shape) * s.rstd.square() * s.values / count
    return of_x.to(input.dtype), of_weight.to(input.dtype if weight_opt is None else weight_opt.dtype)


@formula
def rms_norm_double_backward(
    input: Tensor,
    weight: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    grad_out: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of input, weight and grad_out of the backward, given those of its two results.

    Args:
        ggI, ggG: cotangents of the gradients of input and weight; None for zero.
        grad_out: the cotangent of rms_norm that the backward was given, the shape of $x$.

    Returns:
        The shapes of $x$, of ``normalized_shape``, and of $x$.

    References:
        ATen _fused_rms_norm_backward has no derivative; Zhang, Sennrich, Root Mean Square Layer Normalization,
        arXiv:1910.07467.
    """
    s = _standardized(input, normalized_shape, rstd)
    found = norm_double_backward(
        s, wide(grad_out), *widened(weight, ggI, ggG, None), summed=other_dims(input, normalized_shape)
    )
    of_x, of_weight, of_g = found
    return of_x.to(input.dtype), of_weight.to(input.dtype if weight is None else weight.dtype), of_g.to(grad_out.dtype)


@formula
def rms_norm_jvp(
    input_p: Tensor,
    input_t: Tensor | None,
    weight_p: Tensor | None,
    weight_t: Tensor | None,
    saved_rstd: Tensor,
    normalized_shape: Sequence[int],
) -> Tensor:
    """Tangent of rms_norm: $(P dx) w + x^ dw$.

    Returns:
        The shape of $x$.
    """
    s = _standardized(input_p, normalized_shape, saved_rstd)
    return norm_jvp(s, *widened(input_t, weight_p, weight_t, None)).to(input_p.dtype)


@formula
def rms_norm_rstd_jvp(input_p: Tensor, input_t: Tensor, saved_rstd: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Tangent of the rstd: $-r^2 <x^ dx>$.

    Args:
        input_t: tangent of $x$.

    Returns:
        The shape of ``saved_rstd``.
    """
    s = _standardized(input_p, normalized_shape, saved_rstd)
    return (-s.rstd.square() * s.mean(s.values * wide(input_t))).reshape(saved_rstd.shape).to(saved_rstd.dtype)


# -- the rule, of an operator that only GPUs have ---------------------------------------------------------------------

GPU_RULES = []
if exists("aten::_fused_rms_norm_backward"):
    GPU_RULES.append(
        rule(
            "aten::_fused_rms_norm_backward",
            vjp={
                ("input", "weight", "grad_out"): rms_norm_double_backward.bind(ggI="grad_result0", ggG="grad_result1"),
                "rstd": lambda: None,
            },
            improves="missing",
            source="ATen has none; Zhang, Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467",
            register=torch.cuda.is_available(),
        )
    )

for _rule in GPU_RULES:
    if _rule not in rules.entered():
        gap(_rule.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")
