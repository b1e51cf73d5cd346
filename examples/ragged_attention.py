"""A small language model over sentences of very different lengths: in a jagged tensor, and padded to the longest.

The text is Python's own reference manual, which comes with Python (pydoc_data.topics). Sentences are of 2 to over 100
words. One model, a causal transformer that predicts the next word, is written once over a few operations and trained
twice from the same start on the same batches:

  jagged   on PyTorch's jagged nested tensors under mg.override(): layers see real words only, and attention
           stays within each sentence
  padded   on dense tensors (B, longest, ...), as is usual, with the padding left out of the loss

The calls are PyTorch's own. They are the same for both, except that sentences become tensors and heads are split in
different ways. Both compute the same function, so the loss curves agree to rounding. The time differs, and so does the
memory for the backward.

Run it:  python examples/ragged_attention.py
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_manualgrad as mg

WIDTH, HEADS, BLOCKS, WORDS, LONGEST = 64, 4, 2, 1000, 160


def sentences() -> list[Tensor]:
    """Each sentence as numbers of words, 0 for one that is rare."""
    text = " ".join(topics.topics.values())
    split = [re.findall(r"[a-z]+|[^\sa-z]", s.lower()) for s in re.split(r"[.!?:]\s|\n\n", text)]
    known = {w: i for i, (w, _) in enumerate(Counter(w for s in split for w in s).most_common(WORDS - 1), 1)}
    return [torch.tensor([known.get(w, 0) for w in s[:LONGEST]]) for s in split if len(s) > 2]


class Jagged:
    """The parts of the model that are different for jagged tensors (B, *, width)."""

    def begin(self, batch: list[Tensor], embed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        places = [torch.arange(len(s) - 1) for s in batch]
        self.targets = torch.cat([s[1:] for s in batch])
        offsets = torch.tensor([0, *(len(p) for p in places)]).cumsum(0)
        words = embed(torch.cat([s[:-1] for s in batch]), torch.cat(places))
        return torch.nested.nested_tensor_from_jagged(words, offsets)

    def attention(self, qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for x in qkv.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def loss(self, scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.values(), self.targets)


class Padded:
    """The same on (B, longest, width). Padding comes last, so a causal mask hides it from earlier positions."""

    def begin(self, batch: list[Tensor], embed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        words = nn.utils.rnn.pad_sequence([s[:-1] for s in batch], batch_first=True)
        self.targets = nn.utils.rnn.pad_sequence([s[1:] for s in batch], batch_first=True, padding_value=-100)
        return embed(words, torch.arange(words.shape[1]))

    attention = Jagged.attention

    def loss(self, scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, 1), self.targets.flatten(), ignore_index=-100)


class Model(nn.Module):
    """Parameters, and the forward over either set of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(WIDTH),
                    "qkv": nn.Linear(WIDTH, 3 * WIDTH),
                    "mix": nn.Linear(WIDTH, WIDTH),
                    "norm2": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, 4 * WIDTH),
                    "down": nn.Linear(4 * WIDTH, WIDTH),
                }
            )
            for _ in range(BLOCKS)
        )
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, batch: list[Tensor], on: Jagged | Padded) -> Tensor:
        x = on.begin(batch, lambda words, places: self.words(words) + self.places(places))
        block: Any
        for block in self.blocks:
            x = x + block["mix"](on.attention(block["qkv"](block["norm1"](x))))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return on.loss(self.scores(self.norm(x)))


@dataclass
class Run:
    """The measurements of one training."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)  # bytes saved for the backward

    @property
    def time(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


def train(on: Jagged | Padded, batches: list[list[Tensor]]) -> Run:
    torch.manual_seed(0)
    model, run = Model(), Run()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for batch in batches:
        saved: dict[int, int] = {}

        def keep(x: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = (x.detach().values() if x.is_nested else x).untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return x

        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(batch, on)
        loss.backward()
        optimizer.step()
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(loss.item())
        run.kept.append(sum(saved.values()))
    return run


def main(steps: int = 40, size: int = 64) -> dict[str, Run]:
    """Train both ways, print and return the measurements."""
    data = sentences()
    generator = torch.Generator().manual_seed(0)
    batches = [[data[i] for i in torch.randint(len(data), (size,), generator=generator)] for _ in range(steps)]
    words = sum(len(s) - 1 for b in batches for s in b)
    room = sum(size * max(len(s) - 1 for s in b) for b in batches)
    print(f"{len(data)} sentences, {steps} batches of {size}; words in a padded batch: {words / room:.0%}\n")
    with mg.override():
        found = {"jagged": train(Jagged(), batches), "padded": train(Padded(), batches)}
    print(f"{'':8}{'first loss':>12}{'last loss':>12}{'ms a step':>12}{'MB kept':>12}")
    for name, run in found.items():
        kept = sum(run.kept) / len(run.kept) / 1e6
        print(f"{name:8}{run.losses[0]:12.4f}{run.losses[-1]:12.4f}{1e3 * run.time:12.1f}{kept:12.1f}")
    apart = max(abs(a - b) for a, b in zip(found["jagged"].losses, found["padded"].losses, strict=True))
    print(f"\nlargest difference of the losses: {apart:.1e}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--size", type=int, default=64, help="sentences in a batch")
    options = parser.parse_args()
    main(options.steps, options.size)
