"""Inverses of singular matrices and of the smallest ones; the modes are tests of the rules."""

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.derivatives.samples.drawing import random_conditioned


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_singular_matrix_affects_its_own_gradient_only(dtype):
    A = random_conditioned(3, 2, 2, dtype=dtype)
    A[1] = 1.0

    def gradient(A):
        A = A.clone().requires_grad_()
        X = torch.linalg.inv_ex(A)[0]
        return torch.autograd.grad(torch.where(X.isfinite(), X, 0).abs().square().sum(), A)[0]

    with mg.override("aten::linalg_inv_ex"):
        whole = gradient(A)
        for i in (0, 2):
            torch.testing.assert_close(whole[i], gradient(A[i : i + 1])[0])
        assert whole[[0, 2]].isfinite().all()
        assert not whole[1].isfinite().all()


def test_a_singular_matrix_raises_in_the_forward():
    A = torch.ones(2, 2, requires_grad=True)
    with mg.override("aten::linalg_inv_ex"), pytest.raises(torch.linalg.LinAlgError, match="singular"):
        torch.linalg.inv(A)


@pytest.mark.parametrize("n", [0, 1])
def test_smallest_sizes(n):
    A = torch.full((2, n, n), 2.0, requires_grad=True)
    with mg.override("aten::linalg_inv_ex"):
        (gA,) = torch.autograd.grad(torch.linalg.inv(A).sum(), A)
    torch.testing.assert_close(gA, torch.full((2, n, n), -0.25))


@pytest.mark.skipif(not compiled_calls.loaded(), reason="Python asks the rule itself")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_limit_on_batches_for_pytorch_has_one_home(dtype):
    rule = mg.rules["aten::linalg_inv_ex"]
    for shape in [(455, 3, 3), (456, 3, 3), (63, 8, 8), (64, 8, 8), (51, 9, 9), (2, 48, 48), (2, 49, 49), (1, 64, 64)]:
        A = torch.eye(shape[-1], dtype=dtype).expand(shape).clone().requires_grad_()
        before = compiled_calls.counts().plain
        with mg.override():
            torch.linalg.inv(A)
        assert (compiled_calls.counts().plain == before) == rule.defer_to_stock(A), shape
