"""The kernel of QR's cotangent on matrices without full rank: it decides as the formula does, for each matrix of a batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.factors import DTYPES, SIZES, deficient_qr, kernel, moved, skip_unless_taken
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg

SHAPES = [(1, 1), (2, 2), (3, 2), (4, 4), (5, 5), (9, 9), (17, 17), (6, 3), (12, 11), (26, 26), (32, 31), (40, 40)]


def kinds(m: int, n: int, dtype: torch.dtype) -> dict[str, tuple]:
    """Matrices with their cotangents."""
    found: dict[str, tuple] = {}
    regular = random(m, n, dtype=dtype)
    equal = regular.clone()
    equal[:, n // 2] = equal[:, 0] if n // 2 else 0
    zero = regular.clone()
    zero[:, n // 2] = 0
    for name, A in {"regular": regular, "equal columns": equal, "a column of zeros": zero}.items():
        Q, R = torch.linalg.qr(A)
        G = random(m, n, dtype=dtype, seed=5)
        gQ, gR = random(m, n, dtype=dtype, seed=1), random(n, n, dtype=dtype, seed=2)
        found[name] = gQ, gR, Q, R
        found[name + ", of the product"] = G @ R.mH, (Q.mH @ G).triu(), Q, R
        gQ, gR = gQ.clone(), gR.clone()
        gQ[:, n // 2 :], gR[n // 2 :] = 0, 0
        found[name + ", of the leading columns"] = gQ, gR, Q, R
    for rank in {*range(1, min(n, 4)), n - 1} - {0}:
        gQ, gR, Q, R = deficient_qr(m=m, n=n, dtype=dtype, rank=rank)
        found[f"rank {rank}, of the product"] = gQ, gR, Q, R
        found[f"rank {rank}, huge"] = 1e6 * random(m, n, dtype=dtype, seed=6), gR, Q, R
        exact = R.clone()
        exact[rank:] = 0
        found[f"rank {rank}, zeros"] = gQ, gR, Q, exact
        for place in ((0, 0), (0, n - 1), (rank, rank)):
            spoilt = gR.clone()
            spoilt[place] = math.nan
            found[f"rank {rank}, nan at {place}"] = gQ, spoilt, Q, R
        found[f"rank {rank}, no cotangent"] = torch.zeros_like(gQ), torch.zeros_like(gR), Q, R
    return found


def same(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-3 if torch.finfo(dtype).bits == 32 else 1e-9
    for one, other in zip(found, expected):
        scale = max([1.0, *other.abs()[other.isfinite()].tolist()])
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m, n", SHAPES)
def test_matrices_without_full_rank(m, n, dtype, device):
    """Each matrix alone, and all in one batch; with both cotangents, and with one of them."""
    skip_unless_taken(m, device, "linalg_qr_backward", dtype)
    if dtype.is_complex and m > max(SIZES):
        pytest.skip("the kernel takes smaller matrices")
    op, formula = kernel("linalg_qr_backward"), mg.ops.linalg_qr_backward
    given = [tuple(x.expand(1, *x.shape) for x in arguments) for arguments in kinds(m, n, dtype).values()]
    batch = tuple(torch.cat(x) for x in zip(*given))
    for absent in (None, 0, 1):
        without = [tuple(None if i == absent else x for i, x in enumerate(arguments)) for arguments in (*given, batch)]
        expected = [formula.reference(gQ, gR, Q @ R, Q, R, "reduced") for gQ, gR, Q, R in without]
        found = [op(*moved(arguments, lambda x: x.to(device))).cpu() for arguments in without]
        for one, other in zip(found, expected):
            same(one, other, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("m, n, rank", [(5, 5, 3), (9, 9, 8), (12, 6, 4)])
def test_the_gradient_of_a_product(m, n, rank, dtype, device):
    """That of A, although the columns of Q that are left have no derivative."""
    skip_unless_taken(m, device, "linalg_qr_backward", dtype)
    given = deficient_qr(7, m=m, n=n, dtype=dtype, rank=rank)
    found = kernel("linalg_qr_backward")(*moved(given, lambda x: x.to(device))).cpu()
    torch.testing.assert_close(found, random(7, m, n, dtype=dtype, seed=5), rtol=0, atol=1e-11)


@pytest.mark.parametrize("place", range(9))
def test_one_matrix_without_full_rank_changes_no_bit_of_others(place, device):
    for n, dtype in itertools.product((3, 8, 20), (torch.float64, torch.complex64)):
        skip_unless_taken(n, device, "linalg_qr_backward", dtype)
        gQ, gR, Q, R = (random(9, n, n, dtype=dtype, seed=seed) for seed in range(4))
        Q, R = torch.linalg.qr(R)
        clean = kernel("linalg_qr_backward")(*moved((gQ, gR, Q, R), lambda x: x.to(device)))
        R[place, n // 2, n // 2] = 0
        found = kernel("linalg_qr_backward")(*moved((gQ, gR, Q, R), lambda x: x.to(device)))
        others = torch.arange(9) != place
        assert torch.equal(found[others], clean[others]) and found[place].isnan().any()
