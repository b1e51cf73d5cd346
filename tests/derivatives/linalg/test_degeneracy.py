"""Decompositions where values meet: ours and stock beside closed forms and 50-digit arithmetic."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import mpmath
import pytest
import torch
from helpers.matrices import weights

import torch_manualgrad as mg
from torch_manualgrad.linalg import GaugeWarning

mpmath.mp.dps = 50
L = torch.linalg
SEPARATIONS = [10.0**-k for k in range(2, 15)] + [0.0]


def orthogonal(n, seed):
    return L.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


def with_values(values, *, symmetric=False, seed=0, dtype=torch.float64):
    s = torch.tensor(values, dtype=torch.float64)
    Q = orthogonal(len(s), seed)
    W = Q if symmetric else orthogonal(len(s), seed + 1)
    A = (Q * s) @ W.mT
    return ((A + A.mT) / 2 if symmetric else A).to(dtype)


def exact(X):
    return mpmath.matrix([[mpmath.mpf(v) for v in row] for row in X.double().tolist()])


def back(X):
    return torch.tensor([[float(X[i, j]) for j in range(X.cols)] for i in range(X.rows)], dtype=torch.float64)


# -- losses <G, F(A)>, each with its exact gradient ----------------------------------------------------------------


def svd(A):
    return L.svd(A, full_matrices=False)


def reconstruction(A):
    U, S, Vh = svd(A)
    return (U * S) @ Vh


def polar(A):
    U, _, Vh = svd(A)
    return U @ Vh


def cubic(A):
    U, S, Vh = svd(A)
    return (U * (S**3 + S)) @ Vh


def inverse_root(A):
    values, V = L.eigh(A)
    return (V * (values + 0.125).rsqrt()) @ V.mT


def square(A):
    values, V = L.eigh(A)
    return (V * values**2) @ V.mT


def exact_reconstruction(A, G):
    return back(exact(G))


def exact_cubic(A, G):
    A, G = exact(A), exact(G)
    return back(G * A.T * A + A * G.T * A + A * A.T * G + G)


def exact_polar(A, G):
    U, S, Vh = mpmath.svd_r(exact(A))
    M = U.T * exact(G) * Vh.T
    n = M.rows
    inner = mpmath.matrix(n, n)
    for i in range(n):
        for j in range(n):
            inner[i, j] = (M[i, j] - M[j, i]) / (S[i] + S[j])
    return back(U * inner * Vh)


def exact_square(A, G):
    A, G = exact(A), exact((G + G.mT) / 2)
    return back(A * G + G * A)


def exact_inverse_root(A, G):
    values, V = mpmath.eigsy(exact(A))
    M = V.T * exact((G + G.mT) / 2) * V
    roots = [mpmath.sqrt(v + mpmath.mpf(0.125)) for v in values]
    for i in range(M.rows):
        for j in range(M.cols):
            M[i, j] = -M[i, j] / (roots[i] * roots[j] * (roots[i] + roots[j]))
    return back(V * M * V.T)


LOSSES = {
    "reconstruction": (reconstruction, exact_reconstruction, False),
    "polar": (polar, exact_polar, False),
    "cubic": (cubic, exact_cubic, False),
    "square": (square, exact_square, True),
    "inverse root": (inverse_root, exact_inverse_root, True),
}


def gradient(F, A, G, context=nullcontext):
    A = A.clone().requires_grad_()
    with context(), warnings.catch_warnings():
        warnings.simplefilter("error", GaugeWarning)
        return torch.autograd.grad((G * F(A)).sum(), A)[0]


def error(found, truth, symmetric):
    found = (found + found.mT) / 2 if symmetric else found
    size = ((found - truth).norm() / truth.norm()).item()
    return math.inf if math.isnan(size) else size


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("condition", [2.0, 1e4, 1e8, 1e12])
def test_accuracy_over_separations(loss, condition):
    F, truth, symmetric = LOSSES[loss]
    worst_ours = worst_stock = 0.0
    for k, separation in enumerate(SEPARATIONS):
        A = with_values([condition**-1, 1 - separation, 1, 2], symmetric=symmetric, seed=k)
        G = weights(4, seed=50 + k)
        expected = truth(A, G)
        ours = error(gradient(F, A, G, mg.override), expected, symmetric)
        stock = error(gradient(F, A, G), expected, symmetric)
        # No worse anywhere. A quotient by the separation loses eps / separation (a polar factor: eps * condition): of two
        # errors of that size, which is the larger is chance.
        rounding = 2.2e-16 * max(16, 4 / max(separation, 1e-7), 4 * condition if loss == "polar" else 0)
        assert ours <= max(3 * stock, rounding), (separation, ours, stock)
        assert ours <= max(1e-7, 1e-15 * condition if loss == "polar" else 0), (separation, ours, stock)
        if separation <= 1e-12:
            worst_ours, worst_stock = max(ours, worst_ours), max(stock, worst_stock)
    if condition < 1e12 or loss != "polar":  # there the condition itself costs more than the separation
        assert worst_ours < 1e-3 * worst_stock


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("values", [(1, 1, 1), (1, 1, 2), (3, 3, 3, 3)], ids=str)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_exactly_at_degeneracy(loss, values, rotated, dtype):
    F, truth, symmetric = LOSSES[loss]
    A = with_values(values, symmetric=symmetric, dtype=dtype) if rotated else torch.diag(torch.tensor(values)).to(dtype)
    G = weights(len(values), dtype=dtype)
    found = gradient(F, A, G, mg.override).double()
    assert error(found, truth(A, G), symmetric) < (1e-12 if dtype == torch.float64 else 2e-4)
    if not rotated:
        assert gradient(F, A, G).isnan().any()  # stock


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_covariance_of_too_few_samples(rank):
    X = weights(6)[:rank]
    C, G = X.mT @ X, weights(6, seed=3)
    expected = exact_inverse_root(C, G)
    assert error(gradient(inverse_root, C, G, mg.override), expected, True) < 1e-12
    if rank < 3:
        assert error(gradient(inverse_root, C, G), expected, True) > 1e-3  # stock: noise


@pytest.mark.parametrize("separation", [1e-3, 1e-7, 1e-9, 1e-13, 0.0])
def test_projector_onto_a_whole_group(separation):
    A, G = with_values([0.25, 2, 2 + separation], symmetric=True), weights(3)

    def projector(A):
        V = L.eigh(A)[1][:, 1:]
        return V @ V.mT

    values, V = mpmath.eigsy(exact(A))
    M = V.T * exact((G + G.mT) / 2) * V
    for i in range(3):
        for j in range(3):
            M[i, j] = M[i, j] / (values[max(i, j)] - values[0]) if min(i, j) == 0 < max(i, j) else mpmath.mpf(0)
    # where values are near each other the derivative takes no part of the rounding errors, elsewhere it divides them
    limit = 1e-13 if separation < 1e-8 else 1e-13 + 16 * torch.finfo(torch.float64).eps / separation
    assert error(gradient(projector, A, G, mg.override), back(V * M * V.T), True) < limit


def test_nuclear_norm_and_rank_deficient_reconstruction():
    A = with_values([0, 2, 2, 2])
    found = gradient(reconstruction, A, weights(4), mg.override)
    torch.testing.assert_close(found, weights(4), rtol=0, atol=1e-12)
    U, S, Vh = svd(with_values([1, 2, 2, 2]))
    found = gradient(lambda A: L.svdvals(A), with_values([1, 2, 2, 2]), torch.ones(4), mg.override)
    torch.testing.assert_close(found, U @ Vh, rtol=0, atol=1e-13)


def test_forward_mode_of_tangents_that_keep_a_group_together():
    A, E = torch.eye(3, dtype=torch.float64), weights(3, 1)
    with mg.override(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GaugeWarning)
        tangent = torch.func.jvp(polar, (A,), (E,))[1]
        nuclear = torch.func.jvp(lambda A: L.svdvals(A).sum(), (A,), (E,))[1]
    torch.testing.assert_close(tangent, (E - E.mT) / 2)
    torch.testing.assert_close(nuclear, E.trace())
    assert torch.func.jvp(polar, (A,), (E,))[1].isnan().any()  # stock


def test_second_derivatives_of_functions_of_values_alone():
    A, E = torch.eye(3, dtype=torch.float64), weights(3, 1)

    def twice(f, A):
        A = A.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(A), A, create_graph=True)
        return torch.autograd.grad((g * E).sum(), A)[0]

    with mg.override(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GaugeWarning)
        squares = twice(lambda A: L.svdvals(A).square().sum(), A)
        torch.testing.assert_close(squares, 2 * E)
        nuclear = twice(lambda A: L.svdvals(A).sum(), A)
        torch.testing.assert_close(nuclear, (E - E.mT) / 2)
        eigenvalues = twice(lambda A: L.eigvalsh(A).pow(2).sum(), A)
        torch.testing.assert_close(eigenvalues, E + E.mT)
    assert twice(lambda A: L.svdvals(A).square().sum(), A).isnan().any()  # stock


def symmetric_eigenvalues(A):
    return L.eigvalsh(0.5 * (A + A.mT))


SECOND = {
    "rev-rev": lambda f, A, E: twice_reverse(f, A, E),
    "rev-fwd": lambda f, A, E: (torch.func.grad(lambda A: torch.func.jvp(f, (A,), (E,))[1])(A) * E).sum(),
    "fwd-rev": lambda f, A, E: (torch.func.jvp(torch.func.grad(f), (A,), (E,))[1] * E).sum(),
    "fwd-fwd": lambda f, A, E: torch.func.jvp(lambda A: torch.func.jvp(f, (A,), (E,))[1], (A,), (E,))[1],
}


def twice_reverse(f, A, E):
    A = A.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(A), A, create_graph=True)
    return (torch.autograd.grad((g * E).sum(), A)[0] * E).sum()


@pytest.mark.parametrize("values", [L.svdvals, symmetric_eigenvalues], ids=["svdvals", "eigvalsh"])
@pytest.mark.parametrize("mode", SECOND)
def test_a_second_derivative_that_lacks_the_part_that_splits_a_group_warns(mode, values):
    """The curvature of the sum of squares along one unit matrix, and along a full one: right, or with a warning."""
    A = torch.eye(4, dtype=torch.float64)
    unit = torch.zeros_like(A)
    unit[0, 1] = 1
    for E in (unit, unit.mT.contiguous(), torch.diag(unit.sum(1)), weights(4, 1)):
        truth = 2 * (E if values is L.svdvals else 0.5 * (E + E.mT)).square().sum()
        with mg.override(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = SECOND[mode](lambda A: values(A).square().sum(), A, E)
        warned = [w for w in caught if issubclass(w.category, GaugeWarning)]
        assert warned or torch.allclose(found, truth)
        assert all("mg.linalg.nuclear_norm" in str(w.message) for w in warned)
