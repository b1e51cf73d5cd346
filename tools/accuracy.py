"""Measures how far derivatives are from the exact ones, PyTorch's and this package's.

Writes a line for each function to docs/accuracy.md, and one for each function, order and dtype to build/measure/accuracy.md,
which the site includes.

Each function of `accuracy_cases` is differentiated three times, in reverse and in forward mode, at points from the smallest to the
largest numbers of a dtype, with PyTorch's derivatives, under `override()` and under `override("*")`. The exact derivatives are
differences of the function in mpmath, in more than a thousand bits. An error is counted in units in the last place of the
exact value.

    python tools/accuracy.py                        (half an hour; `make measure` runs it)
    python tools/accuracy.py log_ndtr --points 40   (what is worse than PyTorch's is printed; the table stays)
"""

from __future__ import annotations

import argparse
import cmath
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_cases import CASES, Case
from mpmath import mp, mpf
from torch import Tensor

import torch_manualgrad as mg

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
WHOLE = PAGE.parents[1] / "build" / "measure" / PAGE.name
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
COMPLEX = (torch.complex128, torch.complex64)
ORDERS = (1, 2, 3)
ALLOWED = 4.0  # units in the last place, where PyTorch's are less
LARGE = 100.0  # an error of PyTorch's from which on the page has a function
OVERRIDES: dict[str, Callable[[], Any]] = {"override()": mg.override, 'override("*")': lambda: mg.override("*")}
_STEP = 60  # the exponent of the step of the differences
_EDGES = (0.0, 1e-3, 0.1, 1.0, 4.0, 10.0, 20.0, 40.0, 100.0, 1e4, math.inf)  # of regions, by the size of x
_SPECIAL = (0.0, 0.5, 1.0, 2.0, 3.0, 8.0, 12.5, 14.0, 20.0, 30.0, 38.5, 88.0, 100.0, 700.0)


# -- points and what is exact -----------------------------------------------------------------------------------------


def points(case: Case, dtype: torch.dtype, count: int) -> Tensor:
    """Numbers of both signs in the domain: the special ones, some of every size, and most between 1e-3 and 1e3."""
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(count)
    unit = torch.rand(3 * count, dtype=torch.float64, generator=generator)
    wide = math.log(info.smallest_normal) + unit[:count] * (math.log(info.max) - math.log(info.smallest_normal))
    near = math.log(1e-3) + unit[count:] * math.log(1e6)
    sizes = torch.cat([torch.tensor(_SPECIAL, dtype=torch.float64), wide.exp(), near.exp()])
    signs = torch.where(torch.rand(sizes.shape, generator=generator) < 0.5, -1.0, 1.0)
    low, high = case.domain
    x = torch.cat([sizes[: len(_SPECIAL)], -sizes[: len(_SPECIAL)], (sizes * signs)[len(_SPECIAL) :]]).to(dtype)
    if math.isfinite(low) and math.isfinite(high):
        x = torch.cat([x, (low + (high - low) * unit[:count]).to(dtype)])
    inside = (x > low) & (x < high) & x.isfinite() & ((x != 0) | torch.tensor(not case.singular))
    x = x[inside].unique()
    return x[torch.randperm(len(x), generator=generator)[:count]].sort().values


def complex_points(case: Case, dtype: torch.dtype, count: int) -> Tensor:
    """The same moduli, off the real line by angles of every size, and on the side of the branch cut where the domain is."""
    x = points(case, dtype.to_real(), count)
    x = x[x.abs() > 0].to(torch.float64)
    generator = torch.Generator().manual_seed(count)
    unit = 2 * torch.rand(x.shape, dtype=torch.float64, generator=generator) - 1
    angle = torch.where(torch.arange(len(x)) % 3 == 0, 1e-6 * unit, 0.45 * math.pi * unit)
    return torch.polar(x.abs(), angle + math.pi * (x < 0)).to(dtype)


def dtypes(case: Case) -> tuple[torch.dtype, ...]:
    """The dtypes that a function is compared in."""
    return DTYPES + (COMPLEX if case.holomorphic else ())


def exact(case: Case, x: complex) -> list[Any]:
    """The function, its derivatives of all orders, and the next."""
    with mp.workprec(case.bits):
        at = mp.mpmathify(x)
        h = (abs(at) if case.singular else 1) * mpf(2) ** -_STEP
        far_left, left, here, right, far_right = (case.exact(at + k * h) for k in (-2, -1, 0, 1, 2))
        found = [
            here,
            (8 * (right - left) - (far_right - far_left)) / (12 * h),
            (16 * (right + left) - 30 * here - far_right - far_left) / (12 * h * h),
            (far_right - far_left - 2 * (right - left)) / (2 * h**3),
            (far_right + far_left - 4 * (right + left) + 6 * here) / h**4,
        ]
        noise = abs(here) * mpf(2) ** (20 - case.bits)
        return [d if abs(d) * h**n > noise else mpf(0) for n, d in enumerate(found)]


def error(found: complex, expected: Any, change: Any, dtype: torch.dtype) -> float:
    """The distance in units in the last place of what is expected, where this is in the range of the dtype.

    Next to a root of the derivative a unit is what a change of x by one unit makes of it, ``change``, and where the function changes
    on the scale of 1, a unit of 1.
    """
    info = torch.finfo(dtype)
    if dtype.is_complex:
        if max(abs(expected.real), abs(expected.imag)) > info.max / 4:
            return 0.0  # which parts overflow first is not compared
        if not cmath.isfinite(found):
            return math.inf
        exponent = max(mp.frexp(abs(expected))[1] - 1 if expected else -10000, round(math.log2(info.smallest_normal)))
        distance = abs(mp.mpmathify(found) - expected)
        return float(distance / (mpf(info.eps) * max(mpf(2) ** exponent, abs(change))))
    if abs(expected) > info.max:
        return 0.0 if math.isinf(found) and (found > 0) == (expected > 0) or abs(found) == info.max else math.inf
    if not math.isfinite(found):
        return math.inf
    exponent = max(mp.frexp(expected)[1] - 1 if expected else -10000, round(math.log2(info.smallest_normal)))
    return float(abs(mpf(found) - expected) / (mpf(info.eps) * max(mpf(2) ** exponent, abs(change))))


def change(case: Case, x: complex, exact: list[Any], order: int) -> Any:
    """The change of this derivative per unit of x; for derivatives that are 0, of the ones before."""
    scale = mpf(abs(x) if case.singular else 1)
    if exact[order] == 0 == exact[order + 1]:
        return max(abs(d) / scale ** (order - k) for k, d in enumerate(exact[:order]))
    return exact[order + 1] * scale


# -- what is measured -------------------------------------------------------------------------------------------------


def reverse(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    found, result = function(x), []
    for _ in ORDERS:
        if found.requires_grad:
            (found,) = torch.autograd.grad(found, x, torch.ones_like(found), create_graph=True, materialize_grads=True)
            found = found.conj()  # of a holomorphic function the gradient is the conjugate derivative
        else:
            found = torch.zeros_like(x)
        result.append(found.detach())
    return result


def forward(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    result, one = [], torch.ones_like(x)
    for _ in ORDERS:
        function = lambda x, f=function: torch.func.jvp(f, (x,), (one,))[1]  # noqa: E731
        result.append(function(x))
    return result


MODES = {"reverse": reverse, "forward": forward}


def region(x: complex) -> tuple[bool, int]:
    """By the sign of the real part, and the size."""
    return x.real < 0, sum(abs(x) >= edge for edge in _EDGES)


@dataclass
class Measured:
    """The largest error in one region, and where it is."""

    case: Case
    dtype: torch.dtype
    order: int
    mode: str
    which: str
    ours: float
    at: complex
    stock: float
    stock_at: complex

    @property
    def is_worse(self) -> bool:
        return self.ours > max(self.stock, ALLOWED)


def _run(mode: str, function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor] | None:
    try:
        return MODES[mode](function, x)
    except (RuntimeError, NotImplementedError):
        return None


def measure(case: Case, dtype: torch.dtype, count: int) -> Iterator[Measured]:
    """Region by region."""
    x = (complex_points if dtype.is_complex else points)(case, dtype, count)
    numbers = x.tolist()
    expected = [exact(case, v) for v in numbers]
    for mode in MODES:
        stock = _run(mode, case.function, x)
        for which, override in OVERRIDES.items():
            with override():
                ours = _run(mode, case.function, x)
            for n in ORDERS:
                worst: dict[Any, list[tuple[float, complex]]] = {}
                for i, v in enumerate(numbers):
                    errors = [
                        math.inf
                        if found is None
                        else error(
                            found[n - 1][i].item(),
                            expected[i][n],
                            change(case, v, expected[i], n),
                            dtype,
                        )
                        for found in (ours, stock)
                    ]
                    regions = worst.setdefault(region(v), [(-1.0, v), (-1.0, v)])
                    for k, e in enumerate(errors):
                        regions[k] = max(regions[k], (e, v), key=lambda found: found[0])
                for (a, at), (b, stock_at) in worst.values():
                    yield Measured(case, dtype, n, mode, which, a, at, b, stock_at)


# -- the page ---------------------------------------------------------------------------------------------------------

_TOP = """# Accuracy

How far derivatives are from the exact ones, in units in the last place: the largest error, PyTorch's / that under
`override()`, at {count} points from the smallest to the largest numbers of the dtype. In cells marked * it is that of
`override("*")`. "wrong" means nan, an infinity where the exact value is finite, or an error.

"""
_MIDDLE = """The table lists the functions for which PyTorch has an error above {large} units, and the largest errors of three orders of
derivatives, in the dtypes in which the two differ by more than {allowed} units. The whole table has the others, and each order.
"""
_WHOLE = """The table lists the derivatives whose largest error is more than {allowed} units below PyTorch's: for each function and order,
the region where PyTorch's error is the largest. Order 2 is the second derivative. Elsewhere the two are the same, or within
{allowed} units of the exact value.
"""
_END = """
Under an override no derivative is less accurate than PyTorch's by more than {allowed} units, except for the functions in
`BY_CHANCE` in `tests/derivatives/test_accuracy.py`, which has the factor and the reason. Holomorphic functions are compared in
complex numbers, too. Where the exact derivative is infinite the result may be nan.

`make measure` measures this again with `tools/accuracy.py`, and writes the whole table to `build/measure/accuracy.md`, which
the site includes. Here: torch {torch}, CPU.
"""


def _number(e: float) -> str:
    return "wrong" if math.isinf(e) else f"{e:.1f}" if e < 10 else f"{e:.2g}"


def _top(middle: str, count: int) -> str:
    version = torch.__version__.split("+")[0]
    return (_TOP + middle + _END).format(count=count, allowed=round(ALLOWED), large=round(LARGE), torch=version)


def better(found: Sequence[Measured], dtype: torch.dtype) -> dict[tuple[str, int], Measured]:
    """For each function and order the region where PyTorch's error is the largest, if ours is smaller."""
    rows: dict[tuple[str, int], Measured] = {}
    for m in found:
        if m.dtype is not dtype or not m.stock > m.ours + ALLOWED:
            continue
        key = (m.case.name, m.order)
        if key not in rows or (m.stock, -m.ours, m.which == "override()") > (
            rows[key].stock, -rows[key].ours, rows[key].which == "override()"
        ):  # fmt: skip
            rows[key] = m
    return dict(sorted(rows.items()))


def whole(found: Sequence[Measured], count: int) -> str:
    lines = [_top(_WHOLE, count)]
    for dtype in DTYPES + COMPLEX:
        lines.append(f"\n## {str(dtype).removeprefix('torch.')}\n")
        if not (rows := better(found, dtype)):
            lines.append("Nothing differs by more.")
            continue
        lines += ["| function | order | x | PyTorch | override |", "| --- | --- | --- | --- | --- |"]
        for (name, order), m in rows.items():
            star = "" if m.which == "override()" else " *"
            lines.append(f"| {name}{star} | {order} | {m.stock_at:.3g} | {_number(m.stock)} | {_number(m.ours)} |")
    return "\n".join(lines) + "\n"


def page(found: Sequence[Measured], count: int) -> str:
    """A line for each function: the largest error of its orders, which need not be of one order."""
    table: dict[str, dict[torch.dtype, list[Measured]]] = {}
    for dtype in DTYPES + COMPLEX:
        for (name, _), m in better(found, dtype).items():
            table.setdefault(name, {}).setdefault(dtype, []).append(m)
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES + COMPLEX]
    lines = [_top(_MIDDLE, count), f"| function | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for name, errors in sorted(table.items()):
        if max(m.stock for orders in errors.values() for m in orders) > LARGE:
            lines.append(f"| {name} | {' | '.join(_cell(errors.get(dtype, [])) for dtype in DTYPES + COMPLEX)} |")
    return "\n".join(lines) + "\n"


def _cell(orders: Sequence[Measured]) -> str:
    if not orders:
        return ""
    star = "" if all(m.which == "override()" for m in orders) else " *"
    return f"{_number(max(m.stock for m in orders))} / {_number(max(m.ours for m in orders))}{star}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="parts of names of functions; all by default")
    parser.add_argument("--points", type=int, default=200)
    options = parser.parse_args(arguments)
    chosen = [c for c in CASES if not options.names or any(n in c.name for n in options.names)]
    found = []
    for case, dtype in [(c, d) for c in chosen for d in dtypes(c)]:
        measured = list(measure(case, dtype, options.points))
        found += measured
        for m in measured:
            if m.is_worse:
                print(
                    f"{case.name}, {dtype}, order {m.order}, {m.mode}, {m.which}: {_number(m.ours)} units at {m.at!r}; "
                    f"PyTorch's {_number(m.stock)}",
                    flush=True,
                )
    if not options.names:
        PAGE.write_text(page(found, options.points))
        WHOLE.parent.mkdir(parents=True, exist_ok=True)
        WHOLE.write_text(whole(found, options.points))
    return any(m.is_worse for m in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
