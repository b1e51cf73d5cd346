"""Backward of what the kernels were made for on a GPU, stock and ours, at sizes that fill one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor

import torch_manualgrad as mg

COLUMNS = ["operator", "shape", "stock", "ours"]


def _definite(x: Tensor) -> Tensor:
    return x @ x.mT / x.shape[-1] + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _solution(x: Tensor) -> Tensor:
    return torch.linalg.solve(x, torch.ones_like(x))


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def _distances(x: Tensor) -> Tensor:
    return torch.cdist(*x, compute_mode="donot_use_mm_for_euclid_dist")


def _plain(x: Tensor) -> Tensor:
    return x


# operator -> (the shape of the input, what it is made of, the function)
CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "cholesky": ((100_000, 32, 32), _definite, torch.linalg.cholesky),
    "solve": ((100_000, 32, 32), _definite, _solution),
    "cholesky, small": ((1_000_000, 8, 8), _definite, torch.linalg.cholesky),
    "svd": ((1024, 1024), _plain, lambda x: torch.linalg.svd(x, full_matrices=False)),
    "vector_norm": ((10_000_000, 3), _plain, _norm),
    "cdist": ((2, 4096, 64), _plain, _distances),
}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for operator, (shape, make, function) in CASES.items():
        shape = tuple(max(size // arguments.smaller, 1) if size > 64 else size for size in shape)
        x = make(torch.randn(shape, device=arguments.device)).requires_grad_()
        results = {"stock": function(x)}
        with mg.override("*"):
            results["ours"] = function(x)

        def backward(result: Any, x: Tensor = x) -> Callable[[], object]:
            outputs = result if isinstance(result, tuple) else (result,)
            cotangents = [torch.ones_like(o) for o in outputs]
            return lambda: torch.autograd.grad(outputs, x, cotangents, retain_graph=True)

        contenders = {name: backward(result) for name, result in results.items()}
        row = {"operator": operator, "shape": "x".join(map(str, shape))}
        found.append(row | summary(measure(contenders, arguments.seconds), "stock"))
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smaller", type=int, default=1, help="divides sizes above 64, for another device")


if __name__ == "__main__":
    main("gpu", "Backward at sizes that fill a GPU, float32", rows, COLUMNS, (1,), options)
