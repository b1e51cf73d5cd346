"""The rules of batch normalization; the formulas are in `normalization_batch`.

Plain calls in reverse mode stay with PyTorch, whose first order is right; the rules of the backward operators give the
higher ones. The mean and the inverse deviation that the operators return are constants to every derivative, as in PyTorch;
a gradient of the running statistics raises. In evaluation these may have tangents.

_native_batch_norm_legit and _batch_norm_with_update write to the running statistics by their schema, and have functional
forms that return the new ones. `torch.nn.functional.batch_norm` calls native_batch_norm, which writes to them, and whose
schema says nothing of it. Those that are for evaluation only, _native_batch_norm_legit_no_training and
_batch_norm_no_update, have no rule: they are affine in each input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import rule

from .normalization_batch import (
    batch_norm_backward_jvp,
    batch_norm_jvp,
    batchnorm_double_backward,
    native_batch_norm_backward,
)

__all__ = ["batch_norm_double_vjp", "batch_norm_vjp"]

_PARAMETERS = ("input", "weight", "bias")
_INPUTS = ("input", "weight", "grad_out")
_GRADIENTS = ("result0", "result1", "result2")
# Functions of the input, whose derivative they are part of.
_SAVED: Any = lambda: (None, None)  # noqa: E731


def batch_norm_vjp(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    # PyTorch's own, which the compiler fuses, where nobody differentiates it again; on empty inputs it ends the process
    ours = torch.is_grad_enabled() or not input.numel()
    backward = native_batch_norm_backward if ours else torch.ops.aten.native_batch_norm_backward
    mask = list(output_mask)
    found = backward(grad, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask)
    return tuple(g if yes else None for g, yes in zip(found, mask))


def batch_norm_double_vjp(input: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor | None, ...]:
    of_x, of_weight, of_g = batchnorm_double_backward(input, weight, *others)
    return of_x, None if weight is None else of_weight, of_g


# -- the rules --------------------------------------------------------------------------------------------------------


def _defer_to_stock(input: Tensor, *_: Any) -> bool:
    """PyTorch's backward of an empty batch ends the process."""
    return input.numel() > 0


_ABOUT: dict[str, Any] = {
    "defer_to_stock": _defer_to_stock,
    "improves": "values",
    "source": "ATen native_batch_norm_backward, batch_norm_jvp; Ioffe, Szegedy, Batch Normalization, arXiv:1502.03167",
}
_STATISTICS = ("running_mean_out", "running_var_out")
_NO_BATCHES = dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule of the operator")
_ABOUT_BACKWARD: dict[str, Any] = {
    "improves": "values",
    "source": "ATen batchnorm_double_backward",
}

# fmt: off
rule(
    "aten::native_batch_norm",
    vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask:
         batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask)},
    jvp={"result0": batch_norm_jvp.bind(train="training")},
    not_differentiable=("result1", "result2"),
    **_ABOUT,
)
rule(
    "aten::_native_batch_norm_legit.no_stats",
    vjp={_PARAMETERS: lambda grad_result0, input, weight, result1, result2, eps, output_mask:
         batch_norm_vjp(grad_result0, input, weight, None, None, result1, result2, True, eps, output_mask)},
    jvp={"result0": batch_norm_jvp.bind(running_mean=None, running_var=None, train=True)},
    not_differentiable=("result1", "result2"),
    **_ABOUT,
)
rule(
    "aten::native_batch_norm_backward",
    vjp={_INPUTS: lambda grad_result0, grad_result1, grad_result2, grad_out, input, weight, running_mean, running_var, train, eps:
         batch_norm_double_vjp(input, weight, grad_result0, grad_result1, grad_result2, grad_out, running_mean, running_var, train, eps),
         ("save_mean", "save_invstd"): _SAVED},
    jvp={_GRADIENTS: batch_norm_backward_jvp},
    **_ABOUT_BACKWARD,
)
rule(
    "aten::batch_norm_backward",
    vjp={_INPUTS: lambda grad_result0, grad_result1, grad_result2, grad_out, input, weight, running_mean, running_var, update, eps:
         batch_norm_double_vjp(input, weight, grad_result0, grad_result1, grad_result2, grad_out, running_mean, running_var, update, eps),
         ("save_mean", "save_var"): _SAVED},
    jvp={_GRADIENTS: batch_norm_backward_jvp.bind(train="update")},
    **_ABOUT_BACKWARD,
)
for _name, _statistics in (("_native_batch_norm_legit", ()), ("_native_batch_norm_legit_functional", _STATISTICS)):
    rule(
        f"aten::{_name}",
        vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask:
             batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, training, eps, output_mask)},
        jvp={"result0": batch_norm_jvp.bind(train="training")},
        not_differentiable=("result1", "result2", *_statistics),
        **_ABOUT,
    )
for _name, _statistics in (("_batch_norm_with_update", ()), ("_batch_norm_with_update_functional", _STATISTICS)):
    rule(
        f"aten::{_name}",
        vjp={_PARAMETERS: lambda grad_result0, input, weight, running_mean, running_var, result1, result2, eps, output_mask:
             batch_norm_vjp(grad_result0, input, weight, running_mean, running_var, result1, result2, True, eps, output_mask)},
        jvp={"result0": batch_norm_jvp.bind(train=True)},
        not_differentiable=("result1", "result2", "result3", *_statistics),
        gaps={} if _statistics else _NO_BATCHES,
        **_ABOUT,
    )
# fmt: on
