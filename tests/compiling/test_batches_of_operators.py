"""The gradients of PyTorch's operators, compiled: a batch of them next to one after another.

PyTorch batches some operators wrongly that a traced graph calls, but the uncompiled function does not.
"""

import warnings

import pytest
import torch
from helpers.thinning import every, label
from torch.func import grad, vmap
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torch_manualgrad as mg

F64 = torch.float64
OPERATORS = [info for info in op_db if info.supports_autograd and F64 in info.dtypes]


def small(x):
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and x.is_floating_point() and x.numel() <= 400


def loss_of(info, sample):
    def loss(x, *others):
        given = iter(others)
        args = [next(given) if small(a) else a for a in sample.args]
        total = torch.zeros((), dtype=F64)
        for y in tree_leaves(info.op(x, *args, **sample.kwargs)):
            if isinstance(y, torch.Tensor) and (y.is_floating_point() or y.is_complex()):
                total = total + (y.abs() if y.is_complex() else y).square().sum()
        return total

    return loss


@pytest.mark.parametrize("info", every(25, OPERATORS), ids=label)
def test_a_batch_of_gradients(info):
    for sample in list(info.sample_inputs("cpu", F64, requires_grad=False))[:40:9][:3]:
        if not small(sample.input):
            continue
        values = [sample.input, *[a for a in sample.args if small(a)]]
        batches = [torch.stack([x.detach(), 1.25 * x.detach()]) for x in values]
        loss, places = loss_of(info, sample), tuple(range(len(values)))
        with warnings.catch_warnings(), mg.override():
            warnings.simplefilter("ignore")
            try:
                vmap(grad(loss, places))(*batches)
                expected = [grad(loss, places)(*[b[i].clone() for b in batches]) for i in range(2)]
            except (RuntimeError, NotImplementedError, ValueError):  # PyTorch cannot batch it
                continue
            found = vmap(grad(mg.compile(loss, lowering="eager"), places))(*batches)
        for k in places:
            wanted = torch.stack([e[k] for e in expected])
            torch.testing.assert_close(found[k], wanted, rtol=1e-7, atol=1e-9, equal_nan=True)
