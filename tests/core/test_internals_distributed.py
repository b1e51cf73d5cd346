"""The private parts of torch.distributed.tensor that are used here, in a world of two ranks of which one exists."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import Tensor

from torch_manualgrad.core import internals
from torch_manualgrad.core.schema import Signature

if not torch.distributed.is_available():
    pytest.skip("a torch without torch.distributed", allow_module_level=True)

from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def x(mesh) -> Tensor:
    return distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])


@pytest.fixture
def ops():
    """Operators of these tests alone."""
    with torch.library._scoped_library("manualgrad_test_sharding", "DEF") as library:
        library.define("scaled(Tensor x, int dim, *, float factor) -> Tensor")
        library.define("filled(Tensor x, int[] size) -> Tensor")
        library.impl("scaled", lambda x, dim, *, factor: x * factor, "CompositeExplicitAutograd")
        library.impl("filled", lambda x, size: x.new_full(size, x.numel()), "CompositeExplicitAutograd")
        yield torch.ops.manualgrad_test_sharding


def sharded_along(op, dims) -> None:
    """Let input and result be sharded along ``dims(dim, factor)``."""

    @register_sharding(op)
    def _(x, dim, *, factor):
        placement = Shard(dims(dim, factor))
        return [([placement], [placement])]


def test_is_distributed(x):
    assert (
        internals.is_distributed(x) and not internals.is_distributed(x.to_local()) and not internals.is_distributed(1)
    )


def test_nothing_is_distributed_while_another_thread_imports_the_class(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.ModuleType("torch.distributed.tensor"))
    assert not internals.is_distributed(torch.ones(1))
    with internals.constants_replicated((torch.ones(1),)):
        pass


def test_constants_are_replicated_and_settings_restored(x):
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        x * torch.ones(6)
    with internals.constants_replicated((x,)):
        with internals.constants_replicated((x,)):
            pass
        assert isinstance(x * torch.ones(6), DTensor)
    with internals.constants_replicated((torch.ones(6),)), pytest.raises(RuntimeError, match="mixed torch.Tensor"):
        x * torch.ones(6)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        x * torch.ones(6)


def test_a_placement_depends_on_every_argument(x, ops):
    op = ops.scaled.default
    sharded_along(op, lambda dim, factor: dim if factor > 1 else 1 - dim)
    internals.read_all_arguments(op, Signature(op._schema))
    found = [op(x, dim, factor=factor).placements[0] for dim in (0, 1) for factor in (2.0, 0.5)]
    assert found == [Shard(0), Shard(1), Shard(1), Shard(0)]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="PyTorch has no strategies of another kind")
def test_the_registered_strategy_is_preferred_to_one_of_another_kind(x, ops):
    from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy

    op = ops.scaled.default
    register_single_dim_strategy(op)(lambda op, args, kwargs: [])  # replicated
    sharded_along(op, lambda dim, factor: dim)
    assert op(x, 0, factor=1.0).placements == (Replicate(),)
    internals.prefer_registered_sharding(op)
    internals.forget_placements()
    assert op(x, 0, factor=1.0).placements == (Shard(0),)


def test_placements_are_forgotten(x, ops):
    op = ops.scaled.default
    sharded_along(op, lambda dim, factor: 0)
    assert op(x, 0, factor=1.0).placements == (Shard(0),)
    sharded_along(op, lambda dim, factor: 1)
    internals.forget_placements()
    assert op(x, 0, factor=1.0).placements == (Shard(1),)


def test_sizes_are_those_of_the_part(x, ops):
    op = ops.filled.default
    register_sharding(op)(lambda x, size: [([Shard(0)], [Shard(0)])])
    internals.read_all_arguments(op, Signature(op._schema))
    assert op(x, [4, 2]).to_local().shape == (4, 2)  # which would be eight rows in all
    internals.sizes_are_local(op, 1)
    internals.forget_placements()
    assert op(x, [4, 2]).shape == (4, 2) and op(x, [4, 2]).to_local().shape == (2, 2)
