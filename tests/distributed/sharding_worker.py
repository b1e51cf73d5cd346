"""Cases on distributed tensors, run by ranks of one machine or counted for a thousand that do not exist.

``python sharding_worker.py '{"2": [["softmax"], []]}' folder`` forks 2 ranks after it has imported all, and each writes what
it found into the folder: of the first cases with our strategies, of the second ones with PyTorch's own.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from helpers.processes import forked
from helpers.sharding_cases import CASES, MANY, Case
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import torch_manualgrad as mg


def results(case: Case, inputs: list, count) -> dict[str, list]:
    """The results of each pass; ``count(pass, function)`` calls the function."""
    xs = [x for x in inputs if x.requires_grad]
    y = count("forward", lambda: case.function(*inputs))
    first = count("backward", lambda: torch.autograd.grad(y, xs, torch.ones_like(y), create_graph=True))
    again = [g for g in first if g.requires_grad]
    ones = [torch.ones_like(g) for g in again]
    second = count("second", lambda: torch.autograd.grad(again, xs, ones, allow_unused=True)) if again else []
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) if x.requires_grad else x for x in inputs]
        tangent = forward_ad.unpack_dual(count("tangent", lambda: case.function(*duals))).tangent
    # last: what PyTorch's own communicates is counted until it raises
    z = case.function(*inputs)
    plain = count("plain backward", lambda: torch.autograd.grad(z, xs, torch.ones_like(z)))
    return {"forward": [y], "backward": first, "second": second, "tangent": [tangent], "plain backward": plain}


def run(case: Case, mesh, n: int, ours: bool = True) -> dict:
    """Errors against one process, collectives and placements, by passes; or what was raised."""
    made = [make(n if not case.even or n % mesh.size() == 0 else 2 * mesh.size()) for make in case.inputs]
    placed = [[Replicate() if dim is None else Shard(dim)] for _, dim in made]
    counts: dict[str, int] = {}

    def counted(what, function):
        with CommDebugMode() as mode:
            result = function()
        counts[what] = sum(mode.get_comm_counts().values())
        return result

    def sharded():
        inputs = [distribute_tensor(x, mesh, p).detach() for (x, _), p in zip(made, placed)]
        return [x.requires_grad_(x.is_floating_point()) for x in inputs]

    if not ours:
        with suppress(Exception):  # what PyTorch lacks there
            results(case, sharded(), counted)
        return {"counts": counts}
    with mg.override("*"):
        found = results(case, sharded(), counted)
        placements = {w: [None if x is None else str(x.placements[0]) for x in xs] for w, xs in found.items()}
        if dist.get_backend() == "fake":
            return {"counts": counts, "placements": placements}
        plain = [x.clone().requires_grad_(x.is_floating_point()) for x, _ in made]
        expected = results(case, plain, lambda what, function: function())
    pairs = {what: zip(found[what], expected[what], strict=True) for what in found}
    errors = {
        what: [difference(None if f is None else f.full_tensor(), e) for f, e in both] for what, both in pairs.items()
    }
    return {"counts": counts, "placements": placements, "errors": errors}


def difference(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Relative; no gradient is a gradient of zeros."""
    if found is None or expected is None:
        return max((x.abs().max().item() for x in (found, expected) if x is not None), default=0.0)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    return ((found - expected).abs() / (1 + expected.abs())).max().nan_to_num(nan=float("inf")).item()


def rank(folder: Path, backend: str, number: int, size: int, store, names: list[str], stock: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=number, world_size=size, store=store, timeout=timedelta(minutes=5))
    mesh = init_device_mesh("cpu", (size,))
    n = size if backend == "fake" else 7  # parts of unequal sizes
    found = {}
    # first, while PyTorch's own strategies are all there are
    counts = {name: run(CASES[name], mesh, n, ours=False)["counts"] for name in stock}
    for name in names:
        try:
            found[name] = run(CASES[name], mesh, n)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            if backend != "fake":  # the other ranks may be in another collective
                break
    for name, count in counts.items():
        found[name]["stock"] = count
    (folder / f"{size}.{number}").write_text(json.dumps(found))


def world(folder: Path, size: int, names: list[str], stock: list[str]) -> None:
    """The ranks of one process group; of a thousand only the first exists."""
    if size == MANY:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return rank(folder, "fake", 0, size, FakeStore(), names, stock)
    path = tempfile.mktemp(dir=folder)
    forked([partial(_gloo, folder, number, size, path, names) for number in range(size)])


def _gloo(folder: Path, number: int, size: int, path: str, names: list[str]) -> None:
    rank(folder, "gloo", number, size, dist.FileStore(path, size), names, [])


if __name__ == "__main__":
    worlds, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    forked([partial(world, out, int(size), *what) for size, what in worlds.items()])
