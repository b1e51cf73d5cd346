"""An operator that returns a tensor whose conjugation is still to be done, as cuSOLVER's SVD does with Vh."""

import numpy
import pytest
import torch
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.testing import check


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
