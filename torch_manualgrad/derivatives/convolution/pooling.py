"""Average pooling, which is linear, and its backward operators, which read of the input no more than its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Rule, Sample, bound_to, linear_in, rule

from .common import random, zero_of

__all__ = ["linear_backward"]

_aten = torch.ops.aten
_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def linear_backward(name: str, vjp: Callable[..., Any], *, arguments: Sequence[str] = (), **about: Any) -> Rule:
    """The rule of a backward operator that is linear in grad_output and constant in self.

    Args:
        name: the operator; grad_output and self come first.
        vjp: the cotangent of grad_output.
        arguments: the names of the others.
        about: arguments of `rule`.
    """
    packet = getattr(_aten, name.removeprefix("aten::"))

    def jvp(grad_output_t: Tensor | None, self_p: Tensor, *rest: Any) -> Tensor | None:
        return None if grad_output_t is None else packet(grad_output_t, self_p, *rest)

    return rule(
        name,
        vjp={"grad_output": vjp, "self": lambda grad, self_sizes: zero_of(grad, self_sizes)},
        jvp={"result": bound_to(jvp, ["grad_output_t", "self_p", *arguments])},
        **{"source": "ATen derivatives.yaml", "kind": "linear", **about},
    )


# -- windows of one size ----------------------------------------------------------------------------------------------


def _samples(dims: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if dtype.is_complex:
            return
        x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
        yield Sample(x, [2] * dims, [], [0] * dims, False, True, None)
        yield Sample(x[0], [2] * dims, [1] * dims, [1] * dims, True, False, None)
        yield Sample(x, [2] * dims, [2] * dims, [1] * dims, True, True, 3)

    return samples


def _backward_samples(dims: int) -> Callable[..., Iterable[Sample]]:
    forward = getattr(_aten, f"avg_pool{dims}d")

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _samples(dims)(dtype, device):
            yield Sample(forward(*sample.args).cos(), *sample.args)

    return samples


def _average(dims: int) -> None:
    forward, backward = (getattr(_aten, f"avg_pool{dims}d{s}") for s in ("", "_backward"))

    def vjp(grad: Tensor, x: Tensor, *window: Any) -> Tensor:
        return backward(grad, x, *window)

    def backward_vjp(grad: Tensor, *window: Any) -> Tensor:
        return forward(grad, *window)

    linear_in(f"aten::avg_pool{dims}d", {"self": bound_to(vjp, ["grad", "self", *_WINDOW])}, samples=_samples(dims))
    linear_backward(
        f"aten::avg_pool{dims}d_backward",
        bound_to(backward_vjp, ["grad", *_WINDOW]),
        arguments=_WINDOW,
        samples=_backward_samples(dims),
    )


# -- windows of an output of one size -----------------------------------------------------------------------------------


def _adaptive_samples(dims: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        if not dtype.is_complex:
            x = random(1, 2, *(3, 4, 2)[:dims], dtype=dtype, device=device)
            yield Sample(x, [2, 3, 1][:dims])
            yield Sample(x[0], [1] * dims)

    return samples


def _adaptive_backward_samples(dims: int) -> Callable[..., Iterable[Sample]]:
    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sample in _adaptive_samples(dims)(dtype, device):
            x, size = sample.args
            yield Sample(random(*x.shape[:-dims], *size, dtype=dtype, device=device, seed=1), x)

    return samples


def _adaptive(dims: int) -> None:
    forward, backward = (getattr(_aten, f"_adaptive_avg_pool{dims}d{s}") for s in ("", "_backward"))
    linear_in(
        f"aten::_adaptive_avg_pool{dims}d",
        {"self": lambda grad, self: backward(grad, self)},
        samples=_adaptive_samples(dims),
    )
    linear_backward(
        f"aten::_adaptive_avg_pool{dims}d_backward",
        lambda grad, grad_output_sizes: forward(grad, grad_output_sizes[-dims:]),
        samples=_adaptive_backward_samples(dims),
    )


for _dims in (2, 3):
    _average(_dims)
    _adaptive(_dims)
