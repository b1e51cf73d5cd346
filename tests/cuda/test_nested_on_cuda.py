"""Nested tensors on CUDA: every operator of PyTorch's database for jagged tensors, with and without the override."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from test_nested_parity import differences

from torch_manualgrad.testing.database.opinfo import nested_entries


@pytest.mark.parametrize("op", nested_entries(), ids=lambda op: op.full_name)
def test_parity(op):
    found, _ = differences(op, limit=12, device="cuda")
    assert not found, "\n".join(": ".join(f) for f in found)
