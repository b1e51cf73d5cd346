"""Linear equations for a matrix: solve_sylvester, solve_lyapunov, solve_discrete_lyapunov.

With the Schur forms $A = Q T Q^H$ and $B = P S P^H$, the unknown $Y = Q^H X P$ is found column by column. Each column is the
solution of a triangular system (Bartels and Stewart), with $F = Q^H C P$:

    $A X + X B = C$:       $(T + s_jj I) y_j = f_j - sum_(i<j) s_ij y_i$,
    $A X B - X + C = 0$:   $(s_jj T - I) y_j = -f_j - T sum_(i<j) s_ij y_i$.

Only unitary transformations are used, so the residual is as small as rounding errors of $|A| |X| + |X| |B|$. Eigenvectors of
$A$ and $B$ would not guarantee that. All dtypes are computed in complex double precision. The tangent solves the same equation
with another right-hand side. The cotangent solves the equation with $A^H$ and $B^H$, whose Schur forms are those of $A$ and
$B$, transposed and in reversed order:

    $A X + X B = C$:       $dX$ for $dC - dA X - X dB$,     $gC = Z$ for $gX$,   $gA = -Z X^H$,       $gB = -X^H Z$,
    $A X B - X + C = 0$:   $dX$ for $dC + dA X B + A X dB$, $gC = Z$ for $gX$,   $gA = Z (X B)^H$,    $gB = (A X)^H Z$.

The operators take the Schur forms as constants. So derivatives of every order are exact, and all of them use the same
decompositions of $A$ and $B$.

Note:
    Where not differentiable: nowhere; if the solution is not unique, an error is raised.

References:
    Bartels and Stewart, Comm. ACM 15 (1972) 820; Kitagawa, Int. J. Control 25 (1977) 745; Higham, Accuracy and Stability
    of Numerical Algorithms (SIAM 2002), chapter 16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked
from ..derivatives.linalg.smooth import smooth
from .arguments import broadcasts, matrix, same_kind, with_batch_dims
from .schur_form import schur_form

__all__ = ["solve_discrete_lyapunov", "solve_lyapunov", "solve_sylvester"]

_EPS = torch.finfo(torch.float64).eps


# -- triangular equations -------------------------------------------------------------------------------------------


def _adjoint(T: Tensor) -> Tensor:
    """$T^H$ in reversed order: upper triangular again."""
    return T.mH.flip(-2, -1)


def _refuse(vanishing: Tensor, T: Tensor, S: Tensor, equation: str, relation: str) -> None:
    """Raise if a pair of eigenvalues makes the equation singular.

    Args:
        vanishing: (*, m, n): whether each pair does.
        T: (*, m, m), with the eigenvalues of $A$ on its diagonal.
        S: (*, n, n), with the eigenvalues of $B$ on its diagonal.
        equation: the equation, for the error message.
        relation: how the two eigenvalues are related, for the error message.
    """
    if vanishing.any():
        place = tuple(vanishing.nonzero()[0].tolist())
        t = T.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).expand(vanishing.shape)[place].item()
        s = S.diagonal(dim1=-2, dim2=-1).unsqueeze(-2).expand(vanishing.shape)[place].item()
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            f"A, B: {equation} has no unique solution: the eigenvalues {t:.6g} of A and {s:.6g} of B {relation}"
        )


def _pairs(T: Tensor, S: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The eigenvalues of $A$ as a column and of $B$ as a row, and the largest entries of $T$ and $S$."""
    t, s = T.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), S.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    return t, s, T.abs().amax((-2, -1), keepdim=True), S.abs().amax((-2, -1), keepdim=True)


def _triangular_sylvester(T: Tensor, S: Tensor, F: Tensor) -> Tensor:
    """$Y$ with $T Y + Y S = F$, for upper triangular $T$ and $S$."""
    t, s, size_t, size_s = _pairs(T, S)
    rounding = max(F.shape[-2:]) * _EPS * (size_t + size_s)
    _refuse((t + s).abs() <= rounding, T, S, "A X + X B = C", "add up to 0")
    Y = torch.zeros_like(F)
    identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    for j in range(F.shape[-1]):
        rest = F[..., j : j + 1] - Y[..., :j] @ S[..., :j, j : j + 1]
        Y[..., j : j + 1] = torch.linalg.solve_triangular(T + S[..., j : j + 1, j : j + 1] * identity, rest, upper=True)
    return Y


def _triangular_stein(T: Tensor, S: Tensor, F: Tensor) -> Tensor:
    """$Y$ with $T Y S - Y + F = 0$, for upper triangular $T$ and $S$."""
    t, s, size_t, size_s = _pairs(T, S)
    rounding = max(F.shape[-2:]) * _EPS * (1 + size_t * size_s)
    _refuse((t * s - 1).abs() <= rounding, T, S, "A X B - X + C = 0", "have the product 1")
    Y = torch.zeros_like(F)
    identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    for j in range(F.shape[-1]):
        rest = F[..., j : j + 1] + T @ (Y[..., :j] @ S[..., :j, j : j + 1])
        Y[..., j : j + 1] = torch.linalg.solve_triangular(identity - S[..., j : j + 1, j : j + 1] * T, rest, upper=True)
    return Y


def _solution(
    solve: Any, A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool
) -> Tensor:
    """The solution of an equation with $A$ and $B$, or $A^H$ and $B^H$; ``solve`` solves its triangular form."""
    if not C.numel() or not A.numel() or not B.numel():
        return _fake(A, B, C, T, Q, S, P, adjoint).zero_()
    if adjoint:
        T, Q, S, P = _adjoint(T), Q.flip(-1), _adjoint(S), P.flip(-1)
    F = Q.mH @ C.to(Q.dtype) @ P
    batch = torch.broadcast_shapes(F.shape[:-2], T.shape[:-2], S.shape[:-2])
    X = Q @ solve(T, S, F.expand(*batch, *F.shape[-2:])) @ P.mH
    return (X if C.is_complex() else X.real).to(C.dtype).contiguous()


def _fake(A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool) -> Tensor:
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], C.shape[:-2])
    return C.new_empty(*batch, *C.shape[-2:])


# -- A X + X B = C ---------------------------------------------------------------------------------------------------


def _sum(*terms: Tensor | None) -> Tensor | None:
    found = None
    for term in terms:
        if term is not None:
            found = term if found is None else found + term
    return found


def _op(X: Tensor, adjoint: bool) -> Tensor:
    return X.mH if adjoint else X


def _sylvester_vjp(needed: Any, inputs: Any, X: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, B, _, *factors, adjoint = inputs
    Z = sylvester_solution(A, B, grad, *factors, not adjoint)
    found = {"C": Z}
    if needed["A"]:
        found["A"] = -_op(Z @ X.mH, adjoint)
    if needed["B"]:
        found["B"] = -_op(X.mH @ Z, adjoint)
    return found


def _sylvester_jvp(inputs: Any, X: Tensor, tangents: Any) -> Tensor | None:
    A, B, _, *factors, adjoint = inputs
    C = _sum(
        tangents.C,
        None if tangents.A is None else -_op(tangents.A, adjoint) @ X,
        None if tangents.B is None else -X @ _op(tangents.B, adjoint),
    )
    return None if C is None else sylvester_solution(A, B, C, *factors, adjoint)


@smooth(vjp=_sylvester_vjp, jvp=_sylvester_jvp, fake=_fake)
def sylvester_solution(
    A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool
) -> Tensor:
    """$X$ with $A X + X B = C$; with ``adjoint``, $A^H X + X B^H = C$. Differentiable in any order and mode.

    Args:
        A: (*, m, m). Its value is not read: $T$ and $Q$ determine it.
        B: (*, n, n). Its value is not read: $S$ and $P$ determine it.
        C: (*, m, n).
        T: the triangular factor of the Schur form of $A$, (*, m, m), complex128; a constant to every derivative.
        Q: its Schur vectors, (*, m, m); constant.
        S: the triangular factor of the Schur form of $B$, (*, n, n), complex128; constant.
        P: its Schur vectors, (*, n, n); constant.
        adjoint: whether to solve with $A^H$ and $B^H$.

    Returns:
        (*, m, n), in the dtype of $C$.

    Raises:
        torch.linalg.LinAlgError: an eigenvalue of $A$ and one of $B$ add up to 0, up to rounding.

    References:
        Bartels and Stewart, Comm. ACM 15 (1972) 820.
    """
    return _solution(_triangular_sylvester, A, B, C, T, Q, S, P, adjoint)


# -- A X B - X + C = 0 -----------------------------------------------------------------------------------------------


def _stein_vjp(needed: Any, inputs: Any, X: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, B, _, *factors, adjoint = inputs
    Z = stein_solution(A, B, grad, *factors, not adjoint)
    found = {"C": Z}
    if needed["A"]:
        found["A"] = _op(Z @ (X @ _op(B, adjoint)).mH, adjoint)
    if needed["B"]:
        found["B"] = _op((_op(A, adjoint) @ X).mH @ Z, adjoint)
    return found


def _stein_jvp(inputs: Any, X: Tensor, tangents: Any) -> Tensor | None:
    A, B, _, *factors, adjoint = inputs
    C = _sum(
        tangents.C,
        None if tangents.A is None else _op(tangents.A, adjoint) @ X @ _op(B, adjoint),
        None if tangents.B is None else _op(A, adjoint) @ X @ _op(tangents.B, adjoint),
    )
    return None if C is None else stein_solution(A, B, C, *factors, adjoint)


@smooth(vjp=_stein_vjp, jvp=_stein_jvp, fake=_fake)
def stein_solution(
    A: Tensor, B: Tensor, C: Tensor, T: Tensor, Q: Tensor, S: Tensor, P: Tensor, adjoint: bool
) -> Tensor:
    """$X$ with $A X B - X + C = 0$; with ``adjoint``, $A^H X B^H - X + C = 0$. Differentiable in any order and mode.

    Args:
        A: (*, m, m). Only derivatives read its value; the solution reads $T$ and $Q$.
        B: (*, n, n), likewise.
        C: (*, m, n).
        T: the triangular factor of the Schur form of $A$, (*, m, m), complex128; a constant to every derivative.
        Q: its Schur vectors, (*, m, m); constant.
        S: the triangular factor of the Schur form of $B$, (*, n, n), complex128; constant.
        P: its Schur vectors, (*, n, n); constant.
        adjoint: whether to solve with $A^H$ and $B^H$.

    Returns:
        (*, m, n), in the dtype of $C$.

    Raises:
        torch.linalg.LinAlgError: an eigenvalue of $A$ and one of $B$ have the product 1, up to rounding.

    References:
        Kitagawa, Int. J. Control 25 (1977) 745.
    """
    return _solution(_triangular_stein, A, B, C, T, Q, S, P, adjoint)


# -- public functions ------------------------------------------------------------------------------------------------


@checked
def solve_sylvester(A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The solution $X$ of $A X + X B = C$, with exact derivatives of every order in $A$, $B$ and $C$.

    Args:
        A: (*, m, m), real or complex; batch dims broadcast.
        B: (*, n, n), in the dtype of $A$.
        C: (*, m, n), in the dtype of $A$. Its unit is that of $A X$.

    Returns:
        $X$, (*, m, n), in the dtype of $A$. It is computed in double precision.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: neither floating point nor complex, or different dtypes.
        RuntimeError: inf or nan in $A$ or $B$.
        torch.linalg.LinAlgError: (a RuntimeError) the solution is not unique: up to rounding, an eigenvalue of $A$ is
            minus one of $B$.

    Note:
        Where not differentiable: nowhere.

    References:
        Bartels and Stewart, Comm. ACM 15 (1972) 820; `scipy.linalg.solve_sylvester`.
    """
    A, B = matrix(A, "A", square=True), same_kind(matrix(B, "B", square=True), "B", A, "A")
    C = same_kind(matrix(C, "C"), "C", A, "A")
    if C.shape[-2:] != (A.shape[-1], B.shape[-1]):
        expected = [A.shape[-1], B.shape[-1]]
        raise ArgumentError(f"C: expected matrices of shape {expected}, to fit A and B, got shape {list(C.shape)}")
    broadcasts(B, "B", A, "A")
    broadcasts(C, "C", A, "A")
    broadcasts(C, "C", B, "B")
    A, B, C = with_batch_dims(A, B, C)
    return sylvester_solution(A, B, C, *schur_form(A.detach()), *schur_form(B.detach()), False)


def _with_its_adjoint(A: Tensor, Q: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """``[A, A^H, Q]`` with the same number of dims, and the Schur forms of the first two."""
    A = matrix(A, "A", square=True)
    Q = same_kind(matrix(Q, "Q", square=True), "Q", A, "A")
    if Q.shape[-1] != A.shape[-1]:
        raise ArgumentError(f"Q: expected the size of A, {list(A.shape[-2:])}, got {list(Q.shape[-2:])}")
    broadcasts(Q, "Q", A, "A")
    A, Q = with_batch_dims(A, Q)
    T, V = schur_form(A.detach())
    return [A, A.mH, Q], [T, V, _adjoint(T), V.flip(-1)]


@checked
def solve_lyapunov(A: Tensor, Q: Tensor) -> Tensor:
    """The solution $X$ of the continuous Lyapunov equation $A X + X A^H = Q$, with exact derivatives of every order.

    With $-Q$ positive definite and all eigenvalues of $A$ left of the imaginary axis, $X$ is positive definite: the
    covariance of the process $dx = A x dt + (-Q)^(1/2) dw$.

    Args:
        A: (*, n, n), real or complex; batch dims broadcast.
        Q: (*, n, n), in the dtype of $A$; not necessarily Hermitian.

    Returns:
        $X$, (*, n, n), in the dtype of $A$; Hermitian to rounding if $Q$ is Hermitian.

    Raises:
        ValueError, TypeError, RuntimeError: as `solve_sylvester`.
        torch.linalg.LinAlgError: the solution is not unique: up to rounding, $l_i + conj(l_j) = 0$ for two eigenvalues of
            $A$, or one is on the imaginary axis. The message calls $A^H$ "B".

    Note:
        Where not differentiable: nowhere.

    References:
        Bartels and Stewart, Comm. ACM 15 (1972) 820; `scipy.linalg.solve_continuous_lyapunov`.
    """
    given, factors = _with_its_adjoint(A, Q)
    return sylvester_solution(*given, *factors, False)


@checked
def solve_discrete_lyapunov(A: Tensor, Q: Tensor) -> Tensor:
    """The solution $X$ of the discrete Lyapunov equation $A X A^H - X + Q = 0$, with exact derivatives of every order.

    With $Q$ positive definite and all eigenvalues of $A$ inside the unit circle, $X$ is the covariance of the process
    $x_(k+1) = A x_k + Q^(1/2) w_k$.

    Args:
        A: (*, n, n), real or complex; batch dims broadcast.
        Q: (*, n, n), in the dtype of $A$; not necessarily Hermitian.

    Returns:
        $X$, (*, n, n), in the dtype of $A$; Hermitian to rounding if $Q$ is Hermitian.

    Raises:
        ValueError, TypeError, RuntimeError: as `solve_sylvester`.
        torch.linalg.LinAlgError: the solution is not unique: up to rounding, $l_i conj(l_j) = 1$ for two eigenvalues of
            $A$, or one is on the unit circle. The message calls $A^H$ "B".

    Note:
        Where not differentiable: nowhere.

    References:
        Kitagawa, Int. J. Control 25 (1977) 745; `scipy.linalg.solve_discrete_lyapunov`.
    """
    given, factors = _with_its_adjoint(A, Q)
    return stein_solution(*given, *factors, False)
