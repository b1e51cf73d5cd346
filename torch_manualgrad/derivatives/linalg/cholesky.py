"""Cholesky: linalg_cholesky_ex, cholesky, cholesky_inverse, cholesky_solve.

With $phi(X)$ the lower triangle of $X$ with half of the diagonal, $dA = dL L^H + L dL^H$ gives
$L^-1 dL = phi(L^-1 dA L^-H)$:

    dL = L phi(L^-1 dA L^-H),        gA = (S + S^H) / 2,   S = L^-H phi(L^H gL) L^-1.

$A$ is treated as Hermitian, $(A + A^H) / 2$, whichever triangle the factorization reads: only the Hermitian part of $dA$
matters, and $gA$ is Hermitian.

The other operators take the factor $L$ and read one triangle of it. In the other triangle, values and tangents are
ignored, and the gradient is zero. PyTorch's gradient is not zero there: it differentiates $L L^H$ along any matrix $dL$. For
the inverse $X = (L L^H)^-1$, and for the solution of $L L^H X = B$ with $Z = L^-1 B = L^H X$:

    dX = -(Y + Y^H),  Y = X dL L^-1,                       gL = -X (gX + gX^H) L^-H,
    dX = L^-H (L^-1 (dB - dL Z) - dL^H X),                 gL = -(gB Z^H + X W^H),   gB = L^-H W,  W = L^-1 gX.

An upper factor is $U = L^H$, and $gU = gL^H$. A complex factor has a real diagonal.

Where not differentiable: where the factorization failed. The derivatives are then inf or nan.

Args:
    L: the factor, (*, n, n), real or complex.
    upper: whether the factor is $U = L^H$, so that the upper triangle is read.
    self, input2: the factor, (*, n, n). One triangle is read.
    result: $X$, (*, n, n).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from . import blocks
from .common import LARGEST, small, summed_to, sym
from .triangular import solve_triangular_adjoint

_IN_CACHE = kernel_limit("cached_cholesky")


def _lower(factor: Tensor, upper: bool) -> Tensor:
    """$L$, for $L$ or $U = L^H$."""
    return factor.mH if upper else factor


def _phi(X: Tensor, scale: float) -> Tensor:
    """$scale phi(X)$, by one product with a matrix of weights: the least memory traffic for a large batch."""
    half = X.new_full(X.shape[-2:], 0.5 * scale)
    return X * (half.tril() + half.tril(-1))


def _over(X: Tensor, T: Tensor, upper: bool) -> Tensor:
    """$X T^-1$ for a triangular $T$."""
    return torch.linalg.solve_triangular(T, X, upper=upper, left=False)


def _by_blocks(grad_L: Tensor, L: Tensor, upper: bool) -> Tensor:
    """`cholesky_backward` of a large matrix, by blocks of columns."""
    L, grad_L = _lower(L, upper), _lower(grad_L, upper)
    X = blocks.coupled(grad_L, None, L, L.mH, with_diagonal=True)
    return sym(_over(X.mH, L, False).mul_(0.5).mH)


@formula(
    kernels=(
        Kernel("cpu", "cuda", when=lambda L: small(L, L.shape[-1], in_cache=_IN_CACHE)),
        Kernel("cpu", when=lambda L: blocks.serve(L, LIMITS["cholesky_blocks"]), python=_by_blocks),
    )
)
def cholesky_backward(grad_L: Tensor, L: Tensor, upper: bool) -> Tensor:
    """Cotangent of $A$, given that of its Cholesky factor: the Hermitian part of $L^-H phi(L^H gL) L^-1$.

    Args:
        grad_L: cotangent of the factor, (*, n, n); its other triangle is ignored.

    Returns:
        Hermitian, (*, n, n).

    References:
        ATen cholesky_backward; Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527.
    """
    L, grad_L = _lower(L, upper), _lower(grad_L, upper)
    half = _over(_phi(L.mH @ grad_L, 0.5), L, False)  # phi(L^H gL) L^-1 / 2
    # This line takes the Hermitian part. `_by_blocks` does so for large matrices, and the vjp in csrc/math/cholesky.h for
    # small ones. Both solves are from the right, where BLAS is faster: (X^H L^-1)^H = L^-H X.
    return sym(_over(half.mH, L, False).mH)


@formula(kernels=Kernel("cpu", "cuda", when=lambda L: small(L, L.shape[-1])))
def cholesky_jvp(self_t: Tensor, L: Tensor, upper: bool) -> Tensor:
    """Tangent of the Cholesky factor: $L phi(L^-1 dA L^-H)$.

    Args:
        self_t: tangent of $A$, (*, n, n). Its Hermitian part is taken.

    Returns:
        Triangular, (*, n, n).

    References:
        ATen cholesky_jvp; Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527.
    """
    L = _lower(L, upper)
    half = _over(sym(self_t), L.mH, True)
    return _lower(L @ _phi(_over(half.mH, L.mH, True), 0.5), upper).contiguous()


@formula
def cholesky_inverse_backward(grad: Tensor, self: Tensor, upper: bool, result: Tensor) -> Tensor:
    """Cotangent of the factor, given that of the inverse $X$ of $L L^H$: the lower triangle of $-X (g + g^H) L^-H$.

    Args:
        grad: cotangent of the inverse, (*, n, n).

    Returns:
        (*, n, n), zero in the triangle that is not read.

    References:
        ATen cholesky_inverse_backward, which reads the other triangle of L, and is not zero there.
    """
    product = (sym(grad) @ result).mH  # both are Hermitian
    return _lower(-_over(product, _lower(self, upper).mH, True).tril(), upper)


@formula
def cholesky_inverse_jvp(self: Tensor, self_t: Tensor, result: Tensor, upper: bool) -> Tensor:
    """Tangent of the inverse $X$ of $L L^H$: $-(Y + Y^H)$ with $Y = X dL L^-1$.

    Args:
        self_t: tangent of the factor, (*, n, n). The same triangle is read.

    Returns:
        Hermitian, (*, n, n).

    References:
        ATen cholesky_inverse_jvp, which leaves out the restriction to the triangle.
    """
    return -sym(_over(result @ _lower(self_t, upper).tril(), _lower(self, upper), False))


@formula
def cholesky_solve_backward(
    grad: Tensor, self: Tensor, input2: Tensor, result: Tensor, upper: bool
) -> tuple[Tensor, Tensor]:
    """Cotangents of $B$ and of the factor, given that of the solution $X$ of $L L^H X = B$.

    $gB = L^-H W$ with $W = L^-1 gX$, and $gL$ is the lower triangle of $-(gB Z^H + X W^H)$ with $Z = L^-1 B$.

    Args:
        grad: cotangent of the solution, its shape.
        self: $B$, (*, n, k).
        result: the solution, (*, n, k), with all batch dims.

    Returns:
        The shapes of ``self`` and ``input2``; the second is zero in the triangle that is not read.

    References:
        ATen cholesky_solve_backward, which reads the other triangle of L, and is not zero there.
    """
    L = _lower(input2, upper)
    W = solve_triangular_adjoint(L.mH, grad, True)
    gB = solve_triangular_adjoint(L, W, False)
    Z = solve_triangular_adjoint(L.mH, self, True)
    gL = torch.cat((gB, result), -1) @ -torch.cat((Z, W), -1).mH
    return summed_to(gB, self.shape), summed_to(_lower(gL.tril(), upper), input2.shape)


@formula
def cholesky_solve_jvp(
    result: Tensor, input2: Tensor, input2_t: Tensor | None, self_t: Tensor | None, upper: bool
) -> Tensor:
    """Tangent of the solution $X$ of $L L^H X = B$: $L^-H (L^-1 (dB - dL Z) - dL^H X)$ with $Z = L^H X$.

    Args:
        result: the solution, (*, n, k), with all batch dims.
        input2_t: tangent of the factor, (*, n, n). The same triangle is read. None for zero.
        self_t: tangent of $B$, (*, n, k); None for zero. One of the two is given.

    Returns:
        The shape of ``result``.

    References:
        ATen cholesky_solve_jvp, which leaves out the restriction to the triangle.
    """
    L = _lower(input2, upper)
    if input2_t is None:
        assert self_t is not None  # the jvp is called only if some input has a tangent
        return solve_triangular_adjoint(L, solve_triangular_adjoint(L.mH, self_t.expand(result.shape), True), False)
    dL = _lower(input2_t, upper).tril()
    R = -dL @ (L.tril().mH @ result)
    R = R if self_t is None else R + self_t
    return solve_triangular_adjoint(L, solve_triangular_adjoint(L.mH, R, True) - dL.mH @ result, False)


def _cholesky_solve_vjp(
    grad: Tensor, self: Tensor, input2: Tensor, result: Tensor, upper: bool, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    if not output_mask[1]:
        L = _lower(input2, upper)
        gB = solve_triangular_adjoint(L, solve_triangular_adjoint(L.mH, grad, True), False)
        return summed_to(gB, self.shape), None
    return cholesky_solve_backward(grad, self, input2, result, upper)


# -- the rules --------------------------------------------------------------------------------------------------------


cholesky_rule = rule(
    "aten::linalg_cholesky_ex",
    vjp={"self": cholesky_backward},
    jvp={"L": cholesky_jvp},
    improves="speed",
    compiled_vjp=CompiledVjp("self", cholesky_backward, {}, LARGEST),
    source="ATen cholesky_backward, cholesky_jvp; Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527",
)
rule(
    "aten::cholesky",
    vjp={"self": cholesky_backward.bind(grad_L="grad", L="result")},
    jvp={"result": cholesky_jvp.bind(L="result")},
    improves="missing",
    compiled_vjp=CompiledVjp("self", cholesky_backward, {"grad_L": "grad", "L": "result"}, LARGEST),
    source="ATen cholesky_backward, cholesky_jvp; Murray, Differentiation of the Cholesky decomposition, arXiv:1602.07527",
    until="2.14",
)
rule(
    "aten::cholesky_inverse",
    vjp={"self": cholesky_inverse_backward},
    jvp={"result": cholesky_inverse_jvp},
    improves="values",
    source="ATen cholesky_inverse_backward, cholesky_inverse_jvp",
)
rule(
    "aten::cholesky_solve",
    vjp={("self", "input2"): _cholesky_solve_vjp},
    jvp={"result": cholesky_solve_jvp},
    improves="values",
    source="ATen cholesky_solve_backward, cholesky_solve_jvp",
)
