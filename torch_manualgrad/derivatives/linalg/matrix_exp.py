"""The matrix exponential: linalg_matrix_exp.

exp is analytic, so its derivative in the direction $E$ is a block of an exponential (Mathias 1996, theorem 2.1),

    $exp [[A, E], [0, A]] = [[exp A, L(A, E)], [0, exp A]]$,        jvp: $L(A, E)$,        vjp: $L(A^H, G)$,

exact, and differentiable again to any order. It is linear in $E$, and $E$ is first divided by its own norm: with a
large $E$ the exponential would scale the block matrix down until the digits of $A$ are lost. On the CPU, the pair
$(exp A, L(A, E))$ is computed as a dual number instead, by scaling and squaring with a Taylor polynomial. Every product
$X Y$ with its derivative $dX Y + X dY$ is three products, while the block matrix takes eight.

Where not differentiable: nowhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.engine.strong_arithmetic import by_matrix
from torch_manualgrad.core.rule import formula, rule

from ..terms import total


def differential_analytic_matrix_function(
    self: Tensor, grad: Tensor, matrix_function: Callable[[Tensor], Tensor], adjoint: bool
) -> Tensor:
    """$L(A, grad)$, or $L(A^H, grad)$ if ``adjoint``, for any analytic function of matrices, by the block matrix."""
    A = self.mH if adjoint else self
    n = A.shape[-1]
    size = _size(grad)
    return matrix_function(_upper(A, grad / size))[..., :n, n:] * size


def _size(E: Tensor) -> Tensor:
    """A norm of $E$ as a constant, (*, 1, 1), or 1 where it is zero or not finite; of the shape of $E$ if that is empty."""
    size = E.detach().abs().sum(-2, keepdim=True).amax(-1, keepdim=True) if E.numel() else E.abs()
    return torch.where((size > 0) & size.isfinite(), size, 1)


def _upper(A: Tensor, E: Tensor) -> Tensor:
    """$[[A, E], [0, A]]$."""
    return torch.cat((torch.cat((A, E), -1), torch.cat((torch.zeros_like(A), A), -1)), -2)


# exp(X) is computed as its Taylor polynomial T of degree 16 for |X|_1 up to these bounds; a larger matrix is halved
# until it is within them. With log(e^-x T(x)) = sum c_k x^k, the bound is where sum k |c_k| x^(k-1) reaches the unit
# roundoff: up to there T and its derivative are those of exp at a matrix that differs from X by rounding (Al-Mohy and
# Higham, section 4).
_DEGREE = 16
_BOUNDS = {torch.float32: 2.1, torch.float64: 0.65}

Dual = tuple[Tensor, Tensor]


def _times(x: Dual, y: Dual) -> Dual:
    return x[0] @ y[0], torch.baddbmm(x[0] @ y[1], x[1], y[0])


@functools.cache
def _coefficients(dtype: torch.dtype, device: torch.device) -> Tensor:
    """In row $j$, the coefficients of $X^(4 j)$ times $I$, $X$, $X^2$, $X^3$ in the Taylor polynomial without its last term."""
    inverse = [1 / math.factorial(k) for k in range(_DEGREE)]
    return torch.tensor(inverse, dtype=dtype, device=device).reshape(4, 4)


def _taylor(X: Dual) -> Dual:
    """The polynomial and its derivative, in six products of dual numbers (Paterson and Stockmeyer)."""
    X2 = _times(X, X)
    X3 = _times(X, X2)
    X4 = _times(X2, X2)
    powers = torch.stack([torch.stack(x) for x in (X, X2, X3)])
    coefficients = _coefficients(powers.dtype, powers.device)
    terms = (coefficients[:, 1:] @ powers.flatten(1)).unflatten(1, powers.shape[1:])
    terms[:, 0].diagonal(dim1=-2, dim2=-1).add_(coefficients[:, :1, None])
    last = 1 / math.factorial(_DEGREE)
    result = terms[3, 0].add_(X4[0], alpha=last), terms[3, 1].add_(X4[1], alpha=last)
    for j in (2, 1, 0):
        value, tangent = _times(result, X4)
        result = value.add_(terms[j, 0]), tangent.add_(terms[j, 1])
    return result


def _frechet(A: Tensor, E: Tensor) -> Tensor:
    """$L(A, E)$ for (batch, n, n): $exp(A) = exp(A / 2^s)^(2^s)$, as a dual number."""
    norms = torch.linalg.matrix_norm(A, 1)
    squarings = torch.frexp(norms / _BOUNDS[norms.dtype])[1].clamp_(min=0)
    squarings = torch.where(norms.isfinite(), squarings, 0)
    scale = torch.exp2(-squarings.to(norms.dtype))[:, None, None]
    result = _taylor((A * scale, E * scale))
    for step in range(int(squarings.max())):
        squared = _times(result, result)
        more = (squarings > step)[:, None, None]
        result = squared if more.all() else _where(more, squared, result)
    return result[1]


def _where(mask: Tensor, x: Dual, y: Dual) -> Dual:
    return torch.where(mask, x[0], y[0]), torch.where(mask, x[1], y[1])


def _widened(x: Tensor) -> Tensor:
    """$x$ in at least single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check(self: Tensor, grad: Tensor) -> None:
    if self.dim() < 2 or self.shape[-1] != self.shape[-2]:
        raise RuntimeError(f"self: expected square matrices, got shape {list(self.shape)}")
    if not (self.is_floating_point() or self.is_complex()):
        raise RuntimeError(f"self: expected a floating point or complex dtype, got {self.dtype}")
    if grad.shape != self.shape or grad.dtype != self.dtype:
        given = f"{grad.dtype}{list(grad.shape)}"
        raise RuntimeError(f"grad: expected {self.dtype}{list(self.shape)}, as self is, got {given}")


@formula(kernel=("cpu",))
def linalg_matrix_exp_differential(self: Tensor, grad: Tensor, adjoint: bool) -> Tensor:
    """Tangent of $exp(A)$: $L(A, E)$. If ``adjoint``, cotangent of $A$, given that of $exp(A)$: $L(A^H, G)$.

    Args:
        self: $A$, (*, n, n), real or complex; $n$ may be 0.
        grad: $E$ or $G$, (*, n, n).
        adjoint: whether grad is $G$.

    Returns:
        (*, n, n), row-major. Half precision is computed in float32.

    Raises:
        RuntimeError: matrices that are not square, integers, or a ``grad`` of another shape or dtype than ``self``.

    References:
        ATen linalg_matrix_exp_differential; Mathias, A chain rule for matrix functions and applications, 1996,
        doi:10.1137/S0895479895283409, theorem 2.1; for the kernel, Al-Mohy and Higham, Computing the Frechet derivative
        of the matrix exponential, 2009, doi:10.1137/080716426, with a Taylor polynomial.
    """
    _check(self, grad)
    A, E = _widened(self), _widened(grad)
    return differential_analytic_matrix_function(A, E, torch.linalg.matrix_exp, adjoint).to(self.dtype).contiguous()


def _second_differential(A: Tensor, E: Tensor, F: Tensor) -> Tensor:
    """The tangent of $L(A, E)$ as $A$ moves along $F$: a block of that of $exp [[A, E], [0, A]]$. Bilinear and symmetric in $E$ and $F$."""
    A, E, F = _widened(A), _widened(E), _widened(F)
    n, size = A.shape[-1], _size(E)
    block, along = _upper(A, E / size), _upper(F, torch.zeros_like(F))
    return linalg_matrix_exp_differential(block, along, False)[..., :n, n:] * size


# Written out, because autograd through the body would multiply two scaled cotangents, which may underflow.
@linalg_matrix_exp_differential.impl_backward
def _(ctx: Any, given: Any, grad: Tensor) -> dict[str, Tensor | None]:
    A, E, adjoint = given
    needs = ctx.needs_input_grad
    first, second = (E, grad.mH) if adjoint else (E.mH, grad)
    return {
        "self": _second_differential(A.mH, first, second).to(A.dtype) if needs["self"] else None,
        "grad": linalg_matrix_exp_differential(A, grad, not adjoint) if needs["grad"] else None,
    }


@linalg_matrix_exp_differential.impl_jvp
def _(given: Any, output: Tensor, tangents: Any) -> Tensor | None:
    A, E, adjoint = given
    A_t, E_t, _ = tangents
    moved = None if E_t is None else linalg_matrix_exp_differential(A, E_t, adjoint)
    if A_t is None:
        return moved
    A, A_t = (A.mH, A_t.mH) if adjoint else (A, A_t)
    return total(_second_differential(A, E, A_t).to(A.dtype), moved)


@linalg_matrix_exp_differential.impl("cpu")
def _differential_kernel(self: Tensor, grad: Tensor, adjoint: bool) -> Tensor:
    _check(self, grad)
    n = self.shape[-1]
    if self.numel() == 0:
        return torch.zeros_like(self, memory_format=torch.contiguous_format)
    A, E = _widened(self.mH if adjoint else self), _widened(grad)
    return _frechet(A.reshape(-1, n, n), E.reshape(-1, n, n)).reshape(A.shape).to(self.dtype)


# -- the rule ---------------------------------------------------------------------------------------------------------


by_matrix(linalg_matrix_exp_differential.op)
rule(
    "aten::linalg_matrix_exp",
    vjp={"self": linalg_matrix_exp_differential.bind(adjoint=True)},
    jvp={"result": linalg_matrix_exp_differential.bind(grad="self_t", adjoint=False)},
    improves=("values", "speed"),
    source="ATen linalg_matrix_exp_differential",
)
