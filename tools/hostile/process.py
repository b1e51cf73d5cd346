"""Runs calls in processes that are expected to survive."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.internals import pytree

from .calls import Call, Target, call_number

__all__ = ["DOCUMENTED", "Finding", "run"]

#: Exceptions that a call may raise. NotImplementedError and torch.linalg.LinAlgError are RuntimeErrors. Public
#: functions also raise an IndexError for a dim, as PyTorch does, and a KeyError for the name of a rule.
DOCUMENTED = (TypeError, ValueError, RuntimeError)
#: The contents of memory before it is written.
PATTERNS = (0x11, 0xB7)
SECONDS = 10
#: The same by the clock, which also runs while the machine is at other work.
SECONDS_OF_THE_CLOCK = 120
_POOR = (
    "INTERNAL ASSERT FAILED",
    "object has no attribute",
    "has no fake implementation",
    "values to unpack",
    "Python key",
)
#: What PyTorch says of "" as a device or a number as a layout, before the operator runs; of integers, of more than 64 bits.
_CONVERSIONS = ("Device string must not be empty", "unsupported at::Layout")


@dataclass(frozen=True)
class Finding:
    """The fault of a call."""

    number: int
    kind: str
    call: str
    text: str


def run(targets: Sequence[Target], seed: int, numbers: range) -> Iterator[Finding]:
    """Run these calls. A process ends when a call kills it; the next one goes on after that call."""
    at = numbers.start
    while at < numbers.stop:
        shared = mmap.mmap(-1, mmap.PAGESIZE)
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read)
            status = 1
            try:
                _work(targets, seed, range(at, min(numbers.stop, at + 4000)), shared, os.fdopen(write, "wb"))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(write)
        with os.fdopen(read) as lines:
            for line in lines:
                yield Finding(**json.loads(line))
        _, status = os.waitpid(pid, 0)
        last = struct.unpack("q", shared[:8])[0]
        if status:
            cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status >> 8}"
            kind = "hang" if cause in ("SIGALRM", "SIGPROF") else "crash"
            yield Finding(last, kind, str(call_number(targets, seed, last)), cause)
            at = last + 1
        else:
            at = min(numbers.stop, at + 4000)


def _work(targets: Sequence[Target], seed: int, numbers: range, shared: mmap.mmap, out: BinaryIO) -> None:
    # what libraries print about bad arguments, glibc about a corrupt heap
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    memory = ctypes.CDLL(None)
    for kind in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(kind, signal.SIG_DFL)
    for number in numbers:
        shared[:8] = struct.pack("q", number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, SECONDS_OF_THE_CLOCK)
        call = call_number(targets, seed, number)
        results = []
        for pattern in PATTERNS:
            memory.hostile_pattern(pattern)
            memory.hostile_guard(1)
            torch.manual_seed(number)
            try:
                results.append(call.run())
            except Exception as error:
                results.append(error)
            memory.hostile_guard(0)
        found = _verdict(call, results)
        if found is not None:
            out.write(json.dumps(asdict(Finding(number, found[0], str(call), found[1]))).encode() + b"\n")
            out.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _verdict(call: Call, results: list[Any]) -> tuple[str, str] | None:
    first, second = results
    if isinstance(first, Exception) or isinstance(second, Exception):
        if type(first) is not type(second):
            return "depends on memory", f"{described(first)} | {described(second)}"
        text = f"{type(first).__name__}: {first}"
        of_torch = isinstance(first, OverflowError) or any(p in text for p in _CONVERSIONS)
        if of_torch and call.target.name.startswith("torch.ops"):
            return None
        named = IndexError if "ops" in call.target.name else LookupError
        if isinstance(first, mg.testing.CheckFailed):
            return None
        if not isinstance(first, DOCUMENTED) and not isinstance(first, named):
            return "undocumented type", text
        if any(p in text for p in _POOR):
            return "poor text", text
        names = [re.escape(n) for n in [*call.target.names, *call.kwargs]]
        # too many or too few: of the function that was called, not of one that it calls
        for called in (
            call.target.name.split(".")[-1],
            getattr(call.target.function, "__qualname__", call.target.name),
        ):
            names.append(rf"{re.escape(called)}(\.\w+)?(\(\))? .*positional arguments?")
        if not any(re.search(rf"(?<!\w){n}(?!\w)", str(first)) for n in names):
            return "unnamed argument", text
        return None
    one, other = _tensors(first), _tensors(second)
    if len(one) != len(other):
        return "depends on memory", f"{described(first)} | {described(second)}"
    for a, b in zip(one, other):
        if not _same(a, b):
            return "depends on memory", f"{described(first)} | {described(second)}"
    return None


def described(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:300]}"


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device or a.layout != b.layout:
        return False
    if a.is_nested or a.layout is not torch.strided:
        if a.layout is torch.sparse_coo:
            return _same(a._indices(), b._indices()) and _same(a._values(), b._values())
        return True
    if a.device.type == "meta" or not a.numel() or a.numel() > 1 << 22:
        return True
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    bits = [x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in (a, b)]
    return torch.equal(*bits)


if __name__ == "__main__":
    sys.exit("run tools/hostile")
