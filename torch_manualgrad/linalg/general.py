"""Functions of a matrix that need not be Hermitian or diagonalizable: the logarithm, powers, the exponential.

$A = Q T Q^H$ with $Q$ unitary and $T$ upper triangular (Schur), and $F(A) = Q F(T) Q^H$. For the square root, $X X = T$
is solved diagonal by diagonal (Bjorck and Hammarling). For the others, square roots are taken until $T^(1/2^s) = I + X$
with $|X| <= 1/4$; $log(I + X)$ is a Pade approximant, and a power is its exponential, squared $s$ times. These steps
would lose digits on the diagonal. So after each step, the diagonal is replaced by its closed form.

The derivative in the direction $E$ is a block of the same function of a block matrix (Mathias; Higham, theorem 3.6), and so on
for higher orders:

    $F [[A, E], [0, A]] = [[F(A), L(A, E)], [0, F(A)]]$,
    $F [[A, E_1, E_2, 0], [0, A, 0, E_2], [0, 0, A, E_1], [0, 0, 0, A]]$   has   $L(A, E_1, E_2)$   in its upper right corner.

With $E$ in the basis $Q$, these matrices are triangular again. $T$ alone determines the number of roots, so the result is
linear in each direction, and exact to rounding in any order. One operator computes all of these, for the directions stacked
in $E$: its derivative in $A$ is the same operator with one more direction. Because $tr(G L(A, E_1, ..., E_k))$ is symmetric in
$G$ and all $E_i$, the vjp is the same operator too: the cotangent $G$ enters as a direction $G^H$, and the adjoint of the
result is returned.

Note:
    Where not differentiable: on the negative real axis, the cut of the principal branch, and at 0.

References:
    Higham, Functions of Matrices (SIAM 2008), chapters 3, 6 and 11; Bjorck and Hammarling, Linear Algebra Appl. 52/53
    (1983) 127; Mathias, SIAM J. Matrix Anal. Appl. 17 (1996) 610; Al-Mohy and Higham, SIAM J. Sci. Comput. 34 (2012)
    C153; Higham and Lin, SIAM J. Matrix Anal. Appl. 32 (2011) 1056; Higham and Relton, SIAM J. Matrix Anal. Appl. 35
    (2014) 1019.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..derivatives.linalg.matrix_exp import linalg_matrix_exp_differential
from ..derivatives.linalg.smooth import replaced, smooth, with_direction
from .schur_form import complex_schur, fake_schur, no_derivative

__all__ = ["exponential", "logarithm_or_power"]

_EPS = torch.finfo(torch.float64).eps
_NEAR = 0.25  # up to this |X|, the Pade approximant of log(I + X) and its first derivatives are exact to rounding
_NODES = 10  # quadrature nodes of that approximant
_OVERFLOW = 600.0  # from this exponent on, exp or a function of it may overflow
_TAYLOR = 16  # terms of exp for arguments up to 1/2


# -- the Schur form -------------------------------------------------------------------------------------------------


@smooth(vjp=no_derivative, jvp=lambda *_: (None, None), fake=fake_schur)
def principal_schur(A: Tensor) -> tuple[Tensor, Tensor]:
    """$T$ and $Q$ with $A = Q T Q^H$, $T$ upper triangular and $Q$ unitary; for functions that are principal branches.

    Args:
        A: (*, n, n), real or complex.

    Returns:
        $T$ and $Q$, (*, n, n), complex128; constants to every derivative. For a real $A$ with a negative eigenvalue,
        which has no real root and no real logarithm, $T$ is nan. An eigenvalue that is negative only by rounding is 0.

    Raises:
        RuntimeError: inf or nan in $A$.
        torch.linalg.LinAlgError: no convergence.

    Note:
        Where not differentiable: the result is a constant; the function that uses it has the derivative.

    References:
        Golub and Van Loan, Matrix Computations, 7.1 and 7.5.
    """
    T, Q, values = complex_schur(A)
    if not A.is_complex() and A.numel():
        n, diagonal = A.shape[-1], T.diagonal(dim1=-2, dim2=-1)
        rounding = n * _EPS * torch.linalg.matrix_norm(A.double())[..., None]
        real_negative = ((values.imag == 0) & (values.real < -rounding)).any(-1)
        vanishing = (diagonal.real < 0) & (diagonal.abs() <= rounding)
        T = torch.where(torch.diag_embed(vanishing), 0, T)
        T = torch.where(real_negative[..., None, None], torch.nan, T)
    return T, Q


# -- functions of a triangular matrix -------------------------------------------------------------------------------


def _with_diagonal(T: Tensor, diagonal: Tensor) -> Tensor:
    return T.triu(1) + torch.diag_embed(diagonal)


def _root(T: Tensor, root: Tensor) -> Tensor:
    """The upper triangular $X$ with $X X = T$, given its diagonal."""
    n = T.shape[-1]
    by_row, by_column = torch.zeros_like(T), torch.zeros_like(T)  # X_(i, i+d) at [i, d], and at [i + d, d]
    by_row[..., 0] = by_column[..., 0] = root
    X = torch.diag_embed(root)
    for d in range(1, n):
        inner = (by_row[..., : n - d, 1:d] * by_column[..., d:, 1:d].flip(-1)).sum(-1)
        rest = T.diagonal(d, -2, -1) - inner
        entries = torch.where(rest == 0, 0, rest / (root[..., : n - d] + root[..., d:]))
        by_row[..., : n - d, d] = by_column[..., d:, d] = entries
        X.diagonal(d, -2, -1).copy_(entries)
    return X


@functools.cache
def _quadrature(device: torch.device) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on $[0, 1]$, (m, 1, 1): $log(I + X)$ is the integral of $X (I + x X)^-1$."""
    k = torch.arange(1, _NODES, dtype=torch.float64, device=device)
    x, V = torch.linalg.eigh(torch.diag(k / (4 * k * k - 1).sqrt(), -1))
    return ((x + 1) / 2)[:, None, None], V[0].square()[:, None, None]


def _log_of_root(T: Tensor, n: int) -> tuple[Tensor, Tensor, int]:
    """$log(T^(1/2^s))$, the logarithm of the diagonal of $T$, and $s$. The first $n$ rows and columns determine $s$."""
    logs = T.diagonal(dim1=-2, dim2=-1).log()
    defined = logs.isfinite().all(-1, keepdim=True)
    logs, T = torch.where(defined, logs, torch.nan), torch.where(defined[..., None], T, torch.nan)
    s = 0
    while True:
        X = _with_diagonal(T, torch.expm1(logs / 2**s))
        sizes = X[..., :n, :n].abs().sum(-2)
        if not (sizes[sizes.isfinite()] > _NEAR).any():
            break
        s += 1
        T = _root(T, (logs / 2**s).exp())
    nodes, weights = _quadrature(T.device)
    X = X.unsqueeze(-3)
    identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    terms = torch.linalg.solve_triangular(
        identity + nodes * X, X.expand(*X.shape[:-3], _NODES, *X.shape[-2:]), upper=True
    )
    return _with_diagonal((weights * terms).sum(-3), logs / 2**s), logs, s


def _log(T: Tensor, n: int) -> Tensor:
    Y, logs, s = _log_of_root(T, n)
    return _with_diagonal(Y * 2**s, logs)


def _power(T: Tensor, n: int, p: float) -> Tensor:
    if p in (0.5, -0.5):
        X = _root(T, T.diagonal(dim1=-2, dim2=-1).sqrt())
        identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
        return X if p > 0 else torch.linalg.solve_triangular(X, identity.expand_as(X), upper=True)
    Y, logs, s = _log_of_root(T, n)
    sizes = Y[..., :n, :n].abs().sum(-2)
    largest = max(sizes[sizes.isfinite()].tolist(), default=0.0) * abs(p) * 2.0**s
    squarings = max(0, math.frexp(2 * largest)[1])
    Y = Y * (p * 2.0 ** (s - squarings))
    identity = torch.eye(T.shape[-1], dtype=T.dtype, device=T.device)
    F = identity + Y / _TAYLOR
    for k in range(_TAYLOR - 1, 0, -1):
        F = identity + Y @ F / k
    for k in range(squarings, -1, -1):
        F = _with_diagonal(F @ F if k < squarings else F, (logs * (p / 2.0**k)).exp())
    return F


# -- powers that overflow ---------------------------------------------------------------------------------------------
#
# An infinite complex number times another one is nan. So T^p is computed as c^p (T / c)^p, with c the modulus of the eigenvalue
# that has the largest power. Entries of (T / c)^p whose product with c^p is infinite are handled separately, and so are the
# entries of the result that they contribute to.


def _log_size(T: Tensor, p: float) -> Tensor:
    """$log c$ if $c^p$ may overflow, else 0; (*, 1, 1)."""
    logs = T.diagonal(dim1=-2, dim2=-1).abs().log()
    log_size = logs.amax(-1) if p > 0 else logs.amin(-1)
    overflows = (log_size * p > _OVERFLOW) & log_size.isfinite()
    return torch.where(overflows, log_size, 0)[..., None, None]


def _overflowing(T: Tensor, F: Tensor, n: int, p: float, log_size: Tensor) -> tuple[Tensor, Tensor]:
    """$T^p$ with 0 for its infinite entries, and those entries times $c^-p$; $F$ is $T^p$ as `_power` computes it."""
    scaled = torch.view_as_real(_power(T * (-log_size).exp(), n, p))
    half = (log_size * (p / 2)).exp().unsqueeze(-1)
    whole = torch.where(scaled == 0, 0, scaled * half * half)  # c^p itself may overflow where the product does not
    infinite = whole.isinf()
    # an underflowed entry is zero if T has no path from its row to its column; otherwise it is taken from F
    path = (T != 0).double() + torch.eye(T.shape[-1], dtype=torch.float64, device=T.device)
    for _ in range(T.shape[-1].bit_length()):
        path = (path @ path).clamp(max=1)
    known = (scaled.abs().amax(-1) > torch.finfo(scaled.dtype).smallest_normal) | (path == 0)
    whole = torch.where(known.unsqueeze(-1), whole, torch.view_as_real(F))
    return (
        torch.view_as_complex(torch.where(infinite, 0, whole)),
        torch.view_as_complex(torch.where(infinite, scaled, 0)),
    )


def _rotated(F: Tensor, Q: Tensor) -> Tensor:
    return Q @ F @ Q.mH


def _with_overflow(found: Tensor, finite: Tensor, infinite: Tensor, Q: Tensor) -> Tensor:
    """``found``; where it is not finite, $Q F Q^H$ from the finite and the infinite entries of $F$."""
    signs = torch.view_as_real(_rotated(infinite, Q))
    mended = torch.view_as_real(_rotated(finite, Q)) + torch.where(signs == 0, 0, signs * math.inf)
    return torch.where(found.isfinite(), found, torch.view_as_complex(mended))


# -- the operators --------------------------------------------------------------------------------------------------


def _block(A: Tensor, E: Tensor) -> Tensor:
    """The block matrix of the module's docstring for the directions stacked in $E$, (*, $2^k n$, $2^k n$)."""
    block = A
    for direction in E.unbind(-3):
        copies = torch.eye(block.shape[-1] // A.shape[-1], dtype=A.dtype, device=A.device)
        above = torch.kron(copies, direction)
        block = block.expand(*above.shape[:-2], *block.shape[-2:])
        block = torch.cat((torch.cat((block, above), -1), torch.cat((torch.zeros_like(above), block), -1)), -2)
    return block


def _derivatives(call: Callable[[Any, Tensor], Tensor]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The vjp and the jvp of ``call(inputs, E)``, the derivative of one of the functions in the directions $E$."""

    def vjp(needed: dict[str, bool], inputs: Any, output: Tensor, grad: Tensor) -> dict[str, Tensor]:
        E, found = inputs.E, {}
        if needed["A"]:
            found["A"] = call(inputs, with_direction(E, grad.mH)).mH
        if needed["E"] and (slots := range(E.shape[-3])):
            found["E"] = torch.stack([call(inputs, replaced(E, s, grad.mH)).mH for s in slots], -3)
        return found

    def jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
        E, parts = inputs.E, []
        if tangents.A is not None:
            parts.append(call(inputs, with_direction(E, tangents.A)))
        if tangents.E is not None:
            parts += [call(inputs, replaced(E, s, tangents.E[..., s, :, :])) for s in range(E.shape[-3])]
        return sum(parts[1:], parts[0]) if parts else None

    return vjp, jvp


def _fake(A: Tensor, T: Tensor, Q: Tensor, E: Tensor, p: float | None) -> Tensor:
    return A.new_empty(*torch.broadcast_shapes(T.shape[:-2], E.shape[:-3]), *T.shape[-2:])


def _general(inputs: Any, E: Tensor) -> Tensor:
    return general_function(inputs.A, inputs.T, inputs.Q, E, inputs.p)


_vjp, _jvp = _derivatives(_general)


@smooth(vjp=_vjp, jvp=_jvp, fake=_fake)
def general_function(A: Tensor, T: Tensor, Q: Tensor, E: Tensor, p: float | None) -> Tensor:
    """The $k$-th derivative of $A^p$ or of $log A$ in the $k$ directions $E$ (for $k = 0$, the function); of any order.

    Args:
        A: (*, n, n), real or complex. Its value is not read: $T$ and $Q$ determine it.
        T: the triangular factor of its Schur form, as `principal_schur` returns it; a constant to every derivative.
        Q: its Schur vectors, as `principal_schur` returns them; a constant to every derivative.
        E: (*, k, n, n): the directions.
        p: the exponent, or None for the logarithm.

    Returns:
        (*, n, n), in the dtype of $A$; nan where $T$ is.

    Note:
        Where not differentiable: see the module's docstring.

    References:
        See the module's docstring.
    """
    n = T.shape[-1]
    if not n:
        return _fake(A, T, Q, E, p)
    block = _block(T, Q.mH.unsqueeze(-3) @ E.to(T.dtype) @ Q.unsqueeze(-3))
    F = _log(block, n) if p is None else _power(block, n, p)
    found = _rotated(F[..., :n, -n:], Q)
    if p is not None and (log_size := _log_size(T, p)).any():
        finite, infinite = _overflowing(block, F, n, p, log_size)
        found = _with_overflow(found, finite[..., :n, -n:], infinite[..., :n, -n:], Q)
    return (found if A.is_complex() else found.real).to(A.dtype).contiguous()


def _fake_exponential(A: Tensor, E: Tensor) -> Tensor:
    return A.new_empty(*torch.broadcast_shapes(A.shape[:-2], E.shape[:-3]), *A.shape[-2:])


def _exponential(inputs: Any, E: Tensor) -> Tensor:
    return exponential_function(inputs.A, E)


_exponential_vjp, _exponential_jvp = _derivatives(_exponential)


@smooth(vjp=_exponential_vjp, jvp=_exponential_jvp, fake=_fake_exponential)
def exponential_function(A: Tensor, E: Tensor) -> Tensor:
    """The $k$-th derivative of $exp(A)$ in the $k$ directions $E$ (for $k = 0$, $exp(A)$); of any order, in any mode.

    Args:
        A: (*, n, n), real or complex.
        E: (*, k, n, n): the directions. Each is divided by its norm first: for a large one, the exponential would scale down
            the block matrix until the digits of $A$ are lost.

    Returns:
        (*, n, n), in the dtype of $A$.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen linalg_matrix_exp and linalg_matrix_exp_differential; see also the module's docstring.
    """
    n, order = A.shape[-1], E.shape[-3]
    if not A.numel():
        return _fake_exponential(A, E)
    if order == 0:
        return torch.linalg.matrix_exp(A.contiguous()).contiguous()
    if order == 1:
        return linalg_matrix_exp_differential(*torch.broadcast_tensors(A, E[..., 0, :, :]), False)
    sizes = E.abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    sizes = torch.where((sizes > 0) & sizes.isfinite(), sizes, 1)
    return (torch.linalg.matrix_exp(_block(A, E / sizes))[..., :n, -n:] * sizes.prod(-3)).contiguous()


def _no_directions(A: Tensor) -> Tensor:
    return A.new_empty(*A.shape[:-2], 0, *A.shape[-2:])


def exponential(A: Tensor) -> Tensor:
    """$exp(A)$, with exact derivatives."""
    return exponential_function(A, _no_directions(A))


def logarithm_or_power(A: Tensor, p: float | None) -> Tensor:
    """$log A$ if $p$ is None, else $A^p$, with exact derivatives."""
    return general_function(A, *principal_schur(A.detach()), _no_directions(A), p)
