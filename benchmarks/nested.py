"""Operators of nested tensors: both of torch's layouts, a dense tensor of as many rows, ours."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import main, measure, summary
from torch import Tensor

from torch_manualgrad import nested as N

STOCK = {"stock strided": torch.strided, "stock jagged": torch.jagged}
PADDED = 2**30  # bytes of padding, which torch's jagged layout makes for some operators, that are too many to take part
COLUMNS = ["batch", "width", "operator", "what", *STOCK, "dense", "ours", *(f"ours to {name}" for name in STOCK)]


def keep_memory() -> None:
    """Let glibc keep what is freed: else every result of some megabytes is new pages, whose first touch by the system
    takes longer than what is to be timed, and is the same for all."""
    if sys.platform == "linux":
        trim_threshold, mmap_threshold = -1, -3
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_threshold, 2**25)


def batches() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(0)
    return {
        "64 of 16 to 256": torch.randint(16, 257, (64,), generator=generator).tolist(),
        "512 of 1 to 64": torch.randint(1, 65, (512,), generator=generator).tolist(),
        "one of 8192 among 2000 of 4": [4] * 1000 + [8192] + [4] * 1000,
    }


def operators(width: int) -> dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]]:
    """name -> (torch's on a nested tensor, torch's on a dense one, ours)."""
    weight, bias = torch.ones(width), torch.zeros(width)
    return {
        "softmax, ragged dim": (lambda x: x.softmax(1), lambda x: x.softmax(0), lambda x: N.softmax(x, 1)),
        "softmax, dense dim": (lambda x: x.softmax(-1), lambda x: x.softmax(-1), lambda x: N.softmax(x, -1)),
        "sum, ragged dim": (lambda x: x.sum(1), lambda x: x.sum(0), lambda x: N.sum(x, 1)),
        "sum, dense dim": (
            lambda x: x.sum(-1, keepdim=True),
            lambda x: x.sum(-1, keepdim=True),
            lambda x: N.sum(x, -1, keepdim=True),
        ),
        "layer_norm": (
            lambda x: F.layer_norm(x, (width,), weight, bias),
            lambda x: F.layer_norm(x, (width,), weight, bias),
            lambda x: N.layer_norm(x, (width,), weight, bias),
        ),
        "gelu": (F.gelu, F.gelu, N.gelu),
        "silu": (F.silu, F.silu, N.silu),
        "relu": (F.relu, F.relu, N.relu),
    }


def outputs(lengths: list[int], width: int, name: str) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
    """(contender, its leaf, the operator's result): only of those who can."""
    parts = [torch.randn(n, width) for n in lengths]
    on_nested, on_dense, ours = operators(width)[name]
    values = torch.cat(parts)
    padded = len(lengths) * max(lengths) * width * values.element_size()
    for contender, layout in STOCK.items():
        if layout is torch.jagged and "ragged" in name and padded > PADDED:
            continue
        nested = torch.nested.nested_tensor(parts, layout=layout).requires_grad_()
        try:
            y = on_nested(nested)
            torch.autograd.grad(y, nested, torch.ones_like(y))
        except RuntimeError:
            continue
        yield contender, nested, lambda nested=nested: on_nested(nested)
    dense = values.clone().requires_grad_()
    yield "dense", dense, lambda: on_dense(dense)
    ragged = N.Ragged.from_components(parts, ragged_dims=[1])
    x = ragged.like(values.clone().requires_grad_())

    def run() -> Tensor:
        y = ours(x)
        return y.values if isinstance(y, N.Ragged) else y

    yield "ours", x.values, run


def gradient(y: Tensor, x: Tensor, cotangent: Tensor, retain: bool) -> Tensor:
    """Materialised: that of a sum is an expanded view else."""
    (found,) = torch.autograd.grad(y, x, cotangent, retain_graph=retain)
    return found if found.is_nested else found.contiguous()


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    keep_memory()
    found = []
    for batch, lengths in batches().items():
        for width in arguments.widths:
            for name in operators(width):
                forward: dict[str, Callable[[], Any]] = {}
                backward: dict[str, Callable[[], Any]] = {}
                both: dict[str, Callable[[], Any]] = {}
                for contender, x, run in outputs(lengths, width, name):
                    y = run()
                    cotangent = torch.randn_like(y)
                    forward[contender] = run
                    backward[contender] = lambda y=y, x=x, ct=cotangent: gradient(y, x, ct, True)
                    both[contender] = lambda x=x, run=run, ct=cotangent: gradient(run(), x, ct, False)
                for what, contenders in (("forward", forward), ("backward", backward), ("both", both)):
                    times = measure(contenders, arguments.seconds)
                    row: dict[str, Any] = {"batch": batch, "width": width, "operator": name, "what": what}
                    row |= summary(times, "dense")
                    row |= {f"ours to {s}": summary(times, s)["ours"] for s in STOCK if s in times}
                    found.append(row)
                print(".", end="", flush=True)
    print()
    return found


def kept(table: list[list[str]]) -> list[list[str]]:
    """Without the times of "ours to stock ...", which are those of "ours"."""
    columns = [k for k, name in enumerate(table[0]) if " to stock " not in name or not name.endswith(" us")]
    return [[line[k] for k in columns] for line in table]


if __name__ == "__main__":
    main(
        "nested",
        "Operators of nested tensors; ratios to the dense operator, in the last columns to stock's",
        rows,
        COLUMNS,
        threads=[1],
        options=lambda parser: parser.add_argument("--widths", type=int, nargs="+", default=(32, 256)),
        seconds=0.2,
        spread=("threads", "what"),
        kept=kept,
    )
