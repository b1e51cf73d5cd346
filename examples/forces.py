"""Train an interatomic potential on energies and forces, compiled: torch.compile with backend "manualgrad".

A force is the negative gradient of an energy, so a loss of forces is a function of a gradient, and training differentiates
that gradient again. A function compiled by inductor cannot do this: its second derivative raises. The same program with
backend="manualgrad" runs, and both orders are compiled.

The data are clusters of atoms that attract and repel each other by a Morse potential; energies and forces are exact. The
network passes messages between atoms and has never seen the formula.

Run it:  python examples/forces.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

ATOMS, WIDTH, MESSAGES = 12, 32, 2
PAIRS = torch.triu_indices(ATOMS, ATOMS, 1)


def morse(positions: Tensor) -> Tensor:
    """The energy of each cluster, (batch,), of positions (batch, atoms, 3)."""
    r = (positions[:, PAIRS[0]] - positions[:, PAIRS[1]]).norm(dim=-1)
    return ((1 - torch.exp(-1.5 * (r - 1.2))) ** 2 - 1).sum(1)


def clusters(count: int, seed: int) -> Tensor:
    """Points of a lattice, shaken: no two atoms are close."""
    generator = torch.Generator().manual_seed(seed)
    lattice = torch.cartesian_prod(torch.arange(3.0), torch.arange(2.0), torch.arange(2.0)) * 1.2
    return lattice + 0.15 * torch.randn(count, ATOMS, 3, generator=generator)


class Potential(nn.Module):
    """A message-passing network of distances: its energy does not change when the cluster turns or moves."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU()) for _ in range(MESSAGES))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(MESSAGES))
        self.start = nn.Parameter(torch.ones(WIDTH))
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.register_buffer("centers", torch.linspace(0.6, 3.2, 8))

    def forward(self, positions: Tensor) -> Tensor:
        difference = positions[:, :, None] - positions[:, None]
        squared = difference.pow(2).sum(-1)
        others = 1 - torch.eye(ATOMS, dtype=positions.dtype)
        r = (squared + 1 - others).sqrt()
        features = torch.exp(-2 * (r[..., None] - self.centers) ** 2) * others[..., None]
        atoms = self.start.expand(len(positions), ATOMS, WIDTH)
        for f, update in zip(self.filters, self.updates):
            messages = (f(features) * atoms[:, None] * others[..., None]).sum(2)
            atoms = atoms + update(messages / ATOMS)
        return self.energy(atoms).sum((1, 2))


def with_forces(energy: Callable[[Tensor], Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies and forces; both can be differentiated."""
    positions = positions.detach().requires_grad_()
    energies = energy(positions)
    (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
    return energies, -gradient


def train(energy: Callable[[Tensor], Tensor], model: nn.Module, steps: int) -> tuple[list[float], float]:
    """The loss at each step, and the median seconds of a step. The first steps, which compile graphs, are left out."""
    data = clusters(256, seed=0)
    target, forces = (x.detach() for x in with_forces(morse, data))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses, times = [], []
    for step in tqdm(range(steps), desc="steps", leave=False):
        batch = torch.arange(16) + 16 * (step % 16)
        start = time.perf_counter()
        found, found_forces = with_forces(energy, data[batch])
        loss = (found_forces - forces[batch]).pow(2).mean() + 0.01 * (found - target[batch]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return losses, torch.tensor(times[len(times) // 4 :]).median().item()


def main(steps: int = 300, out: Path | None = None) -> dict[str, float]:
    torch.set_num_threads(1)
    results: dict[str, float] = {}
    curves = {}
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Potential()
        energy = torch.compile(model, backend="manualgrad", dynamic=False) if name == "compiled" else model
        curves[name], seconds = train(energy, model, steps)
        results[f"{name} ms"] = 1e3 * seconds
        results[f"{name} loss"] = curves[name][-1]
        print(f"{name:9}  {1e3 * seconds:6.2f} ms a step, loss {curves[name][0]:.3f} -> {curves[name][-1]:.4f}")
    test = clusters(64, seed=1)
    exact, found = (with_forces(f, test)[1].detach() for f in (morse, energy))
    results["force error"] = float((exact - found).abs().mean() / exact.abs().mean())
    print(f"forces of clusters that it has not seen: mean error {100 * results['force error']:.1f} % of the mean force")
    if out is not None:
        draw(exact, found, out)
    return results


def draw(exact: Tensor, found: Tensor, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(4, 4))
    axes.plot(exact.flatten(), found.flatten(), ".", markersize=2)
    axes.set_xlabel("exact force")
    axes.set_ylabel("force of the network")
    figure.tight_layout()
    figure.savefig(out / "forces.png", dpi=150)
    print(f"plot: {out / 'forces.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plot")
    given = parser.parse_args()
    main(given.steps, given.out)
