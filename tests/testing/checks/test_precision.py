"""Precision in low dtypes and under autocast: a cancellation, an overflow and a narrow cast are found."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from helpers.planted import COMPLEX, columns, engines, function
from helpers.tensors import random
from torch import Tensor

from torch_manualgrad.testing import check

POSITIVE = random(5000).abs() + 0.5


def found(fn, *args, which="precision", **options):
    return check(fn, [args], modes=(), checks=(which,), raise_on_failure=False, diagnose=False, **options)


class Summed(torch.autograd.Function):
    """x y over broadcast x, whose gradient is summed in the dtype of the cotangent."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        total = torch.zeros_like(x)
        for term in (g * y).unbind():
            total = total + term
        return total, g * x


def sigmoid_of(x: Tensor) -> Tensor:
    return x.exp() / (1 + x.exp())


def narrow_cast(g: Tensor, x: Tensor) -> Tensor:
    """In double precision it is right: otherwise the mode rev finds it there."""
    inner = torch.float16 if x.dtype == torch.float32 else x.dtype
    return (g.to(inner) * x.to(inner).cos()).to(x.dtype)


#: fault -> wrong function, right one, inputs, some of the comparisons that fail.
PLANTED = {
    "overflow of exp": (
        function(lambda x: nnf.softplus(x), lambda g, x: g * sigmoid_of(x)),
        function(lambda x: nnf.softplus(x), lambda g, x: g * x.sigmoid()),
        (torch.tensor([0.3, 12.0, 95.0], dtype=torch.float64),),
        {"float32, rev", "bfloat16, rev"},
    ),
    "log1p": (
        lambda x: (1 + x).log(),
        torch.log1p,
        (random(8) * 1e-3,),
        {"float32, values", "bfloat16, values"},
    ),
    "variance as a difference of squares": (
        lambda x: (x * x).mean() - x.mean() ** 2,
        lambda x: (x - x.mean()).square().mean(),
        (random(400) + 10,),
        {"float32, values", "bfloat16, values"},
    ),
    "sum in bfloat16": (
        Summed.apply,
        torch.mul,
        (random(), POSITIVE),
        {"bfloat16, rev"},
    ),
    "cast to float16 in the vjp": (
        function(lambda x: x.sin(), narrow_cast, lambda t, x: t * x.cos()),
        function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * x.cos()),
        (random(5),),
        {"float32, rev"},
    ),
    "complex": (
        lambda z: (1 + z).log(),
        lambda z: torch.complex(0.5 * (2 * z.real + z.abs() ** 2).log1p(), torch.atan2(z.imag, 1 + z.real)),
        (random(8, dtype=COMPLEX) * 1e-5,),
        {"float32, values"},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_loss_of_digits(fault: str) -> None:
    wrong, right, args, expected = PLANTED[fault]
    gaps = {} if fault not in ("overflow of exp", "sum in bfloat16") else {"fwd": "no jvp"}
    report = found(wrong, *args, gaps=gaps)
    assert expected <= engines(report), str(report)
    assert not found(right, *args, gaps=gaps).failures


def test_the_report_says_how_far_off() -> None:
    report = found(Summed.apply, random(), POSITIVE.abs(), gaps={"fwd": "no jvp"})
    (failure,) = (r for r in report.failures if r.engine == "bfloat16, rev")
    assert "percent off where" in failure.detail
    assert "gradient of args[0]" in failure.detail


def test_a_derivative_that_is_missing_in_one_dtype() -> None:
    def vjp(g: Tensor, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise NotImplementedError("sin_backward in float16")
        return g * x.cos()

    report = found(function(lambda x: x.sin(), vjp), random(3), gaps={"fwd": "no jvp"})
    assert [(r.engine, r.outcome) for r in report.failures] == [("float16, rev", "raises")]
    gaps = {"fwd": "no jvp", "precision/float16": "no gradient"}
    assert {r.outcome for r in found(lambda x: x.sin(), random(3), gaps=gaps).failures} == {"gap works"}


def test_a_function_that_has_no_low_dtypes() -> None:
    def only_double(x: Tensor) -> Tensor:
        assert x.dtype == torch.float64
        return x.sin()

    for which in ("precision", "autocast"):
        assert found(only_double, random(3), which=which).outcome(which) == "-"


RIGHT = {
    "softmax": (lambda x: x.softmax(-1), random(4, 5)),
    "layer norm": (lambda x: nnf.layer_norm(x, (6,)), random(3, 6)),
    "normalized to one": (lambda x: nnf.normalize(x, dim=0), random(1, 3)),  # the derivative is zero identically
    "logsumexp": (lambda x: x.logsumexp(0), 30 * random(5)),
    "svd": (torch.linalg.svdvals, random(4, 3)),
    "solve": (torch.linalg.solve, random(4, 4), random(4, seed=1)),
    "a recurrence": (lambda x, w: [x := (w @ x).tanh() for _ in range(20)][-1], random(6), random(6, 6, seed=1)),
    "reduction": (lambda x: x.sum() ** 2, random(5000)),
    "relu": (torch.relu, random(100)),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("which", ["precision", "autocast"])
def test_a_right_function_passes(name: str, which: str) -> None:
    fn, *args = RIGHT[name]
    report = found(fn, *args, which=which)
    assert not report.failures, str(report)
    assert report.outcome(which) == "ok"


# autocast ------------------------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """x @ w; under autocast the cotangent is bfloat16, and w is not."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.mT, x.mT @ g


class Prepared(Product):
    """The same as PyTorch's documentation has it."""

    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


def test_a_backward_that_mixes_dtypes() -> None:
    args = random(3, 4), random(4, 2, seed=1)
    report = found(Product.apply, *args, which="autocast")
    assert [(r.engine, r.outcome) for r in report.failures] == [("bfloat16, rev", "raises")]
    assert not found(Prepared.apply, *args, which="autocast").failures


def test_an_operator_without_a_rule_for_autocast() -> None:
    @torch.library.custom_op("harness::between", mutates_args=())
    def between(x: Tensor, y: Tensor) -> Tensor:
        return x.lerp(y, 0.25)  # takes one dtype only

    between.register_autograd(lambda ctx, g: (0.75 * g, 0.25 * g))

    def fn(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return between(x @ w, bias)

    args = random(3, 4), random(4, 2, seed=1), random(3, 2, seed=2)
    report = found(fn, *args, which="autocast")
    assert {r.outcome for r in report.failures} == {"raises"}
    between.register_autocast("cpu", torch.float32)
    assert not found(fn, *args, which="autocast").failures


def test_a_gradient_that_is_lost_under_autocast() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x.detach() if torch.is_autocast_enabled("cpu") else x) @ w

    report = found(fn, random(3, 4), random(4, 2, seed=1), which="autocast")
    assert [r.engine for r in report.failures] == ["bfloat16, rev"]
    assert "gradient of args[0]" in report.failures[0].detail
    assert columns(report) == {"autocast"}
