"""ZCA whitening in several processes: each has a part of the digits, and the gradient is that of one process.

A layer is whitened: its batch is multiplied by C^(-1/2), C being the covariance of the whole batch plus eps. Each process
has its own rows of the batch, so C is a sum over the processes, and so is the gradient at C:

  C = sum over processes of x^T x / n        a sum whose derivative is the sum again
  W = (C + eps)^(-1/2)                       in each process, by one of two ways under mg.override()

  eigh       V (L + eps)^(-1/2) V^T by torch.linalg.eigh. A batch has fewer digits than the layer has units, so eps is an
             eigenvalue many times over, up to rounding, where PyTorch's derivative is noise: see whitening.py
  cholesky   L^(-T) by torch.linalg.cholesky, L L^T = C + eps, which whitens as well

DistributedDataParallel averages the gradients of the weights. Before training they are compared with the gradient of the
whole batch in one process.

Run it:  torchrun --nproc_per_node 2 examples/distributed_whitening.py
         python examples/distributed_whitening.py                           (one process)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import torch_manualgrad as mg

WIDTH, EPS = 32, 1e-3


def by_eigh(C: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(C)
    return (vectors * (values + EPS).rsqrt()) @ vectors.mT


def by_cholesky(C: Tensor) -> Tensor:
    identity = torch.eye(len(C), dtype=C.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky(C + EPS * identity), identity, upper=False).mT


WAYS: dict[str, Callable[[Tensor], Tensor]] = {"eigh": by_eigh, "cholesky": by_cholesky}


class Total(torch.autograd.Function):
    """The sum over all processes. Each depends on the terms of all, so the cotangents are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Total.apply(grad)


class Network(nn.Module):
    """A layer, whitened over the rows of all processes, and a classifier."""

    def __init__(self, inverse_root: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)
        self.inverse_root, self.total = inverse_root, total

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        sums = self.total(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        x = x - sums[:-1] / sums[-1]
        C = self.total(x.mT @ x) / sums[-1]
        return self.last((x @ self.inverse_root(C)).tanh())


def network(way: str, distributed: bool) -> nn.Module:
    torch.manual_seed(0)
    net = Network(WAYS[way], Total.apply if distributed else lambda x: x)
    return DistributedDataParallel(net) if distributed else net


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    net.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    return [p.grad.clone() for p in net.parameters()]


def difference(way: str, x: Tensor, y: Tensor, rank: int, size: int) -> float:
    """The largest difference of the gradient of all processes from that of one, by the size of the latter."""
    ours = gradients(network(way, distributed=True), x.chunk(size)[rank], y.chunk(size)[rank])
    whole = gradients(network(way, distributed=False), x, y)
    norm = torch.stack([g.norm() for g in whole]).max()
    return max(((a - b).norm() / norm).item() for a, b in zip(ours, whole))


def train(way: str, x: Tensor, y: Tensor, rank: int, size: int, steps: int, batch: int) -> list[float]:
    net = network(way, distributed=True)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(
        0
    )  # the same in each process: they choose the same digits, and share them
    losses = []
    for _ in (progress := tqdm(range(steps), desc=f"{way:8}", disable=rank > 0)):
        chosen = torch.randint(len(x), (batch,), generator=generator).chunk(size)[rank]
        loss = nn.functional.cross_entropy(net(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / size)
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def main(steps: int = 150, batch: int = 16) -> None:
    """Train by each way, in all processes that torchrun has started; the first prints the results."""
    if "RANK" not in os.environ:  # not under torchrun
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if batch % size:
        raise SystemExit(f"--batch {batch} cannot be shared by {size} processes")
    torch.set_num_threads(1)
    digits = load_digits()
    x, y = torch.as_tensor(digits.data / 16), torch.as_tensor(digits.target)
    torch.set_default_dtype(x.dtype)
    found = {}
    with mg.override():
        for way in WAYS:
            found[way] = difference(way, x[:batch], y[:batch], rank, size), train(way, x, y, rank, size, steps, batch)
    if rank == 0:
        print(f"\n{size} processes, {batch} digits a batch, {WIDTH} units, {steps} steps, float64\n")
        print(f"{'way':9} {'gradient, off that of one process':>34} {'first losses':>13} {'last losses':>12}")
        for way, (error, losses) in found.items():
            few = max(1, steps // 10)
            first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
            print(f"{way:9} {error:34.1e} {first:13.3f} {last:12.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=16, help="digits in a batch, over all processes")
    main(**vars(parser.parse_args()))
