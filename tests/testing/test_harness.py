"""The checker is checked: the check meant for it catches a planted fault, and a right function passes all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core import calls, internals
from torch_manualgrad.core.autograd import Derivative
from torch_manualgrad.core.rule import rule
from torch_manualgrad.testing import ALL_CHECKS, CHECKS, MODES, CheckFailed, Sample, check, check_op, composition
from torch_manualgrad.testing.problem import Problem

DOUBLE, COMPLEX = torch.float64, torch.complex128
FIRST = ("rev", "fwd")
SECOND = tuple(m for m in MODES if "-" in m)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # samples are tiny: on a busy machine threads cost more than they give
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rand(*shape: int, dtype: torch.dtype = DOUBLE, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def columns(report) -> set[str]:
    return {r.check for r in report.failures}


def function(forward, vjp=None, jvp=None):
    """An autograd.Function of one tensor, x -> forward(x), with derivatives vjp(g, x) and jvp(t, x)."""

    class Planted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    Planted.forward = staticmethod(forward)
    if vjp is not None:
        Planted.backward = staticmethod(lambda ctx, *g: vjp(*g, *ctx.saved_tensors))
    if jvp is not None:
        Planted.jvp = staticmethod(lambda ctx, *t: jvp(*t, *ctx.saved_tensors))
    return Planted.apply


# controls: right functions -------------------------------------------------------------------------------------------

CONTROLS = {
    "sin": (torch.sin, [(rand(3, 4),), (rand(),), (rand(0, 3),)]),
    "matmul": (torch.matmul, [(rand(3, 4), rand(4, 2)), (rand(2, 3, 4), rand(4)), (rand(3), rand(3))]),
    "broadcast": (torch.mul, [(rand(3, 1), rand(1, 4)), (rand(), rand(2, 2))]),
    "svdvals": (torch.linalg.svdvals, [(rand(3, 4),), (rand(2, 3, 3),), (rand(4, 3, dtype=COMPLEX),)]),
    "complex exp": (torch.exp, [(rand(3, dtype=COMPLEX),)]),
    "complex product": (lambda a, b: a.mH @ b, [(rand(3, 2, dtype=COMPLEX), rand(3, 2, dtype=COMPLEX, seed=1))]),
    "complex to real": (lambda z: z.abs().square(), [(rand(4, dtype=COMPLEX),)]),
    "several outputs": (lambda x: (x.sin(), {"sum": x.exp().sum()}, x.argmax()), [(rand(4),)]),
    "qr": (torch.linalg.qr, [(rand(4, 3),), (rand(3, 3, dtype=COMPLEX),)]),
    "integers": (lambda x, i, flag: x[i].square() if flag else x, [(rand(5), torch.tensor([0, 2, 2]), True)]),
    "a list": (lambda xs, y: torch.cat(xs) * y, [([rand(2), rand(3)], rand(5))]),
    "keywords": (lambda x, *, weight: x.cos() * weight, [Sample(rand(3), weight=rand(3, seed=1))]),
    "constant": (lambda x: torch.ones_like(x), [(rand(3),)]),
    "no inputs": (lambda i: i + 1, [(torch.arange(3),)]),
    "infinite output": (lambda x: torch.stack([x.sin(), torch.full_like(x, torch.inf)]), [(rand(3),)]),
    "dropout": (lambda x: nnf.dropout(x.exp(), 0.5), [(rand(8),)]),
    "huge": (lambda x: x.square().sum(), [(rand(3) * 1e80,)]),
    "tiny": (lambda x: x * x.sum(), [(rand(3) * 1e-80,)]),
    "float32": (torch.tanh, [(rand(3).float(),)]),
    "bfloat16": (torch.sin, [(rand(3).bfloat16(),)]),
    "strided input": (torch.sin, [(rand(4, 6)[::2, 1::2],), (rand(4, 3).mT,)]),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_right_function_passes(name: str) -> None:
    fn, samples = CONTROLS[name]
    report = check(fn, samples)
    assert report and not report.failures
    assert len({r.sample for r in report.results}) == len(samples)


def test_a_right_function_compiles() -> None:
    report = check(lambda x, y: (x @ y).tanh(), [(rand(3, 2), rand(2, 4))], modes=(), checks=ALL_CHECKS)
    assert report.outcome("compile") == "ok"


def test_a_right_operator_passes_opcheck() -> None:
    report = check(torch.ops.aten.linalg_lu.default, [(rand(3, 3),)])
    assert report.outcome("opcheck") == "ok"
    assert report.outcome("undefined cotangents") == "ok"


def test_correct_formulas_in_a_function_pass() -> None:
    fn = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp())
    assert check(fn, [(rand(3),)], modes=("rev", "fwd", "rev-rev", "fwd-rev"))


# faults --------------------------------------------------------------------------------------------------------------


FORWARDS = {
    "right": lambda run, values: run(*values),
    "a default dropped": lambda run, values: torch._C._nn.mse_loss(*values[:2], 0),
    "another last bit": lambda run, values: torch.nextafter(run(*values), rand()),
    "another dtype": lambda run, values: run(*values).float(),
    "an error": lambda run, values: run(*values[:1]),
}


@pytest.mark.parametrize("fault", FORWARDS)
def test_a_forward_that_is_not_pytorchs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_below(self: Derivative, values: tuple) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return FORWARDS[fault](self.run, values)

    monkeypatch.setattr(Derivative, "run_below", run_below)
    monkeypatch.setattr(
        internals.functorch, "_tangents_in_graphs", False
    )  # of graphs in other tests: no call is plain after them
    planted = rule(
        "aten::mse_loss",
        vjp={"self": lambda grad, self, target: 2 * grad * (self - target) / self.numel()},
        register=False,
    )
    target = rand(3, 5, seed=1)
    with mg.override(planted), calls.in_python():  # whose forward the fault is in
        report = check(
            lambda x: nnf.mse_loss(x, target), [(rand(3, 5),)], modes=(), checks=("forward",), raise_on_failure=False
        )
    assert report.outcome("forward") == {"right": "ok", "an error": "raises"}.get(fault, "wrong"), str(report)
    shape = "output 0: shape torch.Size([3, 5]), PyTorch's is torch.Size([])"
    assert fault != "a default dropped" or report.failures[0].detail == shape


def test_a_forward_of_ones_own_is_not_compared() -> None:
    """Nor is anything where no rule acts."""
    planted = rule("aten::sin", vjp={"self": lambda grad, self: grad * self.cos()}, forward=torch.cos, register=False)
    with mg.override(planted, forward=True):
        assert check(torch.sin, [(rand(3),)], modes=(), checks=("forward",)).outcome("forward") == "-"
    assert check(torch.sin, [(rand(3),)], modes=(), checks=("forward",)).outcome("forward") == "-"


def test_vjp_off_by_a_factor() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos(), lambda t, x: t * x.cos())
    report = check(fn, [(rand(3),)], checks=("duality",), raise_on_failure=False)
    assert {"rev", "rev-rev", "fwd-rev", "duality"} <= columns(report)
    assert report.outcome("fwd") == "ok"
    wrong = next(r for r in report.failures if r.check == "rev")
    assert wrong.outcome == "wrong"
    assert wrong.ours == pytest.approx(2 * wrong.reference)


def test_vjp_off_by_a_little() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos() * (1 + 1e-6))
    assert columns(check(fn, [(rand(3),)], modes=("rev",), checks=(), raise_on_failure=False)) == {"rev"}


def test_zero_jvp() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    report = check(fn, [(rand(3),)], checks=("duality",), raise_on_failure=False)
    assert {"fwd", "duality"} <= columns(report)
    assert report.outcome("rev") == report.outcome("rev-rev") == "ok"
    assert all(r.ours == 0 for r in report.failures if r.check == "fwd")


def test_modes_that_differ_by_less_than_finite_differences_see() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * x.cos() * (1 + 3e-8))
    report = check(fn, [(rand(3),)], modes=FIRST, checks=("agreement",), raise_on_failure=False)
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
    report = check(forgotten, [(rand(3),)], modes=FIRST, checks=("opcheck", "fake"), raise_on_failure=False)
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
    report = check(frozen, [(rand(4),)], checks=("duality",), raise_on_failure=False)
    assert report.outcome("rev") == report.outcome("fwd") == report.outcome("duality") == "ok"
    assert {"rev-rev", "fwd-rev"} <= columns(report)
    recomputed = frozen_mean(lambda x, deviation: x - x.mean())
    assert check(recomputed, [(rand(4),)], modes=("rev", "fwd", "rev-rev", "fwd-rev"))


def test_silent_zero_second_order() -> None:
    fn = function(lambda x: x**3, lambda g, x: g * 3 * x.detach() ** 2, lambda t, x: t * 3 * x.detach() ** 2)
    report = check(fn, [(rand(3),)], checks=(), raise_on_failure=False)
    assert report.outcome("rev") == report.outcome("fwd") == "ok"
    assert columns(report) >= {"rev-rev", "fwd-rev"}


def test_vjp_that_forgets_its_derivative_in_the_cotangent() -> None:
    fn = function(lambda x: 2 * x, lambda g, x: 2 * g.detach())
    report = check(fn, [(rand(3),)], modes=("rev", "rev-rev"), checks=(), raise_on_failure=False)
    assert columns(report) == {"rev-rev"}


def test_nested_jvp_that_is_silently_zero() -> None:
    """autograd.Function switches forward mode off inside its jvp, so jvp of jvp loses a term: stock, not planted."""
    fn = function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp())
    report = check(fn, [(rand(3),)], checks=(), raise_on_failure=False)
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
    report = check(Pair.apply, [(rand(3),)], modes=("rev",), checks=("undefined cotangents",), raise_on_failure=False)
    assert columns(report) == {"rev", "undefined cotangents"}
    culprits = {r.engine for r in report.failures if r.check == "undefined cotangents"}
    assert any("outputs 1" in engine for engine in culprits)
    assert not any("outputs 0" in e and "rev-rev" not in e for e in culprits)


def test_missing_cotangent_that_crashes() -> None:
    report = check(
        Demanding.apply, [(rand(3),)], modes=("rev",), checks=("undefined cotangents",), raise_on_failure=False
    )
    assert columns(report) == {"undefined cotangents"}
    assert report.outcome("undefined cotangents") == "raises"


def test_fake_kernel_with_other_strides() -> None:
    @torch.library.custom_op("harness::transposed", mutates_args=())
    def transposed(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    transposed.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))
    report = check(transposed, [(rand(3, 4),)], modes=(), checks=("fake",), raise_on_failure=False)
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
    report = check(op, [(rand(3, 4),)], modes=(), checks=("fake",), raise_on_failure=False)
    assert what in report.failures[0].detail


def test_vmap_rule_that_mixes_the_batch() -> None:
    @torch.library.custom_op("harness::mixed", mutates_args=())
    def mixed(x: Tensor) -> Tensor:
        return x - x.mean()

    # the mean over the batch too
    mixed.register_vmap(lambda info, in_dims, x: (mixed(x), in_dims[0]))
    report = check(mixed, [(rand(3),)], modes=(), checks=("vmap",), raise_on_failure=False)
    assert columns(report) == {"vmap"}
    mixed.register_vmap(lambda info, in_dims, x: (x - x.mean(1 - in_dims[0], keepdim=True), in_dims[0]))
    assert check(mixed, [(rand(3),)], modes=(), checks=("vmap",))


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
    report = check(fn, [(rand(3),)], modes=("rev",), checks=("vmap", "vmap-grad"), raise_on_failure=False)
    assert {(r.check, r.engine) for r in report.failures if r.outcome == "wrong"} == {("vmap-grad", "grad")}
    assert report.outcome("vmap") == "ok"


@pytest.mark.parametrize("fault", [False, True])
def test_complex_vjp_without_conj(fault: bool) -> None:
    fn = function(lambda z: z * z, lambda g, z: g * (2 * z if fault else (2 * z).conj()), lambda t, z: 2 * t * z)
    modes = ("rev", "fwd", "rev-rev", "fwd-rev")
    report = check(fn, [(rand(3, dtype=COMPLEX),)], modes=modes, checks=("duality",), raise_on_failure=False)
    if fault:
        assert {"rev", "duality"} <= columns(report)
        assert report.outcome("fwd") == "ok"
    else:
        assert not report.failures


def test_strides_that_are_assumed() -> None:
    def reads_storage(x: Tensor) -> Tensor:
        return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).sin()

    report = check(reads_storage, [(rand(3, 4),)], modes=(), checks=("noncontiguous",), raise_on_failure=False)
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

    report = check(Product.apply, [(rand(3), rand(3, seed=1))], modes=("rev",), checks=(), raise_on_failure=False)
    wrong = {r.engine for r in report.failures if r.outcome == "wrong"}
    assert wrong == {"eager, args[1] alone"}


def test_kernel_that_is_not_its_reference() -> None:
    def kernel(x: Tensor) -> Tensor:
        return x.sin() + 1e-3

    kernel.reference = torch.sin
    report = check(kernel, [(rand(3),)], modes=(), checks=("kernel",), raise_on_failure=False)
    assert columns(report) == {"kernel"}
    kernel.reference = lambda x: x.sin() + 1e-3
    assert check(kernel, [(rand(3),)], modes=(), checks=("kernel",)).outcome("kernel") == "ok"


def test_compiled_result_that_differs() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    report = check(fn, [(rand(3),)], modes=(), checks=("compile",), raise_on_failure=False)
    assert columns(report) == {"compile"}


def test_a_function_that_raises() -> None:
    report = check(torch.matmul, [(rand(3, 4), rand(3, 4))], raise_on_failure=False)
    assert [r.outcome for r in report.failures] == ["raises"]


def test_a_kink_is_never_called_right() -> None:
    report = check(torch.relu, [(torch.zeros(3, dtype=DOUBLE),)], checks=(), raise_on_failure=False)
    assert columns(report) == set(MODES)
    assert report.outcome("rev-rev") == "unsettled"


# declared gaps -------------------------------------------------------------------------------------------------------


def test_a_gap_that_raises_passes() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos())
    report = check(fn, [(rand(3),)], modes=("rev", "fwd"), checks=("duality",), gaps={"fwd": "no formula yet"})
    assert report.outcome("fwd") == "gap"
    assert "no formula yet" in next(r.detail for r in report.results if r.outcome == "gap")
    assert report.outcome("duality") == "-"


def test_a_gap_that_works_is_reported() -> None:
    report = check(torch.sin, [(rand(3),)], modes=("fwd",), checks=(), gaps={"fwd": "old"}, raise_on_failure=False)
    assert {r.outcome for r in report.failures} == {"gap works"}
    assert "declared gap now works" in str(report)


def test_a_gap_that_is_wrong_is_wrong() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    report = check(fn, [(rand(3),)], modes=("fwd",), checks=(), gaps={"fwd": "none"}, raise_on_failure=False)
    assert {r.outcome for r in report.failures} == {"wrong"}


def test_a_gap_of_one_engine() -> None:
    class Old(torch.autograd.Function):  # the older style, which torch.func refuses
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()

    report = check(Old.apply, [(rand(3),)], modes=("rev",), checks=(), gaps={"rev/func": "no setup_context"})
    assert {r.engine: r.outcome for r in report.results} == {"eager": "ok", "func": "gap"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode"):
        check(torch.sin, [], modes=("backwards",))
    with pytest.raises(ValueError, match="unknown check"):
        check(torch.sin, [], checks=("speed",))
    with pytest.raises(ValueError, match="a gap names"):
        check(torch.sin, [], gaps={"second": "?"})


# reports -------------------------------------------------------------------------------------------------------------


def test_a_failure_names_everything() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos())
    with pytest.raises(CheckFailed) as caught:
        check(fn, [Sample(rand(3)).named("first")], modes=("rev",), checks=(), name="planted")
    text = str(caught.value)
    for part in ("planted", "first (f64[3])", "float64", "rev", "eager", "ours", "reference", "relative 1"):
        assert part in text
    assert caught.value.report.failures


def test_random_numbers_are_seen_where_two_draws_are_equal():
    assert Problem(lambda x: nnf.dropout(x, 1e-12), Sample(rand(1))).random
    assert not Problem(lambda x: x.exp(), Sample(rand(1))).random


def test_check_is_deterministic_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, again = (check(CONTROLS["dropout"][0], [(rand(8),)], modes=("rev",), checks=()) for _ in range(2))
    assert [r.ours for r in first.results] == [r.ours for r in again.results]
    assert torch.equal(state, torch.get_rng_state())


def test_sample() -> None:
    sample = Sample(rand(2, 3), [rand(1), 2], p=2).named("pair")
    assert repr(sample) == "pair (f64[2, 3], [f64[1], 2], p=2)"
    with pytest.raises(AttributeError, match="frozen"):
        sample.name = "other"


# the harness sees through stock PyTorch: where one of these fails, PyTorch has been repaired --------------------------


def domain(x: Tensor) -> Tensor:
    if (x < 0).any():
        raise ValueError("negative")
    return x.sqrt()


def test_steps_out_of_the_domain_are_passed_over() -> None:
    assert check(domain, [(torch.tensor([0.02, 3.0], dtype=DOUBLE),)], modes=FIRST, checks=())
    assert check(torch.log, [(torch.tensor([0.02, 3.0], dtype=DOUBLE),)], checks=())


STOCK = {
    "vector_norm squared at zero": (
        lambda x: torch.linalg.vector_norm(x).square(),
        [(torch.zeros(3, dtype=DOUBLE),)],
        "rev-rev",
    ),
    "vector_norm at zero": (torch.linalg.vector_norm, [(torch.zeros(3, dtype=DOUBLE),)], "rev-rev"),
    "det at a zero pivot rev": (torch.linalg.det, [(torch.tensor([[1.0, 2.0], [2.0, 4.0]]).double(),)], "rev"),
    "householder_product rev-fwd": (torch.linalg.householder_product, [(rand(3, 2), rand(2))], "rev-fwd"),
    "layer_norm fwd-fwd": (lambda x: nnf.layer_norm(x, (4,)), [(rand(3, 4),)], "fwd-fwd"),
    "cholesky_inverse fwd-fwd": (
        lambda x: torch.cholesky_inverse(x.tril()),
        [(rand(3, 3) + 3 * torch.eye(3, dtype=DOUBLE),)],
        "fwd-fwd",
    ),
    "cumprod at zero fwd-fwd": (
        lambda x: x.cumprod(0),
        [(torch.tensor([1.5, 0.0, 2.0, 0.0], dtype=DOUBLE),)],
        "fwd-fwd",
    ),
    "complex householder_product fwd-fwd": (
        torch.linalg.householder_product,
        [(rand(3, 2, dtype=COMPLEX), rand(2, dtype=COMPLEX))],
        "fwd-fwd",
    ),
    "scatter_reduce prod fwd": (
        lambda x, s: x.scatter_reduce(0, torch.tensor([0, 0, 1]), s, "prod"),
        [(rand(2), rand(3))],
        "fwd",
    ),
    "eigh rev-fwd": (
        lambda x: torch.linalg.eigh(x + x.mT)[0].exp().sum() + torch.linalg.eigh(x + x.mT)[1].square().sum(),
        [(rand(3, 3),)],
        "rev-fwd",
    ),
}


def test_softmax_of_stock_raises_in_eager_rev_fwd() -> None:
    report = check(lambda x: x.softmax(0), [(rand(3),)], modes=("rev-fwd",), checks=(), raise_on_failure=False)
    assert {r.engine: r.outcome for r in report.results} == {"eager": "raises", "func": "ok"}


@pytest.mark.parametrize("name", STOCK)
def test_sees_through_stock(name: str) -> None:
    fn, samples, mode = STOCK[name]
    report = check(
        fn, samples, modes=("rev", "fwd", mode) if mode != "fwd" else FIRST, checks=(), raise_on_failure=False
    )
    assert report.outcome(mode) == "wrong"
    assert mode == "rev" or report.outcome("rev") == "ok"


def test_operator_database() -> None:
    report = check_op("aten::linalg_lu", limit=3, checks=("duality", "undefined cotangents"))
    assert report
    report = check_op(
        "linalg.householder_product", limit=3, modes=("rev", "fwd", "fwd-fwd"), checks=(), raise_on_failure=False
    )
    assert columns(report) == {"fwd-fwd"}
    with pytest.raises(KeyError):
        check_op("no_such_operator")


def test_plugin(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_right(derivative_check):\n    derivative_check(torch.sin, [(torch.ones(2).double(),)])\n"
        "def test_wrong(derivative_check):\n    derivative_check(torch.relu, [(torch.zeros(2).double(),)])\n"
        "def test_other():\n    pass\n"
    )
    # without the entry point, which may or may not be installed here
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "derivatives", "-p", "torch_manualgrad_pytest"]
    found = subprocess.run(
        [*command, "--strict-markers", "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "1 failed, 1 passed, 1 deselected" in found.stdout, found.stdout + found.stderr


def test_the_plugin_does_not_import_torch(tmp_path) -> None:
    (tmp_path / "test_it.py").write_text("import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "torch_manualgrad_pytest", "test_it.py"]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "1 passed" in found.stdout, found.stdout + found.stderr
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'torch_manualgrad_pytest = "torch_manualgrad_pytest"' in declared
    assert 'py-modules = ["torch_manualgrad_pytest"]' in declared


# composition ---------------------------------------------------------------------------------------------------------


def test_composition_of_a_right_function() -> None:
    table = composition(lambda x: x.square().sum().sqrt(), lambda x: (x * x).sum() ** 0.5, (rand(4),))
    assert not table.failures, str(table)
    names = [row.name for row in table]
    assert len(names) == len(set(names)) > 35
    assert str(table).startswith("| through")


def test_composition_finds_a_planted_fault() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    table = composition(fn, torch.sin, (rand(4),), compile=False)
    outcomes = {row.name: row.outcome for row in table}
    for name in ("eager dual numbers", "func.jvp", "func.jacfwd", "vmap of jvp", "fwd-fwd"):
        assert outcomes[name] == "wrong", str(table)
    for name in ("forward", "eager reverse", "func.grad", "func.vjp", "rev-rev", "vmap of grad"):
        assert outcomes[name] == "ok", str(table)


def test_every_check_has_been_planted() -> None:
    """A check without a fault of its own in this file proves nothing."""
    source = Path(__file__).read_text()
    for name in (*CHECKS, "compile"):
        assert f'"{name}"' in source
