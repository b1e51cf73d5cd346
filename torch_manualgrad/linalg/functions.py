"""Functions of a matrix: sqrtm, rsqrtm, logm, expm, powm, funm_hermitian. This module is for Hermitian matrices.

`general` is for all others.

For A = V diag(l) V^H, F(A) = V diag(f(l)) V^H. With E~ = V^H E V, its derivatives are

    first:   V X V^H,   X_ij = f[l_i, l_j] E~_ij                                        (Daleckii and Krein)
    k-th:    V X V^H,   X_(i0 ik) = sum over the orders of E_1, ..., E_k and over i1, ..., i(k-1) of
                                    f[l_i0, ..., l_ik] E~_1(i0 i1) E~_2(i1 i2) ... E~_k(i(k-1) ik)

with divided differences f[a, b] = (f(a) - f(b)) / (a - b), f[a, a] = f'(a), and so on. Nothing here depends on the
choice of eigenvectors, and nothing is singular where eigenvalues repeat. One operator is all of these, for the
directions stacked in E: its derivative in A is the same operator with one more direction. As a form in its directions
and its cotangent it is symmetric, so its vjp is the same operator too.

A divided difference over k + 1 nodes is computed from two over k, or from the Taylor series of f at its middle node:
whichever has the smaller error estimate. Those over two nodes have closed forms for the named functions.

References:
    Daleckii and Krein, AMS Translations 47 (1965) 1; Higham, Functions of Matrices (SIAM 2008), theorem 3.11, corollary
    3.12 and section 10.6; Bhatia, Matrix Analysis (1997), section V.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.arguments import ArgumentError, checked
from .arguments import matrix
from .general import exponential, logarithm_or_power
from .smooth import hermitian, replaced, smooth, with_direction

__all__ = ["expm", "funm_hermitian", "logm", "powm", "rsqrtm", "sqrtm"]

Function = Callable[[Tensor], Tensor]

Assume = Literal["general", "hermitian"]

_TERMS = 8  # derivatives of a named function that are tabulated
_FEWEST = 5  # derivatives of any other function; those that are not given are computed by torch.func.grad
_CHUNK = 2**20  # the largest number of entries of a table of divided differences in memory


# -- divided differences --------------------------------------------------------------------------------------------


def divided_difference(at: Sequence[Tensor], L: Tensor, J: Tensor, D: Tensor | None = None) -> Tensor:
    """f[l_a, l_b, ...] for index tensors a <= b <= ... of one shape.

    Args:
        at: the indices of the nodes.
        L: the eigenvalues, ascending, (*, n).
        J: (*, K + 1, n): f, f', f'' / 2, ..., f^(K) / K! at L.
        D: (*, n, n): f[l_i, l_j], if known more accurately than from J; else None.

    Returns:
        The batch of L, and the shape of the indices.
    """
    order, last = len(at) - 1, J.shape[-2] - 1
    if order == 0:
        return J[..., 0, :][..., at[0]]
    if order == 1 and D is not None:
        return D[..., at[0], at[1]]
    left, right = divided_difference(at[:-1], L, J, D), divided_difference(at[1:], L, J, D)
    gap = L[..., at[-1]] - L[..., at[0]]
    apart = (right - left) / torch.where(gap == 0, 1, gap)

    # f[...] = sum over q of J_(k+q)(m) h_q(l - m), with h_q the complete homogeneous polynomial of degree q
    centre = order // 2
    middle = L[..., at[centre]]
    h = [torch.ones_like(gap), *[torch.zeros_like(gap)] * (last - order)]
    for i, node in enumerate(at):
        if i != centre:
            step = L[..., node] - middle
            for q in range(1, len(h)):
                h[q] = h[q] + step * h[q - 1]
    near = torch.zeros_like(gap)
    for q in reversed(range(len(h))):
        near = near + J[..., order + q, :][..., at[centre]] * h[q]

    # the last term of the series, its coefficient taken at the outer nodes since at the middle one it may vanish by
    # chance, is compared with the rounding error of the quotient, both times the gap
    ends = J[..., last, :].abs()
    cut = (ends[..., at[0]] + ends[..., at[-1]]) * gap ** (last - order) * math.comb(last, order)
    rounding = torch.finfo(L.dtype).eps * (left.abs() + right.abs())
    return torch.where(cut * gap <= rounding, near, apart)


def _contract(L: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor:
    """X of the module's docstring for k >= 2, from E~; in blocks of rows, as the table has n^(k+1) entries."""
    order, n = E.shape[-3], E.shape[-1]
    every = torch.arange(n, device=L.device)
    letters = "abcdefghijklmnopqrstuvw"[: order + 1]
    factors = [f"...{letters[i : i + 2]}" for i in range(order)]
    equation = f"...{letters},{','.join(factors)}->...{letters[0]}{letters[-1]}"
    blocks = []
    for rows in every.split(max(1, _CHUNK // max(1, L.numel() * n ** (order - 1)))):
        nodes = torch.stack(torch.meshgrid(rows, *[every] * order, indexing="ij")).sort(0).values
        table = divided_difference(nodes.unbind(), L, J, D).to(E.dtype)
        block = torch.zeros((), dtype=E.dtype, device=E.device)
        for first, *others in permutations(E.unbind(-3)):
            block = block + torch.einsum(equation, table, first[..., rows, :], *others)
        blocks.append(block)
    return torch.cat(blocks, -2) if blocks else E[..., 0, :, :]


# -- the operator ---------------------------------------------------------------------------------------------------


def _vjp(needed: dict[str, bool], inputs: Any, output: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, L, V, J, D, E = inputs
    found = {}
    if needed["A"]:
        found["A"] = hermitian_function(A, L, V, J, D, with_direction(E.mH, grad))
    if needed["E"] and (slots := range(E.shape[-3])):
        parts = [hermitian_function(A, L, V, J, D, replaced(E.mH, s, grad)) for s in slots]
        found["E"] = torch.stack(parts, -3)
    return found


def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    A, L, V, J, D, E = inputs
    found = None
    if tangents.A is not None:
        found = hermitian_function(A, L, V, J, D, with_direction(E, tangents.A))
    if tangents.E is not None:
        for s in range(E.shape[-3]):
            part = hermitian_function(A, L, V, J, D, replaced(E, s, tangents.E[..., s, :, :]))
            found = part if found is None else found + part
    return found


def _fake(A: Tensor, L: Tensor, V: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor:
    return V.new_empty(*torch.broadcast_shapes(V.shape[:-2], E.shape[:-3]), *V.shape[-2:])


@smooth(vjp=_vjp, jvp=_jvp, fake=_fake)
def hermitian_function(A: Tensor, L: Tensor, V: Tensor, J: Tensor, D: Tensor, E: Tensor) -> Tensor:
    """The k-th derivative of F(A) = V f(diag L) V^H in the k directions E, for k = 0 F(A) itself; any order and mode.

    Args:
        A: Hermitian, (*, n, n). Its value is not read: L and V determine it.
        L: its eigenvalues, ascending, (*, n); a constant to every derivative.
        V: its eigenvectors, (*, n, n); constant.
        J: (*, K + 1, n), float64: f^(q)(L) / q! for q = 0, ..., K; constant.
        D: (*, n, n), float64: f[l_i, l_j]; constant.
        E: (*, k, n, n): the directions, not necessarily Hermitian.

    Returns:
        (*, n, n).

    Raises:
        NotImplementedError: k > K: the derivative of f is missing.

    Note:
        Where not differentiable: where f is not.

    References:
        Higham, Functions of Matrices, corollary 3.12; Bhatia, Matrix Analysis, theorem V.3.3.
    """
    order, known = E.shape[-3], J.shape[-2] - 1
    if order > known:
        raise NotImplementedError(
            f"the derivative of order {order} of a function of a matrix needs that of order {order} of the function, "
            f"and {known} are known: pass more derivatives to funm_hermitian"
        )
    if order == 0:
        return (V * J[..., 0, :].to(L.dtype).unsqueeze(-2)) @ V.mH
    rotated = V.mH.unsqueeze(-3) @ E @ V.unsqueeze(-3)
    if order == 1:
        X = D.to(L.dtype) * rotated[..., 0, :, :]
    else:
        X = _contract(L.to(J.dtype), J, D, rotated)
    return V @ X @ V.mH


Tables = Callable[[Tensor], tuple[Tensor, Tensor]]


def _apply(A: Tensor, tables: Tables) -> Tensor:
    A = hermitian(A)
    L, V = torch.linalg.eigh(A.detach())
    J, D = tables(L.double())
    return hermitian_function(A, L, V, J, D, A.new_empty(*A.shape[:-2], 0, *A.shape[-2:]))


def _function(A: Tensor, assume: str, tables: Tables, general: Callable[[Tensor], Tensor]) -> Tensor:
    A = matrix(A, "A", square=True)
    return general(A) if assume == "general" else _apply(A, tables)


# -- tables of the named functions: (J, D) at the eigenvalues -------------------------------------------------------


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.unsqueeze(-1), x.unsqueeze(-2)


def _log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """log(a / b), to full relative accuracy also where a is close to b."""
    x = (a - b) / (a + b)
    return torch.where(x.abs() < 0.5, 2 * torch.atanh(x), torch.log(a / b))


def _powers(p: float, x: Tensor) -> Tensor:
    """J of x^p."""
    rows, binomial = [], 1.0
    for q in range(_TERMS + 1):
        rows.append(binomial * x.pow(p - q))
        binomial *= (p - q) / (q + 1)
    return torch.stack(rows, -2)


def _sqrt(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = _pairs(x.sqrt())
    return _powers(0.5, x), 1 / (a + b)


def _rsqrt(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = _pairs(x.sqrt())
    return _powers(-0.5, x), -1 / (a * b * (a + b))


def _log(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = [x.log(), *[(-1) ** (q + 1) / q * x.pow(-q) for q in range(1, _TERMS + 1)]]
    a, b = _pairs(x)
    equal = a == b
    return torch.stack(rows, -2), torch.where(equal, 1 / a, _log_ratio(a, b) / torch.where(equal, 1, a - b))


def _exp(x: Tensor) -> tuple[Tensor, Tensor]:
    value = x.exp()
    rows = [value / math.factorial(q) for q in range(_TERMS + 1)]
    a, b = _pairs(x)
    equal, h = a == b, (a - b) / 2
    safe = torch.where(equal, 1, h)
    close = torch.exp((a + b) / 2) * torch.where(equal, 1, safe.clamp(-1, 1).sinh() / safe)
    (fa, fb) = _pairs(value)
    return torch.stack(rows, -2), torch.where(h.abs() < 1, close, (fa - fb) / (2 * safe))


def _power(p: float, x: Tensor) -> tuple[Tensor, Tensor]:
    # with u = log(a / b): a^p - b^p = 2 (ab)^(p/2) sinh(pu/2), and a - b is the same with p = 1
    a, b = _pairs(x)
    u = _log_ratio(a, b) / 2
    equal = u == 0
    safe = torch.where(equal, 1, u)
    ratio = torch.where(equal, p, (p * safe).sinh() / safe.sinh())
    return _powers(p, x), (a.sqrt() * b.sqrt()).pow(p - 1) * ratio


def _derivative(f: Function) -> Function:
    return torch.func.grad(lambda x: f(x).sum())


def _general(f: Function, derivatives: Sequence[Function], x: Tensor) -> tuple[Tensor, Tensor]:
    functions = [f, *derivatives]
    while len(functions) <= _FEWEST:
        functions.append(_derivative(functions[-1]))
    rows = []
    for q, g in enumerate(functions):
        row = g(x)
        if not isinstance(row, Tensor) or row.shape != x.shape or row.is_complex():
            what = "f" if q == 0 else f"derivatives[{q - 1}]"
            given = list(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise ArgumentError(
                f"{what}: expected a real tensor of shape {list(x.shape)} for one of that shape, got {given}"
            )
        rows.append(row.to(x.dtype).detach() / math.factorial(q))
    J = torch.stack(rows, -2)
    every = torch.arange(x.shape[-1], device=x.device)
    nodes = torch.stack(torch.meshgrid(every, every, indexing="ij")).sort(0).values
    return J, divided_difference(nodes.unbind(), x, J)


# -- public functions -----------------------------------------------------------------------------------------------


@checked
def funm_hermitian(A: Tensor, f: Function, derivatives: Sequence[Function] = ()) -> Tensor:
    """The function f of a Hermitian matrix, V f(diag l) V^H; exact derivatives also where eigenvalues repeat.

    First and second derivatives have a relative error of some 1e-11 at worst, at any separation of the eigenvalues. A
    derivative of order k >= 2 takes time and memory of order n^(k+1).

    Args:
        A: (*, n, n), real or complex; (A + A^H) / 2 is used, so gradients are Hermitian.
        f: acts entry by entry, on the eigenvalues as a real float64 tensor (*, n); smooth there.
        derivatives: f', f'', ..., of the same kind. Up to the fifth, those that are not given are computed from the
            last given one by ``torch.func.grad``. Each one given beyond these makes derivatives of a higher order
            available and divided differences of close eigenvalues more accurate.

    Returns:
        (*, n, n), Hermitian, in the dtype of A.

    Raises:
        TypeError: A is neither floating point nor complex; f or one of ``derivatives`` is not a function.
        ValueError: A is not square; f or one of ``derivatives`` returns another shape.
        NotImplementedError: in a derivative of an order for which the derivatives of f are not known.

    Note:
        Where not differentiable: where f is not.

    References:
        Daleckii and Krein, AMS Translations 47 (1965) 1; Higham, Functions of Matrices, theorem 3.11 and corollary
        3.12.
    """
    return _apply(matrix(A, "A", square=True), lambda x: _general(f, derivatives, x))


@checked
def sqrtm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The principal square root: the matrix whose square is A and whose eigenvalues have no negative real part.

    Args:
        A: (*, n, n), real or complex.
        assume: "general": A is any matrix. The derivatives are exact in every mode and of every order, also where A is
            not diagonalizable; one of order k takes the time of the root of a triangular matrix of order 2^k n.
            "hermitian": A is Hermitian, positive semidefinite here. (A + A^H) / 2 is used, and gradients are Hermitian;
            faster, and exact also where eigenvalues repeat.

    Returns:
        (*, n, n), in the dtype of A. A singular A has a root if the eigenvalue 0 has no Jordan block, else it is nan or
        inf. A real A with a negative eigenvalue has no real principal root, and gives nan: convert it to a complex
        dtype. So does a Hermitian one with a negative eigenvalue.

    Raises:
        TypeError: A is neither floating point nor complex.
        ValueError: A is not square, or another ``assume``.
        RuntimeError: a general A holds inf or nan.
        torch.linalg.LinAlgError: (a RuntimeError) no convergence.

    Note:
        Where not differentiable: at singular A, where the derivative is inf or nan in the null space. The principal
        branch jumps where an eigenvalue crosses the negative real axis; on the axis, the branch follows the sign of the
        imaginary part, which is 0 up to rounding.

    References:
        Bjorck and Hammarling, Linear Algebra Appl. 52/53 (1983) 127; Higham, Functions of Matrices, chapter 6 and
        theorem 3.6 (general), corollary 3.12 (Hermitian).
    """
    return _function(A, assume, _sqrt, lambda A: logarithm_or_power(A, 0.5))


@checked
def rsqrtm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The inverse of the principal square root, with exact derivatives. Of a covariance, this is ZCA whitening.

    Args:
        A: (*, n, n), real or complex.
        assume: as in `sqrtm`; "hermitian" for a covariance.

    Returns:
        (*, n, n), in the dtype of A; inf or nan where A is singular; nan where `sqrtm` is.

    Raises:
        TypeError, ValueError, RuntimeError: as `sqrtm`.

    Note:
        Where not differentiable: as `sqrtm`.

    References:
        Those of `sqrtm`.
    """
    return _function(A, assume, _rsqrt, lambda A: logarithm_or_power(A, -0.5))


@checked
def logm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The principal logarithm: the matrix whose exponential is A and whose eigenvalues have |imag| <= pi.

    Args:
        A: (*, n, n), real or complex.
        assume: as in `sqrtm`.

    Returns:
        (*, n, n), in the dtype of A; nan (or -inf, if assumed Hermitian) where A is singular; nan where `sqrtm` is.

    Raises:
        TypeError, ValueError, RuntimeError: as `sqrtm`.

    Note:
        Where not differentiable: as `sqrtm`.

    References:
        Al-Mohy and Higham, SIAM J. Sci. Comput. 34 (2012) C153; Higham, Functions of Matrices, chapter 11.
    """
    return _function(A, assume, _log, lambda A: logarithm_or_power(A, None))


@checked
def expm(A: Tensor, *, assume: Assume = "general") -> Tensor:
    """The exponential, as `torch.linalg.matrix_exp`, with exact derivatives in every mode and order.

    Args:
        A: (*, n, n), real or complex.
        assume: "general", or "hermitian": (A + A^H) / 2 is used, and gradients are Hermitian.

    Returns:
        (*, n, n), in the dtype of A.

    Raises:
        TypeError: A is neither floating point nor complex.
        ValueError: A is not square, or another ``assume``.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen linalg_matrix_exp; Mathias, SIAM J. Matrix Anal. Appl. 17 (1996) 610.
    """
    return _function(A, assume, _exp, exponential)


@checked
def powm(A: Tensor, p: float, *, assume: Assume = "general") -> Tensor:
    """A real power: the principal one, exp(p log A), with exact derivatives.

    Args:
        A: (*, n, n), real or complex.
        p: the exponent. For an integer this is `torch.linalg.matrix_power`, and A may have any eigenvalues.
        assume: as in `sqrtm`.

    Returns:
        (*, n, n), in the dtype of A. If p is not an integer: nan (or inf, if assumed Hermitian) where A is singular,
        except for p = 0.5, which is `sqrtm`; nan where `sqrtm` is.

    Raises:
        TypeError, RuntimeError: as `sqrtm`.
        ValueError: as `sqrtm`, or p is not a finite number.
        torch.linalg.LinAlgError: a negative integer p and a singular A.

    Note:
        Where not differentiable: as `sqrtm`, if p is not an integer.

    References:
        Higham and Lin, SIAM J. Matrix Anal. Appl. 32 (2011) 1056; Higham, Functions of Matrices, section 7.
    """
    if isinstance(p, bool) or not math.isfinite(p):
        raise ArgumentError(f"p: expected a finite number, got {p!r}")
    if float(p).is_integer():
        A = matrix(A, "A", square=True)
        return torch.linalg.matrix_power(hermitian(A) if assume == "hermitian" else A, int(p))
    tables = {0.5: _sqrt, -0.5: _rsqrt}.get(p, lambda x: _power(p, x))
    return _function(A, assume, tables, lambda A: logarithm_or_power(A, p))
