"""Calls on PyTorch's nested tensors, which override has several ways for, and the same by dense torch."""

import pytest
import torch
import torch.nn.functional as F

from helpers.tensors import random

WIDTH = 4
LENGTHS = (2, 5, 0, 3)
W, B = random(WIDTH, seed=7), random(WIDTH, seed=8)
MATRIX = random(3, WIDTH, seed=9)
CALLS = {
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), W, B),
    "layer_norm, no weight": lambda x: F.layer_norm(x, (WIDTH,)),
    "linear": lambda x: F.linear(x, MATRIX),
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "numbers": lambda x: (x * 2.5 + 1) / 2 - 1,
    "square": lambda x: x * x,
    "itself": lambda x: x + x / (x * x + 1),
}


def normalized(x):
    d = x - x.mean(-1, keepdim=True)
    return d * (d.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


EXACT = {
    "layer_norm": lambda x: normalized(x) * W + B,
    "layer_norm, no weight": normalized,
    "silu": lambda x: x * x.sigmoid(),
}
calls = pytest.mark.parametrize("name", CALLS)


def components(seed=0, lengths=LENGTHS):
    return [random(n, WIDTH, seed=seed + i) for i, n in enumerate(lengths)]


def nest(parts, layout=torch.strided):
    return torch.nested.nested_tensor(parts, layout=layout)


def close(found, expected):
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=1e-9, atol=1e-9)


def dense_gradients(call, parts, cotangents, along=None):
    """The components' gradients, or those of their inner product with ``along``."""
    leaves = [p.clone().requires_grad_() for p in parts]
    first = torch.autograd.grad([call(p) for p in leaves], leaves, cotangents, create_graph=along is not None)
    if along is None:
        return first
    tracked = [(g, a) for g, a in zip(first, along) if g.requires_grad]
    if not tracked:
        return None
    return torch.autograd.grad([g for g, _ in tracked], leaves, [a for _, a in tracked], materialize_grads=True)


def cotangents_of(call, parts):
    return [random(*call(p).shape, seed=50 + i) for i, p in enumerate(parts)]


def gradients_twice(results, leaves):
    loss = sum((r.sin() * (1 + i)).sum() for i, r in enumerate(results))
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    parts = [p for g in first for p in (g.unbind() if g.is_nested else [g])]
    second = torch.autograd.grad(sum(p.cos().sum() for p in parts), leaves)
    return [*parts, *(p for g in second for p in (g.unbind() if g.is_nested else [g]))]
