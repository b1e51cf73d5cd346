"""Samples of the rules of linear algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..linalg.common import sym
from .drawing import random, random_conditioned, random_definite

# -- cholesky ----------------------------------------------------------------------------------------------------------


def _definite_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (0, 2, 2), (2, 0, 0)):
        yield Sample(random_definite(*shape, dtype=dtype, device=device))


@samples_for("aten::linalg_cholesky_ex")
def cholesky_ex(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _definite_samples(dtype, device)
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device), upper=True)


@samples_for("aten::cholesky")
def cholesky(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _definite_samples(dtype, device)
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device), True)


def _factor(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A factor in either triangle, with a real diagonal."""
    X = random(*shape, dtype=dtype, seed=3)
    diagonal = X.diagonal(dim1=-2, dim2=-1)
    return (X + torch.diag_embed(1.5 + diagonal.abs() - diagonal)).to(device)


@samples_for("aten::cholesky_inverse")
def cholesky_inverse(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (2, 0, 0)):
        for upper in (False, True):
            yield Sample(_factor(*shape, dtype=dtype, device=device), upper)


@samples_for("aten::cholesky_solve")
def cholesky_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    for upper in (False, True):
        yield Sample(right(3, 1), _factor(3, 3, dtype=dtype, device=device), upper)
        yield Sample(right(2, 3, 3), _factor(3, 3, dtype=dtype, device=device).mT, upper)
    yield Sample(right(2, 2), _factor(3, 1, 2, 2, dtype=dtype, device=device))
    yield Sample(right(0, 2), _factor(2, 0, 0, dtype=dtype, device=device))


def _hermitian(operator: str) -> Any:
    """A probe: the operator on the Hermitian part, looked up when it runs, as not every torch release has it."""
    return lambda A, *args, **kwargs: getattr(torch.ops.aten, operator)(0.5 * sym(A), *args, **kwargs)


@probe_for("aten::cholesky_inverse")
def cholesky_inverse_probe(F: Tensor, upper: bool) -> Tensor:
    """The inverse, for a factor with a real diagonal."""
    if F.is_complex():
        F = F - 1j * torch.diag_embed(F.diagonal(dim1=-2, dim2=-1).imag)
    return torch.ops.aten.cholesky_inverse(F, upper)


probe_for("aten::linalg_cholesky_ex")(_hermitian("linalg_cholesky_ex"))
probe_for("aten::cholesky")(_hermitian("cholesky"))


# -- det ---------------------------------------------------------------------------------------------------------------


@samples_for("aten::_linalg_slogdet")
def slogdet(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(2, 2, 2, dtype=dtype, device=device))
    yield Sample(random_conditioned(6, 6, dtype=dtype, device=device, least=0.5))
    yield Sample(random(1, 1, dtype=dtype, device=device))
    yield Sample(random(2, 0, 0, dtype=dtype, device=device))


@samples_for("aten::_linalg_det")
def det(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from slogdet(dtype, device)
    left, right = random(4, 4, dtype=dtype, device=device), random(4, 4, dtype=dtype, device=device, seed=1)
    yield Sample(torch.stack([left[:, :rank] @ right[:rank] for rank in (4, 3, 2)]))
    nilpotent = torch.ones(6, 6, dtype=dtype, device=device).triu(1)
    yield Sample(torch.stack([nilpotent, random_conditioned(6, 6, dtype=dtype, device=device)]))


probe_for("aten::_linalg_det")(torch.linalg.det)
probe_for("aten::_linalg_slogdet")(torch.linalg.slogdet)


# -- eig ---------------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_eig")
def eig(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        skewed = torch.diag_embed(torch.arange(shape[-1], device=device)).to(dtype)
        yield Sample(0.4 * random(*shape, dtype=dtype, device=device, seed=1) + skewed)
    yield Sample(random_conditioned(3, 3, dtype=dtype, device=device).mT)


@probe_for("aten::linalg_eig")
def eig_probe(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in a fixed order. The order of LAPACK and cuSOLVER can change when the matrix changes slightly."""
    L, V = torch.ops.aten.linalg_eig(A)
    order = (L.real + 0.1 * L.imag).detach().argsort(-1)
    return L.gather(-1, order), projectors(V).gather(-3, order[..., None, None].expand(*V.shape, V.shape[-1]))


# -- eigh --------------------------------------------------------------------------------------------------------------


def projectors(V: Tensor) -> Tensor:
    """v_i v_i^H, which have no phase."""
    return V.mT.unsqueeze(-1) * V.mH.unsqueeze(-2)


@samples_for("aten::_linalg_eigh")
def eigh(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 4), (1, 1), (0, 2, 2), (0, 0)):
        yield Sample(
            random_definite(*shape, dtype=dtype, device=device) - 2 * torch.eye(shape[-1], dtype=dtype, device=device)
        )
    yield Sample(random_definite(3, 3, dtype=dtype, device=device), "U")
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device).mT)


@probe_for("aten::_linalg_eigh")
def eigh_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    L, V = torch.ops.aten._linalg_eigh(0.5 * sym(A), *args, **kwargs)
    return L, projectors(V)


# -- geqrf -------------------------------------------------------------------------------------------------------------


@samples_for("aten::geqrf")
def geqrf(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 4), (1, 1), (0, 3, 2)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))


@probe_for("aten::geqrf")
def geqrf_probe(A: Tensor) -> tuple[Tensor, Tensor]:
    return torch.geqrf(A)  # not the operator: opcheck needs a fake kernel, which PyTorch lacks


# -- householder -------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_householder_product")
def householder_product(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape, k in (((3, 3), 3), ((2, 4, 3), 2), ((4, 2), 2), ((2, 3, 1), 1), ((3, 2), 0)):
        yield Sample(
            random(*shape, dtype=dtype, device=device), random(*shape[:-2], k, dtype=dtype, device=device, seed=1)
        )


@samples_for("aten::ormqr")
def ormqr(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for left in (True, False):
        for transpose in (False, True):
            for *batch, q, k in ((3, 2), (2, 2, 3)):  # the second ignores a column
                reflectors = random(*batch, q, k, dtype=dtype, device=device)
                tau = random(*batch, min(q, k), dtype=dtype, device=device, seed=1)
                other = random(*batch, *((q, 2) if left else (2, q)), dtype=dtype, device=device, seed=2)
                yield Sample(reflectors, tau, other, left, transpose)


# -- inverse -----------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_inv_ex")
def inverse(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 2, 2), (1, 1), (0, 2, 2)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))


# -- lstsq -------------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_lstsq")
def lstsq(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(A: Sequence[int], B: Sequence[int], *args: Any, **kwargs: Any) -> Sample:
        first = random_conditioned(*A, dtype=dtype, device=device)
        return Sample(first, random(*B, dtype=dtype, device=device, seed=1), *args, **kwargs)

    # gelsy, the default on the CPU, takes single columns only: it starts from uninitialized pivots, so that where it
    # exchanges columns its values differ from call to call in the last bits
    drivers = ("gels", "gelsd", "gelss") if torch.device(device).type == "cpu" else ("gels",)
    for driver in drivers:
        yield sample((4, 2), (4, 3), driver=driver)
        yield sample((2, 3), (2, 2), driver=driver)
    yield sample((4, 1), (4, 2))
    yield sample((2, 3, 3), (2, 3, 1), driver=drivers[-1])
    yield sample((1, 3, 2), (2, 3, 2), 1e-3, driver=drivers[-1])
    if len(drivers) > 1:
        yield sample((3, 3), (3, 2), 0.6, driver="gelsd")  # drops the least of the singular values 1, 1.7 and 2.4
    yield sample((0, 3, 2), (0, 3, 1), driver=drivers[0])
    yield sample((0, 2), (0, 3))
    A = random_conditioned(2, 4, dtype=dtype, device=device).mT
    yield Sample(A, random(4, 1, dtype=dtype, device=device, seed=1), driver=drivers[0])


@probe_for("aten::linalg_lstsq")
def lstsq_probe(self: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    X, L, *_ = torch.ops.aten.linalg_lstsq(self, b, *args, **kwargs)
    return X, L


# -- lu ----------------------------------------------------------------------------------------------------------------


def _matrices(dtype: torch.dtype, device: torch.device | str) -> Iterable[Tensor]:
    for shape in ((3, 3), (2, 4, 2), (2, 2, 4), (2, 1, 3, 3), (1, 1), (0, 2, 2)):
        yield random(*shape, dtype=dtype, device=device, seed=3)
    yield random(3, 4, dtype=dtype, device=device, seed=4).mT


@samples_for("aten::linalg_lu", "aten::linalg_lu_factor_ex")
def lu(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    return map(Sample, _matrices(dtype, device))


@samples_for("aten::lu_unpack")
def lu_unpack(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for A in _matrices(dtype, device):
        yield Sample(*torch.linalg.lu_factor(A))


# -- lu solve ----------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_lu_solve")
def lu_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    LU, pivots = torch.linalg.lu_factor(random_conditioned(3, 3, dtype=dtype, device=device))
    for left in (True, False):
        for adjoint in (False, True):
            for r in (1, 3):
                B = random(*((3, r) if left else (r, 3)), dtype=dtype, device=device, seed=r)
                yield Sample(LU, pivots, B, left=left, adjoint=adjoint)
    yield Sample(LU, pivots, random(2, 3, 2, dtype=dtype, device=device))
    LU, pivots = torch.linalg.lu_factor(random_conditioned(2, 3, 3, dtype=dtype, device=device))
    yield Sample(LU, pivots, random(3, 1, dtype=dtype, device=device), adjoint=True)


# -- matmul ------------------------------------------------------------------------------------------------------------


@samples_for("aten::mm")
def mm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for m, k, n in ((2, 3, 4), (1, 1, 1), (2, 0, 3), (0, 2, 3)):
        yield Sample(random(m, k, dtype=dtype, device=device), random(k, n, dtype=dtype, device=device, seed=1))
    A, B = random(3, 2, dtype=dtype, device=device), random(4, 3, dtype=dtype, device=device, seed=1)
    yield Sample(A.mT, B.mT)


@samples_for("aten::addmm")
def addmm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    A, B = random(2, 3, dtype=dtype, device=device), random(3, 4, dtype=dtype, device=device, seed=1)
    numbers = (2, 0.5j - 1) if dtype.is_complex else (2, 0.5)
    bias = random(2, 4, dtype=dtype, device=device, seed=2)
    for broadcast in (bias, bias[0], bias[:, :1], bias[0, 0]):
        yield Sample(broadcast.clone(), A, B, beta=numbers[0], alpha=numbers[1])
    yield Sample(bias, A, B, beta=numbers[1])
    yield Sample(bias, A.mT.contiguous().mT, B.mT.contiguous().mT, beta=0)


@samples_for("aten::_trilinear")
def trilinear(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def sample(*shapes: Sequence[int], dims: Sequence[Sequence[int]], **more: int) -> Sample:
        factors = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]
        return Sample(*factors, *map(list, dims), **more)

    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]))  # bilinear
    yield sample((2, 3), (4, 3, 2), (2, 2), dims=([1, 3], [0], [1, 2], [2, 3]), unroll_dim=2)
    yield sample((2, 3), (2, 3), (2, 3), dims=([], [], [], []))
    yield sample((2,), (3,), (2, 3), dims=([1], [0], [], [0]))
    yield sample((3,), (3,), (3,), dims=([], [], [], [0]), unroll_dim=0)


@samples_for("aten::_grouped_mm")
def grouped_mm(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """In single precision, the highest that the operator takes; every row is a multiple of 16 bytes."""
    if dtype.is_complex:
        return
    offs = torch.tensor([4, 8], dtype=torch.int32, device=device)
    for first, second in (((8, 4), (2, 4, 4)), ((2, 4, 4), (4, 8)), ((4, 8), (8, 4)), ((2, 4, 4), (2, 4, 8))):
        A, B = (
            torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)
            for seed, shape in enumerate((first, second))
        )
        yield Sample(A, B, offs if min(A.dim(), B.dim()) == 2 else None)


@probe_for("aten::_grouped_mm")
def grouped_mm_probe(self: Tensor, mat2: Tensor, offs: Tensor | None) -> Tensor:
    """The operator on strides that it takes; in double precision, for finite differences, its definition."""
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


# -- matrix exp --------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_matrix_exp")
def matrix_exp(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield Sample(random(3, 3, dtype=dtype, device=device))
    yield Sample(2 * random(2, 2, 2, dtype=dtype, device=device).mT)
    small_and_large = torch.tensor([0.02, 2.0], dtype=dtype, device=device)[:, None, None]
    yield Sample(small_and_large * random(2, 6, 6, dtype=dtype, device=device))
    yield Sample(random(1, 1, dtype=dtype, device=device))
    yield Sample(random(2, 0, 0, dtype=dtype, device=device))
    yield Sample(torch.zeros(2, 2, dtype=dtype, device=device))


# -- matrix sqrth ------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_matrix_sqrth")
def matrix_sqrth(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    yield from _definite_samples(dtype, device)
    yield Sample(random_definite(2, 3, 3, dtype=dtype, device=device).mT)
    yield Sample(2 * torch.eye(3, dtype=dtype, device=device))


probe_for("aten::linalg_matrix_sqrth")(_hermitian("linalg_matrix_sqrth"))


# -- pinv --------------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_pinv.atol_rtol_tensor")
def pinv(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 4), (1, 1), (0, 3, 2), (3, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 3, 2, dtype=dtype, device=device).mT)
    tolerance = torch.tensor(1e-3, device=device, dtype=torch.float64)
    yield Sample(random_conditioned(3, 2, dtype=dtype, device=device), atol=tolerance, rtol=tolerance)
    A = random_conditioned(3, 3, dtype=dtype, device=device)  # singular values 1, 1.7 and 2.4
    yield Sample(A, atol=torch.tensor(1.3, device=device, dtype=torch.float64))
    yield Sample(A + A.mH, hermitian=True)


@probe_for("aten::linalg_pinv.atol_rtol_tensor")
def pinv_probe(self: Tensor, *, hermitian: bool = False, **tolerances: Any) -> Tensor:
    A = 0.5 * (self + self.mH) if hermitian else self
    return torch.ops.aten.linalg_pinv.atol_rtol_tensor(A, hermitian=hermitian, **tolerances)


# -- polar -------------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_polar")
def polar(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (1, 1), (0, 3, 2), (2, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, dtype=dtype, device=device).mT)
    for m in (2, 4):  # all singular values are equal
        yield Sample(2 * torch.linalg.qr(random(m, 2, dtype=dtype))[0].to(device))


# -- products ----------------------------------------------------------------------------------------------------------


def _samples(*shapes: Sequence[Sequence[int]]) -> Callable[..., Iterable[Sample]]:
    """Two factors, also transposed in memory, and empty."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        for sizes in shapes:
            yield Sample(*(random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(sizes)))
        factors = [random(*s[::-1], dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes[0])]
        yield Sample(*(x.permute(*range(x.dim() - 1, -1, -1)) for x in factors))

    return samples


def _added_samples(added: Sequence[int], *factors: Sequence[int]) -> Callable[..., Iterable[Sample]]:
    """A term that is added in its full shape and broadcast, with 0, 1 and other numbers."""

    def samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
        x = random(*added, dtype=dtype, device=device, seed=9)
        given: list[Any] = [random(*s, dtype=dtype, device=device, seed=i) for i, s in enumerate(factors)]
        other = 0.5j - 1 if dtype.is_complex else 0.5
        yield Sample(x, *given, beta=2, alpha=other)
        yield Sample(x[..., :1].clone(), *given, beta=other)
        yield Sample(x.reshape(-1)[0].clone(), *given, beta=0, alpha=other)

    return samples


_BATCHES = ((2, 2, 3), (2, 3, 2))


samples_for("aten::bmm")(_samples(_BATCHES, ((2, 1, 0), (2, 0, 2)), ((0, 2, 1), (0, 1, 2))))
samples_for("aten::baddbmm")(_added_samples((2, 2, 2), *_BATCHES))
samples_for("aten::addbmm")(_added_samples((2, 2), *_BATCHES))
samples_for("aten::mv")(_samples(((2, 3), (3,)), ((2, 0), (0,))))
samples_for("aten::addmv")(_added_samples((2,), (2, 3), (3,)))
samples_for("aten::addr")(_added_samples((2, 3), (2,), (3,)))
samples_for("aten::dot", "aten::vdot")(_samples(((3,), (3,)), ((0,), (0,))))


# -- qr ----------------------------------------------------------------------------------------------------------------


@samples_for("aten::linalg_qr")
def qr(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    # not with mode "r": under vmap torch's forward returns a Q that cannot be read
    for shape in ((3, 3), (2, 4, 2), (2, 4)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 3, dtype=dtype, device=device), "complete")
    yield Sample(random(3, 2, dtype=dtype, device=device).mT, "complete")
    yield Sample(random(0, 3, 2, dtype=dtype, device=device))


# -- solve -------------------------------------------------------------------------------------------------------------


@samples_for("aten::_linalg_solve_ex")
def solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def matrices(*shape: int) -> Tensor:
        return random_conditioned(*shape, dtype=dtype, device=device)

    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    yield Sample(matrices(3, 3), right(3, 2))
    yield Sample(matrices(3, 3).mT, right(2, 3), left=False)
    yield Sample(matrices(3, 3), right(3))
    yield Sample(matrices(2, 3, 3), right(2, 3))
    yield Sample(matrices(1, 3, 3), right(2, 3, 1))
    yield Sample(matrices(2, 1, 2, 2), right(1, 3, 2, 2), left=False)
    yield Sample(matrices(2, 0, 0), right(1, 0, 2))


@probe_for("aten::_linalg_solve_ex")
def solve_probe(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """The solution alone: LU and pivots depend on A, but are not differentiable outputs."""
    return torch.ops.aten._linalg_solve_ex(A, B, left=left)[0]


# -- svd ---------------------------------------------------------------------------------------------------------------


@samples_for("aten::_linalg_svd")
def svd(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for shape in ((3, 3), (2, 4, 2), (2, 3), (1, 1), (0, 3, 2), (2, 0)):
        yield Sample(random_conditioned(*shape, dtype=dtype, device=device))
    yield Sample(random_conditioned(2, 4, dtype=dtype, device=device).mT)
    yield Sample(random_conditioned(4, 2, dtype=dtype, device=device), True)
    yield Sample(random_conditioned(2, 2, 3, dtype=dtype, device=device), True)


@probe_for("aten::_linalg_svd")
def svd_probe(A: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Functions that do not depend on the phases: products of paired vectors, and projectors onto the complements."""
    U, S, Vh = torch.ops.aten._linalg_svd(A, *args, **kwargs)
    k = S.shape[-1]
    pairs = U[..., :k].mT.unsqueeze(-1) * Vh[..., :k, :].unsqueeze(-2)
    return S, pairs, U[..., k:] @ U[..., k:].mH, Vh[..., k:, :].mH @ Vh[..., k:, :]


# -- triangular --------------------------------------------------------------------------------------------------------


def _triangular(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Matrices whose triangles are both far from singular; each sample reads one."""
    X = random(*shape, dtype=dtype, seed=2)
    return (X + 2.0 * torch.diag_embed(X.diagonal(dim1=-2, dim2=-1).sgn())).to(device)


@samples_for("aten::linalg_solve_triangular")
def solve_triangular(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    def right(*shape: int) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=1)

    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        yield Sample(A, right(3, 2), upper=upper)
        yield Sample(A, right(1, 3), upper=upper, left=False, unitriangular=not upper)
    yield Sample(A, right(3, 1), upper=False, unitriangular=True)
    yield Sample(_triangular(2, 1, 3, 3, dtype=dtype, device=device), right(2, 3, 3), upper=True)
    yield Sample(A.mT, right(2, 3, 1), upper=False)
    yield Sample(_triangular(2, 0, 0, dtype=dtype, device=device), right(0, 2), upper=False)


@samples_for("aten::triangular_solve")
def triangular_solve(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    B = random(3, 2, dtype=dtype, device=device, seed=1)
    A = _triangular(3, 3, dtype=dtype, device=device)
    for upper in (True, False):
        for transpose in (True, False):
            yield Sample(B, A, upper, transpose, upper == transpose)
    yield Sample(B, _triangular(2, 3, 3, dtype=dtype, device=device))
    yield Sample(random(2, 3, 1, dtype=dtype, device=device), A, False, True)
