"""Solves with LU factors: against the definition, from either side, where batches broadcast."""

import itertools

import pytest
import torch
from helpers.tensors import close, random
from torch.func import jvp, vjp

import torch_manualgrad as mg

F64, C128 = torch.float64, torch.complex128
DTYPES = [F64, C128]
CASES = list(itertools.product([True, False], [True, False]))


def solved(LU, pivots, B, left, adjoint):
    """The definition, from the factors."""
    P, L, U = torch.lu_unpack(LU, pivots)
    A = P @ L @ U
    return torch.linalg.solve(A.mH if adjoint else A, B, left=left)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left, adjoint", CASES)
@pytest.mark.parametrize("n, r", [(5, 1), (5, 2), (5, 3), (5, 7), (70, 40), (70, 80), (3, 0), (0, 2)])
def test_lu_solve_is_the_solution_with_the_product(n, r, left, adjoint, dtype):
    LU, pivots = torch.linalg.lu_factor(random(n, n, dtype=dtype) + 3 * torch.eye(n))
    B = random(*((n, r) if left else (r, n)), dtype=dtype, seed=1)
    T, S, G = (random(*x.shape, dtype=dtype, seed=i + 2) for i, x in enumerate((LU, B, B)))
    by_definition = lambda LU, B: solved(LU, pivots, B, left, adjoint)  # noqa: E731
    f = lambda LU, B: torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)  # noqa: E731
    expected = (
        *vjp(by_definition, LU, B)[1](G),
        *(jvp(by_definition, (LU, B), t)[1] for t in [(T, S), (T, 0 * S), (0 * T, S)]),
    )
    with mg.override():
        found = [*vjp(f, LU, B)[1](G), *(jvp(f, (LU, B), t)[1] for t in [(T, S), (T, 0 * S), (0 * T, S)])]
        close(tuple(found), expected, 1e-7)
        close(vjp(lambda LU: f(LU, B), LU)[1](G)[0], expected[0], 1e-7)
        close(vjp(lambda B: f(LU, B), B)[1](G)[0], expected[1], 1e-7)
        close(jvp(lambda LU: f(LU, B), (LU,), (T,))[1], expected[3], 1e-7)
        close(jvp(lambda B: f(LU, B), (B,), (S,))[1], expected[4], 1e-7)


@pytest.mark.parametrize("left, adjoint", CASES)
def test_lu_solve_forward_over_reverse_of_complex_matrices(left, adjoint):
    LU, pivots = torch.linalg.lu_factor(random(3, 3, dtype=C128))
    B, G, T, S = (random(3, 3, dtype=C128, seed=i) for i in (1, 2, 3, 4))

    def pulled(solve):
        return lambda LU, B: vjp(lambda LU, B: solve(LU, pivots, B, left=left, adjoint=adjoint), LU, B)[1](G)

    expected = jvp(pulled(solved), (LU, B), (T, S))[1]
    if not left and not adjoint:
        with pytest.raises(RuntimeError, match="same layout as primal"):
            jvp(pulled(torch.linalg.lu_solve), (LU, B), (T, S))
    with mg.override():
        close(jvp(pulled(torch.linalg.lu_solve), (LU, B), (T, S))[1], expected)


@pytest.mark.parametrize("left, adjoint", CASES)
@pytest.mark.parametrize("of_LU, of_B", [((), (2,)), ((2,), ()), ((2, 1), (3,)), ((1,), (2,)), ((0,), (0,))])
def test_lu_solve_broadcasts(of_LU, of_B, left, adjoint):
    LU, pivots = torch.linalg.lu_factor(random(*of_LU, 3, 3) + 2 * torch.eye(3))
    B = random(*of_B, *((3, 1) if left else (1, 3)), seed=1)
    f = lambda LU, B: torch.linalg.lu_solve(LU, pivots, B, left=left, adjoint=adjoint)  # noqa: E731
    shape = f(LU, B).shape
    G, T, S = random(*shape, seed=2), random(*LU.shape, seed=3), random(*B.shape, seed=4)
    expected = *vjp(f, LU, B)[1](G), jvp(f, (LU, B), (T, S))[1]
    with mg.override():
        close((*vjp(f, LU, B)[1](G), jvp(f, (LU, B), (T, S))[1]), expected)
    close(mg.ops.linalg_lu_solve_LU(G, LU, pivots, f(LU, B), left, adjoint), expected[0])
