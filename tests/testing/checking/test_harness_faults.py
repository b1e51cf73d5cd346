"""The checker is checked: the check meant for it catches a planted fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf
from helpers.planted import COMPLEX, DOUBLE, FIRST, columns, function
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.engine.derivative import Derivative
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.rule import rule
from torch_manualgrad.testing import ALL_CHECKS, MODES, check

FORWARDS = {
    "right": lambda run, values: run(*values),
    "a default dropped": lambda run, values: torch._C._nn.mse_loss(*values[:2], 0),
    "another last bit": lambda run, values: torch.nextafter(run(*values), random()),
    "another dtype": lambda run, values: run(*values).float(),
    "an error": lambda run, values: run(*values[:1]),
}


@pytest.mark.parametrize("fault", FORWARDS)
def test_a_forward_that_is_not_pytorchs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_below(self: Derivative, values: tuple) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return FORWARDS[fault](self.run, values)

    monkeypatch.setattr(Derivative, "run_below", run_below)
    planted = rule(
        "aten::mse_loss",
        vjp={"self": lambda grad, self, target: 2 * grad * (self - target) / self.numel()},
        register=False,
    )
    target = random(3, 5, seed=1)
    with mg.override(planted), compiled_calls.in_python():  # whose forward the fault is in
        report = check(
            lambda x: nnf.mse_loss(x, target), [(random(3, 5),)], modes=(), checks=("forward",), raise_on_failure=False
        )
    assert report.outcome("forward") == {"right": "ok", "an error": "raises"}.get(fault, "wrong"), str(report)
    shape = "output 0: shape torch.Size([3, 5]), PyTorch's is torch.Size([])"
    assert fault != "a default dropped" or report.failures[0].detail == shape


def test_a_forward_of_ones_own_is_not_compared() -> None:
    """Nor is anything where no rule acts."""
    planted = rule("aten::sin", vjp={"self": lambda grad, self: grad * self.cos()}, forward=torch.cos, register=False)
    with mg.override(planted, forward=True):
        assert check(torch.sin, [(random(3),)], modes=(), checks=("forward",)).outcome("forward") == "-"
    assert check(torch.sin, [(random(3),)], modes=(), checks=("forward",)).outcome("forward") == "-"


def test_vjp_off_by_a_factor() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos(), lambda t, x: t * x.cos())
    report = check(fn, [(random(3),)], checks=("duality",), raise_on_failure=False)
    assert {"rev", "rev-rev", "fwd-rev", "duality"} <= columns(report)
    assert report.outcome("fwd") == "ok"
    wrong = next(r for r in report.failures if r.check == "rev")
    assert wrong.outcome == "wrong"
    assert wrong.ours == pytest.approx(2 * wrong.reference)


def test_vjp_off_by_a_little() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos() * (1 + 1e-6))
    assert columns(check(fn, [(random(3),)], modes=("rev",), checks=(), raise_on_failure=False)) == {"rev"}


def test_zero_jvp() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    report = check(fn, [(random(3),)], checks=("duality",), raise_on_failure=False)
    assert {"fwd", "duality"} <= columns(report)
    assert report.outcome("rev") == report.outcome("rev-rev") == "ok"
    assert all(r.ours == 0 for r in report.failures if r.check == "fwd")


def test_modes_that_differ_by_less_than_finite_differences_see() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * x.cos() * (1 + 3e-8))
    report = check(fn, [(random(3),)], modes=FIRST, checks=("agreement",), raise_on_failure=False)
    assert columns(report) == {"agreement"}


def test_forgotten_jvp_of_a_custom_op() -> None:
    """torch.library.custom_op has no jvp: torch.func.jvp gives zeros without a word, and torch.func.grad raises."""

    @torch.library.custom_op("harness::forgotten", mutates_args=())
    def forgotten(x: Tensor) -> Tensor:
        return x.sin()

    forgotten.register_fake(torch.empty_like)
    forgotten.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    report = check(forgotten, [(random(3),)], modes=FIRST, checks=("opcheck", "fake"), raise_on_failure=False)
    assert report.outcome("fwd") == "wrong"
    assert {(r.check, r.engine) for r in report.failures if r.outcome == "raises"} == {("rev", "func")}
    assert report.outcome("opcheck") == report.outcome("fake") == "ok"


def frozen_mean(center):
    """x - mean(x), squared: its jvp takes the deviations as `center` gives them."""

    class Frozen(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            deviation = x - x.mean()
            return deviation**2, deviation

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(*inputs, output[1])
            ctx.save_for_forward(*inputs, output[1])

        @staticmethod
        def backward(ctx, g, _):
            deviation = center(*ctx.saved_tensors)
            h = 2 * g * deviation
            return h - h.mean()

        @staticmethod
        def jvp(ctx, t):
            deviation = center(*ctx.saved_tensors)
            return 2 * deviation * (t - t.mean()), None

    return lambda x: Frozen.apply(x)[0]


def test_frozen_statistic_is_right_at_first_order_only() -> None:
    frozen = frozen_mean(lambda x, deviation: deviation.detach())
    report = check(frozen, [(random(4),)], checks=("duality",), raise_on_failure=False)
    assert report.outcome("rev") == report.outcome("fwd") == report.outcome("duality") == "ok"
    assert {"rev-rev", "fwd-rev"} <= columns(report)
    recomputed = frozen_mean(lambda x, deviation: x - x.mean())
    assert check(recomputed, [(random(4),)], modes=("rev", "fwd", "rev-rev", "fwd-rev"))


def test_silent_zero_second_order() -> None:
    fn = function(lambda x: x**3, lambda g, x: g * 3 * x.detach() ** 2, lambda t, x: t * 3 * x.detach() ** 2)
    report = check(fn, [(random(3),)], checks=(), raise_on_failure=False)
    assert report.outcome("rev") == report.outcome("fwd") == "ok"
    assert columns(report) >= {"rev-rev", "fwd-rev"}


def test_vjp_that_forgets_its_derivative_in_the_cotangent() -> None:
    fn = function(lambda x: 2 * x, lambda g, x: 2 * g.detach())
    report = check(fn, [(random(3),)], modes=("rev", "rev-rev"), checks=(), raise_on_failure=False)
    assert columns(report) == {"rev-rev"}


def test_nested_jvp_that_is_silently_zero() -> None:
    """autograd.Function switches forward mode off inside its jvp, so jvp of jvp loses a term: stock, not planted."""
    fn = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp())
    report = check(fn, [(random(3),)], checks=(), raise_on_failure=False)
    assert "fwd-fwd" in columns(report)


class Pair(torch.autograd.Function):
    """x -> (sin x, cos x), whose vjp ignores the second cotangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.saved_tensors[0].cos()


class Demanding(Pair):
    """The same, right, but only if both cotangents are there."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, first, second):
        (x,) = ctx.saved_tensors
        return first * x.cos() - second * x.sin()


def test_ignored_cotangent() -> None:
    report = check(Pair.apply, [(random(3),)], modes=("rev",), checks=("undefined cotangents",), raise_on_failure=False)
    assert columns(report) == {"rev", "undefined cotangents"}
    culprits = {r.engine for r in report.failures if r.check == "undefined cotangents"}
    assert any("outputs 1" in engine for engine in culprits)
    assert not any("outputs 0" in e and "rev-rev" not in e for e in culprits)


def test_missing_cotangent_that_crashes() -> None:
    report = check(
        Demanding.apply, [(random(3),)], modes=("rev",), checks=("undefined cotangents",), raise_on_failure=False
    )
    assert columns(report) == {"undefined cotangents"}
    assert report.outcome("undefined cotangents") == "raises"


def test_fake_kernel_with_other_strides() -> None:
    @torch.library.custom_op("harness::transposed", mutates_args=())
    def transposed(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    transposed.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
    report = check(transposed, [(random(3, 4),)], modes=(), checks=("fake",), raise_on_failure=False)
    assert columns(report) == {"fake"}
    assert "strides" in report.failures[0].detail


@pytest.mark.parametrize(
    ("fake", "what"),
    [(lambda x: x.new_empty(x.shape[0]), "shape"), (lambda x: torch.empty_like(x, dtype=torch.float32), "dtype")],
)
def test_fake_kernel_with_another(fake, what: str) -> None:
    @torch.library.custom_op(f"harness::fake_{what}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.clone()

    op.register_fake(fake)
    report = check(op, [(random(3, 4),)], modes=(), checks=("fake",), raise_on_failure=False)
    assert what in report.failures[0].detail


def test_vmap_rule_that_mixes_the_batch() -> None:
    @torch.library.custom_op("harness::mixed", mutates_args=())
    def mixed(x: Tensor) -> Tensor:
        return x - x.mean()

    # the mean over the batch too
    mixed.register_vmap(lambda info, in_dims, x: (mixed(x), in_dims[0]))
    report = check(mixed, [(random(3),)], modes=(), checks=("vmap",), raise_on_failure=False)
    assert columns(report) == {"vmap"}
    mixed.register_vmap(lambda info, in_dims, x: (x - x.mean(1 - in_dims[0], keepdim=True), in_dims[0]))
    assert check(mixed, [(random(3),)], modes=(), checks=("vmap",))


def test_vmap_rule_for_the_first_dimension() -> None:
    @torch.library.custom_op("harness::sums", mutates_args=())
    def sums(x: Tensor) -> Tensor:
        return x.cumsum(-1)

    sums.register_vmap(lambda info, in_dims, x: (sums(x), 0))
    report = check(sums, [(random(2, 3),)], modes=(), checks=("vmap",), raise_on_failure=False)
    assert {r.engine for r in report.failures} == {"over all, from the last dimension"}


def test_per_sample_gradient_that_mixes_the_batch() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(g, x):
            return g * x.cos()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, dims, g, x):  # the first sample's cotangent for all of them
            return g[:1] * x.cos(), 0

    fn = function(lambda x: x.sin(), Backward.apply)
    report = check(fn, [(random(3),)], modes=("rev",), checks=("vmap", "vmap-grad"), raise_on_failure=False)
    assert {(r.check, r.engine) for r in report.failures if r.outcome == "wrong"} == {("vmap-grad", "grad")}
    assert report.outcome("vmap") == "ok"


@pytest.mark.parametrize("fault", [False, True])
def test_complex_vjp_without_conj(fault: bool) -> None:
    fn = function(lambda z: z * z, lambda g, z: g * (2 * z if fault else (2 * z).conj()), lambda t, z: 2 * t * z)
    modes = ("rev", "fwd", "rev-rev", "fwd-rev")
    report = check(fn, [(random(3, dtype=COMPLEX),)], modes=modes, checks=("duality",), raise_on_failure=False)
    if fault:
        assert {"rev", "duality"} <= columns(report)
        assert report.outcome("fwd") == "ok"
    else:
        assert not report.failures


def test_strides_that_are_assumed() -> None:
    def reads_storage(x: Tensor) -> Tensor:
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).sin()

    report = check(reads_storage, [(random(3, 4),)], modes=(), checks=("noncontiguous",), raise_on_failure=False)
    assert columns(report) == {"noncontiguous"}


def test_gradient_for_one_input_only() -> None:
    """The gradient of y is right only where x wants one too."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * y, g * x if ctx.needs_input_grad[0] else g * 0

    report = check(Product.apply, [(random(3), random(3, seed=1))], modes=("rev",), checks=(), raise_on_failure=False)
    wrong = {r.engine for r in report.failures if r.outcome == "wrong"}
    assert wrong == {"eager, args[1] alone"}


@pytest.mark.parametrize("fault", [False, True])
def test_gradient_where_one_of_three_inputs_is_constant(fault: bool) -> None:
    """The gradient of y is wrong only where x wants none, and z does."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, z):
            ctx.save_for_backward(x, y, z)
            return x * y * z

        @staticmethod
        def backward(ctx, g):
            x, y, z = ctx.saved_tensors
            wrong = fault and ctx.needs_input_grad == (False, True, True)
            return g * y * z, g * x * z * (2 if wrong else 1), g * x * y

    xs = tuple(random(3, seed=i) for i in range(3))
    report = check(Product.apply, [xs], modes=("rev",), checks=(), raise_on_failure=False)
    assert {r.engine for r in report.failures if r.outcome == "wrong"} == (
        {"eager, without args[0]"} if fault else set()
    )


def test_kernel_that_is_not_its_reference() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x.sin() + 1e-3

    kernel.reference = torch.sin
    report = check(kernel, [(random(3),)], modes=(), checks=("kernel",), raise_on_failure=False)
    assert columns(report) == {"kernel"}
    kernel.reference = lambda x: x.sin() + 1e-3
    assert check(kernel, [(random(3),)], modes=(), checks=("kernel",)).outcome("kernel") == "ok"


def test_compiled_result_that_differs() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    report = check(fn, [(random(3),)], modes=(), checks=("compile",), raise_on_failure=False)
    assert columns(report) == {"compile"}


def test_a_function_that_raises() -> None:
    report = check(torch.matmul, [(random(3, 4), random(3, 4))], raise_on_failure=False)
    assert [r.outcome for r in report.failures] == ["raises"]


KINKS = {
    "relu": (torch.relu, torch.zeros(3, dtype=DOUBLE)),
    "abs, whose central differences are 0, as its gradient is": (torch.abs, torch.zeros(3, dtype=DOUBLE)),
    "a tie": (torch.amax, torch.ones(3, dtype=DOUBLE)),
    "x |x|, of second order only": (lambda x: x * x.abs(), torch.zeros(3, dtype=DOUBLE)),
}


@pytest.mark.parametrize("name", KINKS)
def test_a_kink_is_never_called_right(name: str) -> None:
    fn, x = KINKS[name]
    report = check(fn, [(x,)], checks=())
    kinked = [mode for mode in MODES if "-" in mode or "second" not in name]
    assert {mode: report.outcome(mode) for mode in kinked} == dict.fromkeys(kinked, "not differentiable")


def test_at_a_kink_only_values_outside_the_generalized_gradient_are_wrong() -> None:
    for slope, outcome in ((0.0, "not differentiable"), (0.5, "not differentiable"), (2.0, "wrong"), (-1.0, "wrong")):
        fn = function(lambda x: x.relu(), lambda g, x, slope=slope: g * torch.where(x == 0, slope, (x > 0).double()))
        report = check(fn, [(torch.zeros(1, dtype=DOUBLE),)], modes=("rev",), checks=(), raise_on_failure=False)
        assert report.outcome("rev") == outcome


def test_unbounded_derivatives_are_not_judged() -> None:
    report = check(lambda x: x.abs().sqrt(), [(torch.zeros(1, dtype=DOUBLE),)], checks=(), raise_on_failure=False)
    assert report.outcome("rev") in ("unsettled", "wrong")  # which is nan


def test_every_check_has_been_planted() -> None:
    """A check without a fault of its own in this folder proves nothing."""
    source = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    for name in ALL_CHECKS:
        assert f'"{name}"' in source
