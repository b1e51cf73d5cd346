"""Align a symmetric molecule and learn through the alignment: PyTorch's svd and torch_manualgrad.

The molecule is C60, with the bond lengths measured by Hedberg et al., Science 254 (1991) 410: 1.458 A within a five-ring,
1.401 A between two. By its symmetry the covariance with any rotated copy of itself has three equal singular values. The
best rotation (Kabsch) is smooth there, but singular vectors are not, and a derivative through them divides by zero.

The task: frames show a rigid cage in random orientations, with a guest atom off its centre, as in Li@C60. The positions
of the atoms of the cage and of the guest, in the frame of the molecule, are learned from these: each frame is aligned to
the cage as it is known so far, and predicted. The frames are made here; only the geometry of the cage is measured.

Where the atoms of the frames are displaced by as much as they are in a warm molecule, some hundredths of an angstrom,
the singular values differ and both derivatives are right. Stock's gets worse towards symmetry: in float32 it is
nan from 1e-5 A on. A rigid molecule is symmetric from the start, and a learned cage becomes so.

Run it:  python examples/kabsch.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import torch_manualgrad as mg

PENTAGON_BOND, HEXAGON_BOND = 1.458, 1.401  # angstroms
GUEST = (1.3, 0.0, 0.0)  # of this example's making
Align = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def buckminsterfullerene() -> Tensor:
    """The 60 atoms: each edge of an icosahedron cut at a five-ring's bond length from both of its ends."""
    edge, golden = 2 * PENTAGON_BOND + HEXAGON_BOND, (1 + math.sqrt(5)) / 2
    corner = torch.tensor([[0, s, t * golden] for s in (1, -1) for t in (1, -1)], dtype=torch.float64)
    corners = torch.cat([corner.roll(k, 1) for k in range(3)]) * (edge / 2)
    distance = torch.cdist(corners, corners)
    a, b = ((distance > 0) & (distance < 1.01 * edge)).nonzero().unbind(1)
    return corners[a] + (corners[b] - corners[a]) * (PENTAGON_BOND / edge)


def by_svd(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Rotation and translation that take P to Q, differentiated through PyTorch's singular vectors."""
    p, q = P.mean(-2, keepdim=True), Q.mean(-2, keepdim=True)
    U, _, Vh = torch.linalg.svd((Q - q).mT @ (P - p))
    sign = torch.linalg.det(U @ Vh).detach().sign()
    R = (U * torch.stack([torch.ones_like(sign), torch.ones_like(sign), sign], -1).unsqueeze(-2)) @ Vh
    return R, (q - p @ R.mT).squeeze(-2)


def by_kabsch(P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch_manualgrad."""
    found = mg.linalg.kabsch(P, Q)
    return found.rotation, found.translation


ALIGN: dict[str, Align] = {"stock": by_svd, "kabsch": by_kabsch}


def frames(count: int, displacement: float, seed: int) -> tuple[Tensor, Tensor]:
    """Cages (count, 60, 3) and guests (count, 3), rotated; the atoms of the cages displaced at random, in angstroms."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    R = mg.linalg.procrustes(torch.eye(3, dtype=torch.float64), mixed, rotation=True)
    noise = displacement * torch.randn(count, 60, 3, generator=generator, dtype=torch.float64)
    return (buckminsterfullerene() + noise) @ R.mT, R @ torch.tensor(GUEST, dtype=torch.float64)


def loss_of(align: Align, cage: Tensor, guest: Tensor, cages: Tensor, guests: Tensor) -> Tensor:
    """Mean square error of the predicted atoms, in square angstroms: of the guest, plus the mean of the cage."""
    R, t = align(cage.expand_as(cages), cages)
    wrong_cage = cage @ R.mT + t.unsqueeze(-2) - cages
    wrong_guest = R @ guest + t - guests
    return (wrong_guest.square().sum(-1) + wrong_cage.square().sum(-1).mean(-1)).mean()


def cage_gradient(align: Align, displacement: float, dtype: torch.dtype) -> Tensor:
    """The gradient of the loss in the cage, at the true cage and a wrong guest: it comes through the rotation."""
    cages, guests = (x.to(dtype) for x in frames(64, displacement, seed=0))
    cage = buckminsterfullerene().to(dtype).requires_grad_()
    guest = torch.tensor([0.5, 0.3, 0.0], dtype=dtype)
    (gradient,) = torch.autograd.grad(loss_of(align, cage, guest, cages, guests), cage)
    return gradient.double()


def error(found: Tensor, exact: Tensor) -> float:
    return ((found - exact).norm() / exact.norm()).item()


def gradient_errors(displacements: list[float]) -> dict[float, dict[tuple[str, torch.dtype], float]]:
    """Relative errors of the gradient, against `by_kabsch` in float64."""
    found = {}
    for d in displacements:
        exact = cage_gradient(by_kabsch, d, torch.float64)
        cases = [(n, dtype) for dtype in (torch.float32, torch.float64) for n in ALIGN]
        found[d] = {(n, dtype): error(cage_gradient(ALIGN[n], d, dtype), exact) for n, dtype in cases}
        del found[d]["kabsch", torch.float64]
    return found


class Training(NamedTuple):
    """One run: the losses; the first step after which a number was nan, or None; the error of the guest at the end."""

    losses: list[float]
    nan_step: int | None
    guest_error: float


def train(align: Align, start: float, steps: int) -> Training:
    """Learn cage and guest from rigid frames, beginning at a cage displaced by `start` angstroms and a guest at 0."""
    cages, guests = (x.float() for x in frames(32, 0.0, seed=1))
    generator = torch.Generator().manual_seed(2)
    cage = buckminsterfullerene().float() + start * torch.randn(60, 3, generator=generator)
    cage.requires_grad_()
    guest = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [cage], "lr": 5.0}, {"params": [guest], "lr": 0.05}], momentum=0.5)
    losses: list[float] = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(align, cage, guest, cages, guests)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not (cage.isfinite().all() and guest.isfinite().all()):
            return Training(losses, step, math.nan)
    R, t = by_kabsch(cage.detach().expand_as(cages), cages)
    return Training(losses, None, (R @ guest.detach() + t - guests).norm(dim=-1).mean().item())


def main(
    steps: int = 300,
) -> tuple[dict[float, dict[tuple[str, torch.dtype], float]], dict[tuple[str, float], Training]]:
    """Measure and print both tables; returns their contents."""
    atoms = buckminsterfullerene()
    values = torch.linalg.svdvals(atoms.mT @ atoms)
    print(f"C60: diameter {2 * atoms.norm(dim=1).max():.3f} A, singular values of the covariance {values.tolist()}\n")

    print("relative error of the gradient in the cage, through the alignment with 64 frames")
    print(f"{'displacement / A':>17}{'stock f32':>12}{'kabsch f32':>12}{'stock f64':>12}")
    errors = gradient_errors([0.0, *(10.0**k for k in range(-7, 0))])
    for d, row in errors.items():
        print(f"{d:>17.0e}" + "".join(f"{e:>12.1e}" for e in row.values()))

    print(f"\nlearning from 32 frames of a rigid cage, float32, {steps} steps")
    print(f"{'start / A':>17}{'':>9}{'first loss':>12}{'last loss':>12}{'guest off / A':>15}   nan after step")
    runs = {}
    for start in (0.0, 0.1):
        for name, align in ALIGN.items():
            run = runs[name, start] = train(align, start, steps)
            nan = "-" if run.nan_step is None else run.nan_step
            row = f"{start:>17.1f}{name:>9}{run.losses[0]:>12.2e}{run.losses[-1]:>12.2e}{run.guest_error:>15.1e}"
            print(f"{row}   {nan}")
    return errors, runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default: 300)")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)  # the molecule is too small to share out
    main(**arguments)
