"""Training steps of a transformer block and of a ResNet block: what an override costs where PyTorch's derivatives serve."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import main, measure, summary
from torch import Tensor, nn

import torch_manualgrad as mg

COLUMNS = ["model", "size", "stock", "ours", "ours, *", "ours, strong_zero"]


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a layer normalization and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalization and a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


MODELS: dict[tuple[str, str], Callable[[], tuple[nn.Module, Tensor]]] = {
    ("transformer", "width 64, 4 x 16 tokens"): lambda: (TransformerBlock(64, 4), torch.randn(4, 16, 64)),
    ("transformer", "width 256, 4 x 128 tokens"): lambda: (TransformerBlock(256, 8), torch.randn(4, 128, 256)),
    ("ResNet", "16 channels, 4 x 16 x 16"): lambda: (ResidualBlock(16), torch.randn(4, 16, 16, 16)),
    ("ResNet", "64 channels, 8 x 32 x 32"): lambda: (ResidualBlock(64), torch.randn(8, 64, 32, 32)),
}


def step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward, backward and an update of all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = []
    for (model, size), make in MODELS.items():
        network, x = make()
        run = step(network.to(arguments.device), x.to(arguments.device))
        inside = {
            "ours": mg.override(),
            "ours, *": mg.override("*"),
            "ours, strong_zero": mg.override(strong_zero=True),
        }
        times = measure({"stock": run} | dict.fromkeys(inside, run), arguments.seconds, inside)
        found.append({"model": model, "size": size, **summary(times, "stock")})
    return found


if __name__ == "__main__":
    main("models", "Training steps, forward, backward and update", rows, COLUMNS, threads=[1], seconds=6)
