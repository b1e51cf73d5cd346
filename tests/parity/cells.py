"""The cells of the table: one way of using one row, on stock and under rules, and what came of it."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rows import Call, Row
from torch import Tensor
from ways import CHEAP, Numbers, Program, Way

import torch_manualgrad as mg
from torch_manualgrad.core.rule import reached
from torch_manualgrad.testing.numerics.finite_differences import tensors_close, worst

MODES: dict[str, tuple[str, ...]] = {"override()": (), 'override("*")': ("*",)}
AFTER = "after an override"  # nothing is active, and the kernels are registered still

# what may come of a cell
HOLDS, STOCK_FAILS, IMPROVED, FAILS = "holds", "stock fails", "improved", "fails"

RTOL = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 2e-3,
    torch.complex64: 2e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1e-1,
}
AGAIN = 30

PINNED = Path(__file__).with_name("pinned.md")
PINNED_NESTED = PINNED.with_name("pinned_nested.md")


@dataclass(frozen=True)
class Cell:
    """One sample in one way under one override.

    `outcome`: holds (stock is right there, and ours is the same), stock fails (it raises, is not finite, or is not what
    it is without the way), improved (ours differs from stock, is what it is without the way, and its rule claims better
    values), fails.
    """

    way: str
    row: str
    mode: str
    call: str
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.way} | {self.row} | {self.mode} | {self.call}: {self.outcome}: {self.detail}"


def measure(way: Way, row: Row, limit: int | None = None, pure: bool = False) -> list[Cell]:
    """All cells of one way and one row; with a limit, of so many samples of each dtype.

    Args:
        pure: stock is measured while nothing is registered, and what it gives after an override too; this takes longer.
    """
    cells: list[Cell] = []
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        if pure:
            mg.unregister()
        calls = [call for dtype in way.dtypes for call in _calls(row, dtype, limit)]
        stock = [attempt(way.run, call) for call in calls]
        trusted = [_reference(way, call, "stock") for call in calls]
        for mode, names in {**MODES, **({AFTER: None} if pure else {})}.items():
            if names == () and row.claims == ():
                continue  # no such rule in a plain override
            with nullcontext() if names is None else mg.override(*names):
                ours = [attempt(way.run, call) for call in calls]
                plain = [_reference(way, call, mode) for call in calls]
                again = [
                    _forwards(way, call, o) if _bits_differ(s, o) else [o] for call, s, o in zip(calls, stock, ours)
                ]
            for call, s, t, o, p, a in zip(calls, stock, trusted, ours, plain, again):
                references = _forwards(way, call, s) if len(a) > 1 else [s]
                outcome, detail = _judge(way, call, s, t, o, p, a, references)
                cells.append(Cell(way.name, row.name, mode, repr(call.problem.sample), outcome, detail))
    return cells


def _calls(row: Row, dtype: torch.dtype, limit: int | None) -> list[Call]:
    key = (row.name, dtype, limit)
    if key not in _known_calls:
        _known_calls[key] = row.calls(dtype, limit)
    return _known_calls[key]


_known_calls: dict[Any, list[Call]] = {}


def attempt(program: Program, call: Call) -> Numbers | Exception:
    try:
        return program(call)
    except Exception as error:
        # before torch 2.13 a checkpoint whose forward raised leaves its hooks on the thread for as long as its frame lives
        traceback.clear_frames(error.__traceback__)
        return error


def _reference(way: Way, call: Call, mode: str) -> Numbers | Exception | None:
    if way.reference is None:
        return None
    key = (way.reference, mode)
    if key not in call.references:
        call.references[key] = attempt(way.reference, call)
    return call.references[key]


def _bits_differ(stock: Any, ours: Any) -> bool:
    if isinstance(stock, Exception) or isinstance(ours, Exception):
        return False
    return any(n.startswith("forward") and not identical(ours.get(n), stock[n]) for n in stock)


def _forwards(way: Way, call: Call, first: Any) -> list[Numbers]:
    """Several runs: some of LAPACK's drivers are not reproducible in the last bit, and one run in twenty differs."""
    found = [attempt(way.run, call) for _ in range(AGAIN if way.cost == CHEAP else 0)]
    return [first, *(f for f in found if not isinstance(f, Exception))]


def identical(a: Any, b: Any) -> bool:
    """Bitwise identical; two nans are."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def close(a: Any, b: Any, rtol: float) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return a.shape == b.shape and tensors_close(a, b, (rtol, rtol * 1e-3))


def finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or bool(x.isfinite().all())


def _judge(
    way: Way,
    call: Call,
    stock: Any,
    trusted: Any,
    ours: Any,
    plain: Any,
    runs: Sequence[Any],
    stock_runs: Sequence[Any],
) -> tuple[str, str]:
    rtol = way.rtol or RTOL[call.problem.dtype]
    known = plain if isinstance(plain, dict) else {}
    values = {} if isinstance(ours, Exception) else ours
    improved = ""
    holds = False
    names = dict.fromkeys((*(stock if not isinstance(stock, Exception) else ()), *values))
    for name in names:
        s = stock.get(name) if not isinstance(stock, Exception) else None
        o, k = values.get(name), known.get(name)
        if s is not None and not isinstance(s, Exception) and finite(s) and _consistent(name, s, trusted, rtol):
            holds = True
            if isinstance(ours, Exception):
                return FAILS, f"raises {_line(ours)}"
            if o is None:
                errors = [_line(e) for e in values.values() if isinstance(e, Exception)]
                return FAILS, f"{name} is missing{': ' * bool(errors)}{'; '.join(errors)}"
            if name.startswith("forward"):
                bits = any(identical(a.get(name), b.get(name)) for a in runs for b in stock_runs)
                if not bits and not (way.cost != CHEAP and close(o, s, rtol)):
                    return FAILS, f"{name} is not stock's: {_difference(o, s)}"
            elif not close(o, s, rtol):
                if (
                    "values" in (call.row.claims or ())
                    and k is not None
                    and isinstance(o, Tensor)
                    and close(o, k, rtol)
                ):
                    improved = f"{name}: {_difference(o, s)}"
                else:
                    return FAILS, f"{name} is not stock's: {_difference(o, s)}"
        elif isinstance(s, Tensor):
            continue  # stock's number is wrong there, or nan: nothing is asked of ours
        elif isinstance(o, Tensor) and k is not None and finite(o) and finite(k) and not close(o, k, rtol):
            return FAILS, f"{name} is finite and wrong, where stock raises: {_difference(o, k)}"
    if improved:
        return IMPROVED, improved
    if holds:
        return HOLDS, ""
    return STOCK_FAILS, _line(stock) if isinstance(stock, Exception) else "not finite, or not what it is otherwise"


def _consistent(name: str, value: Any, trusted: Any, rtol: float) -> bool:
    if not isinstance(trusted, dict) or name not in trusted:
        return not isinstance(trusted, Exception)
    return close(value, trusted[name], rtol)


def _difference(a: Any, b: Any) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return f"{a} for {b}"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"
    absolute, relative = worst(a, b)
    return f"off by {absolute:.1e} (relative {relative:.1e}){'' if finite(a) else ', not finite'}"


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# -- what is declared -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """A declared exception: one way and row under a reason of pinned.md. A reason may begin with "since 2.15:"."""

    way: str
    row: str
    mode: str
    reason: str

    @property
    def here(self) -> bool:
        """Whether it is for the torch that is installed."""
        since = re.match(r"since ([\d.]+):", self.reason)
        return since is None or reached(since[1])

    def covers(self, cell: Cell) -> bool:
        return (self.way, self.row) == (cell.way, cell.row) and self.mode in ("both", cell.mode)


def _table(text: str) -> list[list[str]]:
    """The lines of the tables in a text, without their headers."""
    found = []
    for line in text.splitlines():
        fields = [f.strip() for f in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if line.startswith("|") and "override" not in fields and not set(fields[0]) <= set("- "):
            found.append(fields)
    return found


def pins() -> list[Pin]:
    """The cells that pinned.md declares for this torch."""
    found = []
    for section in PINNED.read_text().partition("\n## Suites")[0].split("\n### ")[1:]:
        reason, _, tables = section.partition("\n")
        for ways, rows, mode in _table(tables):
            found += [Pin(way, row, mode, reason) for way in ways.split("; ") for row in rows.split(", ")]
    return [pin for pin in found if pin.here]


def pinned_tests() -> dict[str, tuple[str, ...]]:
    """The tests of suites that pinned.md declares, with the overrides under which they change."""
    lines = _table(PINNED.read_text().partition("\n## Suites")[2])
    return {test: tuple(MODES) if mode == "both" else (mode,) for _, test, mode, _ in lines}


def pinned_nested_tests() -> tuple[str, ...]:
    """The names, without variants, of the tests of nested tensors that pinned_nested.md declares."""
    return tuple(re.findall(r"\btest_\w+(?=[,| ])", PINNED_NESTED.read_text().partition("\n| test |")[2]))
