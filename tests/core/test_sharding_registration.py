"""Strategies are registered when they are needed, and not again on every entry; an op without one runs on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_manualgrad as mg
from torch_manualgrad.core.engine import sharding

pytest.importorskip("torch.distributed.tensor", reason="a torch without distributed tensors")


@pytest.fixture
def calls(monkeypatch):
    """How often the strategies were registered."""
    found: list[int] = []
    monkeypatch.setattr(sharding, "_register", [lambda: found.append(1)])
    return found


def test_an_override_registers_once_until_there_are_more_operators(calls, monkeypatch):
    monkeypatch.setattr(sharding, "_count", 0)
    for _ in range(3):
        with mg.override():
            pass
    assert len(calls) == 1
    monkeypatch.setattr(sharding, "_count", sharding._count - 1)
    with mg.override():
        pass
    assert len(calls) == 2


def test_an_operator_that_is_met_is_registered_once(calls, monkeypatch):
    monkeypatch.setattr(sharding, "registered", set())
    for _ in range(3):
        sharding.ensure_registered(torch.ops.aten.sin.default)
    assert len(calls) == 1


def test_an_op_called_before_distributed_is_imported_handles_its_tensors():
    """Its backward has a constant, which is a plain tensor."""
    code = """
import sys, torch
import torch_manualgrad as mg

@mg.custom_op("sharding_test::twice(Tensor x) -> Tensor")
def twice(x):
    return 2 * x

twice.impl_save_for_backward(lambda inputs, output: inputs.x)
twice.impl_backward(lambda ctx, x, grad: {"x": grad * torch.full((3,), 2.0) + 0 * x})

def gradient(x):
    return torch.autograd.grad(twice(x).sum(), x)[0]

for _ in range(2):
    assert gradient(torch.ones(4, 3, requires_grad=True)).eq(2).all()
assert "torch.distributed.tensor" not in sys.modules

from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
register_sharding(twice.op)(lambda x: [([Shard(0)], [Shard(0)])])
x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
found = gradient(x)
assert isinstance(found, DTensor) and found.to_local().eq(2).all()
assert gradient(torch.ones(4, 3, requires_grad=True)).eq(2).all()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


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
