"""Least squares: deficient ranks, tolerances, shapes; the modes at full rank are tests of the rules."""

import contextlib

import pytest
import torch
from helpers.tensors import close
from torch.func import grad, jacfwd, jacrev, jvp

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg.lstsq import linalg_lstsq_jvp, lstsq_pinv
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.testing import Sample, check

F64, C128 = torch.float64, torch.complex128
DRIVERS = ["gels", "gelsy", "gelsd", "gelss"]
RULES = ("aten::linalg_lstsq", "aten::linalg_pinv")
NO_SHAPES = ("agreement", "duality", "undefined cotangents", "noncontiguous")


def ours():
    return mg.override(*RULES)


def gradients(f, *inputs, weights=1):
    """The gradients of a random real loss of the outputs."""
    x = [t.detach().clone().requires_grad_() for t in inputs]
    out = f(*x)
    out = out if isinstance(out, tuple) else (out,)
    loss = sum((o * random(*o.shape, dtype=o.dtype, seed=9 + i).conj()).sum() for i, o in enumerate(out))
    return torch.autograd.grad(loss.real if loss.is_complex() else loss, x, allow_unused=True, materialize_grads=True)


def with_values(m, n, values, dtype=F64, seed=0):
    """A matrix with these singular values."""
    k = len(values)
    U = torch.linalg.qr(random(m, k, dtype=dtype, seed=seed))[0]
    V = torch.linalg.qr(random(n, k, dtype=dtype, seed=seed + 1))[0]
    return (U * torch.tensor(values, dtype=dtype)) @ V.mH


# -- deficient rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("driver", ["gelsd", "gelss"])
@pytest.mark.parametrize("m, n", [(4, 3), (3, 4)])
def test_lstsq_of_deficient_rank_in_all_modes(m, n, driver, dtype):
    def solution(L, R, B):
        return torch.linalg.lstsq(L @ R, B, driver=driver).solution

    L, R = random_conditioned(m, 2, dtype=dtype), random_conditioned(2, n, dtype=dtype, seed=1)
    for k in (1, 4):  # fewer and more right-hand sides than the matrix has rows or columns
        with ours():
            check(solution, [Sample(L, R, random(m, k, dtype=dtype, seed=2))], checks=NO_SHAPES)


@pytest.mark.parametrize("driver", DRIVERS[1:])
def test_a_batch_of_mixed_ranks_is_that_of_its_matrices(driver):
    A = torch.stack([with_values(4, 3, [2.0, 1.0]), with_values(4, 3, [3.0, 2.0, 1.0], seed=4)])
    B = random(2, 4, 2, dtype=F64, seed=7)

    def f(A, B):
        return torch.linalg.lstsq(A, B, driver=driver).solution

    assert torch.linalg.lstsq(A, B, driver=driver).rank.tolist() == [2, 3]
    with ours():
        together = gradients(f, A, B)
    for g, x in zip(together, gradients(lambda A, B: torch.linalg.pinv(A) @ B, A, B), strict=True):
        close(g, x)


# -- tolerances -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", DRIVERS[1:])
def test_values_under_rcond_are_zeros_in_the_derivative_where_stock_divides_by_them(driver):
    # Against the closed form at rank 2, as gelsy has no useful finite difference: what it drops depends on its order of
    # columns, which may change between A - hT and A + hT.
    A, B = with_values(5, 3, [2.0, 1.0, 1e-12]), random(5, 2, dtype=F64, seed=5)
    T = random(5, 5, dtype=F64, seed=6) @ A + A @ random(3, 3, dtype=F64, seed=7)  # along which the rank stays

    def f(A):
        return torch.linalg.lstsq(A, B, rcond=1e-3, driver=driver).solution.square().sum()

    assert torch.linalg.lstsq(A, B, rcond=1e-3, driver=driver).rank == 2
    P = torch.linalg.pinv(A, rtol=1e-3)
    dP = -P @ T @ P + P @ P.mT @ (T.mT - T.mT @ A @ P) + (T.mT - P @ A @ T.mT) @ P.mT @ P  # Golub and Pereyra, (4.12)
    expected = 2 * ((P @ B) * (dP @ B)).sum()
    stock = (grad(f)(A) * T).sum()
    assert (stock - expected).abs() > 1e3 * expected.abs()
    with ours():
        close((grad(f)(A) * T).sum(), expected)
        close(jvp(f, (A,), (T,))[1], expected)


def test_gels_takes_full_rank_whatever_the_tolerance():
    A, B = with_values(5, 3, [2.0, 1.0, 1e-2]), random(5, 2, dtype=F64, seed=5)
    expected = gradients(lambda A, B: torch.linalg.pinv(A) @ B, A, B)
    with ours():
        found = gradients(lambda A, B: torch.linalg.lstsq(A, B, rcond=0.1, driver="gels").solution, A, B)
        twice = grad(lambda A: grad(lambda A: torch.linalg.lstsq(A, B, 0.1, driver="gels")[0].sum())(A).sum())(A)
    for g, x in zip(found, expected, strict=True):
        close(g, x)
    close(twice, grad(lambda A: grad(lambda A: (torch.linalg.pinv(A) @ B).sum())(A).sum())(A), 1e-7)


def test_a_negative_rcond_is_the_precision_of_the_dtype():
    A, B = with_values(4, 3, [2.0, 1.0]), random(4, 1, dtype=F64, seed=5)
    expected = gradients(lambda A, B: torch.linalg.pinv(A) @ B, A, B)
    with ours():
        found = gradients(lambda A, B: torch.linalg.lstsq(A, B, -1.0, driver="gelsd").solution, A, B)
    for g, x in zip(found, expected, strict=True):
        close(g, x)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (2, 3, 3), (0, 3, 2), (3, 0), (0, 2), (1, 1)])
def test_the_kernel_of_lstsq_pinv_is_its_body(shape, dtype):
    A = random_conditioned(*shape, dtype=dtype)
    for rank in (torch.empty(0, dtype=torch.int64), torch.full(shape[:-2], min(shape[-2:]))):
        found, expected = lstsq_pinv(A, rank, None), lstsq_pinv.reference(A, rank, None)
        close(found, expected)
        assert found.stride() == expected.stride() and not found.is_conj()


# -- shapes and missing parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("driver", ["gels", "gelsy"])
def test_one_right_hand_side(driver, dtype):
    """vmap is not checked: PyTorch's own batching of this form raises."""

    def f(A, b):
        return torch.linalg.lstsq(A, b, driver=driver)[:2]

    samples = [Sample(random_conditioned(*s, dtype=dtype), random(*s[:-1], dtype=dtype, seed=1))
               for s in ((4, 2), (2, 3), (2, 3, 2))]  # fmt: skip
    with ours():
        check(f, samples, checks=NO_SHAPES)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "A, B", [((4, 2), (4, 3)), ((2, 4), (2, 3)), ((3, 3), (3, 1)), ((1, 3, 2), (2, 3, 2)), ((4, 2), (4,))]
)
@pytest.mark.parametrize("outputs", [slice(0, 1), slice(1, 2), slice(0, 2)])
@pytest.mark.parametrize("alone", [0, 1, None])
def test_every_part_alone_equals_stock(A, B, driver, dtype, outputs, alone):
    A, B = random_conditioned(*A, dtype=dtype), random(*B, dtype=dtype, seed=1)

    def f(*given):
        x, y = given if alone is None else (given[0], B) if alone == 0 else (A, given[0])
        return tuple(torch.linalg.lstsq(x, y, driver=driver)[outputs])

    inputs = (A, B) if alone is None else ((A, B)[alone],)
    expected = gradients(f, *inputs)
    with ours():
        found = gradients(f, *inputs)
    for g, x in zip(found, expected, strict=True):
        assert g.shape == x.shape and g.dtype == x.dtype
        close(g, x)


def test_no_columns_leave_all_of_b_as_the_residual():
    A, B = torch.zeros(3, 0, dtype=F64), random(3, 2, dtype=F64)
    with ours():
        gA, gB = gradients(lambda A, B: torch.linalg.lstsq(A, B, driver="gelss").residuals, A, B)
    assert gA.shape == A.shape
    close(gB, 2 * B * random(2, dtype=F64, seed=9))


@pytest.mark.parametrize("driver", DRIVERS)
def test_strides_and_single_precision(driver):
    A, B = random_conditioned(3, 5, dtype=F64).mT, random(10, 2, dtype=F64, seed=1)[::2]

    def f(A, B):
        return torch.linalg.lstsq(A, B, driver=driver).solution

    expected = gradients(lambda A, B: torch.linalg.pinv(A) @ B, A.contiguous(), B.contiguous())
    with ours():
        for g, x in zip(gradients(f, A, B), expected, strict=True):
            close(g, x)
        assert {g.dtype for g in gradients(f, A.float(), B.float())} == {torch.float32}


def test_the_older_name_is_the_tangent_of_the_solution():
    A, B = random_conditioned(5, 3, dtype=F64), random(5, 2, dtype=F64, seed=1)
    T = B @ B.mT @ A
    expected = jvp(lambda A, B: torch.linalg.lstsq(A, B).solution, (A, B), (T, 2 * B))[1]
    close(linalg_lstsq_jvp(A, B, T, 2 * B), expected)


def test_a_very_tall_matrix_takes_no_square_of_its_height():
    """Stock's formula forms (m, m) matrices: of 80 GB each here."""
    x, B = random(100_000, 2, dtype=F64).requires_grad_(), random(2, 100_000, dtype=F64, seed=1).mT
    (expected,) = torch.autograd.grad(torch.linalg.solve(x.mT @ x, x.mT @ B).sum(), x)
    with ours():
        (found,) = torch.autograd.grad(torch.linalg.lstsq(x, B).solution.sum(), x)
    close(found, expected)


# -- accuracy, order, errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "pinv"])
@pytest.mark.parametrize("m, n", [(20, 10), (10, 20), (15, 15)])
def test_no_less_accurate_than_stock_at_a_condition_of_a_thousand(m, n, driver):
    def f(A, B):
        if driver == "pinv":
            return torch.linalg.pinv(A) @ B
        return torch.linalg.lstsq(A, B, driver=driver).solution

    errors = torch.zeros(2)
    for seed in range(8):
        A = with_values(m, n, torch.logspace(0, -3, min(m, n)).tolist(), seed=10 * seed).float()
        B = random(m, 2, dtype=torch.float32, seed=seed)
        exact = gradients(lambda A, B: torch.linalg.pinv(A) @ B, A.double(), B.double())
        for i, context in enumerate((contextlib.nullcontext(), ours())):
            with context:
                # the weights of the loss are drawn in each dtype: the exact gradient takes those of float32
                x = [A.clone().requires_grad_(), B.clone().requires_grad_()]
                out = f(*x)
                found = torch.autograd.grad((out * random(*out.shape, dtype=F64, seed=9)).sum(), x)
            for g, e in zip(found, exact, strict=True):
                errors[i] += (g.double() - e).norm() / e.norm()
    assert errors[1] < 1.5 * errors[0], errors


@pytest.mark.parametrize("driver", ["gels", "gelsy"])
@pytest.mark.parametrize("m, n", [(4, 2), (2, 3)])
def test_third_order(m, n, driver):
    A, B, T = random_conditioned(m, n, dtype=F64), random(m, 1, dtype=F64, seed=1), random(m, n, dtype=F64, seed=2)

    def line(t):
        return torch.linalg.lstsq(A + t * T, B, driver=driver).solution.square().sum()

    def reference(t):
        return (torch.linalg.pinv(A + t * T) @ B).square().sum()

    zero = torch.zeros((), dtype=F64)
    expected = jacfwd(jacfwd(jacfwd(reference)))(zero)
    with ours():
        for outer in (jacfwd, jacrev):
            for inner in (jacfwd, jacrev):
                close(outer(inner(jacrev(line)))(zero), expected, 1e-7)


def test_shapes_that_do_not_fit_raise():
    A = random(3, 2, dtype=F64)
    with pytest.raises(RuntimeError), ours():
        torch.linalg.lstsq(A.requires_grad_(), random(2, 1, dtype=F64))


def test_a_matrix_that_is_not_finite_leaves_the_others_alone():
    generator = torch.Generator().manual_seed(0)
    A, b = (torch.randn(2, 3, n, dtype=torch.float64, generator=generator) for n in (3, 1))
    A[0, 0, 0] = float("inf")

    def loss(A, b):
        return torch.linalg.lstsq(A, b)[0].square().sum()

    with mg.override():
        for f in (torch.func.grad(loss), torch.func.grad(lambda A, b: torch.func.grad(loss)(A, b).square().sum())):
            torch.testing.assert_close(f(A, b)[1:], f(A[1:].clone(), b[1:]))
