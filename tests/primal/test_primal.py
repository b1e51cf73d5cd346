"""svd_jacobi, eigh_jacobi and lu_small against their defining properties and against LAPACK, and where they are used."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad import testing
from torch_manualgrad.core import kernels
from torch_manualgrad.derivatives.linalg.common import random, random_conditioned
from torch_manualgrad.primal import eigh, lu, svd

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
REAL = [torch.float32, torch.float64]
LIBRARIES = {library.device: library for library in kernels.load()}
# Of norm(A), and of 1: this many eps for an (m, n) matrix. LAPACK itself needs a half of it.
BOUND = 4.0


@pytest.fixture
def on_cpu() -> None:
    if not LIBRARIES["cpu"].loaded:
        pytest.skip(LIBRARIES["cpu"].reason)


def svd_jacobi(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.manualgrad.svd_jacobi.default(A)


def eigh_jacobi(A: Tensor, lower: bool = True) -> tuple[Tensor, Tensor]:
    return torch.ops.manualgrad.eigh_jacobi.default(A, lower)


def lu_small(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.manualgrad.lu_small.default(A)


def wide(X: Tensor) -> Tensor:
    return X.to(torch.promote_types(X.dtype, torch.float64))


def bound(X: Tensor) -> float:
    return (4 + BOUND * max(X.shape[-2:])) * torch.finfo(X.dtype).eps


def assert_orthonormal(X: Tensor) -> None:
    """The columns."""
    error = wide(X).mH @ wide(X) - torch.eye(X.shape[-1], device=X.device)
    assert error.numel() == 0 or error.abs().max() <= bound(X)


def assert_product(A: Tensor, U: Tensor, S: Tensor, Vh: Tensor) -> None:
    """A = U diag(S) Vh, matrix by matrix, relative to the largest entry; safe for entries of any size."""
    if A.numel() == 0:
        return
    info = torch.finfo(A.dtype)
    size = wide(A).abs().amax((-2, -1), keepdim=True)
    size = torch.where(size == 0, 1, size)
    error = wide(A) / size - (wide(U) * (S.double().unsqueeze(-2) / size)) @ wide(Vh)
    # the largest entry is at least norm(A) / sqrt(m n), and S a multiple of the least denormal
    assert (error.abs() <= bound(A) * max(A.shape[-2:]) + info.tiny * info.eps / size).all()


def assert_svd(A: Tensor, U: Tensor, S: Tensor, Vh: Tensor) -> None:
    k = min(A.shape[-2:])
    assert (
        U.shape == (*A.shape[:-1], k) and S.shape == (*A.shape[:-2], k) and Vh.shape == (*A.shape[:-2], k, A.shape[-1])
    )
    assert U.dtype == Vh.dtype == A.dtype and S.dtype == A.dtype.to_real()
    assert all(x.is_contiguous() for x in (U, S, Vh))
    assert (S >= 0).all() and (S.diff() <= 0).all()
    assert_orthonormal(U)
    assert_orthonormal(Vh.mH)
    assert_product(A, U, S, Vh)


def assert_eigh(A: Tensor, L: Tensor, V: Tensor) -> None:
    assert L.shape == A.shape[:-1] and V.shape == A.shape
    assert V.dtype == A.dtype and L.dtype == A.dtype.to_real() and L.is_contiguous() and V.is_contiguous()
    assert (L.diff() >= 0).all()
    assert_orthonormal(V)
    assert_product(A, V, L, V.mH)


def hermitian(X: Tensor) -> Tensor:
    return (X + X.mH) / 2


def same_bits(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    def bits(x: Tensor) -> Tensor:
        x = torch.view_as_real(x) if x.is_complex() else x
        return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int64)

    return all(torch.equal(bits(x), bits(y)) for x, y in zip(left, right, strict=True))


# -- against LAPACK ---------------------------------------------------------------------------------------------------

SQUARE = [(n, n) for n in range(17)]
OTHERS = [(2, 1), (1, 5), (5, 2), (3, 7), (32, 16), (16, 32), (31, 3), (13, 11), (0, 3), (3, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n", SQUARE + OTHERS)
def test_svd(m, n, dtype, device):
    A = random(19, m, n, dtype=dtype, device=device)
    U, S, Vh = svd_jacobi(A)
    assert_svd(A, U, S, Vh)
    expected = torch.linalg.svdvals(A)
    torch.testing.assert_close(S, expected, rtol=0, atol=bound(A) * (expected.max().item() if S.numel() else 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", range(17))
def test_eigh(n, dtype, device):
    A = hermitian(random(19, n, n, dtype=dtype, device=device))
    L, V = eigh_jacobi(A)
    assert_eigh(A, L, V)
    expected = torch.linalg.eigvalsh(A)
    torch.testing.assert_close(L, expected, rtol=0, atol=bound(A) * (expected.abs().max().item() if L.numel() else 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n", [(n, n) for n in range(9)] + [(2, 1), (1, 5), (5, 2), (8, 3), (3, 8), (0, 3), (3, 0)])
def test_lu(m, n, dtype, device):
    eps = torch.finfo(dtype).eps
    # ties and zero pivots; after three columns rounding errors, which LAPACK makes in another order, decide on ties
    integers = torch.randint(-1, 2, (37, m, n), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for A, as_lapack in ((random(37, m, n, dtype=dtype, device=device), True), (integers, min(m, n) <= 3)):
        P, L, U = lu_small(A)
        expected = torch.linalg.lu(A)
        assert all(x.is_contiguous() and x.shape == y.shape for x, y in zip((P, L, U), expected))
        torch.testing.assert_close(P @ L @ U, A, rtol=0, atol=bound(A))
        assert torch.equal(P @ P.mT, torch.eye(m, dtype=dtype, device=device).expand_as(P))
        assert torch.equal(L, L.tril(-1) + torch.eye(*L.shape[-2:], dtype=dtype, device=device))
        assert torch.equal(U, U.triu())
        largest = 2**0.5 if dtype.is_complex else 1  # a complex pivot is that of the largest |re| + |im|
        assert (L.abs() <= largest * (1 + 4 * eps)).all()
        if as_lapack:
            torch.testing.assert_close(P, expected.P, rtol=0, atol=0)
            torch.testing.assert_close(L, expected.L, rtol=0, atol=100 * eps)
            torch.testing.assert_close(U, expected.U, rtol=0, atol=100 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype, device):
    A = random(5, 4, 6, 3, dtype=dtype, device=device)
    for view in (
        A.mT,
        A.transpose(0, 1),
        A[::2, :, 1:, ::2],
        A[:1].expand(3, 4, 6, 3),
        A.mH,
        A[..., :1],
        A.permute(2, 0, 1, 3),
    ):
        plain = view.clone(memory_format=torch.contiguous_format)
        assert same_bits(svd_jacobi(view), svd_jacobi(plain))
        assert same_bits(lu_small(view), lu_small(plain))
        square = view[..., :1, :1] if 1 in view.shape[-2:] else view[..., :2, :2]
        for lower in (True, False):
            assert same_bits(eigh_jacobi(square, lower), eigh_jacobi(square.contiguous(), lower))


def test_no_matrices(device):
    for shape in ((0, 3, 3), (2, 0, 4, 4), (0, 0)):
        A = torch.empty(shape, device=device)
        assert_svd(A, *svd_jacobi(A))
        assert_eigh(A, *eigh_jacobi(A))
        assert [x.shape for x in lu_small(A)] == [A.shape] * 3


def test_one_triangle_is_read(device):
    A = random(7, 5, 5, dtype=torch.complex128, device=device)
    for lower in (True, False):
        triangle = A.tril() if lower else A.triu()
        other = torch.full_like(A, torch.nan)
        mask = torch.ones(5, 5, dtype=torch.bool, device=device)
        mask = mask.tril() if lower else mask.triu()
        strict = triangle - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))
        full = strict + strict.mH + torch.diag_embed(A.diagonal(dim1=-2, dim2=-1).real).to(A.dtype)
        found = eigh_jacobi(torch.where(mask, A, other), lower)
        assert_eigh(full, *found)
        assert same_bits(found, eigh_jacobi(full, lower))


# -- special matrices -------------------------------------------------------------------------------------------------


def special(m: int, n: int, dtype: torch.dtype, device: str) -> Tensor:
    """Ranks 0, 1, k - 1; repeated values; rows, columns and entries of very different sizes."""
    info = torch.finfo(dtype)
    k = min(m, n)
    A = random(m, n, dtype=dtype, device=device, seed=1)
    column, row = A[:, :1], A[:1]
    graded = torch.logspace(0, -0.45 * math.log10(info.max), max(m, n), dtype=torch.float64, device=device)
    graded = graded.to(dtype)
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    twice = (U * S[::2].repeat_interleave(2)[:k].to(dtype)) @ Vh
    return torch.stack(
        [
            torch.zeros_like(A),
            torch.ones_like(A),
            torch.eye(m, n, dtype=dtype, device=device),
            -torch.eye(m, n, dtype=dtype, device=device).flip(1),
            column @ row,
            A - column @ (row / row[:, :1]) * A[0, 0] / column[0],
            torch.cat([A[:, :-1], A[:, :1]], 1),
            torch.cat([A[:, :-1], torch.zeros_like(column)], 1),
            torch.cat([torch.zeros_like(row), A[1:]], 0),
            twice,
            A * graded[:n],
            A * graded[:m, None],
            A * graded[:n].flip(0) * graded[:m, None],
            A.tril(),
            torch.diag_embed(graded[:k]).new_zeros(m, n) + torch.nn.functional.pad(graded[:k].diag(), (0, n - k, 0, m - k)),
            A * info.tiny,
            A * (info.tiny * 2.0**-10),
            A * (0.1 * info.max ** 0.5) * info.max ** 0.45,
            A * (1 + torch.arange(n, device=device) % 2 * 1e-9).to(dtype),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n", [(1, 1), (2, 2), (3, 3), (4, 4), (7, 7), (12, 12), (16, 16), (6, 3), (3, 6), (32, 16)])
def test_special_svd(m, n, dtype, device):
    A = special(m, n, dtype, device)
    found = svd_jacobi(A)
    assert_svd(A, *found)
    assert (found[1][0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 12, 16])
def test_special_eigh(n, dtype, device):
    A = hermitian(special(n, n, dtype, device))
    assert_eigh(A, *eigh_jacobi(A))


@pytest.mark.parametrize("dtype", REAL)
def test_small_singular_values_are_exact(dtype, device):
    """Those of a matrix with columns of very different sizes have relative accuracy; LAPACK loses them in the largest."""
    n, eps = 6, torch.finfo(dtype).eps
    A = random_conditioned(n, n, dtype=torch.float64) * torch.logspace(0, -1.5 * n, n, 10, dtype=torch.float64)
    A = A.to(dtype)
    S = svd_jacobi(A.to(device))[1].cpu().double()
    # the product of the singular values, by an elimination without cancellation: QR has columnwise relative accuracy
    exact = torch.linalg.qr(A.double()).R.diagonal().abs().prod()
    assert abs(S.prod() / exact - 1) < 200 * eps
    if dtype == torch.float32:
        expected = svd_jacobi(A.double().to(device))[1].cpu()
        assert ((S - expected) / expected).abs().max() < 100 * eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 16])
def test_inf_and_nan_stay_in_their_matrix(n, dtype, device):
    clean = random(40, n, n, dtype=dtype, device=device)
    values = [torch.inf, -torch.inf, torch.nan] + (
        [complex(0, torch.inf), complex(1, torch.nan)] if dtype.is_complex else []
    )
    broken, places = clean.clone(), list(range(1, 40, 3))
    for at, value in zip(places, itertools.cycle(values)):
        broken[at, n - 1, 0] = value
    whole = torch.tensor([i not in places for i in range(40)], device=device)
    # what eigh reads of a diagonal is its real part
    for decompose in (svd_jacobi, eigh_jacobi) if n > 1 or not dtype.is_complex else (svd_jacobi,):
        for x, y in zip(decompose(broken), decompose(clean)):
            assert x[~whole].isnan().all()
            assert same_bits((x[whole],), (y[whole],))
    if n <= 8:
        P, L, U = lu_small(broken)
        assert not (P[~whole] @ L[~whole] @ U[~whole]).isfinite().flatten(1).all(1).any()
        assert ((P == 0) | (P == 1)).all() and (P.abs().sum(-1) == 1).all() and (P.abs().sum(-2) == 1).all()
        assert all(same_bits((x[whole],), (y[whole],)) for x, y in zip((P, L, U), lu_small(clean)))
        expected = torch.linalg.lu(torch.full((n, n), torch.nan, dtype=dtype))
        assert torch.equal(lu_small(torch.full((n, n), torch.nan, dtype=dtype, device=device))[0].cpu(), expected.P)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
def test_neither_batch_nor_threads_count(n, dtype, device):
    """Bitwise identical: as one matrix, in a batch, at any position, shared by threads or not."""
    A = torch.cat([special(n, n, dtype, device), random(58, n, n, dtype=dtype, device=device)])
    for decompose in (svd_jacobi, eigh_jacobi, *([lu_small] if n <= 8 else [])):
        whole = decompose(A)
        for at in (0, 3, 10, 12, 30, 76):
            assert same_bits(tuple(x[at] for x in whole), decompose(A[at]))
        order = torch.randperm(len(A), generator=torch.Generator().manual_seed(2)).to(device)
        assert same_bits(tuple(x[order] for x in whole), decompose(A[order]))
        assert same_bits(tuple(x[5:22] for x in whole), decompose(A[5:22]))
        many = A.repeat(40, 1, 1)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            assert same_bits(tuple(x.repeat(40, *[1] * (x.dim() - 1)) for x in whole), decompose(many))
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convention_for_signs_and_phases(dtype, device):
    A = random(30, 4, 4, dtype=dtype, device=device)
    for vectors in (svd_jacobi(A)[2].mH, svd_jacobi(A[:, :2])[2].mH, svd_jacobi(A[..., :2])[2].mH, eigh_jacobi(A)[1]):
        size = vectors.abs()
        first = (size > 0.371 * size.amax(-2, keepdim=True)).int().argmax(-2, keepdim=True)
        near = ((size / size.amax(-2, keepdim=True) - 0.3703).abs() < 1e-3).any(-2)
        chosen = vectors.gather(-2, first).squeeze(-2)[~near]
        assert (chosen.real > 0).all()
        assert not dtype.is_complex or chosen.imag.abs().max() < 1e-6


def test_what_is_too_large_or_of_another_dtype(device):
    with pytest.raises(RuntimeError, match=r"svd_jacobi: A: expected sizes up to 16 and 32, got 17 by 17"):
        svd_jacobi(torch.zeros(17, 17, device=device))
    with pytest.raises(RuntimeError, match=r"svd_jacobi: A: expected sizes up to 16 and 32, got 2 by 33"):
        svd_jacobi(torch.zeros(2, 33, device=device))
    with pytest.raises(RuntimeError, match=r"eigh_jacobi: A: expected square matrices, got 2 by 3"):
        eigh_jacobi(torch.zeros(2, 3, device=device))
    with pytest.raises(RuntimeError, match=r"lu_small: A: expected sizes up to 8 and 8, got 9 by 1"):
        lu_small(torch.zeros(9, 1, device=device))
    with pytest.raises(RuntimeError, match=r"expected float32, float64, complex64 or complex128, got torch.float16"):
        svd_jacobi(torch.zeros(2, 2, dtype=torch.float16, device=device))
    with pytest.raises(RuntimeError, match="expected matrices, got 1 dims"):
        svd_jacobi(torch.zeros(2, device=device))


# -- under override(forward=True) -------------------------------------------------------------------------------------

NAMES = ("aten::_linalg_svd", "aten::_linalg_eigh", "aten::linalg_lu")


def calls(A: Tensor) -> list[tuple[Tensor, ...]]:
    H = hermitian(A)
    return [tuple(torch.linalg.svd(A)), tuple(torch.linalg.eigh(H)), tuple(torch.linalg.lu(A))]


def ours(A: Tensor) -> list[tuple[Tensor, ...]]:
    return [svd_jacobi(A), eigh_jacobi(hermitian(A)), lu_small(A)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_override_uses_them_only_when_told_to(on_cpu, dtype):
    A = random(6, 3, 3, dtype=dtype)
    stock = calls(A)
    assert not same_bits(stock[0], ours(A)[0])
    with mg.override(*NAMES):
        assert all(map(same_bits, calls(A), stock))
        assert all(map(same_bits, [tuple(x.detach() for x in c) for c in calls(A.clone().requires_grad_())], stock))
    with mg.override(*NAMES, forward=True):
        for found in (
            calls(A),
            [tuple(x.detach() for x in c) for c in calls(A.clone().requires_grad_())],
            vmap(calls)(A),
            vmap(vmap(calls, in_dims=1), in_dims=3)(A.reshape(2, 3, 3, 3).permute(2, 1, 3, 0)),
            jvp(lambda A: tuple(calls(A)), (A,), (A,))[0],
        ):
            found = [tuple(x.reshape(y.shape) for x, y in zip(c, d)) for c, d in zip(found, ours(A))]
            assert all(map(same_bits, found, ours(A)))
        assert same_bits((torch.linalg.svdvals(A),), (ours(A)[0][1],))
        assert same_bits((torch.linalg.eigvalsh(hermitian(A)),), (ours(A)[1][0],))
    assert all(map(same_bits, calls(A), stock))


def test_what_is_not_served_is_pytorchs(on_cpu):
    """Other sizes, full factors, half precision."""
    for A in (
        random(2, 17, 17, dtype=torch.float64),
        random(2, 9, 9, dtype=torch.complex128),
        random(2, 40, 3, dtype=torch.float64),
    ):
        stock = torch.linalg.svd(A, full_matrices=False)
        with mg.override("aten::_linalg_svd", forward=True):
            assert same_bits(torch.linalg.svd(A, full_matrices=False), stock)
    A = random(2, 4, 3, dtype=torch.float64)
    stock = torch.linalg.svd(A)
    with mg.override(*NAMES, forward=True):
        assert same_bits(torch.linalg.svd(A), stock)
        assert same_bits(torch.linalg.svd(A, full_matrices=False), svd_jacobi(A))
        with pytest.raises(RuntimeError, match="UPLO"):
            torch.linalg.eigh(A[..., :3, :], UPLO="X")
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.eigh(A)
        with pytest.raises(RuntimeError, match="pivoting"):
            torch.linalg.lu(A, pivot=False)
        with pytest.raises(RuntimeError):
            torch.linalg.svd(A.half())
        assert same_bits(torch.linalg.eigh(hermitian(A[:, :3]), UPLO="u"), eigh_jacobi(hermitian(A[:, :3]), False))


def pairs(A: Tensor) -> Tensor:
    """Without phases."""
    U, S, Vh = torch.linalg.svd(A, full_matrices=False)
    return U.mT.unsqueeze(-1) * Vh.unsqueeze(-2) * S.sqrt().unsqueeze(-1).unsqueeze(-1)


def projectors(A: Tensor) -> Tensor:
    L, V = torch.linalg.eigh(hermitian(A))
    return V.mT.unsqueeze(-1) * V.mH.unsqueeze(-2) * L.unsqueeze(-1).unsqueeze(-1)


def factors(A: Tensor) -> tuple[Tensor, Tensor]:
    _, L, U = torch.linalg.lu(A)
    return L, U


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (2, 3, 4)])
@pytest.mark.parametrize("name, function", [(NAMES[0], pairs), (NAMES[1], projectors), (NAMES[2], factors)])
def test_derivatives_in_six_modes(on_cpu, name, function, shape, dtype):
    if function is projectors and shape[-1] != shape[-2]:
        return
    A = random_conditioned(*shape, dtype=dtype)
    with mg.override(name, forward=True):
        testing.check(function, [(A,)])


@pytest.mark.parametrize("call", [pairs, projectors, lambda A: torch.linalg.lu(A).U])
def test_transforms(on_cpu, call):
    A = random_conditioned(4, 3, 3, dtype=torch.float64)
    derivative = grad(lambda A: call(A).real.sin().sum())
    with mg.override(*NAMES, forward=True):
        found = vmap(derivative)(A)
        torch.testing.assert_close(found, torch.stack([derivative(a) for a in A]))
        torch.testing.assert_close(found, derivative(A))
    torch.testing.assert_close(found, derivative(A))


def test_compiled(on_cpu):
    A = random_conditioned(4, 3, 3, dtype=torch.float64).requires_grad_()

    def f(A: Tensor) -> Tensor:
        return pairs(A).sin().sum() + torch.linalg.lu(A).U.sum()

    with mg.override(*NAMES, forward=True):
        expected = torch.autograd.grad(f(A), A)[0]
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)(A)
        torch.testing.assert_close(torch.autograd.grad(compiled, A)[0], expected)


# -- as operators, and in mg.linalg -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, args",
    [(svd.svd_jacobi, ()), (eigh.eigh_jacobi, (True,)), (eigh.eigh_jacobi, (False,)), (lu.lu_small, ())],
)
def test_operators_have_derivatives_of_their_own(op, args):
    A = random_conditioned(2, 3, 3, dtype=torch.float64)

    def f(A: Tensor) -> tuple[Tensor, ...]:
        return op(hermitian(A) if op is eigh.eigh_jacobi else A, *args)

    testing.check(f, [(A,)])
    torch.library.opcheck(op.op, (A, *args), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_functions_of_the_package(on_cpu, dtype):
    A = random(5, 4, 4, dtype=dtype)
    assert same_bits(mg.linalg.svd(A), svd_jacobi(A))
    assert same_bits(mg.linalg.svd(A[..., :3], full_matrices=False), svd_jacobi(A[..., :3]))
    assert same_bits(mg.linalg.svd(A[..., :3]), torch.linalg.svd(A[..., :3]))
    assert same_bits(mg.linalg.eigh(A, "U"), eigh_jacobi(A, False))
    assert same_bits(mg.linalg.lu(A), lu_small(A))


def outcome(function, A):
    """The error's type and message, or where each result is nan."""
    try:
        found = function(A)
    except RuntimeError as error:
        return type(error), str(error)
    return [x.isnan() for x in ((found,) if isinstance(found, Tensor) else found)]


STOCK_AND_OURS = [
    (torch.linalg.svd, mg.linalg.svd),
    (lambda A: torch.linalg.svd(A, full_matrices=False), lambda A: mg.linalg.svd(A, False)),
    (torch.linalg.svdvals, lambda A: torch.linalg.svdvals(A)),
    (torch.linalg.eigh, mg.linalg.eigh),
    (lambda A: torch.linalg.eigh(A, UPLO="U"), lambda A: mg.linalg.eigh(A, "U")),
    (torch.linalg.eigvalsh, lambda A: torch.linalg.eigvalsh(A)),
    (torch.linalg.lu, mg.linalg.lu),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pair", range(len(STOCK_AND_OURS)))
def test_what_is_not_finite_is_as_in_pytorch(on_cpu, pair, value, dtype):
    """The same error, or nan in the same places, by the functions of the package and by replacement forwards."""
    stock, ours = STOCK_AND_OURS[pair]
    for batch, place in itertools.product([(), (3,)], [(0, 0), (2, 1), (1, 2), (2, 2)]):
        A = random(*batch, 3, 3, dtype=dtype)
        A = A @ A.mH
        A[(1, *place) if batch else place] = value
        expected = outcome(stock, A)
        found = [outcome(ours, A)]
        with mg.override(forward=True):
            found.append(outcome(stock, A))
        for one in found:
            assert type(one) is type(expected)
            if isinstance(expected, tuple):
                assert one == expected
            else:
                torch.testing.assert_close(one, expected)


def test_nan_in_a_graph_and_under_vmap(on_cpu):
    A = torch.full((2, 3, 3), torch.nan)
    torch.compiler.reset()
    with mg.override(*NAMES, forward=True):
        compiled = torch.compile(lambda A: torch.linalg.eigh(A).eigenvalues, backend="aot_eager", fullgraph=True)
        for call in (lambda: compiled(A), lambda: vmap(torch.linalg.svdvals)(A), lambda: vmap(mg.linalg.eigh)(A)):
            with pytest.raises(torch.linalg.LinAlgError, match="failed to converge"):
                call()
