"""The calls: each follows from the seed and its number alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import torch_manualgrad as mg
from torch_manualgrad.core.sample import describe

from .mutations import Recipe, guarded, mutated

__all__ = ["Call", "Target", "call_number", "formula_targets"]


@dataclass(frozen=True)
class Target:
    """A function, valid calls of it, and what its arguments are called."""

    name: str
    function: Callable[..., Any]
    bases: Sequence[tuple[Sequence[Any], dict[str, Any]]]
    names: Sequence[str]


@dataclass
class Call:
    """One call."""

    target: Target
    args: list[Any]
    kwargs: dict[str, Any]
    changed: list[str]

    def run(self) -> Any:
        args, kwargs = guarded(self.args), guarded(self.kwargs)
        return self.target.function(*args, **kwargs)

    def __str__(self) -> str:
        given = [described(a) for a in self.args] + [f"{k}={described(v)}" for k, v in self.kwargs.items()]
        return f"{self.target.name}({', '.join(given)})"


def described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        extra = "" if value.device.type == "cpu" else f" on {value.device}"
        extra += "" if value.layout is torch.strided else f" {value.layout}"
        if value.is_nested:
            return "nested"
        if value.layout is torch.strided and value.numel() and not value.is_contiguous():
            extra += f" strides {list(value.stride())}"
        if value.layout is torch.strided and value.device.type == "cpu" and 0 < value.numel() <= 8 and not extra:
            extra += f" = {value.detach().tolist()}"
        return describe(value) + extra
    if isinstance(value, Recipe):
        return f"{value.function.__name__}({', '.join(map(described, value.args))})"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(described, value)) + "]"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:100]


def formula_targets(bases: dict[str, list[list[Any]]]) -> list[Target]:
    """The formulas, as ``mg.ops``, as ``torch.ops``, and their overloads."""
    found = []
    for f in mg.ops.values():
        calls = [(v, {}) for v in bases.get(f.name, [])]
        if not calls:
            continue
        names = f.signature.names
        short = f.name.partition("::")[2]
        found.append(Target(f"mg.ops.{short}", f, calls, names))
        found.append(Target(f"torch.ops.manualgrad.{short}", getattr(torch.ops.manualgrad, short), calls, names))
        for overload, op in f.overloads.items():
            if op.signature.names == names:
                found.append(Target(f"torch.ops.manualgrad.{short}.{overload}", op.op, calls, names))
    return found


def call_number(targets: Sequence[Target], seed: int, number: int) -> Call:
    """The call of this number."""
    choice = random.Random(f"{seed} {number}")
    torch.manual_seed(choice.randrange(2**31))
    target = targets[number % len(targets)]
    args, kwargs = choice.choice(list(target.bases))
    args, kwargs = list(args), dict(kwargs)
    places: list[Any] = [*range(len(args)), *kwargs]
    changed = []
    for _ in range(choice.choice((1, 1, 1, 2, 3))):
        if not places:
            break
        at = choice.choice(places)
        if isinstance(at, int):
            args[at] = mutated(args[at], choice)
            changed.append(target.names[at] if at < len(target.names) else str(at))
        else:
            kwargs[at] = mutated(kwargs[at], choice)
            changed.append(at)
    kind = choice.randrange(60)
    if kind == 0 and args:
        args.pop()
    elif kind == 1:
        args.append(choice.choice((None, 1, "x")))
    elif kind == 2:
        kwargs["no_such_argument"] = 1
    return Call(target, args, kwargs, changed)
