"""Softmax $y$ and its logarithm, and their backward operators. With $<g, y>$ the sum along ``dim``, kept:

    softmax      vjp: $y (g - <g, y>)$,        its jvp is the same function of the tangent;
    log_softmax  vjp: $g - y <g, 1>$,          jvp: $t - <t, y>$.

Where an input is $-inf$, $y$ and its derivatives are 0. Where all inputs along ``dim`` are $-inf$, _safe_softmax has $y = 0$
and no gradient, and the other operators have $y = nan$.

Args:
    output: $y$, real.
    dim: the dim along which $y$ sums to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, bind, formula, rule

aten = torch.ops.aten


@formula
def softmax_differential(x: Tensor, output: Tensor, dim: int) -> Tensor:
    """Cotangent of the input of a softmax $y$, or tangent of $y$: $y (x - <x, y>)$, as its Jacobian is symmetric.

    Args:
        x: cotangent of $y$, or tangent of the input.

    Returns:
        The shape of ``output``.

    References:
        ATen _softmax_backward_data.
    """
    return output * (x - (x * output).sum(dim, keepdim=True))


def _softmax_backward(grad: Tensor, result: Tensor, dim: int, self_dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(grad, result, dim, self_dtype)


def _softmax_jvp(self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    return softmax_differential(_relative(self_t.to(result.dtype), result, dim), result, dim)


def _relative(self_t: Tensor, output: Tensor, dim: int) -> Tensor:
    """The tangent minus that of the largest input. The result is the same, because $<1, y> = 1$.

    Where one element of $y$ is close to 1, its $t - <t, y>$ would be only rounding error. This way, it is a sum over the
    other elements.
    """
    if output.numel() == 0:
        return self_t
    largest = output == output.amax(dim, keepdim=True)
    there = torch.where(largest, self_t, 0).sum(dim, keepdim=True)
    return self_t - there / largest.sum(dim, keepdim=True).clamp(min=1)


@formula
def softmax_double_backward(grad: Tensor, grad_output: Tensor, dim: int, output: Tensor) -> Tensor:
    """Cotangent of $y$, given that of $y (g - <g, y>)$: $h (g - <g, y>) - g <h, y>$.

    Args:
        grad: $h$.
        grad_output: $g$.

    Returns:
        The shape of ``output``.
    """
    along = (grad_output * output).sum(dim, keepdim=True)
    return grad * (grad_output - along) - grad_output * (grad * output).sum(dim, keepdim=True)


@formula
def log_softmax_jvp(self_t: Tensor, output: Tensor, dim: int) -> Tensor:
    """Tangent of $l = log_softmax(x)$: $t - <t, exp(l)>$.

    Args:
        self_t: $t$, tangent of the input.
        output: $l$, real.
        dim: the dim along which $exp(l)$ sums to 1.

    Returns:
        The shape of ``output``.

    References:
        ATen logsumexp_jvp.
    """
    return _log_softmax_jvp(self_t, output.exp(), dim)


def _log_softmax_jvp(self_t: Tensor, y: Tensor, dim: int) -> Tensor:
    """`log_softmax_jvp` from $y = softmax(x)$: $exp(l)$ has the rounding of $l$, which is an error of $|l|$ units."""
    return self_t - (self_t * y).sum(dim, keepdim=True)


rule(
    "aten::_softmax",
    vjp={"self": _softmax_backward},
    jvp={"result": _softmax_jvp},
    defer_to_stock=always,
    improves="missing",
    source="ATen _softmax_backward_data",
)
rule(
    "aten::_safe_softmax",
    vjp={"self": _softmax_backward},
    jvp={"result": _softmax_jvp},
    source="ATen _softmax_backward_data",
    improves="values",
    defer_to_stock=always,  # PyTorch's reverse mode is right in every order
)
rule(
    "aten::_log_softmax",
    vjp={
        "self": bind(
            aten._log_softmax_backward_data.default, grad_output="grad", output="result", input_dtype="self_dtype"
        )
    },
    jvp={
        "result": lambda self_p, self_t, result, dim: _log_softmax_jvp(
            _relative(self_t.to(result.dtype), result, dim), self_p.softmax(dim, result.dtype), dim
        )
    },
    defer_to_stock=always,
    improves="missing",
    source="ATen _log_softmax_backward_data",
)
rule(
    "aten::_softmax_backward_data",
    vjp={
        "grad_output": bind(_softmax_backward, result="output", self_dtype="grad_output_dtype"),
        "output": softmax_double_backward,
    },
    source="ATen softmax_double_backward",
)
rule(
    "aten::_log_softmax_backward_data",
    vjp={
        "grad_output": log_softmax_jvp.bind(self_t="grad"),
        "output": lambda grad, grad_output, output, dim: -grad_output.sum(dim, keepdim=True) * output.exp() * grad,
    },
    source="ATen derivatives.yaml",
)
