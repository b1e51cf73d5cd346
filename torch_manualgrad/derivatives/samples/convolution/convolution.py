"""Samples of convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import (
    Sample,
    Sampler,
    probe_for,
    samples_for,
)

from ..drawing import random
from ..probes import as_function, laid_out

_aten = torch.ops.aten

# Of the input and the weight: sizes; stride, padding, dilation, transposed, output_padding, groups; with a bias or not.
_CASES: tuple[tuple[tuple[int, ...], tuple[int, ...], list[Any], bool], ...] = (
    ((2, 2, 5), (3, 2, 2), [[2], [1], [1], False, [0], 1], True),
    ((1, 2, 3, 4), (2, 1, 2, 2), [[1, 2], [0, 1], [2, 1], False, [0, 0], 2], True),
    ((1, 2, 3, 2), (2, 1, 2, 2), [[2, 2], [0, 1], [1, 1], True, [1, 0], 1], False),
    ((1, 1, 2, 3, 2), (2, 1, 1, 2, 2), [[1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1], True),
)


def _samples(*flags: bool) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        for x_sizes, w_sizes, rest, with_bias in _CASES:
            channels = w_sizes[1] * rest[5] if rest[3] else w_sizes[0]
            x, w, bias = _tensors(x_sizes, w_sizes, dtype, device, channels)
            yield Sample(x, w, bias if with_bias else None, *rest, *flags)
        x, w, bias = _tensors((0, 2, 5), (3, 2, 2), dtype, device, 3)
        yield Sample(x, w, bias, *_CASES[0][2], *flags)

    return samples


def _tensors(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, device: Any, channels: int) -> list[Tensor]:
    return [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate((x, w, (channels,)))]


@samples_for("aten::convolution_backward")
def backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in _samples()(dtype, device):
        x, w, bias, *rest = sample.args
        result = _aten.convolution(x, w, bias, *rest)
        g = random(*result.shape, dtype=dtype, device=device, seed=3)
        yield Sample(g, x, w, [result.shape[1]], *rest, [True, bias is not None, bias is not None])


@probe_for("aten::convolution_backward")
def wanted(*args: Any) -> list[Tensor]:
    return [g for g in _aten.convolution_backward(*args) if g is not None]


def _slow_samples(dims: int, *cases: Sequence[Any], transposed: bool = False) -> Sampler:
    """For an operator that takes the size of the kernel before the bias; ``cases`` are its arguments after the bias."""
    x, w = (1, 2, *(3, 4, 2)[:dims]), (2, 3 if transposed else 2, *(2, 2, 1)[:dims])

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        for number, rest in enumerate(cases):
            *tensors, bias = _tensors(x, w, dtype, device, 3 if transposed else 2)
            yield Sample(*tensors, list(w[2:]), None if number else bias, *rest)

    return samples


_IN_2D = _slow_samples(2, ([1, 1], [0, 0]), ([2, 1], [1, 0]))
_SLOW = {
    "_slow_conv2d_forward": _IN_2D,
    "slow_conv3d_forward": _slow_samples(3, ([1, 1, 1], [0, 0, 0]), ([1, 2, 1], [0, 1, 0])),
    "slow_conv_dilated2d": _slow_samples(2, ([1, 1], [0, 1], [1, 2]), ([2, 1], [1, 0], [2, 1])),
    "slow_conv_dilated3d": _slow_samples(3, ([1, 1, 1], [0, 1, 0], [1, 2, 1])),
    "slow_conv_transpose2d": _slow_samples(
        2, ([2, 1], [0, 1], [1, 0], [1, 1]), ([1, 1], [0, 0], [0, 0], [2, 1]), transposed=True
    ),
    "slow_conv_transpose3d": _slow_samples(3, ([2, 1, 1], [0, 1, 0], [1, 0, 0], [1, 1, 1]), transposed=True),
}
for _name, _sampler in _SLOW.items():
    samples_for(f"aten::{_name}")(_sampler)
    probe_for(f"aten::{_name}")(as_function(getattr(_aten, _name)))


@samples_for("aten::_slow_conv2d_backward.output_mask")
def slow_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for sample in _IN_2D(dtype, device):
        x, w, kernel, bias, *rest = sample.args
        g = _aten._slow_conv2d_forward(*sample.args).cos()
        yield Sample(g, x, w, kernel, *rest, [True, True, bias is not None])


@samples_for("aten::conv_tbc")
def tbc_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        for length, pad in ((2, 0), (3, 1)):
            yield Sample(*_tensors((4, 2, 2), (length, 2, 3), dtype, device, 3), pad)


samples_for("aten::convolution")(_samples())
samples_for("aten::_convolution")(_samples(False, False, True, True))
probe_for("aten::_slow_conv2d_backward.output_mask")(laid_out(_aten._slow_conv2d_backward.output_mask))
probe_for("aten::conv_tbc")(laid_out(_aten.conv_tbc))
