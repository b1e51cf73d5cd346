"""Bytes that the graph of a training step keeps, and the time of the step, with and without ``memory=True``."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any

import torch
from models import ResidualBlock, TransformerBlock, training_step
from side_by_side import main, summary
from torch import Tensor, nn

import torch_manualgrad as mg

COLUMNS = ["model", "size", "stock MB", "ours MB", "memory MB", "stock", "ours", "memory"]
STEPS = 3  # of a round


def saved_bytes(loss: Tensor, parameters: set[int]) -> int:
    """The bytes of the distinct storages that the nodes of a graph keep, without the parameters."""
    storages: dict[int, int] = {}
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, tuple) else [saved]:
                    packed = each.data
                    for x in packed.tensors() if hasattr(packed, "tensors") else [packed]:
                        if x is not None:
                            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return sum(n for place, n in storages.items() if place not in parameters)


def transformer(width: int, heads: int, length: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[TransformerBlock(width, heads) for _ in range(2)]), torch.randn(4, length, width)


def resnet(channels: int, size: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[ResidualBlock(channels) for _ in range(4)]), torch.randn(8, channels, size, size)


MODELS = {
    ("transformer, 2 blocks", "width 64, 4 x 128 tokens"): lambda: transformer(64, 4, 128),
    ("transformer, 2 blocks", "width 256, 4 x 128 tokens"): lambda: transformer(256, 8, 128),
    ("transformer, 2 blocks", "width 512, 4 x 128 tokens"): lambda: transformer(512, 8, 128),
    ("transformer, 2 blocks", "width 768, 4 x 128 tokens"): lambda: transformer(768, 12, 128),
    ("ResNet, 4 blocks", "64 channels, 8 x 32 x 32"): lambda: resnet(64, 32),
    ("ResNet, 4 blocks", "128 channels, 8 x 28 x 28"): lambda: resnet(128, 28),
    ("ResNet, 4 blocks", "256 channels, 8 x 14 x 14"): lambda: resnet(256, 14),
}


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for (model, size), make in MODELS.items():
        network, x = make()
        network, x = network.to(arguments.device), x.to(arguments.device)
        run = training_step(network, x)
        inside = {"stock": nullcontext(), "ours": mg.override(), "memory": mg.override(memory=True)}
        parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
        megabytes = {}
        for name, context in inside.items():
            with context:
                run()
                megabytes[f"{name} MB"] = f"{saved_bytes(network(x).square().mean(), parameters) / 1e6:.1f}"
        times: dict[str, list[float]] = {name: [] for name in inside}
        begin = time.perf_counter()
        while time.perf_counter() < begin + arguments.seconds or len(times["stock"]) < 5:
            for name, context in inside.items():
                with context:
                    for _ in range(2):  # the allocator settles
                        run()
                    start = time.thread_time()  # other work on the machine does not count
                    for _ in range(STEPS):
                        run()
                    times[name].append((time.thread_time() - start) / STEPS)
        found.append({"model": model, "size": size, **megabytes, **summary(times, "stock")})
    return found


if __name__ == "__main__":
    about = "Saved bytes and time of training steps; the time of the thread"
    kept = [f"{name} MB" for name in ("stock", "ours", "memory")]
    main("memory", about, rows, COLUMNS, threads=[1], seconds=20, found=kept)
