"""The Brusselator with diffusion, by implicit steps: Newton's method with a sparse Jacobian.

    python examples/brusselator.py --steps 20

Each step solves u_new = u + dt f(u_new). The Jacobian has 2048 x 2048 entries, 12,288 of which may be nonzero, and takes
about 11 products. It is prepared once, and evaluated at each iteration.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from scipy.sparse import eye_array
from scipy.sparse.linalg import splu
from torch import Tensor

import torch_manualgrad as mg


class Run(NamedTuple):
    """The largest residual of the steps, their iterations, and seconds of one sparse and one dense Jacobian."""

    residual: float
    iterations: int
    sparse: float
    dense: float


def brusselator(w: Tensor) -> Tensor:
    """The rates of both species, (2, N, N), on a periodic square."""
    u, v = w[0], w[1]
    neighbors = torch.roll(w, 1, 1) + torch.roll(w, -1, 1) + torch.roll(w, 1, 2) + torch.roll(w, -1, 2)
    reaction = torch.stack([1 + u**2 * v - 4.4 * u, 3.4 * u - u**2 * v])
    return reaction + 10 * (neighbors - 4 * w)


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(steps: int = 20, size: int = 32, dt: float = 0.05) -> Run:
    grid = torch.arange(size, dtype=torch.float64) / size
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    w = torch.stack([22 * (y * (1 - y)) ** 1.5, 27 * (x * (1 - x)) ** 1.5])
    plan = mg.sparse_jacobian.prepare(brusselator, w, check=True)
    print(plan)
    worst, iterations = 0.0, 0
    for _ in range(steps):
        new = w.clone()
        for _ in range(20):
            residual = new - w - dt * brusselator(new)
            if residual.abs().max() < 1e-10:
                break
            matrix = eye_array(w.numel()) - dt * plan.matrix(new, layout="scipy")
            step = splu(matrix.tocsc()).solve(residual.reshape(-1).numpy())
            new = new - torch.from_numpy(step).reshape(w.shape)
            iterations += 1
        worst = max(worst, float(residual.abs().max()))
        w = new
    plan.values(w)
    run = Run(worst, iterations, seconds(lambda: plan.values(w)), seconds(lambda: torch.func.jacfwd(brusselator)(w)))
    print(f"{steps} steps, {iterations} iterations, largest residual {worst:.1e}")
    print(f"one Jacobian: {1e3 * run.sparse:.1f} ms sparse, {1e3 * run.dense:.1f} ms with torch.func.jacfwd")
    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
