"""Least squares and the pseudo-inverse: linalg_lstsq, linalg_pinv.

Where the rank of A is constant, its pseudo-inverse P has the derivative

    dP = -P dA P + (I - P A) dA^H P^H P + P P^H dA^H (I - A P),

and so the least-squares solution of minimal norm, X = P B with the remainder R = B - A X, has

    dX = P (dB - dA X) + (I - P A) dA^H P^H X + P P^H dA^H R.

The second term vanishes for full column rank, the third for full row rank. Pulled back, with Y = P^H gX:

    gB = Y,    gA = -Y X^H + P^H X (gX - P A gX)^H + R (P Y)^H.

The residuals L = sum_i |R_i|^2 of each column exist at full column rank only, where A^H R = 0:

    dL = 2 Re sum_i conj(R_i) (dB - dA X)_i,    gB = 2 R gL,    gA = -gB X^H.

Singular values of A under the tolerance count as zeros, in the derivative as in the forward. A term that they would add
is smaller than the others by their ratio to the values that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import magnitude, random, random_conditioned

# -- the pseudo-inverse -----------------------------------------------------------------------------------------------


@formula
def pinv_backward(grad: Tensor, pinvA: Tensor, A: Tensor) -> Tensor:
    """Cotangent of A for that of its pseudo-inverse P: -P^H G P^H + P^H P G^H (I - P A) + (I - A P) G^H P P^H.

    Args:
        grad: cotangent G of P, (*, n, m).
        pinvA: P, (*, n, m). A: (*, m, n).
    Returns:
        (*, m, n). For a Hermitian A no other gradient is meant: that of A as a general matrix.
    Where not differentiable: where the rank changes P is not continuous; the result is the derivative at constant rank.
    Source: ATen pinv_backward; Golub and Pereyra, 1973.
    """
    if A.shape[-2] < A.shape[-1]:  # the products are small at the side of n
        return pinv_backward.reference(grad.mH, pinvA.mH, A.mH).mH
    C = pinvA @ grad.mH
    CP = C @ pinvA
    return pinvA.mH @ (C - CP @ A) - CP.mH + (grad.mH - A @ C) @ (pinvA @ pinvA.mH)


@formula
def pinv_jvp(A: Tensor, pinvA: Tensor, dA: Tensor) -> Tensor:
    """Tangent of the pseudo-inverse P: -P dA P + (I - P A) dA^H P^H P + P P^H dA^H (I - A P).

    Args:
        A: (*, m, n). pinvA: P, (*, n, m). dA: tangent of A, (*, m, n).
    Returns:
        (*, n, m).
    Where not differentiable: where the rank changes P is not continuous; the result is the derivative at constant rank.
    Source: ATen pinv_jvp; Golub and Pereyra, 1973.
    """
    if A.shape[-2] < A.shape[-1]:
        return pinv_jvp.reference(A.mH, pinvA.mH, dA.mH).mH
    D = pinvA @ dA
    K = pinvA @ pinvA.mH
    dAK = dA @ K
    return dAK.mH + (D.mH - D - pinvA @ (A @ D.mH) - dAK.mH @ A) @ pinvA


# -- least squares ----------------------------------------------------------------------------------------------------


def _pinv(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    """linalg.pinv with the tolerance of the driver, for which a negative one means the precision of the dtype."""
    if rank.numel() == 0:
        rcond = 0.0
    elif rcond is not None and rcond < 0:
        rcond = torch.finfo(A.dtype).eps
    return torch.linalg.pinv(A, rtol=rcond)


@formula(kernel=("default",))
def lstsq_pinv(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    """The pseudo-inverse of A, of which linalg.lstsq has found the rank.

    Its derivatives are those of linalg.pinv. A matrix of full rank needs no singular values: with A = Q R (or
    A^H = Q R if A is wide) the pseudo-inverse is (Q R^-H)^H (or Q R^-H).

    Args:
        A: (*, m, n).
        rank: (*), integer, as linalg.lstsq returns it: empty from a driver that assumes full rank.
        rcond: singular values up to rcond times the largest are taken for zeros; None: max(m, n) times the precision.
            It is not used where the rank is full.
    Returns:
        (*, n, m).
    Raises:
        LinAlgError: the singular values do not converge.
    Where not differentiable: as pinv_backward. Source: Golub and Van Loan, section 5.5.
    """
    return _pinv(A, rank, rcond)


@lstsq_pinv.impl("default")
def _(A: Tensor, rank: Tensor, rcond: float | None) -> Tensor:
    tall = A.shape[-2] >= A.shape[-1]
    if A.numel() == 0 or rank.numel() and not bool((rank == min(A.shape[-2:])).all()):
        return _pinv(A, rank, rcond)
    Q, R = torch.linalg.qr(A if tall else A.mH)
    P = torch.linalg.solve_triangular(R.mH, Q, upper=False, left=False)
    return (P.mH if tall else P).resolve_conj().contiguous()


def _matrix(A: Tensor, B: Tensor) -> Tensor:
    """B as (*, m, k): for A (*, m, n) it may be one right-hand side, (*, m)."""
    return B.unsqueeze(-1) if B.dim() < A.dim() else B


def _normalised(A: Tensor, B_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(c, A / c, B / c) with the same solution, so that a product of two pseudo-inverses can neither overflow nor vanish."""
    size = magnitude(A)
    return size, A / size, _matrix(A, B_) / size


def _residuals_backward(gL: Tensor | None, A: Tensor, B_: Tensor, X_: Tensor) -> Tensor | None:
    """The cotangent 2 R gL of B for that of the residuals; none where there are no residuals."""
    if gL is None or gL.numel() == 0:
        return None
    return 2 * gL.unsqueeze(-2) * (_matrix(A, B_) - A @ _matrix(A, X_))


def _b_backward(solution_part: Tensor | None, residuals_part: Tensor | None, A: Tensor, B_: Tensor) -> Tensor:
    parts = [g for g in (solution_part, residuals_part) if g is not None]
    return (
        sum(parts[1:], parts[0]).sum_to_size(_matrix(A, B_).shape).reshape(B_.shape) if parts else torch.zeros_like(B_)
    )


@formula
def linalg_lstsq_backward(
    gX: Tensor | None,
    gL: Tensor | None,
    A: Tensor,
    B_: Tensor,
    X_: Tensor,
    rank: Tensor,
    rcond: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of A and B for those of the least-squares solution and of the residuals.

    Args:
        gX: cotangent of the solution, (*, n, k) or (*, n). None for zero.
        gL: cotangent of the residuals, (*, k), real; anything empty where there are none. None for zero.
        A: (*, m, n). B_: (*, m, k), or (*, m) with one dim less than A.
        X_: the solution. rank: what linalg.lstsq returned, see `lstsq_pinv`. rcond: the tolerance it was given.
    Returns:
        gA and gB, of the shapes of A and B_.
    Where not differentiable: as pinv_backward, rank by rank of each matrix. In directions that raise the rank, what is left
        out counts as the SVD leaves it out, also for gelsy, whose forward goes by the order of its pivots there.
    Source: ATen linalg_lstsq_backward; the module's docstring.
    """
    gA, Y = torch.zeros_like(A), None
    if gX is not None:
        size, A_1, B_1 = _normalised(A, B_)
        G, P = _matrix(A, gX), lstsq_pinv(A_1, rank, rcond)
        X, Y = P @ B_1, P.mH @ G  # not the X of the forward, whose last bits gelsy draws by chance
        if G.shape[-1] > min(A.shape[-2:]):  # fewer products, since X = P B
            gA = pinv_backward.reference(G @ B_1.mH, P, A_1)
        else:
            gA = (P.mH @ X) @ (G - P @ (A_1 @ G)).mH - Y @ X.mH + (B_1 - A_1 @ X) @ (P @ Y).mH
        gA, Y = gA / size, Y / size
    S = _residuals_backward(gL, A, B_, X_)
    if S is not None:
        gA = gA - S @ _matrix(A, X_).mH
    return gA.sum_to_size(A.shape), _b_backward(Y, S, A, B_)


@formula
def linalg_lstsq_solution_jvp(
    A: Tensor,
    B_: Tensor,
    dA: Tensor | None,
    dB_: Tensor | None,
    X_: Tensor,
    rank: Tensor,
    rcond: float | None = None,
) -> Tensor:
    """Tangent of the least-squares solution: P (dB - dA X) + (I - P A) dA^H P^H X + P P^H dA^H R.

    Args:
        A: (*, m, n). B_: (*, m, k), or (*, m) with one dim less than A.
        dA, dB_: their tangents; None for zero.
        X_: the solution. rank: what linalg.lstsq returned, see `lstsq_pinv`. rcond: the tolerance it was given.
    Returns:
        The shape of X_.
    Where not differentiable: as pinv_jvp, rank by rank of each matrix.
    Source: ATen linalg_lstsq_solution_jvp; the module's docstring.
    """
    size, A_1, B = _normalised(A, B_)
    P = lstsq_pinv(A_1, rank, rcond)
    dB = None if dB_ is None else _matrix(A, dB_) / size
    if dA is None:
        return torch.zeros_like(X_) if dB is None else (P @ dB).reshape(X_.shape)
    X, dA = _matrix(A, X_), dA / size
    turned = dA.mH @ (P.mH @ X)
    inside = P.mH @ (dA.mH @ (B - A_1 @ X)) - dA @ X - A_1 @ turned
    if dB is not None:
        inside = inside + dB
    return (P @ inside + turned).reshape(X_.shape)


@formula
def linalg_lstsq_jvp(A: Tensor, B: Tensor, dA: Tensor, dB: Tensor) -> Tensor:
    """Tangent of the least-squares solution, found anew: linalg_lstsq_solution_jvp.

    Args:
        A, dA: (*, m, n). B, dB: (*, m, k), or (*, m) with one dim less than A.
    Returns:
        (*, n, k) or (*, n).
    Where not differentiable: linalg_lstsq_solution_jvp. Source: ATen linalg_lstsq_jvp, of older releases.
    """
    X, _, rank, _ = torch.linalg.lstsq(A, B)
    return linalg_lstsq_solution_jvp(A, B, dA, dB, X, rank)


@formula
def linalg_lstsq_residuals_jvp(
    A: Tensor, B_: Tensor, dA: Tensor | None, dB_: Tensor | None, X_: Tensor, L: Tensor
) -> Tensor:
    """Tangent of the residuals L = sum_i |R_i|^2, R = B - A X: 2 Re sum_i conj(R_i) (dB - dA X)_i.

    Args:
        A: (*, m, n). B_: (*, m, k), or (*, m) with one dim less than A.
        dA, dB_: their tangents; None for zero.
        X_: the solution. L: the residuals; empty where the operator gives none, as is their tangent then.
    Returns:
        The shape of L, real.
    Source: ATen linalg_lstsq_residuals_jvp; the module's docstring.
    """
    if L.numel() == 0 or dA is None and dB_ is None:
        return torch.zeros_like(L)
    X = _matrix(A, X_)
    R = _matrix(A, B_) - A @ X
    change = -(dA @ X) if dA is not None else torch.zeros_like(R)
    if dB_ is not None:
        change = change + _matrix(A, dB_)
    return 2 * (R.conj() * change).sum(-2).real if R.is_complex() else 2 * (R * change).sum(-2)


# -- the rules --------------------------------------------------------------------------------------------------------


def _lstsq_vjp(
    grad_solution: Tensor | None,
    grad_residuals: Tensor | None,
    self: Tensor,
    b: Tensor,
    solution: Tensor,
    rank: Tensor,
    rcond: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor]:
    if output_mask[0]:
        return linalg_lstsq_backward(grad_solution, grad_residuals, self, b, solution, rank, rcond)
    G = grad_solution
    Y = None if G is None else lstsq_pinv(self, rank, rcond).mH @ _matrix(self, G)
    return None, _b_backward(Y, _residuals_backward(grad_residuals, self, b, solution), self, b)


def _solution_jvp(
    self_p: Tensor,
    b_p: Tensor,
    self_t: Tensor | None,
    b_t: Tensor | None,
    solution: Tensor,
    rank: Tensor,
    rcond: float | None,
) -> Tensor:
    return linalg_lstsq_solution_jvp(self_p, b_p, self_t, b_t, solution, rank, rcond)


def _pinv_probe(self: Tensor, *, hermitian: bool = False, **tolerances: Any) -> Tensor:
    A = 0.5 * (self + self.mH) if hermitian else self
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(A, hermitian=hermitian, **tolerances)


def _lstsq_probe(self: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    X, L, *_ = torch.ops.aten.linalg_lstsq(self, b, *args, **kwargs)
    return X, L


def _pinv_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 4), (1, 1), (0, 3, 2), (3, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 3, 2, dtype=dtype, device=device).mT)
    tolerance = torch.tensor(1e-3, device=device, dtype=torch.float64)
    yield Sample(random_conditioned(3, 2, dtype=dtype, device=device), atol=tolerance, rtol=tolerance)
    A = random_conditioned(3, 3, dtype=dtype, device=device)
    yield Sample(A + A.mH, hermitian=True)


def _lstsq_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(A: Sequence[int], B: Sequence[int], *args: Any, **kwargs: Any) -> Sample:
        first = random_conditioned(*A, dtype=dtype, device=device)
        return Sample(first, random(*B, dtype=dtype, device=device, seed=1), *args, **kwargs)

    # gelsy, the default on the CPU, is there with single columns: it starts from uninitialised pivots, and its own
    # values differ from call to call in the last bits where there is something to exchange
    drivers = ("gels", "gelsd", "gelss") if torch.device(device).type == "cpu" else ("gels",)
    for driver in drivers:
        yield sample((4, 2), (4, 3), driver=driver)
        yield sample((2, 3), (2, 2), driver=driver)
    yield sample((4, 1), (4, 2))
    yield sample((2, 3, 3), (2, 3, 1), driver=drivers[-1])
    yield sample((1, 3, 2), (2, 3, 2), 1e-3, driver=drivers[-1])
    yield sample((0, 3, 2), (0, 3, 1), driver=drivers[0])
    yield sample((0, 2), (0, 3))
    A = random_conditioned(2, 4, dtype=dtype, device=device).mT
    yield Sample(A, random(4, 1, dtype=dtype, device=device, seed=1), driver=drivers[0])


rule(
    "aten::linalg_pinv.atol_rtol_tensor",
    vjp={
        "self": lambda grad, result, self: pinv_backward(grad, result, self),
        ("atol", "rtol"): lambda output_mask: (None, None),  # the inverse is constant in them, but for its jumps
    },
    jvp={
        "result": lambda self_p, result, self_t: (
            torch.zeros_like(result)
            if self_t is None
            else pinv_jvp(self_p, result, self_t)  # a tolerance has no tangent
        )
    },
    uses=(pinv_backward, pinv_jvp),
    improves="speed",
    source="ATen pinv_backward, pinv_jvp",
    samples=_pinv_samples,
    probe=_pinv_probe,
)
rule(
    "aten::linalg_lstsq",
    vjp={("self", "b"): _lstsq_vjp},
    jvp={
        "solution": _solution_jvp,
        "residuals": lambda self_p, b_p, self_t, b_t, solution, residuals: linalg_lstsq_residuals_jvp(
            self_p, b_p, self_t, b_t, solution, residuals
        ),
    },
    uses=(linalg_lstsq_backward, lstsq_pinv, linalg_lstsq_solution_jvp, linalg_lstsq_residuals_jvp),
    not_differentiable=("rank", "singular_values"),
    improves=("values", "speed"),
    gaps={"fake": "the shape of the residuals depends on the rank, which fake tensors do not have"},
    source="ATen linalg_lstsq_backward, linalg_lstsq_solution_jvp, linalg_lstsq_residuals_jvp",
    samples=_lstsq_samples,
    probe=_lstsq_probe,
)
