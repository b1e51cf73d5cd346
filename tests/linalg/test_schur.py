"""The Schur form: its order, its derivatives with the phases left out, and what follows from invariant subspaces."""

from __future__ import annotations

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.linalg import schur, solve_lyapunov
from torch_manualgrad.testing import CHECKS, check

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]
ORDERS = ["none", "real", "modulus"]
KEYS = {"real": lambda x: x.real, "modulus": torch.abs}


def with_eigenvalues(values, dtype=F64, seed=0):
    n = len(values)
    P = random(n, n, dtype=dtype, seed=seed) + 2 * torch.eye(n)
    return P @ torch.diag(torch.tensor(values, dtype=dtype)) @ torch.linalg.inv(P)


def invariant(A, order="real"):
    """Eigenvalues, moduli and projectors, which do not depend on phases."""
    T, Q = schur(A, order=order)
    return T.diagonal(dim1=-2, dim2=-1), T.abs().square(), torch.einsum("...ik,...jk->...kij", Q, Q.conj())


def jordan(n, value):
    return value * torch.eye(n, dtype=F64) + torch.diag(torch.ones(n - 1, dtype=F64), 1)


# -- values ----------------------------------------------------------------------------------------------------------

MATRICES = {
    "real": lambda: random(7, 7),
    "complex": lambda: random(7, 7, dtype=C128),
    "batch": lambda: random(2, 3, 5, 5),
    "defective": lambda: torch.linalg.qr(random(6, 6))[0] @ jordan(6, 2) @ torch.linalg.qr(random(6, 6))[0].mT,
    "two blocks": lambda: torch.block_diag(jordan(3, 2), jordan(3, -1)).mT,
    "zero": lambda: torch.zeros(4, 4, dtype=F64),
    "identity": lambda: torch.eye(4, dtype=F64),
    "rotation": lambda: torch.linalg.qr(random(6, 6))[0],
    "wrong order": lambda: torch.diag(torch.arange(8.0, 0, -1, dtype=F64)) + random(8, 8).triu(1),
    "far from normal": lambda: torch.diag(torch.arange(8.0, 0, -1, dtype=F64)) + 1e3 * random(8, 8).triu(1),
    "one": lambda: random(1, 1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MATRICES)
def test_values(name, order):
    A = MATRICES[name]()
    T, Q = schur(A, order=order)
    n, size = A.shape[-1], torch.linalg.matrix_norm(A).max().item()
    assert T.dtype == Q.dtype == C128 and torch.equal(T, T.triu())
    torch.testing.assert_close(Q @ T @ Q.mH, A.to(C128), rtol=0, atol=1e-14 * n * (1 + size))
    torch.testing.assert_close(Q.mH @ Q, torch.eye(n, dtype=C128).expand(A.shape), rtol=0, atol=1e-13)
    if order != "none":
        keys = KEYS[order](T.diagonal(dim1=-2, dim2=-1))
        assert (keys.diff(dim=-1) >= -2e-15 * n * size).all()


def test_next_to_scipy():
    scipy = pytest.importorskip("scipy.linalg")
    A = with_eigenvalues((-2, -1, 0.5, 3))
    T, Q = schur(A, order="real")
    t, q, count = scipy.schur(A.numpy(), output="complex", sort=lambda x: x.real < 0)
    assert count == 2
    same = torch.from_numpy(q[:, :2])
    torch.testing.assert_close(Q[:, :2] @ Q[:, :2].mH, same @ same.mH)


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_six_modes(dtype):
    A = with_eigenvalues((1, -2, 4), dtype)
    check(invariant, [(A[:2, :2],)], checks=(*CHECKS, "third order"))
    check(invariant, [(A,), (torch.stack([A, with_eigenvalues((3, 0.5, 7), dtype, seed=1)]),)])
    check(lambda A: invariant(A, "modulus"), [(A,)])


def test_a_conjugate_pair():
    """Which comes in one order at all real matrices nearby."""
    A = torch.tensor([[0.2, -1.1, 0.3], [1.3, 0.1, 0.2], [0.0, 0.4, 0.9]], dtype=F64)
    check(lambda A: invariant(A, "none")[1:], [(A,)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("only", ["T", "Q"])
def test_one_of_the_two(only, dtype):
    def f(A):
        diagonal, moduli, projectors = invariant(A)
        return (diagonal, moduli) if only == "T" else projectors

    check(f, [(with_eigenvalues((1, -2, 4), dtype),)])


def test_the_tangent_keeps_the_structure():
    A, E = with_eigenvalues((1, -2, 4, 0.5), C128), random(4, 4, dtype=C128, seed=3)
    (T, Q), (dT, dQ) = torch.func.jvp(lambda A: tuple(schur(A, order="real")), (A,), (E,))
    torch.testing.assert_close(dQ @ T @ Q.mH + Q @ dT @ Q.mH + Q @ T @ dQ.mH, E)
    W = Q.mH @ dQ
    torch.testing.assert_close(W, -W.mH)
    assert torch.equal(dT, dT.triu()) and W.diagonal().abs().max() < 1e-14


def test_a_riccati_equation():
    """From the stable subspace of a Hamiltonian matrix; its gradient is the solution of a Lyapunov equation."""
    A, C = random(3, 3), random(3, 3, seed=1)
    S, Q = torch.eye(3, dtype=F64), C @ C.mT

    def solution(A, Q):
        H = torch.cat((torch.cat((A, -S), -1), torch.cat((-Q, -A.mT), -1)), -2)
        U = schur(H, order="real").Q[:, :3]
        return (U[3:] @ torch.linalg.inv(U[:3])).real

    X = solution(A, Q)
    torch.testing.assert_close(A.mT @ X + X @ A - X @ S @ X + Q, torch.zeros_like(X), rtol=0, atol=1e-11)
    D = random(3, 3, seed=2)
    D = D + D.mT
    (found,) = torch.func.jvp(lambda Q: solution(A, Q), (Q,), (D,))[1:]
    torch.testing.assert_close(found, solve_lyapunov((A - S @ X).mT.contiguous(), -D), rtol=1e-8, atol=1e-8)
    check(solution, [(A, Q)], checks=())


def test_a_loss_of_the_phases_is_reported():
    A = with_eigenvalues((1, -2, 4), C128).requires_grad_()
    with pytest.warns(mg.linalg.GaugeWarning, match="derivative of the Schur form"):
        schur(A).Q[0, 0].imag.backward()
    with pytest.raises(mg.linalg.GaugeError):
        schur(A, gauge="error").T[0, 1].real.backward()
    schur(A, gauge="ignore").Q[0, 0].imag.backward()
    schur(A, gauge="error").T[0, 1].abs().backward()
    assert A.grad.isfinite().all()


@pytest.mark.parametrize("A", [torch.eye(2, dtype=F64), jordan(2, 1.0)], ids=["identity", "defective"])
def test_equal_eigenvalues_have_no_derivative(A):
    """inf or nan, and not a number that looks right."""
    A = A.clone().requires_grad_()
    T, Q = schur(A, gauge="ignore")
    (g,) = torch.autograd.grad(T[0, 0].real, A)
    assert not g.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    x = with_eigenvalues((1, -2, 4), wide).to(dtype).requires_grad_()
    same = x.detach().to(wide).requires_grad_()
    assert schur(x).T.dtype == torch.complex64
    (found,), (expected,) = (
        torch.autograd.grad(invariant(y)[1].sum() + invariant(y)[0].real[..., 0], y) for y in (x, same)
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.to(wide), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 2, 2)], ids=str)
def test_empty(shape):
    A = torch.zeros(shape, dtype=F64, requires_grad=True)
    for order in ORDERS:
        T, Q = schur(A, order=order)
        assert T.shape == Q.shape == shape
        assert torch.autograd.grad(T.abs().sum() + Q.abs().sum(), A)[0].shape == shape


def test_compiled_and_under_vmap():
    A = torch.stack([with_eigenvalues((1, -2, 4)), with_eigenvalues((3, 0.5, 7), seed=1)])

    def f(A):
        diagonal, moduli, projectors = invariant(A)
        return diagonal.real.sin().sum() + moduli.sin().sum() + projectors.real.sin().sum()

    of = torch.func.hessian(f)
    torch.testing.assert_close(torch.func.vmap(of)(A), torch.stack([of(a) for a in A]))
    A.requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    (found,), (eager,) = (torch.autograd.grad(g(A), A) for g in (compiled, f))
    torch.testing.assert_close(found, eager)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: schur(torch.ones(2, 3)), ValueError, r"A: expected square matrices, got shape \[2, 3\]"),
        (
            lambda: schur(torch.ones(2, 2, dtype=torch.int64)),
            TypeError,
            "A: expected a floating point or complex dtype",
        ),
        (
            lambda: schur(torch.eye(2), order="up"),
            ValueError,
            "order: expected 'none' or 'real' or 'modulus', got 'up'",
        ),
        (lambda: schur(torch.eye(2), gauge="up"), ValueError, "gauge: expected .* got 'up'"),
        (lambda: schur(torch.eye(2) * torch.nan), RuntimeError, "schur"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
