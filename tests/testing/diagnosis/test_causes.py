"""For each known mistake the report names its cause, and none where the evidence is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from helpers.planted import COMPLEX, function
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing import check
from torch_manualgrad.testing.diagnosis.causes import KEYS


class Planted(NamedTuple):
    """A right function and one with a mistake, at the same samples."""

    right: Callable
    wrong: Callable
    samples: list
    key: str
    says: str
    modes: tuple[str, ...] = ("rev", "fwd")
    checks: tuple[str, ...] = ()


def sine(vjp, jvp=lambda t, x: t * x.cos()):
    return function(lambda x: x.sin(), vjp, jvp)


def binary(forward, vjp, jvp=None):
    """An autograd.Function of two tensors: vjp(ctx, g, x, y) and jvp(t, s, x, y)."""

    class Binary(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

    Binary.forward = staticmethod(forward)
    Binary.backward = staticmethod(lambda ctx, g: vjp(ctx, g, *ctx.saved_tensors))
    if jvp is not None:
        Binary.jvp = staticmethod(lambda ctx, t, s: jvp(t, s, *ctx.saved_tensors))
    return Binary.apply


def product(vjp):
    return binary(lambda x, y: x * y, vjp, lambda t, s, x, y: t * y + x * s)


def matmul(vjp):
    return binary(lambda x, y: x @ y, vjp, lambda t, s, x, y: t @ y + x @ s)


def pair(vjp, materialize=True):
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin(), x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.set_materialize_grads(materialize)
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g, h):
            return vjp(g, h, *ctx.saved_tensors)

    return Pair.apply


def mean(vjp):
    return function(lambda x: x.mean(), vjp, lambda t, x: t.mean())


def operator(name: str, fake=torch.empty_like, forward=torch.sin, vmap=None):
    @torch.library.custom_op(f"causes::{name}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return forward(x).clone()

    op.register_fake(fake)
    op.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    if vmap is not None:
        op.register_vmap(vmap)
    return op


def centred(name: str, right: bool):
    def vmap(info, in_dims, x):
        kept = tuple(d for d in range(x.dim()) if d != in_dims[0]) if right else tuple(range(x.dim()))
        return x - x.mean(kept, keepdim=True), in_dims[0]

    return operator(name, forward=lambda x: x - x.mean(), vmap=vmap)


def backward_mixes(right: bool):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(g, x):
            return g * x.cos()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, dims, g, x):
            return (g if right else g[:1]) * x.cos(), 0

    return function(lambda x: x.sin(), Backward.apply)


def scaled(name: str, vjp):
    op = mg.custom_op(f"causes::scaled_{name}(Tensor x, Tensor y) -> Tensor")(lambda x, y: x * y)
    op.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.y))
    op.impl_backward(lambda ctx, saved, grad: vjp(grad, *saved))
    return op


def once(backward):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

    Once.backward = staticmethod(backward)
    return Once.apply


def cosine(ctx, g):
    return g * ctx.saved_tensors[0].cos()


A = random(3, 3, seed=3)
RIGHT_SINE = sine(lambda g, x: g * x.cos())
RIGHT_PRODUCT = product(lambda ctx, g, x, y: (g * y, g * x))
RIGHT_MATMUL = matmul(lambda ctx, g, x, y: (g @ y.mT, x.mT @ g))
RIGHT_PAIR = pair(lambda g, h, x: g * x.cos() + h * x.exp())
LINEAR = function(lambda x: A @ x, lambda g, x: A.mT @ g, lambda t, x: A @ t)
X = [(random(4),)]
XY = [(random(3), random(3, seed=1))]

PLANTED = {
    "sign": Planted(
        RIGHT_SINE, sine(lambda g, x: -g * x.cos()), X, "sign", "args[0] is the right one times -1: a sign in the vjp"
    ),
    "sign of one input": Planted(
        RIGHT_PRODUCT, product(lambda ctx, g, x, y: (g * y, -g * x)), XY, "sign", "the gradient of args[1] is"
    ),
    "sign of a jvp": Planted(
        RIGHT_SINE, sine(lambda g, x: g * x.cos(), lambda t, x: -t * x.cos()), X, "sign", "a sign in the jvp"
    ),
    "twice": Planted(
        RIGHT_SINE, sine(lambda g, x: 2 * g * x.cos()), [(random(1),)], "factor", "times 2: a factor in the vjp"
    ),
    "half": Planted(RIGHT_SINE, sine(lambda g, x: g * x.cos() / 2), X, "factor", "times 0.5: a factor"),
    "any factor": Planted(RIGHT_SINE, sine(lambda g, x: 1.7 * g * x.cos()), X, "factor", "times 1.7: a factor"),
    "a sum in place of a mean": Planted(
        mean(lambda g, x: g.expand(x.shape) / x.numel()),
        mean(lambda g, x: g.expand(x.shape).clone()),
        [(random(5, 1),)],
        "factor",
        "times 5 (5: the size of dimension 0 of args[0])",
    ),
    "zero": Planted(
        RIGHT_SINE, sine(lambda g, x: g * 0), X, "zero", "args[0] is zero: it is not connected to the result"
    ),
    "detached": Planted(lambda x, y: x * y, lambda x, y: x * y.detach(), XY, "zero", "the gradient of args[1] is zero"),
    "no jvp": Planted(torch.sin, operator("no_jvp"), X, "zero", "torch.library.custom_op has none"),
    "transposed gradient": Planted(
        function(lambda x: x.sin(), lambda g, x: g * x.cos()),
        function(lambda x: x.sin(), lambda g, x: (g * x.cos()).mT),
        [(random(3, 3),)],
        "transpose",
        "the transpose of the right one",
    ),
    "transposed Jacobian": Planted(
        LINEAR, function(lambda x: A @ x, lambda g, x: A @ g), [(random(3),)], "transpose", "without J's transpose"
    ),
    "transposed factor": Planted(
        RIGHT_MATMUL,
        matmul(lambda ctx, g, x, y: (g @ y.mT, x @ g)),
        [(random(2, 2), random(2, 2, seed=1))],
        "transpose",
        "args[1] is J w",
    ),
    "conjugate": Planted(
        function(lambda z: z * z, lambda g, z: g * (2 * z).conj()),
        function(lambda z: z * z, lambda g, z: g * 2 * z),
        [(random(3, dtype=COMPLEX),)],
        "conjugate",
        "without a conjugate",
    ),
    "conjugate of a real function": Planted(
        function(lambda z: (z * z.conj()).real, lambda g, z: 2 * g * z),
        function(lambda z: (z * z.conj()).real, lambda g, z: 2 * g * z.conj()),
        [(random(3, dtype=COMPLEX),)],
        "conjugate",
        "without a conjugate",
    ),
    "ignored cotangent": Planted(
        RIGHT_PAIR, pair(lambda g, h, x: g * x.cos()), [(random(3),)], "ignored cotangent", "the cotangent of output 1"
    ),
    "missing cotangent": Planted(
        pair(lambda g, h, x: (0 if g is None else g * x.cos()) + (0 if h is None else h * x.exp()), False),
        pair(lambda g, h, x: g * x.cos() + h * x.exp(), False),
        [(random(3),)],
        "missing cotangent",
        "the vjp raises if an output is not used",
        ("rev",),
        ("undefined cotangents",),
    ),
    "needs_input_grad": Planted(
        RIGHT_PRODUCT,
        product(lambda ctx, g, x, y: (g * y, g * x if ctx.needs_input_grad[0] else g * 0)),
        XY,
        "needs_input_grad",
        "the gradient of args[1] is right if every input requires grad",
    ),
    "not summed": Planted(
        scaled("right", lambda grad, x, y: {"x": grad * y, "y": (grad * x).sum(0, keepdim=True)}),
        scaled("wrong", lambda grad, x, y: {"x": grad * y, "y": grad * x}),
        [(random(3, 4), random(1, 4))],
        "gradient shape",
        "[3, 4], its input [1, 4]: sum it over the dimensions that were broadcast",
        ("rev",),
    ),
    "summed without keepdim": Planted(
        product(lambda ctx, g, x, y: (g * y, (g * x).sum(1, keepdim=True))),
        product(lambda ctx, g, x, y: (g * y, (g * x).sum(1))),
        [(random(3, 4), random(3, 1))],
        "gradient shape",
        "keepdim=True",
        ("rev",),
    ),
    "vjp": Planted(RIGHT_SINE, sine(lambda g, x: g * x.sin()), X, "vjp", "the vjp, not the function"),
    "jvp": Planted(
        RIGHT_SINE, sine(lambda g, x: g * x.cos(), lambda t, x: t * x), X, "jvp", "the jvp, not the function"
    ),
    "detached residual": Planted(
        function(lambda x: x**3, lambda g, x: g * 3 * x**2),
        function(lambda x: x**3, lambda g, x: g * 3 * x.detach() ** 2),
        X,
        "detached residual",
        "the vjp takes what depends on the inputs for a constant",
        ("rev", "rev-rev"),
    ),
    "detached residual of an older Function": Planted(
        once(cosine),
        once(lambda ctx, g: g * ctx.saved_tensors[0].detach().cos()),
        X,
        "detached residual",
        "the vjp takes what depends on the inputs for a constant",
        ("rev", "rev-rev"),
    ),
    "once_differentiable": Planted(
        once(cosine),
        once(torch.autograd.function.once_differentiable(cosine)),
        X,
        "once_differentiable",
        "it has no derivative",
        ("rev", "rev-rev"),
    ),
    "nested jvp": Planted(
        torch.exp,
        function(lambda x: x.exp(), lambda g, x: g * x.exp(), lambda t, x: t * x.exp()),
        X,
        "nested jvp",
        "torch.func.jvp of jvp does not work",
        ("rev", "fwd", "fwd-fwd"),
    ),
    "batching rule": Planted(
        centred("batch_right", True),
        centred("batch_wrong", False),
        X,
        "batching rule",
        "which may mix the batch",
        (),
        ("vmap",),
    ),
    "batching rule of the vjp": Planted(
        backward_mixes(True),
        backward_mixes(False),
        X,
        "batching rule",
        "the batching rule of the vjp",
        ("rev",),
        ("vmap", "vmap-grad"),
    ),
    "fake kernel": Planted(
        operator(
            "fake_right",
            fake=lambda x: torch.empty_like(x).mT.contiguous().mT,
            forward=lambda x: x.mT.contiguous().mT.sin(),
        ),
        operator("fake_wrong", fake=torch.empty_like, forward=lambda x: x.mT.contiguous().mT.sin()),
        [(random(3, 4),)],
        "fake kernel",
        "the fake kernel does not describe the result: output 0: strides (4, 1), really (1, 3)",
        (),
        ("fake",),
    ),
    "strides": Planted(
        torch.sin,
        lambda x: torch.as_strided(x, x.shape, torch.empty(x.shape).stride()).sin(),
        [(random(3, 4),)],
        "strides",
        "takes its input for contiguous",
        (),
        ("noncontiguous",),
    ),
}


def failed_of(fn, planted: Planted):
    # an engine that has no setup_context, or no jvp, raises: that is not what is looked for
    return check(fn, planted.samples, modes=planted.modes, checks=planted.checks, shrink=False, raise_on_failure=False)


@pytest.mark.parametrize("name", PLANTED)
def test_the_cause_is_named(name: str) -> None:
    planted = PLANTED[name]
    report = failed_of(planted.wrong, planted)
    assert [cause.key for cause in report.causes] == [planted.key], str(report)
    assert planted.says in report.causes[0].text
    assert all(r.causes for r in report.failures if r.outcome == "wrong"), str(report)
    assert not failed_of(planted.right, planted).causes


UNKNOWN = {
    "one mode only": (sine(lambda g, x: g * x.sin()), X, ("rev",), ()),
    "both modes": (sine(lambda g, x: g * x.sin(), lambda t, x: t * x.tanh()), X, ("rev", "fwd"), ()),
    "an error": (torch.matmul, [(random(3, 4), random(3, 4))], ("rev", "fwd"), ()),
    "no jvp": (function(lambda x: x.sin(), lambda g, x: g * x.cos()), X, ("rev", "fwd"), ()),
    "nan": (
        lambda x: torch.linalg.vector_norm(x).square(),
        [(torch.zeros(3, dtype=torch.float64),)],
        ("rev", "rev-rev"),
        (),
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_cause_is_named_without_evidence(name: str) -> None:
    fn, samples, modes, checks = UNKNOWN[name]
    report = check(fn, samples, modes=modes, checks=checks, raise_on_failure=False)
    assert report.failures and not report.causes, str(report)


def test_a_large_sample_is_judged_by_a_smaller_one() -> None:
    report = check(PLANTED["sign"].wrong, [(random(9, 9),)], modes=("rev", "fwd"), checks=(), raise_on_failure=False)
    assert [cause.key for cause in report.causes] == ["sign"]


def test_two_mistakes_are_two_causes() -> None:
    fn = product(lambda ctx, g, x, y: (-g * y, 2 * g * x))
    report = check(fn, XY, modes=("rev", "fwd"), checks=(), raise_on_failure=False)
    said = {cause.key: cause.text for cause in report.causes}
    assert list(said) == ["sign", "factor"] and "args[0]" in said["sign"] and "args[1]" in said["factor"]
    fn = sine(lambda g, x: -g * x.cos(), lambda t, x: 0 * t)
    report = check(fn, X, modes=("rev", "fwd"), checks=("duality",), raise_on_failure=False)
    assert [cause.key for cause in report.causes] == ["sign", "zero"]


def test_every_cause_is_planted() -> None:
    assert {planted.key for planted in PLANTED.values()} == set(KEYS)
