"""The operators that derivatives call, in strong arithmetic: where a factor is 0, so is the product.

There is one function for each kind of operator. They run for ``override(strong_zero=True)``, where a derivative would not
be finite. Operators that are not listed here or next to their rule run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.engine.strong_arithmetic import StrongArithmetic, by_matrix, decomposed, runs_strongly

aten = torch.ops.aten

decomposed(
    aten.addmm.default,
    aten.addmv.default,
    aten.addr.default,
    aten.baddbmm.default,
    aten.addcmul.default,
    aten.addcdiv.default,
    aten.lerp.Tensor,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
    aten.linalg_cross.default,
)
by_matrix(
    aten._linalg_solve_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_solve_triangular.default,
    aten.triangular_solve.default,
    aten.cholesky_solve.default,
    aten.ormqr.default,
)


@runs_strongly(aten.mul.Tensor, aten.mul.Scalar)
def product(mode: StrongArithmetic, func: Any, a: Any, b: Any) -> Tensor:
    """$a b$, and 0 where a cotangent or tangent among them is 0."""
    result = func(a, b)
    for factor in (a, b):
        if mode.is_linear(factor):
            result = torch.where(factor == 0, 0, result)
    return result


@runs_strongly(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.xlogy.Tensor,
    aten.xlogy.Scalar_Other,
    aten.special_xlog1py.default,
    aten.special_xlog1py.other_scalar,
)
def quotient(mode: StrongArithmetic, func: Any, a: Any, b: Any) -> Tensor:
    """$a / b$, a $log b$ or a $log(1 + b)$, and 0 where a cotangent or tangent $a$ is 0."""
    result = func(a, b)
    return torch.where(a == 0, 0, result) if mode.is_linear(a) else result


def bilinear(mode: StrongArithmetic, function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Sums of products of an element of $a$ and one of $b$, without the terms whose cotangent or tangent factor is 0.

    Such a term differs from 0 only where its other factor is not finite. That factor is replaced by 0, except in sums
    where it also multiplies something that is not 0.
    """
    plain = function(a, b)
    met = torch.zeros_like(plain, dtype=torch.bool)
    finite_a, finite_b = a, b
    if mode.is_linear(a):
        met = function((a != 0).to(a.dtype), (~b.isfinite()).to(b.dtype)) != 0
        finite_b = torch.where(b.isfinite(), b, 0)
    if mode.is_linear(b):
        met = met | (function((~a.isfinite()).to(a.dtype), (b != 0).to(b.dtype)) != 0)
        finite_a = torch.where(a.isfinite(), a, 0)
    return torch.where(met, plain, function(finite_a, finite_b))


@runs_strongly(aten.mm.default, aten.bmm.default)
def matrix_product(mode: StrongArithmetic, func: Any, a: Tensor, b: Tensor) -> Tensor:
    """$A B$."""
    return bilinear(mode, func, a, b)


@runs_strongly(*filter(None, [getattr(aten._grouped_mm, "default", None)]))
def grouped_product(mode: StrongArithmetic, func: Any, a: Tensor, b: Tensor, *how: Any, **kwargs: Any) -> Tensor:
    """The products of groups of rows or columns."""
    return bilinear(mode, lambda a, b: func(a, b, *how, **kwargs), a, b)


@runs_strongly(aten.convolution.default)
def convolution(mode: StrongArithmetic, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    """A convolution, plus the bias."""
    result = bilinear(mode, lambda x, weight: func(x, weight, None, *how), x, weight)
    return result if bias is None else result + bias.view(-1, *[1] * (result.dim() - 2))


@runs_strongly(aten.convolution_backward.default)
def convolution_backward(
    mode: StrongArithmetic, func: Any, grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, *how: Any
) -> list[Tensor | None]:
    """The cotangents of input, weight and bias."""
    *fixed, wanted = how
    result = list(func(grad, x, weight, sizes, *fixed, [False, False, wanted[2]]))
    if wanted[0]:
        result[0] = bilinear(mode, lambda g, w: func(g, x, w, sizes, *fixed, [True, False, False])[0], grad, weight)
    if wanted[1]:
        result[1] = bilinear(mode, lambda g, x: func(g, x, weight, sizes, *fixed, [False, True, False])[1], grad, x)
    return result
