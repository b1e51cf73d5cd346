"""Matrix products: mm, addmm, _trilinear, _grouped_mm, and those of linear's own derivatives.

All are linear in each factor: a tangent takes the place of its factor, and the cotangent of a factor is the product of
the result's with the conjugates of the others, over the dims that this factor lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.formula import formula
from torch_manualgrad.core.rule import Sample, rule

from .common import random


def _scaled(x: Tensor, by: Number) -> Tensor:
    return x if by == 1 else x * by


def _sum(terms: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of what is there."""
    total = None
    for term in terms:
        if term is not None:
            total = term if total is None else total + term
    return total


# -- mm and addmm -----------------------------------------------------------------------------------------------------


@formula
def mm_mat1_backward(
    grad: Tensor, mat2: Tensor, mat1_strides: Sequence[int] | None = None, alpha: Number = 1
) -> Tensor:
    """Cotangent of A for that of alpha A B: conj(alpha) G B^H.

    Args:
        grad: G, (m, n). mat2: B, (k, n).
        mat1_strides: those of A; its gradient is column-major if A is.
        alpha: a Python number, also a complex one.
    Returns:
        (m, k).
    Source: ATen mm_mat1_backward.
    """
    if mat1_strides is not None and list(mat1_strides) == [1, grad.shape[0]]:
        return _scaled((mat2.conj() @ grad.mT).mT, alpha.conjugate())
    return _scaled(grad @ mat2.mH, alpha.conjugate())


@formula
def mm_mat2_backward(
    grad: Tensor, mat1: Tensor, mat2_strides: Sequence[int] | None = None, alpha: Number = 1
) -> Tensor:
    """Cotangent of B for that of alpha A B: conj(alpha) A^H G.

    Args:
        grad: G, (m, n). mat1: A, (m, k).
        mat2_strides: those of B; its gradient is column-major if B is.
        alpha: a Python number, also a complex one.
    Returns:
        (k, n).
    Source: ATen mm_mat2_backward.
    """
    if mat2_strides is not None and list(mat2_strides) == [1, mat1.shape[1]]:
        return _scaled((grad.mT @ mat1.conj()).mT, alpha.conjugate())
    return _scaled(mat1.mH @ grad, alpha.conjugate())


def _mm_jvp(self_p: Tensor, self_t: Tensor | None, mat2_p: Tensor, mat2_t: Tensor | None) -> Tensor | None:
    return _sum((None if self_t is None else self_t @ mat2_p, None if mat2_t is None else self_p @ mat2_t))


def _addmm_jvp(
    self_t: Tensor | None,
    mat1_p: Tensor,
    mat1_t: Tensor | None,
    mat2_p: Tensor,
    mat2_t: Tensor | None,
    beta: Number,
    alpha: Number,
    result: Tensor,
) -> Tensor:
    product = _mm_jvp(mat1_p, mat1_t, mat2_p, mat2_t)
    terms = (None if product is None else _scaled(product, alpha), None if self_t is None else _scaled(self_t, beta))
    total = _sum(terms)
    assert total is not None  # nobody asks for a tangent where no input has one
    return total.expand(result.shape)


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
    """Cotangent of the factor that is None, for that of the product of three, summed over ``sumdim``.

    It is a product of the same kind, in which the roles of ``sumdim`` and of the factor's own ``expand`` are exchanged.

    Args:
        grad_out: cotangent of the result.
        i1, i2, i3: the factors, which lack the dims in their ``expand`` (in the numbering of the full product); one None.
        expand1, expand2, expand3, sumdim, unroll_dim: as the operator's.
    Returns:
        The shape of the factor that is None.
    Source: ATen _trilinear_backward, which gives all three, and takes no conjugates: it is for real factors.
    """
    factors, expands = (i1, i2, i3), (expand1, expand2, expand3)
    missing = [at for at, f in enumerate(factors) if f is None]
    if len(missing) != 1:
        raise ValueError(f"i1, i2, i3: expected one of them to be None, got {len(missing)}")
    (at,) = missing
    x = [grad_out if f is None else f.conj() for f in factors]
    e = [sumdim if i == at else d for i, d in enumerate(expands)]
    return torch.ops.aten._trilinear(*x, *e, expands[at], unroll_dim)


def _trilinear_jvp(
    i1_p: Tensor,
    i1_t: Tensor | None,
    i2_p: Tensor,
    i2_t: Tensor | None,
    i3_p: Tensor,
    i3_t: Tensor | None,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int,
) -> Tensor | None:
    def product(x1: Tensor | None, x2: Tensor | None, x3: Tensor | None) -> Tensor | None:
        if x1 is None or x2 is None or x3 is None:
            return None
        return torch.ops.aten._trilinear(x1, x2, x3, expand1, expand2, expand3, sumdim, unroll_dim)

    return _sum((product(i1_t, i2_p, i3_p), product(i1_p, i2_t, i3_p), product(i1_p, i2_p, i3_t)))


# -- _grouped_mm ------------------------------------------------------------------------------------------------------
#
# Groups of rows or columns that end at offs; a matrix of three dims has a group for each index of the first:
#     2d A, 3d B: rows of A.    3d A, 2d B: columns of B.    2d A, 2d B: the dim summed over, result 3d.
# Exchanging a factor and the result, transposed, exchanges the three kinds; so both cotangents are grouped products.


@formula
def _grouped_mm_mat1_backward(grad: Tensor, mat2: Tensor, offs: Tensor | None = None) -> Tensor:
    """Cotangent of A for that of the products A_g B_g of groups: G_g B_g^T, grouped by the same offsets.

    Args:
        grad: G, 2d or 3d. mat2: B. offs: where the groups end, int32; None for 3d factors.
    Returns:
        The shape of A, row-major. What lies beyond the last offset is as little defined as it is in the result.
    Raises:
        RuntimeError: what _grouped_mm refuses: dtypes but float32, bfloat16, float16; rows not of a multiple of 16 bytes.
    Source: ATen _grouped_mm_mat1_backward.
    """
    return torch.ops.aten._grouped_mm(grad.contiguous(), mat2.mT, offs)


@formula
def _grouped_mm_mat2_backward(grad: Tensor, mat1: Tensor, offs: Tensor | None = None) -> Tensor:
    """Cotangent of B for that of the products A_g B_g of groups: A_g^T G_g, grouped by the same offsets.

    Args:
        grad: G, 2d or 3d. mat1: A. offs: where the groups end, int32; None for 3d factors.
    Returns, raises: _grouped_mm_mat1_backward. Source: ATen _grouped_mm_mat2_backward.
    """
    return torch.ops.aten._grouped_mm(mat1.mT, grad.contiguous(), offs)


def _grouped_mm_jvp(
    self_p: Tensor, self_t: Tensor | None, mat2_p: Tensor, mat2_t: Tensor | None, offs: Tensor | None, result: Tensor
) -> Tensor | None:
    def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None or b is None:
            return None
        return torch.ops.aten._grouped_mm(a, b, offs, out_dtype=result.dtype)

    self_t, mat2_t = (None if t is None else t.contiguous() for t in (self_t, mat2_t))
    return _sum((product(self_t, mat2_p), product(self_p, mat2_t)))


# -- linear -----------------------------------------------------------------------------------------------------------


def _weight_like(g: Tensor, x: Tensor) -> Tensor:
    """sum over all outer dims of g^T conj(x): (out, in) for g (*, out) and x (*, in)."""
    return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1]).conj()


@formula
def linear_backward(self: Tensor, grad_output: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of x, W and the bias for that of x W^T + bias: G conj(W), sum G^T conj(x), sum G.

    Args:
        self: x, (*, in). grad_output: G, (*, out). weight: W, (out, in).
    Returns:
        (*, in), (out, in), (out,).
    Source: the operator aten::linear_backward, which has no kernel for dense tensors on the CPU.
    """
    return (
        grad_output @ weight.conj(),
        _weight_like(grad_output, self),
        grad_output.reshape(-1, grad_output.shape[-1]).sum(0),
    )


@formula
def linear_double_backward(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of x, G and W for those (h, H, c) of the results of linear_backward.

    For x: G conj(H). For G: h W^T + x H^T + c. For W: sum G^T conj(h).

    Args:
        grad_grad_input: h, (*, in). grad_grad_weight: H, (out, in). grad_grad_bias: c, (out,). None for zero.
        self: x, (*, in). grad_output: G, (*, out). weight: W, (out, in).
    Returns:
        The shapes of x, G and W.
    Source: ATen linear_double_backward, which is for real tensors.
    """
    h, H, c = grad_grad_input, grad_grad_weight, grad_grad_bias
    terms = (None if h is None else h @ weight.mT, None if H is None else self @ H.mT, c)
    g_grad = _sum(terms)
    return (
        torch.zeros_like(self) if H is None else grad_output @ H.conj(),
        torch.zeros_like(grad_output) if g_grad is None else g_grad.expand(grad_output.shape),
        torch.zeros_like(weight) if h is None else _weight_like(grad_output, h),
    )


# -- the rules --------------------------------------------------------------------------------------------------------


def _mm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for m, k, n in ((2, 3, 4), (1, 1, 1), (2, 0, 3), (0, 2, 3)):
        yield Sample(random(m, k, dtype=dtype, device=device), random(k, n, dtype=dtype, device=device, seed=1))
    A, B = random(3, 2, dtype=dtype, device=device), random(4, 3, dtype=dtype, device=device, seed=1)
    yield Sample(A.mT, B.mT)


def _addmm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    A, B = random(2, 3, dtype=dtype, device=device), random(3, 4, dtype=dtype, device=device, seed=1)
    numbers = (2, 0.5j - 1) if dtype.is_complex else (2, 0.5)
    bias = random(2, 4, dtype=dtype, device=device, seed=2)
    for broadcast in (bias, bias[0], bias[:, :1], bias[0, 0]):
        yield Sample(broadcast.clone(), A, B, beta=numbers[0], alpha=numbers[1])
    yield Sample(bias, A, B, beta=numbers[1])
    yield Sample(bias, A.mT.contiguous().mT, B.mT.contiguous().mT, beta=0)


def _trilinear_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(*shapes: Sequence[int], dims: Sequence[Sequence[int]], **more: int) -> Sample:
        factors = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
        return Sample(*factors, *map(list, dims), **more)

    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]))  # bilinear
    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]), unroll_dim=2)
    yield sample((2, 3), (2, 3), (2, 3), dims=([], [], [], []))
    yield sample((2,), (3,), (2, 3), dims=([1], [0], [], [0]))
    yield sample((3,), (3,), (3,), dims=([], [], [], [0]), unroll_dim=0)


def _grouped_mm_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """In single precision, for the operator has no other that would do; every row is of a multiple of 16 bytes."""
    if dtype.is_complex:
        return
    offs = torch.tensor([4, 8], dtype=torch.int32, device=device)
    for first, second in (((8, 4), (2, 4, 4)), ((2, 4, 4), (4, 8)), ((4, 8), (8, 4)), ((2, 4, 4), (2, 4, 8))):
        A = random(*first, dtype=torch.float32, device=device)
        B = random(*second, dtype=torch.float32, device=device, seed=1)
        yield Sample(A, B, offs if min(A.dim(), B.dim()) == 2 else None)


def _grouped_mm_probe(self: Tensor, mat2: Tensor, offs: Tensor | None) -> Tensor:
    """The operator on the strides that it takes; in double precision, for finite differences, what it means."""
    if self.dtype != torch.float64:
        offs = None if offs is None else offs.contiguous()
        return torch.ops.aten._grouped_mm(self.contiguous(), mat2.contiguous(), offs)
    if offs is None:
        return self @ mat2
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if mat2.dim() == 3:
        return torch.cat([self[part] @ mat2[i] for i, part in enumerate(parts)])
    if self.dim() == 3:
        return torch.cat([self[i] @ mat2[:, part] for i, part in enumerate(parts)], -1)
    return torch.stack([self[:, part] @ mat2[part] for part in parts])


rule(
    "aten::mm",
    vjp={
        "self": lambda grad, self_strides, mat2: mm_mat1_backward(grad, mat2, self_strides),
        "mat2": lambda grad, self, mat2_strides: mm_mat2_backward(grad, self, mat2_strides),
    },
    jvp={"result": _mm_jvp},
    uses=(mm_mat1_backward, mm_mat2_backward),
    source="ATen mm_mat1_backward, mm_mat2_backward",
    samples=_mm_samples,
)
rule(
    "aten::addmm",
    vjp={
        "self": lambda grad, self_sizes, beta: _scaled(grad, beta.conjugate()).sum_to_size(self_sizes),
        "mat1": lambda grad, mat1_strides, mat2, alpha: mm_mat1_backward(grad, mat2, mat1_strides, alpha),
        "mat2": lambda grad, mat1, mat2_strides, alpha: mm_mat2_backward(grad, mat1, mat2_strides, alpha),
    },
    jvp={"result": _addmm_jvp},
    uses=(mm_mat1_backward, mm_mat2_backward),
    source="ATen mm_mat1_backward, mm_mat2_backward",
    samples=_addmm_samples,
)
rule(
    "aten::_trilinear",
    # one by one, so that a factor is kept only for the gradient of another
    vjp={
        "i1": lambda grad, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim: _trilinear_backward(
            grad, None, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim
        ),
        "i2": lambda grad, i1, i3, expand1, expand2, expand3, sumdim, unroll_dim: _trilinear_backward(
            grad, i1, None, i3, expand1, expand2, expand3, sumdim, unroll_dim
        ),
        "i3": lambda grad, i1, i2, expand1, expand2, expand3, sumdim, unroll_dim: _trilinear_backward(
            grad, i1, i2, None, expand1, expand2, expand3, sumdim, unroll_dim
        ),
    },
    jvp={"result": _trilinear_jvp},
    uses=_trilinear_backward,
    improves="missing",
    source="ATen _trilinear_backward; for complex factors new",
    samples=_trilinear_samples,
)
rule(
    "aten::_grouped_mm",
    vjp={
        "self": lambda grad, mat2, offs: _grouped_mm_mat1_backward(grad, mat2, offs),
        "mat2": lambda grad, self, offs: _grouped_mm_mat2_backward(grad, self, offs),
    },
    jvp={"result": _grouped_mm_jvp},
    uses=(_grouped_mm_mat1_backward, _grouped_mm_mat2_backward),
    improves="missing",
    gaps={"fake": ("the operator's fake kernel takes bfloat16 only", "2.15")},
    source="ATen _grouped_mm_mat1_backward, _grouped_mm_mat2_backward; its jvp is new",
    samples=_grouped_mm_samples,
    probe=_grouped_mm_probe,
)
