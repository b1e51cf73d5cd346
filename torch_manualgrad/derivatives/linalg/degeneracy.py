"""Quotients by differences of singular values or eigenvalues, at degenerate values too.

The derivative of a decomposition divides numerators $N_ij$ by denominators $d_ij = s_j - s_i$. Where two values are
equal, the vectors have no derivative. A loss that does not depend on the choice of basis within their group still has
one: $N_ij$ vanishes with $d_ij$. The quotient then follows from what is known:

1. If $N_ij$ is no larger than its rounding error, the vectors contribute nothing for this pair (a projector onto the group,
   a polar factor).
2. If $N_ij$ agrees with $d_ij h_ij$ within its rounding error, the quotient is $h_ij$. Here $h$ is the quotient for one
   function of the matrix ($U f(S) V^H$, any $f$, such as a reconstruction or whitening): $h = c H$, with $H$ the symmetric
   part that belongs to $N$, and $c = f'/f$ read off the diagonal, where the cotangent of $s_i$ is $c H_ii$. Where
   $H_ii = H_jj = 0$, the diagonal does not determine $c$: $h$ is 0, and the pair is reported if the values are equal.
3. Otherwise $N_ij$ is divided by $d_ij$ if $d_ij$ is above the tolerance, or if the quotient is no larger than the gradient
   elsewhere (values that are rounding errors themselves, such as those of a null space, are still separate).
4. Otherwise the loss depends on the choice of basis: the pair contributes nothing, and it is reported (see gauge.py).

No rule can cover every loss: at exactly equal values, the cotangents of $U$, $S$ and $V$ do not determine the gradient. At
$A = I$, the losses $<G, U S V^H>$ and $<G, U V^H>$ have the same cotangents, $(G, 0, G^T)$, if the diagonal of $G$ is zero, but
different gradients unless $G$ is antisymmetric. Sums of several spectral functions of one group are such losses. The operators
of `mg.linalg` that do not differentiate a decomposition (polar, sqrtm, funm_hermitian, nuclear_norm, ...) are exact for them.
The same holds for tangents: the tangent of a group's values is a matrix, and $S$ can hold only its diagonal.

Decisions depend only on values. The derivatives are those of $N / d$, and 0 for a masked pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_manualgrad.core.rule import is_sharded

from .gauge import gauge_independent

__all__ = ["Degeneracy", "Resolved", "Scale"]


@dataclass(frozen=True)
class Degeneracy:
    """When two singular values or eigenvalues count as equal, and how such values are treated.

    Attributes:
        rtol: the largest difference of two values that count as equal, relative to the largest value; None:
            $4 max(m, n) eps$, with $eps$ of the dtype of the values.
        atol: the same, as an absolute difference. The larger of the two applies.
        broadening: 0, or a width relative to the largest value: every $1/d$ becomes $d / (d^2 + width^2)$ (a
            Lorentzian). The gradient is then bounded, but biased everywhere by about $(width / d)^2$, and nothing is
            reported.
    """

    rtol: float | None = None
    atol: float = 0.0
    broadening: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rtol", "atol", "broadening"):
            value = getattr(self, name)
            if value is None and name == "rtol":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise TypeError(f"{name}: expected a number, got {value!r}")
            if not value >= 0:
                raise ValueError(f"{name} must not be negative, got {value}")


@dataclass
class Scale:
    """The magnitudes that differences of values are compared with, (*, 1, 1), in the dtype of the values.

    Attributes:
        tolerance: the largest difference of values that count as equal.
        window: the largest difference to which rules 1 and 2 apply.
        width: the width of the broadening; None without broadening.
    """

    tolerance: Tensor
    window: Tensor
    width: Tensor | None

    @classmethod
    def of(cls, values: Tensor, size: int, rtol: float | None, atol: float, broadening: float) -> Scale:
        """The scale of ``values``, (*, k), for the options of `Degeneracy`; ``size``: the larger dimension of the matrices."""
        largest = values.detach().abs().amax(-1)[..., None, None]
        eps = torch.finfo(largest.dtype).eps
        tolerance = (largest * (4 * size * eps if rtol is None else rtol)).clamp(min=atol)
        return cls(
            tolerance,
            torch.maximum(tolerance, largest * eps**0.5),
            (largest * broadening).clamp(min=torch.finfo(largest.dtype).tiny) if broadening else None,
        )


def _over(N: Tensor, d: Tensor) -> Tensor:
    """$N / d$ for a real $d$, part by part: complex division by the smallest numbers gives $0 / d = nan$."""
    if not N.is_complex() or d.is_complex():
        return N / d
    return torch.view_as_complex(torch.view_as_real(N.resolve_conj()) / d.unsqueeze(-1))


def differences(values: Tensor) -> Tensor:
    """$d_ij = s_j - s_i$."""
    return values.unsqueeze(-2) - values.unsqueeze(-1)


def sums(values: Tensor) -> Tensor:
    """$s_i + s_j$."""
    return values.unsqueeze(-2) + values.unsqueeze(-1)


class Resolved:
    """Quotients by the rules of this module.

    Args:
        scale: the scale of the values.
        columns: cotangents or tangents, (*, m, k) each. The numerators are their inner products with unit vectors, so they
            determine the size of rounding errors. None is skipped; at least one is given.

    Attributes:
        gauge_dependent: whether rule 4 applied anywhere: a bool without dims.
    """

    def __init__(self, scale: Scale, *columns: Tensor | None) -> None:
        self.scale = scale
        given = [c.detach() for c in columns if c is not None]
        self.eps = torch.finfo(given[0].dtype).eps
        self.size = torch.zeros_like(scale.tolerance)
        # with keepdim: without it, a fake (1, 1) keeps its dimensions on torch 2.10
        norms = sum(c.norm(dim=-2, keepdim=True).squeeze(-2) for c in given)
        self.noise = self._noise(norms, max(c.shape[-2] for c in given))
        self.pair_noise = self.noise.unsqueeze(-1) + self.noise.unsqueeze(-2)
        self.gauge_dependent = gauge_independent(scale.tolerance)

    def _noise(self, norms: Tensor, length: int) -> Tensor:
        return 8 * length**0.5 * self.eps * norms

    def by_differences(self, N: Tensor, values: Tensor, H: Tensor | None = None, g: Tensor | None = None) -> Tensor:
        """$N_ij / (s_j - s_i)$, 0 on the diagonal.

        Args:
            N: (*, k, k).
            values: $s$, (*, k).
            H: the symmetric part that belongs to $N$, (*, k, k); None to skip rule 2.
            g: the cotangent of the values, (*, k); None to skip rule 2.

        Returns:
            (*, k, k).
        """
        d = differences(values)
        apart = ~torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
        h = contradicted = None
        if H is not None and g is not None:
            h, contradicted = _spectral(H, g, self.pair_noise)
            h = h * apart
        plain = self._quotient(N, d)
        self.size = plain.detach().abs().amax((-2, -1), keepdim=True)
        if g is not None:
            self.size = torch.maximum(self.size, g.detach().abs().amax(-1)[..., None, None])
        result = self._resolve(N, d, plain, self.pair_noise, h, contradicted, apart)
        if N.is_complex():
            phase = N.detach().diagonal(dim1=-2, dim2=-1).abs()
            self._report(phase > self.noise / self.eps**0.5)
        return result

    def by_sums(self, N: Tensor, values: Tensor) -> Tensor:
        """$N_ij / (s_i + s_j)$."""
        d = sums(values)
        return self._resolve(N, d, self._quotient(N, d), self.pair_noise)

    def by_values(self, rest: Tensor, values: Tensor, columns: Tensor) -> Tensor:
        """The columns of ``rest``, the part of ``columns`` that a projector left, divided by the values."""
        d = values.unsqueeze(-2)
        noise = self._noise(columns.detach().norm(dim=-2, keepdim=True), columns.shape[-2])
        return self._resolve(rest, d, self._quotient(rest, d), noise)

    def _quotient(self, N: Tensor, d: Tensor) -> Tensor:
        if self.scale.width is not None:
            t = d / self.scale.width
            return N * (t / (t.square() + 1) / self.scale.width)
        equal = d.detach().abs() <= self.scale.tolerance
        return _over(torch.where(equal, 0, N), torch.where(equal, 1, d))

    def _resolve(
        self,
        N: Tensor,
        d: Tensor,
        plain: Tensor,
        noise: Tensor,
        h: Tensor | None = None,
        contradicted: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        if self.scale.width is not None:
            return plain
        N, d, value = N.detach(), d.detach(), plain.detach()
        distance = d.abs()
        smooth = (distance <= self.scale.window) & ((N if h is None else N - h * d).abs() <= noise)
        chosen = torch.where(smooth, 0 if h is None else h, value)
        gauge_dependent = (distance <= self.scale.tolerance) & ~smooth
        moderate = gauge_dependent & (N.abs() <= 4 * self.size * distance)
        chosen = torch.where(moderate, _over(N, torch.where(moderate, d, 1)), chosen)
        gauge_dependent = gauge_dependent & ~moderate
        if contradicted is not None:
            gauge_dependent = gauge_dependent | (contradicted & smooth & (distance <= self.scale.tolerance))
        self._report(gauge_dependent if counted is None else gauge_dependent & counted)
        return plain + (chosen - value)

    def _report(self, entries: Tensor) -> None:
        if self.scale.width is None and not is_sharded(entries):  # each rank's kernel reports its own shard
            self.gauge_dependent = self.gauge_dependent | entries.any()


def _spectral(H: Tensor, cotangent: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """The quotients $h$ of rule 2, and where the diagonal contradicts one function or does not determine it: (*, k, k)."""
    H, g = H.detach(), cotangent.detach()
    d = H.diagonal(dim1=-2, dim2=-1)
    d = d.real if d.is_complex() else d
    squares, products, size = (x.unsqueeze(-1) + x.unsqueeze(-2) for x in (d.square(), g * d, g.square()))
    known = squares > noise.square()
    c = torch.where(known, products / torch.where(known, squares, 1), 0)
    fits = size - c * products <= torch.finfo(g.dtype).eps ** 0.75 * size
    return torch.where(fits, c, 0) * H, ~(fits & known) & (H.abs() > noise)
