"""The pseudo-inverse: linalg_pinv.

Where the rank of $A$ is constant, its pseudo-inverse $P$ has the derivative

    dP = -P dA P + (I - P A) dA^H P^H P + P P^H dA^H (I - A P),
    gA = -P^H gP P^H + P^H P gP^H (I - P A) + (I - A P) gP^H P P^H.

Without a tolerance, only singular values that are zero to rounding are dropped, and this is the derivative. With a
tolerance, singular values that are not zero may be dropped. $P$ is then a block of $f(H)$ for the Hermitian
$H = [[0, A], [A^H, 0]]$, whose eigenvalues are $+-s_i$ and zeros, with $f(x) = 1 / x$ for values that are kept and 0
for the others. Its derivatives are sums over divided differences of $f$. Between nodes that are all kept,
$f[x_0, ..., x_k] = (-1)^k / (x_0 ... x_k)$; between nodes that are all dropped, it is 0; otherwise, for a kept node $p$
and a dropped node $q$,

    $f[a, b, ..., p, q] = (f[a, b, ..., p] - f[a, b, ..., q]) / (p - q)$.

For a kept $i$ and a dropped $j$, the first derivative has $1 / (s_i^2 - s_j^2)$ where the formula at constant rank has
$1 / s_i^2$. The derivative is a symmetric form in its directions and its cotangent, so its vjp is the same operator.

Where not differentiable: where the rank changes, $P$ is not continuous, and the result is the derivative at constant
rank; with a tolerance, where a kept singular value equals a dropped one.

Args:
    grad: cotangent of $P$, (*, n, m).
    result: $P$, (*, n, m).
    self: $A$, (*, m, n), real or complex.
    self_t: tangent of $A$, (*, m, n).

References:
    Golub and Pereyra, The differentiation of pseudo-inverses and nonlinear least squares problems whose variables
    separate, 1973, doi:10.1137/0710036; Daleckii and Krein, AMS Translations 47 (1965) 1; Higham, Functions of Matrices
    (SIAM 2008), section 3.2; Noferini, SIAM J. Matrix Anal. Appl. 38 (2017) 434, for functions of singular values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .divided_differences import contract
from .smooth import replaced, smooth, with_direction

# -- at constant rank -------------------------------------------------------------------------------------------------


@formula
def pinv_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $A$, given that of its pseudo-inverse $P$: $gA$ of the module's docstring.

    Returns:
        (*, m, n). A Hermitian $A$ is differentiated as a general matrix, too.

    Note:
        Where not differentiable: where the rank changes, $P$ is not continuous; the result is the derivative at
        constant rank.

    References:
        ATen pinv_backward; Golub and Pereyra, The differentiation of pseudo-inverses and nonlinear least squares
        problems whose variables separate, 1973, doi:10.1137/0710036, eq. (4.12).
    """
    if self.shape[-2] < self.shape[-1]:  # so that the products have the smaller dimension
        return pinv_backward(grad.mH, result.mH, self.mH).mH
    C = result @ grad.mH
    CP = C @ result
    return result.mH @ (C - CP @ self) - CP.mH + (grad.mH - self @ C) @ (result @ result.mH)


@formula
def pinv_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor:
    """Tangent of the pseudo-inverse $P$: $dP$ of the module's docstring.

    Returns:
        (*, n, m).

    Note:
        Where not differentiable: see `pinv_backward`.

    References:
        ATen pinv_jvp; Golub and Pereyra, see `pinv_backward`.
    """
    if self.shape[-2] < self.shape[-1]:
        return pinv_jvp(self.mH, result.mH, self_t.mH).mH
    D = result @ self_t
    dAK = self_t @ (result @ result.mH)
    return dAK.mH + (D.mH - D - result @ (self @ D.mH) - dAK.mH @ self) @ result


# -- with a tolerance -------------------------------------------------------------------------------------------------


def _difference(at: Sequence[Tensor], L: Tensor, kept: Tensor) -> Tensor:
    """$f[l_a, l_b, ...]$ for index tensors $a <= b <= ...$; eigenvalues that are kept have the smaller indices."""
    x = torch.stack([L[..., a] for a in at])
    inverse = torch.where(kept[..., at[-1]], 1 / x, 0).prod(0)
    if len(at) == 1:
        return inverse
    mixed = kept[..., at[0]] & ~kept[..., at[-1]]
    gap = torch.where(mixed, x[0] - x[-1], 1)
    quotient = (_difference(at[:-1], L, kept) - _difference(at[1:], L, kept)) / gap
    return torch.where(mixed, quotient, inverse if len(at) % 2 else -inverse)


def _differential(A: Tensor, rank: Tensor, E: Tensor) -> Tensor:
    (m, n), order = A.shape[-2:], E.shape[-3]
    if m < n:
        return _differential(A.mH, rank, E.mH).mH
    batch = torch.broadcast_shapes(A.shape[:-2], E.shape[:-3])
    A, E = A.expand(*batch, m, n), E.expand(*batch, order, m, n)
    if m > (order + 1) * n:  # everything acts in the span of the columns of A and E
        basis = torch.linalg.qr(torch.cat([A, *E.unbind(-3)], -1))[0]
        return _differential(basis.mH @ A, rank, basis.mH.unsqueeze(-3) @ E) @ basis.mH
    U, S, Vh = torch.linalg.svd(A)
    L = torch.cat([torch.stack([S, -S], -1).flatten(-2), S.new_zeros(*batch, m - n)], -1)
    kept = torch.arange(m + n, device=A.device) < 2 * rank.unsqueeze(-1)
    # eigenvectors of H: (u, v) and (u, -v), over the root of 2, and (u, 0) for the rest of U
    paired, signs = U[..., :n].repeat_interleave(2, -1), torch.tensor([1, -1], device=A.device).repeat(n)
    upper = torch.cat([paired * 0.5**0.5, U[..., n:]], -1)
    lower = torch.cat([Vh.mH.repeat_interleave(2, -1) * signs * 0.5**0.5, U.new_zeros(*batch, n, m - n)], -1)
    rotated = upper.mH.unsqueeze(-3) @ E @ lower.unsqueeze(-3)
    X = contract(lambda at: _difference(at, L, kept), L.numel(), rotated + rotated.mH)
    return lower @ X @ upper.mH


def _vjp(needed: dict[str, bool], inputs: Any, output: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, rank, E = inputs
    found = {}
    if needed["A"]:
        found["A"] = pinv_differential(A, rank, with_direction(E, grad.mH)).mH
    if needed["E"]:
        parts = [pinv_differential(A, rank, replaced(E, s, grad.mH)).mH for s in range(E.shape[-3])]
        found["E"] = torch.stack(parts, -3)
    return found


def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    A, rank, E = inputs
    found = None
    if tangents.A is not None:
        found = pinv_differential(A, rank, with_direction(E, tangents.A))
    if tangents.E is not None:
        for s in range(E.shape[-3]):
            part = pinv_differential(A, rank, replaced(E, s, tangents.E[..., s, :, :]))
            found = part if found is None else found + part
    return found


def _fake(A: Tensor, rank: Tensor, E: Tensor) -> Tensor:
    return A.new_empty(*torch.broadcast_shapes(A.shape[:-2], E.shape[:-3]), A.shape[-1], A.shape[-2])


def _some_direction(E: Tensor) -> str:
    return "" if E.shape[-3] else f"E: expected at least one direction, got shape {list(E.shape)}"


@smooth(vjp=_vjp, jvp=_jvp, fake=_fake, requires=_some_direction)
def pinv_differential(A: Tensor, rank: Tensor, E: Tensor) -> Tensor:
    """The $k$-th derivative of the pseudo-inverse of $A$, truncated to the largest singular values, in $k$ directions.

    Args:
        A: (*, m, n), real or complex.
        rank: (*), the number of singular values that are kept, all of them nonzero; a constant to every derivative.
        E: (*, k, m, n), the directions, $k >= 1$.

    Returns:
        (*, n, m).

    Note:
        Where not differentiable: where a kept singular value equals a dropped one.

    References:
        Daleckii and Krein, AMS Translations 47 (1965) 1; Noferini, SIAM J. Matrix Anal. Appl. 38 (2017) 434.
    """
    if 0 in A.shape[-2:]:
        return _fake(A, rank, E).zero_()
    return _differential(A, rank, E).resolve_conj().contiguous()


def _rank(A: Tensor, P: Tensor) -> Tensor:
    """The number of singular values that $P$ keeps: the trace of the projector $P A$."""
    A, P = A.detach(), P.detach()
    trace = (P.mT * A).sum((-2, -1))
    return (trace.real if trace.is_complex() else trace).round()


def _has_full_rank(A: Tensor, P: Tensor) -> bool:
    """Whether no singular value is dropped; False outside of the CPU, where reading the values would synchronize."""
    return A.is_cpu and bool((_rank(A, P) == min(A.shape[-2:])).all())


def _full_rank_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor | None:
    if not _has_full_rank(self, result):
        return None
    return pinv_backward.reference(grad, result, self).resolve_conj().contiguous()


def _full_rank_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor | None:
    if not _has_full_rank(self, result):
        return None
    return pinv_jvp.reference(self, result, self_t).resolve_conj().contiguous()


@formula(kernels=Kernel("cpu", python=_full_rank_backward, tracked=True))
def pinv_truncated_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor:
    """Cotangent of $A$, given that of its pseudo-inverse $P$, also where nonzero singular values are dropped.

    Returns:
        (*, m, n). A Hermitian $A$ is differentiated as a general matrix, too.

    Note:
        Where not differentiable: where a kept singular value equals a dropped one.

    References:
        `pinv_differential`; ATen pinv_backward has the derivative at constant rank, as if the dropped values were zero.
    """
    return pinv_differential(self, _rank(self, result), grad.mH.unsqueeze(-3)).mH.resolve_conj().contiguous()


@formula(kernels=Kernel("cpu", python=_full_rank_jvp, tracked=True))
def pinv_truncated_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor:
    """Tangent of the pseudo-inverse $P$, also where nonzero singular values are dropped.

    Returns:
        (*, n, m).

    Note:
        Where not differentiable: see `pinv_truncated_backward`.

    References:
        See `pinv_truncated_backward`.
    """
    return pinv_differential(self, _rank(self, result), self_t.unsqueeze(-3))


# -- the rule ---------------------------------------------------------------------------------------------------------


def _pinv_backward(grad: Tensor, result: Tensor, self: Tensor, atol: Tensor | None, rtol: Tensor | None) -> Tensor:
    backward = pinv_backward if atol is None and rtol is None else pinv_truncated_backward
    return backward(grad, result, self)


def _pinv_jvp(self: Tensor, result: Tensor, self_t: Tensor, atol: Tensor | None, rtol: Tensor | None) -> Tensor:
    jvp = pinv_jvp if atol is None and rtol is None else pinv_truncated_jvp
    return jvp(self, result, self_t)


rule(
    "aten::linalg_pinv.atol_rtol_tensor",
    vjp={
        "self": _pinv_backward,
        ("atol", "rtol"): lambda: (None, None),  # P is constant in them, except for jumps
    },
    jvp={"result": _pinv_jvp},
    improves=("speed", "values"),
    source="ATen pinv_backward, pinv_jvp; Golub and Pereyra, 1973, doi:10.1137/0710036, eq. (4.12)",
)
