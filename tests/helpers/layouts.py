"""The layouts of what a rule's formulas return, beside those that they announce for tensors without data."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as fwAD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_manualgrad as mg
from helpers.tensors import is_dense_differentiable
from torch_manualgrad.core.rule import Rule, Sample


class Layouts(TorchDispatchMode):
    """Compares what formulas return with what they return for tensors without data: the compiler relies on it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.namespace == "manualgrad":
            known = func(*tree_map_only(torch.Tensor, lambda x: x.to("meta"), args), **(kwargs or {}))
            assert [layout(x) for x in tree_leaves(found)] == [layout(x) for x in tree_leaves(known)], func
        return found


def layout(x):
    return None if x is None else (x.dtype, x.shape, [s for n, s in zip(x.shape, x.stride()) if n > 1 and x.numel()])


def compare_layouts(rule: Rule, sample: Sample) -> None:
    """In the backward and the tangent of one call."""
    with mg.override(rule), Layouts():
        args = tree_map_only(
            torch.Tensor, lambda a: a.detach().requires_grad_() if is_dense_differentiable(a) else a, sample.args
        )
        inputs = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor) and a.requires_grad]
        if not inputs:  # all are sparse
            return
        outputs = [o for o in tree_leaves(rule.probe(*args, **sample.kwargs)) if o.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.randn_like(o) for o in outputs], allow_unused=True)
        if "fwd" not in rule.gaps:
            with fwAD.dual_level():
                duals = tree_map_only(
                    torch.Tensor, lambda a: fwAD.make_dual(a.detach(), a.detach()) if a.requires_grad else a, args
                )
                rule.probe(*duals, **sample.kwargs)
