"""Functions of matrices that are neither Hermitian nor, some of them, diagonalizable: values, derivatives, limits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.structural import OF_NUMBERS
from helpers.tensors import random
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad.linalg import expm, logm, powm, rsqrtm, sqrtm
from torch_manualgrad.linalg.general import principal_schur
from torch_manualgrad.testing import CHECKS, check

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]


def jordan(n, value, dtype=F64):
    return value * torch.eye(n, dtype=dtype) + torch.diag(torch.ones(n - 1, dtype=dtype), 1)


def similar(A, seed=0):
    """In another orthonormal basis."""
    Q = torch.linalg.qr(random(*A.shape[-2:], dtype=A.dtype, seed=seed))[0]
    return Q @ A @ Q.mH


def nonnormal(values, above, dtype=F64, seed=0):
    """A matrix with these eigenvalues, and entries of size ``above`` over the diagonal of its Schur form."""
    n = len(values)
    return similar(torch.diag(torch.tensor(values, dtype=dtype)) + above * random(n, n, dtype=dtype, seed=seed).triu(1))


def root(A):
    return powm(A, 0.3)


def inverse_power(A):
    return powm(A, -1.7)


FUNCTIONS = [sqrtm, rsqrtm, logm, expm, root, inverse_power]
BRANCHES = [sqrtm, rsqrtm, logm, root, inverse_power]


def points(dtype):
    yield "nonnormal", nonnormal((0.5, 1.2, 3), 1.0, dtype)
    yield "far from normal", nonnormal((0.5, 1.2, 3), 6.0, dtype)
    yield "defective", similar(jordan(3, 1.5, dtype))
    yield "nearly defective", similar(jordan(3, 1.5, dtype) + torch.diag(torch.tensor([0, 1e-7, -1e-7], dtype=dtype)))
    yield "nearly singular", nonnormal((0.05, 1.2, 2), 1.0, dtype)
    yield "identity", torch.eye(3, dtype=dtype)
    turned = torch.tensor([[0.2, -1.1, 0.3], [1.3, 0.1, 0.2], [0.0, 0.4, 0.9]], dtype=dtype)  # a conjugate pair
    yield "batch", torch.stack([turned, similar(jordan(3, 2.0, dtype), seed=1)]).mT


@pytest.mark.parametrize("f, dtype", in_turn(FUNCTIONS, DTYPES), ids=label)
def test_six_modes(f, dtype):
    # the identity is added because the logarithm of I is rounding only, and the checker scales by it
    for name, A in points(dtype):
        scale = 1e-2 if name == "nearly singular" and f is inverse_power else 1
        checks = CHECKS if name in ("nonnormal", "batch") else OF_NUMBERS
        check(f, [(A,)], readout=lambda F, scale=scale: scale * F + torch.eye(3), checks=checks)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_inverses_and_products(dtype):
    same = torch.testing.assert_close
    for name, A in points(dtype):
        eye = torch.eye(3, dtype=dtype).expand_as(A)
        tolerance = dict(rtol=1e-11, atol=1e-11) if name in ("far from normal", "nearly singular") else {}
        same(sqrtm(A) @ sqrtm(A), A, **tolerance)
        same(rsqrtm(A) @ sqrtm(A), eye, **tolerance)
        same(expm(logm(A)), A, **tolerance)
        same(root(A) @ powm(A, 0.7), A, **tolerance)
        same(inverse_power(A) @ powm(A, 1.7), eye, **tolerance)
        same(powm(A, 2.5), A @ A @ sqrtm(A), **tolerance)
        same(powm(A, -2), torch.linalg.matrix_power(A, -2), rtol=0, atol=0)
        same(powm(A, 0.5), sqrtm(A), rtol=0, atol=0)
        same(expm(A), torch.linalg.matrix_exp(A), rtol=0, atol=0)


def test_a_general_matrix_is_not_made_hermitian():
    A = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=F64)
    same = torch.testing.assert_close
    same(logm(A), torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=F64))
    same(sqrtm(A), torch.tensor([[1.0, 0.5], [0.0, 1.0]], dtype=F64))
    same(expm(A), math.e * A)
    same(powm(A, 0.25), torch.tensor([[1.0, 0.25], [0.0, 1.0]], dtype=F64))
    for f in FUNCTIONS:
        if f in (root, inverse_power):
            continue
        same(f(A, assume="hermitian"), f((A + A.mT) / 2, assume="hermitian"))
        assert not torch.allclose(f(A), f(A, assume="hermitian"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hermitian_matrix_by_both_ways(dtype):
    B = random(2, 4, 4, dtype=dtype)
    A = (B @ B.mH + torch.eye(4)).requires_grad_()
    G = random(2, 4, 4, dtype=dtype, seed=1)
    G = G + G.mH
    for f in (sqrtm, rsqrtm, logm, expm, lambda A, **o: powm(A, 1.3, **o)):
        values, gradients = [], []
        for assume in ("general", "hermitian"):
            values.append(f(A, assume=assume))
            gradients.append(torch.autograd.grad((values[-1] * G).sum().real, A)[0])
        torch.testing.assert_close(*values)
        torch.testing.assert_close(*gradients)


# -- accuracy, beside 110 digits ---------------------------------------------------------------------------------------

mp = pytest.importorskip("mpmath")


def exact(A):
    return mp.matrix([[mp.mpmathify(complex(x)) for x in row] for row in A.tolist()])


def as_tensor(M, dtype):
    found = torch.tensor([[complex(x) for x in row] for row in M.tolist()], dtype=C128)
    return found if dtype.is_complex else found.real


# the scalar functions
REFERENCES = {
    sqrtm: mp.sqrt,
    rsqrtm: lambda x: 1 / mp.sqrt(x),
    logm: mp.log,
    expm: mp.exp,
    root: lambda x: mp.power(x, mp.mpf(0.3)),
    inverse_power: lambda x: mp.power(x, mp.mpf(-1.7)),
}


def by_eigenvectors(f, M):
    """With so many digits that those lost at nearly dependent eigenvectors do not count."""
    values, V = mp.eig(M)
    return V * mp.diag([f(x) for x in values]) * mp.inverse(V)


def derivatives_of(f, A, E):
    """f(A) and its first and second derivative along E, by differences so small that they are exact."""
    h, M, direction = mp.mpf(10) ** -20, exact(A), exact(E)
    apart = mp.mpf(10) ** -60 * exact(random(*A.shape, seed=7))  # a defective matrix becomes diagonalizable
    low, value, high = (by_eigenvectors(f, M + k * h * direction + apart) for k in (-1, 0, 1))
    return [as_tensor(X, A.dtype) for X in (value, (high - low) / (2 * h), (high - 2 * value + low) / h**2)]


def hard(dtype):
    yield nonnormal((1.0, 1.3, 0.7), 3.0, dtype)
    yield nonnormal((1.0, 1e-3, 1e-6), 1.0, dtype)
    yield similar(jordan(3, 0.8, dtype))
    yield similar(1e-3 * jordan(3, 1.0, dtype))
    yield similar(torch.block_diag(jordan(2, 1.0, dtype), jordan(1, 3.0, dtype)))
    yield torch.diag(torch.tensor([1e-8, 1, 1e2], dtype=dtype)) + 1e-4 * random(3, 3, dtype=dtype).triu(1)
    yield torch.tensor([[0.1, -5, 1], [5, 0.1, 0], [0, 0, 0.3]], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_accuracy(f, dtype):
    """Value and gradient, relative to their condition: eps times |L_f(A)| |A| / |f(A)|, and so for the derivative."""
    with mp.workdps(110):
        for A in hard(dtype):
            n, E = len(A), random(*A.shape, dtype=dtype, seed=5)
            value, first, second = derivatives_of(REFERENCES[f], A, E)
            scale = A.norm() / E.norm()
            found, tangent = torch.func.jvp(f, (A,), (E,))
            eps = torch.finfo(F64).eps
            assert (found - value).norm() <= 100 * eps * (first.norm() * scale + value.norm())
            assert (tangent - first).norm() <= 100 * eps * (second.norm() * scale + first.norm())
            # the vjp is the transpose of this map
            G = random(n, n, dtype=dtype, seed=6)
            (g,) = torch.func.vjp(f, A)[1](G)
            paired, expected = (g.conj() * E).sum().real, (G.conj() * first).sum().real
            assert abs(paired - expected) <= 100 * eps * (second.norm() * scale + first.norm()) * G.norm()


def test_orders_above_the_second():
    """exp(log A) = A along a line: its derivatives from the second on are 0."""
    A, E = nonnormal((0.8, 1.0, 1.4), 1.0), 0.3 * random(3, 3, seed=2)

    def along(order, t):
        if order == 0:
            return expm(logm(A + t * E))
        return torch.func.jvp(lambda t: along(order - 1, t), (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=F64)
    torch.testing.assert_close(along(1, zero), E)
    for order in (2, 3):
        torch.testing.assert_close(along(order, zero), torch.zeros_like(E), rtol=0, atol=1e-10)


def test_large_and_small_directions():
    A = nonnormal((0.5, 1.2, 3), 1.0)
    for f in BRANCHES:
        derivative = torch.func.vjp(f, A)[1]
        (unit,) = derivative(torch.ones_like(A))
        for size in (1e-200, 1e200):
            torch.testing.assert_close(derivative(torch.full_like(A, size))[0] / size, unit)


# -- the Schur form ---------------------------------------------------------------------------------------------------


def schur_cases():
    for n in (1, 2, 5, 12):
        Z = random(n, n, seed=n)
        yield from (
            Z,
            jordan(n, 1.0),
            similar(jordan(n, 1.0)),
            similar(jordan(n, 0.0)),
            Z @ jordan(n, 1.0) @ Z.inverse(),
        )
        yield from (torch.eye(n, dtype=F64).roll(1, 0), torch.zeros(n, n, dtype=F64), jordan(n, 1.0).mT, Z @ Z.mT)
        yield from (
            random(n, n, dtype=C128),
            Z.triu() * random(n, n).exp(),
            torch.logspace(0, -n, n).to(F64).diag() @ Z,
        )
    grcar = torch.eye(24, dtype=F64) - torch.diag(torch.ones(23, dtype=F64), -1)
    yield grcar + sum(torch.diag(torch.ones(24 - k, dtype=F64), k) for k in (1, 2, 3))
    yield torch.stack([random(4, 4), similar(jordan(4, 2.0)), torch.zeros(4, 4, dtype=F64), jordan(4, 0.0).mT])


def test_schur_form():
    for A in schur_cases():
        A = A.to(C128)  # in which nothing is refused
        n = A.shape[-1]
        T, Q = principal_schur(A)
        assert torch.equal(T, T.triu()) and T.is_contiguous() and Q.is_contiguous()
        bound = 30 * n * torch.finfo(F64).eps
        assert (Q.mH @ Q - torch.eye(n)).norm(dim=(-2, -1)).max() < bound
        assert ((Q @ T @ Q.mH - A).norm(dim=(-2, -1)) <= bound * A.norm(dim=(-2, -1))).all()


def test_schur_form_that_does_not_converge(monkeypatch):
    monkeypatch.setattr("torch_manualgrad.linalg.schur_form._STEPS", 0)
    with pytest.raises(torch.linalg.LinAlgError, match="did not converge"):
        sqrtm(jordan(3, 1.0))


# -- the limits of the functions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", BRANCHES, ids=label)
def test_negative_eigenvalues(f):
    """No real matrix is the principal value; a complex one is, and as scipy has it."""
    A = nonnormal((-1.0, 2.0, 0.5), 1.0)
    assert f(A).isnan().all()
    both = torch.stack([A, nonnormal((1.0, 2.0, 0.5), 1.0)])
    assert f(both)[0].isnan().all() and torch.allclose(f(both)[1], f(both[1]))
    (g,) = torch.autograd.grad(f(x := both.clone().requires_grad_()).sum(), x)
    assert g[0].isnan().all() and g[1].isfinite().all()

    linalg = pytest.importorskip("scipy.linalg")
    p = {sqrtm: 0.5, rsqrtm: -0.5, root: 0.3, inverse_power: -1.7}
    expected = linalg.logm(A.numpy()) if f is logm else linalg.fractional_matrix_power(A.numpy(), p[f])
    found, expected = f(A.to(C128)), torch.from_numpy(expected).to(C128)
    # which of both signs an eigenvalue on the cut has is rounding's choice, in both libraries
    if not torch.allclose(found, expected, rtol=1e-10, atol=1e-10):
        torch.testing.assert_close(found, expected.conj(), rtol=1e-10, atol=1e-10)
    # beside the cut there is no choice
    for side in (1, -1):
        turned = A * torch.exp(torch.tensor(side * 0.01j, dtype=C128))
        e = linalg.logm(turned.numpy()) if f is logm else linalg.fractional_matrix_power(turned.numpy(), p[f])
        torch.testing.assert_close(f(turned), torch.from_numpy(e).to(C128), rtol=1e-10, atol=1e-10)


def test_singular_matrices():
    singular = nonnormal((0.0, 1.0, 4.0), 1.0)
    for A in (singular, torch.diag(torch.tensor([0.0, 0, 4], dtype=F64)), torch.zeros(3, 3, dtype=F64)):
        torch.testing.assert_close(sqrtm(A) @ sqrtm(A), A, rtol=1e-7, atol=1e-7)
        for f in (rsqrtm, logm, root, inverse_power):
            assert not f(A).isfinite().all()
    (g,) = torch.autograd.grad(sqrtm(x := torch.diag(torch.tensor([0.0, 0, 4], dtype=F64)).requires_grad_()).sum(), x)
    assert not g.isfinite().all()
    assert not sqrtm(jordan(2, 0.0)).isfinite().all()  # which has no root
    torch.testing.assert_close(powm(jordan(2, 0.0), 2), torch.zeros(2, 2, dtype=F64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("f", BRANCHES, ids=label)
def test_not_finite(f, value):
    for A in (torch.full((2, 2), value), torch.stack([torch.eye(2), torch.tensor([[1, value], [0, 1]])])):
        with pytest.raises(RuntimeError, match="should not contain infs or NaNs"):
            f(A)
    A = torch.full((2, 2), value)
    torch.testing.assert_close(expm(A), torch.linalg.matrix_exp(A), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 2, 2), (1, 1), (2, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_shapes(f, shape):
    A = (2 * torch.eye(shape[-1], dtype=F64) + 0.1 * random(*shape)).requires_grad_()
    (g,) = torch.autograd.grad(f(A).sum(), A, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), A)
    assert f(A).shape == g.shape == h.shape == A.shape
    assert g.isfinite().all() and h.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_single_precision(f, dtype):
    wide = C128 if dtype.is_complex else F64
    A = nonnormal((1.0, 1.1, 0.3), 1.0, wide).to(dtype)
    found = []
    for x in (A.clone(), A.to(wide)):
        x.requires_grad_()
        (g,) = torch.autograd.grad(f(x).square().sum().real, x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum().real, x)
        assert f(x).dtype == g.dtype == h.dtype == x.dtype
        found.append((f(x), g, h))
    for single, double in zip(*found):
        torch.testing.assert_close(single.to(wide), double, rtol=1e-4, atol=1e-5 * double.abs().max().item())


def test_autocast():
    A = torch.eye(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sqrtm(A).dtype == expm(A).dtype == torch.float32
    with pytest.raises(TypeError, match=r"A: expected single or double precision, or autocast, got torch.bfloat16"):
        sqrtm(A)


# -- transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_vmap_and_hessian(f):
    A = torch.stack([nonnormal((0.5, 1.2), 1.0), jordan(2, 1.5)])
    loss = lambda A: f(A).square().sum()  # noqa: E731
    found = torch.func.vmap(torch.func.hessian(loss))(A)
    for one, H in zip(A, found):
        torch.testing.assert_close(H, torch.autograd.functional.hessian(loss, one))


@pytest.mark.parametrize("f", [logm, sqrtm, expm], ids=label)
def test_compiled_general(f):
    A = torch.stack([nonnormal((0.5, 1.2, 3), 1.0), jordan(3, 1.5)]).requires_grad_()
    G = random(2, 3, 3)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad((g(A) * G).sum(), A)[0] for g in (compiled, f))
    torch.testing.assert_close(found, expected)


def test_under_override_nothing_changes_for_general_ones():
    A = jordan(3, 1.5).requires_grad_()
    for f in FUNCTIONS:
        (expected,) = torch.autograd.grad(f(A).square().sum(), A)
        with mg.override("*"):
            (found,) = torch.autograd.grad(f(A).square().sum(), A)
        torch.testing.assert_close(found, expected)


def test_meta():
    A = torch.empty(2, 3, 3, device="meta", requires_grad=True)
    for f in FUNCTIONS:
        (g,) = torch.autograd.grad(f(A).sum(), A)
        assert f(A).shape == g.shape == A.shape and g.device.type == "meta"


@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_assume_is_one_of_two(f):
    if f in (root, inverse_power):
        with pytest.raises(ValueError, match="assume: expected 'general' or 'hermitian', got 'spd'"):
            powm(torch.eye(2), 0.3, assume="spd")
        return
    with pytest.raises(ValueError, match="assume: expected 'general' or 'hermitian', got 'spd'"):
        f(torch.eye(2), assume="spd")
    with pytest.raises(TypeError, match="assume: expected 'general' or 'hermitian', got None"):
        f(torch.eye(2), assume=None)


def test_integer_powers_that_overflow():
    """Squares of zeros and infinities are nan in a matrix product."""
    A = torch.tensor([[2.0, 0.0], [0.0, 0.5]], dtype=F64)
    same = torch.testing.assert_close
    same(powm(A, 2000), torch.tensor([[math.inf, 0.0], [0.0, 0.0]], dtype=F64))
    same(powm(-A, 2001), torch.tensor([[-math.inf, 0.0], [0.0, 0.0]], dtype=F64))
    same(powm(A, -2000), torch.tensor([[0.0, 0.0], [0.0, math.inf]], dtype=F64))


@pytest.mark.parametrize("assume", ["general", "hermitian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_a_power_that_overflows_is_infinite_where_it_is_and_finite_elsewhere(assume, dtype):
    A = torch.diag(torch.tensor([2.0, 0.5, 1.0])).to(dtype)
    for B, p in ((A, 2000.5), (A[[1, 0, 2]][:, [1, 0, 2]], -2000.5)):
        expected = torch.diag(torch.tensor([math.inf, 0.0, 1.0], dtype=dtype))
        assert torch.equal(powm(B, p, assume=assume), expected)
    assert torch.equal(powm(2 * torch.eye(2, dtype=dtype), 2000.5, assume=assume).abs().isinf(), torch.eye(2) > 0)


def test_the_finite_entries_of_an_overflowing_power_are_right_off_the_diagonal():
    A = torch.block_diag(torch.tensor([[0.5, 1.0], [0.0, 1.0]]), torch.tensor([[2.0]])).double()
    torch.testing.assert_close(powm(A, 2000.5)[:2, :2], torch.tensor([[0.0, 2.0], [0.0, 1.0]], dtype=torch.float64))
    assert powm(A, 2000.5)[2, 2] == math.inf


def test_an_exponential_that_overflows_is_infinite_on_the_diagonal():
    assert torch.equal(expm(1000 * torch.eye(2), assume="hermitian"), torch.diag(torch.tensor([math.inf, math.inf])))
