"""svd_jacobi, eigh_jacobi and lu_small against their defining properties and against LAPACK."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.primal import DTYPES, REAL, eigh_jacobi, hermitian, lu_small, same_bits, svd_jacobi
from torch import Tensor

from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned

# Of norm(A), and of 1: this many eps for an (m, n) matrix. LAPACK itself needs a half of it.
BOUND = 4.0


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
        # cuBLAS chooses the pivots of a batch of complex or singular matrices by another rule
        expected = torch.linalg.lu(A.cpu())
        assert all(x.is_contiguous() and x.shape == y.shape for x, y in zip((P, L, U), expected))
        torch.testing.assert_close(P @ L @ U, A, rtol=0, atol=bound(A))
        assert torch.equal(P @ P.mT, torch.eye(m, dtype=dtype, device=device).expand_as(P))
        assert torch.equal(L, L.tril(-1) + torch.eye(*L.shape[-2:], dtype=dtype, device=device))
        assert torch.equal(U, U.triu())
        largest = 2**0.5 if dtype.is_complex else 1  # a complex pivot is that of the largest |re| + |im|
        assert (L.abs() <= largest * (1 + 4 * eps)).all()
        if as_lapack:
            torch.testing.assert_close(P.cpu(), expected.P, rtol=0, atol=0)
            torch.testing.assert_close(L.cpu(), expected.L, rtol=0, atol=100 * eps)
            torch.testing.assert_close(U.cpu(), expected.U, rtol=0, atol=100 * eps)


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


def test_unsupported_sizes_and_dtypes_raise(device):
    with pytest.raises(RuntimeError, match=r"svd_jacobi: A: expected sizes up to 16 and 32, got 17 by 17"):
        svd_jacobi(torch.zeros(17, 17, device=device))
    with pytest.raises(RuntimeError, match=r"svd_jacobi: A: expected sizes up to 16 and 32, got 2 by 33"):
        svd_jacobi(torch.zeros(2, 33, device=device))
    with pytest.raises(RuntimeError, match=r"eigh_jacobi: A: expected shape \(\*, n, n\) .* got \[2, 3\]"):
        eigh_jacobi(torch.zeros(2, 3, device=device))
    with pytest.raises(RuntimeError, match=r"lu_small: A: expected sizes up to 8 and 8, got 9 by 1"):
        lu_small(torch.zeros(9, 1, device=device))
    with pytest.raises(RuntimeError, match=r"expected float32, float64, complex64 or complex128, got torch.float16"):
        svd_jacobi(torch.zeros(2, 2, dtype=torch.float16, device=device))
    with pytest.raises(RuntimeError, match=r"svd_jacobi: A: expected shape \(\*, m, n\), got \[2\]"):
        svd_jacobi(torch.zeros(2, device=device))
