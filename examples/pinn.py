"""A network that solves differential equations: their operators by Taylor series, and by nested reverse mode.

A physics-informed network u is trained until an equation holds at random points. The operator dominates the cost. PyTorch's
way is a backward of a backward, once for each order and, for a Laplacian, each dimension; `mg.forward_ad` carries the
derivatives forward in one pass, and there is one backward, that of training. Two equations with known solutions:

- Poisson's, -(u_xx + u_yy) = f on the unit square, u = 0 on its boundary, by `laplacian`;
- the steady Kuramoto-Sivashinsky equation with damping, u_xxxx + u_xx + u + u u_x = f on a period, by one series of
  fourth order. Without the damping it has several solutions.

Both ways start from the same weights and see the same points, so their losses are the same up to rounding.

    python examples/pinn.py [--quick] [--steps N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import profile
from tqdm import trange

import torch_manualgrad as mg

Function = Callable[[Tensor], Tensor]


class Equation(NamedTuple):
    """An equation for u, and its solution; points are (batch, dimensions), values (batch,).

    Attributes:
        network: makes u, with the boundary conditions built in.
        points: random ones, given their number.
        by: the residual of u at points, by the ways to compute it.
        solution: the known u.
    """

    network: Callable[[], nn.Module]
    points: Callable[[int], Tensor]
    by: dict[str, Callable[[Function, Tensor], Tensor]]
    solution: Function


class Network(nn.Module):
    """An MLP between a map of the points and a factor."""

    def __init__(self, inputs: Function, factor: Function, width: int = 32) -> None:
        super().__init__()
        self.inputs, self.factor = inputs, factor
        hidden = [
            nn.Linear(2, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
        ]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor(x) * self.layers(self.inputs(x)).squeeze(-1)


def gradient(value: Tensor, x: Tensor) -> Tensor:
    """The gradient at each point, to be differentiated again."""
    return torch.autograd.grad(value.sum(), x, create_graph=True)[0]


# -- Poisson's equation ------------------------------------------------------------------------------------------------------


def bump(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x[:, 0]) * torch.sin(2 * math.pi * x[:, 1])


def poisson_by_series(u: Function, x: Tensor) -> Tensor:
    return mg.forward_ad.laplacian(u, batch_dims=1)(x) + 5 * math.pi**2 * bump(x)


def poisson_by_reverse(u: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    first = gradient(u(x), x)
    second = sum(gradient(first[:, i], x)[:, i] for i in range(2))
    return second + 5 * math.pi**2 * bump(x)


# -- the Kuramoto-Sivashinsky equation -----------------------------------------------------------------------------------------


def wave(x: Tensor) -> Tensor:
    return torch.sin(x[:, 0]) + 0.5 * torch.cos(2 * x[:, 0])


def forcing(x: Tensor) -> Tensor:
    """u_xxxx + u_xx + u + u u_x of the wave: the first two cancel for sin x."""
    u, x = wave(x), x[:, 0]
    return 6 * torch.cos(2 * x) + u + u * (x.cos() - torch.sin(2 * x))


def waves_by_series(u: Function, x: Tensor) -> Tensor:
    value, (first, second, _, fourth) = mg.forward_ad.jet(u, (x,), ([torch.ones_like(x), None, None, None],))
    return fourth + second + value + value * first - forcing(x)


def waves_by_reverse(u: Function, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    value = u(x)
    first = gradient(value, x)[:, 0]
    second = gradient(first, x)[:, 0]
    fourth = gradient(gradient(second, x)[:, 0], x)[:, 0]
    return fourth + second + value + value * first - forcing(x)


EQUATIONS = {
    "Poisson": Equation(
        lambda: Network(lambda x: 2 * x - 1, lambda x: (4 * x * (1 - x)).prod(1)),
        lambda n: torch.rand(n, 2, dtype=torch.float64),
        {"series": poisson_by_series, "reverse": poisson_by_reverse},
        bump,
    ),
    "Kuramoto-Sivashinsky": Equation(
        lambda: Network(lambda x: torch.cat([x.sin(), x.cos()], 1), lambda x: 1.0),
        lambda n: 2 * math.pi * torch.rand(n, 1, dtype=torch.float64),
        {"series": waves_by_series, "reverse": waves_by_reverse},
        wave,
    ),
}


class Run(NamedTuple):
    """One training: the loss at each step, the evaluations before it, and the relative error of u at the end."""

    losses: list[float]
    evaluations: list[int]
    error: float


def train(name: str, way: str, steps: int, batch: int) -> Run:
    """Adam on new points at each step; then L-BFGS, of twice as many iterations, on points that stay."""
    torch.manual_seed(0)
    equation = EQUATIONS[name]
    u = equation.network().double()
    losses: list[float] = []
    evaluations: list[int] = []
    count = 0

    def closure() -> Tensor:
        nonlocal count
        count += len(points) // batch
        u.zero_grad()
        loss = equation.by[way](u, points).square().mean()
        loss.backward()
        return loss.detach()

    adam = torch.optim.Adam(u.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    lbfgs = torch.optim.LBFGS(u.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe")
    for k in (bar := trange(steps + steps // 10, desc=f"{name}, {way}", leave=False)):
        evaluations.append(count)
        if k <= steps:
            points = equation.points(batch if k < steps else 2 * batch)
        losses.append(float((adam if k < steps else lbfgs).step(closure)))  # type: ignore[arg-type]
        if k < steps:
            schedule.step()
        bar.set_postfix(loss=f"{losses[-1]:.2e}")
    with torch.no_grad():
        x = equation.points(2000)
        exact = equation.solution(x)
        error = ((u(x) - exact).norm() / exact.norm()).item()
    return Run(losses, evaluations, error)


class Cost(NamedTuple):
    """Of one evaluation of the loss and its gradient: the least seconds, and the most bytes."""

    seconds: float
    bytes: int


def costs(name: str, batch: int, repeats: int = 30) -> dict[str, Cost]:
    """Times of each way, in turns, so that other load on the machine affects both."""
    equation = EQUATIONS[name]
    u, points = equation.network().double(), equation.points(batch)
    steps = {way: lambda r=r: r(u, points).square().mean().backward() for way, r in equation.by.items()}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(repeats):
        for way, step in steps.items():
            start = time.perf_counter()
            step()
            times[way].append(time.perf_counter() - start)
    return {way: Cost(min(times[way]), most_bytes(step)) for way, step in steps.items()}


def most_bytes(run: Callable[[], Any]) -> int:
    """The most that is allocated at once."""
    with profile(profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    level = most = 0
    for _, size in sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"):
        level += size
        most = max(most, level)
    return most


def plot(runs: dict[tuple[str, str], Run], cost: dict[tuple[str, str], Cost], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(EQUATIONS), figsize=(10, 4))
    for axis, name in zip(axes, EQUATIONS):
        for way, style in (("series", "-"), ("reverse", ":")):
            run = runs[name, way]
            seconds = [cost[name, way].seconds * k for k in run.evaluations]
            axis.semilogy(seconds, run.losses, style, label=f"{way}, error {run.error:.1e}")
        axis.set(title=name, xlabel="seconds", ylabel="mean square of the residual")
        axis.legend()
    figure.tight_layout()
    figure.savefig(out / "pinn.png", dpi=120)
    pyplot.close(figure)


def main(
    steps: int = 500, batch: int = 256, out: Path | None = None
) -> tuple[dict[tuple[str, str], Run], dict[tuple[str, str], Cost]]:
    """Train both equations by both ways, and print costs and errors."""
    runs = {(name, way): train(name, way, steps, batch) for name in EQUATIONS for way in EQUATIONS[name].by}
    cost = {(name, way): c for name in EQUATIONS for way, c in costs(name, batch).items()}
    print(f"{'equation':22} {'operator by':12} {'loss':>10} {'error of u':>10} {'ms a step':>10} {'MB a step':>10}")
    for (name, way), run in runs.items():
        seconds, most = cost[name, way]
        print(f"{name:22} {way:12} {run.losses[-1]:10.1e} {run.error:10.1e} {seconds * 1e3:10.2f} {most / 1e6:10.1f}")
    for name in EQUATIONS:
        series, reverse = cost[name, "series"], cost[name, "reverse"]
        pairs = list(zip(runs[name, "series"].losses, runs[name, "reverse"].losses))
        apart = max(abs(a - b) / b for a, b in pairs[: steps // 10])
        print(
            f"{name}: series take {series.seconds / reverse.seconds:.2f} of the time and "
            f"{series.bytes / reverse.bytes:.2f} of the memory; in the first {steps // 10} steps the losses differ by "
            f"{apart:.0e} of themselves"
        )
    if out is not None:
        plot(runs, cost, out)
    return runs, cost


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="few steps: for the times, not the error")
    parser.add_argument("--out", type=Path, default=None, help="a folder for the figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(60 if arguments.quick else arguments.steps, arguments.batch, arguments.out)
