"""Samples of pooling and unpooling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, Sampler, probe_for, samples_for

from ..drawing import random
from ..probes import laid_out

_aten = torch.ops.aten


def _averages(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        yield Sample(x, [2] * dims, [], [0] * dims, False, True, None)
        yield Sample(x[0], [2] * dims, [1] * dims, [1] * dims, True, False, None)
        yield Sample(x, [2] * dims, [2] * dims, [1] * dims, True, True, 3)

    return samples


def _averages_backward(dims: int) -> Sampler:
    forward = getattr(_aten, f"avg_pool{dims}d")

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _averages(dims)(dtype, device):
            yield Sample(forward(*sample.args).cos(), *sample.args)

    return samples


def _adaptive(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
            yield Sample(x, [2, 3, 1][:dims])
            yield Sample(x[0], [1] * dims)

    return samples


def _adaptive_backward(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _adaptive(dims)(dtype, device):
            x, size = sample.args
            yield Sample(random(*x.shape[:-dims], *size, dtype=dtype, device=device, seed=1), x)

    return samples


# name -> the number of dims, how many arguments its backward takes, and values of the arguments after self
_POOLS: dict[str, tuple[int, int, tuple[tuple[Any, ...], ...]]] = {}
for _dims in (2, 3):
    _values: tuple[tuple[Any, ...], ...] = (
        ([2] * _dims, [], [0] * _dims, [1] * _dims, False),
        ([2] * _dims, [1] * _dims, [1] * _dims, [1, 2, 1][:_dims], True),
    )
    _POOLS[f"max_pool{_dims}d_with_indices"] = (_dims, 5, _values)
    _POOLS[f"adaptive_max_pool{_dims}d"] = (_dims, 0, (([2, 3, 1][:_dims],),))
    _POOLS[f"fractional_max_pool{_dims}d"] = (_dims, 2, (([2, 2, 1][:_dims], [1, 2, 1][:_dims]),))


def _maxima(name: str) -> Sampler:
    dims, _, values = _POOLS[name]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        for rest in values:
            if name.startswith("fractional"):
                rest = (*rest, random(1, 2, dims, dtype=dtype, device=device, seed=1).sigmoid())
            yield Sample(x, *rest)

    return samples


def _maxima_backward(name: str) -> Sampler:
    count = _POOLS[name][1]

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _maxima(name)(dtype, device):
            maxima, indices = getattr(_aten, name)(*sample.args)
            yield Sample(maxima.cos(), sample.args[0], *sample.args[1 : 1 + count], indices)

    return samples


def _first(name: str) -> Callable[..., Tensor]:
    """The maxima, without their places; the random numbers that choose the windows are constant."""

    def probe(*args: Any) -> Tensor:
        return getattr(_aten, name)(*args[:-1], args[-1].detach() if isinstance(args[-1], Tensor) else args[-1])[0]

    return probe


def _unpooling(dims: int) -> Sampler:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        size = [2, 4, 3][:dims]
        found = getattr(_aten, f"max_pool{dims}d_with_indices")(
            random(1, 2, *size, dtype=dtype, device=device), [1, *[2] * (dims - 1)]
        )
        yield Sample(*found, size, *([[1, 2, 2], [0, 0, 0]] if dims == 3 else []))

    return samples


for _dims in (2, 3):
    samples_for(f"aten::avg_pool{_dims}d")(_averages(_dims))
    samples_for(f"aten::avg_pool{_dims}d_backward")(_averages_backward(_dims))
    samples_for(f"aten::_adaptive_avg_pool{_dims}d")(_adaptive(_dims))
    samples_for(f"aten::_adaptive_avg_pool{_dims}d_backward")(_adaptive_backward(_dims))
    samples_for(f"aten::max_unpool{_dims}d")(_unpooling(_dims))
for _name in _POOLS:
    samples_for(f"aten::{_name}")(_maxima(_name))
    samples_for(f"aten::{_name}_backward")(_maxima_backward(_name))
    if _name.startswith("fractional"):
        probe_for(f"aten::{_name}")(_first(_name))
    if _name.startswith("fractional") or _name == "adaptive_max_pool3d":
        probe_for(f"aten::{_name}_backward")(laid_out(getattr(_aten, f"{_name}_backward")))
