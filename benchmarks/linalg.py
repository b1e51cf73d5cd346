"""Forward, backward, and both, of the decompositions and solves: stock eager, stock compiled, ours.

Ours is a plain override(), which leaves to stock what stock does as well. Forwards of our own are for lu, svd and eigh;
without them the forward is stock's.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor

import torch_manualgrad as mg

L = torch.linalg
SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 500, 1000, 2000)
RECTANGLES = ((200, 10), (2000, 64), (10, 200))
FULL = 16 * 2**20  # bytes of a batch
COLUMNS = [
    "operator",
    "batch",
    "matrix",
    "dtype",
    "what",
    "stock",
    "compiled",
    "ours",
    "ours, forward=True",
    "double",
    "product",
]


def _definite(x: Tensor) -> Tensor:
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _plain(x: Tensor) -> Tensor:
    return x


# name -> (what the input is made of, the function, whether rectangles too)
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any], bool]] = {
    "lu": (_plain, lambda x: L.lu(x)[1:], True),
    "svd": (_plain, lambda x: L.svd(x, full_matrices=False), True),
    "eigh": (_definite, L.eigh, False),
    "cholesky": (_definite, L.cholesky, False),
    "det": (_definite, L.det, False),
    "inv": (_definite, L.inv, False),
    "solve": (_definite, lambda x: L.solve(x, x.detach()), False),
    "qr": (_plain, lambda x: L.qr(x), True),
}
# Operators that have a replacement primal.
FORWARDS = ("lu", "svd", "eigh", "solve", "cholesky")


# Of which the compiled contenders are timed too, in the largest batch and on one thread: compiling takes seconds a row.
COMPILED = (4, 16, 64, 500)


def full(n: int, dtype: torch.dtype) -> int:
    return 1 if n >= 500 else max(1, FULL // (n * n * dtype.itemsize))


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    few = arguments.batches if torch.get_num_threads() == 1 else ()  # several threads are of no use to these
    for name in arguments.operators:
        for dtype in (torch.float32, torch.float64):
            for n in arguments.sizes:
                for batch in dict.fromkeys((*few, full(n, dtype))):
                    if batch <= full(n, dtype):
                        yield name, (batch, n, n), dtype
            if OPERATORS[name][2] and arguments.rectangles:
                for m, n in RECTANGLES:
                    yield name, (max(1, FULL // (m * n * dtype.itemsize)) if m * n < 10_000 else 1, m, n), dtype


def outputs(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def contender(
    function: Callable[[Tensor], Any], x: Tensor, cotangents: list[Tensor], what: str
) -> Callable[[], object]:
    if what == "forward":
        value = x.detach()
        return lambda: function(value)
    if what == "backward":
        result = outputs(function(x))
        return lambda: torch.autograd.grad(result, x, cotangents, retain_graph=True)
    return lambda: torch.autograd.grad(outputs(function(x)), x, cotangents)


def contest(
    what: str, name: str, function: Callable[[Tensor], Any], x: Tensor, cotangents: list[Tensor]
) -> tuple[dict[str, Callable[[], object]], dict[str, AbstractContextManager[object]]]:
    """The contenders, and what they run inside of."""
    contenders = {"stock": contender(function, x, cotangents, what)}
    inside: dict[str, AbstractContextManager[object]] = {}
    if what != "forward":
        inside["ours"] = mg.override()
        with mg.override():  # for the graph of a backward
            contenders["ours"] = contender(function, x, cotangents, what)
    if what != "backward" and name in FORWARDS:
        inside["ours, forward=True"] = mg.override(forward=True)
        contenders["ours, forward=True"] = contender(function, x, cotangents, what)
    if what == "backward":
        y, z = x.detach(), x.detach().clone()
        contenders["double"] = lambda: y * 2
        contenders["product"] = lambda: y @ z.mT
    return contenders, inside


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    generator = torch.Generator().manual_seed(0)
    for name, shape, dtype in cases(arguments):
        make, function, _ = OPERATORS[name]
        x = make(torch.randn(shape, dtype=dtype, generator=generator).to(arguments.device)).requires_grad_()
        try:
            with torch.no_grad():
                cotangents = [torch.randn_like(o) for o in outputs(function(x))]
        except RuntimeError as error:  # cuSOLVER's eigh of a hundred thousand matrices
            print(f"\n{name} {shape} {dtype}: PyTorch raises {error}")
            continue
        for what in ("forward",) * (name in FORWARDS) + ("backward", "forward + backward"):
            contenders, inside = contest(what, name, function, x, cotangents)
            n = shape[-1]
            row = {"operator": name, "batch": "16 MB" if 1 < shape[0] == full(n, dtype) else str(shape[0])}
            row |= {"matrix": f"{shape[1]}x{n}", "dtype": str(dtype)[6:], "what": what}
            whole = what == "forward + backward" and shape == (full(n, dtype), n, n) and n in COMPILED
            more = whole and torch.get_num_threads() == 1
            if more and arguments.compile:
                contenders["compiled"] = contender(torch.compile(function), x, cotangents, what)
            times = measure(contenders, arguments.seconds, inside)
            found.append(row | summary(times, "stock"))
            print(".", end="", flush=True)
    print()
    return found


# contender -> the operators whose ratios are kept
KEPT = {
    "backward ours": tuple(OPERATORS),
    "forward + backward ours": tuple(OPERATORS),
    "forward + backward ours, forward=True": FORWARDS,
}


def kept(table: list[list[str]]) -> list[list[str]]:
    """What plots and documents show: a line for each operator, contender and batch, of square matrices on one thread.

    Batches of 16 MB, which from n = 500 on are one matrix, keep their quartiles.
    """
    rows = [dict(zip(table[0], line)) for line in table[1:]]
    square = {(r["operator"], r["batch"], r["matrix"]): r for r in rows}
    places = [(dtype, n) for dtype in ("float32", "float64") for n in SIZES]
    names = [f"{dtype} {n}x{n} {of}" for dtype, n in places for of in ("ratio", "quartiles")]
    lines = [["operator", "contender", "batch", *names]]
    for contender, operators in KEPT.items():
        for operator, batch in itertools.product(operators, ("16 MB", "100", "1")):
            line = [operator, contender, batch]
            for dtype, n in places:
                large = batch == "16 MB"
                row = square.get((operator, "1" if large and n >= 500 else batch, f"{n}x{n}"), {})
                column = f"1 threads {dtype} {contender}"
                line += [row.get(f"{column} ratio", ""), row.get(f"{column} quartiles", "") if large else ""]
            lines.append(line)
    return lines


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operators", nargs="+", choices=list(OPERATORS), default=list(OPERATORS))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument(
        "--batches", type=int, nargs="*", default=(1, 10, 100), help="in addition to the one that fills 16 MB"
    )
    parser.add_argument("--no-rectangles", dest="rectangles", action="store_false")
    parser.add_argument("--no-compile", dest="compile", action="store_false")


if __name__ == "__main__":
    warnings.simplefilter("ignore", mg.linalg.GaugeWarning)  # cotangents are random
    main(
        "linalg",
        "Linear algebra: batches of about 16 MB, and small ones",
        rows,
        COLUMNS,
        options=options,
        seconds=0.2,
        spread=("threads", "dtype", "what"),
        kept=kept,
    )
