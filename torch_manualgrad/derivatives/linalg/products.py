"""More products: bmm, baddbmm, addbmm of batches of matrices, mv, addmv, addr, dot, vdot of vectors.

The mathematics is that of `matmul`: a product is linear in each factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import Sample, formula, rule

from .common import random, summed_to, total
from .matmul import mm_mat1_backward, mm_mat2_backward, scaled


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
    assert tangent is not None  # nobody asks for a tangent where no input has one
    return tangent.expand(result.shape)


def _of_added(grad: Tensor, self_sizes: Sequence[int], beta: Number) -> Tensor:
    """Cotangent of what was added, times beta."""
    return summed_to(scaled(grad, beta.conjugate()), self_sizes)


@formula
def mv_mat_backward(grad: Tensor, vec: Tensor, alpha: Number = 1) -> Tensor:
    """Cotangent of A, given that of alpha A x: conj(alpha) g x^H.

    Args:
        grad: g, (m,).
        vec: x, (n,).
        alpha: a Python number, real or complex.

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
        grad: g, (m,).
        mat: A, (m, n).
        alpha: a Python number, real or complex.

    Returns:
        (n,).

    References:
        ATen derivatives.yaml, addmv.
    """
    return scaled(torch.mv(mat.mH, grad), alpha.conjugate())


# -- samples ----------------------------------------------------------------------------------------------------------


def _samples(*shapes: Sequence[Sequence[int]]) -> Callable[..., Iterable[Sample]]:
    """Two factors, also transposed in memory, and empty."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sizes in shapes:
            yield Sample(*(random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(sizes)))
        factors = [random(*s[::-1], dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes[0])]
        yield Sample(*(x.permute(*range(x.dim() - 1, -1, -1)) for x in factors))

    return samples


def _added_samples(added: Sequence[int], *factors: Sequence[int]) -> Callable[..., Iterable[Sample]]:
    """What is added in its full shape and broadcast, with numbers that are 0 and 1 and others."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        x = random(*added, dtype=dtype, device=device, seed=9)
        given: list[Any] = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(factors)]
        other = 0.5j - 1 if dtype.is_complex else 0.5
        yield Sample(x, *given, beta=2, alpha=other)
        yield Sample(x[..., :1].clone(), *given, beta=other)
        yield Sample(x.reshape(-1)[0].clone(), *given, beta=0, alpha=other)

    return samples


_BATCHES = ((2, 2, 3), (2, 3, 2))

# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::bmm",
    vjp={"self": mm_mat1_backward.bind(alpha=1), "mat2": mm_mat2_backward.bind(mat1="self", alpha=1)},
    jvp={"result": lambda self_p, self_t, mat2_p, mat2_t: _product(torch.bmm, self_p, self_t, mat2_p, mat2_t)},
    source="ATen mm_mat1_backward, mm_mat2_backward",
    samples=_samples(_BATCHES, ((2, 1, 0), (2, 0, 2)), ((0, 2, 1), (0, 1, 2))),
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
    samples=_added_samples((2, 2, 2), *_BATCHES),
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
    samples=_added_samples((2, 2), *_BATCHES),
)
rule(
    "aten::mv",
    vjp={
        "self": mv_mat_backward.bind(alpha=1),
        "vec": mv_vec_backward.bind(mat="self", alpha=1),
    },
    jvp={"result": lambda self_p, self_t, vec_p, vec_t: _product(torch.mv, self_p, self_t, vec_p, vec_t)},
    source="ATen derivatives.yaml",
    samples=_samples(((2, 3), (3,)), ((2, 0), (0,))),
)
rule(
    "aten::addmv",
    vjp={
        "self": _of_added,
        "mat": mv_mat_backward,
        "vec": mv_vec_backward,
    },
    jvp={
        "result": lambda self_t, mat_p, mat_t, vec_p, vec_t, beta, alpha, result: _added(
            self_t, _product(torch.mv, mat_p, mat_t, vec_p, vec_t), beta, alpha, result
        )
    },
    source="ATen derivatives.yaml",
    samples=_added_samples((2,), (2, 3), (3,)),
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
    samples=_added_samples((2, 3), (2,), (3,)),
)
rule(
    "aten::dot",
    vjp={"self": dot_backward.bind(other="tensor"), "tensor": dot_backward.bind(other="self")},
    jvp={"result": lambda self_p, self_t, tensor_p, tensor_t: _product(torch.dot, self_p, self_t, tensor_p, tensor_t)},
    source="ATen derivatives.yaml",
    samples=_samples(((3,), (3,)), ((0,), (0,))),
)
rule(
    "aten::vdot",
    vjp={
        "self": lambda grad, other: dot_backward(grad, other).conj(),
        "other": lambda grad, self: dot_backward(grad, self.conj()),
    },
    jvp={"result": lambda self_p, self_t, other_p, other_t: _product(torch.vdot, self_p, self_t, other_p, other_t)},
    source="ATen derivatives.yaml",
    samples=_samples(((3,), (3,)), ((0,), (0,))),
)
