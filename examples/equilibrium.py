"""A deep equilibrium network on scikit-learn's digits, and its memory next to that of the unrolled iteration.

    python examples/equilibrium.py --steps 200

The network has one hidden layer of infinite depth: z = tanh(W z + U x). The backward solves one linear system, so that its
memory does not depend on the number of iterations, and no iteration is differentiated.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import torch_manualgrad as mg


class Run(NamedTuple):
    """Losses of the training, the accuracy on the other half, and the bytes that each way saves for a backward."""

    losses: list[float]
    accuracy: float
    implicit_bytes: int
    unrolled_bytes: int


def cell(z: Tensor, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    W = 0.9 * weights["W"] / torch.linalg.matrix_norm(weights["W"], 2)  # a contraction
    return torch.tanh(z @ W + x @ weights["U"])


layer = mg.implicit.fixed_point(cell)


def unrolled(z: Tensor, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    for _ in range(60):
        z = cell(z, weights, x)
    return z


def logits(weights: dict[str, Tensor], x: Tensor, solve=layer) -> Tensor:
    return solve(x.new_zeros(len(x), len(weights["W"])), weights, x) @ weights["V"]


def saved_bytes(call) -> int:
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        call()
    return sum(sizes)


def main(steps: int = 200, width: int = 32) -> Run:
    generator = torch.Generator().manual_seed(0)
    images, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    images, labels = images.float() / 16, labels.long()
    train, test = slice(None, 900), slice(900, None)
    shapes = {"W": (width, width), "U": (64, width), "V": (width, 10)}
    weights = {n: torch.randn(s, generator=generator) / s[0] ** 0.5 for n, s in shapes.items()}
    optimizer = torch.optim.Adam([w.requires_grad_() for w in weights.values()], 0.01)
    losses = []
    for _ in range(steps):
        chosen = torch.randint(900, (100,), generator=generator)
        loss = torch.nn.functional.cross_entropy(logits(weights, images[train][chosen]), labels[train][chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        accuracy = (logits(weights, images[test]).argmax(1) == labels[test]).float().mean().item()
    sizes = [saved_bytes(lambda s=s: logits(weights, images[train], s)) for s in (layer, unrolled)]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy:.3f}")
    print(f"saved for a backward: {sizes[0] / 1e6:.2f} MB implicit, {sizes[1] / 1e6:.2f} MB unrolled")
    return Run(losses, accuracy, *sizes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
