"""The networks that the engines train, and one process that trains them: what the engines are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_manualgrad as mg

WORDS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 20, 32, 4, 6, 8, 10


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = (
            f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.checkpointed = False

    def _forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False) if self.checkpointed else self._forward(x)


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.positions


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


@mg.custom_op("mgengines::wave(Tensor x, Tensor frequency) -> Tensor")
def wave(x: Tensor, frequency: Tensor) -> Tensor:
    return torch.sin(frequency * x)


@wave.impl_save_for_backward
def _save(inputs: Any, output: Any) -> Any:
    return inputs.x, inputs.frequency


@wave.impl_backward
def _backward(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor]:
    x, frequency = saved
    slope = grad * torch.cos(frequency * x)
    return {"x": frequency * slope, "frequency": (x * slope).sum_to_size(frequency.shape)}


class Ours(nn.Module):
    """A block of operators of this package's own: a custom op with weights, and a function of a covariance."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = wave(self.linear(x), self.frequency)
        covariance = y @ y.mT / WIDTH + torch.eye(LENGTH, dtype=y.dtype)
        return x + mg.linalg.rsqrtm(covariance, assume="hermitian") @ y


class Slope(nn.Module):
    """A block whose forward differentiates: its backward is a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(at).sum(), at, create_graph=True)
        return x + slope / torch.linalg.vector_norm(slope, dim=-1, keepdim=True)


KINDS: dict[str, Callable[[], nn.Module]] = {"transformer": Block, "ours": Ours, "slope": Slope}


class Network(nn.Module):
    """Start, two blocks and end: in this order they are the stages of a pipeline, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Start(), KINDS[kind](), KINDS[kind](), End()])

    @property
    def blocks(self) -> list[Any]:
        return list(self.parts)[1:-1]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def network(kind: str) -> Network:
    torch.manual_seed(0)
    return Network(kind)


def loss_of(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    return words[0], words[1]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2)


def losses_of_one_process(kind: str) -> list[float]:
    net, losses = network(kind), []
    steps = optimizer(net.parameters())
    for step in range(STEPS):
        words, following = batch(step)
        loss = loss_of(net(words), following)
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    return losses
