"""Programs of other people on stock and with the rules installed: ``python programs.py [--only NAME] [--ways WAY ...]``.

Each program of program_list.py is used in many ways (training steps, compiled, checkpointed, under torch.func, ...). What
works on stock gives the same losses and gradients under `mg.install()` and `mg.install("*")`, and keeps no more for its
backward pass. Prints the table of docs/suites.md.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from program_list import PROGRAMS, Program
from torch import Tensor, nn

import torch_manualgrad as mg

MODES = {"install()": (), 'install("*")': ("*",)}
Numbers = dict[str, Tensor]
Loss = Callable[[nn.Module, int], Tensor]
WAYS: dict[str, Way] = {}


class Way:
    """A way of using a model: gives numbers, which are to be the same to a relative tolerance."""

    def __init__(self, run: Callable[..., Numbers], dtype: torch.dtype, rtol: float, heavy: bool) -> None:
        self.run, self.dtype, self.rtol, self.heavy = run, dtype, rtol, heavy

    def __call__(self, program: Program, dtype: torch.dtype | None = None) -> Numbers:
        torch.manual_seed(0)
        model, loss = program.build(dtype or self.dtype)
        return self.run(model.train(), loss)


def way(dtype: torch.dtype = torch.float64, rtol: float = 1e-10, heavy: bool = False) -> Callable[[Any], Any]:
    def add(run: Callable[..., Numbers]) -> Callable[..., Numbers]:
        WAYS[run.__name__.strip("_")] = Way(run, dtype, rtol, heavy)
        return run

    return add


def gradients(model: nn.Module, step: int = 0) -> Numbers:
    found = {f"gradient {n} at {step}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def one_step(model: nn.Module, loss: Loss, step: int = 0) -> Numbers:
    torch.manual_seed(step)
    value = loss(model, step)
    value.backward()
    return {f"loss at {step}": value.detach(), **gradients(model, step)}


class Whole(nn.Module):
    """A model with its loss, which is scaled by the input."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, scale: Tensor) -> Tensor:
        return self.loss(self.model, 0) * scale


def one(model: nn.Module) -> Tensor:
    return torch.ones((), dtype=next(p for p in model.parameters()).dtype)


def train(model: nn.Module, loss: Loss) -> Numbers:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    found = {}
    for i in range(5):
        torch.manual_seed(i)
        value = loss(model, i)
        value.backward()
        optimizer.step()
        found |= {f"loss at {i}": value.detach(), **gradients(model, i)}
    return found


@way(torch.float32, 1e-4)
def _train_float32(model: nn.Module, loss: Loss) -> Numbers:
    return train(model, loss)


@way()
def _train_float64(model: nn.Module, loss: Loss) -> Numbers:
    return train(model, loss)


@way()
def _eval(model: nn.Module, loss: Loss) -> Numbers:
    with torch.no_grad():
        torch.manual_seed(1)
        first = loss(model.eval(), 1)
    return {"loss without gradients": first, **one_step(model, loss)}


@way(torch.float32, 5e-2)
def _autocast(model: nn.Module, loss: Loss) -> Numbers:
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model, 0)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way(rtol=1e-7)
def _training_loop(model: nn.Module, loss: Loss) -> Numbers:
    """Accumulated gradients, clipping, a scaler, AdamW, a schedule, an average of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True, eps=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=3)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    found = {}
    for i in range(3):
        for part in range(2):
            torch.manual_seed(i)
            scaler.scale(loss(model, 2 * i + part) / 2).backward()
        scaler.unscale_(optimizer)
        found[f"norm at {i}"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    return found | {f"weight {n}": p.detach() for n, p in average.named_parameters()}


@way(rtol=1e-6)
def _lbfgs(model: nn.Module, loss: Loss) -> Numbers:
    optimizer = torch.optim.LBFGS(model.parameters(), 1e-2, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        torch.manual_seed(0)
        value = loss(model.eval(), 0)
        value.backward()
        return value

    optimizer.step(closure)
    return {"loss": closure().detach(), **gradients(model)}


@way()
def _checkpointed(model: nn.Module, loss: Loss) -> Numbers:
    value = torch.utils.checkpoint.checkpoint(Whole(model, loss), one(model), use_reentrant=False)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way()
def _checkpointed_reentrant(model: nn.Module, loss: Loss) -> Numbers:
    value = torch.utils.checkpoint.checkpoint(Whole(model, loss), one(model).requires_grad_(), use_reentrant=True)
    value.backward()
    return {"loss": value.detach(), **gradients(model)}


@way(rtol=1e-8)
def _gradient_penalty(model: nn.Module, loss: Loss) -> Numbers:
    value = loss(model, 0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    (value + sum(g.abs().square().sum() for g in found if g is not None)).backward()
    return {"loss": value.detach(), **gradients(model)}


def functional(model: nn.Module, loss: Loss) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    whole, scale = Whole(model.eval(), loss), one(model)
    parameters = {n: p.detach() for n, p in whole.named_parameters()}
    return lambda p: torch.func.functional_call(whole, p, (scale,)), parameters


@way(rtol=1e-8)
def _hessian_vector(model: nn.Module, loss: Loss) -> Numbers:
    f, at = functional(model, loss)
    value, tangents = torch.func.jvp(torch.func.grad(f), (at,), ({n: torch.ones_like(p) for n, p in at.items()},))
    return {**{f"g {n}": x for n, x in value.items()}, **{f"H {n}": x for n, x in tangents.items()}}


@way(rtol=1e-8)
def _ensemble(model: nn.Module, loss: Loss) -> Numbers:
    f, at = functional(model, loss)
    several = {n: torch.stack([p, p * 1.1, p * 0.9]) for n, p in at.items()}
    return torch.func.vmap(torch.func.grad(f), randomness="same")(several)


@way()
def _copied(model: nn.Module, loss: Loss) -> Numbers:
    one_step(model, loss)
    return {
        **one_step(copy.deepcopy(model), loss),
        **{f"2 {n}": x for n, x in one_step(pickle.loads(pickle.dumps(model)), loss, 1).items()},
    }


@way(rtol=1e-8)
def _threads(model: nn.Module, loss: Loss) -> Numbers:
    """Two threads train their copies, in turns that the interpreter chooses."""
    copies = [copy.deepcopy(model.eval()) for _ in range(2)]
    state = torch.get_rng_state()
    loss(copies[0], 0)
    if not torch.equal(state, torch.get_rng_state()):
        raise NotImplementedError("the threads share their random numbers")
    found: list[Any] = [None, None]

    def work(k: int) -> None:
        try:
            found[k] = [loss(copies[k], i).backward() for i in range(2)] and gradients(copies[k])
        except Exception as error:
            found[k] = error

    workers = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return {f"{k} {n}": x for k, result in enumerate(found) for n, x in result.items()}


@way()
def _traced(model: nn.Module, loss: Loss) -> Numbers:
    whole, scale = Whole(model.eval(), loss), one(model)
    traced = torch.jit.trace(whole, (scale,), check_trace=False)
    value = traced(scale)
    value.backward()
    return {"loss": value.detach(), **gradients(whole)}


@way()
def _exported(model: nn.Module, loss: Loss) -> Numbers:
    whole, scale = Whole(model.eval(), loss), one(model)
    program = torch.export.export(whole, (scale,)).module()
    value = program(scale)
    value.backward()
    return {"loss": value.detach(), **gradients(program)}


def compiled(model: nn.Module, loss: Loss, backend: str) -> Numbers:
    torch._dynamo.reset()
    return one_step(torch.compile(model.eval(), backend=backend), loss)


@way(rtol=1e-8)
def _aot_eager(model: nn.Module, loss: Loss) -> Numbers:
    return compiled(model, loss, "aot_eager")


@way(torch.float32, 1e-4, heavy=True)
def _inductor(model: nn.Module, loss: Loss) -> Numbers:
    return compiled(model, loss, "inductor")


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
