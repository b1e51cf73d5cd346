"""Backward of the vector norm, large: stock eager, torch.compile of stock, ours, and the floor (one read, one write)."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from side_by_side import main, measure, summary

import torch_manualgrad as mg

CASES = [
    # shape, dim, orders, dtype
    ((10_000_000,), None, (2.0, 3.0, math.inf, 1.0, 1.5, 4.0, 2.5), torch.float32),
    ((10_000_000,), None, (2.0, math.inf), torch.float64),
    ((10_000_000,), None, (2.0, math.inf), torch.bfloat16),
    ((100_000, 100), -1, (2.0, 3.0, math.inf), torch.float32),
    ((1_000, 10_000), 0, (2.0, 3.0, math.inf), torch.float32),
    ((100_000,), None, (2.0, 3.0, math.inf), torch.float32),
]
COLUMNS = ["elements", "dim", "dtype", "p", "stock", "compiled stock", "ours", "floor", "ours over floor"]


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for shape, dim, orders, dtype in CASES:
        for p in orders:
            x = torch.randn(shape, device=arguments.device).to(dtype).requires_grad_()
            plain = x.detach()

            def norm(x: torch.Tensor, p: float = p, dim: int | None = dim) -> torch.Tensor:
                return torch.linalg.vector_norm(x, p, dim)

            graphs = {"stock": norm(x)}
            torch.compiler.reset()
            graphs["compiled stock"] = torch.compile(norm)(x)
            with mg.override("aten::linalg_vector_norm"):
                graphs["ours"] = norm(x)
            cotangents = {name: torch.ones_like(y) for name, y in graphs.items()}

            def backward(name: str) -> Any:
                y, ct = graphs[name], cotangents[name]
                return lambda: torch.autograd.grad(y, x, ct, retain_graph=True)

            contenders = {name: backward(name) for name in graphs}
            contenders["floor"] = lambda: plain * 2
            result = summary(measure(contenders, arguments.seconds), "stock")
            row: dict[str, Any] = {"elements": "x".join(map(str, shape)), "dim": dim, "dtype": str(dtype)[6:], "p": p}
            row |= result
            row["ours over floor"] = f"{result['ours']['us'] / result['floor']['us']:.2f}"
            found.append(row)
    return found


if __name__ == "__main__":
    main("norm", "Backward of torch.linalg.vector_norm", rows, COLUMNS, found=["ours over floor"])
