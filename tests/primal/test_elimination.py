"""gaussian_elimination against its defining properties and against LAPACK, and where solves use it."""

from __future__ import annotations

import pytest
import torch
from helpers.primal import DTYPES, REAL, gaussian_elimination, outcomes, same_bits, solve_eliminated
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad import testing
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.primal import solve

pytestmark = pytest.mark.usefixtures("on_cpu")
NAME = "aten::_linalg_solve_ex"
SIZES = [0, 1, 2, 3, 7, 8, 12, 13, 16, 17, 31, 32, 33, 63, 64, 65, 130]


def wide(X: Tensor) -> Tensor:
    return X.to(torch.promote_types(X.dtype, torch.float64))


def assert_solves(A: Tensor, B: Tensor, X: Tensor, LU: Tensor, pivots: Tensor, info: Tensor) -> None:
    n, eps = A.shape[-1], torch.finfo(A.dtype).eps
    assert X.shape == B.shape and LU.shape == A.shape and pivots.shape == A.shape[:-1] and info.shape == A.shape[:-2]
    assert X.dtype == LU.dtype == A.dtype and pivots.dtype == info.dtype == torch.int32
    assert all(x.is_contiguous() for x in (X, LU.mT, pivots, info))
    assert not info.any()
    P, L, U = torch.lu_unpack(wide(LU), pivots)
    if n == 0:
        return
    largest = 2**0.5 if A.is_complex() else 1  # a complex pivot is that of the largest |re| + |im|
    assert (L.abs() <= largest * (1 + 4 * eps)).all()
    size = (L.abs() @ U.abs()).amax((-2, -1), keepdim=True)  # what elimination adds up
    assert ((P @ L @ U - wide(A)).abs() <= 2 * n * eps * size).all()
    residual, scale = wide(A) @ wide(X) - wide(B), (L.abs() @ U.abs()) @ wide(X).abs()
    assert (residual.abs().sum(-2) <= 4 * n * eps * scale.sum(-2) + torch.finfo(A.dtype).tiny).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("batch", [1, 3, 19])
def test_against_lapack(batch, n, dtype):
    if dtype.is_complex and n > 32:
        return
    A = random(batch, n, n, dtype=dtype)
    for r in (0, 1, 5, max(n, 32)):
        B = random(batch, n, r, dtype=dtype)
        found = gaussian_elimination(A, B)
        assert_solves(A, B, *found)
        assert torch.equal(found[2], torch.linalg.lu_factor(A).pivots)


@pytest.mark.parametrize("n", [256, 511, 512])
@pytest.mark.parametrize("dtype", REAL)
def test_the_largest(n, dtype):
    A, B = random(n, n, dtype=dtype), random(n, 3, dtype=dtype)
    assert_solves(A, B, *gaussian_elimination(A, B))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [5, 20])
def test_entries_of_any_size(n, dtype):
    """From the least normal numbers to the largest. LAPACK solves the system if the inverse of a pivot is not normal."""
    info = torch.finfo(dtype)
    for size in (info.tiny * 8, info.max / 2**8):
        A, B = random(4, n, n, dtype=dtype) * size, random(4, n, 2, dtype=dtype)
        X = gaussian_elimination(A, A @ B)[0]
        torch.testing.assert_close(X, torch.linalg.solve(A / size, A @ B / size), rtol=1e-2, atol=1e-3)
    for entry in (info.tiny / 16, info.max / 2):
        A = entry * torch.eye(n, dtype=dtype)
        assert gaussian_elimination(A, A)[3].item() == -1
        X, _, _, found = torch.ops.manualgrad.solve_small(A, A, True)
        torch.testing.assert_close(X, torch.linalg.solve(A, A), rtol=0, atol=0, equal_nan=True)
        assert found.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 12, 13, 30])
def test_ties_and_zero_pivots(n, dtype):
    integers = torch.randint(-1, 2, (37, n, n), generator=torch.Generator().manual_seed(0)).to(dtype)
    A = torch.cat([integers, integers[:, :1].expand(37, n, n), torch.zeros(2, n, n, dtype=dtype)])
    A[:, :, n // 2 :] *= torch.linspace(0.3, 0.7, n - n // 2)
    X, LU, pivots, info = gaussian_elimination(A, torch.ones(len(A), n, 1, dtype=dtype))
    P, L, U = torch.lu_unpack(LU, pivots)
    torch.testing.assert_close(P @ L @ U, A, rtol=0, atol=100 * torch.finfo(dtype).eps)
    zero = LU.diagonal(dim1=-2, dim2=-1) == 0
    first = zero.int().argmax(-1) + 1
    assert torch.equal(info.long(), torch.where(zero.any(-1), first, 0))
    assert (info[37:] > 0).all()
    assert not X[info > 0].isfinite().flatten(1).all(1).any() and X[info == 0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 25])
def test_inf_and_nan_stay_in_their_matrix(n, dtype):
    A, B = random(9, n, n, dtype=dtype), random(9, n, 2, dtype=dtype)
    expected, broken = gaussian_elimination(A, B), A.clone()
    for at, value in ((1, torch.inf), (4, torch.nan), (8, -torch.inf)):
        broken[at, n - 2, at % n] = value
    whole = broken.isfinite().flatten(1).all(1)
    found = gaussian_elimination(broken, B)
    assert torch.equal(found[3], torch.where(whole, 0, -1).int())
    assert same_bits(tuple(x[whole] for x in found), tuple(x[whole] for x in expected))
    B[3, n - 1, 1] = torch.nan
    assert gaussian_elimination(A, B)[3].nonzero().tolist() == [[3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 20])
def test_strides(n, dtype):
    A, B = random(5, n, 4, n, dtype=dtype), random(4, 5, 3, n, dtype=dtype)
    for left in (
        A.transpose(1, 2),
        A.permute(0, 2, 3, 1),
        A.transpose(1, 2).mH,
        A[:1].transpose(1, 2).expand(5, 4, n, n),
    ):
        for right in (B.transpose(0, 1).mT, random(n, 6, dtype=dtype)[:, ::2].expand(5, 4, n, 3)):
            found = gaussian_elimination(left, right)
            assert same_bits(found, gaussian_elimination(left.contiguous(), right.contiguous()))


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", [5, 13, 40])
def test_neither_batch_nor_threads_count(n, dtype):
    A, B = random(40, n, n, dtype=dtype), random(40, n, 2, dtype=dtype)
    whole = gaussian_elimination(A, B)
    assert same_bits(tuple(x[11:12] for x in whole), gaussian_elimination(A[11:12], B[11:12]))
    assert same_bits(tuple(x[5:22] for x in whole), gaussian_elimination(A[5:22], B[5:22]))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert same_bits(whole, gaussian_elimination(A, B))
    finally:
        torch.set_num_threads(threads)


def test_unsupported_arguments_raise():
    message = r"gaussian_elimination: A: expected sides up to 512, got 513 by 513"
    with pytest.raises(RuntimeError, match=message):
        gaussian_elimination(torch.zeros(513, 513), torch.zeros(513, 1))
    with pytest.raises(RuntimeError, match=r"gaussian_elimination: A: expected sides up to 32, got 33 by 33"):
        gaussian_elimination(torch.zeros(33, 33, dtype=torch.complex64), torch.zeros(33, 1, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"gaussian_elimination: A: .*got .*2.* 3"):
        gaussian_elimination(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match=r"gaussian_elimination: B: "):
        gaussian_elimination(torch.zeros(3, 3), torch.zeros(2, 1))
    with pytest.raises(RuntimeError, match=r"gaussian_elimination: B: .*float64"):
        gaussian_elimination(torch.zeros(3, 3), torch.zeros(3, 1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="got torch.float16"):
        gaussian_elimination(torch.zeros(2, 2, dtype=torch.float16), torch.zeros(2, 1, dtype=torch.float16))


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("n", SIZES)
def test_with_given_factors(n, dtype, adjoint):
    A = random(3, n, n, dtype=dtype)
    LU, pivots = torch.linalg.lu_factor(A)
    P, L, U = torch.lu_unpack(wide(LU), pivots)
    M = (P @ L @ U).mT if adjoint else P @ L @ U
    size = (P @ L.abs() @ U.abs()).mT if adjoint else P @ L.abs() @ U.abs()
    for r in (0, 1, 5, 33):
        if r > max(n, 32):
            continue
        B = random(3, n, r, dtype=dtype)
        X = solve_eliminated(LU, pivots, B, adjoint)
        assert X.is_contiguous() and X.shape == B.shape
        residual, scale = M @ wide(X) - wide(B), size @ wide(X).abs()
        assert (residual.abs().sum(-2) <= 4 * n * torch.finfo(dtype).eps * scale.sum(-2)).all()
        assert same_bits((X[1],), (solve_eliminated(LU[1], pivots[1], B[1], adjoint),))
        assert same_bits((X,), (solve_eliminated(LU.contiguous(), pivots, B.mT.contiguous().mT, adjoint),))


def test_unsupported_factors_raise():
    LU, pivots, B = torch.eye(3), torch.arange(1, 4, dtype=torch.int32), torch.zeros(3, 2)
    for arguments, message in (
        ((LU.to(torch.complex64), pivots, B.to(torch.complex64)), "LU: expected float32 or float64, got .*omplex64"),
        ((LU[:2], pivots, B), "LU"),
        ((LU, pivots.long(), B), "pivots: expected Int, got Long"),
        ((LU, pivots[:2], B), "pivots"),
        ((LU, pivots, B[:2]), "B: expected shape"),
    ):
        with pytest.raises(RuntimeError, match=rf"solve_eliminated: {message}"):
            solve_eliminated(*arguments, False)


# -- where it is used -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_where_it_is_used(dtype):
    """Under forward=True, for batches of some size, with a matrix or with a vector."""
    n = 10
    A, B = random(50, n, n, dtype=dtype), random(50, n, 3, dtype=dtype)
    expected, stock = gaussian_elimination(A, B)[0], torch.linalg.solve(A, B)
    assert not same_bits((expected,), (stock,))
    vectors = gaussian_elimination(A, B[..., :1])[0][..., 0]
    calls = [
        (lambda: torch.linalg.solve(A, B), expected),
        (lambda: torch.linalg.solve(A, B[..., 0]), vectors),
        (lambda: torch.linalg.solve_ex(A, B).result, expected),
        (lambda: torch.linalg.solve(A.clone().requires_grad_(), B).detach(), expected),
        (lambda: jvp(lambda A: torch.linalg.solve(A, B), (A,), (A,))[0], expected),
    ]
    with mg.override(NAME):
        assert all(not same_bits((call(),), (x,)) for call, x in calls)
    with mg.override(NAME, forward=True):
        assert all(same_bits((call(),), (x,)) for call, x in calls)
        found = torch.linalg.solve(A, B.mT, left=False)
    assert same_bits((found,), (torch.linalg.solve(A, B.mT, left=False),))


@pytest.mark.parametrize("batch, plain", [(1, 1), (50, 0)])
def test_what_is_left_to_pytorch_needs_no_python(batch, plain):
    if compiled_calls.calls_library is None:
        pytest.skip("no library of calls")
    A, B = random(batch, 10, 10, dtype=torch.float64).requires_grad_(), random(batch, 10, 3, dtype=torch.float64)
    with mg.override(NAME, "aten::linalg_lu", forward=True):
        before = compiled_calls.counts().plain
        torch.linalg.solve(A, B)
        assert compiled_calls.counts().plain - before == plain
        torch.linalg.lu(A)  # of order 10
        assert compiled_calls.counts().plain - before == plain + 1


def test_what_is_left_to_pytorch():
    """Few or large matrices, other dtypes, batches that are broadcast; and the errors of bad arguments."""
    doubles = lambda *sizes: random(*sizes, dtype=torch.float64)  # noqa: E731
    calls = [
        (doubles(3, 3), doubles(3)),
        (doubles(20, 20, 20), doubles(20, 1)),
        (doubles(20, 20), doubles(20, 20, 1)),
        (random(4, 40, 40, dtype=torch.complex128), random(4, 40, 1, dtype=torch.complex128)),
        (doubles(257, 257), doubles(257)),
        (doubles(513, 513).float(), doubles(513).float()),
        (doubles(50, 10, 10), doubles(50, 10, 40)),
    ]
    expected = [torch.linalg.solve(*call) for call in calls]
    with mg.override(NAME, forward=True):
        assert same_bits(tuple(torch.linalg.solve(*call) for call in calls), tuple(expected))
        for A, B, message in (
            (torch.zeros(70, 80), torch.zeros(70), "square"),
            (torch.zeros(70, 70), torch.zeros(70, dtype=torch.float64), "same dtype"),
            (torch.zeros(70, 70), torch.zeros(71, 1), "shape|incompatible"),
        ):
            with pytest.raises(RuntimeError, match=message):
                torch.linalg.solve(A, B)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_singular_and_nonfinite_matrices_are_as_in_pytorch(value, dtype):
    A, B = random(60, 10, 10, dtype=dtype), random(60, 10, 1, dtype=dtype)
    A[7, 2:] = value

    calls = [lambda f=f: f(A, B) for f in (torch.linalg.solve, torch.linalg.solve_ex)]
    expected = outcomes(calls)
    with mg.override(NAME, forward=True):
        found = outcomes(calls)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_derivatives_in_six_modes(monkeypatch, dtype, columns):
    monkeypatch.setattr(solve, "serves", lambda *_: True)
    monkeypatch.setattr(solve, "_LEFT", solve._LEFT._replace(entries=0))
    A, B = random_conditioned(2, 3, 3, dtype=dtype), random(2, 3, *columns, dtype=dtype)
    with compiled_calls.in_python(), mg.override(NAME, forward=True):
        testing.check(torch.linalg.solve, [(A, B)])
        assert same_bits((torch.linalg.solve(A[0], B[0]),), (torch.linalg.solve(A, B)[0],))


def test_transforms_and_compilation():
    A, b = random_conditioned(50, 10, 10, dtype=torch.float64), random(50, 10, dtype=torch.float64)

    def f(A: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(A, b).sin().sum()

    expected = grad(f)(A, b), hessian(f, 1)(A[0], b[0])
    with mg.override(NAME, forward=True):
        torch.testing.assert_close(grad(f)(A, b), expected[0])
        torch.testing.assert_close(vmap(grad(f))(A, b), expected[0])
        torch.testing.assert_close(hessian(f, 1)(A[0], b[0]), expected[1])
        torch.testing.assert_close(
            vmap(lambda b: torch.linalg.solve(A, b), in_dims=1)(b[:, None]), torch.linalg.solve(A, b)[None]
        )
        for backend in ("aot_eager", "manualgrad"):
            torch.compiler.reset()
            x = A.clone().requires_grad_()
            compiled = torch.compile(f, backend=backend, fullgraph=True)(x, b)
            torch.testing.assert_close(torch.autograd.grad(compiled, x)[0], expected[0])


def test_series():
    A, b = random_conditioned(50, 10, 10, dtype=torch.float64), random(50, 10, dtype=torch.float64)

    def series() -> list[Tensor]:
        value, coefficients = mg.forward_ad.jet(lambda A: torch.linalg.solve(A, b), (A,), ((A.sin(), A.cos(), A),))
        return [value, *coefficients]

    expected = series()
    with mg.override(NAME, forward=True):
        torch.testing.assert_close(series(), expected)


def test_operators_have_derivatives_of_their_own():
    A, B = random_conditioned(2, 3, 3, dtype=torch.float64), random(2, 3, 2, dtype=torch.float64)
    for op, rest in ((torch.ops.manualgrad.gaussian_elimination, ()), (torch.ops.manualgrad.solve_small, (True,))):
        testing.check(lambda A, B, op=op, rest=rest: op(A, B, *rest)[0], [(A, B)])
        torch.library.opcheck(op.default, (A, B, *rest), test_utils=("test_schema", "test_faketensor"))
