"""Arguments of the compiled derivatives of LU, Cholesky, QR, determinants, inverses and solves, and their comparison
with the references."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_manualgrad as mg
from helpers.tensors import random
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.op.custom_op import CustomOp

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]
SIZES = [0, 1, 2, 3, 4, 5, 8, 9, 16, 31, 32]
BATCH = 35  # two groups of lanes and more than one matrix left, for every dtype


def regular(*batch: int, n: int, dtype: torch.dtype) -> Tensor:
    """Matrices whose factors are well conditioned, with interchanges of rows."""
    A = random(*batch, n, n, dtype=dtype) / max(1.0, math.sqrt(n)) + 2 * torch.eye(n, dtype=dtype)
    return A[..., random(n, dtype=torch.float32, seed=9).argsort(), :]


def lu_arguments(*batch: int, m: int, n: int, dtype: torch.dtype, grad_L: bool = True, grad_U: bool = True) -> tuple:
    side = max(m, n)
    A = regular(*batch, n=side, dtype=dtype)[..., :m, :n]
    P, L, U = torch.linalg.lu(A)
    gL = random(*L.shape, dtype=dtype, seed=1) if grad_L else None
    gU = random(*U.shape, dtype=dtype, seed=2) if grad_U else None
    return gL, gU, P, L, U, True


def definite(*batch: int, n: int, dtype: torch.dtype) -> Tensor:
    A = random(*batch, n, n, dtype=dtype)
    return A @ A.mH / max(n, 1) + torch.eye(n, dtype=dtype)


def lu_tangent(*batch: int, n: int, dtype: torch.dtype, m: int | None = None) -> tuple:
    m = n if m is None else m
    _, _, P, L, U, pivot = lu_arguments(*batch, m=m, n=n, dtype=dtype)
    return random(*batch, m, n, dtype=dtype, seed=3), P, L, U, pivot


def packed(*batch: int, n: int, dtype: torch.dtype, m: int | None = None) -> tuple:
    m = n if m is None else m
    LU, pivots = torch.linalg.lu_factor(regular(*batch, n=max(m, n), dtype=dtype)[..., :m, :n])
    return random(*batch, m, n, dtype=dtype, seed=3), LU, pivots, True


def cholesky(*batch: int, n: int, dtype: torch.dtype, upper: bool = False) -> tuple:
    L = torch.linalg.cholesky(definite(*batch, n=n, dtype=dtype), upper=upper)
    return random(*batch, n, n, dtype=dtype, seed=3), L, upper


def det(*batch: int, n: int, dtype: torch.dtype) -> tuple:
    A = regular(*batch, n=n, dtype=dtype)
    LU, pivots = torch.linalg.lu_factor(A)
    return random(*batch, dtype=dtype, seed=3), torch.linalg.det(A), LU, pivots


def slogdet(*batch: int, n: int, dtype: torch.dtype) -> tuple:
    h, _, LU, pivots = det(*batch, n=n, dtype=dtype)
    return h, LU, pivots


def inverse(*batch: int, n: int, dtype: torch.dtype) -> tuple:
    return random(*batch, n, n, dtype=dtype, seed=3), regular(*batch, n=n, dtype=dtype)


def solve(*batch: int, n: int, dtype: torch.dtype, columns: int | None = None) -> tuple:
    columns = n if columns is None else columns
    A = regular(*batch, n=n, dtype=dtype)
    gX, X = (random(*batch, n, columns, dtype=dtype, seed=s) for s in (3, 4))
    return gX, X, A, *torch.linalg.lu_factor(A), True


def solve_tangents(*batch: int, n: int, dtype: torch.dtype, columns: int | None = None) -> tuple:
    dB, *rest = solve(*batch, n=n, dtype=dtype, columns=columns)
    return random(*batch, n, n, dtype=dtype, seed=5), dB, *rest


def triangular(
    *batch: int,
    n: int,
    dtype: torch.dtype,
    columns: int | None = None,
    upper: bool = True,
    left: bool = True,
    unitriangular: bool = False,
) -> tuple:
    columns = n if columns is None else columns
    A = random(*batch, n, n, dtype=dtype) / max(1.0, math.sqrt(n)) + 2 * torch.eye(n, dtype=dtype)
    grad, X = (random(*batch, *((n, columns) if left else (columns, n)), dtype=dtype, seed=s) for s in (3, 4))
    return grad, A, X, upper, left, unitriangular


def qr(
    *batch: int, n: int, dtype: torch.dtype, m: int | None = None, grad_Q: bool = True, grad_R: bool = True
) -> tuple:
    m = n if m is None else m
    Q, R = torch.linalg.qr(regular(*batch, n=m, dtype=dtype)[..., :n])
    gQ = random(*Q.shape, dtype=dtype, seed=1) if grad_Q else None
    gR = random(*R.shape, dtype=dtype, seed=2) if grad_R else None
    return gQ, gR, Q, R


def deficient_qr(*batch: int, m: int, n: int, dtype: torch.dtype, rank: int) -> tuple:
    """For a loss of $Q R$, which is smooth; the leading columns are independent."""
    A = random(*batch, m, rank, dtype=dtype, seed=3) @ random(*batch, rank, n, dtype=dtype, seed=4)
    Q, R = torch.linalg.qr(A)
    G = random(*A.shape, dtype=dtype, seed=5)
    return G @ R.mH, (Q.mH @ G).triu(), Q, R


# operator -> its arguments for square matrices, at (*batch, n=, dtype=)
OPERATORS: dict[str, Callable[..., tuple]] = {
    "linalg_lu_backward": lambda *batch, n, dtype: lu_arguments(*batch, m=n, n=n, dtype=dtype),
    "linalg_lu_jvp": lu_tangent,
    "lu_factor_ex_backward": packed,
    "lu_factor_ex_jvp": packed,
    "cholesky_backward": cholesky,
    "cholesky_jvp": cholesky,
    "linalg_det_backward": det,
    "slogdet_backward": slogdet,
    "linalg_inv_backward": inverse,
    "linalg_inv_jvp": inverse,
    "linalg_solve_backward": solve,
    "linalg_solve_jvp": solve_tangents,
    "linalg_solve_triangular_backward": triangular,
    "linalg_qr_backward": qr,
}
IN_CACHE = [
    name
    for name in OPERATORS
    if (not name.endswith("_jvp") or name == "linalg_inv_jvp") and name != "linalg_solve_triangular_backward"
]


def operator(name: str) -> CustomOp:
    """The operator of a formula that the compiled kernel is registered for, with its own reference."""
    formula = mg.ops[name]
    return formula.overloads.get("kernel", formula)


def kernel(name: str) -> Any:
    """What calls the compiled kernel."""
    return operator(name).op


def cases(sizes: list[int], larger: list[int]) -> list[Any]:
    """(name, n, dtype) that a kernel takes; the larger ones on the CPU."""
    found = [*itertools.product(OPERATORS, sizes, DTYPES), *itertools.product(IN_CACHE, larger, DTYPES[:2])]
    return [pytest.param(name, n, dtype, id=f"{name}-{n}-{str(dtype)[6:]}") for name, n, dtype in found]


def skip_unless_taken(
    n: int, device: str, name: str = "linalg_lu_backward", dtype: torch.dtype = torch.float64
) -> None:
    if device not in getattr(mg.ops, name).kernels:
        pytest.skip("no such kernel")
    shared = name == "linalg_qr_backward" and dtype == torch.complex128
    if n > (LIMITS["shared_qr"] if shared else max(SIZES)) and device != "cpu":
        pytest.skip("the kernel takes smaller matrices")


def moved(arguments: tuple, move: Callable[[Tensor], Tensor]) -> tuple:
    return tuple(move(x) if isinstance(x, Tensor) else x for x in arguments)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def matrices(result: Any) -> tuple[Tensor, ...]:
    """The outputs without what is said of the whole batch."""
    return tuple(x for x in outputs(result) if x.dim() > 0)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64) if x.is_floating_point() or x.is_complex() else x


def check(name: str, arguments: tuple, device: str) -> tuple[Tensor, ...]:
    """The kernel against its reference in double precision."""
    found = outputs(kernel(name)(*moved(arguments, lambda x: x.to(device))))
    expected = outputs(operator(name).reference(*moved(arguments, wide)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert one.shape == other.shape
        if one.dtype == torch.bool:
            assert torch.equal(one.cpu(), other)
            continue
        assert (one.mT if name == "linalg_qr_backward" else one).is_contiguous()
        single = one.dtype in (torch.float32, torch.complex64)
        scale = 1.0 if other.numel() == 0 else max(1.0, other.abs().max().item())
        tolerance = (2e-5 if single else 1e-13) * scale
        torch.testing.assert_close(wide(one.cpu()), other, rtol=0, atol=tolerance)
    return found
