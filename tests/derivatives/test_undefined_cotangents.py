"""A backward that is reached with nothing but undefined cotangents gives undefined gradients, as PyTorch's do."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_manualgrad as mg


@pytest.mark.parametrize("rule", mg.rules.values(), ids=lambda r: r.name)
def test_all_cotangents_undefined(rule):
    sample = next(iter(rule.samples(torch.float64, "cpu")))
    given = {name for names in rule.vjp for name in names}

    def leaf(x, name):
        return x.detach().requires_grad_(name in given and x.is_floating_point() and x.layout is torch.strided)

    values = [
        tree_map_only(torch.Tensor, lambda x, name=name: leaf(x, name), value)
        for name, value in zip(rule.signature.names, rule.signature.bind(sample.args, sample.kwargs))
    ]
    inputs = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    args, kwargs = rule.signature.split(values)
    with mg.override(rule):
        outputs = [
            o for o in tree_leaves(rule.aten(*args, **kwargs)) if isinstance(o, torch.Tensor) and o.requires_grad
        ]
    outputs = [o for o in outputs if o.layout is torch.strided]
    undefined = [torch._C._functions.UndefinedGrad()(o).abs().sum() for o in outputs]
    if undefined:
        found = torch.autograd.grad(sum(undefined), inputs, allow_unused=True)
        assert all(g is None or not g.count_nonzero() for g in found)
