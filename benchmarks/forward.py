"""High orders in forward mode against torch.func: Laplacians, a ninth derivative, jvp and hvp; time and peak memory.

A ratio is ours over torch.func's, the median over alternating rounds, so that 1 is equal and less is better.
The last column counts products with weight matrices in units of one forward pass: n directions are (n + 2) of them in a
forward Laplacian, and 2 n + 2 in forward mode over reverse.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import main, measure, quartiles, summary
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from torch_manualgrad.forward_ad import directional, hvp, laplacian

COLUMNS = ["problem", "stock", "ours", "time", "time quartiles", "asked", "memory", "products"]


class Orbitals(nn.Module):
    """A wave function of 8 electrons: LayerNorm, attention and an 8 x 8 determinant."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.orbitals = nn.Linear(3, width), nn.Linear(width, 8)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(self.norm1(h)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)
        h = h + self.out(attended)
        return torch.linalg.slogdet(self.orbitals(h + self.mlp(self.norm2(h))))[1]


class Slater(nn.Module):
    """The determinant of orbitals, each of one electron's coordinates."""

    def __init__(self, electrons: int, width: int = 128) -> None:
        super().__init__()
        hidden = [nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        self.orbitals = nn.Sequential(*hidden, nn.Linear(width, electrons))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.slogdet(self.orbitals(x))[1]


def stock_laplacian(f: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """For each example: the diagonal of the Hessian by vmap of Hessian-vector products, forward over reverse."""
    gradient = torch.func.grad(lambda x: f(x.reshape(shape)))

    def one(x: Tensor) -> Tensor:
        x = x.reshape(-1)
        return torch.func.jacfwd(gradient)(x).trace()

    def run(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward mode
            return torch.vmap(one)(x)

    return run


def nested(f: Callable[[Tensor], Tensor], order: int) -> Callable[[Tensor], Tensor]:
    for _ in range(order):
        f = (lambda g: lambda x: torch.func.jvp(g, (x,), (torch.ones_like(x),))[1])(f)
    return f


def peak(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at once, over those at the beginning."""
    run()
    with profile(profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    seen = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    level = most = 0
    for _, size in seen:
        level += size
        most = max(most, level)
    return most


def problems() -> dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]]:
    torch.manual_seed(0)
    sizes = (64, 256, 256, 256)
    hidden = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.Tanh())]
    mlp = nn.Sequential(*hidden, nn.Linear(256, 1)).requires_grad_(False)
    orbitals, slater = Orbitals().requires_grad_(False), Slater(16).requires_grad_(False)
    x, electrons, point = torch.randn(128, 64), torch.randn(32, 8, 3), torch.tensor(0.3, dtype=torch.float64)
    many = torch.randn(32, 16, 3)
    f = lambda x: mlp(x).squeeze(-1)  # noqa: E731
    total = lambda x: f(x).sum()  # noqa: E731
    v = torch.randn_like(x)
    composed = lambda x: torch.sin(torch.exp(torch.sin(x)))  # noqa: E731
    stock_mlp, stock_orbitals = stock_laplacian(f, (64,)), stock_laplacian(orbitals, (8, 3))
    stock_slater, ours_slater = stock_laplacian(slater, (16, 3)), laplacian(slater, batch_dims=1)
    ours_mlp, ours_orbitals = laplacian(f, batch_dims=1), laplacian(orbitals, batch_dims=1)
    ninth, one = nested(composed, 9), torch.ones_like(point)
    return {
        "Laplacian, MLP 64-256-256-256-1, batch 128": (
            lambda: stock_mlp(x), lambda: ours_mlp(x), "0.4, memory 0.5", f"{64 + 2} of {2 * 64 + 2}"
        ),
        "Laplacian, LayerNorm, attention, slogdet, batch 32": (
            lambda: stock_orbitals(electrons), lambda: ours_orbitals(electrons), "0.6", f"{24 + 2} of {2 * 24 + 2}"
        ),
        "Laplacian, orbitals of 16 electrons, slogdet, batch 32, by blocks": (
            lambda: stock_slater(many), lambda: ours_slater(many), "", f"{3 + 2} of {2 * 48 + 2}"
        ),
        "ninth derivative of sin(exp(sin(x)))": (
            lambda: ninth(point), lambda: directional(composed, point, one, 9)[-1], "0.05", ""
        ),
        "jvp, MLP": (
            lambda: torch.func.jvp(f, (x,), (v,))[1], lambda: directional(f, x, v, 1)[0], "1.05", "2 of 2"
        ),
        "hvp, MLP": (
            lambda: torch.func.jvp(torch.func.grad(total), (x,), (v,))[1], lambda: hvp(total, x, v), "1.05", "4 of 4"
        ),
    }  # fmt: skip


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    table = []
    for problem, (stock, ours, asked, products) in problems().items():
        rounds = measure({"stock": stock, "ours": ours}, arguments.seconds)
        found = summary(rounds, "ours")
        row = {"problem": problem, **{name: f"{entry['us'] / 1e3:.3g} ms" for name, entry in found.items()}}
        row |= {"time": f"{found['stock']['ratio']:.3g}", "time quartiles": quartiles(found["stock"])}
        row |= {"asked": asked, "products": products}
        if not problem.startswith("ninth"):  # whose calls are too many for the profiler
            row["memory"] = f"{peak(ours) / peak(stock):.3g}"
        print(row)
        table.append(row)
    return table


if __name__ == "__main__":
    found = ["stock", "ours", "time", "time quartiles", "memory"]
    main("forward", "High orders in forward mode beside torch.func", rows, COLUMNS, [1], seconds=8, found=found)
