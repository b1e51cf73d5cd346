"""The adjugate, from the matrix and from its factors; its derivatives are tested with those of determinants."""

import pytest
import torch
from helpers.matrices import cofactors, integers

from torch_manualgrad.derivatives.linalg.adjugate import adjugate, adjugate_from_lu, small_adjugate

DTYPES = [torch.float64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_general_way_serves_regular_matrices_too(dtype):
    """On devices where nobody may look for zero pivots, every matrix goes this way."""
    A = torch.stack([integers(5, rank, dtype, seed=rank) for rank in (5, 4, 5, 3)])
    LU, pivots, _ = torch.linalg.lu_factor_ex(A)
    expected = torch.stack([cofactors(a).mT for a in A])
    torch.testing.assert_close(adjugate_from_lu(LU, pivots), expected, rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(adjugate(A), expected, rtol=1e-11, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_small_adjugate(n):
    A = integers(n, n, torch.complex128, seed=3)
    expected = torch.linalg.det(A) * torch.eye(n, dtype=A.dtype)
    torch.testing.assert_close(small_adjugate(A) @ A, expected)
