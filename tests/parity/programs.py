"""Programs of other people on stock and with the rules installed: ``python programs.py [--only NAME] [--ways WAY ...]``.

Each program of program_list.py is used in many ways (training steps, compiled, checkpointed, under torch.func, ...). What
works on stock gives the same losses and gradients under `mg.install()` and `mg.install("*")`, and keeps no more for its
backward pass. Prints the table of docs/suites.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import warnings
from contextlib import nullcontext
from typing import Any

import program_models  # noqa: F401  which adds to PROGRAMS
import torch
from program_list import PROGRAMS, Program
from program_ways import WAYS, Numbers, Way, one_step
from torch import Tensor, nn

import torch_manualgrad as mg

MODES = {"install()": (), 'install("*")': ("*",)}


# -- comparison -------------------------------------------------------------------------------------------------------


def attempt(way: Way, program: Program, dtype: torch.dtype | None = None) -> Numbers | Exception:
    try:
        return way(program, dtype)
    except Exception as error:
        return error


def difference(stock: Numbers, ours: Numbers, floor: float) -> tuple[float, str]:
    """The largest error relative to a tensor, or to this part of the largest of all; infinite for missing numbers."""
    if stock.keys() != ours.keys():
        return float("inf"), f"other numbers: {sorted(stock.keys() ^ ours.keys())[:4]}"
    worst, text = 0.0, ""
    largest = max((float(x.to_dense().abs().max()) for x in stock.values() if x.numel()), default=0.0)
    for name, s in stock.items():
        o = ours[name]
        if (s.dtype, s.shape, s.layout) != (o.dtype, o.shape, o.layout):
            return float("inf"), f"{name} is {o.dtype} {list(o.shape)} {o.layout}"
        s, o = s.detach().to_dense(), o.detach().to_dense()
        known = s.isfinite()
        if not bool(o[known].isfinite().all()):
            return float("inf"), f"{name} is not finite"
        scale = max(float(s[known].abs().max()), floor * largest) if known.any() else 0.0
        error = float((s[known] - o[known]).abs().max()) / scale if scale else 0.0
        if error > worst:
            worst, text = error, f"{name} is off by {error:.1e}"
    return worst, text


def as_good(way: Way, program: Program, stock: Numbers, ours: Numbers) -> bool:
    """Whether numbers of single precision that differ from stock's are as near to those of double precision."""
    exact = attempt(way, program, torch.float64) if way.dtype is torch.float32 else None
    if not isinstance(exact, dict):
        return False
    of_stock, of_ours = ({n: x.double() for n, x in numbers.items()} for numbers in (stock, ours))
    floor = way.rtol**0.5
    error = difference(exact, of_stock, floor)[0]
    return error < 0.5 and difference(exact, of_ours, floor)[0] < 2 * error


def kept(program: Program) -> int:
    """Bytes of the tensors that one step keeps for its backward pass, without those of the model and single numbers."""
    torch.manual_seed(0)
    model, loss = program.build(torch.float32)
    own = {
        p.untyped_storage().data_ptr() for p in itertools.chain(model.parameters(), model.buffers()) if not p.is_sparse
    }
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.layout is torch.strided and x.dim() and type(x) in (Tensor, nn.Parameter):
            storage = x.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = loss(model.train(), 0)
    del value
    return sum(found.values())


def seconds(program: Program, rounds: int, modes: list[Any]) -> list[float]:
    """The least time of a step in each mode, of rounds that take turns."""
    torch.manual_seed(0)
    model, loss = program.build(torch.float32)
    best = [float("inf")] * len(modes)
    for k in range(rounds + 1):
        for m, entered in enumerate(modes):
            with entered():
                start = time.perf_counter()
                one_step(model.train(), loss)
                if k:
                    best[m] = min(best[m], time.perf_counter() - start)
    return best


def measure(program: Program, ways: dict[str, Way], rounds: int) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Way -> how many of the modes hold, and what does not."""
    mg.unregister()  # so that stock is measured while nothing is registered
    stock = {name: attempt(w, program) for name, w in ways.items()}
    memory = kept(program) if rounds else 0
    faults: dict[tuple[str, str], str] = {}
    row = {name: "-" if isinstance(stock[name], Exception) else "same" for name in ways}
    for name, error in stock.items():
        if isinstance(error, Exception):
            faults[name, "stock"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:150]}"
    for mode, names in MODES.items():
        with mg.override(*names):
            for name, w in ways.items():
                if isinstance(stock[name], Exception):
                    continue
                ours = attempt(w, program)
                if isinstance(ours, Exception):
                    row[name], faults[name, mode] = "raises", f"{type(ours).__name__}: {str(ours)[:500]}"
                    continue
                error, fault = difference(stock[name], ours, w.rtol**0.5)
                if error > (max(w.rtol, 1e-5) if program.single else w.rtol):
                    if not as_good(w, program, stock[name], ours):
                        row[name], faults[name, mode] = "differs", fault
            if rounds:
                bytes_kept = kept(program)
                row[f"memory {mode}"] = f"{bytes_kept / max(memory, 1):.2f}"
                if bytes_kept > memory:
                    faults["memory", mode] = f"{bytes_kept} bytes for {memory}"
    if rounds:
        times = seconds(program, rounds, [nullcontext, mg.override, lambda: mg.override("*")])
        row |= {f"time {mode}": f"{times[k + 1] / times[0]:.2f}" for k, mode in enumerate(MODES)}
        row["ms on stock"] = f"{1e3 * times[0]:.1f}"
    return row, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PROGRAMS)
    parser.add_argument("--ways", nargs="*", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the timing; 0: neither times nor memory")
    parser.add_argument("--heavy", action="store_true", help="compile what takes minutes, too")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    _without_torchvisions_library()
    status = 0
    for name in given.only or PROGRAMS:
        program = PROGRAMS[name]
        if not program.available:
            print(f"{name}: {program.package} is not installed", flush=True)
            continue
        ways = {n: w for n, w in WAYS.items() if n in (given.ways or WAYS) and (given.heavy or not w.heavy)}
        start = time.monotonic()
        try:
            row, faults = measure(program, ways, given.rounds)
        except Exception as error:
            print(f"{name}: cannot be measured: {type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
            continue
        print(f"{name} ({time.monotonic() - start:.0f} s): {row}", flush=True)
        for (w, mode), fault in faults.items():
            print(f"   {w}, {mode}: {fault}", flush=True)
            status |= mode != "stock"
    return status


def _without_torchvisions_library() -> None:
    """Its wheel is for CUDA: beside a torch without, it imports only if its operators are declared."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ImportError:
        pass


if __name__ == "__main__":
    sys.exit(main())
