"""The Airy function Ai. PyTorch returns no gradient through it: its result has no history, and no error is raised.

$Ai'' = x Ai$, so Ai and Ai' are two formulas whose derivatives consist of each other, in every order. Both
are computed here: PyTorch has no Ai', and its Ai is wrong by up to 3e-6 between $x = -4$ and $x = -2.09$.

- For $|x| <= 10$ they are Taylor series about multiples of 1/2: about the nearest one where $x <= 0$, and about the next one
  where $x > 0$, because all terms have the same sign there.
- Elsewhere they are asymptotic series in $1 / zeta$, $zeta = 2/3 |x|^(3/2)$. The exponential and the sine of $zeta$ magnify
  its rounding error, so $zeta$ is a sum of two numbers.

Every dtype is computed in double precision. The error is below 3 units in the last place: of the result where $x > 0$, and
of the envelope where $x < 0$.

Args:
    x: $x$, real.

References:
    DLMF 9.2.1 and 9.7.5 to 9.7.10, https://dlmf.nist.gov/9.7.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Formula, elementwise, formula

from .series import polynomial
from .strong_times import strong_times

_NEAR = 10.0
_TERMS = 24
_SPLITTER = 2.0**27 + 1

# mpmath.airyai(n / 2) and mpmath.airyai(n / 2, derivative=1) for n = -20, ..., 20
_AI = [
    0.04024123848644319, 0.3191032477191282, -0.022133721547341403, -0.33029023763020887, -0.0527050503563862,
    0.3217757163806479, 0.18428083525050565, -0.2380203019971158, -0.3291451736298231, 0.017781541276574976,
    0.35076100902411433, 0.2921527810559595, -0.07026553294928951, -0.37553382314043193, -0.37881429367765806,
    -0.11232506769296609, 0.22740742820168558, 0.4642565777488694, 0.5355608832923521, 0.4757280916105396,
    0.3550280538878172, 0.23169360648083348, 0.13529241631288141, 0.07174949700810541, 0.03492413042327438,
    0.01572592338047049, 0.006591139357460719, 0.002584098786989635, 0.0009515638512048018, 0.00033025032351430896,
    0.00010834442813607442, 3.368531190859981e-05, 9.947694360252889e-06, 2.7958823432049136e-06,
    7.492128863997167e-07, 1.9172560675134309e-07, 4.6922076160992316e-08, 1.0997009755195506e-08,
    2.47116843087249e-09, 5.330263704617492e-10, 1.1047532552898686e-10,
]  # fmt: skip
_AI_SLOPE = [
    0.99626504413279, -0.10809531881187123, -0.9756639809263316, -0.03231334828463914, 0.9355609381983065,
    0.3188095066985546, -0.7710081684101265, -0.6749524925132022, 0.3459354872813429, 0.8641972177713984,
    0.32719281855444315, -0.5233625323157477, -0.7906285753685813, -0.34344343345404815, 0.3145837692165988,
    0.6788527342647943, 0.618259020741691, 0.3091869672024104, -0.01016056711664521, -0.20408167033954738,
    -0.2588194037928068, -0.2249105326646839, -0.1591474412967932, -0.09738201284230132, -0.05309038443365363,
    -0.026250881035903232, -0.011912976705951319, -0.005004413967952583, -0.001958640950204179,
    -0.0007178665675575089, -0.0002474138908684625, -8.046339130556515e-05, -2.4765200397034955e-05,
    -7.231931466601793e-06, -2.008150894738792e-06, -5.312713959720545e-07, -1.3414392979067865e-07,
    -3.237725440447602e-08, -7.480641389658946e-09, -1.6566394593740667e-09, -3.5206336767389237e-10,
]  # fmt: skip


def _taylor(center: float, value: float, slope: float) -> list[float]:
    """The coefficients of the solution of $y'' = x y$ that has this value and slope at the center."""
    terms = [value, slope, center * value / 2]
    for k in range(1, _TERMS - 2):
        terms.append((center * terms[k] + terms[k - 1]) / ((k + 1) * (k + 2)))
    return terms


def _asymptotic() -> tuple[list[float], list[float]]:
    """The coefficients u_k and v_k of DLMF 9.7.2."""
    u = [1.0]
    for k in range(1, _TERMS):
        u.append(u[-1] * (6 * k - 5) * (6 * k - 3) * (6 * k - 1) / (216 * k * (2 * k - 1)))
    return u, [c * (6 * k + 1) / (1 - 6 * k) for k, c in enumerate(u)]


# coefficients of Ai and of Ai', by the power of the step, then by n
_VALUES = [*zip(*(_taylor(n / 2 - _NEAR, *pair) for n, pair in enumerate(zip(_AI, _AI_SLOPE))))]
_SLOPES = [[(k + 1) * c for c in row] for k, row in enumerate(_VALUES[1:])]
_U, _V = _asymptotic()


def _near(x: Tensor, order: int) -> Tensor:
    """Ai, or for order 1 Ai', for $|x| <= 10$."""
    place = torch.where(x > 0, (2 * x).ceil(), (2 * x).round())
    step, index = x - place / 2, place.long().flatten() + len(_AI) // 2
    rows = torch.tensor(_SLOPES if order else _VALUES, dtype=x.dtype, device=x.device).unbind()
    last, *rest = (row.index_select(0, index).reshape(x.shape) for row in reversed(rows))
    total = last
    for coefficient in rest:
        total = total * step + coefficient
    return total


def _product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """$a b$ and its rounding error, by Dekker's algorithm."""
    product = a * b
    (a, a_low), (b, b_low) = _halves(a), _halves(b)
    return product, ((a * b - product) + a * b_low + a_low * b) + a_low * b_low


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def _zeta(z: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """$2/3 z^(3/2)$, as a number and a remainder; ``root`` is the square root of $z$."""
    square, error = _product(root, root)
    root_rest = ((z - square) - error) / (2 * root)
    cube, error = _product(z, root)
    zeta = cube / 1.5
    back, back_error = _product(zeta, torch.full_like(zeta, 1.5))
    return zeta, ((cube - back) - back_error + error + z * root_rest) / 1.5


def _far(x: Tensor, order: int) -> Tensor:
    """Ai, or for order 1 Ai', for $|x| >= 10$."""
    right = x > 0
    z = torch.where(right, x.clamp(max=200), x.abs())  # at 200 both are 0
    root = z.sqrt()
    zeta, rest = _zeta(z, root)
    inverse = 1 / zeta
    square = -inverse * inverse
    series, height = (_V, -root.sqrt()) if order else (_U, 1 / root.sqrt())
    decaying = (-zeta).exp() * (1 - rest) / (2 * sqrt(pi)) * polynomial(series, -inverse)

    sin, cos, sin_rest, cos_rest = zeta.sin(), zeta.cos(), rest.sin(), rest.cos()
    sin, cos = sin * cos_rest + cos * sin_rest, cos * cos_rest - sin * sin_rest
    sin, cos = (sin - cos) / sqrt(2 * pi), (cos + sin) / sqrt(2 * pi)  # of zeta - pi / 4, over sqrt(pi)
    first, second = (-sin, cos) if order else (cos, sin)
    wave = first * polynomial(series[::2], square) + second * inverse * polynomial(series[1::2], square)
    return height * torch.where(right, decaying, wave)


def _airy(x: Tensor, order: int) -> Tensor:
    near, wide = x.abs() <= _NEAR, x.to(torch.float64)
    inner, outer = _near(torch.where(near, wide, 0), order), _far(torch.where(near, _NEAR, wide), order)
    return torch.where(near, inner, outer).to(x.dtype)


@formula(kernel=("default",))
def airy_ai(x: Tensor) -> Tensor:
    """$Ai(x)$.

    Returns:
        The shape of ``x``; 0 at inf and nan at $-inf$.
    """
    return _airy(x, 0)


@formula(kernel=("default",))
def airy_ai_slope(x: Tensor) -> Tensor:
    """$Ai'(x)$.

    Returns:
        The shape of ``x``; 0 at inf and nan at $-inf$, where it has no limit.
    """
    return _airy(x, 1)


def _differentiable(value: Formula, slope: Callable[[Tensor], Tensor]) -> None:
    """Define the derivative of a formula."""
    value.impl("default")(value.reference)

    @value.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return tuple(inputs)

    # strong products: the second derivative of the operator is the first of its formula
    @value.impl_backward
    def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
        return {"x": strong_times(grad, slope(*saved))}

    @value.impl_jvp
    def _(inputs: Any, output: Any, tangents: Any) -> Any:
        return strong_times(tangents[0], slope(inputs[0]))


_differentiable(airy_ai, airy_ai_slope)
_differentiable(airy_ai_slope, lambda x: torch.where(x == inf, 0, x) * airy_ai(x))
elementwise(
    "aten::special_airy_ai",
    airy_ai_slope,
    domain=(-2, 4),
    real_only=True,
    improves="values",
    source="DLMF 9.7.6 and 9.7.10, https://dlmf.nist.gov/9.7",
)
