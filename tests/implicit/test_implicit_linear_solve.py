"""linear_solve: its solvers, preconditioners, and how many systems a derivative solves."""

from __future__ import annotations

import pytest
import torch
from helpers.modes import derivatives
from helpers.tensors import close, random

from torch_manualgrad.implicit import linear_solve, root
from torch_manualgrad.implicit.krylov import SOLVERS
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
GENERAL = ["gmres", "bicgstab", "direct", "auto", "scipy.gmres", "scipy.bicgstab"]
HERMITIAN = ["cg", "minres", "scipy.cg", "scipy.minres"]


def available(solver):
    if solver.startswith("scipy"):
        pytest.importorskip("scipy")


def product(x, A):
    return A @ x


def hermitian(x, A):
    return (A + A.mH) @ x + 12 * x


def in_real_numbers(f):
    return lambda *pairs: torch.view_as_real(f(*map(torch.view_as_complex, pairs)))


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("solver", [*GENERAL, *HERMITIAN])
def test_solvers(solver, dtype):
    available(solver)
    A, b = random(5, 5, dtype=dtype) + 4 * torch.eye(5, dtype=dtype), random(5, dtype=dtype, seed=1)
    matvec = hermitian if solver in HERMITIAN else product
    dense = lambda A, b: torch.linalg.inv(A if matvec is product else A + A.mH + 12 * torch.eye(5)) @ b  # noqa: E731
    solve = lambda A, b: linear_solve(matvec, b, A, solver=solver, rtol=1e-13)  # noqa: E731
    close(solve(A, b), dense(A, b))
    inputs = [torch.view_as_real(x) if dtype.is_complex else x for x in (A, b)]
    for mode in ("rev", "fwd", "revrev", "fwdfwd", "fwdrev"):
        found, expected = (
            derivatives(in_real_numbers(f) if dtype.is_complex else f, inputs, mode) for f in (solve, dense)
        )
        close(found, expected)


@pytest.mark.parametrize("solver", ["gmres", "cg", "direct"])
def test_by_finite_differences(solver):
    A, b = random(5, 5, dtype=C128) + 4 * torch.eye(5, dtype=C128), random(5, dtype=C128, seed=1)
    matvec = hermitian if solver in HERMITIAN else product
    check(lambda A, b: linear_solve(matvec, b, A, solver=solver, rtol=1e-13), [(A, b)])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.complex64, C128])
def test_iterative_solvers_on_larger_systems(solver, dtype):
    n = 120
    Q = torch.linalg.qr(random(n, n, dtype=C128 if dtype.is_complex else F64))[0]
    values = torch.linspace(1, 30, n, dtype=F64).to(Q.dtype)
    if solver == "minres":
        values[::3] *= -1
    A = (Q * values) @ Q.mH
    if solver in ("gmres", "bicgstab"):
        A = A + 0.2 * random(n, n, dtype=Q.dtype, seed=2)
    A = A.to(dtype)
    b = random(n, dtype=Q.dtype, seed=1).to(dtype)
    x = linear_solve(product, b, A, solver=solver, on_failure="raise")
    tolerance = 1e-3 if dtype in (torch.float32, torch.complex64) else 1e-8
    close(x, torch.linalg.solve(A, b), rtol=tolerance)


def test_restarted_gmres():
    n = 300
    A = torch.diag(torch.linspace(1, 40, n, dtype=F64)) + 0.3 * random(n, n) / n**0.5
    b = random(n, seed=1)
    close(linear_solve(product, b, A, on_failure="raise"), torch.linalg.solve(A, b), rtol=1e-8)


@pytest.mark.parametrize("solver", ["cg", "minres", "gmres", "bicgstab", "scipy.gmres", "scipy.cg"])
def test_a_preconditioner_saves_products(solver):
    available(solver)
    scale = torch.logspace(0, 4, 60, dtype=F64)
    products = []

    def matvec(x, scale, mixing):
        products.append(1)
        return scale * x + mixing * (x.roll(1) + x.roll(-1))

    def run(preconditioner):
        products.clear()
        mixing, b = torch.tensor(0.3, dtype=F64, requires_grad=True), torch.ones(60, dtype=F64)
        x = linear_solve(matvec, b, scale, mixing, solver=solver, preconditioner=preconditioner)
        (g,) = torch.autograd.grad(x.sum(), mixing)
        return x, g, len(products)

    x, g, many = run(None)
    y, h, few = run(lambda v, scale, mixing: v / scale)
    close(x, y, rtol=1e-6)
    close(g, h, rtol=1e-6)
    assert few < many / 2


def test_the_preconditioner_of_the_adjoint_is_the_adjoint():
    A = torch.diag(torch.logspace(0, 3, 40, dtype=F64)) + torch.triu(random(40, 40), 1)
    inverse = torch.linalg.inv(A)
    calls = []

    def matvec(x, A, inverse):
        calls.append(1)
        return A @ x

    b = random(40, seed=1).requires_grad_()
    x = linear_solve(matvec, b, A, inverse, preconditioner=lambda v, A, inverse: inverse @ v)
    calls.clear()
    (g,) = torch.autograd.grad(x.sum(), b)
    close(g, torch.linalg.solve(A.mT, torch.ones(40, dtype=F64)))
    assert len(calls) <= 1  # the graph of one product, whose backward runs a few times


def counted(record):
    def solver(matvec, b):
        record.append(1)
        return torch.linalg.solve(torch.vmap(matvec)(torch.eye(len(b), dtype=b.dtype)).mT, b)

    return solver


def test_a_derivative_solves_one_system():
    solves = []
    A, b = random(4, 4).requires_grad_(), random(4, seed=1).requires_grad_()
    x = linear_solve(product, b, A, solver=counted(solves))
    assert len(solves) == 1
    first = torch.autograd.grad(x.square().sum(), (A, b), create_graph=True)
    assert len(solves) == 2
    torch.autograd.grad(sum(g.square().sum() for g in first), (A, b))
    assert len(solves) == 4  # the adjoint of the first solve and that of the second
    solves.clear()
    torch.func.jvp(lambda A, b: linear_solve(product, b, A, solver=counted(solves)), (A, b), (A, b))
    assert len(solves) == 2


def test_a_derivative_of_a_root_solves_one_system():
    solves, runs = [], []

    def solver(f, x, a):
        runs.append(1)
        return a ** (1 / 3)

    a = random(4).abs().requires_grad_()
    solve = root(lambda x, a: x**3 - a, solver, tangent_solver=counted(solves))
    x = solve(torch.ones(4, dtype=F64), a)
    torch.autograd.grad(x.sum(), a)
    assert (len(runs), len(solves)) == (1, 1)
    torch.func.jvp(lambda a: solve(torch.ones(4, dtype=F64), a), (a,), (a,))
    assert (len(runs), len(solves)) == (2, 2)


def laplacian(u, k):
    p = torch.nn.functional.pad(u, (1, 1, 1, 1))
    return 4 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2] + k * u


def test_poisson_with_a_hundred_thousand_unknowns():
    n = 320
    f, k = random(n, n).requires_grad_(), (0.01 * random(n, n, seed=1).abs()).requires_grad_()
    u = linear_solve(laplacian, f, k, solver="cg", on_failure="raise")
    gf, gk = torch.autograd.grad(u.square().sum() / 2, (f, k))
    assert u.numel() > 1e5
    close(laplacian(gf, k.detach()), u.detach(), rtol=1e-6)  # the adjoint equation
    close(gk, -gf * u.detach(), rtol=1e-12)


def test_trees():
    A, B = random(2, 2) + 3 * torch.eye(2, dtype=F64), random(3, 3, dtype=C128) + 3 * torch.eye(3, dtype=F64)

    def matvec(x, A, B):
        return {"a": A @ x["a"], "b": [B @ x["b"][0]]}

    def solve(A, B, a, b):
        x = linear_solve(matvec, {"a": a, "b": [b]}, A, B)
        return x["a"], x["b"][0]

    a, b = random(2), random(3, dtype=C128)
    close(solve(A, B, a, b), (torch.linalg.solve(A, a), torch.linalg.solve(B, b)))
    check(solve, [(A, B, a, b)])


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("solver", ["gmres", "direct", "cg"])
def test_sparse_matrices(solver, layout):
    """First and second order in b. torch.func cannot wrap a compressed one, and has no forward mode with the other."""
    dense = 4 * torch.eye(5, dtype=F64) + torch.diag(torch.ones(4, dtype=F64), 1)
    dense = dense + dense.mT if solver == "cg" else dense
    A, b = dense.to_sparse(layout=layout), random(5).requires_grad_()
    solve = lambda b: linear_solve(lambda x, A: (A @ x[:, None])[:, 0], b, A, solver=solver)  # noqa: E731
    inverse = torch.linalg.inv(dense)
    (g,) = torch.autograd.grad(solve(b).square().sum(), b, create_graph=True)
    close(g, 2 * inverse.mT @ inverse @ b)
    close(torch.autograd.grad(g.sum(), b)[0], 2 * inverse.mT @ inverse @ torch.ones(5, dtype=F64))
    if layout is torch.sparse_coo:
        close(torch.func.grad(lambda b: solve(b).square().sum())(b.detach()), g.detach())


def test_another_solver_for_the_derivatives():
    solves = []
    A, b = random(4, 4) + 3 * torch.eye(4, dtype=F64), random(4).requires_grad_()
    x = linear_solve(product, b, A, solver="direct", tangent_solver=counted(solves))
    assert not solves
    close(torch.autograd.grad(x.sum(), b)[0], torch.linalg.solve(A.mT, torch.ones(4, dtype=F64)))
    assert len(solves) == 1


def test_a_function_that_reads_values_has_a_dense_matrix():
    """Which vmap refuses."""

    def matvec(x, A):
        assert x.abs().max().item() >= 0
        return A @ x

    A, b = random(4, 4).requires_grad_(), random(4)
    x = linear_solve(matvec, b, A, solver="direct")
    close(torch.autograd.grad(x.sum(), A)[0], torch.autograd.grad(torch.linalg.solve(A, b).sum(), A)[0])
