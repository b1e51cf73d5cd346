"""Samples of native_layer_norm, native_layer_norm_backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import first_of, uneven

_EPS = 0.1


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, normalized_shape, weight, bias."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(3, 4), [4], draw(4, seed=1), draw(4, seed=2)
    yield draw(2, 2, 3), [2, 3], draw(2, 3, seed=1), None
    yield draw(2, 3), [3], None, draw(3, seed=2)
    yield draw(4, 3).mT, [4], None, None
    yield draw(3), [3], draw(3, seed=1), draw(3, seed=2)
    yield draw(0, 3), [3], draw(3, seed=1), draw(3, seed=2)


@samples_for("aten::native_layer_norm")
def layer_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _inputs(dtype, device):
        yield Sample(*given, _EPS)


@samples_for("aten::native_layer_norm_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, shape, weight, bias in _inputs(dtype, device):
        _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, _EPS)
        g = random(*x.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, shape, mean, rstd, weight, bias, [True, weight is not None, bias is not None])


@probe_for("aten::native_layer_norm_backward")
def backward_probe(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Any:
    """The backward with the statistics of its own input, whatever statistics it is given."""
    _, mean, rstd = torch.native_layer_norm(input, normalized_shape, None, None, _EPS)
    found = torch.ops.aten.native_layer_norm_backward(
        grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
    )
    return uneven(*[f for f, yes in zip(found, output_mask) if yes])


probe_for("aten::native_layer_norm")(first_of("native_layer_norm"))
