"""Decompositions forward and backward, and Laplacians of networks: PyTorch, ours, and JAX compiled, on one core in turn.

JAX runs in a process of its own, on the same core. folx (pip install folx), which computes Laplacians in JAX, and torch-jet
(pip install git+https://github.com/f-dangel/torch-jet), which computes them in PyTorch, are left out if they are not
installed. The networks are those of their documents.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from linalg import OPERATORS, contender, outputs
from side_by_side import Elsewhere, main, measure, seconds_of, summary
from torch import Tensor, nn

import torch_manualgrad as mg

NAMES = ("svd", "eigh", "lu", "qr", "cholesky", "solve")
FORWARDS = ("lu", "svd", "eigh", "solve", "cholesky")
SIZES = (3, 8, 32, 128, 512)
SEVERAL = 2**20  # bytes of a batch of at least four matrices
ACTIVATIONS = {"silu": nn.SiLU, "tanh": nn.Tanh}
# activation, widths, argument, the best of folx's sparsity thresholds
NETWORKS = (("silu", (4, *[100] * 10, 1), (20, 100, 4), 4), ("tanh", (50, 768, 768, 512, 512, 1), (64, 50), 0))
COLUMNS = ["problem", "size", "batch", "dtype", "stock", "ours", "ours, forward=True", "ours compiled", "jax", "folx"]
COLUMNS += ["torch-jet"]


def decompositions(arguments: argparse.Namespace, jax: Elsewhere) -> list[dict[str, Any]]:
    found = []
    generator = torch.Generator().manual_seed(0)
    for name in arguments.operators:
        make, function, _ = OPERATORS[name]
        for n in arguments.sizes:
            for dtype in (torch.float32, torch.float64):
                several = max(4, SEVERAL // (n * n * dtype.itemsize))
                for batch, count in (("1", 1), ("several", several)):
                    shape = (count, n, n)
                    x = make(torch.randn(shape, dtype=dtype, generator=generator)).requires_grad_()
                    with torch.no_grad():
                        cotangents = [torch.randn_like(o) for o in outputs(function(x))]
                    both = contender(function, x, cotangents, "both")
                    contenders: dict[str, Callable[[], object]] = {"stock": both, "ours": both}
                    inside: dict[str, Any] = {"ours": mg.override()}
                    if name in FORWARDS:
                        contenders["ours, forward=True"] = both
                        inside["ours, forward=True"] = mg.override(forward=True)
                    words = ["decomposition", name, "x".join(map(str, shape)), str(dtype)[6:]]
                    if jax.ask(words):
                        contenders["jax"] = jax
                    row = {"problem": name, "size": str(n), "batch": batch, "dtype": str(dtype)[6:]}
                    found.append(row | summary(measure(contenders, arguments.seconds, inside), "stock"))
                    print(".", end="", flush=True)
    print()
    return found


def traced(network: nn.Module) -> Callable[[Tensor], Tensor]:
    """The trace of the Hessian for each example, forward over reverse."""

    def one(x: Tensor) -> Tensor:
        gradient, at = torch.func.grad(lambda v: network(v.reshape(x.shape)).sum()), x.reshape(-1)
        # eight directions at a time: all of them together take 13 GB
        along = torch.vmap(lambda v: torch.func.jvp(gradient, (at,), (v,))[1] @ v, chunk_size=8)
        return along(torch.eye(len(at))).sum()

    return torch.vmap(one)


def laplacians(arguments: argparse.Namespace, jax: Elsewhere, folx: Elsewhere) -> list[dict[str, Any]]:
    found = []
    for activation, widths, shape, threshold in NETWORKS:
        torch.compiler.reset()  # sizes are constants of the next network too
        torch.manual_seed(0)
        layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), ACTIVATIONS[activation]())][:-1]
        network, x = nn.Sequential(*layers).requires_grad_(False), torch.randn(shape)
        stock = traced(network)
        total = lambda x, network=network: network(x).sum(tuple(range(1, x.ndim)))  # noqa: E731
        ours = mg.forward_ad.laplacian(total, batch_dims=1)
        compiled = mg.forward_ad.laplacian(mg.compile(total), batch_dims=1)
        contenders: dict[str, Callable[[], object]] = {
            "stock": lambda: stock(x), "ours": lambda: ours(x), "ours compiled": lambda: compiled(x)
        }  # fmt: skip
        if len(shape) == 2 and (theirs := torch_jet(network, x)) is not None:  # its import makes Dynamo compile again
            contenders["torch-jet"] = theirs
        expected = stock(x).reshape(-1)
        for run in contenders.values():
            torch.testing.assert_close(run().reshape(-1), expected, rtol=1e-2, atol=1e-3)
        words = ["laplacian", activation, "-".join(map(str, widths)), "x".join(map(str, shape))]
        for name, process, way in (("jax", jax, "trace"), ("folx", folx, f"folx{threshold}")):
            if process.ask([*words, way]):
                contenders[name] = process
        row = {"problem": f"Laplacian, {activation} at {' x '.join(map(str, shape))}", "batch": "several"}
        row |= {"size": "-".join(map(str, widths)).replace("-100" * 10, "-10x100"), "dtype": "float32"}
        # slow contenders run once: while they run, the data of the others leaves the caches
        once = {name: seconds for name, run in contenders.items() if (seconds := seconds_of(run)) > 2}
        times = measure({name: run for name, run in contenders.items() if name not in once}, 8 * arguments.seconds)
        times |= {name: [seconds] * len(times["ours"]) for name, seconds in once.items()}
        found.append(row | summary(times, "stock"))
        print(".", end="", flush=True)
    print()
    return found


def torch_jet(network: nn.Module, x: Tensor) -> Callable[[], Tensor] | None:
    """The collapsed Laplacian of torch-jet; None if it is not installed."""
    try:
        from jet.laplacian import laplacian  # an optional contender
        from jet.simplify import simplify  # an optional contender
    except ImportError:
        return None
    one = simplify(laplacian(network, x[0]), x[0])
    return lambda: torch.vmap(one)(x)[2]


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # that of the other process too
    script = Path(__file__).parent / "contenders" / "jax_steps.py"
    with Elsewhere(script) as jax, Elsewhere(script) as folx:
        found = decompositions(arguments, jax)
        return found + laplacians(arguments, jax, folx) if arguments.laplacians else found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operators", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--no-laplacians", dest="laplacians", action="store_false")


if __name__ == "__main__":
    warnings.simplefilter("ignore", mg.linalg.GaugeWarning)  # cotangents are random
    main("against_jax", __doc__.split("\n")[0], rows, COLUMNS, [1], options, 0.5, spread=("threads", "batch", "dtype"))
