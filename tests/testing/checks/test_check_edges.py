"""The check "edges" is checked: it finds planted faults at the edge, and accuses no function that is right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as nnf
from helpers.planted import COMPLEX, DOUBLE, function, only
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing import Report, Sample
from torch_manualgrad.testing.checks.edge_samples import edge_samples
from torch_manualgrad.testing.comparison.problem import Problem
from torch_manualgrad.testing.numerics.kinks import ranges

FLOAT = torch.float32


def edges(fn, *args: Tensor) -> Report:
    return only("edges", fn, *args)


def places(report: Report) -> set[str]:
    """The edges at which it failed."""
    return {r.engine.partition(", at ")[2] for r in report.failures}


def nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)


def binary(forward, vjp):
    """An autograd.Function of two tensors."""

    class Planted(torch.autograd.Function):
        @staticmethod
        def forward(x, y):
            return forward(x, y)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return vjp(g, *ctx.saved_tensors)

    return Planted.apply


def storage_of(x: Tensor) -> Tensor:
    """The numbers as they are stored, whatever conj bit and strides say."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


def first_as_if_dense(x: Tensor) -> Tensor:
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) if x.stride() == (0,) else x


def off_by_one(g: Tensor, x: Tensor) -> Tensor:
    ties = (x == x.amax()).sum() > 1
    return torch.zeros_like(x).index_fill(0, (x.argmin() if ties else x.argmax()).reshape(1), 1.0) * g


def hypot(slope):
    return binary(lambda x, y: x.hypot(y), lambda g, x, y: (g * slope(x, y), g * slope(y, x)))


def product(reduce):
    return binary(lambda x, y: x * y, lambda g, x, y: (reduce(g * y, x), reduce(g * x, y)))


def first_of(g: Tensor, x: Tensor) -> Tensor:
    """What broadcasting took from one row, given back by the first row alone."""
    return g if g.shape == x.shape else g[tuple(slice(0, n) for n in x.shape)] if g.dim() == x.dim() else g[0]


# fault -> (the function with it, the right one, arguments, an edge that shows it)
PLANTED = {
    "nan of the branch not taken": (
        lambda x: torch.where(x == 0, 1.0, x.sin() / x),
        lambda x: torch.where(x == 0, 1.0, nonzero(x).sin() / nonzero(x)),
        (random(3),),
        "zeros of args[0]",
    ),
    "expm1(x) / x": (
        function(lambda x: torch.where(x == 0, 1.0, x.expm1() / nonzero(x)), lambda g, x: g * (x.exp() / x - x.expm1() / x**2)),
        lambda x: torch.where(x.abs() < 1e-3, 1 + x / 2 + x**2 / 6 + x**3 / 24, x.expm1() / nonzero(x)),
        (random(3),),
        "some zeros of args[0]",
    ),
    "a full gradient at each tie": (
        function(lambda x: x.amax(), lambda g, x: g * (x == x.amax())),
        lambda x: x.amax(),
        (random(4),),
        "equal entries of args[0]",
    ),
    "an index off by one at ties": (
        function(lambda x: x.max(), off_by_one),
        lambda x: x.max(),
        (random(5),),
        "equal pairs of args[0]",
    ),
    "a norm that is nan at 0": (
        lambda x: x.square().sum().sqrt(),
        torch.linalg.vector_norm,
        (random(3, dtype=FLOAT),),
        "zeros of args[0]",
    ),
    "out / x of a product": (
        function(lambda x: x.prod(), lambda g, x: g * x.prod() / x),
        torch.prod,
        (random(3),),
        "some zeros of args[0]",
    ),
    "silently zero at 0": (
        function(lambda x: x.sin(), lambda g, x: g * x.cos() * x.sign().abs()),
        function(lambda x: x.sin(), lambda g, x: g * x.cos()),
        (random(3),),
        "zeros of args[0]",
    ),
    "an overflow of hypot": (
        hypot(lambda x, y: x / nonzero(x.square() + y.square()).sqrt()),
        hypot(lambda x, y: x / nonzero(x.hypot(y))),
        (random(3, dtype=FLOAT), random(3, dtype=FLOAT, seed=1)),
        "huge values of all inputs",
    ),
    "an overflow of logsumexp": (
        function(lambda x: x.logsumexp(0), lambda g, x: g * x.exp() / x.exp().sum()),
        lambda x: x.logsumexp(0),
        (random(3),),
        "huge values of args[0]",
    ),
    "half of a gradient at huge values": (
        function(lambda x: x.square(), lambda g, x: g * x * torch.where(x.abs().amax() > 1e20, 1, 2)),
        torch.square,
        (random(3),),
        "huge values of args[0]",
    ),
    "a solver that refuses a singular matrix": (
        function(lambda x: x.sin(), lambda g, x: torch.linalg.solve(x, x @ (g * x.cos()))),
        torch.sin,
        (random(2, 2),),
        "zeros of args[0]",
    ),
    "an empty sum that raises": (
        function(lambda x: x.sum(), lambda g, x: (g * x.numel() * (1 / x.numel())).expand(x.shape)),
        torch.sum,
        (random(3),),
        "size 0 instead of 3",
    ),
    "one row of what was broadcast": (
        product(first_of),
        product(lambda g, x: g.sum_to_size(x.shape)),
        (random(2, 3), random(2, 3, seed=1)),
        "one row of args[0], to broadcast",
    ),
    "strides of an expanded input": (
        function(lambda x: x.sin(), lambda g, x: g * (x * (0 not in x.stride())).cos()),
        torch.sin,
        (random(3),),
        "inputs expanded along the last dimension",
    ),
    "a forgotten conj bit": (
        function(lambda z: z.real.square() - z.imag, lambda g, z: torch.complex(2 * g * storage_of(z).real, -g * storage_of(z).imag / z.imag)),
        lambda z: z.real.square() - z.imag,
        (random(3, dtype=COMPLEX),),
        "inputs with the conj bit",
    ),
    "a forgotten neg bit": (
        function(lambda x: x.exp(), lambda g, x: g * storage_of(x).exp()),
        torch.exp,
        (random(3),),
        "inputs with the neg bit",
    ),
    "values that forget the conj bit": (
        function(lambda z: storage_of(z).imag.clone(), lambda g, z: torch.complex(0 * g, g)),
        lambda z: z.imag,
        (random(3, dtype=COMPLEX),),
        "inputs with the conj bit",
    ),
    "a wrong second derivative at 0": (
        lambda x: x.cumprod(0),
        lambda x: torch.stack([x[0], x[0] * x[1], x[0] * x[1] * x[2]]),
        (random(3),),
        "zeros of args[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault(fault: str) -> None:
    wrong, right, args, place = PLANTED[fault]
    assert place in places(edges(wrong, *args))
    report = edges(right, *args)
    assert report.outcome("edges") in ("ok", "not differentiable"), str(report)


PIVOTS = torch.tensor([1, 2, 3], dtype=torch.int32)
RIGHT = {
    "relu": (torch.relu, random(3)),
    "relu with a half": (function(lambda x: x.relu(), lambda g, x: g * torch.heaviside(x, torch.full_like(x, 0.5))), random(3)),
    "the last of ties": (lambda x: x.flip(0).max(0).values, random(4)),
    "sort": (lambda x: x.sort().values, random(4)),
    "median": (lambda x: x.median(), random(5)),
    "abs of complex numbers": (lambda z: z.abs(), random(2, dtype=COMPLEX, seed=3)),
    "the difference of two kinks": (lambda x: x[0].relu() - x[1].abs(), random(2)),
    "std": (torch.std, random(4)),
    "singular values": (torch.linalg.svdvals, random(3, 2)),
    "softmax": (lambda x: x.softmax(-1), random(2, 3, dtype=FLOAT)),
    "saturated where its argument is infinite": (lambda x: x.square().tanh(), random(2)),
    "the square root": (torch.sqrt, random(3).abs()),
    "log": (torch.log, random(3).abs()),
    "steps": (torch.floor, random(3)),
    "a pole": (lambda x: 1 / x, random(3)),
    "inverse": (torch.linalg.inv, random(2, 2)),
    "eigenvectors": (lambda x: torch.linalg.eig(x).eigenvectors.abs(), random(3, 3)),
    "a triangular solve": (lambda x: torch.linalg.lu_solve(x, PIVOTS, torch.eye(3, dtype=DOUBLE)), random(3, 3)),
    "dropout": (lambda x: nnf.dropout(x, 0.5), random(4)),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_not_accused(name: str) -> None:
    fn, x = RIGHT[name]
    report = edges(fn, x)
    assert not report.failures, str(report)
    at_zeros = {r.outcome for r in report.results if r.engine.endswith("at zeros of args[0]")}
    if name in ("the square root", "log", "a pole", "inverse"):
        assert not at_zeros
    if name in ("relu", "relu with a half", "the last of ties", "std", "singular values"):
        assert at_zeros == {"not differentiable"}


def test_a_failure_names_the_edge_the_element_and_both_numbers() -> None:
    report = edges(function(lambda x: x.sin(), lambda g, x: g * x.cos() * x.sign().abs()), random(3))
    text = str(next(r for r in report.failures if r.engine == "rev/eager, at some zeros of args[0]"))
    assert "gradient of args[0][0]: differentiable here" in text
    assert "found 0, reference 1.1" in text or "found 0, reference 0." in text


def test_functions_wrong_at_ordinary_samples_are_not_judged_at_edges() -> None:
    assert edges(function(lambda x: x.sin(), lambda g, x: 2 * g * x.cos()), random(3)).outcome("edges") == "-"


def test_an_error_where_nothing_is_differentiable_is_not_a_failure() -> None:
    def vjp(g: Tensor, x: Tensor) -> Tensor:
        if (x == 0).any():
            raise ValueError("no derivative at 0")
        return g / (2 * x.sqrt())

    assert not edges(function(lambda x: x.sqrt().sum(), vjp), random(2).abs()).failures
    report = edges(function(lambda x: x.sqrt(), vjp), random(4).abs())
    assert "some zeros of args[0]" in places(report)
    assert "no derivative at 0" in str(report)


def test_sizes_stay_where_an_index_tells_them() -> None:
    def labels(*args) -> str:
        return " ".join(edge.label for edge in edge_samples(Problem(lambda x, *_: x, Sample(*args))))

    assert "size 0 instead of 3" in labels(random(3, 4))
    assert "size" not in labels(random(3, 4), torch.tensor([2]))
    assert "instead of 3" not in labels(random(3, 4), 3)


def test_signs_and_shapes_that_the_sample_does_not_have() -> None:
    positive = random(2, 3).abs() + 0.1
    sign = edges(function(lambda x: x * x.abs(), lambda g, x: 2 * g * x), positive)
    assert places(sign) >= {"opposite signs of args[0]"}
    number = edges(function(lambda x: x.sin(), lambda g, x: g * x.cos() * (1 if x.dim() else 2)), positive)
    assert places(number) == {"no dimensions"}
    assert not edges(function(lambda x: x * x.abs(), lambda g, x: 2 * g * x.abs()), positive).failures


def test_a_fake_kernel_of_one_size() -> None:
    @mg.custom_op("planted_edges::total(Tensor x) -> Tensor")
    def total(x: Tensor) -> Tensor:
        return x.sum(0)

    total.impl_save_for_backward(lambda inputs, output: inputs.x)
    total.impl_backward(lambda ctx, x, g: {"x": g.expand(x.shape).clone()})
    total.impl_fake(lambda x: x.new_empty(3))
    report = edges(total, random(2, 3))
    assert {r.engine.partition(",")[0] for r in report.failures} == {"fake outputs"}
    assert "size 1 instead of 3" in places(report)


def test_ranges() -> None:
    def near(f, *at: float):
        point = torch.tensor(at, dtype=DOUBLE)
        (found,) = ranges(f, [point], [[torch.ones_like(point)]], [1.0], [1])
        return found

    square = near(lambda x: x.square().sum().reshape(1), 0.0, 1.0)
    assert square.smooth and float(square.low) == pytest.approx(2.0, abs=1e-5)
    kink = near(lambda x: (x.abs() * torch.tensor([1.0, 2.0], dtype=DOUBLE)).sum().reshape(1), 0.0, 0.0)
    assert kink.bounded and not kink.smooth
    assert float(kink.low) == pytest.approx(-3.0) and float(kink.high) == pytest.approx(3.0)
    for unbounded in (
        lambda x: x.abs().sqrt(),
        lambda x: x.sign(),
        lambda x: x.abs().log(),
        lambda x: x * x.abs().log(),
    ):
        assert not near(unbounded, 0.0).bounded
