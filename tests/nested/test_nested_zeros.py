"""Derivatives of nested tensors that PyTorch computes as zeros without memory, as that of sgn: no kernel may read them."""

import pytest
import torch
from helpers.thinning import label
from torch.nn import functional as F

import torch_manualgrad as mg

FUNCTIONS = {
    "abs": torch.abs,
    "sgn": torch.sgn,
    "x |x|": lambda x: x * x.abs(),
    "round": lambda x: torch.round(3 * x) * x,
    "relu": F.relu,
    "hardtanh": F.hardtanh,
    "threshold": lambda x: F.threshold(x, 0.4, 0.0),
    "hardsigmoid": F.hardsigmoid,
}
CASES = [(name, layout) for name in FUNCTIONS for layout in (torch.jagged, torch.strided)]
CASES.remove(("round", torch.strided))  # PyTorch has no kernel


@pytest.mark.parametrize("names", [(), ("*",)], ids=["improvements", "all"])
@pytest.mark.parametrize(("name", "layout"), CASES, ids=label)
def test_derivatives_to_third_order(name, layout, names):
    function = FUNCTIONS[name]
    torch.manual_seed(0)
    components = [torch.randn(n, 4, dtype=torch.float64) for n in (2, 3)]

    def derivatives(nested):
        xs = [x.clone().requires_grad_() for x in components]
        ys = function(torch.nested.as_nested_tensor(xs, layout=layout)).unbind() if nested else map(function, xs)
        total, found = sum(y.pow(4).sum() for y in ys), []
        for _ in range(3):
            if not total.requires_grad:
                break
            grads = torch.autograd.grad(total, xs, create_graph=True, materialize_grads=True)
            total = sum(g.pow(2).sum() for g in grads)
            found.append(grads)
        return found

    with mg.override(*names):
        found, expected = derivatives(True), derivatives(False)
    for f, e in zip(found, expected):
        torch.testing.assert_close(f, e)
    assert all(
        not g.any() for longer in (found, expected) for grads in longer[min(len(found), len(expected)) :] for g in grads
    )
