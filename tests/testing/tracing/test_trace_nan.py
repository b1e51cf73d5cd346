"""`trace_nan` names the operation that makes a nan or an infinity: its operator, mode, place and line."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing import trace_nan

ZERO, ONE = torch.zeros(3), torch.ones(3)
POINT = torch.tensor([0.0, 1.0, 4.0])


def log_of_zero_times_zero(p: Tensor) -> Tensor:
    return (p * p.log()).sum()


def unit_vector(x: Tensor) -> Tensor:
    return x / x.norm()


def masked_root(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.sqrt(), x).sum()


def masked_softmax(x: Tensor) -> Tensor:
    scores = x.masked_fill(torch.ones_like(x, dtype=torch.bool), -torch.inf)
    return torch.softmax(scores, 0)


def overflow(x: Tensor) -> Tensor:
    big = x.exp()
    return big / big.sum()


def standard_deviation(x: Tensor) -> Tensor:
    return x.std()


def one_sample(x: Tensor) -> Tensor:
    return x[:1].var()


def remainder_of_zero(x: Tensor) -> Tensor:
    return torch.remainder(x, x)


def angles(x: Tensor) -> Tensor:
    return x.acos().sum()


def polar_angle(x: Tensor) -> Tensor:
    return torch.atan2(x, x).sum()


def root_by_power(x: Tensor) -> Tensor:
    return x.pow(0.5).sum()


def repeated_eigenvalues(A: Tensor) -> Tensor:
    return torch.linalg.eigh(A)[1].square().sum()


def inverse_of_singular(A: Tensor) -> Tensor:
    return torch.linalg.lu_factor_ex(A)[0].diagonal().reciprocal()


def cross_entropy_by_hand(x: Tensor) -> Tensor:
    return -torch.log(torch.softmax(x, 0))[0]


def half_precision(x: Tensor) -> Tensor:
    return (x.half() * 1e4).sum()


def dead_branch(x: Tensor) -> Tensor:
    unused = x / 0 - x / 0
    return torch.where(torch.isnan(unused), x, unused).sum()


def variance_of_group(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.var().sqrt()


def cosine_by_hand(x: Tensor) -> Tensor:
    return (x @ x) / (x.norm() * x.norm())


def harmonic_mean(x: Tensor) -> Tensor:
    return 1 / (1 / x).mean()


def remainder(x: Tensor) -> Tensor:
    return torch.fmod(torch.ones_like(x), x)


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.div_(x)
    return y.sum()


# what, inputs, the first mode that is not finite, the operator, the code of the line, where an infinity came from
CASES = [
    (log_of_zero_times_zero, ZERO, "forward", "mul.Tensor", "(p * p.log())", "log"),
    (unit_vector, ZERO, "forward", "div.Tensor", "x / x.norm()", None),
    (masked_root, POINT, "rev", "div.Tensor", "x.sqrt()", None),
    (masked_softmax, ZERO, "forward", "_softmax", "torch.softmax(scores", "masked_fill.Scalar"),
    (overflow, 200 * ONE, "forward", "div.Tensor", "big / big.sum()", "exp"),
    (standard_deviation, ONE, "rev-fwd", "div.Tensor", "x.std()", None),
    (one_sample, ONE, "forward", "var.correction", "x[:1].var()", None),
    (remainder_of_zero, ZERO, "forward", "remainder.Tensor", "torch.remainder", None),
    (angles, ONE, "rev", "rsqrt", "x.acos()", None),
    (polar_angle, ZERO, "fwd", "div.Tensor", "atan2", None),
    (root_by_power, ZERO, "rev", "pow.Tensor_Scalar", "x.pow(0.5)", None),
    (repeated_eigenvalues, torch.eye(3), "rev", "div_.Tensor", "torch.linalg.eigh", None),
    (inverse_of_singular, torch.ones(2, 2), "forward", "reciprocal", "reciprocal()", None),
    (cross_entropy_by_hand, torch.tensor([0.0, 200.0]), "forward", "log", "torch.log(torch.softmax", None),
    (half_precision, 10 * ONE, "forward", "mul.Tensor", "x.half() * 1e4", None),
    (variance_of_group, ONE, "forward", "div.Tensor", "x.var().sqrt()", None),
    (cosine_by_hand, ZERO, "forward", "div.Tensor", "(x @ x)", None),
    (harmonic_mean, ZERO, "rev", "mul.Tensor", "1 / (1 / x).mean()", "reciprocal"),
    (remainder, ZERO, "forward", "fmod.Tensor", "torch.fmod", None),
    (in_place, ZERO, "forward", "div_.Tensor", "y.div_(x)", None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_the_origin_is_named(case) -> None:
    f, x, mode, operator, line, cause = case
    report = trace_nan(f, x)
    assert next(iter(report.origins)) == mode
    assert report.first.operator == f"aten::{operator}" and line in report.first.line
    assert (report.first.because and report.first.because.operator) == (cause and f"aten::{cause}")


def test_the_rev_rev_of_an_angle_is_traced_to_the_line_of_its_forward() -> None:
    origin = trace_nan(polar_angle, ZERO, modes=["rev-rev"]).first
    assert origin.node == "ReciprocalBackward0" and "torch.atan2(x, x)" in origin.line
    assert origin.because.node == "Atan2Backward0" and origin.because.operator == "aten::reciprocal"


def test_finite_functions_pass_in_every_mode() -> None:
    for f in (torch.sin, lambda x: nnf.layer_norm(x, [3])):
        report = trace_nan(f, ONE)
        assert report.ok and report.first is None and "every number is finite" in str(report)


def test_a_nan_that_does_not_reach_the_result_is_not_a_fault() -> None:
    assert trace_nan(dead_branch, ONE, modes=["forward"]).ok
    assert trace_nan(dead_branch, ONE, modes=["rev"]).first.operands == ("-0", "0")  # its gradient is 0 / 0


def test_a_rule_that_mends_it_leaves_nothing_to_find() -> None:
    norm = lambda x: x.norm()  # noqa: E731
    assert set(trace_nan(norm, ZERO).origins) == {"rev-rev", "rev-fwd"}
    with mg.override():
        assert trace_nan(norm, ZERO).ok


def test_a_formula_of_ours_is_named() -> None:
    with mg.override("sqrt"):
        origin = trace_nan(masked_root, POINT, modes=["rev"]).first
    assert origin.node.startswith("SqrtBackward") and "x.sqrt()" in origin.line
    huge = torch.tensor([1e200], dtype=torch.float64)
    with mg.override("logsumexp"):
        origin = trace_nan(lambda x: torch.logsumexp(x * x, 0), huge, modes=["rev"]).first
    assert origin.formula == "logsumexp_backward"


def test_infinities_count_unless_they_are_not_asked_for() -> None:
    assert trace_nan(torch.exp, 1000 * ONE).first.value == "inf"
    assert trace_nan(torch.exp, 1000 * ONE, infinities=False).ok


def test_a_nan_in_the_input_is_its_own_origin() -> None:
    report = trace_nan(lambda x: (x * 2).sin(), torch.tensor([0.0, float("nan")]))
    assert report.first.operator == "aten::mul.Tensor" and report.first.index == (1,)


def test_modules_random_numbers_and_what_has_no_tangent() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    before = torch.get_rng_state()
    assert trace_nan(net, ONE).ok and torch.equal(before, torch.get_rng_state())
    torch.nn.init.constant_(net[2].weight, 1e38)
    assert trace_nan(net, 1e3 * ONE, modes=["forward"]).first.operator == "aten::addmm"
    report = trace_nan(lambda x: torch.cdist(x, x).sum(), torch.eye(2))
    assert "fwd" in report.unreached and "not looked at" in str(report)


def test_errors_are_those_of_the_function_or_name_the_mode() -> None:
    with pytest.raises(ValueError, match="unknown mode 'sideways'; known: forward, rev"):
        trace_nan(torch.sin, ONE, modes=["sideways"])
    with pytest.raises(ZeroDivisionError):
        trace_nan(lambda x: x * (1 / 0), ONE)


def test_the_report_as_data() -> None:
    data = json.loads(json.dumps(trace_nan(masked_softmax, ZERO).as_dict()))
    assert data["origins"]["forward"]["because"]["operator"] == "aten::masked_fill.Scalar"
