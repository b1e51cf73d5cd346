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


# The other kinds of custom ops, each by torch.library with what its interface takes, and by ours. No vmap rules.


def _sine_grads(grad: Tensor | None, x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if grad is None else (grad * x.cos() * y, grad * x.sin())


@torch.library.custom_op("composition::stock_mutable", mutates_args=("y",))
def stock_mutable(x: Tensor, y: Tensor) -> None:
    y.copy_(sine(x, y))


@mg.custom_op("composition::mutable(Tensor x, Tensor(a!) y) -> ()")
def our_mutable(x: Tensor, y: Tensor) -> None:
    y.copy_(sine(x, y))


our_mutable.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.y))
our_mutable.impl_backward(lambda ctx, saved, grad: dict(zip("xy", _sine_grads(grad, *saved), strict=True)))


@torch.library.custom_op("composition::stock_out", mutates_args=("out",))  # which takes no tensors by keyword only
def stock_out(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.copy_(sine(x, y))


@mg.custom_op("composition::out(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)")
def our_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(sine(x, y))


our_out.impl_save_for_backward(lambda inputs, output: (inputs.x, inputs.y))
our_out.impl_backward(lambda ctx, saved, grad: {**dict(zip("xy", _sine_grads(grad, *saved), strict=True)), "out": None})


def optional_sine(x: Tensor, y: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return sine(x, y), None if z is None else z.sin()


stock_optional = torch.library.custom_op(
    "composition::stock_optional",
    optional_sine,
    mutates_args=(),
    schema="(Tensor x, Tensor y, Tensor? z=None) -> (Tensor, Tensor?)",
)
stock_optional.register_fake(optional_sine)
stock_optional.register_autograd(
    lambda ctx, grad, grad_z: (
        *_sine_grads(grad, *ctx.saved_tensors[:2]),
        None if len(ctx.saved_tensors) < 3 or grad_z is None else grad_z * ctx.saved_tensors[2].cos(),
    ),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*[x for x in inputs if x is not None]),
)

our_optional = mg.custom_op("composition::optional")(optional_sine)
our_optional.impl_save_for_backward(lambda inputs, output: tuple(inputs))
our_optional.impl_backward(
    lambda ctx, saved, grad, grad_z: {
        **dict(zip("xy", _sine_grads(grad, *saved[:2]), strict=True)),
        "z": None if saved[2] is None or grad_z is None else grad_z * saved[2].cos(),
    }
)


def list_sine(xs: list[Tensor]) -> list[Tensor]:
    return [sine(*xs), xs[0] * xs[1]]


def _list_grads(grads: list[Tensor | None], x: Tensor, y: Tensor) -> list[Tensor | None]:
    sums = [_sine_grads(grads[0], x, y), (None, None) if grads[1] is None else (grads[1] * y, grads[1] * x)]
    return [a if b is None else b if a is None else a + b for a, b in zip(*sums, strict=True)]


stock_list = torch.library.custom_op("composition::stock_list", list_sine, mutates_args=())
stock_list.register_fake(list_sine)
stock_list.register_autograd(
    lambda ctx, grads: _list_grads(grads, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0]),
)

our_list = mg.custom_op("composition::list")(list_sine)
our_list.impl_save_for_backward(lambda inputs, output: inputs.xs)
our_list.impl_backward(lambda ctx, saved, grads: {"xs": _list_grads(grads, *saved)})


@dataclass
class Column:
    """One operator by one of the two."""

    title: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    sample: Any
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


def kinds() -> list[Column]:
    """The other kinds of custom ops, each by torch.library and by ours."""
    x, y = columns()[0].sample
    out = torch.zeros_like(x)
    by_keyword = mg.Sample(x, y, out=out)

    def written(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return sine(x, y)

    ops = torch.ops.composition
    return [
        Column("mutable, torch.library", ops.stock_mutable.default, sine, (x, y)),
        Column("mutable, ours", our_mutable.op, sine, (x, y)),
        Column("out, torch.library", ops.stock_out.default, written, (x, y, out)),
        Column("out, ours", our_out.op, written, by_keyword),
        Column("optional result, torch.library", ops.stock_optional.default, optional_sine, (x, y, None)),
        Column("optional result, ours", our_optional.op, optional_sine, (x, y, None)),
        Column("lists, torch.library", ops.stock_list.default, list_sine, ([x, y],)),
        Column("lists, ours", our_list.op, list_sine, ([x, y],)),
    ]


def measured(columns: list[Column], compile: bool) -> list[tuple[Column, list[Any]]]:
    """The rows of each column."""
    found = []
    for column in columns:
        with column.context():
            rows = mg.testing.composition(column.fn, column.reference, column.sample, compile=compile)
        found.append((column, list(rows)))
    return found


def lines_of(found: list[tuple[Column, list[Any]]]) -> list[list[str]]:
    """The lines of a table."""
    lines = [["through", *(column.title for column, _ in found)]]
    for same in zip(*(rows for _, rows in found), strict=True):
        lines.append([same[0].name, *(row.outcome for row in same)])
    return [*lines, ["**right**", *(f"**{sum(r.outcome == 'ok' for r in rows)}**" for _, rows in found)]]


def page(compile: bool = True) -> str:
    """The text of the page."""
    found, others = measured(columns(), compile), measured(kinds(), compile)
    text = f"""# Composition

One operator, by PyTorch and by this package, through every engine and transform. Each number is compared with a plain
implementation of the same function, differentiated in reverse mode only.

- ok: the numbers agree to 1e-8. wrong: they do not. raises: an error. -: does not apply.
- "custom op" is sin(x) y with a backward and a vmap rule: `torch.library.custom_op`, and `mg.custom_op`, whose jvp is
  derived from the backward. "ours" of the others is PyTorch's operator under `mg.override()`.
- "rev-fwd" is reverse mode over forward mode, and so on.

Measured on torch {torch.__version__.partition("+")[0]}, CPU. Written by `python tools/composition.py` (`make measure`).

{table(lines_of(found))}

## Kinds of custom ops

The same function as an op that writes to its argument (mutable), that writes to an argument whose old value it does not
read (out), with an optional argument and result that are None, and with a list of tensors as argument and result. None
has a vmap rule. `torch.library` takes no derivative of an op that writes. Such an op is called with a copy of the
argument, and the new value is its result.

{table(lines_of(others))}

## Failures
"""
    for column, rows in [*found, *others]:
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
