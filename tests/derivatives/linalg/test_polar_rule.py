"""The derivative of linalg_polar: its formulas on every torch, the rule on those that have the operator."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import C128, F64, matrix, points
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.core.rule import rules
from torch_manualgrad.linalg import polar
from torch_manualgrad.testing import check

needs_operator = pytest.mark.skipif("aten::linalg_polar" in rules.absent, reason="this torch has no linalg_polar")


def tall(dtype):
    return [A for A in points(dtype) if A.shape[-2] >= A.shape[-1]]


def cotangents(A, U, H):
    return random(*U.shape, dtype=A.dtype, seed=5), random(*H.shape, dtype=A.dtype, seed=6)


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_formulas_are_those_of_the_whole_function(dtype):
    """`mg.linalg.polar` derives its second factor from the first."""
    for A in tall(dtype):
        (U, H), pullback = torch.func.vjp(lambda A: tuple(polar(A)), A)
        gU, gH = cotangents(A, U, H)
        for grads in ((gU, gH), (gU, None), (None, gH)):
            given = tuple(torch.zeros_like(x) if g is None else g for g, x in zip(grads, (U, H)))
            torch.testing.assert_close(mg.ops.linalg_polar_backward(*grads, A, U, H), *pullback(given))
        E = random(*A.shape, dtype=dtype, seed=7)
        expected = torch.func.jvp(lambda A: tuple(polar(A)), (A,), (E,))[1]
        torch.testing.assert_close(tuple(mg.ops.linalg_polar_jvp(E, A, U, H)), expected)


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_formulas_to_third_order(dtype):
    """Their own derivatives in six modes, also where singular values repeat."""
    for A in (matrix(3, (1, 1, 2), dtype), matrix(4, (1, 1, 1), dtype)):
        gU, gH = cotangents(A, *polar(A))
        E = random(*A.shape, dtype=dtype, seed=7)
        check(lambda A, gU, gH: mg.ops.linalg_polar_backward(gU, gH, A, *polar(A)), [(A, gU, gH)], checks=())
        check(lambda A, E: tuple(mg.ops.linalg_polar_jvp(E, A, *polar(A))), [(A, E)], checks=())


def test_a_closed_form():
    """At a rotation times a number, dU is the skew part of U^T E over that number, turned, and dH the symmetric part."""
    U, E = torch.linalg.qr(random(3, 3))[0], random(3, 3, seed=1)
    Z = U.mT @ E
    dU, dH = mg.ops.linalg_polar_jvp(E, 3 * U, U, 3 * torch.eye(3, dtype=F64))
    torch.testing.assert_close(dU, U @ (Z - Z.mT) / 6)
    torch.testing.assert_close(dH, (Z + Z.mT) / 2)


def test_a_cotangent_that_is_missing_is_zero():
    A = random(4, 3)
    assert mg.ops.linalg_polar_backward(None, None, A, *polar(A)).eq(0).all()


@needs_operator
@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_rule_where_singular_values_repeat(dtype):
    with mg.override("linalg.polar"):
        check(torch.ops.aten.linalg_polar, [(A,) for A in tall(dtype)], checks=("agreement", "duality"))


@needs_operator
def test_the_third_order_of_the_rule():
    """Against that of `mg.linalg.polar`."""

    gU, gH = random(4, 3, seed=5), random(3, 3, seed=6)

    def third(factors):
        def loss(A):
            U, H = factors(A)
            return (U * gU).sum() + (H * gH).sum()

        return torch.func.jacfwd(torch.func.jacrev(torch.func.grad(loss)))

    for A in (matrix(4, (1, 1, 2)), matrix(4, (1, 1, 1)), matrix(4, (0.5, 1.2, 2))):
        expected = third(polar)(A)
        with mg.override("linalg.polar"):
            torch.testing.assert_close(third(torch.linalg.polar)(A), expected, rtol=1e-9, atol=1e-9)


@needs_operator
@pytest.mark.parametrize("values", [(2.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)], ids=str)
def test_without_full_rank_the_undetermined_part_is_zero(values):
    """Where PyTorch's derivative is nan."""
    A = torch.diag(torch.tensor(values, dtype=F64)).requires_grad_()

    def gradient():
        U, H = torch.linalg.polar(A)
        return torch.autograd.grad((U * random(3, 3)).sum() + (H * random(3, 3, seed=1)).sum(), A)[0]

    assert gradient().isnan().any()
    with mg.override():
        assert gradient().isfinite().all()


@needs_operator
def test_the_branch_at_rank_one_less():
    """A square real matrix whose determinant vanishes: U is smooth on either side of it."""
    A, E = torch.diag(torch.tensor([2.0, 1, 0], dtype=F64)), random(3, 3, seed=1)
    E[2, 2] = 0  # s_3 stays 0 in first order
    with mg.override("linalg.polar"):
        (U, _), (dU, _) = torch.func.jvp(lambda A: tuple(torch.linalg.polar(A)), (A,), (E,))
    Z = U.mT @ E
    sums = torch.tensor([2.0, 1, 0], dtype=F64)
    sums = sums[:, None] + sums
    torch.testing.assert_close(dU, U @ ((Z - Z.mT) / torch.where(sums == 0, 1, sums)))


def test_a_matrix_that_is_not_finite_in_a_batch():
    """Its gradient is nan, and those of the others are as without it."""
    A = torch.stack([matrix(4, (1, 1, 2)), matrix(4, (0.5, 1.2, 2))])
    U, H = polar(A)
    grads = cotangents(A, U, H)
    expected = mg.ops.linalg_polar_backward(*grads, A, U, H)
    for x in (A, U, H):
        x[1] = torch.nan
    found = mg.ops.linalg_polar_backward(*grads, A, U, H)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[0], expected[0])
