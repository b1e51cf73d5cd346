"""Backward of pairwise distances: stock eager and ours, through autograd."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor

import torch_manualgrad as mg

ORDERS = (1.0, 2.0, 3.0, 1.5, 2.5, math.inf)
CASES = [
    # shapes: two for cdist, one for pdist
    ((300, 64), (300, 64)),
    ((1000, 16), (1000, 16)),
    ((1000, 3), (1000, 3)),
    ((200, 512), (200, 512)),
    ((300, 64),),
    ((1000, 8),),
]
COLUMNS = ["operator", "shapes", "p", "stock", "ours"]


def forward(p: float, points: list[Tensor]) -> Tensor:
    if len(points) == 1:
        return torch.pdist(points[0], p)
    return torch.cdist(*points, p, compute_mode="donot_use_mm_for_euclid_dist")


def backward(result: Tensor, points: list[Tensor], cotangent: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(result, points, cotangent, retain_graph=True)


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for shapes in CASES:
        for p in ORDERS:
            points = [torch.randn(shape, device=arguments.device, requires_grad=True) for shape in shapes]
            graphs = {"stock": forward(p, points)}
            with mg.override("aten::_cdist_forward", "aten::_pdist_forward"):
                graphs["ours"] = forward(p, points)
            cotangent = torch.randn_like(graphs["stock"])
            contenders = {name: backward(result, points, cotangent) for name, result in graphs.items()}
            row: dict[str, Any] = {"operator": "cdist" if len(shapes) == 2 else "pdist", "p": p}
            row["shapes"] = ", ".join("x".join(map(str, shape)) for shape in shapes)
            found.append(row | summary(measure(contenders, arguments.seconds), "stock"))
    return found


if __name__ == "__main__":
    main("distance", "Backward of torch.cdist (both inputs) and torch.pdist, float32", rows, COLUMNS)
