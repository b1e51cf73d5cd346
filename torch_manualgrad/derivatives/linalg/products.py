"""Products of batches of matrices, bmm, baddbmm, addbmm, and of vectors, mv, addmv, addr, dot, vdot.

The mathematics is that of `matmul`: a product is linear in each factor.

Args:
    grad: $g$, (m,).
    alpha: a Python number, real or complex.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import formula, rule

from ..terms import tangent_of_product
from .matmul import cotangent_of_added, mm_mat1_backward, mm_mat2_backward, scaled, tangent_of_added


@formula
def dot_backward(grad: Tensor, other: Tensor) -> Tensor:
    """Cotangent of a vector $x$, given that of $sum x y$: $g conj(y)$.

    Args:
        grad: $g$, ().
        other: $y$, (n,).

    Returns:
        (n,).

    References:
        ATen derivatives.yaml, dot.
    """
    return grad * other.conj()


@formula
def mv_mat_backward(grad: Tensor, vec: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of $A$, given that of $alpha A x$: $conj(alpha) g x^H$.

    Args:
        vec: $x$, (n,).

    Returns:
        (m, n).

    References:
        ATen derivatives.yaml, addmv.
    """
    return scaled(torch.outer(grad, vec.conj()), alpha.conjugate())


@formula
def mv_vec_backward(grad: Tensor, mat: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of $x$, given that of $alpha A x$: $conj(alpha) A^H g$.

    Args:
        mat: $A$, (m, n).

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
    jvp={"result": tangent_of_product(torch.bmm, "self", "mat2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
rule(
    "aten::baddbmm",
    vjp={
        "self": cotangent_of_added,
        "batch1": mm_mat1_backward.bind(mat2="batch2"),
        "batch2": mm_mat2_backward.bind(mat1="batch1"),
    },
    jvp={"result": tangent_of_added(torch.bmm, "batch1", "batch2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)


def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y).sum(0)


rule(
    "aten::addbmm",
    vjp={
        "self": cotangent_of_added,
        "batch1": mm_mat1_backward.bind(mat2="batch2"),  # the cotangent is the same for each matrix
        "batch2": mm_mat2_backward.bind(mat1="batch1"),
    },
    jvp={"result": tangent_of_added(_sum_of_products, "batch1", "batch2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
rule(
    "aten::mv",
    vjp={"self": mv_mat_backward.bind(alpha=1), "vec": mv_vec_backward.bind(mat="self", alpha=1)},
    jvp={"result": tangent_of_product(torch.mv, "self", "vec")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::addmv",
    vjp={"self": cotangent_of_added, "mat": mv_mat_backward, "vec": mv_vec_backward},
    jvp={"result": tangent_of_added(torch.mv, "mat", "vec")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::addr",
    vjp={
        "self": cotangent_of_added,
        "vec1": lambda grad, vec2, alpha: mv_vec_backward(vec2.conj(), grad.mH, alpha),
        "vec2": lambda grad, vec1, alpha: mv_vec_backward(vec1.conj(), grad.conj(), alpha),
    },
    jvp={"result": tangent_of_added(torch.outer, "vec1", "vec2")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::dot",
    vjp={"self": dot_backward.bind(other="tensor"), "tensor": dot_backward.bind(other="self")},
    jvp={"result": tangent_of_product(torch.dot, "self", "tensor")},
    source="ATen derivatives.yaml",
)
rule(
    "aten::vdot",
    vjp={
        "self": lambda grad, other: dot_backward(grad, other).conj(),
        "other": lambda grad, self: dot_backward(grad, self.conj()),
    },
    jvp={"result": tangent_of_product(torch.vdot, "self", "other")},
    source="ATen derivatives.yaml",
)
