"""Runs the checkers over mutants and right functions in a few processes, and keeps what came out in a file."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import right
from .candidates import candidates
from .proof import DIFFERENT, RAISES, compared
from .score import CHECKERS, failing
from .source import sources
from .subject import Mutant, Subject

Record = dict[str, Any]
NOT_SMALL, ENDS = "no small sample", "ends the process"


@functools.cache
def _numbered(kind: str) -> dict[str, Mutant]:
    return {m.name: m for m in candidates(kind)}


_known: dict[str, Record] = {}


def _right(subject: Subject, left_out: Sequence[str]) -> Record:
    """The verdicts on a right function; cached, as several mutants may come from it."""
    if subject.name not in _known:
        _known[subject.name] = {"name": subject.name} | {c: failing(subject, c, left_out) for c in CHECKERS}
    return _known[subject.name]


def judge(kind: str, name: str, left_out: Sequence[str]) -> Record:
    """Whether a mutant is wrong, and the verdicts on it and on the right function."""
    mutant, start = _numbered(kind)[name], time.perf_counter()
    record: Record = {"kind": kind, "name": name, "family": mutant.family, "change": mutant.change()}
    try:
        wrong, original = mutant.pair()
    except Exception:  # what is written there now has no meaning
        return record | {"verdict": RAISES}
    record |= {"of": original.name, "verdict": compared(kind, wrong, original)}
    if record["verdict"] == DIFFERENT:
        known = _right(original, left_out)
        record["right"] = known
        for checker in CHECKERS:
            said = failing(wrong, checker, left_out, known[checker])
            record[checker] = sorted(set(said) - set(known[checker]))
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def judge_right(name: str, left_out: Sequence[str]) -> Record:
    """The verdicts on an operator of PyTorch's database."""
    subject = right.of_database(name)
    try:
        return {"name": name, "verdict": NOT_SMALL} if subject is None else _right(subject, left_out)
    except Exception as error:  # gradcheck has no function to look at
        return {"name": name, "verdict": f"{type(error).__name__}: {error}"}


class Results:
    """The results so far: mutants by kind and name, right functions by name; in a file, so that a run can resume."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.mutants: dict[str, Record] = known.get("mutants", {})
        self.right: dict[str, Record] = known.get("right", {})

    def add(self, record: Record) -> None:
        if "kind" not in record:
            self.right[record["name"]] = record
            return
        if (original := record.pop("right", None)) is not None:
            self.right[original["name"]] = original
        self.mutants[f"{record['kind']}: {record['name']}"] = record

    def save(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps({"mutants": self.mutants, "right": self.right}, indent=0))

    def wrong(self, kind: str | None = None) -> list[Record]:
        """The mutants that are wrong."""
        return [r for r in self.mutants.values() if r["verdict"] == DIFFERENT and kind in (None, r["kind"])]

    def count(self, verdict: str) -> int:
        """The number of candidates that are excluded for this reason."""
        return sum(r["verdict"] == verdict for r in self.mutants.values())

    def judged_right(self) -> list[Record]:
        """The right functions that have a verdict."""
        return [r for name, r in self.right.items() if "verdict" not in r and name not in right.NOT_RIGHT]

    def of_database(self) -> list[Record]:
        """Those of them that no mutant comes from."""
        originals = {r["of"] for r in self.wrong()}
        return [r for r in self.judged_right() if r["name"] not in originals]

    def ended(self) -> list[str]:
        """The mutants and right functions that ended their process."""
        return [k for known in (self.mutants, self.right) for k, r in known.items() if r.get("verdict") == ENDS]


def _start() -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of C++, one for each call


def run(
    kinds: Sequence[str], limit: int, rights: int, left_out: Sequence[str], workers: int, path: Path | None
) -> Results:
    """Judge `limit` mutants of each kind, their originals, and as many as `rights` operators of PyTorch's database."""
    results, last = Results(path), time.monotonic()
    sources()  # once, before the processes fork
    todo = _todo(results, kinds, limit, rights)
    # a pool for each process: what ends one is then known
    pools, running = [_pool() for _ in range(workers)], dict[Future[Record], tuple[int, Task]]()

    def start(place: int) -> None:
        if (task := next(todo, None)) is not None:
            running[pools[place].submit(task.judge, *task.arguments, left_out)] = place, task

    for place in range(workers):
        start(place)
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            place, task = running.pop(future)
            try:
                results.add(future.result())
            except BrokenProcessPool:
                results.add(task.record(ENDS))
                pools[place] = _pool()
            start(place)
        if time.monotonic() - last > 10:
            print(f"{len(results.wrong())} mutants, {len(results.judged_right())} right functions", flush=True)
            results.save()
            last = time.monotonic()
    results.save()
    for pool in pools:
        pool.shutdown()
    return results


class Task(NamedTuple):
    """A call of `judge` or of `judge_right`."""

    judge: Callable[..., Record]
    arguments: tuple[str, ...]

    def record(self, verdict: str) -> Record:
        return dict(zip(("name",) if len(self.arguments) == 1 else ("kind", "name"), self.arguments)) | {
            "verdict": verdict
        }


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork"), initializer=_start)


def _todo(results: Results, kinds: Sequence[str], limit: int, rights: int) -> Iterator[Task]:
    """One mutant of each kind in turn, until there are enough of each, then right functions."""
    waiting = {kind: iter(_numbered(kind)) for kind in kinds}
    while waiting:
        for kind in list(waiting):
            names = (n for n in waiting[kind] if f"{kind}: {n}" not in results.mutants)
            name = next(names, None) if len(results.wrong(kind)) < limit else None
            if name is None:
                del waiting[kind]
            else:
                yield Task(judge, (kind, name))
    for name in right.names() if rights else ():
        if len(results.of_database()) >= rights:
            return
        if name not in results.right:
            yield Task(judge_right, (name,))
