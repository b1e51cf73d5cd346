"""The operators that run outside of compiled code: external kernels, and autograd's accumulation of gradients."""

import pytest
import torch
from helpers.programs import PROGRAMS
from torch.profiler import profile

import torch_manualgrad as mg
from torch_manualgrad.core import internals

# What inductor calls for each program, as it has no code of its own for it.
EXTERNAL = {
    "mlp": {"aten::mm", "aten::addmm"},
    "flow": {"aten::mm", "aten::addmm"},
    "attention": {"aten::bmm", "aten::baddbmm"},
    "layer_norm": {"aten::alias"},  # of an output that is another one or an input: no work
}
CALLS = "manualgrad_calls::"  # of compiled functions
ENGINE = "autograd::engine::evaluate_function: "


def gradient(outputs, inputs):
    """A call that computes the gradients of outputs, for cotangents of ones that are made before."""
    live = [o for o in outputs if o is not None and o.requires_grad]
    ones = [torch.ones_like(o) for o in live]
    return lambda: torch.autograd.grad(live, inputs, ones, create_graph=True, allow_unused=True)


def outermost(events):
    """The operators that no other operator has called, without sums of gradients."""
    found = set()
    for event in events:
        parent, inside = event.cpu_parent, False
        while parent is not None and not parent.name.startswith("autograd::"):
            inside = inside or ("::" in parent.name and not parent.name.startswith(CALLS))
            parent = parent.cpu_parent
        summed = event.name in ("aten::add", "aten::add_") and event.cpu_parent is not None
        summed = summed and event.cpu_parent.name.startswith(ENGINE)
        if "::" in event.name and not event.name.startswith(("autograd::", "torch::autograd", CALLS)) and not inside:
            if not summed:
                found.add(event.name)
    return found


@pytest.mark.parametrize(
    "name", ["mlp", *[pytest.param(n, marks=pytest.mark.slow) for n in ("layer_norm", "flow", "attention")]]
)
def test_only_external_kernels_run_outside_of_compiled_code(name, monkeypatch):
    # C++ calls kernels without the dispatcher: the profiler would see what they call, and not themselves
    monkeypatch.setattr(internals.inductor, "_is_inductors", lambda graph: False)
    function, inputs = PROGRAMS[name]
    torch.compiler.reset()
    inputs = [x.clone().requires_grad_() for x in inputs]
    with mg.override():
        compiled = mg.compile(function, dynamic=False, fullgraph=True)
        for _ in range(3):  # the second run saves what the second derivative reads
            found, step = set(), lambda: compiled(*inputs)
            for _ in range(3):
                with profile() as profiled:
                    result = step()
                found |= outermost(profiled.events())
                step = gradient(result if isinstance(result, tuple) else (result,), inputs)
    assert found <= EXTERNAL[name]
