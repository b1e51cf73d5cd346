"""`enable`: forward mode by a decomposition, a rule, or the backward transposed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp

import torch_manualgrad as mg
from torch_manualgrad.core.rule import operator
from torch_manualgrad.forward_ad.decomposition.coverage import FIRST_ORDER_ONLY, has_formula
from torch_manualgrad.testing.database import derivatives_yaml

enable = mg.forward_ad.enable
LIBRARY = torch.library.Library("decomposition_tests", "FRAGMENT")
ALL = ("fwd", "fwd-rev", "rev-fwd", "fwd-fwd")
# operators whose backward PyTorch differentiates rightly: how far
TRANSPOSED = {
    "aten::ormqr": ALL,
    "aten::native_dropout_backward": ALL,
    "aten::conv_tbc": ALL,
    "aten::slow_conv_dilated2d": ALL,
    "aten::huber_loss_backward": ALL,
    "aten::_softmax_backward_data": ALL,
    "aten::grid_sampler_2d": ("fwd", "rev-fwd"),  # beyond, its backward is asked for a formula
}


def samples(name, count=2):
    return list(mg.rules[name].samples(torch.float64, "cpu"))[:count]


def can_be_differentiated(name):
    """Whether PyTorch has a derivative of an operator."""
    entry = next((e for e in derivatives_yaml.entries() if e.name == name), None)
    return entry is not None and not any("not_implemented" in f for f in entry.formulas)


SAMPLES_A_GRID = can_be_differentiated("aten::grid_sampler_2d_backward")  # not in torch 2.10


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in TRANSPOSED
        if not has_formula(operator(name)) and (SAMPLES_A_GRID or name != "aten::grid_sampler_2d")
    ],
)
def test_by_transposition(name):
    with enable(name, by=("transposition",)) as scope:
        assert [one.how for one in scope.forward_modes] == ["transposition"]
        mg.testing.check(mg.rules[name].probe, samples(name), modes=TRANSPOSED[name], checks=("duality",))


@pytest.mark.skipif(not SAMPLES_A_GRID, reason="the backward of grid_sampler_2d has no derivative in this torch")
def test_both_operators_together_go_further():
    with enable("aten::grid_sampler_2d", "aten::grid_sampler_2d_backward", by=("transposition",)):
        mg.testing.check(mg.rules["aten::grid_sampler_2d"].probe, samples("aten::grid_sampler_2d", 1), checks=())


NO_SECOND = {  # operators, and their backward, which has no derivative; that of cdist has one as of torch 2.15
    "aten::_cdist_forward": "aten::_cdist_backward",
    "aten::grid_sampler_2d": "aten::grid_sampler_2d_backward",
    "aten::multi_margin_loss": "aten::multi_margin_loss_backward",
    "aten::_masked_softmax": "aten::_masked_softmax_backward",
}


@pytest.mark.parametrize("name", [name for name, backward in NO_SECOND.items() if not can_be_differentiated(backward)])
def test_a_backward_without_a_derivative_raises(name):
    call = samples(name, 1)[0]
    x, *rest = call.args
    with enable(name, by=("transposition",)), pytest.raises(RuntimeError, match="is not differentiable"):
        jvp(lambda x: mg.rules[name].aten(x, *rest, **call.kwargs), (x,), (x,))


def test_a_gradient_without_a_history_raises():
    @torch.library.custom_op("decomposition_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    opaque.register_autograd(lambda ctx, g: (2 * g).detach())
    x = torch.ones(3)
    with enable(opaque), pytest.raises(RuntimeError, match="does not depend differentiably"):
        jvp(opaque, (x,), (x,))


@pytest.mark.parametrize("name", ["aten::_cdist_forward", "aten::index_reduce", "aten::_embedding_bag", "aten::igamma"])
def test_by_rule(name):
    with enable() as scope:
        assert next(one.how for one in scope.forward_modes if one.name == name) == "rule"
        mg.testing.check(mg.rules[name].probe, samples(name), modes=("fwd", "fwd-rev"), checks=())


def test_in_place_too():
    x, source, index = torch.rand(3, 2).double(), torch.rand(4, 2).double(), torch.tensor([0, 1, 1, 2])

    def f(x):
        return x.clone().index_reduce_(0, index, source, "mean")

    with pytest.raises(NotImplementedError):
        jvp(f, (x,), (x,))
    with enable():
        torch.testing.assert_close(jvp(f, (x,), (x,))[1], jacrev(f)(x).flatten(2) @ x.flatten())


def test_a_hessian_that_pytorch_refuses():
    x = torch.randn(4, 3, dtype=torch.float64)

    def loss(x):
        return torch.cdist(x, x.flip(0) + 1).square().sum() + torch.cdist(x, x.cos() + 2).sum()

    with pytest.raises(NotImplementedError):
        jacfwd(loss)(x)
    with mg.override("cdist"):
        expected = hessian(loss)(x)
    handle = enable()
    torch.testing.assert_close(hessian(loss)(x), expected)
    handle.remove()
    with pytest.raises(NotImplementedError):
        jacfwd(loss)(x)


def test_operators_with_a_formula_are_left_alone():
    with enable("aten::sin", "aten::mm") as scope:
        assert not scope.forward_modes
    with enable() as scope:
        assert not {"aten::sin", "aten::sum", "aten::trace"} & {one.name for one in scope.forward_modes}


@pytest.mark.parametrize("name", sorted(FIRST_ORDER_ONLY))
def test_reverse_mode_over_formulas_that_end_at_the_first_order(name):
    """On a sample of which PyTorch's own raises."""
    quiet = {"modes": ("rev-fwd",), "checks": (), "raise_on_failure": False}
    raising = (
        s
        for s in samples(name, 12)
        if mg.testing.check(mg.rules[name].probe, [s], **quiet).outcome("rev-fwd") == "raises"
    )
    sample = next(raising)
    with enable() as scope:
        assert next(one.how for one in scope.forward_modes if one.name == name) == "rule"
        mg.testing.check(mg.rules[name].probe, [sample], modes=("fwd", "rev-fwd"), checks=())


FUNCTIONS = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), attn_mask=x[0] @ x[0].mT),
    "ctc_loss": lambda x: F.ctc_loss(x.log_softmax(-1), *(torch.tensor(v) for v in ([[1, 2], [2, 1]], [3, 3], [2, 1]))),
    "cross_entropy": lambda x: F.cross_entropy(x.flatten(1), torch.tensor([0, 4, 2])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reverse_mode_over_dual_numbers(name):
    x, v = torch.randn(2, 3, 2, 4, dtype=torch.float64)[:, :, :, :3].contiguous().unbind()
    x = x.requires_grad_()

    def gradient():
        with torch.autograd.forward_ad.dual_level():
            y = FUNCTIONS[name](torch.autograd.forward_ad.make_dual(x, v))
            tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
        return torch.autograd.grad(tangent.sin().sum(), x)[0]

    with mg.override("*"):
        expected = gradient()
    with enable():
        torch.testing.assert_close(gradient(), expected)


def test_no_history_is_left_behind():
    """A tangent requires grad only where an input does."""
    x = torch.randn(3, 2, 2, dtype=torch.float64)
    weight, bias = torch.randn(2, 2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    with enable("aten::conv_tbc", by=("transposition",)), torch.autograd.forward_ad.dual_level():
        for tracked in (False, True):
            dual = torch.autograd.forward_ad.make_dual(x, x)
            result = torch.conv_tbc(dual, weight.requires_grad_(tracked), bias)
            assert [r.requires_grad for r in torch.autograd.forward_ad.unpack_dual(result)] == [tracked] * 2


def test_a_training_step_with_a_penalty_on_the_tangent():
    """Reverse over forward through a module, gradients into its parameters."""
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def penalty(parameters):
        return (
            jvp(lambda x: torch.cdist(torch.func.functional_call(layer, parameters, (x,)), x[:, :2]), (x,), (x,))[1]
            .square()
            .sum()
        )

    parameters = {k: v.detach() for k, v in layer.named_parameters()}
    with mg.override("*"):
        expected = grad(penalty)(parameters)
    with enable(), mg.override("native_layer_norm"):  # whose formula PyTorch has, and gets wrong here
        torch.testing.assert_close(grad(penalty)(parameters), expected)


def test_lists_of_tensors():
    """With an optional list that is absent, and one that is there."""
    LIBRARY.define("combined(Tensor[] xs, Tensor?[] weights, Tensor? bias=None) -> (Tensor, Tensor[])")
    op = torch.ops.decomposition_tests.combined.default

    def combined(xs, weights, bias=None):
        scaled = [x if w is None else x * w for x, w in zip(xs, weights)]
        total = torch.stack(scaled).sin().sum(0)
        return (total if bias is None else total + bias), [x.cos() for x in xs]

    class Recorded(mg.SingleLevelFunction):
        @staticmethod
        def forward(ctx, has_bias, *flat):
            ctx.save_for_backward(*flat)
            bias = flat[-1] if has_bias else None
            total, rest = combined(flat[:2], [flat[2], None], bias)
            return (total, *rest)

        @staticmethod
        def backward(ctx, of_total, *of_rest):
            a, b, w, *bias = ctx.saved_tensors
            of_a, of_b = of_total * (a * w).cos() * w, of_total * b.cos()
            of_a, of_b = of_a - of_rest[0] * a.sin(), of_b - of_rest[1] * b.sin()
            return (None, of_a, of_b, of_total * (a * w).cos() * a, *[of_total for _ in bias])

    def kernel(xs, weights, bias=None):
        total, *rest = Recorded.apply(bias is not None, *xs, weights[0], *(() if bias is None else (bias,)))
        return total, rest

    LIBRARY.impl("combined", combined, "CompositeExplicitAutograd")
    LIBRARY.impl("combined", kernel, "Autograd")
    x, y, w, bias = torch.randn(4, 3, dtype=torch.float64)

    def through(f):
        def loss(x, w, bias):
            total, rest = f([x, y], [w, None], bias)
            return (total * rest[0] + rest[1]).sum() + f([y, x], [w, None])[0].prod()

        return loss

    with enable(op) as scope:
        assert [one.how for one in scope.forward_modes] == ["transposition"]
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(v, v.sin()) for v in (x, w, bias)]
            found = torch.autograd.forward_ad.unpack_dual(through(op)(*duals)).tangent
    expected = jvp(through(combined), (x, w, bias), (x.sin(), w.sin(), bias.sin()))[1]
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_the_command_prints_how_many_gain_forward_mode():
    tool = Path(__file__).resolve().parents[2] / "tools" / "forward_mode.py"
    if not tool.exists():
        pytest.skip("not a source tree")
    run = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert " gain it" in run.stdout and "cdist" in run.stdout
