"""Faults put in on purpose: each turns its cell red, which without it is green."""

import functools
from collections.abc import Sequence

import pytest
import torch
from cells import FAILS, HOLDS, measure
from rows import rows
from ways import WAYS

import torch_manualgrad as mg
from torch_manualgrad.core import internals
from torch_manualgrad.core.engine import node
from torch_manualgrad.core.engine.derivative import Derivative
from torch_manualgrad.core.op import custom_op
from torch_manualgrad.core.override import compiled_calls
from torch_manualgrad.core.override.names import _choose
from torch_manualgrad.core.rule import Formula, Rule, formulas

NORM, EXP = "aten::linalg_vector_norm", "aten::linalg_matrix_exp"


@pytest.fixture
def plant(monkeypatch):
    """Put a rule in the place of the operator's own: its formulas as they are, or each through a function."""

    def put(name, vjp=None, jvp=None, **about):
        own = mg.rules[name]
        options = {
            "improves": own.improves, "source": own.source, "not_differentiable": own.not_differentiable,
            "samples": own.samples, "probe": own.probe, "defer_to_stock": own.defer_to_stock,
        } | about  # fmt: skip
        rule = Rule(
            name,
            {k: around(f, vjp) if vjp else f for k, f in own.vjp.items()},
            {k: around(f, jvp) if jvp else f for k, f in own.jvp.items()},
            **options,
        )
        monkeypatch.setitem(mg.rules._entries, name, rule)
        monkeypatch.setattr("torch_manualgrad.core.override.names._remembered", _choose)  # nobody has told the registry
        return rule

    return put


def around(f, change):
    """``change(f)`` under the names of f's parameters, by which a rule binds."""
    function = f.reference if isinstance(f, Formula) else f
    return functools.wraps(function)(change(function))


def outcomes(way, name):
    row = next(r for r in rows() if r.name == name)
    return {c.outcome for c in measure(WAYS[way], row, 1)}


def red(way, name):
    return FAILS in outcomes(way, name)


def after(change):
    """A formula whose result goes through ``change``."""

    def changed(f):
        def call(*args, **kwargs):
            found = f(*args, **kwargs)
            return tuple(map(change, found)) if isinstance(found, tuple) else change(found)

        return call

    return changed


def asks_for_a_value(g):
    return g * 1 if bool(g.abs().sum() >= 0) else g


def with_a_random_number(g):
    return g * (torch.rand(()) >= 0)


def with_a_warning(g):
    import warnings

    warnings.warn("a word too many", stacklevel=2)
    return g


def off_in_half_the_digits(g):
    return g * (1 + 1e-6)


FORMULAS = {
    "a value read on the host": (asks_for_a_value, ["is_grads_batched", "meta device", "make_fx, fake"]),
    "detached": (lambda g: g.detach(), ["plain", "is_grads_batched, second order", "create_graph and .grad"]),
    "a random number drawn": (with_a_random_number, ["state of the random generator"]),
    "a warning": (with_a_warning, ["warnings are errors"]),
    "wrong in the sixth digit": (off_in_half_the_digits, ["plain", "threads", "vmap", "func.grad"]),
    "nan": (lambda g: g * float("nan"), ["plain", "float32, scale 2^40"]),
}


@pytest.mark.parametrize("fault, way", [(f, w) for f, (_, ways) in FORMULAS.items() for w in ways])
def test_a_fault_in_a_formula_is_found(fault, way, plant):
    plant(NORM)
    assert not red(way, NORM)
    change = after(FORMULAS[fault][0])
    plant(NORM, vjp=change, jvp=change)
    assert red(way, NORM)


def test_no_conjugation_is_found(plant):
    """A formula that reads memory, as a kernel does, while its input carries the bit for conjugation."""

    def reads_memory(f):
        def call(*args, **kwargs):
            return f(*[torch.view_as_complex(_memory(a)) if _conjugated(a) else a for a in args], **kwargs)

        return call

    plant("aten::mm")
    assert not red("cotangent lazily conjugated", "aten::mm")
    plant("aten::mm", vjp=reads_memory)
    assert red("cotangent lazily conjugated", "aten::mm")


def _conjugated(x):
    return isinstance(x, torch.Tensor) and x.is_conj()


def _memory(x):
    return torch.view_as_real(x.conj())


def planted_methods(monkeypatch, change):
    """Autograd functions made of `EXP` from here on have other methods: ``change(name, method)``.

    Those of formulas stay, as they are kept for the life of the process.
    """
    made = node.function_class

    def function_class(derivative, *methods):
        if derivative.op is not mg.rules[EXP].aten:
            return made(derivative, *methods)
        return made(derivative, *[_named(m, change(m.__name__, m)) for m in methods])

    monkeypatch.setattr(node, "function_class", function_class)


def _named(method, changed):
    return changed if changed is method else functools.wraps(method)(changed)  # a method must not wrap itself


def guarded_backward(name, method):
    def inside(*args):
        with internals.below_autograd():
            return method(*args)

    return inside if name == "backward" else method


def kept_beside_autograd(name, method):
    """Residuals on the context itself, where no hook sees them and no change in place is caught."""

    def forward(ctx, *args):
        class Context:
            def __getattr__(self, key):
                return getattr(ctx, key)

            def __setattr__(self, key, value):
                setattr(ctx, key, value)

            def save_for_backward(self, *tensors):
                ctx.kept = tensors

        return method(Context(), *args)

    def backward(ctx, *grads):
        class Context:
            saved_tensors = ctx.kept

            def __getattr__(self, key):
                return getattr(ctx, key)

        return method(Context(), *grads)

    return {"forward": forward, "backward": backward}.get(name, method)


def writes_to_the_cotangent(name, method):
    def backward(ctx, *grads):
        found = method(ctx, *grads)
        with torch.no_grad():
            for g in grads:
                if g is not None and not g.is_inference():
                    g.mul_(0)
        return found

    return backward if name == "backward" else method


METHODS = {
    "saved tensors read below autograd": (
        guarded_backward,
        [
            "checkpoint, alone",
            "checkpoint, last",
            "saved tensors, hooks that differentiate",
        ],
    ),
    "residuals kept beside autograd": (kept_beside_autograd, ["in place on an input before the backward"]),
    "a backward that writes to its cotangent": (writes_to_the_cotangent, ["cotangent expanded"]),
}


@pytest.mark.parametrize("fault, way", [(f, w) for f, (_, ways) in METHODS.items() for w in ways])
def test_a_fault_in_the_autograd_function_is_found(fault, way, plant, monkeypatch):
    plant(EXP)
    assert not red(way, EXP)
    planted_methods(monkeypatch, METHODS[fault][0])
    plant(EXP)
    with compiled_calls.in_python():  # whose autograd function it is
        assert red(way, EXP)


def planted_forward(monkeypatch, change):
    run = Derivative.run_below

    def run_below(self, values):
        return change(self, values, run(self, values))

    monkeypatch.setattr(Derivative, "run_below", run_below)


def a_view(derivative, values, result):
    return result.view(result.shape) if derivative.op is mg.rules["aten::mm"].aten else result


def another_bit(derivative, values, result):
    if derivative.op is not mg.rules[EXP].aten:
        return result
    return torch.nextafter(result, result + 1) if not result.is_complex() else result * (1 + 2e-16)


FORWARDS = {
    "a view returned": (a_view, "in place on the output", "aten::mm"),
    "another last bit": (another_bit, "plain", EXP),
}


@pytest.mark.parametrize("fault", FORWARDS)
def test_a_fault_in_the_forward_is_found(fault, plant, monkeypatch):
    change, way, name = FORWARDS[fault]
    assert HOLDS in outcomes(way, name)
    planted_forward(monkeypatch, change)
    plant(name)  # a rule made now, whose functions are made of what was planted
    with compiled_calls.in_python():
        assert red(way, name)


SWITCHES = {
    "no conjugation under a mode": (custom_op, "bits_unread", "TorchDispatchMode", EXP),
    "values are asked for": (formulas, "values_hidden", "is_grads_batched", "aten::_linalg_svd"),
}


@pytest.mark.parametrize("fault", SWITCHES)
def test_a_fault_in_what_formulas_go_by_is_found(fault, monkeypatch):
    module, name, way, row = SWITCHES[fault]
    assert not red(way, row)
    monkeypatch.setattr(module, name, lambda *_: False)
    assert red(way, row)


@pytest.mark.slow
def test_that_compiled_autograd_asks_a_function_for_its_key(monkeypatch):
    monkeypatch.delattr(internals.SingleLevelFunction, "_compiled_autograd_key")
    with compiled_calls.in_python():  # whose autograd function it is
        assert red("compiled autograd", NORM)


def test_every_way_is_green_on_some_row():
    """A way in which stock fails everywhere proves nothing."""
    names: Sequence[str] = (NORM, "aten::mm", EXP, "aten::linalg_inv_ex")
    for way in WAYS.values():
        if way.cost == "cheap":
            assert any(HOLDS in outcomes(way.name, name) for name in names), way.name
