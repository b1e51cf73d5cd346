"""The derivatives of large factors by blocks: the same as by full matrices, and differentiable as these are."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.samples.drawing import random, random_definite

DTYPES = [torch.float64, torch.complex128]


def close_to_largest(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", [(3, 3), (64, 64), (65, 65), (150, 150), (130, 200), (200, 130)])
@pytest.mark.parametrize("given", [(True, True), (True, False), (False, True)], ids=str)
def test_lu(m, n, given, dtype):
    # one after the other: PyTorch's own LU of several large ones at once hangs on more than one thread
    P, L, U = map(torch.stack, zip(*map(torch.linalg.lu, random(2, m, n, dtype=dtype))))
    gL, gU = (random(*x.shape, dtype=dtype, seed=i) if yes else None for i, (x, yes) in enumerate(zip((L, U), given)))
    arguments = (gL, gU, P, L, U, True)
    close_to_largest(
        torch.ops.manualgrad.linalg_lu_backward.python(*arguments), mg.ops.linalg_lu_backward.reference(*arguments)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [3, 64, 65, 150])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky(n, upper, dtype):
    L = torch.linalg.cholesky(random_definite(2, n, n, dtype=dtype), upper=upper)
    gL = random(2, n, n, dtype=dtype, seed=1)
    close_to_largest(
        torch.ops.manualgrad.cholesky_backward.python(gL, L, upper), mg.ops.cholesky_backward.reference(gL, L, upper)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_second_order(dtype):
    A, gL, gU = (random(3, 3, dtype=dtype, seed=i).requires_grad_() for i in range(3))

    def of_lu(gL, gU, A):
        P, L, U = torch.linalg.lu(A)
        return torch.ops.manualgrad.linalg_lu_backward.python(gL, gU, P, L, U, True)

    def of_cholesky(gL, A):
        L = torch.linalg.cholesky(A @ A.mH + torch.eye(3, dtype=dtype))
        return torch.ops.manualgrad.cholesky_backward.python(gL, L, False)

    torch.autograd.gradcheck(of_lu, (gL, gU, A), check_forward_ad=True, check_batched_grad=True)
    torch.autograd.gradcheck(of_cholesky, (gL, A), check_forward_ad=True, check_batched_grad=True)


def test_taken_where_large():
    A = random_definite(400, 400, dtype=torch.float64).requires_grad_()
    G = random(400, 400, dtype=torch.float64, seed=1)
    for function in (torch.linalg.cholesky, lambda A: torch.linalg.lu(A).U, lambda A: torch.linalg.lu_factor(A)[0]):
        (expected,) = torch.autograd.grad(function(A), A, G)
        with mg.override("*"):
            (found,) = torch.autograd.grad(function(A), A, G)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * expected.abs().max().item())
