"""cholesky_factor against its defining properties and against LAPACK, and where it is used."""

from __future__ import annotations

import pytest
import torch
from helpers.primal import DTYPES, REAL, cholesky_factor, outcomes, same_bits
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad import testing
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.derivatives.samples.drawing import random
from torch_manualgrad.primal import cholesky

pytestmark = pytest.mark.usefixtures("on_cpu")
NAME = "aten::linalg_cholesky_ex"
SIZES = [0, 1, 2, 3, 7, 8, 12, 13, 16, 17, 31, 32, 33, 63, 64, 65, 130]
UPPER = pytest.mark.parametrize("upper", [False, True])


def definite(*sizes: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    X = random(*sizes, sizes[-1], dtype=dtype, seed=seed)
    A = X @ X.mH / max(sizes[-1], 1) + torch.eye(sizes[-1], dtype=dtype)
    return (A + A.mH) / 2


def one_triangle(A: Tensor, upper: bool) -> Tensor:
    """A with nan in the triangle that is not read, and an imaginary diagonal, which is not read either."""
    mask = torch.ones(A.shape[-2:], dtype=torch.bool)
    A = A.masked_fill(mask.tril(-1) if upper else mask.triu(1), torch.nan)
    return A + 3j * torch.eye(A.shape[-1], dtype=A.dtype) if A.is_complex() else A


def assert_factors(A: Tensor, L: Tensor, info: Tensor, upper: bool) -> None:
    n, eps = A.shape[-1], torch.finfo(A.dtype).eps
    assert L.shape == A.shape and info.shape == A.shape[:-2] and L.dtype == A.dtype and info.dtype == torch.int32
    assert L.mT.is_contiguous() and info.is_contiguous() and not info.any()
    assert torch.equal(L, L.triu() if upper else L.tril())
    diagonal = L.diagonal(dim1=-2, dim2=-1)
    assert (diagonal.real > 0).all() and not (diagonal.is_complex() and diagonal.imag.any())
    L = (L.mH if upper else L).to(torch.promote_types(A.dtype, torch.float64))
    assert ((L @ L.mH - A).abs() <= 2 * (n + 1) * eps * (L.abs() @ L.abs().mT)).all()


@UPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("batch", [1, 3, 19])
def test_the_product_of_the_factors(batch, n, dtype, upper):
    if dtype.is_complex and n > 32:
        return
    A = definite(batch, n, dtype=dtype)
    found = cholesky_factor(one_triangle(A, upper), upper)
    assert_factors(A, *found, upper)
    torch.testing.assert_close(found[0], torch.linalg.cholesky(A, upper=upper))


@pytest.mark.parametrize("n", [200, 255, 256])
@pytest.mark.parametrize("dtype", REAL)
def test_the_largest(n, dtype):
    A = definite(n, dtype=dtype)
    assert_factors(A, *cholesky_factor(A), False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 20])
def test_entries_of_any_size(n, dtype):
    A, info = definite(9, n, dtype=dtype), torch.finfo(dtype)
    for scale in (info.tiny * 2**10, info.max / 2**4):
        root = scale**0.5
        torch.testing.assert_close(cholesky_factor(A * scale)[0] / root, torch.linalg.cholesky(A))
    graded = torch.logspace(0, -100 if info.bits == 64 else -12, n, 10.0, dtype=dtype)  # rows of very different sizes
    found = cholesky_factor(A * graded[:, None] * graded)[0] / graded[:, None]
    torch.testing.assert_close(found, torch.linalg.cholesky(A))


@UPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 12, 13, 30])
def test_the_first_minor_that_is_not_positive(n, dtype, upper):
    A = definite(30, n, dtype=dtype)
    for at in range(20):
        A[at, at % n, at % n] = (0.0, -1.0, -torch.inf, torch.nan)[at // n % 4]
    expected = torch.linalg.cholesky_ex(A, upper=upper)
    L, info = cholesky_factor(A, upper)
    assert torch.equal(info, expected.info)
    torch.testing.assert_close(L[20:], expected.L[20:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 25])
def test_inf_and_nan_stay_in_their_matrix(n, dtype):
    A = definite(9, n, dtype=dtype)
    expected, broken = cholesky_factor(A), A.clone()
    for at, value in ((1, torch.inf), (4, torch.nan), (8, -torch.inf)):
        broken[at, n - 1, at % 5] = value
    whole = broken.isfinite().flatten(1).all(1)
    found = cholesky_factor(broken)
    assert torch.equal(found[1] == 0, whole)
    assert same_bits(tuple(x[whole] for x in found), tuple(x[whole] for x in expected))
    infinite = torch.eye(n, dtype=dtype)
    infinite[0, 0] = torch.inf
    assert cholesky_factor(infinite)[1].item() != 0


@UPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 20])
def test_strides(n, dtype, upper):
    A = definite(5, 4, n, dtype=dtype)
    for given in (
        A.mT,
        A.mH,
        A.transpose(0, 1),
        A[:1].expand(5, 4, n, n),
        A.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1),
        torch.stack([A, A], -1)[..., 1],
    ):
        assert same_bits(cholesky_factor(given, upper), cholesky_factor(given.contiguous(), upper))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 13, 40])
def test_neither_batch_nor_threads_count(n, dtype):
    if dtype.is_complex and n > 32:
        return
    A = definite(40, n, dtype=dtype)
    whole = cholesky_factor(A)
    assert same_bits(tuple(x[11:12] for x in whole), cholesky_factor(A[11:12]))
    assert same_bits(tuple(x[5:22] for x in whole), cholesky_factor(A[5:22]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same_bits(whole, cholesky_factor(A))
    finally:
        torch.set_num_threads(threads)


def test_unsupported_arguments_raise():
    for A, message in (
        (torch.zeros(257, 257), "A: expected sides up to 256, got 257 by 257"),
        (torch.zeros(33, 33, dtype=torch.complex64), "A: expected sides up to 32, got 33 by 33"),
        (torch.zeros(2, 3), r"A: .*got \[2, 3\]"),
        (torch.zeros(3), r"A: .*got .*3"),
        (torch.zeros(2, 2, dtype=torch.float16), ".*got torch.float16"),
    ):
        with pytest.raises(RuntimeError, match=f"cholesky_factor: {message}"):
            cholesky_factor(A)


# -- where it is used -------------------------------------------------------------------------------------------------


@UPPER
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_where_it_is_used(dtype, upper):
    """Under forward=True, for batches of some size."""
    A = definite(700, 10, dtype=dtype)
    expected, stock = cholesky_factor(A, upper)[0], torch.linalg.cholesky(A, upper=upper)
    assert not same_bits((expected,), (stock,)) and expected.stride() == stock.stride()
    calls = [
        lambda: torch.linalg.cholesky(A, upper=upper),
        lambda: torch.linalg.cholesky_ex(A, upper=upper).L,
        lambda: torch.linalg.cholesky(A.clone().requires_grad_(), upper=upper).detach(),
        lambda: jvp(lambda A: torch.linalg.cholesky(A, upper=upper), (A,), (A,))[0],
    ]
    with mg.override(NAME):
        assert all(same_bits((call(),), (stock,)) for call in calls)
    with mg.override(NAME, forward=True):
        assert all(same_bits((call(),), (expected,)) for call in calls)


@pytest.mark.parametrize("batch, plain", [(1, 1), (700, 0)])
def test_what_is_left_to_pytorch_needs_no_python(batch, plain):
    if compiled_calls.calls_library is None:
        pytest.skip("no library of calls")
    A = definite(batch, 10, dtype=torch.float64).requires_grad_()
    with mg.override(NAME, forward=True):
        before = compiled_calls.counts().plain
        torch.linalg.cholesky(A)
        assert compiled_calls.counts().plain - before == plain


def test_what_is_left_to_pytorch():
    """Few or large matrices; and the errors of bad arguments."""
    calls = [
        definite(3, dtype=torch.float64),
        definite(20, 10, dtype=torch.float64),
        definite(257, dtype=torch.float32),
        definite(60, 40, dtype=torch.complex128),
    ]
    expected = [torch.linalg.cholesky(A) for A in calls]
    with mg.override(NAME, forward=True):
        assert same_bits(tuple(map(torch.linalg.cholesky, calls)), tuple(expected))
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.cholesky(torch.zeros(700, 10, 11))
        with pytest.raises(RuntimeError, match="Half|float16|low precision"):
            torch.linalg.cholesky(torch.zeros(700, 10, 10, dtype=torch.float16))


@UPPER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
def test_matrices_that_have_no_factor_are_as_in_pytorch(value, dtype, upper):
    A = definite(700, 10, dtype=dtype)
    A[7, 5, 5] = value

    calls = [lambda f=f: f(A, upper=upper) for f in (torch.linalg.cholesky, torch.linalg.cholesky_ex)]
    expected = outcomes(calls)
    with mg.override(NAME, forward=True):
        found = outcomes(calls)
    torch.testing.assert_close(found, expected)


@UPPER
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_in_six_modes(monkeypatch, dtype, upper):
    monkeypatch.setattr(cholesky, "_LEFT", cholesky._LEFT._replace(entries=0))
    A = definite(2, 3, dtype=dtype)
    with compiled_calls.in_python(), mg.override(NAME, forward=True):
        testing.check(lambda A: torch.linalg.cholesky((A + A.mH) / 2, upper=upper), [(A,)])


def test_transforms_and_compilation():
    A = definite(700, 10, dtype=torch.float64)

    def f(A: Tensor) -> Tensor:
        return torch.linalg.cholesky(A).sin().sum()

    expected = grad(f)(A)
    with mg.override(NAME):
        second = hessian(f)(A[0])  # PyTorch's is not symmetric
    with mg.override(NAME, forward=True):
        torch.testing.assert_close(grad(f)(A), expected)
        torch.testing.assert_close(vmap(grad(f))(A), expected)
        torch.testing.assert_close(hessian(f)(A[0]), second)
        for backend in ("aot_eager", "manualgrad"):
            torch.compiler.reset()
            x = A.clone().requires_grad_()
            compiled = torch.compile(f, backend=backend, fullgraph=True)(x)
            torch.testing.assert_close(torch.autograd.grad(compiled, x)[0], expected)


def test_series():
    A = definite(700, 10, dtype=torch.float64)

    def series() -> list[Tensor]:
        value, coefficients = mg.forward_ad.jet(torch.linalg.cholesky, (A,), ((A, A.mT @ A, A),))
        return [value, *coefficients]

    expected = series()
    with mg.override(NAME, forward=True):
        torch.testing.assert_close(series(), expected)


@UPPER
def test_operators_have_derivatives_of_their_own(upper):
    A = definite(2, 3, dtype=torch.float64)
    for op, rest in ((torch.ops.manualgrad.cholesky_factor, ()), (torch.ops.manualgrad.cholesky_small, (True,))):
        testing.check(lambda A, op=op, rest=rest: op((A + A.mT) / 2, upper, *rest)[0], [(A,)])
        torch.library.opcheck(op.default, (A, upper, *rest), test_utils=("test_schema", "test_faketensor"))
