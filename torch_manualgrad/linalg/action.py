"""The exponential of a matrix times a few columns, $Y = exp(A) B$: expm_multiply.

$Y$ is computed without $exp(A)$, in $s$ steps $B -> exp(A / s) B$. Each step is a Taylor polynomial of degree $m$ in $A / s$,
after the mean of the eigenvalues is subtracted (Al-Mohy and Higham). $s$ and $m$ are chosen so that the polynomial and its
derivative are exact to rounding with the fewest products. The degree is bounded, so that no more than two or three digits
cancel in a step. If this takes longer than $exp(A)$ itself, as for a large norm or many columns, $exp(A)$ is computed instead.

The derivative with respect to $A$ is an integral of matrices of rank $k$, the number of columns,

    $W(A, B, G)$ = integral over $0 < x < 1$ of $exp((1 - x) A)^H G [exp(x A) B]^H$,

a sum of products of the vectors of both Taylor polynomials, which needs no $exp(A)$ either. About $2 s^(1/2)$ of the $s$ steps
are in memory at a time. Every further derivative is one of these two functions, applied to block matrices with
$M(E) = [[A, E], [0, A]]$:

    $exp(M(E)) [D; B]$ has the blocks $exp(A) D + L(A, E) B$ and $exp(A) B$,
    $dY$ is the first block for $E = dA$, $D = dB$;    $gB = exp(A^H) G$;    $gA = W(A, B, G)$,

and with $tr_2$ the sum of the two diagonal blocks, and $H$ the cotangent of $W$,

    $dW = tr_2 W(M(dA), [dB; B], [G; dG])$,            $gG = L(A, H) B$,
    $gA = tr_2 W(M(H), [0; B], [G; 0])$,               $gB = L(A^H, H^H) G$.

$E$ is divided by its norm, and $B$ is multiplied by it, because a large $E$ would need more steps.

Note:
    Where not differentiable: nowhere.

References:
    Al-Mohy and Higham, SIAM J. Sci. Comput. 33 (2011) 488; Mathias, SIAM J. Matrix Anal. Appl. 17 (1996) 610; Najfeld and
    Havel, Adv. Appl. Math. 16 (1995) 321.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, checked
from ..derivatives.linalg.matrix_exp import linalg_matrix_exp_differential
from ..derivatives.linalg.smooth import smooth
from .arguments import DtypeError, broadcasts, matrix, same_kind, with_batch_dims

__all__ = ["expm_multiply"]

# Degree -> the largest |X|_1 for which the Taylor polynomial of exp(X) and its derivative are exact to rounding. With
# log(e^-x T(x)) = sum c_k x^k, this is the x at which sum k |c_k| x^(k-1) is half a unit in the last place.
# tests/linalg/test_action.py recomputes these bounds.
_BOUNDS = {
    torch.float32: {4: 0.0342, 8: 0.445, 12: 1.19, 16: 2.10, 20: 3.09},
    torch.float64: {4: 0.000227, 8: 0.0379, 12: 0.242, 16: 0.656, 20: 1.24, 25: 2.14, 30: 3.18},
}


# -- steps of the exponential ----------------------------------------------------------------------------------------


def _steps(A: Tensor, columns: int) -> tuple[int, int] | None:
    """The number of steps and the degree; None if $exp(A)$ takes less time.

    Args:
        A: (*, n, n), minus the mean of its eigenvalues.
        columns: the number of columns of $B$.
    """
    norm = float(A.abs().sum(-2).max())
    if not math.isfinite(norm):
        return 1, 4  # the result is not finite either
    steps = {degree: max(1, math.ceil(norm / bound)) for degree, bound in _BOUNDS[A.real.dtype].items()}
    degree = min(steps, key=lambda degree: degree * steps[degree])
    products = degree * steps[degree]
    of_exponential = 6 + max(0, math.frexp(norm)[1])  # matrix products in exp(A)
    return None if products * columns > of_exponential * A.shape[-1] else (steps[degree], degree)


def _shifted(A: Tensor) -> tuple[Tensor, Tensor]:
    """$A - c I$ and $c$, (*, 1, 1), the mean of the eigenvalues of $A$."""
    mean = A.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return A - mean * torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), mean


def _terms(X: Tensor, B: Tensor, degree: int) -> list[Tensor]:
    """$X^p B / p!$ for $p = 0, ..., m$."""
    terms = [B]
    for p in range(1, degree + 1):
        terms.append(X @ terms[-1] / p)
    return terms


def _step(X: Tensor, B: Tensor, degree: int) -> Tensor:
    found = term = B
    for p in range(1, degree + 1):
        term = X @ term / p
        found = found + term
    return found


def _action(A: Tensor, B: Tensor) -> Tensor:
    shifted, mean = _shifted(A)
    plan = _steps(shifted, B.shape[-1])
    if plan is None:
        return torch.linalg.matrix_exp(A.contiguous()) @ B  # PyTorch's raises for a batch of permuted dims
    steps, degree = plan
    X, factor = shifted / steps, (mean / steps).exp()
    for _ in range(steps):
        B = _step(X, B, degree) * factor
    return B


def _weights(degree: int, A: Tensor) -> Tensor:
    """$p! q! / (p + q + 1)!$ for $p + q < m$, else 0: the integral of $(1 - x)^p x^q$. In the dtype of $A$."""
    f = math.factorial
    rows = [[f(p) * f(q) / f(p + q + 1) if p + q < degree else 0.0 for q in range(degree)] for p in range(degree)]
    return torch.tensor(rows, dtype=A.dtype, device=A.device)


def _of_step(X: Tensor, B: Tensor, G: Tensor, degree: int, weights: Tensor) -> tuple[Tensor, Tensor]:
    """$W$ of one step, and $exp(X)^H G$: the sum over $p + q < m$ of $(X^H)^p G (X^q B)^H / (p + q + 1)!$."""
    of_G, of_B = _terms(X.mH, G, degree), _terms(X, B, degree - 1)
    left, right = torch.stack(of_G[:-1], -2), weights @ torch.stack(of_B, -2)  # (*, n, m, k)
    return left.flatten(-2) @ right.flatten(-2).mH, sum(of_G[1:], of_G[0])


def _gradient(A: Tensor, B: Tensor, G: Tensor) -> Tensor:
    shifted, mean = _shifted(A)
    plan = _steps(shifted, B.shape[-1])
    if plan is None:
        return linalg_matrix_exp_differential(*torch.broadcast_tensors(A, G @ B.mH), True)
    steps, degree = plan
    X, factor = shifted / steps, (mean / steps).exp()
    weights = _weights(degree, A)
    batch = torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], G.shape[:-2])
    B, G = (x.expand(*batch, *x.shape[-2:]) for x in (B, G))
    length = math.isqrt(steps - 1) + 1
    starts = [B]  # the vectors before every `length` steps
    for k in range(steps - 1):
        B = _step(X, B, degree) * factor
        if (k + 1) % length == 0:
            starts.append(B)
    found = A.new_zeros(*batch, *A.shape[-2:])
    for segment in reversed(range(len(starts))):
        states = [starts[segment]]
        for _ in range(min(length, steps - segment * length) - 1):
            states.append(_step(X, states[-1], degree) * factor)
        for state in reversed(states):
            part, G = _of_step(X, state, G, degree, weights)
            found = found + part * (factor.conj() / steps)
            G = G * factor.conj()
    return found


# -- the operators ---------------------------------------------------------------------------------------------------


def _block(A: Tensor, E: Tensor) -> Tensor:
    """$M(E)$ of the module's docstring."""
    batch = torch.broadcast_shapes(A.shape[:-2], E.shape[:-2])
    A, E = A.expand(*batch, *A.shape[-2:]), E.expand(*batch, *E.shape[-2:])
    return torch.cat((torch.cat((A, E), -1), torch.cat((torch.zeros_like(A), A), -1)), -2)


def _over(upper: Tensor, lower: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(upper.shape[:-2], lower.shape[:-2])
    return torch.cat([x.expand(*batch, *x.shape[-2:]) for x in (upper, lower)], -2)


def _size(E: Tensor) -> Tensor:
    """A power of two near $|E|_1$, or near 1 if that is 0 or not finite; (*, 1, 1), a constant to every derivative."""
    if not E.numel():
        return E.new_ones(()).real
    norm = E.detach().abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    norm = torch.where((norm > 0) & norm.isfinite(), norm, 1)
    return torch.exp2(torch.frexp(norm).exponent.to(norm.dtype))


def _directional(A: Tensor, E: Tensor, D: Tensor | None, B: Tensor) -> Tensor:
    """$exp(A) D + L(A, E) B$."""
    size = _size(E)
    B = B * size
    return exponential_action(_block(A, E / size), _over(torch.zeros_like(B) if D is None else D, B))[
        ..., : A.shape[-1], :
    ]


def _diagonal_blocks(A: Tensor, E: Tensor, D: Tensor | None, B: Tensor, G: Tensor, F: Tensor | None) -> Tensor:
    """$tr_2 W(M(E), [D; B], [G; F])$."""
    n, size = A.shape[-1], _size(E)
    B = B * size
    upper = torch.zeros_like(B) if D is None else D
    lower = torch.zeros_like(G) if F is None else F / size
    found = exponential_action_backward(_block(A, E / size), _over(upper, B), _over(G, lower))
    return found[..., :n, :n] + found[..., n:, n:]


def _action_vjp(needed: Any, inputs: Any, Y: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, B = inputs
    found = {}
    if needed["A"]:
        found["A"] = exponential_action_backward(A, B, grad)
    if needed["B"]:
        found["B"] = exponential_action(A.mH, grad)
    return found


def _action_jvp(inputs: Any, Y: Tensor, tangents: Any) -> Tensor | None:
    A, B = inputs
    if tangents.A is not None:
        return _directional(A, tangents.A, tangents.B, B)
    return None if tangents.B is None else exponential_action(A, tangents.B)


def _fake_action(A: Tensor, B: Tensor) -> Tensor:
    return B.new_empty(*torch.broadcast_shapes(A.shape[:-2], B.shape[:-2]), *B.shape[-2:])


@smooth(vjp=_action_vjp, jvp=_action_jvp, fake=_fake_action)
def exponential_action(A: Tensor, B: Tensor) -> Tensor:
    """$exp(A) B$, differentiable in any order and mode.

    Args:
        A: (*, n, n), real or complex.
        B: (*, n, k), in the dtype of $A$.

    Returns:
        (*, n, k).

    References:
        Al-Mohy and Higham, SIAM J. Sci. Comput. 33 (2011) 488, algorithm 3.2 with 1-norms.
    """
    return _action(A, B).contiguous() if A.numel() and B.numel() else _fake_action(A, B).zero_()


def _backward_vjp(needed: Any, inputs: Any, W: Tensor, grad: Tensor) -> dict[str, Tensor]:
    A, B, G = inputs
    found = {}
    if needed["A"]:
        found["A"] = _diagonal_blocks(A, grad, None, B, G, None)
    if needed["B"]:
        found["B"] = _directional(A.mH, grad.mH, None, G)
    if needed["grad"]:
        found["grad"] = _directional(A, grad, None, B)
    return found


def _backward_jvp(inputs: Any, W: Tensor, tangents: Any) -> Tensor | None:
    A, B, G = inputs
    if tangents.A is not None:
        return _diagonal_blocks(A, tangents.A, tangents.B, B, G, tangents.grad)
    found = None if tangents.B is None else exponential_action_backward(A, tangents.B, G)
    if tangents.grad is not None:
        of_grad = exponential_action_backward(A, B, tangents.grad)
        found = of_grad if found is None else found + of_grad
    return found


def _fake_backward(A: Tensor, B: Tensor, grad: Tensor) -> Tensor:
    return A.new_empty(*torch.broadcast_shapes(A.shape[:-2], B.shape[:-2], grad.shape[:-2]), *A.shape[-2:])


@smooth(vjp=_backward_vjp, jvp=_backward_jvp, fake=_fake_backward)
def exponential_action_backward(A: Tensor, B: Tensor, grad: Tensor) -> Tensor:
    """Cotangent of $A$, given that of $exp(A) B$: $W(A, B, G)$. Differentiable in any order and mode.

    Args:
        A: (*, n, n), real or complex.
        B: (*, n, k), in the dtype of $A$.
        grad: $G$, (*, n, k), in the dtype of $A$.

    Returns:
        (*, n, n).

    References:
        Najfeld and Havel, Adv. Appl. Math. 16 (1995) 321; the sum over Taylor polynomials is new here.
    """
    if not A.numel() or not B.numel() or not grad.numel():
        return _fake_backward(A, B, grad).zero_()
    return _gradient(A, B, grad).contiguous()


# -- the public function ---------------------------------------------------------------------------------------------


@checked
def expm_multiply(A: Tensor, B: Tensor, t: float | Tensor = 1.0) -> Tensor:
    """The exponential of a matrix times columns, $exp(t A) B$, without forming $exp(t A)$; exact derivatives of every order.

    This is the solution of $dx/dt = A x$ at time $t$, with the columns of $B$ at time 0. For $k$ columns, values and first
    derivatives take time of order $n^2 k |t A|_1$, and no step of the forward is saved for the backward. If $exp(t A)$ takes
    less time, as for a large norm or many columns, it is computed instead. The choice synchronizes with a GPU.

    Args:
        A: (*, n, n), real or complex, dense; batch dims broadcast.
        B: (*, n, k), or a vector (n,), in the dtype of $A$.
        t: the time, in the inverse unit of $A$: a number, or a real tensor (*) with one time for each matrix.

    Returns:
        (*, n, k), or (*, n) for a vector, in the dtype of $A$; inf or nan where it overflows. The error is normwise: a few units of rounding times
        $1 + |t A|_1$, relative to $|exp(t A)| |B|$.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: neither floating point nor complex, or different dtypes; a complex $t$.

    Note:
        Where not differentiable: nowhere.

    References:
        Al-Mohy and Higham, SIAM J. Sci. Comput. 33 (2011) 488; `scipy.sparse.linalg.expm_multiply`.
    """
    if isinstance(B, Tensor) and B.dim() == 1:
        return expm_multiply(A, B[:, None], t)[..., 0]
    A = matrix(A, "A", square=True)
    B = same_kind(matrix(B, "B"), "B", A, "A")
    if B.shape[-2] != A.shape[-1]:
        raise ArgumentError(f"B: expected {A.shape[-1]} rows, as A is {list(A.shape)}, got shape {list(B.shape)}")
    broadcasts(B, "B", A, "A")
    if isinstance(t, Tensor):
        if t.is_complex():
            raise DtypeError(f"t: expected real numbers, got {t.dtype}")
        if t.device != A.device and t.dim():
            raise ArgumentError(f"t: expected a tensor on {A.device}, where A is, got one on {t.device}")
        t = t.to(A.real.dtype)[..., None, None]
        broadcasts(t, "t", A, "A")
        broadcasts(t, "t", B, "B")
    return exponential_action(*with_batch_dims(A * t, B))
