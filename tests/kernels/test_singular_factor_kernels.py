"""The compiled derivatives of LU, Cholesky, QR, determinants, inverses and solves where a matrix is singular, has entries
that are not finite, or its pivots are none."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.factors import (
    BATCH,
    DTYPES,
    IN_CACHE,
    OPERATORS,
    SIZES,
    cases,
    check,
    kernel,
    lu_arguments,
    matrices,
    moved,
    outputs,
    regular,
    skip_unless_taken,
)
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16])
def test_triangles_with_a_pivot_of_zero(n, dtype, device):
    """What is not finite stays in its matrix; the last pivot of a real square QR is not divided by."""
    for name, place in (("linalg_solve_triangular_backward", 1), ("linalg_qr_backward", 3)):
        if device not in getattr(mg.ops, name).kernels:
            continue
        arguments = moved(OPERATORS[name](BATCH, n=n, dtype=dtype), lambda x: x.to(device))
        clean = outputs(kernel(name)(*arguments))
        for pivot in {0, n - 1}:
            changed = list(arguments)
            changed[place] = arguments[place].clone()
            changed[place][5, pivot, pivot] = 0
            results = outputs(kernel(name)(*changed))
            for one, other in zip(matrices(results), matrices(clean)):
                smooth = name == "linalg_qr_backward" and not dtype.is_complex and pivot == n - 1
                assert one[5].isfinite().all() == smooth
                keep = torch.arange(BATCH) != 5
                assert torch.equal(one[keep], other[keep])


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name, n, dtype", cases([1, 3, 9], [34]))
def test_infinities_stay_in_their_matrix(name, n, dtype, value, device):
    skip_unless_taken(n, device, name)
    op, arguments = kernel(name), OPERATORS[name](BATCH, n=n, dtype=dtype)
    arguments = moved(arguments, lambda x: x.to(device))
    clean = matrices(op(*arguments))
    others = [b for b in range(BATCH) if b != 5]
    for place, argument in enumerate(arguments):
        if not isinstance(argument, Tensor) or argument.dtype != dtype:
            continue
        changed = argument.clone()
        changed[5] = value
        found = matrices(op(*arguments[:place], changed, *arguments[place + 1 :]))
        for one, other in zip(found, clean):
            assert torch.equal(one[others], other[others])
        unread = (name, place) in {
            ("linalg_solve_backward", 2),
            ("linalg_solve_jvp", 3),
        }  # A, of which the kernel takes the factors
        if n > 1 and math.isnan(value) and not unread:
            assert any(one[5].isnan().any() for one in found)


def singular(n: int, zeros: int, dtype: torch.dtype) -> Tensor:
    A = regular(6, n=n, dtype=dtype)
    A[1::2] = A[1::2, :, : n - zeros] @ random(n - zeros, n, dtype=dtype, seed=5)
    nilpotent = torch.ones(n, n, dtype=dtype).triu(1)
    return torch.cat((A, nilpotent[None], torch.zeros(1, n, n, dtype=dtype), torch.eye(n, dtype=dtype)[None]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 9, 36])
def test_zero_pivots(n, dtype, device):
    """The adjugate, exact for any number of zeros among the pivots; nan where log|det| has no derivative."""
    if n > max(SIZES) and (dtype.is_complex or device != "cpu"):
        pytest.skip("the kernel takes smaller matrices")
    for zeros in {0, 1, min(2, n), n}:
        LU, pivots, _ = torch.linalg.lu_factor_ex(singular(n, zeros, dtype))
        LU = LU.clone()
        for b, places in enumerate(itertools.islice(itertools.combinations(range(n), zeros), 6)):
            for i in places:
                LU[b, i, i] = 0
        grad = random(*LU.shape[:1], dtype=dtype)
        swaps = (pivots != torch.arange(1, n + 1)).sum(-1)
        value = LU.diagonal(dim1=-2, dim2=-1).prod(-1) * (1 - 2 * (swaps % 2))
        check("linalg_det_backward", (grad, value, LU, pivots), device)
        found = kernel("slogdet_backward")(grad.to(device), LU.to(device), pivots.to(device)).cpu()
        is_singular = (LU.diagonal(dim1=-2, dim2=-1) == 0).any(-1)
        assert found[is_singular].isnan().all()
        assert found[~is_singular].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 9, 33, 130, 300])
def test_last_pivot_of_zero(n, dtype, device):
    """Smooth for the factors of square and wide matrices: nothing is divided by it, in no route."""
    # of large ones one alone: PyTorch's own LU of several at once hangs on more than one thread
    arguments = list(lu_arguments(BATCH if n <= max(SIZES) else 1, m=n, n=n, dtype=dtype))
    arguments[4] = arguments[4].clone()
    arguments[4][..., -1, -1] = 0
    if n > max(SIZES):
        found = mg.ops.linalg_lu_backward(*moved(tuple(arguments), lambda x: x.to(device))).cpu()
        torch.testing.assert_close(found, mg.ops.linalg_lu_backward.reference(*arguments), rtol=0, atol=1e-11)
        return
    for name, given in (("linalg_lu_backward", arguments), ("linalg_lu_jvp", [arguments[0], *arguments[2:]])):
        assert all(x.isfinite().all() for x in check(name, tuple(given), device))


@pytest.mark.parametrize("n", [3, 9, 33])
def test_an_invalid_permutation_gives_nan(n, device):
    skip_unless_taken(n, device)
    arguments = [x.to(device) if isinstance(x, Tensor) else x for x in lu_arguments(4, m=n, n=n, dtype=torch.float64)]
    expected = kernel("linalg_lu_backward")(*arguments)
    for value in (0.0, 1.0, 1e30, -1.0, math.nan, math.inf):
        P = arguments[2].clone()
        P[2] = value
        found = kernel("linalg_lu_backward")(*arguments[:2], P, *arguments[3:])
        assert found[2].isnan().all()
        assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


@pytest.mark.usefixtures("as_from_rules")
@pytest.mark.parametrize("n", [3, 9, 33])
def test_pivots_out_of_range_do_no_harm(n, device):
    skip_unless_taken(n, device)
    for name in (
        "lu_factor_ex_backward",
        "lu_factor_ex_jvp",
        "linalg_det_backward",
        "slogdet_backward",
        "linalg_solve_backward",
        "linalg_solve_jvp",
    ):
        if n > max(SIZES) and name not in IN_CACHE:
            continue
        arguments = OPERATORS[name](BATCH, n=n, dtype=torch.float64)
        wrong = moved(arguments, lambda x: (torch.full_like(x, 2**31 - 1) if x.dtype == torch.int32 else x).to(device))
        kernel(name)(*wrong)
        wrong = moved(arguments, lambda x: (torch.full_like(x, -(2**31)) if x.dtype == torch.int32 else x).to(device))
        kernel(name)(*wrong)
