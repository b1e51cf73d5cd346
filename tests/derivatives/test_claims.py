"""What rules claim over PyTorch's own derivatives, proven on the torch that is installed.

"values": PyTorch is wrong, or not finite, where a right value exists; "missing": it raises. A claim that PyTorch has
mended gets the version: ``improves={"values": "2.15"}``. Speed is for the benchmarks to show.
"""

from __future__ import annotations

import math

import pytest
import torch
from ops_for_tests import random
from torch.func import grad, jacrev, jvp

import torch_manualgrad as mg
from torch_manualgrad.testing import check

F64 = torch.float64
aten = torch.ops.aten


def own(mode, dtype=F64):
    """The rule's own samples in one mode: ok, wrong or raises."""

    def outcome(rule):
        report = check(rule.probe, rule.samples(dtype, "cpu"), modes=(mode,), checks=(), raise_on_failure=False)
        return report.outcome(mode)

    return outcome


def point(compute, expected):
    """A value at one place."""

    def outcome(rule):
        try:
            found = compute()
        except (RuntimeError, NotImplementedError):
            return "raises"
        return "ok" if torch.allclose(found, torch.as_tensor(expected, dtype=F64), rtol=1e-6) else "wrong"

    return outcome


def second_at_zero(norm):
    """A norm at zero, differentiated twice, is 0 by convention; nan spoils every sum that it is in."""
    return [point(lambda: grad(lambda x: grad(norm)(x).sum())(torch.zeros(3, dtype=F64)), [0.0] * 3)]


def tangent(f, *shape):
    """That there is a forward derivative."""
    x, t = random(*shape), random(*shape, seed=1)
    step = 1e-6
    return [point(lambda: jvp(f, (x,), (t,))[1], (f(x + step * t) - f(x - step * t)) / (2 * step))]


SINGULAR = torch.tensor([[4.0, 2.0], [2.0, 1.0]], dtype=F64)
EYE = torch.eye(2, dtype=F64)


def distances(x, y):
    return (x[:, None] - y).square().sum(-1).sqrt()


def rebuilt_by_svd(A):
    U, S, Vh = torch.linalg.svd(A)
    return ((U * S) @ Vh)[0].sum()


def rebuilt_by_eigh(A):
    L, V = torch.linalg.eigh(A)
    return ((V * L) @ V.mH).trace()


def rebuilt_by_eig(A):
    L, V = torch.linalg.eig(A)
    return ((V * L) @ torch.linalg.inv(V)).real.trace()


def dropped_by_rcond():
    """Least squares where the smallest singular value counts as zero: the gradient is that at rank 1."""
    A = torch.tensor([[2.0, 0.0], [0.0, 1e-12], [0.0, 0.0]], dtype=F64)
    B = torch.tensor([[1.0], [1.0], [1.0]], dtype=F64)
    return grad(lambda A: torch.linalg.lstsq(A, B, rcond=1e-3, driver="gelsd").solution[1, 0])(A)[:2, 1]


def with_large_cotangent():
    """The error, in units of the precision, where it is above 10."""
    A, G = random(4, 4), 1e8 * random(4, 4, seed=1)
    (found,) = torch.autograd.grad(torch.linalg.matrix_exp(A := A.float().requires_grad_()), A, G.float())
    exact = torch.linalg.matrix_exp(torch.cat([torch.cat([A.mT, G.float()], 1), torch.cat([0 * A, A.mT], 1)]).double())
    error = (found.double() - exact[:4, 4:]).norm() / exact[:4, 4:].norm() / torch.finfo(torch.float32).eps
    return error.clamp(min=10)


def zero_column(A):
    return torch.linalg.qr(A).R[0].sum()


A_ZERO_COLUMN = torch.tensor([[3.0, 0.0], [4.0, 0.0]], dtype=F64)
FULL = torch.tensor([[1.0, 1.0], [0.0, 1.0]], dtype=torch.float64)  # of which the lower triangle is read


def solved_by_a_full_factor(L):
    """At L = I the derivative along L L^T is -(w B^T + B w^T); PyTorch's reads the triangle that the solution does not."""
    w, B = FULL.new_tensor([[1.0], [2.0]]), FULL.new_tensor([[3.0], [4.0]])
    return (w * torch.cholesky_solve(B, L)).sum()


def derivatives(f, x, *expected):
    """The first derivatives of a function of one number at x, as far as they are given."""
    found = []
    for value in expected:
        f = grad(f)
        found.append(point(lambda f=f: f(scalar(x)), value))
    return found


def scalar(x):
    return torch.tensor(x, dtype=F64)


MASKED = torch.tensor([-math.inf, -math.inf], dtype=F64)
HALF = 1 / math.sqrt(math.pi)
POINTWISE = {
    "aten::hypot": {"values": derivatives(lambda x: torch.hypot(x, 2 * x), 0.0, 0.0, 0.0)},
    "aten::atan2": {
        "values": [
            *derivatives(lambda x: torch.atan2(x, scalar(1e-200)), 0.0, 1e200),
            point(lambda: jvp(lambda x: torch.atan2(x, x), (scalar(0.0),), (scalar(1.0),))[1], 0.0),
        ]
    },
    "aten::expm1": {"values": derivatives(lambda x: math.exp(50) * torch.expm1(x), -50.0, 1.0, 1.0)},
    "aten::pow.Tensor_Tensor": {"values": derivatives(lambda y: torch.pow(scalar(0.0), y), 2.0, 0.0, 0.0)},
    "aten::pow.Scalar": {"values": derivatives(lambda y: torch.pow(0.0, y), 2.0, 0.0, 0.0)},
    "aten::xlogy.Tensor": {"values": derivatives(lambda y: torch.xlogy(scalar(0.0), y), 0.0, 0.0, 0.0)},
    "aten::xlogy.Scalar_Self": {"values": derivatives(lambda y: torch.xlogy(0.0, y), 0.0, 0.0, 0.0)},
    "aten::special_xlog1py": {"values": derivatives(lambda y: aten.special_xlog1py(scalar(0.0), y), -1.0, 0.0, 0.0)},
    "aten::special_xlog1py.self_scalar": {
        "values": derivatives(lambda y: aten.special_xlog1py(0.0, y), -1.0, 0.0, 0.0)
    },
    "aten::logaddexp": {"values": derivatives(lambda x: torch.logaddexp(x, scalar(-math.inf)), -math.inf, 0.5, 0.0)},
    "aten::logaddexp2": {"values": derivatives(lambda x: torch.logaddexp2(x, scalar(math.inf)), math.inf, 0.5)},
    "aten::logit": {"values": derivatives(lambda x: torch.logit(x, 0.1), 1.0, 0.0, 0.0)},
    "aten::special_erfcx": {"values": derivatives(lambda x: 1e15 * torch.special.erfcx(x), 1e5, -1e5 * HALF, 2 * HALF)},
    "aten::special_log_ndtr": {"values": derivatives(torch.special.log_ndtr, -1e6, 1e6, -1.0)},
    "aten::igamma": {
        "values": derivatives(lambda x: aten.igamma(scalar(1.0), x), 0.0, 1.0),
        "missing": [own("fwd")],
    },
    "aten::igammac": {
        "values": derivatives(lambda x: aten.igammac(scalar(1.0), x), 0.0, -1.0),
        "missing": [own("fwd")],
    },
    "aten::special_zeta": {"missing": [own("fwd")]},
    "aten::special_zeta.self_scalar": {"missing": [own("fwd")]},
    "aten::copysign.Tensor": {"values": derivatives(lambda x: torch.copysign(x, -scalar(1.0)), math.inf, -1.0)},
    "aten::copysign.Scalar": {"values": derivatives(lambda x: torch.copysign(x, -1.0), math.inf, -1.0)},
    "aten::polar": {"values": derivatives(lambda r: torch.polar(r, scalar(1.0)).real, -2.0, math.cos(1))},
    "aten::mish": {"values": derivatives(torch.nn.functional.mish, 1000.0, 1.0, 0.0, 0.0)},
    "aten::gelu": {
        "values": derivatives(lambda x: torch.nn.functional.gelu(x, approximate="tanh"), 1000.0, 1.0, 0.0, 0.0)
    },
    "aten::hardsigmoid": {"missing": [own("rev-rev"), own("fwd-rev")]},
    "aten::glu": {"missing": [own("fwd-fwd")]},
    "aten::glu_backward": {"missing": [own("fwd-fwd")]},
    "aten::_safe_softmax": {
        "values": [
            point(
                lambda: grad(
                    lambda x: jvp(lambda x: aten._safe_softmax(x, 0), (x,), (torch.ones_like(x),))[1].sin().sum()
                )(MASKED),
                [0.0, 0.0],
            )
        ]
    },
    "aten::sinc": {"values": derivatives(torch.sinc, 0.0, 0.0, -(math.pi**2) / 3, 0.0, math.pi**4 / 5)},
    "aten::special_i1": {"values": derivatives(torch.special.i1, 0.0, 0.5, 0.0, 0.375)},
    "aten::special_i1e": {"values": derivatives(torch.special.i1e, 1e-10, 0.5, -1.0, 1.875)},
}
PROOFS = POINTWISE | {
    "aten::linalg_vector_norm": {"values": second_at_zero(torch.linalg.vector_norm)},
    "aten::norm.Scalar": {"values": second_at_zero(lambda x: aten.norm(x, 2.0))},
    "aten::norm.ScalarOpt_dim": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, [0]))},
    "aten::norm.ScalarOpt_dtype": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, dtype=F64))},
    "aten::norm.ScalarOpt_dim_dtype": {"values": second_at_zero(lambda x: aten.norm(x, 2.0, [0], False, dtype=F64))},
    "aten::dist": {"values": second_at_zero(lambda x: torch.dist(x, torch.zeros(3, dtype=F64)))},
    "aten::renorm": {"values": second_at_zero(lambda x: torch.renorm(x[None], 2, 0, 1.0).sum())},
    "aten::_cdist_forward": {
        "values": [point(lambda: jacrev(torch.cdist)(EYE, EYE + 1) - jacrev(distances)(EYE, EYE + 1), 0.0)],
        "missing": tangent(lambda x: torch.cdist(x, random(2, 2, seed=2), 3.0), 3, 2),
    },
    "aten::_pdist_forward": {
        "values": [
            point(lambda: grad(lambda x: torch.pdist(x, math.inf)[0])(torch.tensor([[0.0, 0.0], [3.0, 3.0]]).double()),
                  [[-0.5, -0.5], [0.5, 0.5]]),
            point(lambda: grad(lambda x: torch.pdist(x, 3.0)[0])(1e200 * EYE), [[2 ** (-2 / 3), -(2 ** (-2 / 3))],
                                                                        [-(2 ** (-2 / 3)), 2 ** (-2 / 3)]]),
        ],
        "missing": tangent(lambda x: torch.pdist(x, 3.0), 3, 2),
    },
    "aten::_euclidean_dist": {"missing": tangent(lambda x: aten._euclidean_dist(x, random(2, 2, seed=2)), 3, 2)},
    "aten::_linalg_solve_ex": {"values": [own("fwd-fwd")]},
    "aten::triangular_solve": {"values": [own("fwd-rev")]},
    "aten::cholesky": {"missing": [own("fwd")]},
    "aten::cholesky_inverse": {"values": [own("fwd-fwd")]},
    "aten::cholesky_solve": {"values": [point(lambda: grad(solved_by_a_full_factor)(FULL), [[-6.0, -10.0], [-10.0, -16.0]])]},
    "aten::_linalg_det": {
        "values": [own("fwd-fwd"), point(lambda: grad(torch.linalg.det)(SINGULAR), [[1.0, -2.0], [-2.0, 4.0]])]
    },
    "aten::_linalg_slogdet": {"values": [own("fwd-fwd")]},
    "aten::_linalg_eigh": {"values": [own("rev-fwd"), point(lambda: grad(rebuilt_by_eigh)(EYE), EYE)]},
    "aten::linalg_eig": {"values": [own("rev-fwd"), point(lambda: grad(rebuilt_by_eig)(EYE), EYE)]},
    "aten::linalg_householder_product": {"values": [own("fwd-fwd")]},
    "aten::ormqr": {"missing": [own("fwd")]},
    "aten::linalg_lstsq": {"values": [point(dropped_by_rcond, [0.25, 0.0])]},
    "aten::linalg_lu": {
        "values": [point(lambda: grad(lambda A: torch.linalg.lu(A)[2][0].sum())(SINGULAR), [[1.0, 1.0], [0.0, 0.0]])]
    },
    "aten::linalg_lu_factor_ex": {
        "values": [
            point(lambda: grad(lambda A: torch.linalg.lu_factor_ex(A)[0][0].sum())(SINGULAR), [[1.0, 1.0], [0.0, 0.0]])
        ]
    },
    "aten::linalg_lu_solve": {"missing": [own("fwd-rev", torch.complex128)]},
    "aten::_trilinear": {"missing": [own("rev", torch.complex128)]},
    "aten::_grouped_mm": {"missing": [own("fwd")]},
    "aten::linalg_matrix_exp": {"values": [point(with_large_cotangent, 10.0)]},
    "aten::linalg_qr": {
        "values": [point(lambda: grad(zero_column)(A_ZERO_COLUMN)[1, 1], -0.8)],
        "missing": tangent(lambda A: torch.linalg.qr(A, "r").R, 3, 2),
    },
    "aten::_linalg_svd": {"values": [point(lambda: grad(rebuilt_by_svd)(EYE), [[1.0, 1.0], [0.0, 0.0]])]},
    "aten::native_layer_norm": {"values": [own("fwd-fwd")]},
    "aten::native_layer_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_batch_norm": {"values": [own("fwd-fwd")]},
    "aten::_native_batch_norm_legit.no_stats": {"values": [own("fwd-fwd")]},
    "aten::native_batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::batch_norm_backward": {"values": [own("rev-rev")]},
    "aten::native_group_norm_backward": {"missing": [own("rev")]},
}  # fmt: skip
CLAIMS = [(rule, claim) for rule in mg.rules.values() for claim in rule.claims if claim != "speed"]
OUTCOMES = {"values": "wrong", "missing": "raises"}


@pytest.mark.parametrize("rule, claim", CLAIMS, ids=lambda x: getattr(x, "name", x))
def test_a_claim_holds_on_the_torches_that_it_is_for(rule, claim):
    proofs = PROOFS[rule.name][claim]
    holds = OUTCOMES[claim] in [proof(rule) for proof in proofs]
    here = f"{rule.name} {claim}, torch {torch.__version__}"
    if claim in rule.improves:
        assert holds, f"claim outdated here: {here}"
    else:
        assert not holds, f"claim holds here, though it is said to end with {rule.claims[claim]}: {here}"
    with mg.override(rule):
        assert {proof(rule) for proof in proofs} == {"ok"}
