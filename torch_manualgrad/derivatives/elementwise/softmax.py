"""Softmax y and its logarithm, and their backward operators. With <g, y> the sum along ``dim``, kept:

    softmax      vjp: y (g - <g, y>),        its jvp is the same function of the tangent;
    log_softmax  vjp: g - y <g, 1>,          jvp: t - <t, y>.

Where an input is -inf, y and its derivatives are 0. A line of nothing but -inf has y = 0 and no gradient in _safe_softmax,
and y = nan in the others: under strong zeros, a cotangent of nothing but 0 stays 0 there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from torch_manualgrad.core.elementwise import strong_product
from torch_manualgrad.core.formula import formula, meets_nothing
from torch_manualgrad.core.rule import Sample, rule

aten = torch.ops.aten


@formula
def softmax_differential(x: Tensor, output: Tensor, dim: int) -> Tensor:
    """Cotangent of the input of a softmax y, or tangent of y: y (x - <x, y>), as its Jacobian is symmetric.

    Args:
        x: cotangent of y, or tangent of the input.
        output: y, real.
        dim: along which y sums to 1.

    Returns:
        The shape of ``output``.

    References:
        ATen _softmax_backward_data.
    """
    return output * (x - (x * output).sum(dim, keepdim=True))


def _softmax_backward(grad: Tensor, result: Tensor, dim: int, self_dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(grad, result, dim, self_dtype)


def _softmax_jvp(self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    return softmax_differential(self_t.to(result.dtype), result, dim)


def _strong_differential(x: Tensor, output: Tensor, dim: int) -> Tensor:
    """`softmax_differential` in which a line of zeros stays one, whatever y is."""
    return strong_product(x - strong_product(x, output).sum(dim, keepdim=True), output)


def _strong_softmax_backward(grad: Tensor, result: Tensor, dim: int, self_dtype: torch.dtype) -> Tensor:
    if not meets_nothing((grad, result)):
        return _strong_differential(grad, result, dim).to(self_dtype)
    return _softmax_backward(grad, result, dim, self_dtype).masked_fill((grad == 0).all(dim, keepdim=True), 0)


def _strong_softmax_jvp(self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    return _strong_differential(self_t.to(result.dtype), result, dim)


_softmax_backward.strong = _strong_softmax_backward  # type: ignore[attr-defined]
_softmax_jvp.strong = _strong_softmax_jvp  # type: ignore[attr-defined]


@formula
def softmax_double_backward(grad: Tensor, grad_output: Tensor, dim: int, output: Tensor) -> Tensor:
    """Cotangent of y, given that of y (g - <g, y>): h (g - <g, y>) - g <h, y>.

    Args:
        grad: h.
        grad_output: g.
        dim: along which y sums to 1.
        output: y, real.

    Returns:
        The shape of ``output``.

    References:
        ATen softmax_double_backward.
    """
    along = (grad_output * output).sum(dim, keepdim=True)
    return grad * (grad_output - along) - grad_output * (grad * output).sum(dim, keepdim=True)


@formula
def log_softmax_jvp(self_t: Tensor, output: Tensor, dim: int) -> Tensor:
    """Tangent of l = log_softmax: t - <t, exp(l)>.

    Args:
        self_t: t, tangent of the input.
        output: l, real.
        dim: along which exp(l) sums to 1.

    Returns:
        The shape of ``output``.

    References:
        ATen logsumexp_jvp.
    """
    return self_t - (self_t * output.exp()).sum(dim, keepdim=True)


def _log_softmax_backward(grad: Tensor, result: Tensor, dim: int, self_dtype: torch.dtype) -> Tensor:
    return aten._log_softmax_backward_data(grad, result, dim, self_dtype)


def _log_softmax_jvp(self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    return log_softmax_jvp(self_t.to(result.dtype), result, dim)


def _strong_log_softmax_backward(grad: Tensor, result: Tensor, dim: int, self_dtype: torch.dtype) -> Tensor:
    if not meets_nothing((grad, result)):
        return (grad - strong_product(grad.sum(dim, keepdim=True), result.exp())).to(self_dtype)
    return _log_softmax_backward(grad, result, dim, self_dtype).masked_fill((grad == 0).all(dim, keepdim=True), 0)


def _strong_log_softmax_jvp(self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    t = self_t.to(result.dtype)
    return t - strong_product(t, result.exp()).sum(dim, keepdim=True)


_log_softmax_backward.strong = _strong_log_softmax_backward  # type: ignore[attr-defined]
_log_softmax_jvp.strong = _strong_log_softmax_jvp  # type: ignore[attr-defined]


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = torch.linspace(-2.3, 2.9, 24, dtype=dtype, device=device).reshape(2, 4, 3).sin() * 2
    yield from (Sample(x, 1, False), Sample(x, -1, False), Sample(x[0, :, 0], 0, False), Sample(x[0, 0, 0], 0, False))


def _safe_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in _samples(dtype, device)):
        yield Sample(x, dim)


def _backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in _samples(dtype, device)):
        if x.dim():  # PyTorch's vmap of the backward operators is wrong for tensors without dimensions
            yield Sample(x.cos(), x.softmax(dim), dim, dtype)


def _log_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for x, dim, _ in (s.args for s in _samples(dtype, device)):
        if x.dim():
            yield Sample(x.cos(), x.log_softmax(dim), dim, dtype)


rule(
    "aten::_softmax",
    vjp={"self": _softmax_backward},
    uses=softmax_differential,
    jvp={"result": _softmax_jvp},
    defer_to_stock=lambda *_: True,
    improves="missing",
    source="ATen _softmax_backward_data",
    samples=_samples,
)
rule(
    "aten::_safe_softmax",
    vjp={"self": _softmax_backward},
    uses=softmax_differential,
    jvp={"result": _softmax_jvp},
    source="ATen _softmax_backward_data",
    samples=_safe_samples,
    improves="values",
    defer_to_stock=lambda *_: True,  # its reverse mode is right in every order
)
rule(
    "aten::_log_softmax",
    vjp={"self": _log_softmax_backward},
    jvp={"result": _log_softmax_jvp},
    uses=log_softmax_jvp,
    defer_to_stock=lambda *_: True,
    improves="missing",
    source="ATen _log_softmax_backward_data",
    samples=_samples,
)
rule(
    "aten::_softmax_backward_data",
    vjp={
        "grad_output": lambda grad, output, dim, grad_output_dtype: _softmax_backward(
            grad, output, dim, grad_output_dtype
        ),
        "output": softmax_double_backward,
    },
    source="ATen softmax_double_backward",
    samples=_backward_samples,
)
rule(
    "aten::_log_softmax_backward_data",
    vjp={
        "grad_output": log_softmax_jvp.bind(self_t="grad"),
        "output": lambda grad, grad_output, output, dim: -grad_output.sum(dim, keepdim=True) * output.exp() * grad,
    },
    source="ATen derivatives.yaml",
    samples=_log_backward_samples,
)
