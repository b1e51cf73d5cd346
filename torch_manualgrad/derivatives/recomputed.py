"""The operators that an override with ``memory=True`` recomputes: elementwise functions and normalizations.

Each call costs about one pass over its result. The recomputed result must be bitwise identical to the forward's, on each
device and in each dtype; core/override/memory.py compares the two if the node does not save every argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Argument, Recomputable, recomputables

SELF = Argument("self", edge=0)
BEFORE = Argument(edge=0)


def recomputed(node: str, call: Any, *arguments: Argument, constants: str = "", **more: Any) -> None:
    """Register how the result of autograd nodes of this name is recomputed."""
    recomputables[node] = Recomputable(node, call, arguments, constants.split(), **more)


# -- elementwise functions --------------------------------------------------------------------------------------------


def gelu(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


recomputed("GeluBackward0", gelu, SELF, constants="approximate")
recomputed("SiluBackward0", torch.ops.aten.silu, SELF)
recomputed("MishBackward0", torch.ops.aten.mish, SELF)
recomputed("EluBackward0", torch.ops.aten.elu, SELF, constants="alpha scale input_scale")
recomputed("CeluBackward0", torch.ops.aten.celu, SELF, constants="alpha")
recomputed("HardswishBackward0", torch.ops.aten.hardswish, SELF)
recomputed("HardsigmoidBackward0", torch.ops.aten.hardsigmoid, SELF)
recomputed("HardtanhBackward0", torch.ops.aten.hardtanh, SELF, constants="min_val max_val")
recomputed("LeakyReluBackward0", torch.ops.aten.leaky_relu, SELF, constants="negative_slope")
recomputed("SoftplusBackward0", torch.ops.aten.softplus, SELF, constants="beta threshold")
recomputed("ReluBackward0", torch.relu, BEFORE, result="result", in_place={0: torch.relu_})
recomputed("MulBackward0", torch.mul, SELF, Argument("other", edge=1), in_place={0: Tensor.mul_})
recomputed("ToCopyBackward0", Tensor.to, BEFORE, takes_dtype=True)
recomputed("CloneBackward0", Tensor.clone, BEFORE)


# -- normalizations ---------------------------------------------------------------------------------------------------


SMALL = 16  # an argument that the node does not save is copied if it is smaller than the result by this factor


def batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, eps: float) -> Tensor:
    return torch.native_batch_norm(x, weight, bias, mean, variance, training, 0.0, eps)[0]


def statistics(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    eps: float,
) -> tuple[Any, ...] | None:
    """The arguments of `batch_norm` that repeat the forward; None if they are not available.

    For training on the CPU they are those of an evaluation with the statistics of the batch, which takes one pass instead
    of three. An evaluation multiplies by weight / sqrt(variance + eps): here by rstd * weight / sqrt(1 + 0).
    """
    if any(t is not None and SMALL * t.numel() > x.numel() for t in (weight, bias, running_mean)):
        return None
    bias = None if bias is None else bias.clone()
    if not training:
        copies = [None if t is None else t.clone() for t in (weight, running_mean, running_var)]
        return None if running_mean is None else (copies[0], bias, *copies[1:], False, eps)
    if x.is_cpu and mean is not None and mean.dtype in (torch.float32, torch.float64):
        scale = rstd if weight is None else rstd * weight
        return scale, bias, mean, torch.ones_like(mean), False, 0.0
    return None if weight is None else weight.clone(), bias, None, None, True, eps


recomputed(
    "NativeBatchNormBackward0",
    batch_norm,
    Argument("input", edge=0),
    Argument("weight", edge=1, optional=True),
    Argument(edge=2, optional=True),
    Argument("result1", optional=True),
    Argument("result2", optional=True),
    Argument("running_mean", optional=True),
    Argument("running_var", optional=True),
    constants="training eps",
    complete=statistics,
    kept=1,
)


def group_norm(x: Tensor, weight: Any, bias: Any, c: int, size: int, groups: int, eps: float) -> Tensor:
    return torch.native_group_norm(x, weight, bias, len(x), c, size, groups, eps)[0]


def with_bias(x: Tensor, weight: Any, bias: Any, *constants: Any) -> tuple[Any, ...] | None:
    if bias is not None and SMALL * bias.numel() > x.numel():
        return None
    return (None if bias is None else bias.clone(), *constants)


recomputed(
    "NativeGroupNormBackward0",
    group_norm,
    Argument("input", edge=0),
    Argument("weight", edge=1, optional=True),
    Argument(edge=2, optional=True),
    constants="C HxW group eps",
    complete=with_bias,
    kept=2,
)
