"""The ground state of the hydrogen molecule by a neural wave function: local energies by the forward Laplacian.

Variational Monte Carlo. A network computes log |psi(x)| from the positions x of all electrons. Walkers are drawn from psi^2 by
Metropolis' algorithm, and the mean of the local energies

    E(x) = -1/2 (laplacian of log |psi| + |gradient of log |psi||^2) + V(x)

is never below the exact energy, up to its statistical error. `mg.forward_ad.laplacian` finds the Laplacian, with value and
gradient, in one pass; the parameters follow the natural gradient of the mean energy. Everything is in atomic units (energies
in hartree, lengths in bohr).

    python examples/hydrogen.py [--system H2] [--steps N] [--walkers N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import trange

import torch_manualgrad as mg


class System(NamedTuple):
    """Nuclei at fixed positions, the numbers of electrons with spin up and down, and the known energy of the ground state."""

    nuclei: list[list[float]]
    charges: list[float]
    spins: tuple[int, int]
    energy: float


SYSTEMS = {
    "H2": System([[0.0, 0.0, -0.7], [0.0, 0.0, 0.7]], [1.0, 1.0], (1, 1), -1.174476),
    "He": System([[0.0, 0.0, 0.0]], [2.0], (1, 1), -2.903724),
    "Li": System([[0.0, 0.0, 0.0]], [3.0], (2, 1), -7.478060),
    "Be": System([[0.0, 0.0, 0.0]], [4.0], (2, 2), -14.667356),
}


def lengths(x: Tensor) -> tuple[Tensor, Tensor]:
    """The length r of vectors, and r^2 / (1 + r), which is smooth at 0."""
    square = x.square().sum(-1)
    r = (square + 1e-12).sqrt()
    return r, square / (1 + r)


class WaveFunction(nn.Module):
    """log |psi|: a sum of products of determinants, one of each spin, times the cusps where particles meet.

    Each electron's features are mixed with the means of the others' and of its pairs, as in FermiNet (arXiv:1909.02487). All
    of these are smooth where particles meet; there, psi has the known slope by the factors in `cusps` alone.
    """

    def __init__(self, system: System, width: int = 32, determinants: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.spins, self.determinants = system.spins, determinants
        n = sum(system.spins)
        self.register_buffer("nuclei", torch.tensor(system.nuclei))
        self.register_buffer("charges", torch.tensor(system.charges))
        pairs = torch.triu_indices(n, n, 1)
        alike = (pairs[0] < system.spins[0]) == (pairs[1] < system.spins[0])
        self.register_buffer("slopes", torch.where(alike, 0.25, 0.5))
        self.register_buffer("pairs", pairs)
        one, two = 4 * len(system.charges), 4
        sizes = [one, *[width] * layers]
        self.single = nn.ModuleList(nn.Linear(3 * a + two, b) for a, b in zip(sizes, sizes[1:]))
        self.orbitals = nn.ModuleList(nn.Linear(width, determinants * k) for k in system.spins if k)
        self.decay = nn.ParameterList(torch.ones(len(system.charges), determinants * k) for k in system.spins if k)
        self.reach = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        to_nuclei = x.unsqueeze(-2) - self.nuclei
        r, smooth = lengths(to_nuclei)
        h = torch.cat([to_nuclei.flatten(-2), smooth], -1)
        between = x.unsqueeze(-2) - x.unsqueeze(-3)
        pairs = torch.cat([between, lengths(between)[1].unsqueeze(-1)], -1).mean(-2)
        for layer in self.single:
            means = [part.mean(-2, keepdim=True).expand_as(h) for part in h.split([k for k in self.spins if k], -2)]
            new = torch.tanh(layer(torch.cat([h, means[0], means[-1], pairs], -1)))
            h = new + h if new.shape == h.shape else new
        return self.log_determinants(h, smooth) + self.cusps(x, r)

    def log_determinants(self, h: Tensor, smooth: Tensor) -> Tensor:
        sign, logarithm = 1.0, 0.0
        parts = [k for k in self.spins if k]
        for k, orbital, decay, own, s in zip(
            parts, self.orbitals, self.decay, h.split(parts, -2), smooth.split(parts, -2)
        ):
            envelope = torch.exp(-s.unsqueeze(-1) * nn.functional.softplus(decay)).sum(-2)
            matrix = (orbital(own) * envelope).unflatten(-1, (self.determinants, k)).transpose(-3, -2)
            found = torch.linalg.slogdet(matrix)
            sign, logarithm = sign * found[0], logarithm + found[1]
        largest = logarithm.detach().amax(-1, keepdim=True)
        return (sign * torch.exp(logarithm - largest)).sum(-1).abs().log() + largest.squeeze(-1)

    def cusps(self, x: Tensor, r: Tensor) -> Tensor:
        """The slopes of log |psi| where particles meet: -charge at nuclei, 1/4 or 1/2 between electrons (Kato)."""
        reach = nn.functional.softplus(self.reach)
        nuclei = (self.charges * reach[0] ** 2 / (reach[0] + r)).sum((-2, -1))
        apart = lengths(x[..., self.pairs[0], :] - x[..., self.pairs[1], :])[0]
        return nuclei - (self.slopes * reach[1] ** 2 / (reach[1] + apart)).sum(-1)


def potential(system: System, x: Tensor) -> Tensor:
    """Of the electrons and nuclei, by Coulomb's law."""
    nuclei, charges = x.new_tensor(system.nuclei), x.new_tensor(system.charges)
    i, j = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    a, b = torch.triu_indices(len(nuclei), len(nuclei), 1)
    attraction = (charges / (x.unsqueeze(-2) - nuclei).norm(dim=-1)).sum((-2, -1))
    repulsion = (1 / (x[..., i, :] - x[..., j, :]).norm(dim=-1)).sum(-1)
    return repulsion - attraction + (charges[a] * charges[b] / (nuclei[a] - nuclei[b]).norm(dim=-1)).sum()


# -- two ways to the local energy ---------------------------------------------------------------------------------------------


def kinetic_forward(psi: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    _, gradient, laplacian = mg.forward_ad.laplacian(psi, batch_dims=1, block_dim=1, with_jacobian=True)(x)
    return -0.5 * (laplacian + gradient.square().sum((-2, -1)))


def kinetic_torch_func(psi: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """For each walker the trace of the Hessian, forward over reverse."""

    def one(x: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda flat: psi(flat.view_as(x)))
        flat = x.flatten()
        return -0.5 * (torch.func.jacfwd(gradient)(flat).trace() + gradient(flat).square().sum())

    return torch.vmap(one)(x)


# -- Monte Carlo ------------------------------------------------------------------------------------------------------------


class Walkers:
    """Places of electrons, drawn from psi^2 by Metropolis' algorithm, with a step that accepts half of the proposals."""

    def __init__(self, system: System, number: int) -> None:
        nuclei, charges = torch.tensor(system.nuclei), torch.tensor(system.charges)
        home = torch.repeat_interleave(torch.arange(len(charges)), charges.long())
        order = torch.cat([torch.arange(0, len(home), 2), torch.arange(1, len(home), 2)])  # spin up, then down
        self.x = nuclei[home[order]] + torch.randn(number, len(home), 3)
        self.width = 0.5

    @torch.no_grad()
    def move(self, psi: nn.Module, times: int) -> Tensor:
        here = psi(self.x)
        accepted = 0.0
        for _ in range(times):
            proposed = self.x + self.width * torch.randn_like(self.x)
            there = psi(proposed)
            taken = 2 * (there - here) > torch.rand_like(here).log()
            self.x = torch.where(taken[:, None, None], proposed, self.x)
            here = torch.where(taken, there, here)
            accepted += taken.double().mean().item() / times
        self.width *= 1.1 if accepted > 0.5 else 1 / 1.1
        return self.x


def mean_and_error(samples: list[float], block: int = 10) -> tuple[float, float]:
    """The mean of a correlated sequence, and its standard error by that of means over blocks."""
    blocks = (
        torch.tensor(samples[: len(samples) // block * block] or samples).reshape(-1, min(block, len(samples))).mean(1)
    )
    return torch.tensor(samples).mean().item(), (blocks.std() / math.sqrt(len(blocks))).item() if len(
        blocks
    ) > 1 else math.inf


def score_function(psi: nn.Module) -> Callable[[Tensor], Tensor]:
    """The gradients of log |psi| in all parameters, one row for each walker."""
    parameters = dict(psi.named_parameters())
    one = torch.func.grad(lambda p, x: torch.func.functional_call(psi, p, (x,)))

    def scores(x: Tensor) -> Tensor:
        found = torch.vmap(one, (None, 0))({k: p.detach() for k, p in parameters.items()}, x)
        return torch.cat([found[k].flatten(1) for k in parameters], 1)

    return scores


def natural_gradient(scores: Tensor, local: Tensor, damping: float) -> Tensor:
    """S^-1 g: g half the gradient of the mean energy, <(E - <E>) score>, S the covariance of the scores.

    With O the centred scores of n walkers, S is O^T O / n and g is O^T (E - <E>) / n. A system of n equations is solved, not one
    of as many as there are parameters (stochastic reconfiguration; Chen and Heyl, arXiv:2302.01941).
    """
    centred, n = scores - scores.mean(0), len(local)
    gram = centred @ centred.mT / n + damping * torch.eye(n)
    return centred.mT @ torch.linalg.solve(gram, (local - local.mean()) / n)


class Run(NamedTuple):
    """The results.

    Attributes:
        energies: the mean local energies, step by step of the training.
        energy, error: of the trained wave function, with its standard error.
        seconds: of the local energies of all walkers, by each way to find them.
        difference: the largest between the two.
    """

    energies: list[float]
    energy: float
    error: float
    seconds: dict[str, float]
    difference: float


def main(
    name: str = "H2", steps: int = 400, walkers: int = 512, measurements: int = 300, out: Path | None = None
) -> Run:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(name, steps, walkers, measurements, out)
    finally:
        torch.set_default_dtype(before)


def run(name: str, steps: int, number: int, measurements: int, out: Path | None) -> Run:
    system = SYSTEMS[name]
    psi, walkers = WaveFunction(system), Walkers(system, number)
    scores = score_function(psi)

    @torch.no_grad()
    def local_energies(x: Tensor) -> Tensor:
        return kinetic_forward(psi, x) + potential(system, x)

    walkers.move(psi, 200)
    energies: list[float] = []
    for step in (bar := trange(steps, desc=name)):
        x = walkers.move(psi, 10)
        local = local_energies(x)
        energies.append(local.mean().item())
        middle = local.median()
        spread = (local - middle).abs().mean()
        local = local.clamp(middle - 5 * spread, middle + 5 * spread)
        rows = scores(x)
        update = natural_gradient(rows, local, damping=1e-3)
        change = (rows @ update).std()  # of log |psi| at the walkers, which limits the step
        rate = min(0.1 / (1 + 4 * step / steps), 0.1 / change.item())
        with torch.no_grad():
            parameters = nn.utils.parameters_to_vector(psi.parameters())
            nn.utils.vector_to_parameters(parameters - rate * update, psi.parameters())
        if (step + 1) % 50 == 0:
            mean, error = mean_and_error(energies[-50:])
            bar.write(f"step {step + 1:5}: energy {mean:.5f} +- {error:.5f}")
        bar.set_postfix(energy=f"{energies[-1]:.4f}", width=f"{walkers.width:.2f}")

    measured = []
    for _ in trange(measurements, desc="measurement"):
        measured.append(local_energies(walkers.move(psi, 10)).mean().item())
    energy, error = mean_and_error(measured)
    print(
        f"{name}: energy {energy:.5f} +- {error:.5f}, known {system.energy:.5f}, {1e3 * (energy - system.energy):+.2f} mhartree"
    )
    seconds, difference = compare(psi, walkers.x)
    if out is not None:
        plot(energies, system, out / "hydrogen.png")
    return Run(energies, energy, error, seconds, difference)


def compare(psi: nn.Module, x: Tensor) -> tuple[dict[str, float], float]:
    """The shortest time of each way to the kinetic energies, and how far they are apart."""
    ways = {"forward Laplacian": kinetic_forward, "torch.func": kinetic_torch_func}
    seconds = dict.fromkeys(ways, math.inf)
    found = {}
    with torch.no_grad():
        for _ in range(7):
            for name, way in ways.items():
                start = time.perf_counter()
                found[name] = way(psi, x)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
    ours, stock = found.values()
    difference = (ours - stock).abs().max().item()
    print(
        f"local energies of {len(x)} walkers: {seconds['forward Laplacian'] * 1e3:.1f} ms by the forward Laplacian, "
        f"{seconds['torch.func'] * 1e3:.1f} ms by torch.func; largest difference {difference:.1e}"
    )
    return seconds, difference


def plot(energies: list[float], system: System, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    axis.plot([1e3 * (e - system.energy) for e in energies], ".", markersize=2)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=1)
    axis.set(xlabel="step", ylabel="energy above the known one, mhartree")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=list(SYSTEMS), default="H2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--walkers", type=int, default=512)
    parser.add_argument("--measurements", type=int, default=300, help="after the training, for the energy")
    parser.add_argument("--out", type=Path, default=None, help="a folder for the figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    main(arguments.system, arguments.steps, arguments.walkers, arguments.measurements, arguments.out)
