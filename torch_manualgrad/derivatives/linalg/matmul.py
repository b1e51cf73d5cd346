"""Products of matrices and vectors: mm, bmm, mv, addr, dot, vdot, sums with them, _trilinear, _grouped_mm.

Each is linear in each factor. A tangent replaces its factor. The cotangent of a factor is the product of the cotangent
of the result with the conjugates of the other factors, summed over the dims that this factor lacks.

Args:
    grad: $G$, (*, m, n).
    alpha: a Python number, real or complex.
    offs: the ends of the groups, int32; None for 3d factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.engine.strong_arithmetic import stands_for
from torch_manualgrad.core.rule import bound_to, formula, rule

from ..terms import sum_over_tangents, tangent_of_product, total
from .common import summed_to


def scaled(x: Tensor, by: Number) -> Tensor:
    """The tensor times a Python number."""
    return x if by == 1 else x * by


# -- mm and addmm -----------------------------------------------------------------------------------------------------


@formula
def mm_mat1_backward(
    grad: Tensor, mat2: Tensor, mat1_strides: Sequence[int] | None = None, alpha: Number = 1
) -> Tensor:
    """Cotangent of $A$, given that of $alpha A B$: $conj(alpha) G B^H$.

    Args:
        mat2: $B$, (*, k, n).
        mat1_strides: the strides of $A$, a single matrix. The gradient is column-major if $A$ is. None for row-major.

    Returns:
        (*, m, k).
    """
    if mat1_strides is not None and list(mat1_strides) == [1, grad.shape[0]]:
        return scaled((mat2.conj() @ grad.mT).mT, alpha.conjugate())
    return scaled(grad @ mat2.mH, alpha.conjugate())


@formula
def mm_mat2_backward(
    grad: Tensor, mat1: Tensor, mat2_strides: Sequence[int] | None = None, alpha: Number = 1
) -> Tensor:
    """Cotangent of $B$, given that of $alpha A B$: $conj(alpha) A^H G$.

    Args:
        mat1: $A$, (*, m, k).
        mat2_strides: the strides of $B$, a single matrix. The gradient is column-major if $B$ is. None for row-major.

    Returns:
        (*, k, n).
    """
    if mat2_strides is not None and list(mat2_strides) == [1, mat1.shape[1]]:
        return scaled((grad.mT @ mat1.conj()).mT, alpha.conjugate())
    return scaled(mat1.mH @ grad, alpha.conjugate())


def cotangent_of_added(grad: Tensor, self_sizes: Sequence[int], beta: Number) -> Tensor:
    """Cotangent of the term that is added, $beta$ self."""
    return summed_to(scaled(grad, beta.conjugate()), self_sizes)


def tangent_of_added(product: Callable[[Tensor, Tensor], Tensor], x: str, y: str) -> Callable[..., Tensor]:
    """The jvp of $beta self + alpha product(x, y)$, given the names of both factors."""

    def jvp(
        self_t: Tensor | None,
        x_p: Tensor,
        x_t: Tensor | None,
        y_p: Tensor,
        y_t: Tensor | None,
        beta: Number,
        alpha: Number,
        result: Tensor,
    ) -> Tensor:
        product_t = total(None if x_t is None else product(x_t, y_p), None if y_t is None else product(x_p, y_t))
        tangent = total(
            None if product_t is None else scaled(product_t, alpha), None if self_t is None else scaled(self_t, beta)
        )
        assert tangent is not None  # the jvp is called only if some input has a tangent
        return tangent.expand(result.shape)

    return bound_to(jvp, ["self_t", f"{x}_p", f"{x}_t", f"{y}_p", f"{y}_t", "beta", "alpha", "result"])


# -- vectors ----------------------------------------------------------------------------------------------------------


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
        grad: $g$, (m,).
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
        grad: $g$, (m,).
        mat: $A$, (m, n).

    Returns:
        (n,).

    References:
        ATen derivatives.yaml, addmv.
    """
    return scaled(torch.mv(mat.mH, grad), alpha.conjugate())


# -- _trilinear -------------------------------------------------------------------------------------------------------


@formula
def _trilinear_backward(
    grad_out: Tensor,
    i1: Tensor | None,
    i2: Tensor | None,
    i3: Tensor | None,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Cotangent of the factor that is None, given that of the product of three factors, summed over ``sumdim``.

    It is a product of the same kind, with the roles of ``sumdim`` and the factor's own ``expand`` exchanged.

    Args:
        grad_out: cotangent of the result, its shape.
        i1, i2, i3: the factors. Exactly one is None.
        expand1, expand2, expand3: the dims of the full product that each factor lacks.
        sumdim: the dims of the full product that are summed over.
        unroll_dim: the dim of the full product over which the operator loops.

    Returns:
        The shape of the factor that is None.

    Raises:
        ValueError: not exactly one factor is None.

    References:
        ATen _trilinear_backward, which returns all three cotangents and takes no conjugates: it is for real factors.
    """
    factors, expands = (i1, i2, i3), (expand1, expand2, expand3)
    missing = [at for at, f in enumerate(factors) if f is None]
    if len(missing) != 1:
        raise ValueError(f"i1, i2, i3: expected one of them to be None, got {len(missing)}")
    (at,) = missing
    x = [grad_out if f is None else f.conj() for f in factors]
    e = [sumdim if i == at else d for i, d in enumerate(expands)]
    return torch.ops.aten._trilinear(*x, *e, expands[at], unroll_dim)


@stands_for(torch.ops.aten._trilinear.default)
def _product_of_three(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    product = torch.ones((), dtype=i1.dtype, device=i1.device)
    for x, dims in ((i1, expand1), (i2, expand2), (i3, expand3)):
        for d in sorted(dims):
            x = x.unsqueeze(d)
        product = product * x
    return product.sum(sumdim) if sumdim else product


# -- _grouped_mm ------------------------------------------------------------------------------------------------------
#
# Groups of rows or columns that end at offs; a factor of three dims has one group for each index of its first dim:
#     2d A, 3d B: rows of A.    3d A, 2d B: columns of B.    2d A, 2d B: the dim summed over; the result is 3d.
# Exchanging a factor and the transposed result exchanges the three kinds, so both cotangents are grouped products.


def _offsets_fit(offs: Tensor | None, divided: int, is_summed: bool) -> str:
    """An error message if offsets do not divide ``divided`` rows or columns, else "". The product does not write others."""
    if offs is None:
        return ""
    if offs.dim() != 1 or not offs.numel() or bool((offs.diff() < 0).any()) or int(offs[0]) < 0:
        return f"offs: expected one dim of ascending offsets, got shape {list(offs.shape)} or another order"
    last = int(offs[-1])
    return (
        "" if last == divided or (is_summed and last < divided) else f"offs: expected {divided} as the last, got {last}"
    )


def _mat1_offsets_fit(grad: Tensor, mat2: Tensor, offs: Tensor | None) -> str:
    if grad.dim() == 3:
        return _offsets_fit(offs, mat2.shape[0], False)
    return _offsets_fit(offs, grad.shape[int(mat2.dim() == 2)], mat2.dim() == 2)


def _mat2_offsets_fit(grad: Tensor, self: Tensor, offs: Tensor | None) -> str:
    if self.dim() == 3:
        return _offsets_fit(offs, grad.shape[-1], False)
    return _offsets_fit(offs, self.shape[int(grad.dim() == 3)], grad.dim() == 2)


@formula(requires=_mat1_offsets_fit)
def _grouped_mm_mat1_backward(grad: Tensor, mat2: Tensor, offs: Tensor | None = None) -> Tensor:
    """Cotangent of $A$, given that of the products $A_g B_g$ of groups: $G_g B_g^T$, grouped by the same offsets.

    Args:
        grad: $G$, (m, n) or (g, m, n).
        mat2: $B$, (k, l) or (g, k, l).

    Returns:
        The shape of $A$, row-major. Entries beyond the last offset are undefined, as in the result.

    Raises:
        RuntimeError: as _grouped_mm does, for dtypes other than float32, bfloat16 and float16, and for rows that are
            not a multiple of 16 bytes.
    """
    return torch.ops.aten._grouped_mm(grad.contiguous(), mat2.mT, offs)


@formula(requires=_mat2_offsets_fit)
def _grouped_mm_mat2_backward(grad: Tensor, self: Tensor, offs: Tensor | None = None) -> Tensor:
    """Cotangent of $B$, given that of the products $A_g B_g$ of groups: $A_g^T G_g$, grouped by the same offsets.

    Args:
        grad: $G$, (m, n) or (g, m, n).
        self: $A$, (l, k) or (g, l, k).

    Returns:
        The shape of $B$, row-major. Entries beyond the last offset are undefined, as in the result.

    Raises:
        RuntimeError: see `_grouped_mm_mat1_backward`.
    """
    return torch.ops.aten._grouped_mm(self.mT, grad.contiguous(), offs)


def _grouped_product(self: Tensor, mat2: Tensor, offs: Tensor | None, result: Tensor) -> Tensor:
    return torch.ops.aten._grouped_mm(self, mat2, offs, out_dtype=result.dtype)


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::mm",
    vjp={
        "self": mm_mat1_backward.bind(mat1_strides="self_strides", alpha=1),
        "mat2": mm_mat2_backward.bind(mat1="self", alpha=1),
    },
    jvp={"result": tangent_of_product(torch.mm, "self", "mat2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
rule(
    "aten::addmm",
    vjp={
        "self": cotangent_of_added,
        "mat1": mm_mat1_backward,
        "mat2": mm_mat2_backward,
    },
    jvp={"result": tangent_of_added(torch.mm, "mat1", "mat2")},
    source="ATen mm_mat1_backward, mm_mat2_backward",
)
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
_TRILINEAR = ("expand1", "expand2", "expand3", "sumdim", "unroll_dim")

rule(
    "aten::_trilinear",
    # one by one, so that a factor is saved only for the gradient of another
    vjp={
        "i1": _trilinear_backward.bind(grad_out="grad", i1=None),
        "i2": _trilinear_backward.bind(grad_out="grad", i2=None),
        "i3": _trilinear_backward.bind(grad_out="grad", i3=None),
    },
    jvp={"result": tangent_of_product(torch.ops.aten._trilinear, "i1", "i2", "i3", others=_TRILINEAR)},
    improves="missing",
    source="ATen _trilinear_backward; for complex factors new",
)
rule(
    "aten::_grouped_mm",
    vjp={"self": _grouped_mm_mat1_backward, "mat2": _grouped_mm_mat2_backward},
    jvp={
        "result": sum_over_tangents(
            lambda self_t, mat2_p, offs, result: _grouped_product(self_t.contiguous(), mat2_p, offs, result),
            lambda mat2_t, self_p, offs, result: _grouped_product(self_p, mat2_t.contiguous(), offs, result),
        )
    },
    improves="missing",
    gaps={"fake": ("the operator's fake kernel takes bfloat16 only", "2.15")},
    source="ATen _grouped_mm_mat1_backward, _grouped_mm_mat2_backward; its jvp is new",
)
