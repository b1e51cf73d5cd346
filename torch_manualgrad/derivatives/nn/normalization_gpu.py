"""The rules of the operators that only GPUs have: batch normalization of cuDNN and MIOpen, the backward of RMS normalization.

They are in the registry where a GPU is, and entries of the catalogue elsewhere; their formulas are those of the CPU's operators.
_fused_rms_norm itself can have no rule: PyTorch declares it composite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, exists, rule, rules
from torch_manualgrad.core.rule.catalogue import gap

from .normalization_batch import (
    batch_norm_backward_jvp,
    batch_norm_jvp,
)
from .normalization_batch_rules import batch_norm_double_vjp, batch_norm_vjp
from .normalization_rms import rms_norm_double_backward

__all__ = ["GPU_RULES"]

_HERE = {
    "cudnn": torch.backends.cudnn.is_available() and torch.cuda.is_available(),
    "miopen": torch.version.hip is not None,
}


def _batch_norm(library: str) -> list[Any]:
    """The rules of one library's forward and backward."""
    reserve = ("result3",) if library == "cudnn" else ()
    # fmt: off
    return [
        rule(
            f"aten::{library}_batch_norm",
            vjp={("input", "weight", "bias"): lambda grad_result0, input, weight, running_mean, running_var, result1, result2, training, epsilon, output_mask:
                 batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, training, epsilon, output_mask)},
            jvp={"result0": batch_norm_jvp.bind(train="training", eps="epsilon")},
            not_differentiable=("result1", "result2", *reserve),
            defer_to_stock=always,
            improves="values",
            source="ATen batch_norm_jvp",
            register=_HERE[library],
        ),
        rule(
            f"aten::{library}_batch_norm_backward",
            vjp={("input", "weight", "grad_output"): lambda grad_result0, grad_result1, grad_result2, grad_output, input, weight, epsilon:
                 batch_norm_double_vjp(input, weight, grad_result0, grad_result1, grad_result2, grad_output, None, None, True, epsilon)},
            jvp={("result0", "result1", "result2"): batch_norm_backward_jvp.bind(
                grad_out="grad_output", grad_out_t="grad_output_t", running_mean=None, running_var=None, train=True, eps="epsilon")},
            improves="values",
            source="ATen batchnorm_double_backward",
            register=_HERE[library],
        ),
    ]
    # fmt: on


def _rms_vjp(
    grad_result0: Tensor | None,
    grad_result1: Tensor | None,
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_g = rms_norm_double_backward(
        input, weight, grad_result0, grad_result1, grad_out, normalized_shape, rstd
    )
    return of_x, None if weight is None else of_weight, of_g


def _rms_norm() -> list[Any]:
    return [
        rule(
            "aten::_fused_rms_norm_backward",
            vjp={("input", "weight", "grad_out"): _rms_vjp, "rstd": lambda grad_result0: None},
            improves="missing",
            source="ATen has none; Zhang, Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467",
            register=torch.cuda.is_available(),
        )
    ]


GPU_RULES = [
    *_batch_norm("cudnn"),
    *_batch_norm("miopen"),
    *(_rms_norm() if exists("aten::_fused_rms_norm_backward") else ()),
]

for _rule in GPU_RULES:
    if _rule not in rules.entered():
        gap(_rule.name, reason="only GPUs have the operator; its rule is in the registry where there is one")
