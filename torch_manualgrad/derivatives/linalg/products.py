"""Products of batches of matrices, bmm, baddbmm, addbmm, and of vectors, mv, addmv, addr, dot, vdot.

The mathematics is that of `matmul`: a product is linear in each factor.

Args:
    grad: g, (m,).
    alpha: a Python number, real or complex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import formula, rule

from ..terms import tangent_of_product, total
from .common import summed_to
from .matmul import mm_mat1_backward, mm_mat2_backward, scaled

aten = torch.ops.aten


@formula
def dot_backward(grad: Tensor, other: Tensor) -> Tensor:
    """Cotangent of a vector x, given that of sum x y: g conj(y).

    Args:
        grad: g, ().
        other: y, (n,).

    Returns:
        (n,).

    References:
        ATen derivatives.yaml, dot.
    """
    return grad * other.conj()


def _product(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, x_t: Tensor | None, y: Tensor, y_t: Tensor | None
) -> Tensor | None:
    """Tangent of a product."""
    return total(None if x_t is None else product(x_t, y), None if y_t is None else product(x, y_t))


def _added(self_t: Tensor | None, product_t: Tensor | None, beta: Number, alpha: Number, result: Tensor) -> Tensor:
    """Tangent of beta self + alpha product."""
    tangent = total(
        None if product_t is None else scaled(product_t, alpha), None if self_t is None else scaled(self_t, beta)
    )
    assert tangent is not None  # the jvp is called only if some input has a tangent
    return tangent.expand(result.shape)


def _of_added(grad: Tensor, self_sizes: Sequence[int], beta: Number) -> Tensor:
    """Cotangent of the term that is added, beta self."""
    return summed_to(scaled(grad, beta.conjugate()), self_sizes)


@formula
def mv_mat_backward(grad: Tensor, vec: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of A, given that of alpha A x: conj(alpha) g x^H.

    Args:
        vec: x, (n,).

    Returns:
        (m, n).

    References:
        ATen derivatives.yaml, addmv.
    """
    return scaled(torch.outer(grad, vec.conj()), alpha.conjugate())


@formula
def mv_vec_backward(grad: Tensor, mat: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of x, given that of alpha A x: conj(alpha) A^H g.

    Args:
        mat: A, (m, n).

    Returns:
        (n,).

    References:
        ATen derivatives.yaml, addmv.
    """
    return scaled(torch.mv(mat.mH, grad), alpha.conjugate())


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::bmm",
    vjp={"self": mm_mat1_backward.bind(alpha=1), "mat2": mm_mat2_backward.bind(mat1="self", alpha=1)},
    jvp={"result": tangent_of_product(aten.bmm.default, "self", "mat2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
rule(
    "aten::baddbmm",
    vjp={
        "self": _of_added,
        "batch1": mm_mat1_backward.bind(mat2="batch2"),
        "batch2": mm_mat2_backward.bind(mat1="batch1"),
    },
    jvp={
        "result": lambda self_t, batch1_p, batch1_t, batch2_p, batch2_t, beta, alpha, result: _added(
            self_t, _product(torch.bmm, batch1_p, batch1_t, batch2_p, batch2_t), beta, alpha, result
        )
    },
    source="ATen mm_mat1_backward, mm_mat2_backward",
)


def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y).sum(0)


rule(
    "aten::addbmm",
    vjp={
        "self": _of_added,
        "batch1": mm_mat1_backward.bind(mat2="batch2"),  # the cotangent is the same for each matrix
        "batch2": mm_mat2_backward.bind(mat1="batch1"),
    },
    jvp={
        "result": lambda self_t, batch1_p, batch1_t, batch2_p, batch2_t, beta, alpha, result: _added(
            self_t, _product(_sum_of_products, batch1_p, batch1_t, batch2_p, batch2_t), beta, alpha, result
        )
    },
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
rule(
    "aten::mv",
    vjp={"self": mv_mat_backward.bind(alpha=1), "vec": mv_vec_backward.bind(mat="self", alpha=1)},
    jvp={"result": tangent_of_product(aten.mv.default, "self", "vec")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::addmv",
    vjp={"self": _of_added, "mat": mv_mat_backward, "vec": mv_vec_backward},
    jvp={
        "result": lambda self_t, mat_p, mat_t, vec_p, vec_t, beta, alpha, result: _added(
            self_t, _product(torch.mv, mat_p, mat_t, vec_p, vec_t), beta, alpha, result
        )
    },
    source="ATen derivatives.yaml",
)
rule(
    "aten::addr",
    vjp={
        "self": _of_added,
        "vec1": lambda grad, vec2, alpha: mv_vec_backward(vec2.conj(), grad.mH, alpha),
        "vec2": lambda grad, vec1, alpha: mv_vec_backward(vec1.conj(), grad.conj(), alpha),
    },
    jvp={
        "result": lambda self_t, vec1_p, vec1_t, vec2_p, vec2_t, beta, alpha, result: _added(
            self_t, _product(torch.outer, vec1_p, vec1_t, vec2_p, vec2_t), beta, alpha, result
        )
    },
    source="ATen derivatives.yaml",
)
rule(
    "aten::dot",
    vjp={"self": dot_backward.bind(other="tensor"), "tensor": dot_backward.bind(other="self")},
    jvp={"result": tangent_of_product(aten.dot.default, "self", "tensor")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::vdot",
    vjp={
        "self": lambda grad, other: dot_backward(grad, other).conj(),
        "other": lambda grad, self: dot_backward(grad, self.conj()),
    },
    jvp={"result": tangent_of_product(aten.vdot.default, "self", "other")},
    source="ATen derivatives.yaml",
)
