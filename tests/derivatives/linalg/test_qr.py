"""QR and Householder products where the tests of the rules do not look: other modes, lost rank, odd reflectors."""

import itertools
import warnings

import pytest
import torch
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg import qr
from torch_manualgrad.derivatives.linalg.common import random, random_conditioned
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
DTYPES = pytest.mark.parametrize("dtype", [F64, C128], ids=str)
OVERRIDE = ("aten::linalg_qr", "aten::linalg_householder_product", "aten::ormqr")
DERIVATIVES = ("agreement", "duality", "undefined cotangents", "vmap", "vmap-grad", "noncontiguous", "opcheck")


@pytest.fixture
def override():
    with mg.override(*OVERRIDE):
        yield


def same(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def difference(f, x, t, h=1e-6):
    """The derivative of the tensors f(x) along t."""
    return [(a - b) / (2 * h) for a, b in zip(f(x + h * t), f(x - h * t))]


# -- the modes that PyTorch has no derivative for --------------------------------------------------------------------


def only_R(A):
    return torch.linalg.qr(A, "r").R


def whole_basis(A):
    """What a complete QR determines: the leading columns, R, and the span of the other columns."""
    Q, R = torch.linalg.qr(A, "complete")
    first, rest = Q[..., : A.shape[-1]], Q[..., A.shape[-1] :]
    return first, rest @ rest.mH, R


@DTYPES
def test_mode_r_in_every_mode(dtype, override):
    check(only_R, [(random_conditioned(*s, dtype=dtype),) for s in ((3, 3), (2, 4, 2), (2, 4))], checks=DERIVATIVES)


@DTYPES
def test_a_complete_basis_in_every_mode(dtype, override):
    check(whole_basis, [(random_conditioned(*s, dtype=dtype),) for s in ((4, 2), (2, 3, 1))], checks=DERIVATIVES)


@pytest.mark.parametrize("mode", ["r", "complete"])
def test_stock_raises_there(mode):
    with pytest.raises(RuntimeError, match="not computed|not differentiable"):
        grad(lambda A: torch.linalg.qr(A, mode).R.sum())(random(4, 2, dtype=F64))


@DTYPES
def test_the_last_columns_turn_no_more_than_they_must(dtype, override):
    A, t = random(4, 2, dtype=dtype), random(4, 2, dtype=dtype, seed=1)
    (Q, _), (Q_t, _) = jvp(lambda A: torch.linalg.qr(A, "complete"), (A,), (t,))
    same(Q[:, 2:].mH @ Q_t[:, 2:], torch.zeros(2, 2, dtype=dtype))
    same(Q.mH @ Q_t + Q_t.mH @ Q, torch.zeros(4, 4, dtype=dtype))


def last_columns(A, weights):
    return (weights * torch.linalg.qr(A, "complete").Q[..., A.shape[-1] :]).sum().abs()


def their_span(A, weights):
    rest = torch.linalg.qr(A, "complete").Q[..., A.shape[-1] :]
    return (weights @ (rest @ rest.mH)).sum().abs()


@DTYPES
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_loss_of_the_choice_of_the_last_columns_is_reported(dtype, batch, override):
    A = random(*batch, 6, 3, dtype=dtype)
    with pytest.warns(mg.linalg.GaugeWarning, match="QR factorisation"):
        grad(last_columns)(A, random(6, 3, dtype=dtype, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(their_span)(A, random(6, 6, dtype=dtype, seed=1))
        grad(lambda A: torch.linalg.qr(A, "complete").Q[..., :3].abs().pow(3).sum())(A)
        vmap(grad(last_columns), (0, None))(A.expand(2, 6, 3), random(6, 3, dtype=dtype, seed=1))  # no value to read


@DTYPES
@pytest.mark.parametrize("shape", [(5, 2), (2, 5)])
def test_as_is_one_of_the_last_singular_vectors(dtype, shape):
    """Those of a full decomposition."""
    A, k = random(*shape, dtype=dtype), 2

    def rest(A):
        U, _, Vh = torch.linalg.svd(A)
        return U[:, k:] if A.shape[0] > k else Vh[k:].mH

    def projector(X):
        return X @ X.mH

    with mg.override():
        with pytest.warns(mg.linalg.GaugeWarning, match="singular value decomposition"):
            grad(lambda A: (random(5, 3, dtype=dtype) * rest(A)).sum().abs())(A)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            grad(lambda A: (random(5, 5, dtype=dtype) @ projector(rest(A))).sum().abs())(A)


# -- lost rank -------------------------------------------------------------------------------------------------------


def dependent(m, n, pivot, dtype, batch=()):
    """A matrix whose column ``pivot`` depends on those before."""
    A = random_conditioned(*batch, m, n, dtype=dtype)
    A[..., pivot] = A[..., :pivot].sum(-1) * 0.7
    return A


def leading(k):
    def f(A):
        Q, R = torch.linalg.qr(A)
        return Q[..., :k], R[..., :k, :]

    return f


@pytest.mark.parametrize("m, n, pivot", [(4, 3, 2), (3, 3, 1), (4, 4, 1), (3, 4, 1), (4, 3, 0)])
@DTYPES
def test_what_comes_before_a_zero_pivot_is_smooth(m, n, pivot, dtype, override):
    A = dependent(m, n, pivot, dtype)
    check(
        leading(pivot), [(A,), (dependent(m, n, pivot, dtype, (2,)),)][: 1 + (m == 4)], checks=("agreement", "duality")
    )
    t = random(m, n, dtype=dtype, seed=1)
    _, tangents = jvp(torch.linalg.qr, (A,), (t,))
    assert tangents[0][:, pivot:].isnan().all()
    assert tangents[1][pivot:].isnan().any(-1).all()
    for got, expected in zip(jvp(leading(pivot), (A,), (t,))[1], difference(leading(pivot), A, t)):
        same(got, expected, 1e-6)


@DTYPES
def test_what_comes_after_a_zero_pivot_is_nan(dtype, override):
    A = dependent(4, 3, 1, dtype)
    for pick in (lambda Q, R: Q[:, 1], lambda Q, R: Q[:, 2], lambda Q, R: R[1, 1], lambda Q, R: R[2, 2]):
        assert grad(lambda A, pick=pick: pick(*torch.linalg.qr(A)).abs().sum())(A)[:, :2].isnan().all()
    below = grad(lambda A: torch.linalg.qr(A).R.tril(-1).abs().sum())(A)  # constant zeros
    same(below, torch.zeros_like(A))


def test_what_is_undefined_stays_so_at_second_order(override):
    A, t = dependent(4, 3, 2, F64), random(4, 3, dtype=F64, seed=1)

    def tangent(A, k):
        return jvp(lambda A: torch.linalg.qr(A).Q[:, k].pow(3).sum(), (A,), (t,))[1]

    assert grad(tangent)(A, 1).isfinite().all() and grad(tangent)(A, 2).isnan().any()

    # a gradient that is linear in its cotangent, differentiated at a cotangent of zero: the adjoint of the adjoint
    A.requires_grad_()
    Q, _ = torch.linalg.qr(A)
    g = torch.zeros_like(Q, requires_grad=True)
    (pulled,) = torch.autograd.grad(Q, A, g, create_graph=True)
    (pushed,) = torch.autograd.grad(pulled, g, t)
    assert pushed[:, :2].isfinite().all() and pushed[:, 2].isnan().all()


@pytest.mark.parametrize("shape", [(3, 3), (3, 5), (1, 1), (1, 2)])
def test_the_last_pivot_of_a_real_square_matrix_may_vanish(shape, override):
    m, n = shape
    A = dependent(m, n, m - 1, F64)
    check(torch.linalg.qr, [(A,)], checks=("agreement", "duality"))
    check(only_R, [(A,)], checks=("agreement", "duality"))
    A[:, m - 1] = 0
    check(torch.linalg.qr, [(A,)], checks=("agreement", "duality"))


def test_stock_is_finite_and_wrong_where_rank_is_lost():
    A, t = dependent(4, 3, 1, F64), random(4, 3, dtype=F64, seed=1)
    (_, stock), (_, expected) = jvp(leading(2), (A,), (t,))[1], difference(leading(1), A, t)
    assert stock.isfinite().all() and stock[1].abs().max() > 1e6
    with mg.override(*OVERRIDE):
        _, ours = jvp(leading(2), (A,), (t,))[1]
    same(ours[:1], expected, 1e-6)
    assert ours[1].isnan().any()

    square = dependent(3, 3, 2, F64)
    square[:, 2] = 0  # an ordinary point: only the sign of the last column of Q is open, and LAPACK keeps it

    def f(A):
        return torch.linalg.qr(A)

    t = random(3, 3, dtype=F64, seed=1)
    assert not jvp(f, (square,), (t,))[1][0].isfinite().all()
    with mg.override(*OVERRIDE):
        for got, expected in zip(jvp(f, (square,), (t,))[1], difference(f, square, t)):
            same(got, expected, 1e-6)


def test_a_small_column_is_not_a_zero_pivot(override):
    A = random_conditioned(4, 3, dtype=F64)
    scale = torch.tensor([1, 1e-20, 1e20], dtype=F64)
    for f in (lambda A: torch.linalg.qr(A).Q.pow(3).sum(), lambda A: (torch.linalg.qr(A).R / scale).pow(3).sum()):
        at_one = grad(lambda A, f=f: f(A * scale))(A)
        assert at_one.isfinite().all()
    same(
        grad(lambda A: torch.linalg.qr(A * scale).Q.pow(3).sum())(A),
        grad(lambda A: torch.linalg.qr(A).Q.pow(3).sum())(A),
    )


def test_one_matrix_of_a_batch_does_not_spoil_the_others(override):
    A = torch.stack([random_conditioned(4, 3, dtype=F64), dependent(4, 3, 2, F64)])

    def gradient(A):
        return grad(lambda A: sum(x.pow(3).sum() for x in torch.linalg.qr(A)))(A)

    both = gradient(A)
    same(both[0], gradient(A[0]))
    assert both[1].isnan().all()
    torch.testing.assert_close(vmap(gradient)(A), both, equal_nan=True)


# -- the kernels against the bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@DTYPES
def test_the_fast_formulas_are_the_bodies(dtype, mode):
    for shape in ((3, 3), (2, 5, 3), (3, 5), (4, 0), (0, 4), (1, 1), (0, 3, 2)):
        A = random(*shape, dtype=dtype)
        Q, R = torch.linalg.qr(A, mode)
        cotangents = [random(*x.shape, dtype=dtype, seed=1) for x in (Q, R)]
        for keep in itertools.product([True, False], repeat=2):
            gQ, gR = (g if k else None for g, k in zip(cotangents, keep))
            same(qr.linalg_qr_backward(gQ, gR, A, Q, R, mode), qr.linalg_qr_backward.reference(gQ, gR, A, Q, R, mode))
        t = random(*shape, dtype=dtype, seed=2)
        same(qr.linalg_qr_jvp(t, A, Q, R, mode), qr.linalg_qr_jvp.reference(t, A, Q, R, mode))
        if mode == "reduced":
            stock = jvp(torch.linalg.qr, (A,), (t,))[1]
            same(qr.linalg_qr_jvp(t, A, Q, R, mode), tuple(stock))


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("m, n", [(5, 3), (3, 3), (3, 5)])
@DTYPES
def test_of_a_batch_only_the_deficient_go_by_the_body(m, n, dtype, mode):
    A = random(2, 3, m, n, dtype=dtype)
    A[0, 1] = dependent(m, n, 1, dtype)
    A[1, 2] = 0
    Q, R = torch.linalg.qr(A, mode)
    gQ, gR, t = (random(*x.shape, dtype=dtype, seed=1) for x in (Q, R, A))
    for given in ((gQ, gR), (gQ, None), (None, gR)):
        found = qr.linalg_qr_backward(*given, A, Q, R, mode)
        expected = qr.linalg_qr_backward.reference(*given, A, Q, R, mode)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert found[0, 0].isfinite().all()
    found, expected = (f(t, A, Q, R, mode) for f in (qr.linalg_qr_jvp, qr.linalg_qr_jvp.reference))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@DTYPES
def test_third_order(dtype, override):
    def gradient(A):
        return grad(lambda A: sum((x * x.conj() * x).real.sum() for x in torch.linalg.qr(A)))(A)

    check(gradient, [(random_conditioned(3, 2, dtype=dtype),)], modes=("rev-rev", "fwd-rev"), checks=())


def test_single_precision_and_column_major(override):
    A = random_conditioned(2, 6, 4, dtype=F64)

    def gradient(A):
        return grad(lambda A: sum(x.pow(3).sum() for x in torch.linalg.qr(A)))(A)

    expected = gradient(A)
    single = gradient(A.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)
    same(gradient(A.mT.contiguous().mT), expected)


# -- Householder products --------------------------------------------------------------------------------------------


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
        same(torch.linalg.householder_product(*primals), product(*primals))

        def both(f, primals=primals, tangents=tangents):
            value, tangent = jvp(f, primals, tangents)
            gradients = grad(lambda *x: (f(*x) * value.conj() ** 2).real.sum(), (0, 1))(*primals)
            return tangent, *gradients

        for ours, expected in zip(both(torch.linalg.householder_product), both(product)):
            same(ours, expected)


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
        same(second(tau), exact)

    tau[1] = 1 / V[:, 1].square().sum()  # a reflector without an inverse

    def first(tau, f=torch.linalg.householder_product):
        return grad(lambda tau: f(input, tau).pow(3).sum())(tau)

    stock, exact = first(tau), first(tau, product)
    assert not ((stock - exact).abs() < 1e-2).all()
    with mg.override(*OVERRIDE):
        same(first(tau), exact)


def test_what_is_not_read_has_no_gradient(override):
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
    """Of a geqrf's reflectors and their tau, Q^H Q = I stays so along the factorisation: a closed form."""
    A = random(5, 3, dtype=F64)
    a, tau = torch.geqrf(A)
    V = a.tril(-1) + torch.eye(5, 3, dtype=F64)
    same(tau * V.square().sum(0), torch.full((3,), 2.0, dtype=F64))
    t = random(5, 3, dtype=F64, seed=1).tril(-1)
    tau_t = -(tau**2) * (V * t).sum(0)  # keeps tau |v|^2 = 2
    Q, Q_t = jvp(torch.linalg.householder_product, (a, tau), (t, tau_t))
    same(Q.mT @ Q_t + Q_t.mT @ Q, torch.zeros(3, 3, dtype=F64))
