"""Writes docs/composition.md: the same operator by PyTorch and by this package, through every engine and transform.

Run it:  python tools/composition.py        (`make measure` does)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.testing.comparison.report import table

PAGE = Path(__file__).resolve().parents[1] / "docs" / f"{Path(__file__).stem}.md"


# One custom op, twice: sin(x) y, with everything that either interface takes.


def sine(x: Tensor, y: Tensor) -> Tensor:
    return x.sin() * y


@torch.library.custom_op("composition::stock_sine", mutates_args=())
def stock_sine(x: Tensor, y: Tensor) -> Tensor:
    return sine(x, y)


stock_sine.register_fake(sine)
stock_sine.register_vmap(lambda info, dims, x, y: (sine(_first(x, dims[0]), _first(y, dims[1])), 0))
stock_sine.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1], grad * ctx.saved_tensors[0].sin()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

our_sine = mg.custom_op("composition::sine(Tensor x, Tensor y) -> Tensor")(sine)
our_sine.impl_fake(sine)
our_sine.impl_vmap(lambda info, dims, x, y: (sine(_first(x, dims.x), _first(y, dims.y)), 0))
our_sine.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.y))
our_sine.impl_backward(lambda ctx, saved, grad: {"x": grad * saved[0].cos() * saved[1], "y": grad * saved[0].sin()})


def _first(x: Tensor, dim: int | None) -> Tensor:
    return x if dim is None else x.movedim(dim, 0)


@dataclass
class Column:
    """One operator by one of the two."""

    title: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    sample: tuple[Any, ...]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def columns() -> list[Column]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 2, dtype=torch.float64, generator=generator) for _ in range(2))

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=1)

    def plain_norm(x: Tensor) -> Tensor:
        return x.square().sum(1).sqrt()

    def plain_cdist(x: Tensor, y: Tensor) -> Tensor:
        return (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1).sqrt()

    return [
        Column("custom op, torch.library", torch.ops.composition.stock_sine.default, sine, (x, y)),
        Column("custom op, ours", our_sine.op, sine, (x, y)),
        Column("vector_norm, stock", norm, plain_norm, (x,)),
        Column("vector_norm, ours", norm, plain_norm, (x,), mg.override),
        Column("cdist, stock", torch.cdist, plain_cdist, (x, y)),
        Column("cdist, ours", torch.cdist, plain_cdist, (x, y), mg.override),
    ]


def page(compile: bool = True) -> str:
    """The text of the page."""
    found = []
    for column in columns():
        with column.context():
            rows = mg.testing.composition(column.fn, column.reference, column.sample, compile=compile)
        found.append((column, list(rows)))
    lines = [["through", *(column.title for column, _ in found)]]
    for same in zip(*(rows for _, rows in found), strict=True):
        lines.append([same[0].name, *(row.outcome for row in same)])
    lines.append(["**right**", *(f"**{sum(r.outcome == 'ok' for r in rows)}**" for _, rows in found)])
    text = f"""# Composition

One operator, by PyTorch and by this package, through every engine and transform. Each number is compared with a plain
implementation of the same function, differentiated in reverse mode only.

- ok: the numbers agree to 1e-8. wrong: they do not. raises: an error. -: does not apply.
- "custom op" is sin(x) y with a backward and a vmap rule: `torch.library.custom_op`, and `mg.custom_op`, whose jvp is
  derived from the backward. "ours" of the others is PyTorch's operator under `mg.override()`.
- "rev-fwd" is reverse mode over forward mode, and so on.

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/composition.py` (`make measure`).

{table(lines)}

## Failures
"""
    for column, rows in found:
        reasons: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome in ("wrong", "raises"):
                reasons.setdefault(f"{row.outcome}: {row.detail}", []).append(row.name)
        text += f"\n**{column.title}**{'' if reasons else ': nothing.'}\n"
        text += "".join(f"- {', '.join(names)}: {reason}\n" for reason, names in reasons.items())
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE, help="the file to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page())
    print(f"wrote {options.out}")
