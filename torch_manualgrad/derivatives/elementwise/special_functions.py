"""The error function, the gamma function, and related functions.

Note:
    Where not differentiable: at the ends of the domains of erfinv and ndtri and at the poles of the gamma functions, where
    the derivative is infinite or nan, as in PyTorch.
"""

from __future__ import annotations

import itertools
from math import inf, log, pi, sqrt

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Ratio, elementwise, formula

from .saturating import normal_exponential
from .series import polynomial
from .strong_times import strong_times


@formula
def mvlgamma_backward(grad: Tensor, self: Tensor, p: int) -> Tensor:
    """Cotangent of $x$, given that of the log of the multivariate gamma function: $g sum_j psi(x - j / 2)$, $j < p$.

    Args:
        grad: cotangent of the result.
        self: $x > (p - 1) / 2$, real.
        p: the number of dimensions.

    Returns:
        The shape of ``grad``.
    """
    shifts = torch.arange(1 - p, 1, dtype=self.dtype, device=self.device) / 2
    return grad * torch.digamma(self.unsqueeze(-1) + shifts).sum(-1)


# (-1)^k (2k - 1)!!, the asymptotic series of sqrt(pi) x erfcx(x) in 1 / (2 x^2); the omitted terms at x = 12 are below 1e-17
_ERFCX = list(itertools.accumulate(range(1, 28, 2), lambda c, k: -c * k, initial=1.0))
_ERFCX_FAR = 12


def _erfcx(self: Tensor, result: Tensor) -> Tensor:
    """$2 x erfcx(x) - 2 / sqrt(pi)$; for large $x$, where the two cancel, the derivative of the series at infinity."""
    far = self > _ERFCX_FAR
    inverse = 1 / torch.where(far, self, inf)
    slope = [-(2 * k + 1) * c for k, c in enumerate(_ERFCX)]
    at_infinity = inverse * inverse / sqrt(pi) * polynomial(slope, inverse * inverse / 2)
    # strong: a tangent of a tangent is zero, and the result is infinite left of -26
    product = strong_times(torch.where(far, 0, self), torch.where(far, 0, result))
    near = product + product - 2 / sqrt(pi)
    return torch.where(far, at_infinity, near)


def _log_ndtr(self: Tensor, result: Tensor) -> Ratio:
    """$phi(x) / Phi(x)$ with the normal density $phi$ and the result $log Phi(x)$; on the left by erfcx or its series.

    Near 0, and where the density is denormal, it is computed by one exponential, as in PyTorch. Left of $-1$, PyTorch's
    result loses digits; far to the right, erfcx would overflow.
    """
    far, left = self < -_ERFCX_FAR * sqrt(2), self < -2
    denormal = sqrt(-2 * log(torch.finfo(self.dtype).smallest_normal))
    middle = (self.abs() < 1) | (self > denormal) & (self < 2 * denormal)
    inverse = 1 / torch.where(far, self, -inf)
    at_infinity = -sqrt(2 * pi) * torch.where(far, self, 0) / polynomial(_ERFCX, inverse * inverse)
    near = 2 / torch.special.erfcx(torch.where(left & ~far, self / -sqrt(2), 0))
    x, log_ndtr = torch.where(middle, self, 0), torch.where(middle, result, 0)
    by_one = (log_ndtr + x.pow(2) / 2).neg().exp()
    x = torch.where(left | middle, 0, self)
    log_ndtr = torch.where(
        x > 0, torch.where(x > 0, result, 0), (torch.erfc(torch.where(x > 0, 0, x) / -sqrt(2)) / 2).log()
    )
    right = normal_exponential(x) * (-log_ndtr).exp()
    slope = torch.where(far, at_infinity, torch.where(left, near, torch.where(middle, by_one, right)))
    return Ratio(slope, sqrt(2 * pi))


elementwise("aten::erf", lambda self: 2 / sqrt(pi) * (-self.pow(2)).exp(), real_only=True)
elementwise("aten::erfc", lambda self: -2 / sqrt(pi) * (-self.pow(2)).exp(), real_only=True)
elementwise("aten::special_erfcx", _erfcx, real_only=True, improves="values")
elementwise("aten::erfinv", lambda self: 0.5 * sqrt(pi) * self.erfinv().square().exp(), domain=(-1, 1), real_only=True)
elementwise(
    "aten::special_ndtri", lambda result: sqrt(2 * pi) * (result.square() / 2).exp(), domain=(0, 1), real_only=True
)
elementwise("aten::special_log_ndtr", _log_ndtr, real_only=True, improves="values")
elementwise("aten::lgamma", lambda self: self.digamma(), domain=(0, inf), real_only=True)
elementwise("aten::digamma", lambda self: torch.polygamma(1, self), domain=(0, inf), real_only=True)
elementwise(
    "aten::polygamma",
    lambda n, self: torch.polygamma(n + 1, self),
    domain=(0, inf),
    real_only=True,
    arguments=[{"n": 0}, {"n": 1}, {"n": 3}],
)
elementwise(
    "aten::mvlgamma", mvlgamma_backward, domain=(1, inf), real_only=True, arguments=[{"p": 1}, {"p": 2}, {"p": 3}]
)
