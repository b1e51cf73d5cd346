"""Elementwise operators on jets: the recurrences of `taylor`, bound to operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import taylor
from .scaled import times
from .taylor import Coefficients
from .tensor import Space, is_jet
from .trace import is_tensor

__all__ = ["RULES", "aligned", "elementwise", "unary"]


def unary(function: Callable[..., Coefficients]) -> Callable[..., Any]:
    """The rule of a function of one variable, given the function of its series.

    Along many curves, the coefficients of the function itself are computed once, at x, and then composed.
    """

    def rule(space: Space, self: Any, *rest: Any, **others: Any) -> Any:
        if space.directions is None:
            return space.jet(function(space.coefficients(self), *rest, **others))
        x = space.factored(self)
        ones = torch.ones_like(x[0])
        outer = function([x[0], ones, *[None] * (space.order - 1)], *rest, **others)
        return space.jet(_composed(space, outer, x))

    return rule


def _composed(space: Space, outer: Coefficients, x: Coefficients) -> Coefficients:
    """f(x), given the coefficients of f at x[0]; the last one is the sum over directions, and linear in that of x."""
    order = space.order
    step = [None, *x[1:order], None]
    power, y = step, [outer[0], *[None] * order]
    for m in range(1, order + 1):
        for k in range(m, order):
            if power[k] is not None and outer[m] is not None:
                product = outer[m] * power[k] if order > 2 else times(outer[m], power[k])
                y[k] = taylor.sum_of((y[k], product))
        if m < order and outer[m + 1] is not None:
            top = taylor.convolve(step, power, order, start=1, product=space.collapsed_product)
            y[order] = taylor.sum_of((y[order], None if top is None else outer[m + 1] * top))
        power = [None if k <= m else taylor.convolve(step, power, k, start=1) for k in range(order)] + [None]
    if x[order] is not None and outer[1] is not None:
        y[order] = taylor.sum_of((y[order], outer[1] * x[order]))
    return y


def aligned(space: Space, x: Any, ndim: int) -> Coefficients:
    """The coefficients; those along many curves are reshaped to broadcast with tensors of ``ndim`` dimensions."""
    found = space.coefficients(x)
    if space.directions is None or not is_jet(x):
        return found
    missing = ndim - x.ndim
    if missing:
        for k in range(1, space.order):
            if found[k] is not None:
                shape = found[k].shape
                found[k] = found[k].reshape(shape[0], *[1] * missing, *shape[1:])
    return found


def elementwise(function: Callable[..., Coefficients]) -> Callable[..., Any]:
    """The rule of a function of several variables with broadcasting, given as ``function(series, series, ...)``.

    Constants that are not tensors are passed to the function unchanged.
    """

    def rule(space: Space, *args: Any, **others: Any) -> Any:
        ndim = max([x.ndim for x in args if is_tensor(x)])
        given = [aligned(space, x, ndim) if is_tensor(x) else x for x in args]
        if space.directions is None:
            return _broadcast(space, function(*given, **others))
        order = space.order
        series = [isinstance(g, list) for g in given]
        lower = [[*g[:order], None] if s else g for g, s in zip(given, series)]
        last = [[g[0], g[order]] if s else g for g, s in zip(given, series)]
        y = function(*lower, **others)
        top = None if y[order] is None else space.collapse(y[order])
        if any(g[1] is not None for g, s in zip(last, series) if s):
            top = taylor.sum_of((top, function(*last, **others)[1]))
        return _broadcast(space, [*y[:order], top])

    return rule


def _broadcast(space: Space, y: Coefficients) -> Any:
    return space.jet(y)


def _scaled(x: Any, factor: Any) -> Any:
    return x if factor == 1 else taylor.scale(x, factor)


def _add(x: Coefficients, y: Any, alpha: Any = 1) -> Coefficients:
    if not isinstance(y, list):
        return taylor.shift(x, y * alpha)
    if not isinstance(x, list):
        return taylor.shift(_scaled(y, alpha), x)
    return taylor.add(x, _scaled(y, alpha))


def _subtract(x: Coefficients, y: Any, alpha: Any = 1) -> Coefficients:
    return _add(x, y, -alpha)


def _reversed(x: Coefficients, y: Any, alpha: Any = 1) -> Coefficients:
    return _add(_scaled(x, -alpha), y) if not isinstance(y, list) else _add(y, x, -alpha)


def _negative(x: Coefficients) -> Coefficients:
    return [None if c is None else -c for c in x]


def _over(x: Coefficients, y: Any) -> Coefficients:
    return taylor.divide(x, y) if isinstance(y, list) else [None if c is None else c / y for c in x]


def _lerp(x: Coefficients, end: Coefficients, weight: Any) -> Coefficients:
    step = _subtract(end, x)
    return taylor.add(x, taylor.multiply(step, weight) if isinstance(weight, list) else taylor.scale(step, weight))


def _addcmul(x: Coefficients, a: Coefficients, b: Coefficients, value: Any = 1) -> Coefficients:
    return taylor.add(x, _scaled(taylor.multiply(a, b), value))


def _addcdiv(x: Coefficients, a: Coefficients, b: Coefficients, value: Any = 1) -> Coefficients:
    return taylor.add(x, _scaled(taylor.divide(a, b), value))


def _where(condition: Any, x: Any, y: Any) -> Coefficients:
    zero = torch.zeros((), dtype=x[0].dtype, device=x[0].device)
    condition = condition[0]
    return [torch.where(condition, x[0], y[0])] + [
        None if a is None and b is None else torch.where(condition, zero if a is None else a, zero if b is None else b)
        for a, b in zip(x[1:], y[1:])
    ]


def _kept(x: Coefficients, where: Any, value: Any) -> Coefficients:
    """Piecewise linear: the coefficients of x where ``where`` is true, and zero elsewhere."""
    return [value, *[None if c is None else torch.where(where, c, 0) for c in x[1:]]]


def _relu(x: Coefficients) -> Coefficients:
    return _kept(x, x[0] > 0, x[0].relu())


def _power(x: Coefficients, exponent: Any) -> Coefficients:
    """x^y. With a constant exponent the coefficients in x are binomial, and right at zero."""
    if not isinstance(exponent, list):
        return taylor.power(x, exponent)
    constant = _constant_power(x, exponent[0])
    if all(c is None for c in exponent[1:]):
        return constant
    is_zero = x[0] == 0  # there only derivatives in x alone can differ from zero
    product = taylor.multiply(exponent, taylor.log([torch.where(is_zero, 1, x[0]), *x[1:]]))
    start = torch.where(is_zero, 1, constant[0])
    varying = [torch.zeros_like(start) if c is None else c for c in taylor.exp_from(start, product)[1:]]
    return [constant[0], *[v if c is None else torch.where(is_zero, c, v) for c, v in zip(constant[1:], varying)]]


def _constant_power(x: Coefficients, p: Any) -> Coefficients:
    binomial, outer = torch.ones_like(x[0] + p), []
    for k in range(len(x)):
        outer.append(torch.where(binomial == 0, 0, binomial * x[0].pow(torch.where(binomial == 0, 1, p - k))))
        binomial = binomial * (p - k) / (k + 1)
    return taylor.compose(outer, x)


def _number_to_power(base: Any, exponent: Coefficients) -> Coefficients:
    logarithm = torch.as_tensor(base, dtype=exponent[0].dtype, device=exponent[0].device).log()
    y = taylor.exp_from(torch.pow(base, exponent[0]), exponent, logarithm)
    return y if base != 0 else _kept(y, exponent[0] < 0, y[0])  # 0 ** x is constant where x > 0


_UNARY: dict[str, Callable[..., Coefficients]] = {
    **{
        f"aten::{f.__name__}": f
        for f in (
            taylor.exp, taylor.exp2, taylor.expm1, taylor.log, taylor.log2, taylor.log10, taylor.log1p, taylor.sqrt,
            taylor.rsqrt, taylor.reciprocal, taylor.sin, taylor.cos, taylor.tan, taylor.sinh, taylor.cosh, taylor.tanh,
            taylor.asin, taylor.acos, taylor.atan, taylor.asinh, taylor.acosh, taylor.atanh, taylor.erf, taylor.erfc,
            taylor.erfinv, taylor.sigmoid, taylor.silu, taylor.mish, taylor.gelu, taylor.softplus, taylor.elu, taylor.logit,
        )
    },
    "aten::pow.Tensor_Scalar": taylor.power,
    "aten::lgamma": lambda x: taylor.polygamma(x, -1),
    "aten::digamma": lambda x: taylor.polygamma(x, 0),
    "aten::neg": _negative,
    "aten::relu": _relu,
    "aten::add.Scalar": _add,
    "aten::sub.Scalar": _subtract,
    "aten::rsub.Scalar": _reversed,
    "aten::mul.Scalar": taylor.scale,
    "aten::div.Scalar": _over,
}  # fmt: skip
_SEVERAL: dict[str, Callable[..., Coefficients]] = {
    "aten::add.Tensor": _add,
    "aten::sub.Tensor": _subtract,
    "aten::rsub.Tensor": _reversed,
    "aten::div.Tensor": _over,
    "aten::lerp.Scalar": _lerp,
    "aten::lerp.Tensor": _lerp,
    "aten::addcmul": _addcmul,
    "aten::addcdiv": _addcdiv,
    "aten::hypot": taylor.hypot,
    "aten::atan2": taylor.atan2,
    "aten::where.self": _where,
    "aten::pow.Tensor_Tensor": _power,
}
RULES: dict[str, Callable[..., Any]] = {
    **{name: unary(f) for name, f in _UNARY.items()},
    **{name: elementwise(f) for name, f in _SEVERAL.items()},
    "aten::polygamma": lambda space, n, self: unary(taylor.polygamma)(space, self, n),
    "aten::pow.Scalar": lambda space, base, exponent: unary(lambda x: _number_to_power(base, x))(space, exponent),
    "aten::abs": lambda space, self: (elementwise if self.is_complex() else unary)(taylor.absolute)(space, self),
    "aten::log_sigmoid_forward": lambda space, self: (
        unary(taylor.log_sigmoid)(space, self),
        torch.zeros_like(self.primal),
    ),
}
