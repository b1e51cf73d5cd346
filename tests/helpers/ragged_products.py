"""Ragged batches of random numbers, of given lengths."""

from __future__ import annotations

import torch

from helpers.tensors import random
from torch_manualgrad.nested import Ragged

LENGTHS, OTHERS = (3, 0, 5), (2, 1, 4)


def batch(*shape, lengths=LENGTHS, dtype=torch.float64, seed=0, offsets=torch.int64):
    """Components of this shape, None where it is ragged."""
    at = torch.tensor([0, *lengths]).cumsum(0).to(offsets)
    full = [sum(lengths) if n is None else n for n in shape]
    return Ragged(random(*full, dtype=dtype, seed=seed), at, (len(lengths), *shape))
