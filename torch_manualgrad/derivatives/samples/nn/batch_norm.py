"""Samples of batch normalization, with and without running statistics, and of the operators of cuDNN and MIOpen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import first_of, uneven

_EPS = 0.1


def _running(like: Tensor) -> tuple[Tensor, Tensor]:
    """A mean and a variance for each channel, the same at each call."""

    def between(a: float, b: float) -> Tensor:
        return torch.linspace(a, b, like.shape[1], dtype=like.dtype, device=like.device)

    return between(-0.5, 0.4), between(0.6, 1.7)


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[Any, ...]]:
    """Input, weight, bias."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    yield draw(5, 3), draw(3, seed=1), draw(3, seed=2)
    yield draw(2, 2, 3), draw(2, seed=1), None
    yield draw(2, 2, 2, 2).contiguous(memory_format=torch.channels_last), None, draw(2, seed=2)
    yield draw(3, 2, 2), None, None


def _samples_with_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """With running statistics, which training writes to."""
    for train in (True, False):
        for given in _inputs(dtype, device):
            yield Sample(*given, *_running(given[0]), train, 0.1, _EPS)


def _samples_of_update(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Training with both parameters: PyTorch's fake kernel requires them."""
    for x, _, bias in _inputs(dtype, device):
        weight = random(x.shape[1], dtype=dtype, device=device, seed=1)
        yield Sample(x, weight, weight if bias is None else bias, *_running(x), 0.1, _EPS)


def _probe_with_statistics(operator_name: str) -> Callable[..., Tensor]:
    """The first output of an operator that writes to running statistics. Under vmap they are batched."""

    def probe(*args: Any) -> Tensor:
        batched = torch.zeros_like(args[0]).sum()
        running = [x + torch.zeros_like(given) + batched for x, given in zip(_running(args[0]), args[3:5])]
        result: Tensor = getattr(torch.ops.aten, operator_name)(*args[:3], *running, *args[5:])[0]
        return result

    return probe


@samples_for("aten::native_batch_norm")
def batch_norm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for given in _inputs(dtype, device):
            running: tuple[Any, ...] = (None, None) if train else _running(given[0])
            yield Sample(*given, *running, train, 0.1, _EPS)


@samples_for("aten::_native_batch_norm_legit.no_stats")
def without_statistics(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for given in _inputs(dtype, device):
        yield Sample(*given, True, 0.1, _EPS)


@probe_for("aten::native_batch_norm")
def batch_norm_probe(*args: Any) -> Tensor:
    """The first output, with fixed running statistics, as it has no derivative with respect to them."""
    running = args[3:5] if args[3] is None else _running(args[0])
    return first_of("native_batch_norm")(*args[:3], *running, *args[5:])


@samples_for("aten::native_batch_norm_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for train in (True, False):
        for x, weight, bias in _inputs(dtype, device):
            x = x.contiguous()  # PyTorch's fake kernel supports no other layout
            running: tuple[Any, ...] = (None, None) if train else _running(x)
            g = random(*x.shape, dtype=dtype, device=device, seed=3)
            _, *saved = torch.ops.aten.native_batch_norm(x, weight, bias, *running, train, 0.1, _EPS)
            mask = [True, weight is not None, bias is not None]
            yield Sample(g, x, weight, *running, *saved, train, _EPS, mask)


@samples_for("aten::batch_norm_backward")
def backward_with_reserve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Samples with a weight, which batch_norm_backward requires."""
    reserve = torch.empty(0, dtype=torch.uint8, device=device)
    for sample in backward(dtype, device):
        if sample.args[2] is not None:
            yield Sample(*sample.args, reserve)


def _backward_probe(operator: str) -> Callable[..., list[Tensor]]:
    """The backward with the statistics of its own input, and fixed running ones."""

    def probe(*args: Any) -> list[Tensor]:
        g, x, weight, running_mean, _, _, _, train, *rest = args
        running = (None, None) if running_mean is None else _running(x)
        _, *saved = torch.ops.aten.native_batch_norm(x, None, None, *running, train, 0.1, _EPS)
        found = getattr(torch.ops.aten, operator)(g, x, weight, *running, *saved, train, *rest)
        return uneven(*[f for f, yes in zip(found, rest[1]) if yes])

    return probe


samples_for("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional")(_samples_with_statistics)
samples_for("aten::_batch_norm_with_update", "aten::_batch_norm_with_update_functional")(_samples_of_update)
probe_for("aten::_native_batch_norm_legit.no_stats")(first_of("_native_batch_norm_legit", "no_stats"))
for _name in ("_native_batch_norm_legit", "_batch_norm_with_update"):
    for _form in (_name, f"{_name}_functional"):
        probe_for(f"aten::{_form}")(_probe_with_statistics(_form))
for _name in ("native_batch_norm_backward", "batch_norm_backward"):
    probe_for(f"aten::{_name}")(_backward_probe(_name))


# -- the operators of cuDNN and MIOpen --------------------------------------------------------------------------------


def drawn_on_gpu(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return random(*shape, dtype=dtype, device="cuda", seed=seed)


def gpu_inputs(dtype: torch.dtype) -> list[Any]:
    return (
        []
        if dtype.is_complex
        else [drawn_on_gpu(4, 2, 3, dtype=dtype), *[drawn_on_gpu(2, dtype=dtype, seed=k) for k in (1, 2)]]
    )


def _gpu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if given := gpu_inputs(dtype):
        yield Sample(*given, None, None, True, 0.1, _EPS)


def _gpu_backward_samples(library: str) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if given := gpu_inputs(dtype):
            _, *saved = getattr(torch.ops.aten, f"{library}_batch_norm")(*given, None, None, True, 0.1, _EPS)
            g = drawn_on_gpu(4, 2, 3, dtype=dtype, seed=3)
            yield Sample(given[0], g, given[1], None, None, *saved[:2], _EPS, *saved[2:])

    return samples


def _gpu_backward_probe(library: str) -> Callable[..., Any]:
    """The backward with the statistics of its own input, whatever statistics it is given."""

    def probe(x: Tensor, g: Tensor, weight: Tensor, *_: Any) -> Any:
        forward, backward = (getattr(torch.ops.aten, f"{library}_batch_norm{s}") for s in ("", "_backward"))
        _, *saved = forward(x, weight, torch.zeros_like(weight), None, None, True, 0.1, _EPS)
        return backward(x, g, weight, None, None, *saved[:2], _EPS, *saved[2:])

    return probe


for _library in ("cudnn", "miopen"):
    samples_for(f"aten::{_library}_batch_norm")(_gpu_samples)
    samples_for(f"aten::{_library}_batch_norm_backward")(_gpu_backward_samples(_library))
    probe_for(f"aten::{_library}_batch_norm")(first_of(f"{_library}_batch_norm"))
    probe_for(f"aten::{_library}_batch_norm_backward")(_gpu_backward_probe(_library))
