"""Sylvester and Lyapunov equations: next to Kronecker products and other digits, where they are hard, and singular ones."""

from __future__ import annotations

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.linalg import solve_discrete_lyapunov, solve_lyapunov, solve_sylvester
from torch_manualgrad.linalg.schur_form import schur_form
from torch_manualgrad.testing import CHECKS, check

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]
EPS = torch.finfo(F64).eps
WITH_THIRD_ORDER = (*CHECKS, "third order")


def jordan(n, value):
    return value * torch.eye(n, dtype=F64) + torch.diag(torch.ones(n - 1, dtype=F64), 1)


def sizes(dtype):
    yield random(3, 3, dtype=dtype), random(2, 2, dtype=dtype, seed=1), random(3, 2, dtype=dtype, seed=2)
    yield random(1, 1, dtype=dtype), random(3, 3, dtype=dtype, seed=1), random(1, 3, dtype=dtype, seed=2)
    # batch dims broadcast
    yield random(2, 1, 2, 2, dtype=dtype), random(3, 1, 1, dtype=dtype, seed=1), random(2, 1, dtype=dtype, seed=2)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_next_to_kronecker_products(dtype):
    A, B, C = random(4, 4, dtype=dtype), random(3, 3, dtype=dtype, seed=1), random(4, 3, dtype=dtype, seed=2)
    Q = random(4, 4, dtype=dtype, seed=3)
    one = torch.eye(4, dtype=dtype)
    # vec by rows: A X B is (A kron B^T) vec X
    of_sum = torch.kron(A, torch.eye(3, dtype=dtype)) + torch.kron(one, B.mT.contiguous())
    expected = torch.linalg.solve(of_sum, C.flatten()).reshape(4, 3)
    torch.testing.assert_close(solve_sylvester(A, B, C), expected, rtol=1e-12, atol=1e-13)
    expected = torch.linalg.solve(torch.kron(A, one) + torch.kron(one, A.conj()), Q.flatten()).reshape(4, 4)
    torch.testing.assert_close(solve_lyapunov(A, Q), expected, rtol=1e-12, atol=1e-13)
    expected = torch.linalg.solve(torch.kron(one, one) - torch.kron(A, A.conj()), Q.flatten()).reshape(4, 4)
    torch.testing.assert_close(solve_discrete_lyapunov(A, Q), expected, rtol=1e-11, atol=1e-12)


HARD = {
    "defective": lambda: (jordan(6, 2), jordan(6, 1).mT),
    "far from normal": lambda: (
        torch.diag(torch.arange(1.0, 7, dtype=F64)) + 100 * random(6, 6).triu(1),
        torch.eye(6, dtype=F64) + 100 * random(6, 6, seed=1).triu(1),
    ),
    "identity": lambda: (torch.eye(6, dtype=F64), torch.eye(6, dtype=F64)),
    "zero and regular": lambda: (torch.zeros(6, 6, dtype=F64), torch.eye(6, dtype=F64)),
    "rotations": lambda: (torch.linalg.qr(random(6, 6))[0], 3 * torch.linalg.qr(random(6, 6, seed=1))[0]),
    "large and small": lambda: (1e100 * random(6, 6), 1e-100 * random(6, 6, seed=1)),
    "graded": lambda: (torch.diag(10.0 ** -torch.arange(6, dtype=F64)), jordan(6, 1)),
    "nearly singular": lambda: (jordan(6, 1), (1e-6 - 1) * torch.eye(6, dtype=F64)),
}


@pytest.mark.parametrize("name", HARD)
def test_the_residual_is_rounding(name):
    A, B = HARD[name]()
    C = random(6, 6, seed=2)
    X = solve_sylvester(A, B, C)
    bound = 20 * 6 * EPS * (torch.linalg.norm(A) + torch.linalg.norm(B)) * torch.linalg.norm(X)
    assert torch.linalg.norm(A @ X + X @ B - C) <= bound
    assert X.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_schur_form(dtype):
    for A in (random(5, 5, dtype=dtype), jordan(5, 2).to(dtype), torch.zeros(5, 5, dtype=dtype)):
        T, Q = schur_form(A)
        wide = A.to(C128)
        torch.testing.assert_close(Q @ T @ Q.mH, wide, rtol=0, atol=1e-13)
        torch.testing.assert_close(Q.mH @ Q, torch.eye(5, dtype=C128), rtol=0, atol=1e-13)
        assert torch.equal(T, T.triu())


def test_next_to_scipy():
    scipy = pytest.importorskip("scipy.linalg")
    A, B, C = random(12, 12), random(9, 9, seed=1), random(12, 9, seed=2)
    Q = random(12, 12, seed=3)
    for ours, theirs in (
        (solve_sylvester(A, B, C), scipy.solve_sylvester(A.numpy(), B.numpy(), C.numpy())),
        (solve_lyapunov(A, Q), scipy.solve_continuous_lyapunov(A.numpy(), Q.numpy())),
        (solve_discrete_lyapunov(A, Q), scipy.solve_discrete_lyapunov(A.numpy(), Q.numpy())),
    ):
        torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=1e-9, atol=1e-9)


def test_a_covariance():
    """Positive definite for a stable A: X is the integral of exp(A t) Q exp(A^H t)."""
    A = random(4, 4) - 4 * torch.eye(4)
    Q = random(4, 4, seed=1)
    Q = Q @ Q.mT
    X = solve_lyapunov(A, -Q)
    torch.testing.assert_close(X, X.mT, rtol=0, atol=1e-14)
    assert torch.linalg.eigvalsh(X).min() > 0
    A = A / 10
    X = solve_discrete_lyapunov(A, Q)
    terms = [torch.linalg.matrix_power(A, k) @ Q @ torch.linalg.matrix_power(A, k).mT for k in range(80)]
    torch.testing.assert_close(X, torch.stack(terms).sum(0))


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_sylvester_in_six_modes(dtype):
    small, *others = sizes(dtype)
    check(solve_sylvester, [small], checks=WITH_THIRD_ORDER)
    check(solve_sylvester, others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", [solve_lyapunov, solve_discrete_lyapunov], ids=lambda f: f.__name__)
def test_lyapunov_in_six_modes(f, dtype):
    check(f, [(random(2, 2, dtype=dtype), random(2, 2, dtype=dtype, seed=1))], checks=WITH_THIRD_ORDER)
    check(f, [(random(2, 1, 3, 3, dtype=dtype), random(3, 3, dtype=dtype, seed=1))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [mg.ops.sylvester_solution, mg.ops.stein_solution], ids=lambda f: f.__name__)
def test_the_adjoint_equations_by_themselves(op, dtype):
    A, B, C = next(sizes(dtype))

    def adjoint(A, B, C):
        return op(A, B, C, *schur_form(A.detach()), *schur_form(B.detach()), True)

    X = adjoint(A, B, C)
    left = A.mH @ X + X @ B.mH if op is mg.ops.sylvester_solution else X - A.mH @ X @ B.mH
    torch.testing.assert_close(left, C)
    check(adjoint, [(A, B, C)])


def test_where_eigenvalues_repeat():
    """No derivative of a Schur form is taken: the equation is smooth where that has none."""
    check(solve_sylvester, [(jordan(3, 2), jordan(3, 1).mT.clone(), random(3, 3)), *[(torch.eye(3, dtype=F64),) * 3]])
    check(solve_lyapunov, [(jordan(3, 2), random(3, 3))])
    check(solve_discrete_lyapunov, [(torch.zeros(2, 2, dtype=F64), random(2, 2)), (jordan(2, 0.5), random(2, 2))])


mp = pytest.importorskip("mpmath")


def test_a_gradient_in_forty_digits():
    """Of an ill-conditioned equation, where finite differences have few digits."""
    A, B, C, G = jordan(3, 1), jordan(3, 1e-3 - 1), random(3, 3), random(3, 3, seed=1)
    leaves = [x.clone().requires_grad_() for x in (A, B, C)]
    found = torch.autograd.grad((solve_sylvester(*leaves) * G).sum(), leaves)
    with mp.workdps(40):
        a, b, c, g = (mp.matrix(x.tolist()) for x in (A, B, C, G))

        def solved(a, b, c):
            big = mp.zeros(9)
            for i in range(3):
                for j in range(3):
                    for k in range(3):
                        big[3 * i + j, 3 * k + j] += a[i, k]
                        big[3 * i + j, 3 * i + k] += b[k, j]
            x = mp.lu_solve(big, mp.matrix([c[i, j] for i in range(3) for j in range(3)]))
            return mp.matrix([[x[3 * i + j] for j in range(3)] for i in range(3)])

        x, z = solved(a, b, c), solved(a.T, b.T, g)
        exact = [torch.tensor(y.tolist(), dtype=F64) for y in (-z * x.T, -x.T * z, z)]
    for ours, y in zip(found, exact):
        torch.testing.assert_close(ours, y, rtol=1e-8, atol=1e-8 * y.abs().max().item())


@pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0)], ids=str)
def test_empty(shape):
    m, n = shape
    given = [torch.zeros(s, dtype=F64, requires_grad=True) for s in ((m, m), (n, n), (m, n))]
    X = solve_sylvester(*given)
    assert X.shape == (m, n)
    grads = torch.autograd.grad(X.sum(), given, create_graph=True)
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, given))
    batch = solve_sylvester(torch.ones(0, 2, 2), torch.ones(1, 1), torch.ones(2, 1))
    assert batch.shape == (0, 2, 1)
    for f in (solve_lyapunov, solve_discrete_lyapunov):
        assert f(torch.zeros(2, 0, 0), torch.zeros(0, 0)).shape == (2, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    given = [x.to(dtype).requires_grad_() for x in next(sizes(wide))]
    same = [x.detach().to(wide).requires_grad_() for x in given]
    found, expected = (torch.autograd.grad(solve_sylvester(*x).abs().square().sum(), x) for x in (given, same))
    for f, e in zip(found, expected):
        assert f.dtype == dtype
        torch.testing.assert_close(f.to(wide), e, rtol=1e-5, atol=1e-5)


def test_compiled_and_under_vmap():
    A, B, C = next(sizes(F64))
    batch = random(4, 3, 3, seed=5)

    def f(A, C):
        return solve_sylvester(A, B, C) + solve_lyapunov(A, C @ C.mT)[..., :2] + solve_discrete_lyapunov(A, A)[..., :2]

    expected = torch.stack([f(a, C) for a in batch])
    torch.testing.assert_close(torch.func.vmap(f, in_dims=(0, None))(batch, C), expected)
    torch.testing.assert_close(f(batch, C), expected)
    of = torch.func.hessian(lambda A: f(A, C).square().sum())
    torch.testing.assert_close(torch.func.vmap(of)(batch), torch.stack([of(a) for a in batch]))
    leaf = batch.clone().requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (found,), (eager,) = (torch.autograd.grad(g(leaf, C).sin().sum(), leaf) for g in (compiled, f))
    torch.testing.assert_close(found, eager)


def test_under_override_nothing_changes():
    A, B, C = (x.requires_grad_() for x in next(sizes(F64)))
    expected = torch.autograd.grad(solve_sylvester(A, B, C)[0, 0], (A, B, C))
    with mg.override("*"):
        torch.testing.assert_close(torch.autograd.grad(solve_sylvester(A, B, C)[0, 0], (A, B, C)), expected)


# -- errors ----------------------------------------------------------------------------------------------------------

TURN = torch.tensor([[0.0, 2], [-2, 0]])
ONE, TWO, THREE = torch.ones(1, 1), torch.ones(2, 2), torch.eye(3)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: solve_sylvester(torch.diag(torch.tensor([1.0, 3])), -3 * THREE, torch.ones(2, 3)),
            r"A X \+ X B = C has no unique solution: the eigenvalues 3\+0j of A and -3\+0j of B add up to 0",
        ),
        (
            lambda: solve_sylvester(jordan(4, 1), -jordan(4, 1).mT, random(4, 4)),
            r"the eigenvalues 1\+0j .* add up to 0",
        ),
        (lambda: solve_sylvester(0 * TWO, 0 * ONE, torch.ones(2, 1)), r"the eigenvalues 0\+0j of A and 0\+0j of B"),
        (lambda: solve_lyapunov(TURN, TWO), r"the eigenvalues [-0]*\+2j of A and [-0]*-2j of B add up to 0"),
        (lambda: solve_discrete_lyapunov(TURN / 2, TWO), r"\+1j of A and [-0]*-1j of B have the product 1"),
        (lambda: solve_discrete_lyapunov(torch.diag(torch.tensor([2, 0.5])), TWO), "have the product 1"),
        (
            lambda: torch.func.vmap(solve_lyapunov, in_dims=(0, None))(torch.stack([TWO + THREE[:2, :2], TURN]), TWO),
            "add up to 0",
        ),
        (lambda: torch.compile(solve_lyapunov, backend="aot_eager")(TURN, TWO), "add up to 0"),
    ],
)
def test_singular_equations_raise(call, message):
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_that_add_up_to_0_by_rounding_only(dtype):
    for seed in range(10):
        U, V = (torch.linalg.qr(random(k, k, dtype=dtype, seed=seed))[0] for k in (5, 3))
        A = (U * torch.tensor([1.0, 2, 3, -1, 5], dtype=dtype)) @ U.mH
        B = (V * torch.tensor([4.0, -3, 7], dtype=dtype)) @ V.mH
        with pytest.raises(torch.linalg.LinAlgError, match=r"the eigenvalues 3\S* of A and -3\S* of B add up to 0"):
            solve_sylvester(A, B, random(5, 3, dtype=dtype))
        with pytest.raises(torch.linalg.LinAlgError, match="have the product 1"):
            solve_discrete_lyapunov(A, A)
        assert solve_sylvester(A, B + 1e-9 * torch.eye(3), random(5, 3, dtype=dtype)).isfinite().all()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: solve_sylvester(torch.ones(2, 3), ONE, TWO),
            ValueError,
            r"A: expected square matrices, got .*\[2, 3\]",
        ),
        (
            lambda: solve_sylvester(TWO, torch.ones(1, 2), TWO),
            ValueError,
            r"B: expected square matrices, got .*\[1, 2\]",
        ),
        (
            lambda: solve_sylvester(TWO, THREE, torch.ones(3, 2)),
            ValueError,
            r"C: expected matrices of shape \[2, 3\], to fit A and B, got shape \[3, 2\]",
        ),
        (lambda: solve_sylvester(TWO, ONE.double(), TWO), TypeError, "B: expected the dtype of A, torch.float32, got"),
        (lambda: solve_sylvester(TWO, TWO, TWO.to(C128)), TypeError, "C: expected the dtype of A, torch.float32, got"),
        (lambda: solve_sylvester(TWO, TWO, 3), TypeError, "C: "),
        (lambda: solve_sylvester(TWO.long(), TWO, TWO), TypeError, "A: expected a floating point or complex dtype"),
        (
            lambda: solve_sylvester(TWO.expand(2, 2, 2), TWO.expand(3, 2, 2), TWO),
            ValueError,
            r"B: its batch \[3\] does not broadcast with that of A, \[2\]",
        ),
        (
            lambda: solve_sylvester(TWO, TWO.expand(3, 2, 2), TWO.expand(2, 2, 2)),
            ValueError,
            r"C: its batch \[2\] does not broadcast with that of B, \[3\]",
        ),
        (lambda: solve_sylvester(TWO, TWO.to("meta"), TWO), ValueError, "B: expected a tensor on cpu, where A is"),
        (lambda: solve_lyapunov(TWO, THREE), ValueError, r"Q: expected the size of A, \[2, 2\], got \[3, 3\]"),
        (lambda: solve_discrete_lyapunov(TWO, torch.ones(2)), ValueError, "Q: expected a matrix"),
        (lambda: solve_lyapunov(TWO * torch.inf, TWO), RuntimeError, "solve_lyapunov"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
