"""Samples of the Dirichlet distribution. Each component $x$ is a sample of the beta distribution of $a$ and $b$.

With $u = log x - log(1 - x)$, the density of $u$ is $exp(-E)$ up to a constant, and at constant probability

    $du/da = +-$ integral of $(log x(u +- s) - psi(a) + psi(a + b)) exp(E(u) - E(u +- s)) ds$, $s$ from 0 to infinity,
    $E(u) - E(u +- s) = p s - (a + b) log(1 + q (exp(s) - 1))$, with $p, q = a, x$ above $u$ and $b, 1 - x$ below it:

over the values above $u$, or those below it where $log x < psi(a) - psi(a + b)$, so that the integrand keeps its sign. The
integrand bends where $q exp(s)$ is about 1, and decays as $exp(-b s)$ or $exp(-a s)$ from there on. Gauss-Legendre quadrature
integrates it on four panels, and the exponential tail has a closed form. In double precision, the relative error is below
$1e-11$ for $a$ and $b$ between $1e-3$ and $1e4$.

The derivatives of all components of a sample are the columns of a matrix field that transports the distribution. A second
derivative is the derivative of this field along itself, so that its mean over samples is the second derivative of the mean.
Only for two components is the field the gradient of one function of the sample's probability. For more components, a second
derivative of a single sample depends on the order of the two differentiations.

References:
    Figurnov, Mohamed, Mnih, Implicit reparameterization gradients, arXiv:1805.08498, equation 6.
"""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .series import digamma, gauss_legendre

_CUT = 44.0  # exp(-44) is below the rounding error
_RULE = gauss_legendre(36)
_BEND = 6.0  # the length of the panels on either side of the bend of the density
_STEPS = 12
_BLOCK = 256


def _falling(s: Tensor, p: Tensor, q: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """$log(1 + q (exp(s) - 1))$, and the logarithm of the density at $s$ in multiples of that at 0."""
    log = (q * s.expm1()).log1p()
    return log, p * s - total * log


def _edges(p: Tensor, q: Tensor, total: Tensor) -> Tensor:
    """The ends of four panels, up to where the density is negligible, or exponential."""
    with torch.no_grad():
        bend = -q.log()
        end = bend + _CUT
        for _ in range(_STEPS):  # Newton's method for a convex function, from above
            log, falling = _falling(end, p, q, total)
            slope = total * q * (end - log).exp() - p
            end = torch.where(falling < -_CUT, end - (-falling - _CUT) / slope, end)
        inner = [torch.minimum((bend + shift).clamp(min=0), end) for shift in (-_BEND, 0, _BEND)]
        return torch.stack([torch.zeros_like(end), *inner, end], -1)


def _of_a_component(x: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    inside = (x > 0) & (x <= 1) & (alpha > 0) & (total > alpha)
    t = torch.where(inside, x, 0.5).to(dtype)
    a, n = torch.where(inside, alpha, 1).to(dtype), torch.where(inside, total, 2).to(dtype)
    logs = t.log() - digamma(a) + digamma(n)
    above = logs > 0
    p, q = torch.where(above, a, n - a), torch.where(above, t, 1 - t)
    edges = _edges(p, q, n)
    nodes, weights = torch.tensor(_RULE, dtype=dtype, device=x.device)
    length = edges.diff().unsqueeze(-1)
    s = (edges[..., :-1].unsqueeze(-1) + length * nodes).flatten(-2)
    end = edges[..., -1:]
    p, q, n, logs, above = (y.unsqueeze(-1) for y in (p, q, n, logs, above))

    log, falling = _falling(s, p, q, n)
    inner = (logs + torch.where(above, s, 0) - log) * falling.exp() * (length * weights).flatten(-2)
    log, falling = _falling(end, p, q, n)
    rate = n - p
    rest = logs + torch.where(above, end, 0) - log - torch.where(above, 0, 1 / rate)
    tail = rest / rate * falling.exp()
    slope = inner.sum(-1) + tail.squeeze(-1)
    found = t * torch.where(above.squeeze(-1), slope, -slope)
    return torch.where(inside, found, torch.where((x == 0) | (total == alpha), 0, nan)).to(x.dtype)


def _are_many(x: Tensor, alpha: Tensor, total: Tensor) -> bool:
    return x.numel() > _BLOCK and all(y.shape == x.shape and y.is_contiguous() for y in (x, alpha, total))


def _by_blocks(x: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
    """Computed for as many numbers at a time as fit into a cache together with their nodes."""
    blocks = zip(*[y.flatten().split(_BLOCK) for y in (x, alpha, total)])
    return torch.cat([_of_a_component(*block) for block in blocks]).view_as(x)


@formula(kernels=Kernel("cpu", when=_are_many, python=_by_blocks))
def dirichlet_grad(x: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
    """The derivative of a component $x$ of a sample of the Dirichlet distribution in its own $alpha$, divided by $1 - x$.

    Args:
        x: the component, real.
        alpha: $a$, real, positive, the shape of ``x``.
        total: $a + b$, the sum of all alphas, the shape of ``x``.

    Returns:
        The shape of ``x``; 0 at $x = 0$, and where $b$ is 0.

    References:
        Figurnov, Mohamed, Mnih, arXiv:1805.08498, equation 6. ATen dirichlet_grad approximates this, and has no
        derivative.
    """
    return _of_a_component(x, alpha, total)


def _field(x: Tensor, alpha: Tensor) -> Tensor:
    return dirichlet_grad(x, alpha, alpha.sum(-1, keepdim=True).expand_as(alpha).contiguous())


def _pullback(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
    return _field(result, self) * (grad - (grad * result).sum(-1, keepdim=True))


def _pushforward(self_t: Tensor, self: Tensor, result: Tensor) -> Tensor:
    moved = _field(result, self) * self_t
    return moved - result * moved.sum(-1, keepdim=True)


rule(
    "aten::_sample_dirichlet",
    vjp={"self": _pullback},
    jvp={"result": _pushforward},
    improves="missing",
    source="torch.distributions.Dirichlet, which calls ATen's dirichlet_grad; its derivatives are new",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch's vmap draws for a batch with randomness='different' only"),
)
