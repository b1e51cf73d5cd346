"""Truncated Taylor series: products, quotients and functions of one variable, by their recurrences.

A series is a list of its coefficients, ``x(t) = x[0] + x[1] t + x[2] t^2 + ...``, without factorials; None stands for zero.
All series of a call have the same length. If y = f(x), the chain rule y' = g x' gives the coefficients of y in turn
from those of g: k y[k] = sum over j of j x[j] g[k - j].

References:
    Griewank and Walther, Evaluating Derivatives, 2nd edition, section 13.2, doi:10.1137/1.9780898717761.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log as log_of, pi, sqrt as sqrt_of
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Coefficients",
    "Function",
    "add",
    "compose",
    "convolve",
    "divide",
    "integrate",
    "multiply",
    "scale",
    "shift",
]

Coefficients = list[Any]
Function = Callable[[Coefficients], Coefficients]


def add(*series: Coefficients) -> Coefficients:
    """The sum of series."""
    return [sum_of(terms) for terms in zip(*series, strict=True)]


def sum_of(terms: Any) -> Any:
    """The sum of coefficients, None where all of them are."""
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


def scale(x: Coefficients, factor: Any) -> Coefficients:
    """A series times a constant."""
    return [None if c is None else c * factor for c in x]


def shift(x: Coefficients, constant: Any) -> Coefficients:
    """A series plus a constant."""
    return [x[0] + constant, *x[1:]]


def convolve(x: Sequence[Any], y: Sequence[Any], k: int, start: int = 0, product: Any = None) -> Any:
    """The sum of x[j] y[k - j] over j from ``start`` to k; ``product`` replaces ``*``."""
    pairs = ((x[j], y[k - j]) for j in range(start, k + 1))
    return sum_of((a * b if product is None else product(a, b)) for a, b in pairs if a is not None and b is not None)


def multiply(x: Coefficients, y: Coefficients) -> Coefficients:
    """The product x y."""
    return [convolve(x, y, k) for k in range(len(x))]


def divide(x: Coefficients, y: Coefficients) -> Coefficients:
    """The quotient z = x / y, from x = z y."""
    z: Coefficients = []
    for k in range(len(x)):
        rest = convolve(y, [*z, None], k, start=1)
        top = x[k] if rest is None else -rest if x[k] is None else x[k] - rest
        z.append(None if top is None else top / y[0])
    return z


def next_of(x: Coefficients, slope: Coefficients, k: int) -> Any:
    """The k-th coefficient of y, where y' = slope x' and the slope is known to order k - 1."""
    found = None
    for j in range(1, k + 1):
        if x[j] is not None and slope[k - j] is not None:
            term = x[j] * slope[k - j] if j == k else x[j] * slope[k - j] * (j / k)
            found = term if found is None else found + term
    return found


def integrate(start: Any, x: Coefficients, slope: Coefficients) -> Coefficients:
    """y with y' = slope x' and the value ``start``; the slope depends only on x, and its last coefficient is not
    used."""
    return [start, *(next_of(x, slope, k) for k in range(1, len(x)))]


def solve_for(start: Any, x: Coefficients, slope: Callable[[Coefficients], Any], factor: Any = None) -> Coefficients:
    """y with y' = factor g x', where ``slope(y)`` is the next coefficient of g, given the coefficients of y so far."""
    y, g = [start], []
    for k in range(1, len(x)):
        g.append(slope(y))
        found = next_of(x, g, k)
        y.append(found if found is None or factor is None else found * factor)
    return y


def compose(outer: Coefficients, x: Coefficients) -> Coefficients:
    """f(x) for the coefficients ``outer`` of f at x[0], by Horner's rule in x - x[0]."""
    order = len(x) - 1
    step = [None, *x[1:]]
    result: Coefficients = [outer[order], *[None] * order]
    for m in range(order - 1, -1, -1):  # the factors have power m, so order m is enough
        result = [convolve(step, result, k, start=1) if k <= order - m else None for k in range(order + 1)]
        result[0] = outer[m]
    return result


def _square(y: Coefficients, start: int = 0) -> Any:
    """The last coefficient of y^2, or its part without y[0]."""
    y = [*y[:-1], None] if start else y
    return convolve(y, y, len(y) - 1, start)


# -- exponentials, logarithms, roots and powers ----------------------------------------------------------------------


def exp_from(start: Any, x: Coefficients, rate: Any = None) -> Coefficients:
    """start exp(rate (x - x[0])): the value of a large exponent is rounded, and is not used."""
    return solve_for(start, x, lambda y: y[-1], rate)


def exp(x: Coefficients) -> Coefficients:
    return exp_from(x[0].exp(), x)


def exp2(x: Coefficients) -> Coefficients:
    return exp_from(x[0].exp2(), x, log_of(2))


def expm1(x: Coefficients) -> Coefficients:
    return [x[0].expm1(), *exp(x)[1:]]


def log(x: Coefficients) -> Coefficients:
    return integrate(x[0].log(), x, reciprocal(x))


def log2(x: Coefficients) -> Coefficients:
    return integrate(x[0].log2(), x, reciprocal(scale(x, log_of(2))))


def log10(x: Coefficients) -> Coefficients:
    return integrate(x[0].log10(), x, reciprocal(scale(x, log_of(10))))


def log1p(x: Coefficients) -> Coefficients:
    return integrate(x[0].log1p(), x, reciprocal(shift(x, 1)))


def reciprocal(x: Coefficients) -> Coefficients:
    first = x[0].reciprocal()
    y = [first]
    for k in range(1, len(x)):
        rest = convolve(x, [*y, None], k, start=1)
        y.append(None if rest is None else -rest * first)
    return y


def sqrt(x: Coefficients) -> Coefficients:
    y = [x[0].sqrt()]
    half = 0.5 / y[0] if len(x) > 1 else None
    for k in range(1, len(x)):
        inner = convolve([*y, None], [*y, None], k, start=1)
        top = x[k] if inner is None else -inner if x[k] is None else x[k] - inner
        y.append(None if top is None else top * half)
    return y


def absolute(x: Coefficients) -> Coefficients:
    """|x|; for a complex number the root of x conj(x). All derivatives are zero at zero."""
    y, sign = [x[0].abs()], x[0].sgn()
    if not x[0].is_complex():
        return [*y, *scale(x[1:], sign)]
    turned = [None if c is None else sign.conj() * c for c in x]
    return _length(y[0], *[[None if c is None else part(c) for c in turned] for part in (torch.real, torch.imag)])


def hypot(x: Coefficients, y: Coefficients) -> Coefficients:
    """The root of x^2 + y^2. All derivatives are zero at zero."""
    size = torch.hypot(x[0], y[0])
    return _length(size, *_turned(size, x, y))


def atan2(y: Coefficients, x: Coefficients) -> Coefficients:
    """The angle of (x, y). All derivatives are zero at zero."""
    size = torch.hypot(x[0], y[0])
    along, across = [_over_size(size, part) for part in _turned(size, x, y)]
    along[0], across[0] = torch.ones_like(size), None
    square = add(multiply(along, along), multiply(across, across))
    angle = _difference(integrate(None, across, divide(along, square)), integrate(None, along, divide(across, square)))
    return [torch.atan2(y[0], x[0]), *angle[1:]]


def _turned(size: Tensor, x: Coefficients, y: Coefficients) -> tuple[Coefficients, Coefficients]:
    """The components of (x, y) along (x[0], y[0]), whose length is ``size``, and across it."""
    cosine, sine = _over_size(size, [x[0], y[0]])
    return add(scale(x, cosine), scale(y, sine)), _difference(scale(y, cosine), scale(x, sine))


def _over_size(size: Tensor, x: Coefficients) -> Coefficients:
    """x divided by a length, or by 1 if it is 0."""
    safe = torch.where(size == 0, 1, size)
    return [None if c is None else c / safe for c in x]


def _difference(x: Coefficients, y: Coefficients) -> Coefficients:
    return add(x, scale(y, -1))


def _length(size: Tensor, along: Coefficients, across: Coefficients) -> Coefficients:
    """The length of a vector, given its components along its first coefficient, whose length is ``size``, and across it.

    The length is p + d for the component p along: d (2 p + d) is the square of the component across. Nothing cancels, and
    no square of a length overflows.
    """
    along, across = [None, *along[1:]], [None, *across[1:]]
    p, q = _over_size(size, along), _over_size(size, across)
    d: Coefficients = [None]
    for k in range(1, len(along)):
        known = [*_over_size(size, d), None]
        second = [sum_of([None if p[j] is None else 2 * p[j], known[j]]) for j in range(k)]
        rest = convolve([*d, None], [*second, None], k, start=1)
        square = convolve(across, q, k, start=1)
        total = sum_of([square, _minus(rest)])
        d.append(None if total is None else total * 0.5)
    return [size, *add(along, d)[1:]]


def rsqrt(x: Coefficients) -> Coefficients:
    return power(x, -0.5)


def power(x: Coefficients, exponent: Any) -> Coefficients:
    """x^p for a number p; for an integer by products, which are right at zero too."""
    if isinstance(exponent, (int, float)) and exponent == int(exponent) and abs(exponent) <= 64:
        n = int(exponent)
        return _whole_power(x, n) if n >= 0 else reciprocal(_whole_power(x, -n))
    if not isinstance(exponent, complex) and exponent > 0:  # also right at zero
        outer, binomial = [], 1.0
        for k in range(len(x)):
            outer.append(binomial * x[0].pow(exponent - k) if binomial else torch.zeros_like(x[0]))
            binomial *= (exponent - k) / (k + 1)
        return compose(outer, x)
    y = [x[0].pow(exponent)]
    for k in range(1, len(x)):  # x y' = p y x'
        terms = [
            x[j] * y[k - j] * ((exponent * j - (k - j)) / k)
            for j in range(1, k + 1)
            if x[j] is not None and y[k - j] is not None
        ]
        total = sum_of(terms)
        y.append(None if total is None else total / x[0])
    return y


def _whole_power(x: Coefficients, n: int) -> Coefficients:
    result: Coefficients | None = None
    while n:
        if n & 1:
            result = x if result is None else multiply(result, x)
        n >>= 1
        x = multiply(x, x) if n else x
    return [torch.ones_like(x[0]), *[None] * (len(x) - 1)] if result is None else result


# -- trigonometric and hyperbolic functions ------------------------------------------------------------------------------


def sin(x: Coefficients) -> Coefficients:
    return _pair(x, x[0].sin(), x[0].cos(), -1.0)[0]


def cos(x: Coefficients) -> Coefficients:
    return _pair(x, x[0].sin(), x[0].cos(), -1.0)[1]


def sinh(x: Coefficients) -> Coefficients:
    return _pair(x, x[0].sinh(), x[0].cosh(), 1.0)[0]


def cosh(x: Coefficients) -> Coefficients:
    return _pair(x, x[0].sinh(), x[0].cosh(), 1.0)[1]


def _pair(x: Coefficients, sine: Tensor, cosine: Tensor, sign: float) -> tuple[Coefficients, Coefficients]:
    """s and c with s' = c x' and c' = sign s x'."""
    s, c = [sine], [cosine]
    for k in range(1, len(x)):
        next_s, next_c = next_of(x, c, k), next_of(x, s, k)
        s.append(next_s)
        c.append(next_c if next_c is None or sign == 1.0 else -next_c)
    return s, c


def tan(x: Coefficients) -> Coefficients:
    return solve_for(x[0].tan(), x, lambda y: 1 + _square(y) if len(y) == 1 else _square(y))


def tanh(x: Coefficients) -> Coefficients:
    return solve_for(x[0].tanh(), x, lambda y: _sech_square(x[0]) if len(y) == 1 else _minus(_square(y)))


def _sech_square(x: Tensor) -> Tensor:
    """1 - tanh(x)^2, which has no digits left of a real number beyond 19."""
    if x.is_complex():
        return 1 - x.tanh() ** 2
    far = (x.abs() * -2).exp()
    return 4 * far / (1 + far) ** 2


def _minus(x: Any) -> Any:
    return None if x is None else -x


def asin(x: Coefficients) -> Coefficients:
    return integrate(x[0].asin(), x, rsqrt(_one_minus_square(x)))


def acos(x: Coefficients) -> Coefficients:
    return integrate(x[0].acos(), x, scale(rsqrt(_one_minus_square(x)), -1))


def atanh(x: Coefficients) -> Coefficients:
    return integrate(x[0].atanh(), x, reciprocal(_one_minus_square(x)))


def _one_minus_square(x: Coefficients) -> Coefficients:
    square = (1 - x[0]) * (1 + x[0])
    if x[0].is_complex():  # where one part of x is small, the sums above lose it
        a, b = x[0].real, x[0].imag
        square = torch.complex((1 - a) * (1 + a) + b * b, -2 * a * b)
    return [square, *scale(multiply(x, x)[1:], -1)]


def atan(x: Coefficients) -> Coefficients:
    return integrate(x[0].atan(), x, reciprocal(shift(multiply(x, x), 1)))


def asinh(x: Coefficients) -> Coefficients:
    if x[0].is_complex():
        return integrate(x[0].asinh(), x, rsqrt(shift(multiply(x, x), 1)))
    one = [torch.ones_like(x[0]), *[None] * (len(x) - 1)]
    return integrate(x[0].asinh(), x, reciprocal(hypot(x, one)))  # x^2 may overflow


def acosh(x: Coefficients) -> Coefficients:
    slope = multiply(rsqrt(shift(x, -1)), rsqrt(shift(x, 1)))
    return integrate(x[0].acosh(), x, slope)


# -- the error function, gamma functions and activations ------------------------------------------------------------------


def _gauss(x: Coefficients, factor: float, rate: float = 1.0) -> Coefficients:
    """factor exp(-rate x^2)."""
    return scale(exp(scale(multiply(x, x), -rate)), factor)


def erf(x: Coefficients) -> Coefficients:
    return integrate(x[0].erf(), x, _gauss(x, 2 / sqrt_of(pi)))


def erfc(x: Coefficients) -> Coefficients:
    return integrate(x[0].erfc(), x, _gauss(x, -2 / sqrt_of(pi)))


def polygamma(x: Coefficients, n: int) -> Coefficients:
    """psi^(n)(x); n = -1 is the logarithm of the gamma function."""
    outer, factorial = [], 1.0
    for k in range(len(x)):
        factorial *= max(k, 1)
        at = n + k
        value = x[0].lgamma() if at < 0 else x[0].digamma() if at == 0 else torch.special.polygamma(at, x[0])
        outer.append(value / factorial)
    return compose(outer, x)


def sigmoid(x: Coefficients) -> Coefficients:
    y0, other = _logistic(x[0]), _logistic(-x[0])  # computing 1 - y would leave only rounding errors for large x
    # the two are equal up to rounding near 0
    difference = other - y0 if x[0].is_complex() else (x[0] * -0.5).tanh()

    def slope(y: Coefficients) -> Any:
        if len(y) == 1:
            return y0 * other
        return sum_of([_minus(_square(y, 1)), None if y[-1] is None else y[-1] * difference])

    return solve_for(y0, x, slope)


def _logistic(x: Tensor) -> Tensor:
    if not x.is_complex():
        return x.sigmoid()
    right = x.real >= 0
    e = torch.where(right, -x, x).exp()  # PyTorch's is nan where this overflows on the other side
    return torch.where(right, 1, e) / (1 + e)


def log_sigmoid(x: Coefficients) -> Coefficients:
    return integrate(torch.nn.functional.logsigmoid(x[0]), x, sigmoid(scale(x, -1)))


def silu(x: Coefficients) -> Coefficients:
    return multiply(x, sigmoid(x))


def gelu(x: Coefficients, approximate: str = "none") -> Coefficients:
    if approximate == "none":
        density = _gauss(x, 1 / sqrt_of(2 * pi), 0.5)
        normal = 0.5 * torch.erfc(x[0] * -sqrt_of(0.5))  # ndtr is 0 in the tail
        return multiply(x, integrate(normal, x, density))
    # beyond 40 the sigmoid is 0 or 1 in every dtype, and the cube of a float16 overflows
    within = [x[0].clamp(-40, 40), *x[1:]]
    inner = scale(add(within, scale(power(within, 3), 0.044715)), 2 * sqrt_of(2 / pi))
    return multiply(x, sigmoid(inner))  # (1 + tanh u) / 2 = sigmoid(2 u)


def softplus(x: Coefficients, beta: float = 1.0, threshold: float = 20.0) -> Coefficients:
    y = integrate(torch.nn.functional.softplus(x[0], beta, threshold), x, sigmoid(scale(x, beta)))
    linear = x[0] * beta > threshold
    zero = torch.zeros_like(x[0])
    return [
        y[0],
        *[None if a is None else torch.where(linear, zero if b is None else b, a) for a, b in zip(y[1:], x[1:])],
    ]


def mish(x: Coefficients) -> Coefficients:
    return multiply(x, tanh(scale(log_sigmoid(scale(x, -1)), -1)))  # softplus(x) without its threshold


def elu(x: Coefficients, alpha: float = 1.0, scale_: float = 1.0, input_scale: float = 1.0) -> Coefficients:
    low = scale(expm1(scale(x, input_scale)), alpha * scale_)
    return _where(x[0] > 0, scale(x, scale_), low)


def _where(condition: Tensor, x: Coefficients, y: Coefficients) -> Coefficients:
    zero = torch.zeros_like(x[0])
    return [
        None if a is None and b is None else torch.where(condition, zero if a is None else a, zero if b is None else b)
        for a, b in zip(x, y)
    ]


def logit(x: Coefficients, eps: float | None = None) -> Coefficients:
    slope = reciprocal(multiply(x, shift(scale(x, -1), 1)))
    y = integrate(x[0].logit(eps), x, slope)
    if eps is None:
        return y
    inside = (x[0] >= eps) & (x[0] <= 1 - eps)
    return [y[0], *[None if c is None else torch.where(inside, c, 0) for c in y[1:]]]


def erfinv(x: Coefficients) -> Coefficients:
    return _inverse(x[0].erfinv(), x, lambda y: _gauss(y, sqrt_of(pi) / 2, -1.0))


def _inverse(start: Tensor, x: Coefficients, slope: Function) -> Coefficients:
    """y with y' = slope(y) x', where the slope is a function of whole series."""
    return solve_for(start, x, lambda y: slope(y)[-1])
