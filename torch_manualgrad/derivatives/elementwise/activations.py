"""Smooth activations: sigmoid, softplus, silu, mish, gelu.

The formulas use the sigmoid of $-x$ instead of one minus the sigmoid of $x$, which is only rounding error for large $x$.

Args:
    grad_output: cotangent of the result.
    input: $x$, real.
    grad: the product of the cotangents of both orders.
"""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import bind, elementwise, formula, real, rule

from ..shape.common import of_dtype
from ..terms import sum_over_tangents
from .saturating import logistic, logistic_slope, normal_density

aten = torch.ops.aten


@formula
def infinitely_differentiable_silu_backward(grad_output: Tensor, input: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $x s(x)$, with $s$ the sigmoid: $g conj(s (1 + x (1 - s)))$.

    Args:
        input: $x$, real or complex.

    Returns:
        The shape of ``grad_output``.
    """
    s = input.sigmoid()
    return grad_output * (s * (1 + input * (1 - s))).conj()


@formula
def infinitely_differentiable_mish_backward(grad_output: Tensor, input: Tensor) -> Tensor:
    """Cotangent of $x$, given that of $x t$ with $t = tanh(softplus(x))$: $g (t + x s(x) (1 - t^2))$, $s$ the sigmoid.

    $1 - t^2$ is the square of the hyperbolic secant, $4 s(2 u) s(-2 u)$ of $u = softplus(x)$.

    Returns:
        The shape of ``grad_output``; finite in every order for large $x$, where $exp(x)$ is not.
    """
    u = -torch.nn.functional.logsigmoid(-input)
    return grad_output * (u.tanh() + input * logistic(input) * (4 * logistic_slope(2 * u)))


@formula
def log_sigmoid_double_backward(grad: Tensor, input: Tensor) -> Tensor:
    """A cotangent times the second derivative of $log s(x)$, with $s$ the sigmoid: $-g s(x) s(-x)$.

    Returns:
        The shape of ``grad``.
    """
    return -grad * logistic_slope(input)


@formula
def softplus_double_backward(grad: Tensor, input: Tensor, beta: Number, threshold: Number) -> Tensor:
    """A cotangent times the second derivative of $log(1 + exp(b x)) / b$: $g b s(b x) s(-b x)$, with $s$ the sigmoid.

    Args:
        beta: $b$.
        threshold: where $b x$ is above it, the function is $x$ and the result is zero.

    Returns:
        The shape of ``grad``.
    """
    x = input * beta
    return grad * torch.where(x > threshold, 0, logistic_slope(x) * beta)


@formula
def gelu_double_backward(ggI: Tensor, gO: Tensor, input: Tensor, approximate: str) -> Tensor:
    """A cotangent times the second derivative of $x Phi(x)$: $g phi(x) (2 - x^2)$, $phi$ the normal density.

    With approximate = "tanh" the function is $x (1 + tanh u) / 2$, and $u$ a polynomial of the third degree.

    Args:
        ggI: cotangent of the gradient of $x$.
        gO: cotangent of the result of the first order.
        approximate: "none" or "tanh".

    Returns:
        The shape of ``input``.
    """
    x = input
    if approximate == "none":
        return ggI * gO * (normal_density(x) * (2 - x * x))
    u, du, ddu = _tanh_parts(x)
    slope = 4 * logistic_slope(2 * u)  # of tanh u
    dt = slope * du  # first, because the square of du leaves the range before x does
    return ggI * gO * (dt + x * (slope * ddu / 2 - u.tanh() * dt * du))


def _tanh_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """$u = sqrt(2 / pi) (x + 0.044715 x^3)$; $u'$; $u''$."""
    scale, cubic = sqrt(2 / pi), 0.044715
    return scale * (x + cubic * x * x * x), scale * (1 + 3 * cubic * x * x), scale * 6 * cubic * x


def _gelu(self: Tensor, approximate: str) -> Tensor:
    if approximate == "none":
        return torch.erfc(-self / sqrt(2)) / 2 + self * normal_density(self)
    u, du, _ = _tanh_parts(self)
    return logistic(2 * u) + self * (2 * logistic_slope(2 * u)) * du


def _softplus(self: Tensor, beta: Number, threshold: Number) -> Tensor:
    return torch.where(self * beta > threshold, 1, logistic(self * beta))


def _sigmoid_product(grad: Tensor, output: Tensor) -> Tensor:
    return grad * ((1 - output) * output).conj()


def _tanh_product(grad: Tensor, output: Tensor) -> Tensor:
    return grad * (1 - output * output).conj()


elementwise("aten::sigmoid", bind(aten.sigmoid_backward.default, grad_output="grad", output="result"))
elementwise(
    "aten::silu",
    infinitely_differentiable_silu_backward.bind(grad_output="grad", input="self"),
    improves="missing",
    defer_to_stock=real,  # PyTorch has no derivative for complex numbers
)
elementwise(
    "aten::mish",
    infinitely_differentiable_mish_backward.bind(grad_output="grad", input="self"),
    real_only=True,
    improves="values",
)
elementwise(
    "aten::softplus",
    bind(aten.softplus_backward.default, grad_output="grad"),
    real_only=True,
    arguments=[{}, {"beta": 2.0}, {"beta": 2.0, "threshold": 1.0}],
)
elementwise(
    "aten::softplus_backward",
    {
        "grad_output": _softplus,
        "self": lambda grad, grad_output, self, beta, threshold: softplus_double_backward(
            grad * grad_output, self, beta, threshold
        ),
    },
)
elementwise(
    "aten::gelu",
    lambda grad, self, approximate: aten.gelu_backward(grad, self, approximate=approximate),
    real_only=True,
    rounds=False,  # in single precision it is 0 below -6, and in half it is not
    arguments=[{}, {"approximate": "tanh"}],
)
elementwise(
    "aten::gelu_backward",
    {"grad_output": _gelu, "self": gelu_double_backward.bind(ggI="grad", gO="grad_output", input="self")},
)
rule(
    "aten::log_sigmoid_forward",
    vjp={"self": bind(aten.log_sigmoid_backward.default)},
    jvp={"output": bind(aten.log_sigmoid_backward.default, grad_output="self_t", self="self_p")},
    not_differentiable="buffer",
    kind="elementwise",
    source="ATen derivatives.yaml",
)
elementwise(
    "aten::log_sigmoid_backward",
    {
        "grad_output": bind(aten.log_sigmoid_backward.default, grad_output="grad"),
        "self": lambda grad, grad_output, self: log_sigmoid_double_backward(grad * grad_output, self),
        "buffer": None,  # a function of the input, which the forward returns on some devices
    },
    improves="values",
)
rule(
    "aten::sigmoid_backward",
    vjp={
        "grad_output": lambda grad, grad_output_dtype, output: of_dtype(
            _sigmoid_product(grad, output.conj()), grad_output_dtype
        ),
        "output": lambda grad, grad_output, output: of_dtype(
            grad.conj() * grad_output * (1 - 2 * output.conj()), output.dtype
        ),
    },
    jvp={
        "result": sum_over_tangents(
            lambda grad_output_t, output_p: _sigmoid_product(grad_output_t, output_p),
            lambda grad_output_p, output_p, output_t: grad_output_p * ((1 - 2 * output_p) * output_t).conj(),
            then=lambda found, result: of_dtype(found, result.dtype),
        )
    },
    kind="elementwise",
    source="ATen derivatives.yaml",
)
rule(
    "aten::tanh_backward",
    vjp={
        "grad_output": lambda grad, grad_output_dtype, output: of_dtype(
            _tanh_product(grad, output.conj()), grad_output_dtype
        ),
        "output": lambda grad, grad_output, output: of_dtype(
            -2 * grad.conj() * grad_output * output.conj(), output.dtype
        ),
    },
    jvp={
        "result": sum_over_tangents(
            lambda grad_output_t, output_p: _tanh_product(grad_output_t, output_p),
            lambda grad_output_p, output_p, output_t: (-2 * grad_output_p * output_p.conj()) * output_t.conj(),
            then=lambda found, result: of_dtype(found, result.dtype),
        )
    },
    kind="elementwise",
    source="ATen derivatives.yaml",
)
