"""The incomplete gamma functions $P(a, x)$ and $Q = 1 - P$ in both arguments, and samples of the gamma distribution.

With the density $p = x^(a-1) exp(-x) / Gamma(a)$, $dP/dx = p$, and from the integral of the density

    $dP/da = -+ x p$ integral of $(log x +- s - psi(a)) exp(-E(s)) ds$, $s$ from 0 to infinity,
    $E = x (exp(+-s) - 1) -+ a s$:

over the values above $x$ where $x > a - 1/2$, and over those below $x$ elsewhere. The integrand then keeps its sign, so
that nothing cancels in either tail. It is as smooth as a normal or an exponential density, and Gauss-Legendre quadrature
integrates it up to where $E$ is `_CUT`. For $x < 1$, $dP/da$ is the derivative of the power series, term by term. All of this
is made of elementary functions, and can be differentiated again. In double precision, the relative error of the first and the
second derivative in $a$ is below $1e-12$ for $1e-3 < a < 1e4$ and $1e-5 < x < 1e4$, except next to a zero of the second
derivative. Far in the tails, the error of rounding $a$ and $x$ once is added.

A sample $x$ of the gamma distribution has $dx/da = -(dP/da) / p$, the derivative of the quantile, in which $p$ cancels. So it
is right where both underflow.

Where not differentiable: at $a = 0$ and $x = 0$, the ends of the domain. At $x = 0 < a$, and at infinity, the
derivative in $a$ is 0; at $a = 0 < x$ it is the derivative from the right, $-E_1(x)$. Where the function is nan, so is its
derivative.

References:
    DLMF 8.2.4 and 8.7.1, https://dlmf.nist.gov/8.7.E1; Figurnov, Mohamed, Mnih, Implicit reparameterization gradients,
    arXiv:1805.08498, equation 6.
"""

from __future__ import annotations

from math import factorial, log, nan, pi

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, elementwise, formula, rule

from .series import DIGAMMA, FAR, STIRLING, gauss_legendre, polynomial

_CUT = 44.0  # exp(-44) is below the rounding error
_RULE = gauss_legendre(36)
_BLOCK = 1024
_TERMS = 20  # of the power series, where x < 1
_FLAT = 0.1  # below this |s|, as for large x, exp(s) - 1 - s is computed as a series
_EXP = [1 / factorial(k) for k in range(2, 10)]


def _prefactor(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of $x^a exp(-x) / Gamma(a + 1)$, and $log x - psi(a + 1)$, by Stirling's series; for small $a$ at
    $a + 10$.
    """
    far = a >= FAR
    z = torch.where(far, a, a + FAR)
    square = 1 / (z * z)
    rest = polynomial(STIRLING, square) / z
    digamma = polynomial(DIGAMMA, square) * square - 1 / (2 * z)  # psi(z) - log z

    large, small = torch.where(far, a, FAR), torch.where(far, 1, a)
    offset = (x - large) / large
    near = offset.abs() < 0.5
    quotient = torch.where(near, 1, x / large).clamp(min=torch.finfo(x.dtype).tiny)
    ratio = torch.where(near, torch.where(near, offset, 0).log1p(), quotient.log())
    density = large * (ratio - offset) - (2 * pi * large).log() / 2 - rest

    factors = small.unsqueeze(-1) + torch.arange(1, FAR, dtype=a.dtype, device=a.device)
    log_z = z.log()
    gamma = (z - 0.5) * log_z - z + log(2 * pi) / 2 + rest - factors.prod(-1).log()
    return (
        torch.where(far, density, small * x.log() - x - gamma),
        torch.where(far, ratio - digamma - 1 / large, x.log() - log_z - digamma + (1 / factors).sum(-1)),
    )


def _by_quadrature(a: Tensor, x: Tensor, logs: Tensor) -> Tensor:
    """`_slope` for $x >= 1$. The part beyond the bound is below the rounding error, so the bound may be a constant."""
    with torch.no_grad():
        above = x > a - 0.5
        linear = torch.where(above, x - a, a - x - _CUT / 2)  # E is above a parabola of this slope
        bound = 2 * _CUT / (linear + torch.hypot(linear, (2 * _CUT * torch.where(above, x, a)).sqrt()))
        closer = ((_CUT + a * bound) / x).log1p()
        bound = torch.where(above, torch.minimum(bound, closer), -bound)
    nodes, weights = torch.tensor(_RULE, dtype=x.dtype, device=x.device)
    s = bound.unsqueeze(-1) * nodes
    bend = torch.where(s.abs() < _FLAT, s * s * polynomial(_EXP, s), s.expm1() - s)
    a, x, logs = a.unsqueeze(-1), x.unsqueeze(-1), logs.unsqueeze(-1)
    falling = ((a - x) * s - x * bend).exp()
    return bound * (weights * (a * (logs + s) + 1) * falling).sum(-1)


def _by_series(a: Tensor, x: Tensor, logs: Tensor) -> Tensor:
    """`_slope` for $x < 1$: the sum of $(psi(a + n + 1) - log x) x^n / ((a + 1) ... (a + n))$."""
    term, total = torch.ones_like(x), logs
    for n in range(1, _TERMS):
        term, logs = term * x / (a + n), logs - 1 / (a + n)
        total = total + term * logs
    return -total


def _slope(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of $x^a exp(-x) / Gamma(a + 1)$, and $-dP/da$ in multiples of that, for finite $a >= 0$ and
    $x > 0$.
    """
    density, logs = _prefactor(a, x)
    near = x < 1
    by_series = _by_series(a, torch.where(near, x, 0.5), logs)
    return density, torch.where(near, by_series, _by_quadrature(a, torch.where(near, 1, x), logs))


def _inside(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where `_slope` takes $a$ and $x$; and both, broadcast, in single precision or more, with 1 elsewhere."""
    a, x = torch.broadcast_tensors(a, x)
    dtype = torch.promote_types(torch.promote_types(a.dtype, x.dtype), torch.float32)
    inside = (a >= 0) & (x > 0) & a.isfinite() & x.isfinite()
    return inside, torch.where(inside, a, 1).to(dtype), torch.where(inside, x, 1).to(dtype)


def _in_a(a: Tensor, x: Tensor) -> Tensor:
    inside, a_inside, x_inside = _inside(a, x)
    density, slope = _slope(a_inside, x_inside)
    zero_or_nan = 0 * torch.igamma(a.detach(), x.detach())
    return torch.where(inside, -density.exp() * slope, zero_or_nan)


def _of_a_sample(a: Tensor, x: Tensor) -> Tensor:
    inside, a_inside, x_inside = _inside(a, x)
    inside = inside & (a > 0)
    a_inside = torch.where(inside, a_inside, 1)
    slope = x_inside / a_inside * _slope(a_inside, x_inside)[1]
    return torch.where(inside, slope, torch.where(x == 0, 0, nan)).to(x.dtype)


def _are_many(a: Tensor, x: Tensor) -> bool:
    return x.numel() > _BLOCK and a.shape == x.shape and a.is_contiguous() and x.is_contiguous()


def _by_blocks(a: Tensor, x: Tensor) -> Tensor:
    """Computed for as many numbers at a time as fit into a cache together with their nodes."""
    return torch.cat([_in_a(*both) for both in zip(a.flatten().split(_BLOCK), x.flatten().split(_BLOCK))]).view_as(x)


@formula(kernels=Kernel("cpu", when=_are_many, python=_by_blocks))
def igamma_self_derivative(a: Tensor, x: Tensor) -> Tensor:
    """The derivative of $P(a, x)$ in $a$.

    Args:
        a: real, 0 or more.
        x: real, 0 or more, broadcast with $a$.

    Returns:
        The shape to which they broadcast, in single precision or more; nan where $P$ is.

    Note:
        Where not differentiable: at $a = 0$, where it is the derivative from the right, and at $x = 0$, where it is 0.

    References:
        DLMF 8.2.4 and 8.7.1, differentiated in a; PyTorch has no derivative.
    """
    return _in_a(a, x)


def _takes(a: Tensor, x: Tensor) -> bool:
    return (
        x.dtype in (torch.float32, torch.float64)
        and a.dtype == x.dtype
        and a.shape == x.shape
        and a.is_contiguous()
        and x.is_contiguous()
    )


@formula(kernels=Kernel("cpu", "cuda", when=_takes))
def standard_gamma_grad(a: Tensor, x: Tensor) -> Tensor:
    """The derivative of a sample $x$ of the gamma distribution in its shape $a$: $-(dP/da) / (dP/dx)$.

    Args:
        a: real, positive.
        x: the sample, the shape of ``a``.

    Returns:
        The shape of ``x``; 0 at $x = 0$.

    References:
        Figurnov, Mohamed, Mnih, arXiv:1805.08498, equation 6. ATen standard_gamma_grad approximates this, and has no
        derivative.
    """
    return _of_a_sample(a, x)


def _density(self: Tensor, other: Tensor) -> Tensor:
    """$x^(a - 1) exp(-x) / Gamma(a)$."""
    a = self.to(other.dtype)
    near = other < 1
    # the derivatives of the power are powers; those of exp((a - 1) log x) are differences of larger numbers
    power = torch.where(near, other, 1).pow(a - 1) * (-torch.where(near, other, 0) - torch.lgamma(a)).exp()
    x = torch.where(near, 1, other)
    return torch.where(near, power, (torch.special.xlogy(a - 1, x) - x - torch.lgamma(a)).exp())


def _in_the_first(self: Tensor, other: Tensor) -> Tensor:
    return igamma_self_derivative(self, other.to(self.dtype))


# -- the rules --------------------------------------------------------------------------------------------------------

elementwise(
    "aten::igamma",
    {"self": _in_the_first, "other": _density},
    source="ATen derivatives.yaml; in the first argument the derivative is new",
    improves=("values", "missing"),
)
elementwise(
    "aten::igammac",
    {"self": lambda self, other: -_in_the_first(self, other), "other": lambda self, other: -_density(self, other)},
    source="ATen derivatives.yaml; in the first argument the derivative is new",
    improves=("values", "missing"),
)
rule(
    "aten::_standard_gamma",
    vjp={"self": lambda grad, self, result: grad * standard_gamma_grad(self, result)},
    jvp={"result": lambda self_t, self, result: self_t * standard_gamma_grad(self, result)},
    improves=("values", "missing"),
    source="ATen standard_gamma_grad; its derivatives are new",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch's vmap draws for a batch with randomness='different' only"),
)
