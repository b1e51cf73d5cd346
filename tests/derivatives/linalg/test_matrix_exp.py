"""The derivative of the matrix exponential: accuracy, scaling, and PyTorch's loss of digits; the rest is in test_rules."""

import itertools
import math

import mpmath
import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg.matrix_exp import differential_analytic_matrix_function

differential = mg.ops.linalg_matrix_exp_differential


def exact(A, E):
    """L(A, E) to many digits, as a block of an exponential."""
    n = A.shape[-1]
    block = torch.cat((torch.cat((A, E), -1), torch.cat((torch.zeros_like(A), A), -1))).double()
    with mpmath.workdps(50):
        whole = mpmath.expm(mpmath.matrix(block.tolist()), method="taylor")
        return torch.tensor([[float(whole[i, n + j]) for j in range(n)] for i in range(n)], dtype=torch.float64)


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def gradient(A, G, **options):
    x = A.detach().clone().requires_grad_()
    return torch.autograd.grad(torch.linalg.matrix_exp(x), x, G, **options)[0]


X = random(4, 4)
KINDS = {
    "general": X,
    "far from normal": X.triu(1) * 10 + X.diagonal().diag(),
    "skew": X - X.mT,
    "negative": -X @ X.mT,
    "defective": torch.eye(4, dtype=X.dtype) + torch.diag(torch.ones(3, dtype=X.dtype), 1),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norm", [1e-3, 0.3, 2.0, 30.0, 100.0])
@pytest.mark.parametrize("kind", list(KINDS))
def test_accuracy(kind, norm, dtype):
    A = (KINDS[kind] / torch.linalg.matrix_norm(KINDS[kind], 1) * norm).to(dtype)
    E = random(4, 4, seed=1).to(dtype)
    expected = exact(A, E)
    allowed = 4 * max(1.0, norm) * torch.finfo(dtype).eps
    assert error(differential(A, E, False), expected) < allowed
    assert error(differential(A.mT, E, True), expected) < allowed
    assert error(differential.reference(A, E, False), expected) < 2 * allowed


@pytest.mark.parametrize("size", [1e-20, 1e4, 1e8, 1e20])
def test_stock_loses_digits_to_a_large_cotangent(size):
    A, G = random(4, 4).float(), size * random(4, 4, seed=1).float()
    expected = exact(A.mT, G)
    if size > 1:
        assert not error(gradient(A, G), expected) < 20 * torch.finfo(A.dtype).eps
    with mg.override():
        assert error(gradient(A, G), expected) < 4 * torch.finfo(A.dtype).eps
        assert error(gradient(A, G, create_graph=True).detach(), expected) < 8 * torch.finfo(A.dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_kernel_is_the_block_formula(n, dtype):
    A, E = random(2, 3, n, n, dtype=dtype), random(2, 3, n, n, dtype=dtype, seed=1)
    for x, adjoint in itertools.product((A, A.mT, A[:1].expand(2, 3, n, n), A.mH), (False, True)):
        found, expected = differential(x, E, adjoint), differential.reference(x, E, adjoint)
        size = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=100 * torch.finfo(dtype).eps * size)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(differential(x, E.mT.contiguous().mT, adjoint), found, rtol=1e-3, atol=1e-3 * size)


def test_each_matrix_of_a_batch_is_scaled_by_itself():
    norms = torch.tensor([0.0, 1e-5, 0.1, 1.0, 7.0, 60.0], dtype=torch.float64)
    A = random(6, 5, 5)
    A = A / torch.linalg.matrix_norm(A, 1)[:, None, None] * norms[:, None, None]
    E = random(6, 5, 5, seed=1)
    together = differential(A, E, False)
    for a, e, found in zip(A, E, together):
        torch.testing.assert_close(found, differential(a, e, False), rtol=1e-14, atol=0)
    torch.testing.assert_close(together[0], E[0], rtol=1e-15, atol=0)


def test_nan_stays_in_its_matrix():
    A, E = random(4, 3, 3), random(4, 3, 3, seed=1)
    A[1, 0, 0], A[2, 1, 1], E[3, 2, 2] = math.nan, math.inf, math.inf
    for found in (differential(A, E, False), differential.reference(A, E, False)):
        torch.testing.assert_close(found[0], differential(A[0], E[0], False))
        assert not any(found[i].isfinite().all() for i in (1, 2, 3))


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3)])
def test_empty(shape):
    A = random(*shape)
    with mg.override():
        assert gradient(A, A).shape == A.shape
        assert torch.func.jvp(torch.linalg.matrix_exp, (A,), (A,))[1].shape == A.shape


def forward(f):
    return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


@pytest.mark.parametrize("nesting", list(itertools.product((forward, torch.func.grad), repeat=3)))
def test_third_order_where_the_answer_is_known(nesting):
    """exp(t A) x: its third derivative is A^3 exp(t A) x."""
    A, x = random(3, 3), random(3, seed=1)

    def f(t):
        return (torch.linalg.matrix_exp(t * A) @ x).sum()

    for transform in nesting:
        f = transform(f)
    with mg.override():
        found = f(torch.tensor(0.7, dtype=A.dtype))
    expected = (A @ A @ A @ torch.linalg.matrix_exp(0.7 * A) @ x).sum()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)


def test_the_helper_serves_other_functions():
    A, E = random(3, 3), random(3, 3, seed=1)
    found = differential_analytic_matrix_function(A, E, torch.linalg.inv, False)
    inverse = torch.linalg.inv(A)
    torch.testing.assert_close(found, -inverse @ E @ inverse)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e-37), (torch.float64, 1e-170), (torch.float32, 1e30)])
def test_cotangents_whose_product_leaves_the_range(dtype, size):
    """The gradient is linear in the cotangent: a second cotangent is not multiplied by the first."""
    A = torch.eye(3, dtype=dtype, requires_grad=True)
    G = torch.full((3, 3), size, dtype=dtype, requires_grad=True)
    with mg.override():
        (first,) = torch.autograd.grad(torch.matrix_exp(A), A, G, create_graph=True)
        (second,) = torch.autograd.grad(first, G, torch.full_like(G, size))
    torch.testing.assert_close(second / size, torch.full_like(G, math.e), rtol=1e-6, atol=0)


@pytest.mark.parametrize("adjoint", [False, True])
def test_derivatives_of_the_differential(adjoint):
    A, E = (random(4, 4, dtype=torch.complex128, seed=seed).requires_grad_() for seed in range(2))
    f = lambda A, E: differential(A, E, adjoint)  # noqa: E731
    assert torch.autograd.gradcheck(f, (A, E), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(f, (A, E), check_fwd_over_rev=True, check_rev_over_rev=True)
