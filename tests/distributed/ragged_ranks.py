"""Data parallel on nested tensors: each rank has sentences of its own lengths. Run as ``python ragged_ranks.py folder``."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import forked
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_manualgrad as mg

LENGTHS = (2, 5, 1, 3)
RANKS = 2


class Sentences(nn.Module):
    """Of a ragged batch: a normalization, a softmax along each sentence, and a sum over it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.linear(self.norm(x)))
        return (torch.softmax(y, 1) * x).sum(1).square().sum(-1)


def gradients(net: nn.Module, sentences: list[Tensor], layout: torch.layout) -> dict[str, Tensor]:
    """Of the mean loss over all sentences of all ranks, which DDP averages; and the loss of these."""
    with mg.override():
        losses = net(torch.nested.as_nested_tensor(sentences, layout=layout))
        losses.sum().backward()
    found = {name.removeprefix("module."): p.grad / len(sentences) for name, p in net.named_parameters()}
    return {**found, "loss": losses.detach().sum() / len(sentences)}


def measured(sentences: list[Tensor], parallel: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for layout in (torch.jagged, torch.strided):
        torch.manual_seed(0)
        net = Sentences()
        found[str(layout)] = gradients(DistributedDataParallel(net) if parallel else net, sentences, layout)
    return found


def rank(folder: Path, number: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    sentences = [torch.randn(n, 4) for n in LENGTHS]
    if number < RANKS:
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=number, world_size=RANKS, timeout=timedelta(minutes=5))
        sentences = sentences[number * len(LENGTHS) // RANKS : (number + 1) * len(LENGTHS) // RANKS]
    torch.save(measured(sentences, number < RANKS), folder / f"{number}.pt")


if __name__ == "__main__":  # the ranks, and one process that has all sentences
    forked([partial(rank, Path(sys.argv[1]), number) for number in range(RANKS + 1)])
