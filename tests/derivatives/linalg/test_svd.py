"""The SVD where the tests of the rules do not look: the further vectors of a full decomposition, and lazily conjugated ones."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from helpers.tensors import random
from torch.func import grad, jvp

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F64, C128 = torch.float64, torch.complex128
DTYPES = pytest.mark.parametrize("dtype", [F64, C128], ids=str)


def test_null_space_projector_has_its_gradient():
    A, G = random(5, 2, dtype=F64), random(5, 5, dtype=F64, seed=3)

    def projector(A):
        U = torch.linalg.svd(A).U[:, 2:]
        return (G * (U @ U.mT)).sum()

    def complement(A):
        return (G * (torch.eye(5, dtype=A.dtype) - A @ torch.linalg.solve(A.mT @ A, A.mT))).sum()

    with mg.override():
        found, tangent = grad(projector)(A), jvp(projector, (A,), (torch.ones_like(A),))[1]
    torch.testing.assert_close(found, grad(complement)(A))
    torch.testing.assert_close(tangent, found.sum())
    assert grad(projector)(A).abs().max() < 1e-12  # stock: silently zero


@DTYPES
@pytest.mark.parametrize("shape", [(5, 2), (2, 5)])
def test_a_loss_of_the_choice_of_the_further_vectors_is_reported(dtype, shape):
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


# -- a Vh whose conjugation is still to be done, as cuSOLVER returns it -----------------------------------------------


@pytest.fixture
def svd_conjugates():
    """In the place of LAPACK."""

    def svd(A, full_matrices=False, compute_uv=True, *, driver=None):
        U, S, Vh = map(torch.from_numpy, numpy.linalg.svd(A.detach().numpy(), full_matrices=full_matrices))
        return U.mT.contiguous().mT, S, Vh.conj().resolve_conj().conj()

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_linalg_svd", svd, "CPU", allow_override=True)
        yield


FUNCTIONS = {
    "a view": lambda A: torch.linalg.svd(A).Vh[:2].abs(),
    "a transpose": lambda A: torch.linalg.svd(A).Vh.mH.abs(),
    "the moduli": lambda A: torch.linalg.svd(A).Vh.abs(),
    "the product": lambda A: (lambda U, S, Vh: (U * S.exp().to(U.dtype)) @ Vh)(*torch.linalg.svd(A)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_mode(svd_conjugates, name):
    A = random(3, 3, dtype=torch.complex128)
    assert torch.linalg.svd(A).Vh.is_conj()
    with mg.override():
        check(FUNCTIONS[name], [(A,)], checks=("forward",))
