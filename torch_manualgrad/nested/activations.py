"""Elementwise activations of nested tensors: PyTorch's own functions on the packed values, if right in every mode.

silu and mish are the exceptions: PyTorch has no reverse mode over dual numbers for them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.internals import entry
from ..core.rule import formula
from .conversion import on_nested
from .fast_path import fast_path, is_plain_call
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
    """Cotangent of $x$, given that of $gelu(x)$: $g (Phi(x) + x phi(x))$, or the derivative of the tanh approximation.

    Args:
        grad: $g$, the shape of ``self``.
        self: $x$, packed values, (*), real.
        approximate: "none" or "tanh".

    Returns:
        (*), the shape and dtype of $x$.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen gelu_backwards_nested; Hendrycks and Gimpel, Gaussian Error Linear Units (2016).
    """
    return torch.ops.aten.gelu_backward(grad, self, approximate=approximate)


@formula
def threshold_backwards_nested(grad_output: Tensor, input: Tensor, threshold: float) -> Tensor:
    """Cotangent of $x$, given that of threshold, or of relu (``threshold`` 0): $g$ where $x > threshold$, else 0.

    Args:
        grad_output: $g$, the shape of ``input``.
        input: $x$, packed values, (*), real.
        threshold: the bound.

    Returns:
        (*), the shape and dtype of $x$.

    Note:
        Where not differentiable: at $x = threshold$, where the derivative is 0.

    References:
        ATen threshold_backwards_nested.
    """
    return torch.ops.aten.threshold_backward(grad_output, input, threshold)


@formula(kernel=("default",))
def silu_backward_nested(grad_output: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $silu(x) = x s(x)$: $g s (1 + x (1 - s))$, $s$ the sigmoid.

    Differentiable in every mode.

    Args:
        grad_output: $g$, the shape of ``self``.
        self: $x$, packed values, (*), real.

    Returns:
        (*), the shape and dtype of $x$.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen silu_backward_nested; PyTorch's own silu_backward has no forward derivative under dual numbers.
    """
    x = self.float() if self.dtype in (torch.float16, torch.bfloat16) else self
    s = x.sigmoid()
    return (grad_output * (s * (1 + x * (1 - s)))).to(self.dtype)


@silu_backward_nested.impl("default")
def _(grad_output: Tensor, self: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(grad_output, self)


@formula(kernel=("default",))
def silu_nested(self: Tensor) -> Tensor:
    """$x s(x)$ of packed values, $s$ the sigmoid.

    Args:
        self: $x$, (*), real.

    Returns:
        (*), the shape and dtype of $x$.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen silu.
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
_fast_silu = fast_path(
    "silu_nested",
    1,
    lambda x: (F.silu(x), (x,)),
    lambda needed, grad, saved: (_silu_backward(grad, *saved),),
    lambda needed, grad, saved: (silu_backward_nested(grad, *saved),),
)


@on_nested
def gelu(input: Ragged, approximate: Literal["none", "tanh"] = "none") -> Ragged:
    """$x Phi(x)$, $Phi$ the normal distribution, or its tanh approximation.

    Args:
        input: $x$, real.
        approximate: "none" or "tanh".

    Returns:
        The components of ``input``.

    Raises:
        ValueError: another ``approximate``.

    Note:
        Where not differentiable: nowhere.

    References:
        `gelu_backwards_nested`.
    """
    return input.like(F.gelu(input.values, approximate=approximate))


@on_nested
def silu(input: Ragged) -> Ragged:
    """$x s(x)$, $s$ the sigmoid.

    Args:
        input: $x$, real.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: nowhere.

    References:
        `silu_backward_nested`.
    """
    return input.like((_fast_silu if is_plain_call(input.values) else silu_nested.op)(input.values))


@on_nested
def relu(input: Ragged) -> Ragged:
    """$max(x, 0)$.

    Args:
        input: $x$, real.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at 0, where the derivative is 0.

    References:
        `threshold_backwards_nested`.
    """
    return input.like(F.relu(input.values))


@on_nested
def threshold(input: Ragged, threshold: float, value: float) -> Ragged:
    """$x$ where $x$ > ``threshold``, else ``value``.

    Args:
        input: $x$, real.
        threshold: the bound.
        value: replaces the other entries.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at $x = threshold$, where the derivative is 0.

    References:
        `threshold_backwards_nested`.
    """
    return input.like(F.threshold(input.values, threshold, value))


@on_nested
def leaky_relu(input: Ragged, negative_slope: float = 0.01) -> Ragged:
    """$x$ where $x > 0$, else ``negative_slope`` times $x$.

    Args:
        input: $x$, real.
        negative_slope: the factor.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at 0, where the derivative is ``negative_slope``.

    References:
        ATen leaky_relu.
    """
    return input.like(F.leaky_relu(input.values, negative_slope))


@on_nested
def hardtanh(input: Ragged, min_val: float = -1.0, max_val: float = 1.0) -> Ragged:
    """$x$, clamped to ``min_val`` and ``max_val``.

    Args:
        input: $x$, real.
        min_val: the lower bound.
        max_val: the upper bound.

    Returns:
        The components of ``input``.

    Raises:
        ValueError: $min_val > max_val$.

    Note:
        Where not differentiable: at the bounds, where the derivative is 0.

    References:
        ATen hardtanh.
    """
    return input.like(F.hardtanh(input.values, min_val, max_val))


@on_nested
def elu(input: Ragged, alpha: float = 1.0) -> Ragged:
    """$x$ where $x > 0$, else $alpha (e^x - 1)$.

    Args:
        input: $x$, real.
        alpha: the factor.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at 0, where the derivative is ``alpha``.

    References:
        ATen elu.
    """
    return input.like(F.elu(input.values, alpha))


@on_nested
def selu(input: Ragged) -> Ragged:
    """`elu` with the constants of self-normalizing networks.

    Args:
        input: $x$, real.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at 0, where the derivative is the one from the left.

    References:
        ATen selu; Klambauer et al., Self-Normalizing Neural Networks (2017).
    """
    return input.like(F.selu(input.values))


@on_nested
def celu(input: Ragged, alpha: float = 1.0) -> Ragged:
    """$max(x, 0) + min(0, alpha (e^(x / alpha) - 1))$.

    Args:
        input: $x$, real.
        alpha: the scale, not 0.

    Returns:
        The components of ``input``.

    Raises:
        RuntimeError: ``alpha`` is 0.

    Note:
        Where not differentiable: nowhere in first order; at 0 in second order.

    References:
        ATen celu.
    """
    return input.like(F.celu(input.values, alpha))


@on_nested
def softplus(input: Ragged, beta: float = 1.0, threshold: float = 20.0) -> Ragged:
    """$log(1 + e^(beta x)) / beta$, and $x$ where $beta x$ > ``threshold``.

    Args:
        input: $x$, real.
        beta: the scale.
        threshold: the value of $beta x$ above which the result is $x$.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: at $beta x = threshold$, where the result jumps by about $e^-threshold / beta$.

    References:
        ATen softplus.
    """
    return input.like(F.softplus(input.values, beta, threshold))


@on_nested
def mish(input: Ragged) -> Ragged:
    """$x tanh(softplus(x))$.

    Args:
        input: $x$, real.

    Returns:
        The components of ``input``.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen mish, which has no reverse mode over dual numbers.
    """
    return input.like(input.values * F.softplus(input.values).tanh())  # F.mish: no reverse over dual numbers
