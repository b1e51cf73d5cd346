"""Checks that a function returns the same results at every call, on any thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comparison.context import Context
from ..comparison.passes import Pairs, both, compared
from ..comparison.problem import Problem

RUNS, THREADS = 4, 4


def determinism(c: Context) -> None:
    """Outputs and gradients are the same in several runs, with memory full of nan, and on several threads at once.

    They agree to the tolerance of first derivatives, not bitwise: the last bit of some of LAPACK's drivers depends on the
    address of the memory. For "uninitialized memory", `torch.empty` returns nan, as with deterministic algorithms, which
    reveals a function that reads memory that it has not written. A function that draws random numbers is given the same
    seed each time, so its numbers must all come from PyTorch's generator; it is not run on threads, which share the
    generator.
    """
    p, check = c.problem, "determinism"
    if p.applicable and c.gap("rev", "eager"):
        return
    first = c.run(check, "repeats", lambda: both(p))
    if first is None:
        return
    c.equal(check, "repeats", partial(_repeats, p, first))
    c.equal(check, "uninitialized memory", partial(_among_nans, p, first))
    if not p.random:
        c.equal(check, "threads", partial(_on_threads, p, first))


def _repeats(p: Problem, first: list[Tensor | None]) -> Pairs:
    return [pair for _ in range(RUNS) for pair in compared(p, both(p), first)]


def _among_nans(p: Problem, first: list[Tensor | None]) -> Pairs:
    with _memory_of_nans():
        return compared(p, both(p), first)


@contextmanager
def _memory_of_nans() -> Iterator[None]:
    """Make `torch.empty` fill memory with nan, or with the largest integer."""
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _on_threads(p: Problem, first: list[Tensor | None]) -> Pairs:
    start = threading.Barrier(THREADS)

    def runs() -> list[list[Tensor | None]]:
        start.wait()
        return [both(p) for _ in range(RUNS)]

    with _frequent_switches(), ThreadPoolExecutor(THREADS) as pool:
        found = [pool.submit(runs) for _ in range(THREADS)]
        return [pair for future in found for run in future.result() for pair in compared(p, run, first)]


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Make Python switch threads often, so that a race is likely to show."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
