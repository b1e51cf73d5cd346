"""Where PyTorch's gradient can be differentiated again, so can ours: programs do that even where the result is zero."""

import contextlib
import itertools

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import torch_manualgrad as mg
from torch_manualgrad.core.schema import is_differentiable

RULES = [rule for rule in mg.rules.values() if rule.samples is not None and not rule.sparse]
# the derivative is constant, and PyTorch's graph contains the input nevertheless: its second derivative is zeros there, ours None
CONSTANT = {
    "aten::grid_sampler_2d_backward": "the nearest neighbour",
    "aten::_grid_sampler_2d_cpu_fallback_backward": "the nearest neighbour",
    "aten::grid_sampler_3d_backward": "the nearest neighbour",
    "aten::index_reduce": "of self in a product that leaves self out",
}
OVERRIDES = {"override()": (), "*": ("*",)}


def depends(rule, sample, names):
    """For each input of a call, whether its gradient, and its second derivative, depend on it or another input."""
    torch.manual_seed(0)
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (sample.args, sample.kwargs))
    given = {**dict(zip(rule.signature.names, args)), **kwargs}
    with_vjp = [given.get(name) for names_of_vjp in rule.vjp for name in names_of_vjp]
    inputs = [x for x in pytree.tree_leaves(with_vjp) if isinstance(x, Tensor) and is_differentiable(x)]
    with contextlib.nullcontext() if names is None else mg.override(*names):
        for x in inputs:
            x.requires_grad_()
        found = (rule.probe or rule.aten)(*args, **kwargs)
        outputs = [y for y in pytree.tree_leaves(found) if isinstance(y, Tensor) and y.requires_grad]
        if not outputs:
            return []
        ones = [torch.ones_like(y) for y in outputs]  # which do not depend on the inputs
        gradients = torch.autograd.grad(outputs, inputs, ones, create_graph=True, allow_unused=True)
        again = [g for g in gradients if g is not None and g.requires_grad]
        seconds = [None] * len(inputs)
        if again:
            seconds = torch.autograd.grad(again, inputs, [torch.ones_like(g) for g in again], allow_unused=True)
    return [*(g is not None and g.requires_grad for g in gradients), *(h is not None for h in seconds)]


@pytest.mark.parametrize("names", OVERRIDES.values(), ids=OVERRIDES.keys())
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_second_derivatives_that_pytorch_has(rule, names):
    lost = []
    for sample in itertools.islice(rule.samples(torch.float64, "cpu"), 3):
        try:
            stock = depends(rule, sample, None)
        except (RuntimeError, NotImplementedError):
            continue
        if not stock:  # PyTorch's result has no history
            continue
        ours = depends(rule, sample, names)
        assert len(ours) == len(stock)
        if any(s and not o for s, o in zip(stock, ours)):
            lost.append(sample)
    assert bool(lost) == (rule.name in CONSTANT), lost
