"""The pseudo-inverse: deficient ranks, very tall matrices, shapes; the modes at full rank are tests of the rules."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg.pinv import (
    pinv_backward,
    pinv_jvp,
    pinv_truncated_backward,
    pinv_truncated_jvp,
)
from torch_manualgrad.derivatives.samples.drawing import random, random_conditioned
from torch_manualgrad.testing import Sample, check

F64, C128 = torch.float64, torch.complex128
CHECKS = ("agreement", "duality", "undefined cotangents", "noncontiguous")


@pytest.mark.parametrize("dtype", [F64, C128])
def test_pinv_of_deficient_rank_in_all_modes(dtype):
    def general(L, R):
        return torch.linalg.pinv(L @ R)

    def hermitian(L):
        return torch.linalg.pinv(L @ L.mH, hermitian=True)

    tall, wide = random_conditioned(2, 4, 2, dtype=dtype), random_conditioned(2, 3, dtype=dtype, seed=1)
    with mg.override("aten::linalg_pinv"):
        check(general, [Sample(tall, wide), Sample(wide.mT, tall[0].mT)], checks=CHECKS)
        check(hermitian, [Sample(tall)], checks=CHECKS)


def test_a_very_tall_matrix_takes_no_square_of_its_height():
    """Stock's formula forms (m, m) matrices: of 80 GB each here."""
    A = random(100_000, 2, dtype=F64)
    G = random(2, 100_000, dtype=F64, seed=1)
    x = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad((G * torch.linalg.solve(x.mT @ x, x.mT)).sum(), x)
    with mg.override("aten::linalg_pinv"):
        (found,) = torch.autograd.grad((G * torch.linalg.pinv(x)).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pinv_jvp(A, torch.linalg.pinv(A), A), -torch.linalg.pinv(A), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3), (2, 3), (7, 2)], ids=str)
def test_pinv_that_drops_nonzero_singular_values_in_all_modes(shape, dtype):
    """The formula at constant rank, which takes the dropped values for zero, is off by some percent here."""
    A = random_conditioned(*shape, dtype=dtype)  # singular values 1, 1.7 and 2.4
    with mg.override("aten::linalg_pinv"):
        check(lambda A: torch.linalg.pinv(A, atol=1.3), [Sample(A)], checks=CHECKS)
        check(lambda A: torch.pinverse(A, 0.7), [Sample(A)], checks=CHECKS, modes=("rev", "fwd"))


@pytest.mark.parametrize("dtype", [F64, C128])
def test_pinv_drops_some_of_equal_singular_values(dtype):
    """Kept values may repeat, and dropped ones; each matrix of a batch has its own rank."""
    U = torch.linalg.qr(random(4, 4, dtype=dtype))[0]
    S = torch.tensor([[2, 2, 1, 1], [3, 2, 2, 0.5], [1, 1, 0, 0]], dtype=F64)
    A = (U * S.unsqueeze(-2).to(dtype)) @ U.mH.roll(1, 0)
    tolerance = torch.tensor([1.5, 1, 0.5], dtype=F64)
    with mg.override():
        check(lambda A: torch.linalg.pinv(A, atol=tolerance), [Sample(A)], checks=CHECKS)


@pytest.mark.parametrize("dtype", [F64, C128])
def test_hermitian_pinv_that_drops_nonzero_eigenvalues(dtype):
    V = torch.linalg.qr(random(3, 3, dtype=dtype))[0]
    A = (V * torch.tensor([2.0, -1.5, 1.0], dtype=dtype)) @ V.mH
    with mg.override():
        check(lambda A: torch.linalg.pinv(0.5 * (A + A.mH), hermitian=True, rtol=0.6), [Sample(A)], checks=CHECKS)


def test_a_tolerance_that_drops_nothing_costs_no_decomposition():
    A = random_conditioned(5, 3, dtype=F64)
    P = torch.linalg.pinv(A)
    for tolerance in (None, 0.1):
        x = A.clone().requires_grad_()
        with mg.override():
            y = torch.linalg.pinv(x, rtol=tolerance)
            with torch.profiler.profile() as profile:
                (found,) = torch.autograd.grad(y.sum(), x)
        called = {event.key for event in profile.key_averages()}
        assert "aten::matmul" in called and not any("svd" in name or "eigh" in name for name in called), called
        torch.testing.assert_close(found, pinv_backward(torch.ones_like(P), P, A))
    torch.testing.assert_close(pinv_truncated_backward.reference(torch.ones_like(P), P, A), found)
    torch.testing.assert_close(pinv_truncated_jvp.reference(A, P, A), pinv_truncated_jvp(A, P, A))


def test_shapes_that_do_not_fit_raise():
    A = random(3, 2, dtype=F64)
    with pytest.raises(RuntimeError):
        pinv_backward(A, torch.linalg.pinv(A), A)
