"""Ragged batches of many structures, beside their components, and of given lengths."""

from __future__ import annotations

import torch

from helpers.tensors import random, same
from torch_manualgrad.nested import Ragged
from torch_manualgrad.testing import Sample, check

SHAPES = {
    "first": [(2, 3), (0, 3), (4, 3)],
    "last": [(3, 2), (3, 4), (3, 0)],
    "middle": [(2, 2, 2), (2, 3, 2)],
    "vector": [(2,), (5,), (1,)],
    "one": [(3, 2)],
    "two": [(3, 2), (1, 4)],
    "outer two": [(1, 2, 3), (3, 2, 2)],
}
SINGLE = [k for k in SHAPES if "two" not in k]


def components(name, dtype=torch.float64):
    return [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(SHAPES[name])]


# what a fake tensor cannot say: how many entries there are depends on the lengths
UNKNOWN = {"fake": "the number of entries depends on the lengths"}


def ragged(name, dtype=torch.float64):
    return Ragged.from_components(components(name, dtype))


def values_of(result):
    if isinstance(result, Ragged):
        return result.values
    return tuple(map(values_of, result)) if isinstance(result, (list, tuple)) else result


def same_components(actual, expected):
    actual = actual.components() if isinstance(actual, Ragged) else list(actual)
    assert [a.shape for a in actual] == [e.shape for e in expected]
    for a, e in zip(actual, expected):
        same(a, e)


def in_every_mode(function, r, **options):
    check(lambda v: values_of(function(r.like(v))), [Sample(r.values)], **options)


LENGTHS, OTHERS = (3, 0, 5), (2, 1, 4)


def batch(*shape, lengths=LENGTHS, dtype=torch.float64, seed=0, offsets=torch.int64):
    """Components of this shape, None where it is ragged."""
    at = torch.tensor([0, *lengths]).cumsum(0).to(offsets)
    full = [sum(lengths) if n is None else n for n in shape]
    return Ragged(random(*full, dtype=dtype, seed=seed), at, (len(lengths), *shape))
