"""Every rule, in every mode, on its own samples and on those of PyTorch's operator database.

A new rule is covered by being registered: nothing here names one.
"""

import pytest
import torch
from helpers.layouts import compare_layouts
from helpers.rules import DTYPES, RULES, TURNS, dtype_of, samples
from helpers.tensors import is_dense_differentiable
from helpers.thinning import every, in_turn, label
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached as torch_reached
from torch_manualgrad.testing import CHECKS, Report, check, op_samples
from torch_manualgrad.testing.database.opinfo import reached

# What PyTorch's operators, not their derivatives, fail at: operator -> check.
FAIL_ON_STOCK = {
    # their results share memory with the input, but not its version counter: that is what "unsafe" says
    "aten::unsafe_split.Tensor": "residuals",
    "aten::_unsafe_view": "residuals",
    "aten::_pdist_forward": "vmap",  # its batching rule passes on a tensor that is not contiguous
}
if not torch_reached("2.15"):
    # batched in two dimensions that differ, they have a result of another shape, or fail an internal assertion
    FAIL_ON_STOCK |= {"aten::grid_sampler_2d": "vmap", "aten::grid_sampler_3d": "vmap"}
if not torch_reached("2.13"):
    # fake tensors refuse them where shapes are symbols
    FAIL_ON_STOCK |= {"aten::_convolution": "opcheck", "aten::_standard_gamma": "opcheck"}
if torch_reached("2.15"):
    # under a dispatch mode the kernel reads a conjugate view as the tensor below: another H of a complex matrix
    FAIL_ON_STOCK["aten::linalg_polar"] = "opcheck"
if not torch_reached("2.12"):
    FAIL_ON_STOCK["aten::_fft_r2c"] = "fake"  # of other strides


@TURNS
@pytest.mark.parametrize("rule", RULES, ids=label)
def test_all_modes_on_the_rules_own_samples(rule, turn):
    found = samples(rule, dtype_of(rule, turn))
    checks = [c for c in CHECKS if c not in (FAIL_ON_STOCK.get(rule.name), "opcheck")]
    with mg.override(rule):
        check(rule.probe, found, name=rule.name, gaps=rule.gaps, checks=checks)


@TURNS
@pytest.mark.parametrize("rule", every(6, [r for r in RULES if FAIL_ON_STOCK.get(r.name) != "opcheck"], 3), ids=label)
def test_pytorchs_opcheck_on_the_rules_own_samples(rule, turn):
    with mg.override(rule):
        check(rule.probe, samples(rule, dtype_of(rule, turn)), name=rule.name, modes=(), checks=("opcheck",))


@pytest.mark.parametrize("name, at", FAIL_ON_STOCK.items())
def test_samples_that_fail_also_fail_on_stock(name, at):
    """In one of the dtypes at least."""
    rule = mg.rules[name]
    outcomes = set()
    for dtype in DTYPES:
        if found := samples(rule, dtype):
            report = check(rule.probe, found, modes=(), checks=(at,), raise_on_failure=False, diagnose=False)
            outcomes.add(report.outcome(at))
    assert outcomes & {"wrong", "raises"}


def leaves(args):
    """The arguments, all that are differentiable as leaves of a graph."""
    return tree_map_only(
        torch.Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point() or x.is_complex()), args
    )


@TURNS
@pytest.mark.parametrize("rule", [r for r in RULES if r.defer_to_stock], ids=label)
def test_all_modes_where_a_rule_leaves_calls_to_pytorch(rule, turn):
    found = samples(rule, dtype_of(rule, 1 - turn))
    with mg.override():
        checks = [c for c in (CHECKS if turn else OF_DERIVATIVES) if c != FAIL_ON_STOCK.get(rule.name)]
        check(rule.probe, found, name=rule.name, gaps=rule.gaps, checks=checks)
        left = [s for s in found if rule.defer_to_stock(*rule.signature.bind(leaves(s.args), s.kwargs))]
        outputs = [rule.probe(*leaves(s.args), **s.kwargs) for s in left]
    stock = [rule.probe(*leaves(s.args), **s.kwargs) for s in left]
    nodes = [[type((o if isinstance(o, torch.Tensor) else o[0]).grad_fn) for o in os] for os in (outputs, stock)]
    assert nodes[0] == nodes[1], "samples are small: what is left is what is checked"


def dense(x):
    return x if x is None or x.layout is torch.strided else x.to_dense()


def identical(ours, stock):
    ours, stock = ([dense(x) for x in tree_leaves(x)] for x in (ours, stock))
    pairs = zip(ours, stock, strict=True)
    return all(
        a is b is None
        or a.dtype == b.dtype
        # a workspace of bytes, of which not all were written
        and (a.dtype is torch.uint8 and a.shape == b.shape or ((a == b) | (a != a) & (b != b)).all())
        for a, b in pairs
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_forward_values_are_stocks_to_the_bit(rule):
    for sample in samples(rule, torch.float64):
        # some of LAPACK's drivers are not reproducible: the last bit depends on where the memory lies
        stock = [rule.aten(*sample.args, **sample.kwargs) for _ in range(30)]
        with mg.override(rule):
            args = [
                a.detach().requires_grad_() if is_dense_differentiable(a) and not a.is_complex() else a
                for a in sample.args
            ]
            ours = rule.aten(*args, **sample.kwargs)
        assert any(identical(ours, one) for one in stock), sample


# aten::equal, of the weights, has no batching rule; running statistics that are written to must be batched, too
STOCK_CANNOT_VMAP = ("cov", "native_batch_norm", "nn.functional.batch_norm", "nn.functional.instance_norm")
# Not those of the operator itself, which is PyTorch's: its fake kernel, its registrations.
OF_DERIVATIVES = tuple(c for c in CHECKS if c not in ("kernel", "fake", "opcheck"))
AT_ZERO = "linalg_norm_subgradients_at_zero"  # a variant of linalg.norm whose samples are all kinks


@pytest.mark.parametrize("name, dtype, turn, which", in_turn(reached(), DTYPES, [0, 1], [("*",), ()]), ids=label)
def test_all_modes_on_the_operator_database(name, dtype, turn, which):
    """Of half of an operator's samples; real ones for an operator that has no complex ones."""
    report, cases = Report(), [*op_samples(name, dtype, limit=6)] or [*op_samples(name, torch.float64, limit=6)]
    with mg.override(*which):
        for case in cases[turn::2] if len(cases) > 1 else cases:
            if case.name != AT_ZERO:
                report += check(
                    case.fn,
                    [case.sample],
                    name=case.name,
                    checks=OF_DERIVATIVES if which and name not in STOCK_CANNOT_VMAP else OF_DERIVATIVES[:3],
                    raise_on_failure=False,
                )
    assert not report.failures, str(report)
    assert report.results or dtype.is_complex


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_kinks_every_mode_is_finite(dtype):
    """Where finite differences are no reference: the database's norms of zero vectors."""
    seen = 0
    with mg.override("*"):
        for case in op_samples("linalg.norm", dtype):
            x = case.sample.args[0].detach()
            if case.name != AT_ZERO or x.dim() != 1:
                continue
            seen += 1

            def f(x, case=case):
                return case.fn(x, *case.sample.args[1:], **case.sample.kwargs)[0].sum()

            def gradient(x, f=f):
                return torch.func.grad(f)(x).abs().sum()

            def tangent(x, f=f):
                return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]

            for mode in (f, gradient, tangent):
                assert torch.func.grad(mode)(x).isfinite().all(), case.sample
                assert torch.func.jvp(mode, (x,), (torch.ones_like(x),))[1].isfinite().all(), case.sample
    assert seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_layouts_are_known_without_data(rule, dtype):
    for sample in samples(rule, dtype):
        compare_layouts(rule, sample)


def test_every_rule_has_a_source_and_samples():
    for rule in RULES:
        assert rule.source and rule.samples is not None, rule.name
        for mode, reason in rule.gaps.items():
            assert reason, (rule.name, mode)


def test_every_formula_has_a_source():
    for formula in mg.ops.values():
        text = formula.__doc__ or ""
        assert "References:" in text or "Source:" in text, formula.name


@pytest.mark.parametrize("rule", mg.rules.values(), ids=lambda r: r.name)
def test_all_cotangents_undefined(rule):
    sample = next(iter(rule.samples(torch.float64, "cpu")))
    given = {name for names in rule.vjp for name in names}

    def leaf(x, name):
        return x.detach().requires_grad_(name in given and x.is_floating_point() and x.layout is torch.strided)

    values = [
        tree_map_only(torch.Tensor, lambda x, name=name: leaf(x, name), value)
        for name, value in zip(rule.signature.names, rule.signature.bind(sample.args, sample.kwargs))
    ]
    inputs = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    args, kwargs = rule.signature.split(values)
    with mg.override(rule):
        outputs = [
            o for o in tree_leaves(rule.aten(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
    outputs = [o for o in outputs if o.layout is torch.strided]
    undefined = [torch._C._functions.UndefinedGrad()(o).abs().sum() for o in outputs]
    if undefined:
        found = torch.autograd.grad(sum(undefined), inputs, allow_unused=True)
        assert all(g is None or not g.count_nonzero() for g in found)
