"""PyTorch's distributed engines, each training one of the networks; what the processes of a test run.

``python engine_runs.py fast folder`` forks all processes after it has imported all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_models import KINDS, STEPS, batch, loss_of, losses_of_one_process, network, optimizer
from helpers.processes import forked
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import torch_manualgrad as mg

# Twice the gradient: it shows that the backward of an engine goes by the rules that are active, wherever it runs.
DOUBLED = mg.rule(
    "aten::gelu",
    vjp={"self": lambda grad, self, approximate: 2 * torch.ops.aten.gelu_backward(grad, self, approximate=approximate)},
    register=False,
)


@contextmanager
def _installed() -> Iterator[None]:
    handle = mg.install("*")
    try:
        yield
    finally:
        handle.remove()


FORMS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stock": nullcontext,
    "override()": mg.override,
    'override("*")': partial(mg.override, "*"),
    'override("*", strong_zero=True)': partial(mg.override, "*", strong_zero=True),
    'install("*")': _installed,
    "another rule": partial(mg.override, DOUBLED),
}
MICROBATCHES = 4
FEW = [form for form in FORMS if form not in ('override("*", strong_zero=True)', 'install("*")')]


def _train(
    net: nn.Module,
    group: dist.ProcessGroup | None = None,
    accumulate: int = 1,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """The mean losses of ten steps, in which each process of the group takes a part of the batch; all take it all without."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    steps, losses = optimizer(net.parameters()), []
    for step in range(STEPS):
        words, following = (x.chunk(size)[rank].chunk(accumulate) for x in batch(step))
        total = torch.zeros(())
        for i in range(accumulate):
            with no_sync() if i + 1 < accumulate else nullcontext():
                loss = loss_of(net(words[i]), following[i]) / accumulate
                loss.backward()
            total += loss.detach()
        steps.step()
        steps.zero_grad()
        if group is not None:
            dist.all_reduce(total, group=group)
        losses.append(total.item() / size)
    return losses


def _compile(net: nn.Module) -> None:
    net.compile(backend="manualgrad", options={"lowering": "eager", "fallback": False})


def _data_parallel(
    kind: str = "transformer", accumulate: int = 1, checkpointed: bool = False, compiled: bool = False, **options: Any
) -> list[float]:
    net = network(kind)
    if compiled:
        _compile(net)
    if options.get("find_unused_parameters"):
        net.unused = nn.Linear(2, 2)
    for block in net.blocks:
        block.checkpointed = checkpointed
    parallel = DistributedDataParallel(net, **options)
    return _train(parallel, dist.group.WORLD, accumulate, parallel.no_sync)


def _sharded(
    kind: str = "transformer",
    mesh: DeviceMesh | None = None,
    checkpointed: bool = False,
    compiled: bool = False,
    **options: Any,
) -> list[float]:
    net = network(kind)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        if compiled:
            _compile(block)
        block.checkpointed = checkpointed
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return _train(net, dist.group.WORLD)


def _mixed_precision() -> list[float]:
    return _sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def _mesh_of_four(second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", second))


def _tensor_parallel(mesh: DeviceMesh | None = None, sequence: bool = False) -> Any:
    """Attention by heads, linear layers by columns and rows; with ``sequence``, LayerNorm by positions, on DTensors."""
    net = network("transformer")
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    taken, given = ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}) if sequence else ({}, {})
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {
        "attention.out": RowwiseParallel(**given),
        "up": ColwiseParallel(**taken),
        "down": RowwiseParallel(**given),
    }
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": whole}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    if sequence:
        split = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        last = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(net, mesh, {"parts.1": split, "parts.3.norm": SequenceParallel(), "parts.3.scores": last})
    return net


def _tensor_and_data_parallel() -> list[float]:
    mesh = _mesh_of_four("tensor")
    net = _tensor_parallel(mesh["tensor"])
    for block in net.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    return _train(net, mesh["data"].get_group())


def _between(parts: list[nn.Module]) -> list[torch.Tensor]:
    """The input of each part, and the output of the last, for one microbatch.

    A stage that is not told runs its part once on uninitialised memory to see, and eigh raises where that holds nan.
    """
    values = [batch(0)[0].chunk(MICROBATCHES)[0]]
    with torch.no_grad():
        for part in parts:
            values.append(part(values[-1]))
    return [values[0], *(value.requires_grad_() for value in values[1:])]


def _pipeline(schedule: str, kind: str = "transformer", order: str = "loop") -> list[float]:
    """A stage for each part of the network, or two stages of two parts each where a process has one stage only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(network(kind).parts)
    single = issubclass(getattr(schedules, schedule), schedules.PipelineScheduleSingle)
    if single and size == 2:
        parts = [nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])]
    last = len(parts) - 1
    mine = [rank] if single else [rank, last - rank if order == "v" else rank + size]
    values = _between(parts)
    stages = [PipelineStage(parts[i], i, len(parts), torch.device("cpu"), values[i], values[i + 1]) for i in mine]
    run = getattr(schedules, schedule)(stages[0] if single else stages, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    steps, losses = optimizer([p for i in mine for p in parts[i].parameters()]), []
    for step in range(STEPS):
        words, following = batch(step)
        found: list[torch.Tensor] = []
        run.step(*[words] * (0 in mine), **({"target": following, "losses": found} if last in mine else {}))
        steps.step()
        steps.zero_grad()
        loss = torch.stack(found).detach().mean() if found else torch.zeros(())
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


Engine = tuple[
    Callable[[], list[float]], str, list[str]
]  # with the kind of its network, and the forms that it is run in
ALL = list(FORMS)
MIXED = "fully_shard, mixed precision"  # which alone has other losses than one process
TWO: dict[str, Engine] = {
    "DDP": (_data_parallel, "transformer", ALL),
    "DDP, find_unused_parameters": (partial(_data_parallel, find_unused_parameters=True), "transformer", FEW),
    "DDP, static_graph, checkpoint": (
        partial(_data_parallel, static_graph=True, checkpointed=True), "transformer", FEW
    ),
    "DDP, gradient_as_bucket_view, no_sync": (
        partial(_data_parallel, gradient_as_bucket_view=True, accumulate=2), "transformer", FEW
    ),
    "DDP, operators of ours": (partial(_data_parallel, "ours"), "ours", FEW[:3]),
    "DDP, derivative in the forward": (partial(_data_parallel, "slope"), "slope", FEW),
    "DDP, compiled": (partial(_data_parallel, compiled=True), "transformer", FEW),
    "DDP, compiled, derivative in the forward": (partial(_data_parallel, "slope", compiled=True), "slope", FEW),
    "fully_shard": (_sharded, "transformer", ALL),
    "fully_shard, compiled": (partial(_sharded, compiled=True), "transformer", FEW),
    "fully_shard, checkpoint": (partial(_sharded, checkpointed=True), "transformer", FEW),
    MIXED: (_mixed_precision, "transformer", FEW[:3]),
    "fully_shard, operators of ours": (partial(_sharded, "ours"), "ours", FEW[:3]),
    "fully_shard, derivative in the forward": (partial(_sharded, "slope"), "slope", FEW),
    "tensor parallel": (lambda: _train(_tensor_parallel()), "transformer", FEW),
    "tensor and sequence parallel": (lambda: _train(_tensor_parallel(sequence=True)), "transformer", ALL),
    "GPipe": (partial(_pipeline, "ScheduleGPipe"), "transformer", FEW),
    "1F1B": (partial(_pipeline, "Schedule1F1B"), "transformer", FEW),
    "interleaved 1F1B": (partial(_pipeline, "ScheduleInterleaved1F1B"), "transformer", FEW),
    "interleaved zero bubble": (partial(_pipeline, "ScheduleInterleavedZeroBubble"), "transformer", ALL),
    "interleaved zero bubble, operators of ours": (
        partial(_pipeline, "ScheduleInterleavedZeroBubble", "ours"), "ours", FEW[:3]
    ),
    "ZBV": (partial(_pipeline, "ScheduleZBVZeroBubble", order="v"), "transformer", FEW),
}  # fmt: skip


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


try:
    _Twice.apply(torch.ones(1, requires_grad=True)).grad_fn._input_metadata
except (
    RuntimeError
):  # torch 2.10 loses a node of Python's with its tensor: zero bubble takes no autograd.Function there
    TWO = {name: engine for name, engine in TWO.items() if "zero bubble" not in name and name != "ZBV"}
FOUR: dict[str, Engine] = {
    "DDP, 4 processes": (_data_parallel, "transformer", FEW),
    "HSDP, 2 x 2": (lambda: _sharded(mesh=_mesh_of_four("shard")), "transformer", FEW),
    "fully_shard x tensor parallel, 2 x 2": (_tensor_and_data_parallel, "transformer", FEW),
    "1F1B, 4 stages": (partial(_pipeline, "Schedule1F1B"), "transformer", FEW),
}
ONE: dict[str, Engine] = {kind: (partial(losses_of_one_process, kind), kind, ALL) for kind in KINDS}
WORLDS = {1: ONE, 2: TWO, 4: FOUR}
Run = tuple[int, str, str]  # the number of processes, the engine and the form


def _in_turn(engines: dict[str, Engine]) -> Iterator[tuple[str, str]]:
    """Each engine under one of the overrides that it is tried under, in turn, and under another rule."""
    for i, (name, (_, _, forms)) in enumerate(engines.items()):
        overrides = [form for form in forms if form not in ("stock", "another rule")]
        yield name, overrides[i % len(overrides)]
        if "another rule" in forms:
            yield name, "another rule"


RUNS: list[Run] = [
    (world, n, form) for world, es in WORLDS.items() for n, (_, _, forms) in es.items() for form in forms
]
FAST: set[Run] = {(1, kind, form) for kind in ONE for form in ALL} | {(2, MIXED, "stock")}
FAST |= {(2, "DDP", form) for form in ALL}
FAST |= {(world, *which) for world in (2, 4) for which in _in_turn(WORLDS[world])}


def measure(rank: int, world: int, folder: Path, part: str) -> None:
    """What each process runs; the first writes the losses."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    if world > 1:
        store = dist.FileStore(str(folder / f"store_{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    found: dict[str, dict[str, list[float]]] = {}
    for form, derivatives in FORMS.items():
        with derivatives():
            for name, (engine, _, _) in WORLDS[world].items():
                if ((world, name, form) in FAST) == (part == "fast") and (world, name, form) in RUNS:
                    try:
                        found.setdefault(name, {})[form] = engine()
                    except Exception as error:
                        raise RuntimeError(f"{name} under {form}") from error
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _world(size: int, folder: Path, part: str) -> None:
    forked([partial(measure, rank, size, folder, part) for rank in range(size)])


if __name__ == "__main__":
    forked([partial(_world, size, Path(sys.argv[2]), sys.argv[1]) for size in WORLDS])
