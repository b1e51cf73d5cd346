"""The derivative of linalg_matrix_sqrth: its formula on every torch, the rule on those that have the operator."""

from __future__ import annotations

import pytest
import torch
from helpers.matrices import C128, F64
from helpers.tensors import random

import torch_manualgrad as mg
from torch_manualgrad.core.rule import rules
from torch_manualgrad.linalg import solve_lyapunov, sqrtm
from torch_manualgrad.testing import check

needs_operator = pytest.mark.skipif(
    "aten::linalg_matrix_sqrth" in rules.absent, reason="this torch has no linalg_matrix_sqrth"
)

SPECTRA = ((1.0, 1.0, 1.0), (1.0, 1.0, 2.0), (1.0, 1 + 1e-9, 2.0), (0.5, 1.2, 3.0))


def hermitian(X):
    return (X + X.mH) / 2


def definite(values, dtype):
    Q = torch.linalg.qr(random(len(values), len(values), dtype=dtype))[0]
    return hermitian((Q * torch.tensor(values, dtype=dtype)) @ Q.mH)


def root(A):
    return sqrtm(A, assume="hermitian")


@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("values", SPECTRA, ids=str)
def test_the_formula_solves_the_equation(values, dtype):
    A, E = definite(values, dtype), random(3, 3, dtype=dtype, seed=1)
    found = mg.ops.linalg_matrix_sqrth_differential(A, E)
    R = root(A)
    torch.testing.assert_close(R @ found + found @ R, hermitian(E))
    torch.testing.assert_close(found, torch.func.jvp(root, (A,), (E,))[1])
    torch.testing.assert_close(found, solve_lyapunov(R, hermitian(E)))


def test_the_lower_triangle_is_read_and_a_matrix_that_is_not_finite_stays_alone():
    A, E = definite((0.5, 1.2, 3.0), F64), random(3, 3, seed=1)
    spoilt = torch.stack([A, A])
    spoilt[0, 0, 2] = spoilt[1, 2, 0] = torch.nan
    found = mg.ops.linalg_matrix_sqrth_differential(spoilt, E.expand(2, 3, 3))
    torch.testing.assert_close(found[0], mg.ops.linalg_matrix_sqrth_differential(A, E))
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_formula_to_third_order(dtype):
    """Its own derivatives in six modes, also where eigenvalues repeat."""
    for values in SPECTRA[:2]:
        A, E = definite(values, dtype), random(3, 3, dtype=dtype, seed=1)
        check(lambda A, E: mg.ops.linalg_matrix_sqrth_differential(hermitian(A), E), [(A, E)], checks=())


@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_operators_by_themselves(dtype):
    """With only one of their arguments differentiated, too."""
    P, C = definite((1.0, 1.0, 2.0), dtype), random(3, 3, dtype=dtype, seed=1)

    def solution(P, C):
        P = hermitian(P)
        return mg.ops.hermitian_lyapunov(P, *torch.linalg.eigh(P.detach()), C)

    check(solution, [(P, C)])
    check(lambda P: solution(P, C), [(P,)])

    def of_eigenpairs(A):
        A = hermitian(A)
        L, V = torch.linalg.eigh(A.detach())
        return mg.ops.hermitian_root(A, L.sqrt(), V)

    check(of_eigenpairs, [(P,)])


def test_a_closed_form():
    """At c^2 I the derivative is that of the root of a number, in every order."""
    E = random(3, 3, seed=1)
    A = 4 * torch.eye(3, dtype=F64)
    torch.testing.assert_close(mg.ops.linalg_matrix_sqrth_differential(A, E), hermitian(E) / 4)
    D = hermitian(random(3, 3, seed=2))
    second = torch.func.jvp(lambda A: mg.ops.linalg_matrix_sqrth_differential(A, E), (A,), (D,))[1]
    torch.testing.assert_close(second, -(D @ hermitian(E) + hermitian(E) @ D) / 64)


def test_a_singular_matrix_has_no_finite_derivative():
    """Not zero: the root of a number has none either."""
    A = torch.diag(torch.tensor([0.0, 0, 1], dtype=F64))
    found = mg.ops.linalg_matrix_sqrth_differential(A, torch.ones(3, 3, dtype=F64))
    assert not found[:2, :2].isfinite().any()


@needs_operator
@pytest.mark.parametrize("dtype", [F64, C128])
def test_the_rule_where_eigenvalues_repeat(dtype):
    points = [(definite(values, dtype),) for values in SPECTRA]
    with mg.override("linalg.matrix_sqrth"):
        check(lambda A: torch.linalg.matrix_sqrth(hermitian(A)), points, checks=("agreement", "duality"))


@needs_operator
def test_the_third_order_of_the_rule():
    """Against that of `mg.linalg.sqrtm`."""
    G = random(3, 3, seed=5)

    def third(f):
        return torch.func.jacfwd(torch.func.jacrev(torch.func.grad(lambda A: (f(hermitian(A)) * G).sum())))

    for values in SPECTRA:
        A = definite(values, F64)
        expected = third(root)(A)
        with mg.override("linalg.matrix_sqrth"):
            torch.testing.assert_close(third(torch.linalg.matrix_sqrth)(A), expected, rtol=1e-8, atol=1e-8)


@needs_operator
def test_a_matrix_of_which_the_lower_triangle_is_read():
    """The gradient is that of the Hermitian matrix, as PyTorch's is."""
    A = (definite((0.5, 1.2, 3.0), F64) + random(3, 3, seed=3).triu(1)).requires_grad_()
    G = random(3, 3, seed=4)

    def gradient():
        return torch.autograd.grad((torch.linalg.matrix_sqrth(A) * G).sum(), A)[0]

    expected = gradient()
    with mg.override("linalg.matrix_sqrth"):
        torch.testing.assert_close(gradient(), expected)
