"""ZCA whitening inside a network, on real digits: the gradient at equal eigenvalues.

A layer of decorrelated batch normalization multiplies a batch by C^(-1/2), C being its covariance plus eps. A batch of
fewer samples than the layer has units makes C rank-deficient: eps is an eigenvalue many times over, up to rounding. The
eigenvectors of that group have no derivative, but C^(-1/2) has one. Three ways to compute it are compared:

  stock       V (L + eps)^(-1/2) V^T by torch.linalg.eigh, PyTorch's derivatives
  override    the same line under mg.override()
  rsqrtm      mg.linalg.rsqrtm, which differentiates no decomposition

Each trains the same network from the same start. At every tenth step the gradient that arrives at C is compared with a
reference: the exact derivative of the Newton-Schulz iteration, in the processor's extended precision.

Result: stock's gradient at C is not nan but noise, several times its true size, in both precisions, as the null
eigenvalues differ by rounding only. This network survives it: the noise lies in the block of C that belongs to the null
space, and what continues to the layer below is multiplied by the centred batch, which has nothing there. The error of
that product is the second column. A loss that depends on C or its inverse root in another way has the first error.

Run it:  python examples/whitening.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import torch_manualgrad as mg

WIDTH, BATCH, EPS = 32, 16, 1e-3


def by_eigh(C: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(C)
    return (vectors * (values + EPS).rsqrt()) @ vectors.mT


def by_rsqrtm(C: Tensor) -> Tensor:
    return mg.linalg.rsqrtm(C + EPS * torch.eye(len(C), dtype=C.dtype), assume="hermitian")


Way = tuple[Callable[[Tensor], Tensor], Callable[[], AbstractContextManager[Any]]]
WAYS: dict[str, Way] = {
    "stock": (by_eigh, nullcontext),
    "override": (by_eigh, mg.override),
    "rsqrtm": (by_rsqrtm, nullcontext),
}


class Network(nn.Module):
    """A layer, whitened, and a classifier. Keeps the last C and C^(-1/2) to be looked at."""

    def __init__(self, inverse_root: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, WIDTH)
        self.last = nn.Linear(WIDTH, 10)
        self.inverse_root = inverse_root
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("average", torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        if self.training:
            mean = x.mean(0)
            C = (x - mean).mT @ (x - mean) / len(x)
            self.average = 0.95 * self.average + 0.05 * C.detach()
            self.mean = 0.95 * self.mean + 0.05 * mean.detach()
            self.C, self.W, self.centred = C, self.inverse_root(C), (x - mean).detach()
            C.retain_grad()
            self.W.retain_grad()
            return self.last(((x - mean) @ self.W).tanh())
        return self.last(((x - self.mean) @ by_rsqrtm(self.average)).tanh())


def reference(C: Tensor, cotangent: Tensor) -> np.ndarray:
    """The gradient at C for a cotangent of (C + eps)^(-1/2), whose derivative is self-adjoint.

    Newton-Schulz: Y <- Y (3 - Z Y) / 2 and Z <- (3 - Z Y) Z / 2 converge to the square root and its inverse; carried
    out on values and on derivatives, in extended precision.
    """
    exact = np.longdouble
    identity = np.eye(len(C), dtype=exact)
    values = C.detach().numpy().astype(exact) + exact(EPS) * identity
    direction = cotangent.numpy().astype(exact)
    scale = np.trace(values)
    Y, dY = values / scale, (direction + direction.T) / (2 * scale)
    Z, dZ = identity, np.zeros_like(identity)
    for _ in range(60):
        R, dR = (3 * identity - Z @ Y) / 2, -(dZ @ Y + Z @ dY) / 2
        Y, dY, Z, dZ = Y @ R, dY @ R + Y @ dR, R @ Z, dR @ Z + R @ dZ
    return dZ / np.sqrt(scale)


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """The error in the Frobenius norm, by the size of the exact value."""
    return float(np.linalg.norm((found - exact).astype(float)) / np.linalg.norm(exact.astype(float)))


@dataclass
class Run:
    """The record of one network."""

    losses: list[float] = field(default_factory=list)
    at_covariance: list[float] = field(default_factory=list)
    at_layer: list[float] = field(default_factory=list)
    first_nan: int | None = None
    accuracy: float = float("nan")


def digits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    split = train_test_split(data.data / 16, data.target, test_size=0.3, random_state=0, stratify=data.target)
    x, x_test, y, y_test = (torch.as_tensor(part) for part in split)
    return x.to(dtype), x_test.to(dtype), y, y_test


def train(way: Way, dtype: torch.dtype, steps: int) -> Run:
    x, x_test, y, y_test = digits(dtype)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    inverse_root, derivatives = way
    network = Network(inverse_root).to(dtype)
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    run = Run()
    for step in range(steps):
        chosen = torch.randint(len(x), (BATCH,), generator=generator)
        with derivatives():
            loss = nn.functional.cross_entropy(network(x[chosen]), y[chosen])
            loss.backward()
        run.losses.append(loss.item())
        found = network.C.grad.numpy()
        if not np.isfinite(found).all():
            run.first_nan = step
            return run
        if step % 10 == 0:
            symmetric = (found + found.T) / 2  # C is symmetric: nothing else of its gradient counts
            exact = reference(network.C, network.W.grad)
            run.at_covariance.append(relative(symmetric, exact))
            batch = network.centred.numpy().astype(np.longdouble)
            run.at_layer.append(relative(batch @ symmetric, batch @ exact))
        optimizer.step()
        optimizer.zero_grad()
    network.eval()
    with torch.no_grad():
        run.accuracy = (network(x_test).argmax(1) == y_test).double().mean().item()
    return run


def main(steps: int = 150) -> dict[tuple[str, str], Run]:
    """Train all of them, print the table, and return its entries."""
    print(f"{BATCH} digits a batch, {WIDTH} units, eps {EPS:g}, {steps} steps. Relative errors, median and largest:\n")
    print(f"{'dtype':8} {'way':9} {'first nan':>9} {'at C':>18} {'at the layer':>18} {'last loss':>10} {'accuracy':>9}")
    runs = {}
    for dtype in (torch.float32, torch.float64):
        for name, way in WAYS.items():
            run = runs[str(dtype)[6:], name] = train(way, dtype, steps)
            nan = "never" if run.first_nan is None else f"step {run.first_nan}"
            at_c, at_layer = (
                f"{statistics.median(e):8.1e} {max(e):8.1e}" if e else "" for e in (run.at_covariance, run.at_layer)
            )
            print(
                f"{str(dtype)[6:]:8} {name:9} {nan:>9} {at_c:>18} {at_layer:>18} "
                f"{statistics.fmean(run.losses[-20:]):10.3f} {run.accuracy:9.1%}"
            )
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    main(**vars(parser.parse_args()))
