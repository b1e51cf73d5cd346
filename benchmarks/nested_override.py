"""PyTorch's calls on its own nested tensors, with and without override, forward and backward; and the least they can take.

The floor is two elementwise operations on a dense tensor of as many bytes: what reading and writing takes each way. The
same call on a dense tensor of as many rows is what is left without the nested class.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from nested import batches, gradient, keep_memory, operators
from side_by_side import main, measure, summary
from torch import Tensor

import torch_manualgrad as mg

LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}
CONTENDERS = ["stock", "override", "dense", "floor"]
NAMES = ("softmax, dense dim", "sum, dense dim", "layer_norm", "gelu", "silu", "relu", "linear", "number", "itself")


def calls(width: int) -> dict[str, Any]:
    weight = torch.ones(width, width)
    more = {"linear": lambda x: F.linear(x, weight), "number": lambda x: x * 2, "itself": lambda x: x + x}
    return {**{name: found[0] for name, found in operators(width).items()}, **more}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    keep_memory()
    found = []
    for batch, lengths in batches().items():
        for width in arguments.widths:
            parts = [torch.randn(n, width) for n in lengths]
            dense = torch.cat(parts).requires_grad_()
            values = dense.detach()
            for layout in LAYOUTS:
                x = torch.nested.nested_tensor(parts, layout=LAYOUTS[layout]).requires_grad_()
                for name in NAMES:
                    call = calls(width)[name]
                    try:
                        cotangent = torch.randn_like(call(x).detach())
                        gradient(call(x), x, cotangent, False)
                    except RuntimeError:
                        continue  # PyTorch has no derivative

                    def both(call: Any = call, x: Tensor = x, cotangent: Tensor = cotangent) -> Tensor:
                        return gradient(call(x), x, cotangent, False)

                    y = torch.randn_like(call(dense).detach())

                    def on_dense(call: Any = call, x: Tensor = dense, cotangent: Tensor = y) -> Tensor:
                        return gradient(call(x), x, cotangent, False)

                    contenders = {"stock": both, "override": both, "dense": on_dense, "floor": lambda: (values * 2) * 2}
                    times = measure(contenders, arguments.seconds, {"override": mg.override("nested")})
                    row: dict[str, Any] = {"batch": batch, "width": width, "operator": name, "layout": layout}
                    found.append(row | summary(times, "stock"))
                    print(".", end="", flush=True)
    print()
    return found


if __name__ == "__main__":
    main(
        "nested_override",
        "Operators of PyTorch's nested tensors, forward and backward; ratios to stock",
        rows,
        ["batch", "width", "operator", "layout", *CONTENDERS],
        threads=[1],
        options=lambda parser: parser.add_argument("--widths", type=int, nargs="+", default=(16, 64, 256)),
        seconds=0.2,
        spread=("threads", "layout"),
    )
