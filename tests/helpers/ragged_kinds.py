"""A Ragged of every kind: ragged in the first dim, in the last, in both."""

from __future__ import annotations

import torch

from helpers.tensors import random
from torch_manualgrad.nested import Ragged

F64, C128 = torch.float64, torch.complex128
KINDS = {  # the components' shapes
    "first": [(2, 3), (0, 3), (4, 3)],
    "last": [(3, 2), (3, 1), (3, 3)],
    "both": [(2, 3), (1, 4), (3, 3)],
}


def components(kind="first", dtype=F64, seed=0):
    return [random(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(KINDS[kind])]


def ragged(kind="first", dtype=F64, seed=0):
    return Ragged.from_components(components(kind, dtype, seed))


def same_components(found, expected):
    assert isinstance(found, Ragged) and len(found) == len(expected)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0, equal_nan=True)  # 2 / x is 2 * (1 / x) in torch
