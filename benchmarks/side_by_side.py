"""Times several contenders in one run, in turn, so that a slow spell of the machine affects all of them."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch

import torch_manualgrad as mg

RESULTS = Path(__file__).parent / "results"
RAW = Path(__file__).resolve().parents[1] / "build" / "benchmarks"


def measure(
    contenders: Mapping[str, Callable[[], object]],
    seconds: float = 1.5,
    inside: Mapping[str, AbstractContextManager[object]] | None = None,
) -> dict[str, list[float]]:
    """Times in seconds of each contender, one entry a round.

    A round calls each contender so often that it takes about ten milliseconds, after two to ten calls that are not timed:
    a loop finds its code and data in the caches, not those of another contender. There are as many rounds as fit, at
    least 3, of slow ones 2.
    ``inside``: what a contender runs inside of; entered and left outside of the time taken.
    """
    calls = {}
    around = {name: (inside or {}).get(name, nullcontext()) for name in contenders}
    for name, run in contenders.items():
        with around[name]:
            took = seconds_of(run)
            if took < 0.05:  # the first call of a short one is longer than the others
                took = seconds_of(run)
        calls[name] = max(1, min(2000, int(1e-2 / max(took, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    begin = now = time.perf_counter()
    rounds = 0
    while rounds < 2 or rounds < 3 and now < begin + 10 * seconds or now < begin + seconds:
        for name, run in contenders.items():
            with around[name]:
                seconds_of(run, min(calls[name] // 2, 10) if calls[name] > 5 else 2)
                times[name].append(seconds_of(run, calls[name]) / calls[name])
        rounds += 1
        now = time.perf_counter()
    return times


def _settle() -> None:
    """Wait for the kernels that were launched."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], calls: int = 1) -> float:
    """The time of so many calls, with the kernels that they launch."""
    if isinstance(run, Elsewhere):
        return run.seconds(calls)
    _settle()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _settle()
    return time.perf_counter() - start


class Elsewhere:
    """A contender in a process of its own, which reads requests and prints answers, in lines of JSON."""

    def __init__(self, script: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: Any) -> Any:
        """The answer; None if the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline() or "null")
        except BrokenPipeError:
            return None

    def seconds(self, calls: int) -> float:
        """The time of so many calls."""
        return float(self.ask(calls))

    def __call__(self) -> None:
        self.seconds(1)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def summary(times: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, float]]:
    """Median microseconds of each, and how many times faster than ``baseline``: median and quartiles over rounds."""
    result = {}
    for name, values in times.items():
        ratios = [b / v for b, v in zip(times[baseline], values)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        result[name] = {"us": statistics.median(values) * 1e6, "ratio": middle, "low": low, "high": high}
    return result


def machine() -> dict[str, Any]:
    """The hardware: a processor also by its family and model, as virtual machines hide the rest of its name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    first = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    cpu = first.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in first:
        cpu += f" family {first['cpu family']} model {first['model']}"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "torch_manualgrad": mg.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def cell(entry: Mapping[str, float]) -> str:
    """``12.3 us, 2.5x [2.3, 2.7]``."""
    us = entry["us"]
    took = f"{us:.1f} us" if us < 1e3 else f"{us / 1e3:.2f} ms"
    return f"{took}, {entry['ratio']:.2f}x [{entry['low']:.2f}, {entry['high']:.2f}]"


def quartiles(entry: Mapping[str, float]) -> str:
    """Of a ratio over the rounds, ``2.3 to 2.7``."""
    return f"{entry['low']:.3g} to {entry['high']:.3g}"


def widened(row: Mapping[str, Any], earlier: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """A row of the last of so many runs, and that of those before: the geometric mean of all runs, and the range of all."""
    result = dict(row)
    for name, entry in row.items():
        if isinstance(entry, dict) and isinstance(before := earlier.get(name), dict):
            result[name] = {key: before[key] * (entry[key] / before[key]) ** (1 / runs) for key in ("us", "ratio")}
            result[name] |= {"low": min(before["low"], entry["low"]), "high": max(before["high"], entry["high"])}
    return result


def _what(row: Mapping[str, Any], found: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """The key of a row: all columns but times and those in ``found``."""
    return tuple((k, v) for k, v in row.items() if not isinstance(v, dict) and k not in found)


def rounded(document: Mapping[str, Any], spread: Sequence[str], found: Sequence[str]) -> list[list[str]]:
    """The rows as a table to keep: microseconds, ratios and their quartiles, what ``spread`` names side by side."""
    given = [k for row in document["rows"] for k, _ in _what(row, found)]
    keys = [k for k in dict.fromkeys(given) if k not in spread]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in document["rows"]:
        line = lines.setdefault(tuple(str(row.get(k, "")) for k in keys), {})
        line |= {k: str(row[k]) for k in found if k in row}
        where = " ".join(f"{row[k]} threads" if k == "threads" else str(row[k]) for k in spread if k in row)
        for contender, entry in row.items():
            if isinstance(entry, dict):
                line[f"{where} {contender} us".strip()] = f"{entry['us']:.3g}"
                if entry["low"] != entry["high"]:
                    line[f"{where} {contender} ratio".strip()] = f"{entry['ratio']:.3g}"
                    line[f"{where} {contender} quartiles".strip()] = quartiles(entry)
    columns = list(dict.fromkeys(c for line in lines.values() for c in line))
    return [[*keys, *columns], *([*key, *(line.get(c, "") for c in columns)] for key, line in lines.items())]


def write(path: Path, document: Mapping[str, Any], lines: Sequence[Sequence[str]]) -> None:
    """A table as CSV; its first line names the machine and the day."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        about = ", ".join(f"{k} {v}" for k, v in document["machine"].items() if v is not None)
        file.write(f"# {document['about']}; {about}, date {document['date']}, runs {document['runs']}\n")
        csv.writer(file, lineterminator="\n").writerows(lines)


def main(
    name: str,
    about: str,
    run: Callable[[argparse.Namespace], list[dict[str, Any]]],
    columns: list[str],
    threads: Sequence[int] = (1, 2),
    options: Callable[[argparse.ArgumentParser], None] | None = None,
    seconds: float = 1.5,
    spread: Sequence[str] = ("threads",),
    found: Sequence[str] = (),
    kept: Callable[[list[list[str]]], list[list[str]]] | None = None,
) -> None:
    """Run a benchmark once for each number of threads, print its table, and write it to ``results/<name>.csv``.

    All figures are in ``build/benchmarks/<name>.json``. With ``--add`` the rows of the last run stay that this one does
    not measure. With ``--again`` those that it does measure are put together with those of the last: the quartiles of one
    process's rounds know nothing of what differs from process to process, as where memory lies. ``spread`` names what
    is in columns, side by side; ``found`` has the measured columns that are not times. Where the table is large, ``kept``
    makes the one that is kept of it, and the whole is ``build/benchmarks/<name>.csv``.

    ``options`` adds the benchmark's own; ``seconds`` is the default time of a row. plots.py draws the tables.
    """
    parser = argparse.ArgumentParser(description=about)
    if options is not None:
        options(parser)
    parser.add_argument("--seconds", type=float, default=seconds, help="for each row")
    parser.add_argument("--threads", type=int, nargs="+", default=threads)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry", action="store_true", help="write no file")
    parser.add_argument("--add", action="store_true", help="to the rows of the last run, on the same machine")
    parser.add_argument("--again", action="store_true", help="widen the quartiles of the last run, on the same machine")
    arguments = parser.parse_args()
    name += "" if arguments.device == "cpu" else f"_{arguments.device}"
    path = RAW / f"{name}.json"
    document: dict[str, Any] = {"about": about, "machine": machine(), "date": str(date.today()), "runs": 1, "rows": []}
    earlier: list[dict[str, Any]] = []
    if (arguments.add or arguments.again) and path.exists():
        last = json.loads(path.read_text())
        if last["machine"] != document["machine"]:
            parser.error(f"{path.name} was measured on another machine or version: {last['machine']}")
        earlier = last["rows"]
        document["runs"] = last.get("runs", 1)
    for count in arguments.threads:
        torch.set_num_threads(count)
        print(f"\n{about}\n{count} thread(s), {arguments.device}; times and ratios to stock eager [quartiles]\n")
        rows = run(arguments)
        print(table([{k: cell(v) if isinstance(v, dict) else v for k, v in row.items()} for row in rows], columns))
        document["rows"] += [{"threads": count, **row} for row in rows]
    if not arguments.dry:
        RAW.mkdir(parents=True, exist_ok=True)
        before = {_what(row, found): row for row in earlier}
        if arguments.again and before and any(isinstance(v, dict) for row in earlier for v in row.values()):
            document["runs"] += 1
            document["rows"] = [
                widened(row, before.get(_what(row, found), {}), document["runs"]) for row in document["rows"]
            ]
        measured = {_what(row, found) for row in document["rows"]}
        document["rows"] = [row for row in earlier if _what(row, found) not in measured] + document["rows"]
        path.write_text(json.dumps(document, indent=1) + "\n")
        lines = rounded(document, spread, found)
        if kept is not None:
            write(RAW / f"{name}.csv", document, lines)
            lines = kept(lines)
        place = RESULTS / f"{name}.csv"
        write(place, document, lines)
        print(f"\nwritten: {place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place.name}")
