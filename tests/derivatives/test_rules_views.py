"""What a rule returns may be changed in place wherever what PyTorch returns may, and no output is a view of a temporary.

A gradient may be a view, as many of PyTorch's are: autograd detaches it before anyone sees it.
"""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from helpers.rules import RULES, calls, random_like, without_tangent

import torch_manualgrad as mg


def changed(outputs):
    """For each output whether it is a view, and whether it can be changed in place."""
    found = []
    for o in outputs:
        try:
            o.add_(1)
        except RuntimeError:
            found.append((o._is_view(), False))
        else:
            found.append((o._is_view(), True))
    return found


def observed(call):
    """The same of outputs, gradients and dual outputs, as far as PyTorch has them."""
    found = {}
    inputs = [x.clone().requires_grad_() for x in call.inputs]
    try:
        found["outputs"] = changed(call.outputs_of(call.rule.aten, inputs))
        outputs = [o for o in call(*inputs) if o.requires_grad]
        # 2.10 refuses an empty list of inputs with an error of another type
        grads = torch.autograd.grad(outputs, inputs, random_like(outputs), allow_unused=True) if inputs else []
        found["gradients"] = changed([g for g in grads if g is not None])
    except RuntimeError:
        pass
    with fwAD.dual_level():
        try:
            constant = without_tangent(call.rule)
            given = zip(call.names, call.inputs, random_like(call.inputs))
            duals = [x if n in constant else fwAD.make_dual(x, t) for n, x, t in given]
            duals = call.outputs_of(call.rule.aten, duals)
        except (RuntimeError, NotImplementedError):
            return found
        found["duals"] = changed(duals)
    return found


@pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs with dual tensors"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_results_of_rules_are_not_views(rule, dtype, graphs, monkeypatch):
    # once a graph with dual tensors was traced, every call takes the long way
    monkeypatch.setattr("torch_manualgrad.core.internals.functorch._tangents_in_graphs", graphs)
    for call in calls(rule, dtype):
        seen = []
        for scope in (nullcontext(), mg.override(rule)):
            with scope, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen.append(observed(call))
        stock, ours = seen
        if "fwd" in rule.gaps:  # where PyTorch may drop a tangent in silence
            stock.pop("duals", None)
        for what, expected in stock.items():
            for place, ((view, writable), (our_view, ours_writable)) in enumerate(zip(expected, ours[what])):
                assert ours_writable >= writable, (call, what, place)
                assert what == "gradients" or our_view <= view, (call, what, place)
