"""eigh_tridiagonal against its defining properties and against LAPACK."""

from __future__ import annotations

import pytest
import torch
from helpers.primal import REAL, eigh_tridiagonal, hermitian, same_bits
from test_primal import assert_eigh, bound, special
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random

pytestmark = pytest.mark.usefixtures("on_cpu")
SIZES = [0, 1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 127, 128]


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", SIZES)
def test_against_lapack(n, dtype):
    A = hermitian(random(3, n, n, dtype=dtype))
    L, V = eigh_tridiagonal(A)
    assert_eigh(A, L, V)
    size = A.abs().sum(-1).max().item() if n else 0
    torch.testing.assert_close(L, torch.linalg.eigvalsh(A), rtol=0, atol=bound(A) * size)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 40, 100])
def test_special_matrices(n, dtype):
    A = hermitian(special(n, n, dtype, "cpu"))
    assert_eigh(A, *eigh_tridiagonal(A))


@pytest.mark.parametrize("dtype", REAL)
def test_special_spectra(dtype):
    """Many equal values, blocks of very different sizes, no diagonal, what is tridiagonal or diagonal as it is."""
    n, info = 48, torch.finfo(dtype)
    Q = torch.linalg.qr(random(n, n, dtype=torch.float64)).Q
    beside = torch.diag_embed(torch.ones(n - 1, dtype=torch.float64), 1)
    sizes = torch.logspace(0, -30, n, dtype=torch.float64)
    A = torch.stack(
        [
            Q @ torch.diag(torch.arange(n).div(12, rounding_mode="floor").double()) @ Q.mT,
            Q[:, :1] @ Q[:, :1].mT + 1e-9 * torch.eye(n),
            Q @ torch.diag(sizes) @ Q.mT,
            beside + beside.mT,
            (beside + beside.mT) * sizes,
            beside + beside.mT + torch.diag((torch.arange(n) - n / 2).abs().double()),  # Wilkinson's, of close pairs
            torch.diag(sizes.flip(0)),
            torch.block_diag(Q[:24, :24], info.tiny**0.4 * Q[:24, :24]),
            torch.block_diag(Q[:24, :24], info.tiny**0.6 * Q[:24, :24]),
        ]
    )
    A = hermitian(A.tril() + A.tril(-1).mT).to(dtype)
    assert_eigh(A, *eigh_tridiagonal(A))
    assert_eigh(A.flip(-1, -2), *eigh_tridiagonal(A.flip(-1, -2)))


@pytest.mark.parametrize("dtype", REAL)
def test_strides_and_triangles(dtype):
    A = random(3, 20, 2, 20, dtype=dtype)
    for view in (
        A.transpose(1, 2),
        A.permute(2, 0, 3, 1),
        A[:1].expand(3, 20, 2, 20).transpose(1, 2),
        A[:, ::2, 0, 1::2],
    ):
        plain = view.clone(memory_format=torch.contiguous_format)
        for lower in (True, False):
            triangle = plain.tril() if lower else plain.triu()
            full = triangle + (plain.tril(-1) if lower else plain.triu(1)).mT
            other = torch.full_like(plain, torch.nan)
            given = triangle + (other.triu(1) if lower else other.tril(-1)).nan_to_num(1e30)
            expected = eigh_tridiagonal(full)
            assert_eigh(full, *expected)
            assert same_bits(eigh_tridiagonal(view, lower), expected)
            assert same_bits(eigh_tridiagonal(given, lower), expected)


@pytest.mark.parametrize("dtype", REAL)
def test_inf_and_nan_stay_in_their_matrix(dtype):
    A = hermitian(random(9, 33, 33, dtype=dtype))
    expected, broken = eigh_tridiagonal(A), A.clone()
    for at, value in ((1, torch.inf), (4, torch.nan), (8, -torch.inf)):
        broken[at, 30, 3 * at] = value
    whole = broken.isfinite().flatten(1).all(1)
    for x, y in zip(eigh_tridiagonal(broken), expected):
        assert x[~whole].isnan().all()
        assert same_bits((x[whole],), (y[whole],))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [13, 40])
def test_neither_batch_nor_threads_count(n, dtype):
    A = hermitian(random(30, n, n, dtype=dtype))
    whole = eigh_tridiagonal(A)
    assert same_bits(tuple(x[11] for x in whole), eigh_tridiagonal(A[11]))
    assert same_bits(tuple(x[5:22] for x in whole), eigh_tridiagonal(A[5:22]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same_bits(whole, eigh_tridiagonal(A))
    finally:
        torch.set_num_threads(threads)


def test_the_convention_for_signs():
    V = eigh_tridiagonal(hermitian(random(30, 20, 20, dtype=torch.float64)))[1]
    size = V.abs() / V.abs().amax(-2, keepdim=True)
    first = (size > 0.3703).int().argmax(-2, keepdim=True)
    near = ((size - 0.3703).abs() < 1e-3).any(-2)
    assert (V.gather(-2, first).squeeze(-2)[~near] > 0).all()


def test_where_it_is_used():
    """By functions of the package and by replacement forwards, where vectors are asked for."""
    A = hermitian(random(5, 40, 40, dtype=torch.float64))
    expected, stock = eigh_tridiagonal(A, False), torch.linalg.eigh(A)
    assert same_bits(mg.linalg.eigh(A, "U"), expected)
    values = torch.linalg.eigvalsh(A)
    complex_, large = A.to(torch.complex128), hermitian(random(129, 129, dtype=torch.float64))
    others = torch.linalg.eigh(complex_), torch.linalg.eigh(large)
    with mg.override("aten::_linalg_eigh", forward=True):
        assert same_bits(tuple(torch.linalg.eigh(A, UPLO="U")), expected)
        assert same_bits((torch.linalg.eigvalsh(A),), (values,))
        assert same_bits(tuple(torch.linalg.eigh(complex_)), others[0])
        assert same_bits(tuple(torch.linalg.eigh(large)), others[1])
    assert same_bits(tuple(torch.linalg.eigh(A)), stock)


@pytest.mark.parametrize("n", [20, 33])
def test_nan_is_as_in_pytorch(n):
    def outcome() -> list[Tensor] | str:
        try:
            return [x.isnan() for x in torch.linalg.eigh(torch.full((2, n, n), torch.nan))]
        except torch.linalg.LinAlgError as error:
            return str(error)

    expected = outcome()
    with mg.override("aten::_linalg_eigh", forward=True):
        found = outcome()
    assert type(found) is type(expected)
    assert found == expected if isinstance(found, str) else all(map(torch.equal, found, expected))


def test_gradients():
    A = hermitian(random(2, 20, 20, dtype=torch.float64)).requires_grad_()

    def loss(A: Tensor) -> Tensor:
        L, V = torch.linalg.eigh(A)
        return (V.mT.unsqueeze(-1) * V.mT.unsqueeze(-2) * L.sin().unsqueeze(-1).unsqueeze(-1)).cos().sum()

    (expected,) = torch.autograd.grad(loss(A), A)
    with mg.override("aten::_linalg_eigh", forward=True):
        torch.testing.assert_close(torch.autograd.grad(loss(A), A)[0], expected)


def test_unsupported_sizes_and_dtypes_raise():
    with pytest.raises(RuntimeError, match=r"eigh_tridiagonal: A: expected sizes up to 128 and 128, got 129 by 129"):
        eigh_tridiagonal(torch.zeros(129, 129))
    with pytest.raises(RuntimeError, match=r"eigh_tridiagonal: A: expected shape \(\*, n, n\) .* got \[2, 3\]"):
        eigh_tridiagonal(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="expected float32 or float64"):
        eigh_tridiagonal(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="got torch.float16"):
        eigh_tridiagonal(torch.zeros(2, 2, dtype=torch.float16))
