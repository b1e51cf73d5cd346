"""A norm that csrc/calls serves, how many calls it served, and which nodes of a graph are PyTorch's."""

from __future__ import annotations

import pytest
import torch

from torch_manualgrad.core.override import compiled_calls

NORM = "aten::linalg_vector_norm"
norm = torch.linalg.vector_norm


def vector(seed=0, n=5, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64, **options).requires_grad_()


def is_pytorchs(node):
    """Whether a node of a graph is PyTorch's; a rule's has the same name."""
    return type(node) is getattr(torch._C._functions, type(node).__name__, None)


def names_of_nodes(node):
    """The names of this node of a graph and of all nodes behind it, one for each way to it."""
    found, todo = [], [node]
    while todo:
        node = todo.pop()
        found.append(node.name())
        todo += [n for n, _ in node.next_functions if n is not None]
    return found


def made(function):
    """What ``function`` returns, and (plain calls, backwards compiled, backwards in Python) that it made."""
    before = compiled_calls.counts()
    result = function()
    return result, tuple(now - then for now, then in zip(compiled_calls.counts(), before))


needs_library = pytest.mark.skipif(not compiled_calls.loaded(), reason="no library for this torch")
