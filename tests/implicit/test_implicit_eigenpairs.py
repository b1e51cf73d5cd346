"""eigsh and svds next to the whole decomposition: every mode to the third order, large operators, degeneracy, failures."""

from __future__ import annotations

import pytest
import torch
from helpers.modes import MODES, derivatives
from helpers.tensors import close, random
from torch.func import functional_call, grad, hessian, jacrev, vmap

import torch_manualgrad as mg
from torch_manualgrad.implicit import ConvergenceError, ConvergenceWarning, HiddenTensorError, eigsh, svds
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128


def hermitian(x, A):
    return (A + A.mH) @ x


def product(x, A):
    return A @ x


def invariants(L, V):
    """What does not depend on the phase of an eigenvector."""
    P = (V * (0.2 * L).sin()) @ V.mH
    return L, V.abs().square(), P.real, P.imag if P.is_complex() else P


def as_matrix(R, dtype):
    return torch.view_as_complex(R) if dtype.is_complex else R


def of_matrix(A):
    return torch.view_as_real(A) if A.is_complex() else A


WANTED = {"LA": [3, 4], "SA": [0, 1], "LM": [0, 4]}


@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("which", WANTED)
def test_every_mode_of_eigenpairs(which, dtype, mode):
    A = random(5, 5, dtype=dtype, seed=3)
    values = torch.linalg.eigvalsh(A + A.mH)
    assert sorted(values.abs().topk(2).indices.tolist()) == WANTED["LM"]

    def ours(R):
        return invariants(*eigsh(hermitian, 5, 2, as_matrix(R, dtype), which=which, rtol=1e-13))

    def whole(R):
        A = as_matrix(R, dtype)
        L, V = mg.linalg.eigh(A + A.mH)
        return invariants(L[WANTED[which]], V[:, WANTED[which]])

    close(derivatives(ours, [of_matrix(A)], mode), derivatives(whole, [of_matrix(A)], mode))


@pytest.mark.parametrize("mode", ["", *MODES])
@pytest.mark.parametrize(("m", "n", "dtype"), [(6, 4, F64), (4, 6, F64), (5, 3, C128)])
def test_every_mode_of_singular_triplets(m, n, dtype, mode):
    def of(U, S, Vh):
        P = (U * (0.2 * S).sin()) @ Vh
        return S, U.abs().square(), Vh.abs().square(), P.real, P.imag if P.is_complex() else P

    def ours(R):
        return of(*svds(product, n, 2, as_matrix(R, dtype), rtol=1e-13))

    def whole(R):
        U, S, Vh = mg.linalg.svd(as_matrix(R, dtype), full_matrices=False)
        return of(U[:, :2], S[:2], Vh[:2])

    A = of_matrix(random(m, n, dtype=dtype, seed=4))
    close(derivatives(ours, [A], mode), derivatives(whole, [A], mode))


def test_by_finite_differences():
    def density(A):
        L, V = eigsh(hermitian, 4, 2, A)
        return L, V.abs().square().sum(1)

    check(density, [(random(4, 4, dtype=C128),)])


def laplacian(x, V):
    u = x.reshape(V.shape)
    p = torch.nn.functional.pad(u, (1, 1, 1, 1))
    return (4 * u - p[2:, 1:-1] - p[:-2, 1:-1] - p[1:-1, 2:] - p[1:-1, :-2] + V * u).reshape(-1)


@pytest.mark.parametrize("which", ["SA", "LA", "LM"])
def test_many_rows_and_eigenvalues_that_repeat(which):
    """By ARPACK and minres. The second and third eigenvalues of a square are equal: their sum and density have gradients."""
    pytest.importorskip("scipy")
    V = torch.zeros(20, 20, dtype=F64, requires_grad=True)
    L, X = eigsh(laplacian, 400, 3, V, which=which, on_failure="raise")
    angles = torch.arange(1, 21, dtype=F64) * torch.pi / 21
    every = (4 - 2 * angles.cos()[:, None] - 2 * angles.cos()).flatten().sort().values
    close(L, every[:3] if which == "SA" else every[-3:])
    density = X.square().sum(1)
    (slope,) = torch.autograd.grad(L.sum(), V, create_graph=True)
    close(slope, density.reshape(20, 20))
    first, second = random(20, 20, seed=1), random(20, 20, seed=2)
    (found,) = torch.autograd.grad((slope * first).sum(), V)
    dense = torch.vmap(lambda x: laplacian(x, V.detach()))(torch.eye(400, dtype=F64))
    values, U = torch.linalg.eigh(dense)
    kept = range(3) if which == "SA" else range(397, 400)
    other = [i for i in range(400) if i not in kept]
    inner, left = U[:, list(kept)], U[:, other]
    a, b = (left.mT @ (d.reshape(-1, 1) * inner) for d in (first, second))
    expected = 2 * (a * b / (values[list(kept)] - values[other][:, None])).sum()
    close((found * second).sum(), expected, rtol=1e-7)


def test_singular_triplets_of_a_large_operator():
    pytest.importorskip("scipy")
    A = random(300, 200).requires_grad_()
    U, S, Vh = svds(product, 200, 3, A, on_failure="raise")
    (slope,) = torch.autograd.grad(S.sum(), A)
    close(S, torch.linalg.svdvals(A)[:3])
    close(slope, U @ Vh)


def test_vmap_and_transforms_of_it():
    A = random(4, 5, 5)
    f = lambda A: eigsh(hermitian, 5, 2, A).eigenvalues.square().sum()  # noqa: E731
    g = lambda A: torch.linalg.eigvalsh(A + A.mH)[3:].square().sum()  # noqa: E731
    close(vmap(f)(A), vmap(g)(A))
    close(vmap(grad(f))(A), vmap(grad(g))(A))
    close(hessian(f)(A[0]), hessian(g)(A[0]))
    close(vmap(jacrev(grad(f)))(A), torch.stack([hessian(g)(a) for a in A]))
    x = A.clone().requires_grad_()
    close(torch.autograd.grad(vmap(f)(x).sum(), x), torch.autograd.grad(sum(map(g, x)), x))


def test_parameters_may_be_trees_and_modules():
    net = torch.nn.Linear(4, 4, bias=False, dtype=F64)

    def matvec(x, parameters, scale):
        W = parameters["weight"]
        return scale["by"] * (functional_call(net, {"weight": W}, (x,)) + W.mT @ x)

    scale = {"by": torch.tensor(0.5, dtype=F64), "name": "no tensor"}
    L = eigsh(matvec, 4, 1, dict(net.named_parameters()), scale, which="LM").eigenvalues
    L.sum().backward()
    W = net.weight.detach().requires_grad_()
    values = torch.linalg.eigvalsh((W + W.mT) / 2)
    (expected,) = torch.autograd.grad(values[values.abs().argmax()], W)
    close(net.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_single_precision(dtype):
    A = random(6, 6, dtype=C128 if dtype.is_complex else F64).to(dtype).requires_grad_()
    L, V = eigsh(hermitian, 6, 2, A)
    assert L.dtype == torch.float32 and V.dtype == dtype
    (slope,) = torch.autograd.grad(L.sum(), A)
    close(slope, 2 * (V @ V.mH).detach(), rtol=1e-5)


def test_a_solver_of_the_user():
    A = random(6, 6).requires_grad_()

    def solver(matvec, n, k):
        L, V = torch.linalg.eigh(matvec(torch.eye(n, dtype=F64)))
        close(matvec(V[:, 0]), L[0] * V[:, 0])
        return L[-k:], 3 * V[:, -k:].flip(1)  # neither normalized nor in order

    found = [eigsh(hermitian, 6, 2, A, solver=s, tangent_solver=t) for s, t in ((solver, "gmres"), ("direct", "auto"))]
    for (L, V), (M, W) in [found]:
        close(L, M)
        close(torch.autograd.grad((V @ V.mT)[0, 1], A, retain_graph=True), torch.autograd.grad((W @ W.mT)[0, 1], A))


def test_all_eigenpairs():
    A = random(4, 4).requires_grad_()
    L, V = eigsh(hermitian, 4, 4, A)
    close((V * L) @ V.mT, A + A.mT)
    (slope,) = torch.autograd.grad(((V * L.exp()) @ V.mT)[0, 0], A)
    (expected,) = torch.autograd.grad(torch.linalg.matrix_exp(A + A.mT)[0, 0], A)
    close(slope, expected)


def test_no_parameters():
    L, V = eigsh(lambda x: torch.arange(5.0) * x, 5, 2, which="SA")
    assert L.dtype == torch.float32 and not L.requires_grad
    close(L, torch.tensor([0.0, 1.0]), rtol=1e-6)
    assert eigsh(lambda x: x, 3, 1, dtype=C128).eigenvectors.dtype == C128


def test_where_there_is_no_derivative_a_message_says_so():
    A = torch.diag(torch.tensor([1.0, 2, 2], dtype=F64)).requires_grad_()
    with pytest.warns(ConvergenceWarning, match="singular"):
        torch.autograd.grad(eigsh(product, 3, 1, A).eigenvectors.square()[0].sum(), A)
    with pytest.raises(ConvergenceError, match="singular value of 0"):
        svds(product, 3, 2, torch.diag(torch.tensor([1.0, 0, 0])), on_failure="raise")


def test_a_solve_that_does_not_converge():
    pytest.importorskip("scipy")
    V = torch.zeros(30, 30, dtype=F64)
    with pytest.warns(ConvergenceWarning, match="eigsh did not converge"):
        eigsh(laplacian, 900, 2, V, which="SA", maxiter=1)


def test_a_hidden_tensor_is_named():
    hidden = torch.ones(3, 3).requires_grad_()
    with pytest.raises(HiddenTensorError, match="hidden"):
        eigsh(lambda x: (hidden + hidden.mT) @ x, 3, 1)
    with pytest.raises(HiddenTensorError, match="hidden"):
        svds(lambda x: hidden @ x, 3, 1)
    with pytest.raises(HiddenTensorError):
        grad(lambda a: eigsh(lambda x: a * x, 3, 1).eigenvalues.sum())(torch.ones(3))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: eigsh(product, 3, 4, torch.eye(3)), "k: expected 1 to 3, got 4"),
        (lambda: eigsh(product, 0, 1, torch.eye(0)), "n: expected at least 1, got 0"),
        (lambda: eigsh(product, 3, 1, torch.eye(3), which="SM"), "which"),
        (lambda: eigsh(product, 3, 1, torch.eye(3), solver="arpack"), "solver: expected one of .* got 'arpack'"),
        (lambda: eigsh(product, 3, 1, torch.ones(2, 3)), r"matvec: expected a real tensor of shape \[3\]"),
        (lambda: eigsh(product, 3, 1, torch.eye(3), tangent_solver="lu"), "tangent_solver"),
        (lambda: eigsh(product, 3, 1, torch.eye(3), solver=lambda A, n, k: (0, torch.ones(n))), "solver: expected eigen"),
        (lambda: svds(product, 3, 3, torch.ones(2, 3)), "k: expected 1 to 2, got 3"),
        (lambda: svds(lambda x: x[None], 3, 1), "matvec: expected a tensor of one dim"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call()
