"""What an opaque formula says of its results before it runs (dtypes, sizes, strides) is what they have.

The compiler plans by it: a graph of views of the results breaks where the strides are others.
"""

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import torch_manualgrad as mg

OPAQUE = [r for r in mg.rules.values() if any(f.kernels or f.in_python for f in r.formulas)]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: reversed_in_memory(x, 0),
    "rows": lambda x: reversed_in_memory(x, 1),
}
SAMPLES = 6


def reversed_in_memory(x, kept):
    """The same values, the dimensions in the opposite order in memory, except for so many of the last."""
    n = max(x.dim() - kept, 0)
    order = [*reversed(range(n)), *range(n, x.dim())]
    return x.permute(order).contiguous().permute(order)


def spread(found):
    return found[:: -(-len(found) // SAMPLES)]


def facts(x):
    """The stride of a dimension of size 0 or 1 has no meaning."""
    strides = tuple(n for n, size in zip(x.stride(), x.shape) if size > 1) if x.numel() else ()
    return x.dtype, tuple(x.shape), strides


class Compared(TorchDispatchMode):
    """Runs each of the package's operators on fake tensors, too."""

    def __init__(self):
        super().__init__()
        self.faults = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        real = func(*args, **kwargs)
        dense = all(x.layout is torch.strided for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if func.namespace == "manualgrad" and dense:
            with FakeTensorMode() as mode:
                fake_args, fake_kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                fake = func(*fake_args, **fake_kwargs)
            for i, (r, f) in enumerate(zip(tree_leaves(real), tree_leaves(fake), strict=True)):
                if isinstance(r, torch.Tensor) and facts(r) != facts(f):
                    self.faults[str(func), i] = f"says {facts(f)}, gives {facts(r)}"
        return real


def differentiate(probe, args, kwargs, layout):
    """Twice, with cotangents of this layout."""

    def leaf(x):
        return layout(x.detach()).requires_grad_() if x.is_floating_point() or x.is_complex() else x

    args, kwargs = tree_map_only(torch.Tensor, leaf, (args, kwargs))
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    outputs = tree_leaves(probe(*args, **kwargs))
    for _ in range(2):
        outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if not outputs:
            return
        cotangents = [layout(torch.ones_like(o)) for o in outputs]
        outputs = torch.autograd.grad(outputs, inputs, cotangents, create_graph=True, allow_unused=True)


@pytest.mark.parametrize("rule", OPAQUE, ids=lambda r: r.name)
def test_formulas_return_the_declared_shapes(rule):
    faults, ran = {}, 0
    for sample in spread(list(rule.samples(torch.float64, "cpu"))):
        for name, layout in LAYOUTS.items():
            with mg.override(rule), Compared() as mode, suppress(RuntimeError, NotImplementedError):
                # some operators refuse a layout, or have no derivative for each input
                differentiate(rule.probe, sample.args, sample.kwargs, layout)
                ran += 1
            faults |= {(name, *at): fault for at, fault in mode.faults.items()}
    assert ran
    assert not faults, faults
