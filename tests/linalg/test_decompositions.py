"""mg.linalg.svd and mg.linalg.eigh: their options."""

from __future__ import annotations

import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.linalg import Degeneracy


def test_arguments():
    A = torch.eye(3)
    for call, what in [
        (lambda: mg.linalg.svd(A, rank=4), "rank: expected 1 to 3"),
        (lambda: mg.linalg.svd(A, rank=0), "rank"),
        (lambda: mg.linalg.svd(A, gauge="maybe"), "gauge: expected"),
        (lambda: mg.linalg.svd(A[0]), "A: expected a matrix"),
        (lambda: mg.linalg.eigh(A[:2]), "A: expected square"),
        (lambda: mg.linalg.eigh(A, UPLO="l"), "UPLO"),
        (lambda: Degeneracy(rtol=-1.0), "rtol must not be negative"),
    ]:
        with pytest.raises(ValueError, match=what):
            call()
    with pytest.raises(TypeError, match="int64"):
        mg.linalg.svd(torch.ones(2, 2, dtype=torch.int64))


def test_autocast_computes_in_float32():
    A = torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        S = mg.linalg.svd(A).S
        assert S.dtype == torch.float32
        S.sum().backward()
        with mg.override():
            torch.linalg.svdvals(A).sum().backward()
    assert A.grad.isfinite().all()


def test_truncated_is_the_derivative_of_the_leading_part():
    A, G = random(5, 4), random(5, 4, seed=2)

    def truncated(A):
        U, S, Vh = mg.linalg.svd(A, rank=2)
        return (G * ((U * S) @ Vh)).sum()

    def full(A):
        U, S, Vh = torch.linalg.svd(A, full_matrices=False)
        return (G * ((U[:, :2] * S[:2]) @ Vh[:2])).sum()

    torch.testing.assert_close(torch.func.grad(truncated)(A), torch.func.grad(full)(A))
    assert mg.linalg.svd(A, rank=2).U.shape == (5, 2)
