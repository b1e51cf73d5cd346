"""Modules, references for the forward, and what a check costs as its input grows."""

from __future__ import annotations

import pytest
import torch
from helpers.planted import columns
from helpers.tensors import random
from torch import Tensor, nn

from torch_manualgrad.testing import CHECKS, Sample, check

FIRST = {"modes": ("rev", "fwd"), "raise_on_failure": False}


class Scaled(nn.Module):
    """x -> scale f(x) + shift, with a counter that it updates."""

    def __init__(self, f=torch.tanh) -> None:
        super().__init__()
        self.f = f
        self.scale = nn.Parameter(random(3))
        self.shift = nn.Parameter(random(3, seed=1), requires_grad=False)
        self.register_buffer("offset", torch.ones(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scale * self.f(x) + self.shift + self.offset


def alone(report) -> set[str]:
    """The inputs that were differentiated by themselves."""
    return {r.engine.split(", ")[1].removesuffix(" alone") for r in report.results if "alone" in r.engine}


def test_the_parameters_of_a_module_are_inputs() -> None:
    module = Scaled()
    report = check(module, [(random(2, 3),)])
    assert alone(report) == {"args[0]", "scale"}  # neither what is frozen nor buffers
    assert {r.sample for r in report.results} == {"(f64[2, 3])"}
    assert int(module.calls) == 0
    assert module.scale.grad is None


def test_a_module_in_single_precision() -> None:
    assert check(nn.Linear(3, 2), [(random(4, 3).float(),)])
    nested = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))
    assert alone(check(nested, [(random(4, 3).float(),)])) == {
        "args[0]",
        *("0.weight", "0.bias", "2.weight", "2.bias"),
    }


def test_a_module_that_draws_random_numbers() -> None:
    assert check(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), [(random(5, 3).float(),)], modes=("rev",))


def test_marked_inputs_and_the_parameters() -> None:
    marked = Sample(random(3).requires_grad_(), random(3, seed=1))
    module = nn.Bilinear(3, 3, 2).double()
    assert alone(check(module, [marked], checks=())) == {"args[0]", "weight", "bias"}


def test_a_module_of_integers_and_one_without_anything_to_differentiate() -> None:
    table = nn.Embedding(5, 2).double()
    assert check(table, [(torch.tensor([1, 3]),)], checks=())
    table.requires_grad_(False)
    assert check(table, [(torch.tensor([1, 3]),)], checks=()).outcome("rev") == "-"


def test_a_wrong_derivative_of_a_parameter() -> None:
    class Product(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, 2 * g * x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(random(3))

        def forward(self, x: Tensor) -> Tensor:
            return Product.apply(x, self.weight)

    report = check(Layer(), [(random(3, seed=1),)], modes=("rev",), checks=(), raise_on_failure=False)
    assert {r.engine for r in report.failures} == {"eager", "func", "eager, weight alone"}


def test_a_keyword_with_the_name_of_a_parameter() -> None:
    class Clash(nn.Linear):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

    report = check(Clash(2, 2), [Sample(random(2), weight=random(2))], raise_on_failure=False)
    assert "'weight' is the name of a parameter and of a keyword" in str(report)


# a reference of the forward ------------------------------------------------------------------------------------------

REFERENCES = {
    "right": (lambda x: 1 / (1 + (-x).exp()), ""),
    "values": (lambda x: x.sigmoid() + 1e-6, "output 0"),
    "shape": (lambda x: x.sigmoid()[None], "output 0: torch.float64 (3,), reference torch.float64 (1, 3)"),
    "dtype": (lambda x: x.sigmoid().float(), "output 0: torch.float64 (3,), reference torch.float32 (3,)"),
    "count": (lambda x: (x, x), "AssertionError: 1 outputs, the reference has 2"),
}


@pytest.mark.parametrize("fault", REFERENCES)
def test_a_reference_of_the_forward(fault: str) -> None:
    reference, detail = REFERENCES[fault]
    report = check(torch.sigmoid, [(random(3),)], reference=reference, **FIRST, checks=("forward",))
    assert report.outcome("forward") == {"right": "ok", "count": "raises"}.get(fault, "wrong")
    assert [r.detail for r in report.failures] == [detail] * (fault != "right")
    assert columns(report) <= {"forward"}


def test_a_reference_has_the_tolerance_of_the_dtype() -> None:
    low = check(torch.sigmoid, [(random(3).bfloat16(),)], reference=lambda x: x.double().sigmoid().bfloat16() * 1.01)
    assert low.outcome("forward") == "ok"


def test_a_reference_of_a_module_has_no_parameters() -> None:
    module = Scaled()

    def reference(x: Tensor) -> Tensor:
        return module.scale * x.tanh() + module.shift + 1

    assert check(module, [(random(2, 3),)], reference=reference).outcome("forward") == "ok"
    wrong = check(Scaled(torch.sin), [(random(2, 3),)], reference=reference, raise_on_failure=False)
    assert columns(wrong) == {"forward"}


# cost ----------------------------------------------------------------------------------------------------------------


def test_the_number_of_calls_does_not_grow_with_the_input() -> None:
    def calls(size: int) -> int:
        count = 0

        def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal count
            count += 1
            return (x * y).sin(), x.exp()

        check(fn, [(random(size), random(size, seed=1))], checks=(*CHECKS, "third order", "precision", "autocast"))
        return count

    few, many = calls(10), calls(10_000)
    assert many <= 1.25 * few  # a few steps more or less until finite differences agree


@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_a_layer_of_a_million_parameters(kind: str) -> None:
    def calls(width: int) -> int:
        count = 0

        def note(*_) -> None:
            nonlocal count
            count += 1

        layer = nn.Linear(width, width) if kind == "linear" else nn.MultiheadAttention(width // 2, 4)
        layer.register_forward_hook(note)
        sample = (random(2, width),) if kind == "linear" else tuple(random(n, width // 2) for n in (2, 3, 3))
        assert check(layer, [tuple(x.float() for x in sample)], modes=("rev", "fwd", "rev-rev"))
        return count

    assert calls(1000) <= 1.25 * calls(16)


class Tied(nn.Module):
    """One submodule twice, a parameter of one submodule in another, and a buffer of both."""

    def __init__(self) -> None:
        super().__init__()
        first, last = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        last.weight = first.weight
        first.register_buffer("scale", torch.full((3,), 2.0, dtype=torch.float64))
        last.register_buffer("scale", first.scale)
        self.layers = nn.Sequential(first, nn.Tanh(), first, last)

    def forward(self, x):
        return self.layers(x) * self.layers[3].scale


def test_a_module_has_its_own_tensors_afterwards():
    module, x = Tied(), torch.rand(2, 3, dtype=torch.float64)
    before = [
        (id(m), key, id(p)) for m in module.modules() for d in (m._parameters, m._buffers) for key, p in d.items()
    ]
    report = check(module, [(x,)], checks=("leaks", "meta", "vmap"))
    assert report.ok
    after = [(id(m), key, id(p)) for m in module.modules() for d in (m._parameters, m._buffers) for key, p in d.items()]
    assert before == after and isinstance(module.layers[0].weight, nn.Parameter)
