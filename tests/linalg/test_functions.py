"""Functions of a matrix that is assumed Hermitian: derivatives where eigenvalues repeat or nearly do, and their accuracy."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from helpers.structural import OF_NUMBERS
from helpers.tensors import random
from helpers.thinning import in_turn, label

import torch_manualgrad as mg
from torch_manualgrad.linalg import funm_hermitian, tables
from torch_manualgrad.testing import CHECKS, check

F64, C128 = torch.float64, torch.complex128


def hermitian(values, dtype=F64, seed=0):
    """A matrix with these eigenvalues, in no particular basis."""
    Q = torch.linalg.qr(random(len(values), len(values), dtype=dtype, seed=seed))[0]
    return (Q * torch.tensor(values, dtype=dtype)) @ Q.mH


def assume_hermitian(f):
    return functools.update_wrapper(functools.partial(f, assume="hermitian"), f)


expm, logm, powm, rsqrtm, sqrtm = map(
    assume_hermitian, (mg.linalg.expm, mg.linalg.logm, mg.linalg.powm, mg.linalg.rsqrtm, mg.linalg.sqrtm)
)

SPECTRA = {"I": (1, 1, 1), "pair": (1, 1, 2), "close": (1, 1 + 1e-9, 2), "apart": (0.5, 1.2, 3)}


def sine(A):
    return funm_hermitian(A, torch.sin)


def sine_given(A):
    return funm_hermitian(A, torch.sin, (torch.cos, lambda x: -x.sin(), lambda x: -x.cos()))


def fractional(A):
    return powm(A, 1.7)


def negative(A):
    return powm(A, -0.3)


FUNCTIONS = [sqrtm, rsqrtm, logm, expm, fractional, negative, sine, sine_given]


@pytest.mark.parametrize("f, dtype", in_turn(FUNCTIONS, [F64, C128]), ids=label)
def test_six_modes_at_every_degeneracy(f, dtype):
    points = [hermitian(values, dtype) for values in SPECTRA.values()]
    batch = torch.stack([points[0], points[2]]).mT
    # the identity is added because the logarithm of I is rounding only, and the checker scales by it
    check(f, [(A,) for A in (torch.eye(3, dtype=dtype), batch)], readout=lambda F: F + torch.eye(3))
    check(f, [(A,) for A in points], readout=lambda F: F + torch.eye(3), checks=OF_NUMBERS)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("order", [1, 2])
def test_the_operator_by_itself(order, dtype):
    """Also in directions that are not Hermitian, which a cotangent need not be."""

    def derivative(A, E):
        A = (A + A.mH) / 2
        L, V = torch.linalg.eigh(A.detach())
        return mg.ops.hermitian_function(A, L, V, *tables.log(L), E)

    for values in ((1, 1, 2), (1, 1.5, 2)):
        A, E = hermitian(values, dtype), random(order, 3, 3, dtype=dtype, seed=7)
        checks = CHECKS if values[0] == values[1] else OF_NUMBERS
        check(derivative, [(A, E)], checks=checks)
        check(lambda A, E=E: derivative(A, E), [(A,)], checks=checks)


def test_powers_that_are_integers():
    A = hermitian((-1, 2, 2))
    assert torch.equal(powm(A, 1), A)
    for p in (3, -2, 0):
        check(lambda A, p=p: powm(A, p), [(A,)])
    torch.testing.assert_close(powm(A, -2) @ A @ A, torch.eye(3, dtype=F64))


def test_values_and_inverses():
    A = hermitian((0.3, 1, 1, 5), C128)
    same = torch.testing.assert_close
    same(sqrtm(A) @ sqrtm(A), A)
    same(rsqrtm(A) @ sqrtm(A), torch.eye(4, dtype=C128))
    same(expm(logm(A)), A)
    same(powm(A, 0.7) @ powm(A, -0.7), torch.eye(4, dtype=C128))
    same(powm(A, 0.5), sqrtm(A), rtol=0, atol=0)
    same(expm(A), torch.linalg.matrix_exp(A))
    same(sine(A), funm_hermitian(A, torch.sin, [torch.cos] * 9), rtol=0, atol=0)


def test_stock_at_the_identity():
    def root(A):
        L, V = torch.linalg.eigh(A)
        return (V * L.sqrt()) @ V.mH

    G = random(3, 3)
    found = {}
    for f in (root, sqrtm):
        A = torch.eye(3, dtype=F64, requires_grad=True)
        (found[f],) = torch.autograd.grad((f(A) * G).sum(), A)
    assert found[root].isnan().any()
    torch.testing.assert_close(found[sqrtm], (G + G.T) / 4)


def test_the_gradient_is_hermitian_and_of_the_hermitian_part():
    A = (
        hermitian((1, 1, 2), C128) + 0.1 * (skew := random(3, 3, dtype=C128) - random(3, 3, dtype=C128).mH)
    ).requires_grad_()
    (g,) = torch.autograd.grad((logm(A) * random(3, 3, dtype=C128, seed=1)).sum().real, A)
    assert torch.equal(g, g.mH)
    torch.testing.assert_close(logm(A), logm(A - 0.1 * skew))


# -- accuracy, beside 50 digits --------------------------------------------------------------------------------------

mp = pytest.importorskip("mpmath")
mp.mp.dps = 50


def mp_power(p):
    return lambda k, x: mp.ff(p, k) * x ** (mp.mpf(p) - k)


REFERENCES = [  # function, its k-th derivative, relative error of first and second derivatives
    (sqrtm, mp_power(0.5), 2e-15, 1e-12),
    (rsqrtm, mp_power(-0.5), 2e-15, 1e-12),
    (logm, lambda k, x: mp.log(x) if k == 0 else (-1) ** (k + 1) * mp.factorial(k - 1) / x**k, 2e-15, 1e-12),
    (expm, lambda k, x: mp.exp(x), 2e-15, 1e-12),
    (fractional, mp_power(1.7), 2e-14, 1e-12),
    (negative, mp_power(-0.3), 2e-14, 1e-12),
    (sine, lambda k, x: mp.sin(x + k * mp.pi / 2), 1e-12, 5e-11),
    (sine_given, lambda k, x: mp.sin(x + k * mp.pi / 2), 1e-12, 5e-11),
]


def mp_difference(derivative, nodes):
    """The divided difference over ascending nodes."""
    if nodes[0] == nodes[-1]:
        return derivative(len(nodes) - 1, nodes[0]) / mp.factorial(len(nodes) - 1)
    return (mp_difference(derivative, nodes[1:]) - mp_difference(derivative, nodes[:-1])) / (nodes[-1] - nodes[0])


@pytest.mark.parametrize("f, derivative, first, second", REFERENCES, ids=[r[0].__name__ for r in REFERENCES])
def test_accuracy_at_every_separation(f, derivative, first, second):
    """Entry by entry, at diagonal matrices, whose eigenvalues are exact: what is measured is the formula."""
    for separation, start, end in itertools.product(
        [0.0, 0.3, *(10.0**-k for k in range(2, 15))], [1.0], [1.0, 3.0, 1e-3, 1e-6, 1e-12]
    ):
        values = sorted([start, start * (1 + separation), start * (1 + 0.37 * separation), end])
        G, E = random(4, 4), random(4, 4, seed=1)
        G, E = G + G.T, E + E.T
        A = torch.diag(torch.tensor(values, dtype=F64)).requires_grad_()
        (g,) = torch.autograd.grad((f(A) * G).sum(), A, create_graph=True)
        (h,) = torch.autograd.grad((g * E).sum(), A)

        nodes = [mp.mpf(v) for v in values]
        D = torch.empty(4, 4, dtype=F64)
        D2 = torch.empty(4, 4, 4, dtype=F64)
        for i, j in itertools.combinations_with_replacement(range(4), 2):
            exact = float(mp_difference(derivative, [nodes[i], nodes[j]]))
            D[i, j] = D[j, i] = exact
        for at in itertools.combinations_with_replacement(range(4), 3):
            exact = float(mp_difference(derivative, [nodes[i] for i in at]))
            for i, j, k in itertools.permutations(at):
                D2[i, j, k] = exact
        error = ((g - D * G) / (D * G)).abs().max().item()
        assert error < first, (separation, end)
        terms = torch.stack([torch.einsum("ijk,ij,jk->ijk", D2, X, Y) for X, Y in ((G, E), (E, G))])
        error = ((h - terms.sum((0, 2))) / terms.abs().sum((0, 2))).abs().max().item()
        assert error < second, (separation, end)


@pytest.mark.parametrize("condition", [1e2, 1e6, 1e12])
def test_accuracy_of_an_ill_conditioned_matrix(condition):
    """In a general basis the eigenvalues carry the rounding of the matrix: eps times the condition number, at most."""
    n = 4
    A = hermitian([1 / condition, 2 / condition, 0.5, 1])
    G = random(n, n) + random(n, n).T
    exact = mp.matrix([[mp.mpf(float((A[i, j] + A[j, i]) / 2)) for j in range(n)] for i in range(n)])
    L, V = mp.eighe(exact)
    rotated = V.H * mp.matrix(G.tolist()) * V
    for f, derivative, *_ in REFERENCES[:3]:
        x = A.clone().requires_grad_()
        (g,) = torch.autograd.grad((f(x) * G).sum(), x)
        X = mp.matrix(n, n)
        for i, j in itertools.product(range(n), repeat=2):
            X[i, j] = mp_difference(derivative, sorted([L[i], L[j]])) * rotated[i, j]
        reference = torch.tensor([[float(mp.re(v)) for v in row] for row in (V * X * V.H).tolist()], dtype=F64)
        error = (g - reference).norm() / reference.norm()
        assert error < 20 * torch.finfo(F64).eps * condition


# -- higher orders, special points, other dtypes ---------------------------------------------------------------------


def along(f, A, E, order):
    """The derivative of f(A + t E) in t, at 0."""

    def derivative(order, t):
        if order == 0:
            return f(A + t * E)
        return torch.func.jvp(lambda t: derivative(order - 1, t), (t,), (torch.ones_like(t),))[1]

    return derivative(order, torch.zeros((), dtype=F64))


@pytest.mark.parametrize("values", [(1, 1, 1), (1, 1, 2), (1, 1.5, 2)], ids=str)
def test_orders_up_to_the_fourth_are_those_of_matrix_exp(values):
    A, E = hermitian(values), hermitian((-0.5, 0.4, 1), seed=1)
    for order in range(5):
        ours, theirs = along(expm, A, E, order), along(torch.linalg.matrix_exp, A, E, order)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("values", [(1, 1, 1), (1, 1, 2)], ids=str)
def test_third_order_of_the_square_root(values):
    """Leibniz on S S = A: the third derivative of the product along a line is 0."""
    S = [along(sqrtm, hermitian(values), hermitian((-0.5, 0.4, 1), seed=1), order) for order in range(4)]
    third = S[0] @ S[3] + S[3] @ S[0] + 3 * (S[1] @ S[2] + S[2] @ S[1])
    torch.testing.assert_close(third, torch.zeros_like(third), rtol=0, atol=1e-10)


def test_reverse_over_all_orders():
    G = random(3, 3)

    def loss(A):
        return (expm(A) * G).sum()

    def stock(A):
        return (torch.linalg.matrix_exp((A + A.mT) / 2) * G).sum()

    A = hermitian((1, 1, 2))
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        found, expected = (transform(torch.func.jacrev(torch.func.jacrev(f)))(A) for f in (loss, stock))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_an_order_without_a_known_function():
    A = torch.full((1, 1), 0.3, dtype=F64)
    more = [torch.cos, lambda x: -x.sin(), lambda x: -x.cos(), torch.sin, torch.cos, lambda x: -x.sin()]
    L, V, one = A[0], torch.ones_like(A), torch.ones_like(A)

    def fifth(A, derivatives):
        """By the operator: six nested jvps of the function take a minute, and the orders above go through them."""
        table = tables.of_function(torch.sin, derivatives, L)
        return mg.ops.hermitian_function(A, L, V, *table, one.expand(5, 1, 1))

    for known in ([], more[:3]):
        torch.testing.assert_close(fifth(A, known), A.cos())
        with pytest.raises(NotImplementedError, match="of order 6 .* 5 are known: pass more derivatives"):
            along(lambda A, known=known: fifth(A, known), A, one, 1)
    torch.testing.assert_close(fifth(A, more), A.cos())
    torch.testing.assert_close(along(lambda A: fifth(A, more), A, one, 1), -A.sin())
    assert funm_hermitian(A, torch.sin, more).equal(sine(A))


def test_the_table_is_made_in_blocks(monkeypatch):
    def second(A):
        return torch.autograd.functional.hvp(lambda A: (logm(A) * random(2, 5, 5)).sum(), A, random(2, 5, 5, seed=1))[1]

    A = torch.stack([hermitian((1, 1, 2, 3, 3)), hermitian((1, 2, 3, 4, 5))])
    whole = second(A)
    monkeypatch.setattr("torch_manualgrad.derivatives.linalg.divided_differences._CHUNK", 100)
    torch.testing.assert_close(second(A), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 2, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_empty_and_one_by_one(f, shape):
    A = torch.ones(shape, dtype=F64, requires_grad=True)
    (g,) = torch.autograd.grad(f(A).sum(), A, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), A)
    assert f(A).shape == g.shape == h.shape == A.shape
    assert g.isfinite().all() and h.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("f", FUNCTIONS, ids=label)
def test_single_precision(f, dtype):
    for values in ((1, 1, 2), (1e-4, 1.1e-4, 1)):
        G, E = (random(3, 3, dtype=C128 if dtype.is_complex else F64, seed=s).to(dtype) for s in (1, 2))
        wide = C128 if dtype.is_complex else F64
        A = torch.diag(torch.tensor(values, dtype=dtype))
        found = []
        for x in (A, A.to(wide)):
            x = x.clone().requires_grad_()
            (g,) = torch.autograd.grad((f(x) * G.to(x.dtype)).sum().real, x, create_graph=True)
            (h,) = torch.autograd.grad((g * E.to(x.dtype)).sum().real, x)
            assert f(x).dtype == g.dtype == h.dtype == x.dtype
            found.append((g, h))
        for single, double in zip(*found):
            torch.testing.assert_close(single.to(wide), double, rtol=1e-5, atol=1e-5 * double.abs().max().item())


def test_outside_the_domain():
    for f in (sqrtm, rsqrtm, logm, fractional):
        assert f(hermitian((-1, 1, 2))).isnan().all()
    A = torch.diag(torch.tensor([0.0, 1, 4], dtype=F64)).requires_grad_()
    torch.testing.assert_close(sqrtm(A), torch.diag(torch.tensor([0.0, 1, 2], dtype=F64)))
    (g,) = torch.autograd.grad(sqrtm(A).sum(), A)
    assert not g.isfinite().all()
    assert sine(hermitian((-1, 0, 2))).isfinite().all()


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: sqrtm(torch.ones(2, 3)), ValueError, "A: expected square"),
        (lambda: logm(torch.ones(3)), ValueError, "A: expected a matrix"),
        (lambda: expm(torch.ones(2, 2, dtype=torch.int64)), TypeError, "A: expected a floating"),
        (lambda: rsqrtm([[1.0]]), TypeError, r"rsqrtm: A: expected a Tensor, got \[\[1.0\]\]"),
        (lambda: powm(torch.eye(2), float("nan")), ValueError, "p: expected a finite number, got nan"),
        (
            lambda: powm(torch.eye(2), torch.tensor(2.0)),
            TypeError,
            r"p: expected a real number, got a Tensor of shape \[\]",
        ),
        (lambda: powm(torch.eye(2), True), ValueError, "p: expected a finite number, got True"),
        (lambda: funm_hermitian(torch.eye(2), torch.sum), ValueError, r"f: expected a real tensor of shape \[2\]"),
        (
            lambda: funm_hermitian(torch.eye(2), torch.sin, [lambda x: 1.0]),
            ValueError,
            r"derivatives\[0\]: .* got float",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("f", [logm, sine], ids=label)
def test_compiled(f):
    A = torch.stack([torch.eye(3, dtype=F64), hermitian((1, 1, 2))]).requires_grad_()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    G = random(2, 3, 3)
    found, expected = (torch.autograd.grad((g(A) * G).sum(), A)[0] for g in (compiled, f))
    torch.testing.assert_close(found, expected)


def test_under_override_nothing_changes():
    A = torch.stack([torch.eye(3, dtype=F64), hermitian((1, 1, 2))]).requires_grad_()
    (expected,) = torch.autograd.grad(sqrtm(A).square().sum(), A)
    with mg.override("*"):
        (found,) = torch.autograd.grad(sqrtm(A).square().sum(), A)
    torch.testing.assert_close(found, expected)
