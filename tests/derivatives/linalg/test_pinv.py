"""The pseudo-inverse: deficient ranks, very tall matrices, shapes; the modes at full rank are tests of the rules."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.derivatives.linalg.common import random, random_conditioned
from torch_manualgrad.derivatives.linalg.pinv import pinv_backward, pinv_jvp
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


def test_shapes_that_do_not_fit_raise():
    A = random(3, 2, dtype=F64)
    with pytest.raises(RuntimeError):
        pinv_backward(A, torch.linalg.pinv(A), A)
