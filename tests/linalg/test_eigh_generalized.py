"""Generalized eigenvalue problems: next to closed forms, also where eigenvalues repeat, and with both matrices moving."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.linalg import eigh_generalized
from torch_manualgrad.testing import CHECKS, check

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]


def with_eigenvalues(values, dtype=F64, seed=0, batch=()):
    """$A$ and $B$ with these eigenvalues, $A = V^-H L V^-1$ and $B = V^-H V^-1$."""
    n = len(values)
    W = random(*batch, n, n, dtype=dtype, seed=seed) + 2 * torch.eye(n)
    A = W.mH @ (torch.tensor(values, dtype=dtype)[:, None] * W)
    return (A + A.mH) / 2, W.mH @ W


def invariant(A, B):
    """Eigenvalues, and projectors onto single eigenvectors, which have no free sign or phase."""
    L, V = eigh_generalized(A, B)
    return L, torch.einsum("...ik,...jk->...kij", V, V.conj())


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype):
    for batch in ((), (2, 3)):
        A, B = with_eigenvalues((-1.5, 0.5, 2, 7), dtype, batch=batch)
        L, V = eigh_generalized(A, B)
        torch.testing.assert_close(L, torch.tensor([-1.5, 0.5, 2, 7], dtype=F64).expand(*batch, 4))
        torch.testing.assert_close(A @ V, B @ V * L.unsqueeze(-2))
        torch.testing.assert_close(V.mH @ B @ V, torch.eye(4, dtype=dtype).expand(*batch, 4, 4))
    same = eigh_generalized(A, torch.eye(4, dtype=dtype))
    torch.testing.assert_close(same.eigenvalues, torch.linalg.eigvalsh(A))


def test_next_to_scipy():
    scipy = pytest.importorskip("scipy.linalg")
    A, B = with_eigenvalues((-1.5, 0.5, 2, 7), C128)
    L, V = scipy.eigh(A.numpy(), B.numpy())
    found = eigh_generalized(A, B)
    torch.testing.assert_close(found.eigenvalues, torch.from_numpy(L))
    torch.testing.assert_close((found.eigenvectors.mH @ B @ torch.from_numpy(V)).abs(), torch.eye(4, dtype=F64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_six_modes(dtype):
    check(invariant, [with_eigenvalues((0.3, 2), dtype)], checks=(*CHECKS, "third order"))
    A, B = with_eigenvalues((-1.5, 0.5, 2), dtype)
    other = with_eigenvalues((-1, 3, 9), dtype, seed=1)
    batch = torch.stack([A, other[0]])
    check(invariant, [(A, B), (batch[:, None], other[1]), (A, torch.stack([B, other[1]]))])
    check(lambda A: invariant(A, B), [(A,)])
    check(lambda B: invariant(A, B), [(B,)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_closed_form(dtype):
    A, B = with_eigenvalues((-1.5, 0.5, 2), dtype)
    dA, dB = (random(3, 3, dtype=dtype, seed=k) for k in (5, 6))
    dA, dB = dA + dA.mH, dB + dB.mH
    (L, V), (dL, dV) = torch.func.jvp(lambda A, B: tuple(eigh_generalized(A, B)), (A, B), (dA, dB))
    N = V.mH @ dA @ V - V.mH @ dB @ V * L
    torch.testing.assert_close(dL, N.diagonal().real)
    gaps = L - L[:, None] + torch.eye(3)
    K = V.mH @ B @ dV
    off = 1 - torch.eye(3)
    torch.testing.assert_close(K * off, N / gaps * off)
    torch.testing.assert_close(K.diagonal().real, -(V.mH @ dB @ V).diagonal().real / 2)


FUNCTIONS = {  # V f(L) V^H, and the same without a decomposition
    "A^-1": (lambda L: 1 / L, lambda A, B: torch.linalg.inv(A)),
    "B^-1": (torch.ones_like, lambda A, B: torch.linalg.inv(B)),
    "B^-1 A B^-1": (lambda L: L, lambda A, B: torch.linalg.solve(B, torch.linalg.solve(B, A.mH).mH)),
    "B^-1 A B^-1 A B^-1": (
        torch.square,
        lambda A, B: torch.linalg.inv(B) @ A @ torch.linalg.inv(B) @ A @ torch.linalg.inv(B),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [(1, 1, 1), (1, 1, 2), (1, 1 + 1e-10, 2), (0.5, 1, 2)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_where_eigenvalues_repeat(name, values, dtype):
    f, direct = FUNCTIONS[name]

    def by_vectors(A, B):
        L, V = eigh_generalized(A, B)
        return V * f(L).unsqueeze(-2) @ V.mH

    G = random(3, 3, dtype=dtype, seed=4)
    given = [x.requires_grad_() for x in with_eigenvalues(values, dtype)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.autograd.grad((by_vectors(*given) * G).sum().real, given)
    loss = (direct(*given) * G).sum().real
    for ours, x in zip(found, torch.autograd.grad(loss, given, materialize_grads=True)):
        torch.testing.assert_close(ours, (x + x.mH) / 2, rtol=1e-6, atol=1e-7)


def test_the_sum_of_a_group_is_differentiable():
    A, B = (x.requires_grad_() for x in with_eigenvalues((1, 1, 2)))
    L, V = eigh_generalized(A, B)
    of_A, of_B = torch.autograd.grad(L[:2].sum(), (A, B))
    first = (V[:, :2] @ V[:, :2].mH).detach()
    torch.testing.assert_close(of_A, first)
    torch.testing.assert_close(of_B, -first)


def test_a_loss_without_a_derivative_is_reported():
    A, B = (x.requires_grad_() for x in with_eigenvalues((1, 1, 2)))
    with pytest.warns(mg.linalg.GaugeWarning):
        eigh_generalized(A, B).eigenvectors[0, 0].backward()
    with pytest.raises(mg.linalg.GaugeError):
        eigh_generalized(A, B, gauge="error").eigenvectors[0, 0].backward()
    wide = mg.Degeneracy(broadening=1e-2)
    eigh_generalized(A, B, degeneracy=wide).eigenvectors[0, 0].backward()
    assert A.grad.isfinite().all()


def test_the_gradient_is_hermitian_and_of_the_hermitian_part():
    A, B = with_eigenvalues((0.5, 1, 2), C128)
    skew = random(3, 3, dtype=C128, seed=3)
    skew = 0.1 * (skew - skew.mH)
    given = [(x + skew).requires_grad_() for x in (A, B)]
    L, P = invariant(*given)
    torch.testing.assert_close(L, invariant(A, B)[0])
    for g in torch.autograd.grad(P.square().sum().abs() + L.sin().sum(), given):
        torch.testing.assert_close(g, g.mH, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    wide = torch.promote_types(dtype, F64)
    given = [x.to(dtype).requires_grad_() for x in with_eigenvalues((0.5, 1, 2), wide)]
    same = [x.detach().to(wide).requires_grad_() for x in given]
    G = random(3, 3, 3, seed=1)
    found, expected = (
        torch.autograd.grad((invariant(*x)[1].real * G.to(x[0].real.dtype)).sum(), x) for x in (given, same)
    )
    for f, e in zip(found, expected):
        assert f.dtype == dtype
        torch.testing.assert_close(f.to(wide), e, rtol=1e-4, atol=1e-4 * e.abs().max().item())


@pytest.mark.parametrize("batch", [(), (2,), (0,)], ids=str)
def test_empty(batch):
    A = torch.zeros(*batch, 0, 0, dtype=F64, requires_grad=True)
    L, V = eigh_generalized(A, A)
    assert L.shape == (*batch, 0) and V.shape == (*batch, 0, 0)
    (g,) = torch.autograd.grad(L.sum() + V.sum(), A)
    assert g.shape == A.shape
    assert eigh_generalized(torch.ones(0, 2, 2), torch.eye(2)).eigenvectors.shape == (0, 2, 2)


def test_compiled_and_under_vmap():
    A, B = with_eigenvalues((0.5, 1, 2), batch=(3,))

    def f(A, B):
        L, P = invariant(A, B)
        return L.sin().sum() + P.sin().sum()

    of = torch.func.hessian(f, argnums=1)
    torch.testing.assert_close(
        torch.func.vmap(of, in_dims=(0, None))(A, B[0]), torch.stack([of(a, B[0]) for a in A]), rtol=1e-6, atol=1e-6
    )
    given = [A.requires_grad_(), B.requires_grad_()]
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for found, expected in zip(*[torch.autograd.grad(g(*given), given) for g in (compiled, f)]):
        torch.testing.assert_close(found, expected)


EYE = torch.eye(2)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (
            lambda: eigh_generalized(torch.ones(2, 3), EYE),
            ValueError,
            r"A: expected square matrices, got shape \[2, 3\]",
        ),
        (lambda: eigh_generalized(EYE, torch.eye(3)), ValueError, r"B: expected the size of A, \[2, 2\], got \[3, 3\]"),
        (lambda: eigh_generalized(EYE, EYE.double()), TypeError, "B: expected the dtype of A, torch.float32, got"),
        (lambda: eigh_generalized(EYE, EYE.int()), TypeError, "B: expected a floating point or complex dtype"),
        (lambda: eigh_generalized(EYE, EYE.to("meta")), ValueError, "B: expected a tensor on cpu, where A is"),
        (
            lambda: eigh_generalized(EYE.expand(3, 2, 2), EYE.expand(2, 2, 2)),
            ValueError,
            r"B: its batch \[2\] does not broadcast with that of A, \[3\]",
        ),
        (lambda: eigh_generalized(EYE, EYE, gauge="maybe"), ValueError, "gauge: expected .* got 'maybe'"),
        (lambda: eigh_generalized(EYE, -EYE), torch.linalg.LinAlgError, "B: expected positive definite matrices"),
        (
            lambda: eigh_generalized(EYE, torch.stack([EYE, 0 * EYE])),
            torch.linalg.LinAlgError,
            r"B: expected positive definite matrices: .*Batch element 1",
        ),
        (
            lambda: torch.func.vmap(eigh_generalized, in_dims=(None, 0))(EYE, torch.stack([EYE, 0 * EYE])),
            torch.linalg.LinAlgError,
            "B: expected positive definite matrices",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
