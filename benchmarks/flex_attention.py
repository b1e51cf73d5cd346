"""A training step's attention with capped scores and a mask: written out by products, and by flex_attention.

python benchmarks/flex_attention.py [LENGTH]    # the table of docs/attention.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import torch
from attention import peak_megabytes, return_memory
from side_by_side import measure, summary
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import torch_manualgrad as mg

HEADS, WIDTH, CAP, WINDOW = 4, 64, 20.0, 256
MASKS: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    f"causal, {WINDOW} tokens": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
}


def step(attention: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(attention(*inputs).square().sum(), inputs)


def contenders(length: int) -> dict[str, dict[str, Callable[[], object]]]:
    """For each mask, a step by each."""
    inputs = [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]
    places, found = torch.arange(length), {}
    for name, mask in MASKS.items():
        blocks = None if mask is None else create_block_mask(mask, None, None, length, length, device="cpu")
        later = None if mask is None else ~mask(0, 0, places[:, None], places)

        def written_out(q: Tensor, k: Tensor, v: Tensor, later: Tensor | None = later) -> Tensor:
            scores = CAP * torch.tanh(q @ k.mT * WIDTH**-0.5 / CAP)
            return (scores if later is None else scores.masked_fill(later, -torch.inf)).softmax(-1) @ v

        def ours(q: Tensor, k: Tensor, v: Tensor, blocks: object = blocks) -> Tensor:
            return mg.attention.flex_attention(q, k, v, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP), blocks)

        found[name] = {"written out": step(written_out, inputs), "flex_attention": step(ours, inputs)}
    return found


def main() -> None:
    torch.set_num_threads(1)
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    if sys.argv[2:] == ["memory"]:
        return_memory()  # which takes time, so that this is a process of its own
        made = contenders(length)
        print(json.dumps({mask: {name: peak_megabytes(run) for name, run in of.items()} for mask, of in made.items()}))
        return
    done = subprocess.run([sys.executable, __file__, str(length), "memory"], capture_output=True, text=True, check=True)
    memory = json.loads(done.stdout)
    print("| mask | written out, s | MB | flex_attention, s | MB |\n| --- | --- | --- | --- | --- |")
    for mask, of in contenders(length).items():
        times = summary(measure(of), "written out")
        cells = [f"{times[name]['us'] * 1e-6:.2f} | {memory[mask][name]:.0f}" for name in of]
        print(f"| {mask} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
