"""Elementwise activations of nested tensors: PyTorch's own on the packed values where every mode of theirs holds.

silu and mish are the exceptions: PyTorch has no reverse over dual numbers for either.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.formula import formula
from ..core.internals import entry
from .conversion import on_nested
from .fast_path import alone, shortened
from .ragged import Ragged

__all__ = [
    "celu",
    "elu",
    "gelu",
    "hardtanh",
    "leaky_relu",
    "mish",
    "relu",
    "selu",
    "silu",
    "softplus",
    "threshold",
]


@formula
def gelu_backwards_nested(grad: Tensor, self: Tensor, approximate: str) -> Tensor:
    """Cotangent of x for that of gelu: g (Phi(x) + x phi(x)), or the derivative of the tanh formula.

    Args:
        grad: g. self: x, packed values of any shape, real. approximate: "none" or "tanh".
    Returns:
        The shape of x. Where not differentiable: none.
    Source: ATen gelu_backwards_nested; Hendrycks and Gimpel, Gaussian Error Linear Units (2016).
    """
    return torch.ops.aten.gelu_backward(grad, self, approximate=approximate)


@formula
def threshold_backwards_nested(grad_output: Tensor, input: Tensor, threshold: float) -> Tensor:
    """Cotangent of x for that of threshold, or relu (``threshold`` 0): g where x > threshold, else 0.

    Args:
        grad_output: g. input: x, packed values of any shape, real. threshold: the bound.
    Returns:
        The shape of x. Where not differentiable: 0 at x = threshold.
    Source: ATen threshold_backwards_nested.
    """
    return torch.ops.aten.threshold_backward(grad_output, input, threshold)


@formula(kernel=("default",))
def silu_backward_nested(grad_output: Tensor, self: Tensor) -> Tensor:
    """Cotangent of x for that of silu, x s(x): g s (1 + x (1 - s)), s the sigmoid; differentiable in every mode.

    Args:
        grad_output: g. self: x, packed values of any shape, real.
    Returns:
        The shape of x. Where not differentiable: none.
    Source: ATen silu_backward_nested; PyTorch's own silu_backward has no forward derivative under dual numbers.
    """
    x = self.float() if self.dtype in (torch.float16, torch.bfloat16) else self
    s = x.sigmoid()
    return (grad_output * (s * (1 + x * (1 - s)))).to(self.dtype)


@silu_backward_nested.impl("default")
def _(grad_output: Tensor, self: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad_output, self)


@formula(kernel=("default",))
def silu_nested(self: Tensor) -> Tensor:
    """x s(x) of packed values, s the sigmoid.

    Args: self: x, any shape, real. Returns: the shape of x. Where not differentiable: none.
    Source: ATen silu.
    """
    return F.silu(self)


@silu_nested.impl_save_for_backward
def _(inputs: Any, output: Tensor) -> Tensor:
    return inputs.self


@silu_nested.impl_backward
def _(ctx: Any, x: Tensor, grad: Tensor) -> Any:
    return {"self": silu_backward_nested(grad, x)}


@silu_nested.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    return silu_backward_nested(tangents.self, inputs.self)


_silu_backward = entry(torch.ops.aten.silu_backward.default)
_short_silu = shortened(
    "silu_nested",
    1,
    lambda x: (F.silu(x), (x,)),
    lambda needed, grad, saved: (_silu_backward(grad, *saved),),
    lambda needed, grad, saved: (silu_backward_nested(grad, *saved),),
)


@on_nested
def gelu(input: Ragged, approximate: Literal["none", "tanh"] = "none") -> Ragged:
    """x Phi(x), Phi the normal distribution, or its tanh approximation (``approximate="tanh"``).

    Raises: ValueError: another ``approximate``. Where not differentiable: none. Source: gelu_backwards_nested.
    """
    return input.like(F.gelu(input.values, approximate=approximate))


@on_nested
def silu(input: Ragged) -> Ragged:
    """x s(x), s the sigmoid. Where not differentiable: none. Source: silu_backward_nested."""
    return input.like((_short_silu if alone(input.values) else silu_nested.op)(input.values))


@on_nested
def relu(input: Ragged) -> Ragged:
    """max(x, 0). Where not differentiable: derivative 0 at 0. Source: threshold_backwards_nested."""
    return input.like(F.relu(input.values))


@on_nested
def threshold(input: Ragged, threshold: float, value: float) -> Ragged:
    """x where x > ``threshold``, else ``value``. Where not differentiable: derivative 0 at x = threshold.

    Source: threshold_backwards_nested.
    """
    return input.like(F.threshold(input.values, threshold, value))


@on_nested
def leaky_relu(input: Ragged, negative_slope: float = 0.01) -> Ragged:
    """x where x > 0, else ``negative_slope`` x. Where not differentiable: derivative ``negative_slope`` at 0."""
    return input.like(F.leaky_relu(input.values, negative_slope))


@on_nested
def hardtanh(input: Ragged, min_val: float = -1.0, max_val: float = 1.0) -> Ragged:
    """x, clamped. Where not differentiable: derivative 0 at the bounds. Raises: ValueError: min_val > max_val."""
    return input.like(F.hardtanh(input.values, min_val, max_val))


@on_nested
def elu(input: Ragged, alpha: float = 1.0) -> Ragged:
    """x where x > 0, else ``alpha`` (e^x - 1). Where not differentiable: derivative ``alpha`` at 0."""
    return input.like(F.elu(input.values, alpha))


@on_nested
def selu(input: Ragged) -> Ragged:
    """elu with the constants of self-normalizing networks. Where not differentiable: as elu."""
    return input.like(F.selu(input.values))


@on_nested
def celu(input: Ragged, alpha: float = 1.0) -> Ragged:
    """max(x, 0) + min(0, ``alpha`` (e^(x / alpha) - 1)). Raises: RuntimeError: ``alpha`` is 0. Once differentiable at 0."""
    return input.like(F.celu(input.values, alpha))


@on_nested
def softplus(input: Ragged, beta: float = 1.0, threshold: float = 20.0) -> Ragged:
    """log(1 + e^(beta x)) / beta, and x where beta x > ``threshold``. Where not differentiable: a jump there, of e^-threshold."""
    return input.like(F.softplus(input.values, beta, threshold))


@on_nested
def mish(input: Ragged) -> Ragged:
    """x tanh(softplus(x)). Where not differentiable: none."""
    return input.like(input.values * F.softplus(input.values).tanh())  # F.mish: no reverse over dual numbers
