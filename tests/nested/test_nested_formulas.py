"""The derivatives of operators on ragged batches, as formulas under ATen's names."""

import pytest
import torch
from helpers.ragged import SINGLE, ragged, values_of
from helpers.tensors import random, same

import torch_manualgrad as mg
import torch_manualgrad.nested as nested
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check


def cotangents(outputs):
    return [random(*o.shape, seed=20 + i) for i, o in enumerate(outputs)]


@pytest.mark.parametrize("name", SINGLE)
def test_formulas_are_the_derivatives(name):
    r = ragged(name)
    v, ragged_dim = r.values.clone().requires_grad_(), r.ragged_dims[0]
    x = r.like(v)

    def compare(outputs, formula):
        outputs = outputs if isinstance(outputs, list) else [outputs]
        for missing in (None, 0):
            grads = [None if i == missing else g for i, g in enumerate(cotangents(outputs))]
            used = [(o, g) for o, g in zip(outputs, grads) if g is not None]
            if used:
                (expected,) = torch.autograd.grad([o for o, _ in used], v, [g for _, g in used], retain_graph=True)
                same(formula(grads), expected)

    for dim in range(r.dim()):
        for index in (0, -1):
            if dim != ragged_dim or min(r.lengths) > 0:
                selected = values_of(nested.select(x, dim, index))
                compare(
                    selected,
                    lambda g: (
                        g[0]
                        if g[0] is None
                        else mg.ops["_nested_select_backward"](g[0], v.detach(), r.offsets, dim, index, ragged_dim)
                    ),
                ) if selected.numel() else None
        if dim == ragged_dim:
            continue
        chunks = nested.chunk(x, 2, dim)
        compare(
            [c.values for c in chunks],
            lambda g: mg.ops["chunk_backward_nested"](g, v.detach(), r.offsets, 2, dim, ragged_dim),
        )
        size = r.batch if dim == 0 else r.shape[dim]
        sizes = [1, size - 1]
        pieces = nested.split_with_sizes(x, sizes, dim)
        compare(
            [p.values for p in pieces],
            lambda g: mg.ops["_nested_split_with_sizes_backward"](g, sizes, dim, v.detach(), r.offsets, ragged_dim),
        )
    compare(x.components(), lambda g: mg.ops["unbind_backward_nested_jagged"](g, v.detach(), r.offsets, 0, ragged_dim))


def test_unbind_backward_of_a_flat_buffer():
    r = ragged("outer two")
    v = r.values.clone().requires_grad_()
    parts = r.like(v).components()
    g = cotangents(parts)
    for grads in (g, [None, g[1]], [g[0], None], [None, None]):
        expected = sum(
            (torch.autograd.grad(p, v, h, retain_graph=True)[0] for p, h in zip(parts, grads) if h is not None),
            torch.zeros_like(v),
        )
        same(mg.ops["unbind_backward_nested"](grads, r.component_sizes(), 0, v.detach()), expected)


@pytest.mark.parametrize("name", ["first", "vector", "one"])
def test_from_padded_backward(name):
    r = ragged(name)
    padded = r.to_padded().requires_grad_()
    values = Ragged.from_padded(padded, r.lengths).values
    g = random(*values.shape, seed=3)
    same(mg.ops["_nested_from_padded_backward"](g, padded, r.offsets), torch.autograd.grad(values, padded, g)[0])


def test_from_padded_backward_with_heads():
    """As torch's _nested_from_padded with fuse_transform_0213, which is differentiated by it."""
    heads = random(2, 3, 4, 5).requires_grad_()
    lengths = torch.tensor([[2, 15], [4, 15]])
    out = torch.ops.aten._nested_from_padded(heads, lengths, True)
    g = random(6, 15, seed=1)
    r = Ragged(g, torch.tensor([0, 2, 6]), (2, None, 15))
    made = mg.ops["_nested_from_padded_backward"](g, heads, r.offsets, True)
    same((made * heads).sum(), (g.flatten() * out.values()).sum())
    again = Ragged.from_padded(made.transpose(1, 2).flatten(2), r.lengths)
    same(again.values, g)


def test_formulas_in_every_mode():
    r = ragged("middle")
    ops, g = mg.ops, cotangents(ragged("middle").components())
    select = nested.select(r, 0, -1)
    check(lambda g: ops["_nested_select_backward"](g, r.values, r.offsets, 0, -1, 2), [Sample(select)])
    check(lambda g: ops["_nested_select_backward"](g, r.values, r.offsets, 2, -1, 2), [Sample(nested.select(r, 2, -1))])
    check(lambda *g: ops["unbind_backward_nested_jagged"](g, r.values, r.offsets, 0, 2), [Sample(*g)])
    check(lambda *g: ops["unbind_backward_nested"](g, r.component_sizes(), 0, r.flat()), [Sample(*g)])
    pieces = [p.values for p in nested.chunk(r, 2, 3)]
    check(lambda *g: ops["chunk_backward_nested"](g, r.values, r.offsets, 2, 3, 2), [Sample(*pieces)])
    check(lambda *g: ops["_nested_split_with_sizes_backward"](g, [1, 1], 3, r.values, r.offsets, 2), [Sample(*pieces)])
    r = ragged("first")
    check(lambda g: ops["_nested_from_padded_backward"](g, r.to_padded(), r.offsets), [Sample(r.values)])


def test_formulas_refuse():
    r, ops = ragged("first"), mg.ops
    with pytest.raises(IndexError, match="index: 3"):
        ops["_nested_select_backward"](r.values, r.values, r.offsets, 0, 3)
    with pytest.raises(IndexError, match="ragged_dim: 3"):
        ops["_nested_select_backward"](r.values, r.values, r.offsets, 0, 0, 3)
    with pytest.raises(ValueError, match="dim: 1 is the ragged dim"):
        ops["_nested_split_with_sizes_backward"]([None], [1], 1, r.values, r.offsets)
    with pytest.raises(ValueError, match="dim: 1 is the ragged dim"):
        ops["chunk_backward_nested"]([None], r.values, r.offsets, 1, 1)
    with pytest.raises(ValueError, match="grads: expected 3, got 1"):
        ops["unbind_backward_nested_jagged"]([None], r.values, r.offsets, 0)
    for f in (
        ops["unbind_backward_nested_jagged"],
        lambda g, v, o, d: ops["unbind_backward_nested"](g, o[:, None], d, v),
    ):
        with pytest.raises(ValueError, match="dim: expected 0, got 1"):
            f([None], r.values, r.offsets, 1)
