"""QR where the tests of the rules do not look: other modes, lost rank, large batches."""

import itertools
import warnings

import pytest
import torch
from helpers.tensors import close
from torch.func import grad, jvp, vmap

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg import qr
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
DTYPES = pytest.mark.parametrize("dtype", [F64, C128], ids=str)
DERIVATIVES = ("agreement", "duality", "undefined cotangents", "vmap", "vmap-grad", "noncontiguous", "opcheck")


@pytest.fixture
def override():
    with mg.override("aten::linalg_qr"):
        yield


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
    close(Q[:, 2:].mH @ Q_t[:, 2:], torch.zeros(2, 2, dtype=dtype))
    close(Q.mH @ Q_t + Q_t.mH @ Q, torch.zeros(4, 4, dtype=dtype))


def last_columns(A, weights):
    return (weights * torch.linalg.qr(A, "complete").Q[..., A.shape[-1] :]).sum().abs()


def their_span(A, weights):
    rest = torch.linalg.qr(A, "complete").Q[..., A.shape[-1] :]
    return (weights @ (rest @ rest.mH)).sum().abs()


@DTYPES
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_loss_of_the_choice_of_the_last_columns_is_reported(dtype, batch, override):
    A = random(*batch, 6, 3, dtype=dtype)
    with pytest.warns(mg.linalg.GaugeWarning, match="QR factorization"):
        grad(last_columns)(A, random(6, 3, dtype=dtype, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grad(their_span)(A, random(6, 6, dtype=dtype, seed=1))
        grad(lambda A: torch.linalg.qr(A, "complete").Q[..., :3].abs().pow(3).sum())(A)
        vmap(grad(last_columns), (0, None))(A.expand(2, 6, 3), random(6, 3, dtype=dtype, seed=1))  # no value to read


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
def test_columns_before_a_zero_pivot_are_smooth(m, n, pivot, dtype, override):
    A = dependent(m, n, pivot, dtype)
    check(
        leading(pivot), [(A,), (dependent(m, n, pivot, dtype, (2,)),)][: 1 + (m == 4)], checks=("agreement", "duality")
    )
    t = random(m, n, dtype=dtype, seed=1)
    if pivot < n - 1:  # else rounding errors are all that is left, see below
        _, tangents = jvp(torch.linalg.qr, (A,), (t,))
        assert tangents[0][:, pivot:].isnan().all()
        assert tangents[1][pivot:].isnan().any(-1).all()
    for got, expected in zip(jvp(leading(pivot), (A,), (t,))[1], difference(leading(pivot), A, t)):
        close(got, expected, 1e-6)


def of_rank(rank, m, n, dtype, batch=()):
    return random(*batch, m, rank, dtype=dtype) @ random(*batch, rank, n, dtype=dtype, seed=1)


@pytest.mark.parametrize("mode", ["reduced", "complete"])
@pytest.mark.parametrize("rank, m, n", [(2, 4, 3), (2, 6, 4), (1, 40, 34), (1, 4, 4), (2, 4, 6)])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@DTYPES
def test_a_loss_of_the_product_where_rounding_errors_are_left(rank, m, n, batch, mode, dtype, override):
    """The loss is smooth, and PyTorch's first derivatives are right there; a second derivative has no digit."""
    A, W = of_rank(rank, m, n, dtype, batch), random(*batch, m, n, dtype=dtype, seed=2)
    nonzero = (
        torch.linalg.qr(A).R.diagonal(dim1=-2, dim2=-1).ne(0).all(-1)
    )  # by a pivot of exactly zero nothing is known
    A, W = A[nonzero], W[nonzero]

    def loss(A):
        Q, R = torch.linalg.qr(A, mode)
        return (W.conj() * (Q @ R)).sum().real

    x = A.clone().requires_grad_()
    for tracked in (False, True):
        (gradient,) = torch.autograd.grad(loss(x), x, create_graph=tracked)
        close(gradient.detach(), W, 1e-8)
    close(grad(loss)(A), W, 1e-8)
    t = random(*A.shape, dtype=dtype, seed=3)
    with pytest.warns(mg.linalg.GaugeWarning, match="without full rank"):
        close(jvp(loss, (A,), (t,))[1], (W.conj() * t).sum().real, 1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.linalg.GaugeWarning)
        assert not torch.autograd.functional.hvp(loss, A, t)[1].isfinite().all()
        assert jvp(grad(loss), (A,), (t,))[1].isnan().any()
        assert grad(lambda A: jvp(loss, (A,), (t,))[1])(A).isnan().any()


@DTYPES
def test_a_loss_of_the_columns_of_rounding_errors_is_nan(dtype, override):
    A = dependent(4, 3, 2, dtype)
    for f in (lambda Q, R: Q[:, 2].abs().pow(3).sum(), lambda Q, R: Q.abs().sum() + R.abs().sum()):
        assert grad(lambda A, f=f: f(*torch.linalg.qr(A)))(A).isnan().any()


@DTYPES
def test_columns_after_a_zero_pivot_are_nan(dtype, override):
    A = dependent(4, 3, 1, dtype)
    for pick in (lambda Q, R: Q[:, 1], lambda Q, R: Q[:, 2], lambda Q, R: R[1, 1], lambda Q, R: R[2, 2]):
        assert grad(lambda A, pick=pick: pick(*torch.linalg.qr(A)).abs().sum())(A)[:, :2].isnan().all()
    below = grad(lambda A: torch.linalg.qr(A).R.tril(-1).abs().sum())(A)  # constant zeros
    close(below, torch.zeros_like(A))


def test_undefined_gradients_are_undefined_at_second_order(override):
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
    with mg.override("aten::linalg_qr"):
        _, ours = jvp(leading(2), (A,), (t,))[1]
    close(ours[:1], expected, 1e-6)
    assert ours[1].isnan().any()

    square = dependent(3, 3, 2, F64)
    square[:, 2] = 0  # an ordinary point: only the sign of the last column of Q is open, and LAPACK keeps it

    def f(A):
        return torch.linalg.qr(A)

    t = random(3, 3, dtype=F64, seed=1)
    assert not jvp(f, (square,), (t,))[1][0].isfinite().all()
    with mg.override("aten::linalg_qr"):
        for got, expected in zip(jvp(f, (square,), (t,))[1], difference(f, square, t)):
            close(got, expected, 1e-6)


def test_a_small_column_is_not_a_zero_pivot(override):
    A = random_conditioned(4, 3, dtype=F64)
    scale = torch.tensor([1, 1e-20, 1e20], dtype=F64)
    for f in (lambda A: torch.linalg.qr(A).Q.pow(3).sum(), lambda A: (torch.linalg.qr(A).R / scale).pow(3).sum()):
        at_one = grad(lambda A, f=f: f(A * scale))(A)
        assert at_one.isfinite().all()
    close(
        grad(lambda A: torch.linalg.qr(A * scale).Q.pow(3).sum())(A),
        grad(lambda A: torch.linalg.qr(A).Q.pow(3).sum())(A),
    )


def test_one_matrix_of_a_batch_does_not_spoil_the_others(override):
    A = torch.stack([random_conditioned(4, 3, dtype=F64), dependent(4, 3, 2, F64)])

    def gradient(A):
        return grad(lambda A: sum(x.pow(3).sum() for x in torch.linalg.qr(A)))(A)

    both = gradient(A)
    close(both[0], gradient(A[0]))
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
            close(qr.linalg_qr_backward(gQ, gR, A, Q, R, mode), qr.linalg_qr_backward.reference(gQ, gR, A, Q, R, mode))
        t = random(*shape, dtype=dtype, seed=2)
        close(qr.linalg_qr_jvp(t, A, Q, R, mode), qr.linalg_qr_jvp.reference(t, A, Q, R, mode))
        if mode == "reduced":
            stock = jvp(torch.linalg.qr, (A,), (t,))[1]
            close(qr.linalg_qr_jvp(t, A, Q, R, mode), tuple(stock))


@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
@pytest.mark.parametrize("m, n", [(5, 3), (3, 3), (3, 5), (6, 6), (34, 34), (35, 34)])
@DTYPES
def test_deficient_matrices_of_a_batch(m, n, dtype, mode):
    """They have what the body gives, in each route; the last of them a loss of what is smooth only."""
    A = random(2, 9, m, n, dtype=dtype)
    A[0, 1] = dependent(m, n, 1, dtype)
    A[1, 2] = 0
    A[1, 4:] = dependent(m, n, m // 2, dtype)
    Q, R = torch.linalg.qr(A, mode)
    gQ, gR, t = (random(*x.shape, dtype=dtype, seed=1) for x in (Q, R, A))
    if mode != "r":
        gQ[1, 4:, :, m // 2 :] = 0
    gR[1, 4:, m // 2 :] = 0
    for given in ((gQ, gR), (gQ, None), (None, gR)):
        found = qr.linalg_qr_backward(*given, A, Q, R, mode)
        expected = qr.linalg_qr_backward.reference(*given, A, Q, R, mode)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
        assert found[0, 0].isfinite().all() and found[1, 4:].isfinite().all()
    found, expected = (f(t, A, Q, R, mode) for f in (qr.linalg_qr_jvp, qr.linalg_qr_jvp.reference))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("m, n", [(270, 270), (257, 300)])
def test_triangles_by_blocks(m, n):
    """Of matrices too large for the kernel; one with a last pivot of zero, where it is smooth."""
    A = random(2, m, n, dtype=F64)
    A[0, :, m - 1] = 0
    Q, R = torch.linalg.qr(A)
    gQ, gR = (random(*x.shape, dtype=F64, seed=1) for x in (Q, R))
    for given in ((gQ, gR), (None, gR)):
        found = qr.linalg_qr_backward(*given, A, Q, R, "reduced")
        expected = qr.linalg_qr_backward.reference(*given, A, Q, R, "reduced")
        assert found.isfinite().all()
        assert (found - expected).abs().max() < 1e-9 * expected.abs().max()


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
    close(gradient(A.mT.contiguous().mT), expected)
