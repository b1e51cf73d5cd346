"""The table of `composition` shows a planted fault where it is, and nowhere else."""

from __future__ import annotations

import torch
from helpers.planted import function
from helpers.tensors import random

from torch_manualgrad.testing import composition


def test_composition_finds_a_planted_fault() -> None:
    fn = function(lambda x: x.sin(), lambda g, x: g * x.cos(), lambda t, x: t * 0)
    table = composition(fn, torch.sin, (random(4),), compile=False)
    outcomes = {row.name: row.outcome for row in table}
    for name in ("eager dual numbers", "func.jvp", "func.jacfwd", "vmap of jvp", "fwd-fwd"):
        assert outcomes[name] == "wrong", str(table)
    for name in ("forward", "eager reverse", "func.grad", "func.vjp", "rev-rev", "vmap of grad"):
        assert outcomes[name] == "ok", str(table)
