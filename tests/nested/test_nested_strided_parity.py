"""PyTorch's own calls on strided nested tensors: what returns without override returns the same under it.

The strided class has no database of samples in PyTorch: here every call meets components of many shapes, contiguous and
transposed, with and without a gradient. PyTorch's own backward ends the process in some of these; such calls are compared
with a loop over the components in test_nested_probe.py.
"""

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.tensors import random
from torch import Tensor

import torch_manualgrad as mg


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")


SHAPES = {
    "rows": ((2, 4), (3, 4)),
    "two ragged": ((2, 3), (4, 5)),
    "last": ((3, 2), (3, 4)),
    "heads": ((2, 3, 4), (2, 5, 4)),
    "ragged heads": ((2, 3, 4), (3, 5, 4)),
    "equal": ((2, 4), (2, 4)),
    "one": ((3, 4),),
    "empty": ((2, 4), (0, 4)),
    "vectors": ((2,), (5,)),
    "four dims": ((2, 3, 2, 4), (2, 5, 2, 4)),
}


def padded(x, more):
    return torch.nested.to_padded_tensor(x, 0.5, (x.size(0) + more, *[7] * (x.dim() - 1)))


CALLS = {
    "softmax": lambda x, y: x.softmax(-1),
    "softmax of dim 1": lambda x, y: torch.softmax(x, 1),
    "relu": lambda x, y: F.relu(x),
    "gelu": lambda x, y: F.gelu(x),
    "gelu by tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "tanh, sin": lambda x, y: x.tanh() + x.sin(),
    "add": lambda x, y: x + y,
    "add, alpha": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "numbers": lambda x, y: (x * 2.5 + 2) / 2 - 1,
    "tensor of no dims": lambda x, y: x * torch.tensor(2.5, dtype=torch.float64),
    "linear": lambda x, y: F.linear(x, random(5, 4), random(5)),
    "layer_norm": lambda x, y: F.layer_norm(x, (4,), random(4), random(4)),
    "product": lambda x, y: x @ y.transpose(-1, -2),
    "bmm": lambda x, y: torch.bmm(x, y.transpose(1, 2)),
    "dropout": lambda x, y: F.dropout(x, 0.5),
    "dropout, not training": lambda x, y: F.dropout(x, 0.5, False),
    "sum, keepdim": lambda x, y: x.sum(-1, keepdim=True),
    "unbind": lambda x, y: x.unbind(),
    "select": lambda x, y: x[-1],
    "chunk": lambda x, y: x.chunk(2, -1),
    "transpose": lambda x, y: x.transpose(1, -1) * 2,
    "contiguous": lambda x, y: x.transpose(-1, -2).contiguous() * 2,
    "reshape": lambda x, y: x.reshape(x.size(0), -1, 2, 2),
    "view": lambda x, y: x.view(x.size(0), -1, 2, 2),
    "padded": lambda x, y: x.to_padded_tensor(0.5),
    "padded to more": lambda x, y: padded(x, 0),
    "padded to more components": lambda x, y: padded(x, 2),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y, x),
    "attention, heads": lambda x, y: F.scaled_dot_product_attention(*[z.transpose(1, 2) for z in (x, y, x)]),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, 0.0) * 2,
    "cat": lambda x, y: torch.cat([x, y], 0) * 2,
    "float": lambda x, y: (x.float() * 2).softmax(-1),
    "in place": lambda x, y: (x * 1).add_(y).mul_(2).relu_(),
}


def outcome(call, shapes, transposed, tracked):
    """(components, gradients), or what was raised."""

    def made(seed):
        leaves = []
        for i, shape in enumerate(shapes):
            stored = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
            leaves.append(random(*stored, seed=seed + i).requires_grad_(tracked))
        x = torch.nested.as_nested_tensor(leaves)
        return (x.transpose(-1, -2) if transposed else x), leaves

    try:
        (x, of_x), (y, of_y) = made(0), made(10)
        torch.manual_seed(0)
        result = call(x, y)
        parts = []
        for r in [result] if isinstance(result, Tensor) else result:
            parts += [torch.tensor([len(r.unbind())]), *r.unbind()] if r.is_nested else [r]
    except Exception as error:
        return error, None
    needed = [p for p in parts if p.requires_grad]
    if not needed:
        return parts, None
    try:
        loss = sum((p.double().sin() * 1.5).sum() for p in needed)
        return parts, torch.autograd.grad(loss, [*of_x, *of_y], allow_unused=True)
    except Exception as error:
        return parts, error


@pytest.mark.parametrize("name", CALLS)
def test_parity(name):
    compared = 0
    for shapes in SHAPES.values():
        for transposed in (False, True) if len(shapes[0]) > 1 else (False,):
            for tracked in (True, False):
                found = []
                for override in (contextlib.nullcontext(), mg.override("nested")):
                    with override:
                        found.append(outcome(CALLS[name], shapes, transposed, tracked))
                (stocks, stock_grads), (ours, grads) = found
                if isinstance(stocks, Exception):
                    continue
                if isinstance(ours, Exception):
                    raise ours
                compared += 1
                tolerance = dict.fromkeys(("rtol", "atol"), 1e-5 if name == "float" else 1e-9)
                torch.testing.assert_close(ours, stocks, equal_nan=True, **tolerance)
                if stock_grads is None or isinstance(stock_grads, Exception):
                    continue
                if isinstance(grads, Exception):
                    raise grads
                for g, s in zip(grads, stock_grads, strict=True):
                    assert (g is None) == (s is None)
                    torch.testing.assert_close(g, s, equal_nan=True, **tolerance)
    assert compared
