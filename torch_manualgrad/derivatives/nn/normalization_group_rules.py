"""The rules of group normalization; the formulas are in `normalization_group`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, is_sharded, rule

from .normalization import gradient_format, random, uneven
from .normalization_group import (
    group_norm_backward_jvp,
    group_norm_double_backward,
    group_norm_invstd_jvp,
    group_norm_jvp,
    group_norm_mean_jvp,
    infinitely_differentiable_native_group_norm_backward,
)

_EPS = 0.1


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


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias, N, C, HxW, group."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(2, 4, 3), draw(4, seed=1), draw(4, seed=2), 2, 4, 3, 2
    yield draw(2, 3, 2, 2), draw(3, seed=1), None, 2, 3, 4, 1
    yield draw(2, 4), None, draw(4, seed=2), 2, 4, 1, 2
    yield draw(1, 2, 4), None, None, 1, 2, 4, 2


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _inputs(dtype, device):
        yield Sample(*given, _EPS)


def _backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, weight, bias, *sizes in _inputs(dtype, device):
        _, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, _EPS)
        g = random(*x.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, mean, rstd, weight, *sizes, [True, *[weight is not None] * 2])


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    """PyTorch's kernels take contiguous tensors only; of a weight they do not say so, and read what is beside it."""
    return [None if x is None else x.contiguous() for x in tensors]


def _probe(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_group_norm(*_contiguous(x, weight, bias), *args)


def _backward_probe(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *rest: Any
) -> list[Tensor]:
    """The backward with the statistics of its input, in place of any others."""
    *sizes, mask = rest
    g, x, weight = _contiguous(g, x, weight)
    _, mean, rstd = torch.ops.aten.native_group_norm(x, None, None, *sizes, _EPS)
    found = torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, *sizes, mask)
    return uneven(*[f for f, yes in zip(found, mask) if yes])


_SOURCE = "Wu, He, Group Normalization, arXiv:1803.08494"

rule(
    "aten::native_group_norm",
    vjp={("input", "weight", "bias"): _vjp},
    jvp={"result0": group_norm_jvp, "result1": _mean_jvp, "result2": _invstd_jvp},
    source=f"ATen infinitely_differentiable_native_group_norm_backward, group_norm_jvp; {_SOURCE}",
    samples=_samples,
    probe=_probe,
)
rule(
    "aten::native_group_norm_backward",
    vjp={("input", "weight", "grad_out"): _double_vjp, ("mean", "rstd"): lambda grad_result0: (None, None)},
    jvp={("result0", "result1", "result2"): group_norm_backward_jvp},
    improves="missing",
    source=f"ATen has none; {_SOURCE}",
    samples=_backward_samples,
    probe=_backward_probe,
)
