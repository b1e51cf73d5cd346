"""Householder products where the tests of the rules do not look: reflectors of every kind, inputs that are fixed."""

import itertools

import pytest
import torch
from helpers.tensors import close
from torch.func import grad, jvp

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
DTYPES = pytest.mark.parametrize("dtype", [F64, C128], ids=str)
OVERRIDE = ("aten::linalg_householder_product", "aten::ormqr")


@pytest.fixture
def override():
    with mg.override(*OVERRIDE):
        yield


def product(input, tau):
    """Reflector by reflector."""
    m, n = input.shape
    Q = torch.eye(m, dtype=input.dtype)
    for i in range(tau.shape[0]):
        v = torch.cat([torch.zeros(i, dtype=input.dtype), torch.ones(1, dtype=input.dtype), input[i + 1 :, i]])
        Q = Q - tau[i] * (Q @ v).unsqueeze(1) * v.conj()
    return Q[:, :n]


@DTYPES
def test_householder_product_against_one_reflector_at_a_time(dtype, override):
    for (m, n, k), seed in itertools.product([(5, 3, 3), (4, 4, 2), (3, 3, 3)], range(2)):
        primals = random(m, n, dtype=dtype, seed=seed), random(k, dtype=dtype, seed=seed + 1)
        tangents = random(m, n, dtype=dtype, seed=5), random(k, dtype=dtype, seed=6)
        close(torch.linalg.householder_product(*primals), product(*primals))

        def both(f, primals=primals, tangents=tangents):
            value, tangent = jvp(f, primals, tangents)
            gradients = grad(lambda *x: (f(*x) * value.conj() ** 2).real.sum(), (0, 1))(*primals)
            return tangent, *gradients

        for ours, expected in zip(both(torch.linalg.householder_product), both(product)):
            close(ours, expected)


@pytest.mark.parametrize("taus", ["zero", "no inverse"])
@DTYPES
def test_reflectors_that_are_the_identity_or_have_no_inverse(taus, dtype, override):
    input = random(4, 3, dtype=dtype)
    V = input.tril(-1) + torch.eye(4, 3, dtype=dtype)
    tau = random(3, dtype=dtype, seed=1)
    tau[1] = 0 if taus == "zero" else 1 / V[:, 1].abs().square().sum()
    check(torch.linalg.householder_product, [(input, tau)], checks=("agreement", "duality"))
    check(torch.ormqr, [(input, tau, random(4, 2, dtype=dtype, seed=2))], checks=("agreement", "duality"))


def test_stock_householder_product_is_wrong():
    input, tau = random(4, 3, dtype=F64), random(3, dtype=F64, seed=1)
    V = input.tril(-1) + torch.eye(4, 3, dtype=F64)

    def second(tau, f=torch.linalg.householder_product):
        def first(tau):
            return jvp(lambda tau: f(input, tau).pow(3).sum(), (tau,), (torch.ones_like(tau),))[1]

        return grad(first)(tau)

    exact = second(tau, product)
    assert (second(tau) - exact).abs().max() > 1e-2
    with mg.override(*OVERRIDE):
        close(second(tau), exact)

    tau[1] = 1 / V[:, 1].square().sum()  # a reflector without an inverse

    def first(tau, f=torch.linalg.householder_product):
        return grad(lambda tau: f(input, tau).pow(3).sum())(tau)

    stock, exact = first(tau), first(tau, product)
    assert not ((stock - exact).abs() < 1e-2).all()
    with mg.override(*OVERRIDE):
        close(first(tau), exact)


def test_unread_entries_have_no_gradient(override):
    input, tau = random(4, 3, dtype=F64), random(2, dtype=F64, seed=1)
    unread = torch.ones(4, 3, dtype=torch.bool).triu()
    unread[:, 2] = True
    G = grad(lambda x: torch.linalg.householder_product(x, tau).pow(2).sum() + x.sum() * 0)(input)
    assert (G[unread] == 0).all() and (grad(lambda x: torch.linalg.householder_product(x, tau)[3, 1])(input) != 0).any()
    input[unread] = torch.inf
    assert grad(lambda x: torch.linalg.householder_product(x, tau)[3, 1])(input).isfinite().all()


def test_stock_has_no_forward_mode_for_ormqr():
    args = random(3, 2, dtype=F64), random(2, dtype=F64, seed=1), random(3, 2, dtype=F64, seed=2)
    with pytest.raises((RuntimeError, NotImplementedError)):
        jvp(torch.ormqr, args, args)


@pytest.mark.parametrize("wanted", [w for w in itertools.product([True, False], repeat=3) if any(w)])
def test_ormqr_with_any_of_its_inputs_fixed(wanted, override):
    args = [random(3, 2, dtype=C128), random(2, dtype=C128, seed=1), random(2, 3, dtype=C128, seed=2)]

    def f(*given):
        given = iter(given)
        return torch.ormqr(*[next(given) if w else a for w, a in zip(wanted, args)], False, False)

    check(f, [tuple(a for w, a in zip(wanted, args) if w)], checks=("agreement", "duality"))


def test_orthogonality_is_differentiated_exactly(override):
    """Of a geqrf's reflectors and their tau, Q^H Q = I stays so along the factorization: a closed form."""
    A = random(5, 3, dtype=F64)
    a, tau = torch.geqrf(A)
    V = a.tril(-1) + torch.eye(5, 3, dtype=F64)
    close(tau * V.square().sum(0), torch.full((3,), 2.0, dtype=F64))
    t = random(5, 3, dtype=F64, seed=1).tril(-1)
    tau_t = -(tau**2) * (V * t).sum(0)  # keeps tau |v|^2 = 2
    Q, Q_t = jvp(torch.linalg.householder_product, (a, tau), (t, tau_t))
    close(Q.mT @ Q_t + Q_t.mT @ Q, torch.zeros(3, 3, dtype=F64))
