"""Compiled cases on distributed tensors: two ranks write their errors to files.

python compiled_worker.py aot_eager '["softmax"]' folder
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.processes import forked
from helpers.sharding_cases import CASES, Case
from sharding_worker import difference
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import torch_manualgrad as mg

RANKS = 2
ROWS = 8  # of a batch; some operators ask for parts of one size


def results(function, inputs: list) -> list:
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, [x for x in inputs if x.requires_grad], torch.ones_like(y))]


def run(case: Case, mesh, backend: str) -> list[float]:
    """Errors of the output and of the gradients, against one process that is not compiled."""
    torch._dynamo.reset()
    made = [make(ROWS) for make in case.inputs]
    placed = [[Replicate() if dim is None else Shard(dim)] for _, dim in made]
    sharded = [distribute_tensor(x, mesh, p).detach() for (x, _), p in zip(made, placed)]
    with mg.override("*"):
        expected = results(case.function, [x.clone().requires_grad_(x.is_floating_point()) for x, _ in made])
        compiled = torch.compile(lambda *inputs: case.function(*inputs), backend=backend, fullgraph=True)
        found = results(compiled, [x.requires_grad_(x.is_floating_point()) for x in sharded])
    return [difference(f.full_tensor(), e) for f, e in zip(found, expected, strict=True)]


def rank(folder: Path, number: int, path: str, backend: str, names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    store = dist.FileStore(path, RANKS)
    dist.init_process_group("gloo", rank=number, world_size=RANKS, store=store, timeout=timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (RANKS,))
    found: dict[str, object] = {}
    for name in names:
        try:
            found[name] = run(CASES[name], mesh, backend)
        except Exception as error:  # raised while compiling, on every rank
            found[name] = f"{type(error).__name__}: {error}"
    (folder / f"{number}").write_text(json.dumps(found))


if __name__ == "__main__":
    backend, names, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    store = tempfile.mktemp(dir=out)
    forked([partial(rank, out, number, store, backend, names) for number in range(RANKS)])
