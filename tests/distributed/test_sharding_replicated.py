"""An op that nobody has given a strategy: right, by computing all of it on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed")

PROGRAM = """
import sys
import torch
import torch_manualgrad as mg

assert "torch.distributed.tensor" not in sys.modules  # nobody has asked for it

@mg.custom_op("shardingtest::times(Tensor x, float factor=2.) -> Tensor")
def times(x, factor=2.0):
    return x * factor

@times.impl_save_for_backward
def _(inputs, output):
    return inputs.factor

@times.impl_backward
def _(ctx, saved, grad):
    return {"x": grad * saved}

from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
x = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (4,)), [Shard(0)]).requires_grad_()
y = times(x)
assert y.shape == (8, 3) and y.placements[0].is_replicate()
assert torch.autograd.grad(y.sum(), x)[0].shape == (8, 3)
# placements are told apart by every argument
assert times(x, 3.0).to_local()[0, 0] == 3 and y.to_local()[0, 0] == 2
"""


def test_an_op_without_a_strategy_is_replicated():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
