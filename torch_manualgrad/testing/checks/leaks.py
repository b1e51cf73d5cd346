"""Checks that a function keeps no tensors alive."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...core.internals import storage_of
from ..comparison import report
from ..comparison.context import Context
from ..comparison.modes import make_dual, rev_func, tangent_of
from ..comparison.passes import cotangents, gradients
from ..comparison.problem import Problem

CHECK = "leaks"
_WAITS = 50  # milliseconds
Watched = dict[str, StorageWeakRef]


def leaks(c: Context) -> None:
    """Once the results of a call are dropped, none of its tensors is alive.

    This is checked after a forward and a backward, after a forward alone, whose graph is dropped unused, and after forward
    mode: without the garbage collector, so that a reference cycle shows, such as an output that is an attribute of `ctx`.
    It is also checked after `torch.func.grad` and `torch.func.jvp`, with the garbage collector, as these have cycles of
    their own. Calls that raise are left to the modes.
    """
    p = c.problem
    ways: dict[str, tuple[str, Callable[[Problem], Watched], bool]] = {
        "after backward": ("rev/eager", _backward, True),
        "forward only": ("rev/eager", partial(_backward, forward_only=True), True),
        "forward mode": ("fwd/eager", _forward_mode, True),
        "func.grad": ("rev/func", _func_grad, False),
        "func.jvp": ("fwd/func", _func_jvp, False),
    }
    for engine, (mode, way, cycles) in ways.items():
        if c.gap(*mode.split("/")):
            continue
        try:
            found = _alive_after(way, p, cycles)
        except Exception:
            continue
        c.close_gap(CHECK, engine, report.WRONG if found else report.OK, found)


def _alive_after(way: Callable[[Problem], Watched], p: Problem, cycles: bool) -> str:
    kept = _own_storages(p)
    enabled = gc.isenabled()
    gc.disable()
    try:
        watched = {name: ref for name, ref in way(p).items() if ref.cdata not in kept}
        _let_threads_finish(p, watched)
        alive = [name for name, ref in watched.items() if not ref.expired()]
        if alive:
            gc.collect(0)  # nothing has been collected since, so new objects are in the youngest generation
            if any(not watched[name].expired() for name in alive):
                gc.collect()
        leaked = [name for name in alive if not watched[name].expired()]
    finally:
        if enabled:
            gc.enable()
    if leaked:
        return f"kept alive after everything that the call returned is dropped: {', '.join(leaked)}"
    if alive and cycles:
        return (
            f"kept alive by a reference cycle until the garbage collector runs: {', '.join(alive)}. Is an output of an "
            "autograd.Function an attribute of its ctx? ctx.save_for_backward keeps it without a cycle"
        )
    return ""


def _let_threads_finish(p: Problem, watched: Watched) -> None:
    """On a device other than the CPU, the backward has its own thread, which drops the graph after the caller continues."""
    if any(isinstance(x, Tensor) and x.device.type not in ("cpu", "meta") for x in p.leaves):
        for _ in range(_WAITS):
            if all(ref.expired() for ref in watched.values()):
                return
            time.sleep(0.001)


def _own_storages(p: Problem) -> set[int]:
    """The storages of results that are the function's own, the same in two calls; the calls also fill its caches."""
    with torch.no_grad():
        one, other = p.flat(*p.primals), p.flat(*p.primals)
    first, second = ({ref.cdata for ref in _watch(output=results).values()} for results in (one, other))
    return first & second


def _watch(**groups: Sequence[Any]) -> Watched:
    """Weak references to the storages of tensors, by name."""
    found = {}
    for name, group in groups.items():
        for i, x in enumerate(group):
            storage = storage_of(x) if isinstance(x, Tensor) else None
            if storage is not None:
                found[f"{name} {i}"] = StorageWeakRef(storage)
    return found


def _copied(p: Problem, requires_grad: bool = False) -> Problem:
    """The problem at copies of its arguments."""
    leaves = [x.clone() if isinstance(x, Tensor) else x for x in p.leaves]
    for i in p.index:
        leaves[i].requires_grad_(requires_grad)
    return p.at(leaves)


def _backward(p: Problem, forward_only: bool = False) -> Watched:
    p, given = _copied(p, requires_grad=True), [] if forward_only else cotangents(p)
    outputs = p.flat(*p.primals)
    found = [] if forward_only else gradients(p, outputs, p.primals, given)
    return _watch(argument=p.leaves, output=outputs, cotangent=given, gradient=found)


def _forward_mode(p: Problem) -> Watched:
    p = _copied(p)
    tangents = [u.clone() for u in p.u]
    with fwAD.dual_level():
        outputs = p.flat(*(make_dual(x, u) for x, u in zip(p.primals, tangents, strict=True)))
        found = [tangent_of(outputs[i]) for i in p.outputs]
    return _watch(argument=p.leaves, output=outputs, tangent=tangents, **{"tangent of output": found})


def _func_grad(p: Problem) -> Watched:
    p = _copied(p)
    return _watch(argument=p.leaves, gradient=rev_func(p))


def _func_jvp(p: Problem) -> Watched:
    p = _copied(p)
    tangents = tuple(u.clone() for u in p.u)
    outputs, found, *_ = torch.func.jvp(p.call, p.primals, tangents)
    return _watch(argument=p.leaves, output=outputs, tangent=tangents, **{"tangent of output": found})
