"""Functions of a matrix: sqrtm, rsqrtm, logm, expm, powm, funm_hermitian.

The mathematics is in `hermitian`, and in `general` for all other matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked
from ..core.internals import are_finite, values_readable
from ..derivatives.linalg.smooth import hermitian
from . import tables
from .arguments import matrix
from .general import exponential, logarithm_or_power
from .hermitian import Tables, function_of_hermitian
from .tables import Function

__all__ = ["expm", "funm_hermitian", "logm", "powm", "rsqrtm", "sqrtm"]

Assume = Literal["general", "hermitian"]


def _function(A: Tensor, assume: str, table: Tables, general: Callable[[Tensor], Tensor]) -> Tensor:
    A = matrix(A, "A", square=True)
    return general(A) if assume == "general" else function_of_hermitian(A, table)


@checked
def funm_hermitian(A: Tensor, f: Function, derivatives: Sequence[Function] = ()) -> Tensor:
    """The function $f$ of a Hermitian matrix, $V f(diag l) V^H$; exact derivatives also where eigenvalues repeat.

    First and second derivatives have a relative error of about $1e-11$ at worst, for any separation of the eigenvalues. A
    derivative of order $k >= 2$ takes time and memory of order $n^(k+1)$.

    Args:
        A: (*, n, n), real or complex; $(A + A^H) / 2$ is used, so gradients are Hermitian.
        f: acts entry by entry, on the eigenvalues as a real float64 tensor (*, n); smooth there.
        derivatives: $f'$, $f''$, ..., functions of the same kind. Missing ones, up to the fifth, are computed from the last
            one given by ``torch.func.grad``. Each one given beyond the fifth makes derivatives of a higher order available,
            and divided differences of close eigenvalues more accurate.

    Returns:
        (*, n, n), Hermitian, in the dtype of $A$.

    Raises:
        TypeError: $A$ is neither floating point nor complex; $f$ or one of ``derivatives`` is not a function.
        ValueError: $A$ is not square; $f$ or one of ``derivatives`` returns another shape.
        NotImplementedError: a derivative is computed of an order for which the derivatives of $f$ are not known.

    Note:
        Where not differentiable: where $f$ is not.

    References:
        Daleckii and Krein, AMS Translations 47 (1965) 1; Higham, Functions of Matrices, theorem 3.11 and corollary
        3.12.
    """
    return function_of_hermitian(matrix(A, "A", square=True), lambda x: tables.of_function(f, derivatives, x))


@checked
def sqrtm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The principal square root: the matrix whose square is $A$ and whose eigenvalues have no negative real part.

    Args:
        A: (*, n, n), real or complex.
        assume: "general": $A$ is any matrix. The derivatives are exact in every mode and of every order, also where $A$
            is not diagonalizable. One of order $k$ takes as long as the root of a triangular matrix of order $2^k n$.
            "hermitian": $A$ is Hermitian and, for this function, positive semidefinite. $(A + A^H) / 2$ is used, and
            gradients are Hermitian. This is faster, and exact also where eigenvalues repeat.

    Returns:
        (*, n, n), in the dtype of $A$. A singular $A$ has a root if the eigenvalue 0 has no Jordan block; otherwise the
        result is nan or inf. A real $A$ with a negative eigenvalue has no real principal root, and gives nan: convert it
        to a complex dtype. With "hermitian", any negative eigenvalue gives nan.

    Raises:
        TypeError: $A$ is neither floating point nor complex.
        ValueError: $A$ is not square, or ``assume`` is unknown.
        RuntimeError: a general $A$ holds inf or nan.
        torch.linalg.LinAlgError: (a RuntimeError) no convergence.

    Note:
        Where not differentiable: at singular $A$, where the derivative is inf or nan in the null space. The principal
        branch jumps where an eigenvalue crosses the negative real axis; on the axis, the branch follows the sign of the
        imaginary part, which is 0 up to rounding.

    References:
        Bjorck and Hammarling, Linear Algebra Appl. 52/53 (1983) 127; Higham, Functions of Matrices, chapter 6 and
        theorem 3.6 (general), corollary 3.12 (Hermitian).
    """
    return _function(A, assume, tables.sqrt, lambda A: logarithm_or_power(A, 0.5))


@checked
def rsqrtm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The inverse of the principal square root, with exact derivatives. For a covariance, this is ZCA whitening.

    Args:
        A: (*, n, n), real or complex.
        assume: as in `sqrtm`; "hermitian" for a covariance.

    Returns:
        (*, n, n), in the dtype of $A$; inf or nan where $A$ is singular; nan where `sqrtm` is.

    Raises:
        TypeError, ValueError, RuntimeError: as `sqrtm`.

    Note:
        Where not differentiable: as `sqrtm`.

    References:
        See `sqrtm`.
    """
    return _function(A, assume, tables.rsqrt, lambda A: logarithm_or_power(A, -0.5))


@checked
def logm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The principal logarithm: the matrix whose exponential is $A$ and whose eigenvalues have $|Im| <= pi$.

    Args:
        A: (*, n, n), real or complex.
        assume: as in `sqrtm`.

    Returns:
        (*, n, n), in the dtype of $A$; nan (or $-inf$, if assumed Hermitian) where $A$ is singular; nan where `sqrtm`
        is.

    Raises:
        TypeError, ValueError, RuntimeError: as `sqrtm`.

    Note:
        Where not differentiable: as `sqrtm`.

    References:
        Al-Mohy and Higham, SIAM J. Sci. Comput. 34 (2012) C153; Higham, Functions of Matrices, chapter 11.
    """
    return _function(A, assume, tables.log, lambda A: logarithm_or_power(A, None))


@checked
def expm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The exponential, like `torch.linalg.matrix_exp`, with exact derivatives in every mode and order.

    Args:
        A: (*, n, n), real or complex.
        assume: "general", or "hermitian": $(A + A^H) / 2$ is used, and gradients are Hermitian.

    Returns:
        (*, n, n), in the dtype of $A$.

    Raises:
        TypeError: $A$ is neither floating point nor complex.
        ValueError: $A$ is not square, or ``assume`` is unknown.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen linalg_matrix_exp; Mathias, SIAM J. Matrix Anal. Appl. 17 (1996) 610.
    """
    return _function(A, assume, tables.exp, exponential)


def _integer_power(A: Tensor, p: int) -> Tensor:
    """$A^p$, with infinity or 0 for entries out of range. `torch.linalg.matrix_power` has nan there: $inf - inf$, $0 inf$."""
    found = torch.linalg.matrix_power(A, p)
    if abs(p) < 3 or not A.numel() or torch.compiler.is_compiling() or not values_readable([A]):
        return found
    if are_finite([found]) or not are_finite([A]):
        return found
    base = torch.linalg.inv(A) if p < 0 else A
    # entries of each factor are at most 1; its power of 2 is kept separately
    base, at = _scaled(base, base.new_zeros(base.shape[:-2], dtype=torch.float64).real)
    power, exponent, rest = None, torch.zeros_like(at), abs(p)
    while rest:
        if rest & 1:
            power, exponent = (base, at) if power is None else _scaled(power @ base, exponent + at)
        base, at = _scaled(base @ base, 2 * at)
        rest >>= 1
    assert power is not None
    most = int(math.log2(torch.finfo(A.dtype).max)) // 2
    exponent = exponent.clamp(-6 * most, 6 * most)  # beyond, all other than 0 over- or underflow
    for _ in range(6):  # the factors are finite, so that 0 stays 0
        step = exponent.clamp(-most, most)
        factor = torch.exp2(step).to(power.real.dtype)[..., None, None]
        power = torch.complex(power.real * factor, power.imag * factor) if power.is_complex() else power * factor
        exponent = exponent - step
    return power


def _scaled(A: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """$A 2^-k$ and $exponent + k$, so that the largest entry is between $1/2$ and 1."""
    largest = A.detach().abs().amax((-2, -1))
    k = torch.frexp(torch.where(largest == 0, 1, largest).double())[1].double()
    return A * torch.exp2(-k).to(A.real.dtype)[..., None, None], exponent + k


@checked
def powm(A: Tensor, p: float, *, assume: Assume = "general") -> Tensor:
    """A real power of a matrix, the principal one, $exp(p log A)$, with exact derivatives.

    Args:
        A: (*, n, n), real or complex.
        p: the exponent. For an integer this is `torch.linalg.matrix_power`, and $A$ may have any eigenvalues.
        assume: as in `sqrtm`.

    Returns:
        (*, n, n), in the dtype of $A$. If $p$ is not an integer: nan (or inf, if assumed Hermitian) where $A$ is
        singular, except for $p = 0.5$, which is `sqrtm`; nan where `sqrtm` is.

    Raises:
        TypeError, RuntimeError: as `sqrtm`.
        ValueError: as `sqrtm`, or $p$ is not a finite number.
        torch.linalg.LinAlgError: a negative integer $p$ and a singular $A$.

    Note:
        Where not differentiable: as `sqrtm`, if $p$ is not an integer.

    References:
        Higham and Lin, SIAM J. Matrix Anal. Appl. 32 (2011) 1056; Higham, Functions of Matrices, section 7.
    """
    if isinstance(p, bool) or not math.isfinite(p):
        raise ArgumentError(f"p: expected a finite number, got {p!r}")
    if float(p).is_integer():
        if abs(p) >= 2**63:
            raise ArgumentError(f"p: expected a number below 2**63 in magnitude, got {p!r}")
        A = matrix(A, "A", square=True)
        return _integer_power(hermitian(A) if assume == "hermitian" else A, int(p))
    table = {0.5: tables.sqrt, -0.5: tables.rsqrt}.get(p, lambda x: tables.power(p, x))
    return _function(A, assume, table, lambda A: logarithm_or_power(A, p))
