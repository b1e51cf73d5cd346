"""The rules of group normalization; the formulas are in `normalization_group`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import is_sharded, rule

from .normalization import gradient_format
from .normalization_group import (
    group_norm_backward_jvp,
    group_norm_double_backward,
    group_norm_invstd_jvp,
    group_norm_jvp,
    group_norm_mean_jvp,
    infinitely_differentiable_native_group_norm_backward,
)


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
    # PyTorch's own fails for a bias without a weight, gives nan for the weight where there is nothing to normalize, and on
    # a rank's part of a distributed tensor is given the sizes of the whole
    if torch.is_grad_enabled() or of_others or mask[1] != mask[2] or input.numel() == 0 or is_sharded(input):
        given = (grad_result0, grad_result1, grad_result2, input, weight, *sizes, eps)
        found = infinitely_differentiable_native_group_norm_backward(*given)
    else:  # the compiler fuses it
        assert grad_result0 is not None
        kept = gradient_format(input) if input.device.type == "cpu" else torch.contiguous_format
        g, x = (t.contiguous(memory_format=kept) for t in (grad_result0, input))
        found = torch.ops.aten.native_group_norm_backward(g, x, result1, result2, weight, *sizes, mask)
    return tuple(f if yes else None for f, yes in zip(found, mask))


def _double_vjp(
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_result2: Tensor | None,
    grad_out: Tensor,
    input: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_g = group_norm_double_backward(
        input, weight, grad_result0, grad_result1, grad_result2, grad_out, rstd, N, C, HxW, group
    )
    return of_x, None if weight is None else of_weight, of_g


def _mean_jvp(input_t: Tensor | None, result1: Tensor, group: int) -> Tensor | None:
    return None if input_t is None else group_norm_mean_jvp(input_t, result1, group)


def _invstd_jvp(input: Tensor, input_t: Tensor | None, result2: Tensor, group: int, eps: float) -> Tensor | None:
    return None if input_t is None else group_norm_invstd_jvp(input, input_t, result2, group, eps)


# -- the rules --------------------------------------------------------------------------------------------------------


_SOURCE = "Wu, He, Group Normalization, arXiv:1803.08494"

rule(
    "aten::native_group_norm",
    vjp={("input", "weight", "bias"): _vjp},
    jvp={"result0": group_norm_jvp, "result1": _mean_jvp, "result2": _invstd_jvp},
    source=f"ATen infinitely_differentiable_native_group_norm_backward, group_norm_jvp; {_SOURCE}",
)
rule(
    "aten::native_group_norm_backward",
    vjp={("input", "weight", "grad_out"): _double_vjp, ("mean", "rstd"): lambda grad_result0: (None, None)},
    jvp={("result0", "result1", "result2"): group_norm_backward_jvp},
    improves="missing",
    source=f"ATen has none; {_SOURCE}",
)
