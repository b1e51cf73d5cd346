"""Derivatives of attention that PyTorch's fused kernel lacks: by products and a softmax, which PyTorch differentiates, and ours."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor

import torch_manualgrad as mg

# heads, length, width of a head; dtype; causal
CASES = [
    ((4, 1024, 64), torch.float32, False),
    ((4, 1024, 64), torch.float32, True),
    ((4, 1024, 64), torch.float64, False),
    ((1, 2048, 64), torch.float32, False),
    ((16, 128, 32), torch.float32, False),
]
COLUMNS = ["derivative", "shape", "dtype", "causal", "math", "ours", "math MB", "ours MB"]


def by_products(is_causal: bool) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ v

    return attention


def fused(is_causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def jvp(f: Callable[..., Tensor], inputs: list[Tensor], directions: list[Tensor]) -> object:
    return torch.func.jvp(f, tuple(inputs), tuple(directions))


def reverse(order: int) -> Callable[..., object]:
    def derivative(f: Callable[..., Tensor], inputs: list[Tensor], directions: list[Tensor]) -> object:
        inputs = [x.detach().requires_grad_() for x in inputs]
        loss, found = f(*inputs).sin().sum(), None
        for left in range(order - 1, -1, -1):
            found = torch.autograd.grad(loss, inputs, create_graph=left > 0)
            if left:
                loss = torch.stack([(g * d).sum() for g, d in zip(found, directions)]).sum()
        return found

    return derivative


DERIVATIVES = {"jvp": jvp, "second order, rev-rev": reverse(2), "third order, rev-rev-rev": reverse(3)}


def return_memory() -> None:
    """Let glibc give what is freed back to the system, so that the size of the process is that of what is alive."""
    mmap_threshold = -3
    ctypes.CDLL(None).mallopt(mmap_threshold, 2**17)


def peak_megabytes(run: Callable[[], object]) -> float:
    """By how much the process grows while this runs: /proc/self tells, and starts to count again when asked to."""
    run()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _megabytes("VmRSS")
    run()
    return round(_megabytes("VmHWM") - before, 1)


def _megabytes(what: str) -> float:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) / 1024


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found, all_contenders = [], []
    for derivative, differentiated in DERIVATIVES.items():
        if arguments.only not in derivative:
            continue
        for shape, dtype, is_causal in CASES:
            inputs, directions = ([torch.randn(1, *shape, dtype=dtype) for _ in range(3)] for _ in range(2))
            contenders: dict[str, Callable[[], object]] = {
                name: lambda f=f, d=differentiated, i=inputs, t=directions: d(f, i, t)
                for name, f in (("math", by_products(is_causal)), ("ours", fused(is_causal)))
            }
            row: dict[str, Any] = {"derivative": derivative, "shape": " x ".join(map(str, shape))}
            row |= {"dtype": str(dtype).removeprefix("torch."), "causal": is_causal}
            row |= summary(measure(contenders, arguments.seconds, {"ours": mg.override()}), "math")
            found.append(row)
            all_contenders.append(contenders)
    return_memory()  # which takes time, and so comes last
    for row, contenders in zip(found, all_contenders):
        row["math MB"] = peak_megabytes(contenders["math"])
        with mg.override():
            row["ours MB"] = peak_megabytes(contenders["ours"])
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="derivatives whose name has this in it")


if __name__ == "__main__":
    memory = ["math MB", "ours MB"]
    main("attention", "Attention: jvp, second and third order", rows, COLUMNS, (1,), options, found=memory)
