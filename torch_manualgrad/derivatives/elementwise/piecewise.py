"""Piecewise activations: relu and its variants, elu, hard and shrinking activations, and their backward operators.

At nan, PyTorch's backward kernels of elu, celu, hardswish, hardtanh, hardshrink and softshrink are inconsistent: elements that
they process in vectors get one derivative, and the last few another. These rules have the derivative of the vectors
everywhere: nan for elu, celu and hardswish, else 0.

Note:
    Where not differentiable: where two pieces meet. The derivative there is PyTorch's: that of the left piece for relu,
    threshold, leaky_relu, elu and celu, that of the outer piece for the hard and the shrinking ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import FromResult, bind, elementwise, formula, rule

aten = torch.ops.aten


def _elu(self: Tensor, alpha: Number, scale: Number, input_scale: Number) -> Tensor:
    """scale where $x > 0$, else $alpha scale input_scale exp(input_scale x)$."""
    left = ~(self > 0)
    return torch.where(left, (torch.where(left, self, 0) * input_scale).exp() * (alpha * scale * input_scale), scale)


def _elu_slope(self_or_result: Tensor, alpha: Number, scale: Number, input_scale: Number, is_result: bool) -> Tensor:
    """The slope of elu as a function of $x$, or of the result."""
    if not is_result:
        return _elu(self_or_result, alpha, scale, input_scale)
    return torch.where(self_or_result > 0, scale, (self_or_result + alpha * scale) * input_scale)


@formula
def elu_double_backward(
    grad: Tensor,
    grad_output: Tensor,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: Tensor,
) -> Tensor:
    """Cotangent of $x$, or of the result $y$, given that of the gradient of elu: $g g_1$ times the slope's derivative.

    Args:
        grad: cotangent of the gradient.
        grad_output: $g_1$, cotangent of the result of the first order.
        alpha: the factor in $scale alpha (exp(input_scale x) - 1)$, the function where $x <= 0$.
        scale: the factor in the same expression; the slope where $x > 0$.
        input_scale: the factor in the same expression.
        is_result: whether the slope was given as a function of $y$.
        self_or_result: $x$ or $y$, real.

    Returns:
        The shape of ``grad``; zero where $x >= 0$.
    """
    slope = 1 if is_result else _elu(self_or_result, alpha, scale, input_scale)
    return grad * grad_output * torch.where(self_or_result < 0, slope, 0) * input_scale


def _hardswish(self: Tensor) -> Tensor:
    return torch.where(self <= -3, 0, torch.where(self >= 3, 1, self / 3 + 0.5))


def _selected(grad: Tensor, chosen: Tensor, self: Tensor) -> Tensor:
    """The cotangent where chosen, else 0. As in PyTorch it can be differentiated in $x$, with the derivative 0."""
    return torch.where(chosen, grad, torch.where(chosen, self, 0) if torch.is_grad_enabled() else 0)


def _between(grad: Tensor, self: Tensor, min_val: Number, max_val: Number) -> Tensor:
    """The cotangent where $x$ is between the two."""
    return _selected(grad, (self > min_val) & (self < max_val), self)


def _outside(grad: Tensor, self: Tensor, lambd: Number) -> Tensor:
    """The cotangent where $|x|$ is larger than lambd."""
    return _selected(grad, (self < -lambd) | (self > lambd), self)


def _left(self: Tensor, *factors: Tensor | None) -> Tensor:
    """The product of the factors where $x <= 0$; None is zero."""
    if any(f is None for f in factors):
        return torch.zeros_like(self)
    return torch.where(self > 0, 0, math.prod(factors))


@formula
def prelu_jvp(self_p: Tensor, weight_p: Tensor, self_t: Tensor | None, weight_t: Tensor | None) -> Tensor:
    """Tangent of $x$ where $x > 0$, else $w x$: that of $x$ there, else $w x_t + w_t x$.

    Args:
        self_p: $x$, real.
        weight_p: $w$, broadcast with $x$.
        self_t: tangent of $x$, or None.
        weight_t: tangent of $w$, or None.

    Returns:
        The shape that the two broadcast to.

    Note:
        Where not differentiable: at $x = 0$, which counts as left, as in ATen _prelu_kernel_backward.

    References:
        ATen derivatives.yaml, _prelu_kernel.
    """
    along = torch.zeros_like(self_p) if self_t is None else torch.where(self_p > 0, self_t, self_t * weight_p)
    return along + _left(self_p, weight_t, self_p)


# -- the rules --------------------------------------------------------------------------------------------------------

# PyTorch's own backward operators, which are linear in the cotangent
_threshold = bind(aten.threshold_backward.default, grad_output="grad")
_leaky = bind(aten.leaky_relu_backward.default, grad_output="grad", self_is_result=False)
_of_relu = bind(aten.threshold_backward.default, grad_output="grad", self="result", threshold=0)
_of_leaky = bind(aten.leaky_relu_backward.default, grad_output="grad", self="result", self_is_result=True)

elementwise("aten::relu", _of_relu, real_only=True, finite=True)
elementwise(
    "aten::leaky_relu",
    _leaky,
    from_result=FromResult(_of_leaky, nonnegative=("negative_slope",)),
    real_only=True,
    arguments=[{}, {"negative_slope": 0.3}],
    finite=True,
)
for _name, _product, _values in (
    ("aten::threshold", _threshold, [{"threshold": 0.5, "value": 2.0}]),
    ("aten::hardtanh", _between, [{"min_val": -1.1, "max_val": 1.3}]),
    ("aten::hardshrink", _outside, [{}, {"lambd": 1}]),
    ("aten::softshrink", _outside, [{}, {"lambd": 1}]),
):
    elementwise(_name, _product, real_only=True, arguments=_values, finite=True)
for _name, _grad, _product in (
    ("aten::threshold_backward", "grad_output", _threshold),
    ("aten::leaky_relu_backward", "grad_output", _leaky),
    ("aten::hardtanh_backward", "grad_output", _between),
    ("aten::hardshrink_backward", "grad_out", _outside),
    ("aten::softshrink_backward", "grad_output", _outside),
):
    elementwise(_name, {_grad: _product, "self": None}, finite=True)

elementwise(
    "aten::elu",
    _elu,
    from_result=FromResult(
        bind(_elu_slope, self_or_result="result", is_result=True), nonnegative=("alpha", "scale", "input_scale")
    ),
    real_only=True,
    arguments=[{}, {"alpha": 1.5, "scale": 1.2, "input_scale": 0.7}],
)
elementwise("aten::elu_backward", {"grad_output": _elu_slope, "self_or_result": elu_double_backward})
elementwise(
    "aten::celu",
    lambda self, alpha: _elu(self, alpha, 1, 1 / alpha),
    from_result=FromResult(lambda result, alpha: _elu_slope(result, alpha, 1, 1 / alpha, True), nonnegative=("alpha",)),
    real_only=True,
    arguments=[{}, {"alpha": 2.0}],
)
elementwise(
    "aten::hardsigmoid",
    lambda grad, self: _between(grad / 6, self, -3, 3),
    domain=(-4, 4),
    real_only=True,
    improves=("values", "missing"),  # PyTorch's kernel rounds 1/6 to float32
    source="ATen hardsigmoid_backward; its derivatives are new",
    finite=True,
)
elementwise("aten::hardswish", _hardswish, domain=(-4, 4), real_only=True)
elementwise(
    "aten::hardswish_backward",
    {
        "grad_output": _hardswish,
        "self": lambda grad, grad_output, self: torch.where((self > -3) & (self < 3), grad * grad_output / 3, 0),
    },
)
elementwise(
    "aten::_prelu_kernel",
    {
        "self": lambda self, weight: torch.where(self > 0, torch.where(self > 0, 1, self), weight),  # see `_selected`
        "weight": lambda grad, self: torch.where(self > 0, 0, grad * torch.where(self > 0, 0, self)),
    },
)
rule(
    "aten::_prelu_kernel_backward",
    vjp={
        "grad_output": prelu_jvp.bind(self_p="self", weight_p="weight", self_t="grad_result0", weight_t="grad_result1"),
        "self": lambda grad_result1, grad_output, self: _left(self, grad_result1, grad_output),
        "weight": lambda grad_result0, grad_output, self, weight_sizes: _left(
            self, grad_result0, grad_output
        ).sum_to_size(weight_sizes),
    },
    source="ATen derivatives.yaml",
)
