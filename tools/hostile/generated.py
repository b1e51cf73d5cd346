"""Valid calls of formulas that no rule calls on its samples, made from what their docstrings declare."""

from __future__ import annotations

import inspect
import random
import re
from typing import Any

import torch

from torch_manualgrad.core.declared_arguments import Declared
from torch_manualgrad.core.rule import Formula

__all__ = ["generated"]


def generated(formula: Formula, count: int = 4) -> list[list[Any]]:
    """Calls with random sizes; those that raise are left out."""
    found = []
    for i in range(4 * count):
        values = _values(formula, random.Random(f"{formula.name} {i}"))
        try:
            formula(*values)
        except Exception:
            continue
        found.append(values)
    return found[:count] or [values]


def _values(formula: Formula, choice: random.Random) -> list[Any]:
    sizes: dict[str, Any] = {"*": (), "batch": choice.choice(((), (2,))), "normalized_shape": (3,)}
    made: dict[str, Any] = {}
    parameters = inspect.signature(formula.reference).parameters
    declared = {name: formula.calls.declared.get(name, Declared()) for name in parameters}
    for name in sorted(parameters, key=lambda name: bool(declared[name].as_shape_of)):
        parameter, about = parameters[name], declared[name]
        made[name] = _value(name, str(parameter.annotation), about, sizes, made, choice)
    return [made[name] for name in parameters]


def _value(
    name: str, kind: str, about: Declared, sizes: dict[str, Any], made: dict[str, Any], choice: random.Random
) -> Any:
    if "None" in kind and choice.random() < (0.9 if "mask" in name else 0.2):
        return None
    if "Sequence[Tensor" in kind:
        return [torch.randn(2, 3, dtype=torch.float64) for _ in range(2)]
    if "Tensor" in kind:
        return _tensor(name, about, sizes, made, choice)
    if "Sequence[bool]" in kind:
        return [True] * (about.length or 3)
    if "Sequence" in kind:
        return [3] if "shape" in name else [1, 1] if "stride" in name or "dilation" in name else [0, 0]
    if about.choices:
        return choice.choice(about.choices)
    if "bool" in kind:
        return choice.random() < 0.5
    if "dtype" in kind:
        return torch.float64
    return 0.5 if "float" in kind else choice.randrange(2)


def _tensor(name: str, about: Declared, sizes: dict[str, Any], made: dict[str, Any], choice: random.Random) -> Any:
    if name.endswith("offsets"):
        return torch.tensor([0, 2, sizes.setdefault("T", 4)])
    like = made.get(about.as_shape_of)
    shape = list(like.shape) if isinstance(like, torch.Tensor) else [2, 3]
    if about.shapes:
        shape = [n for dim in choice.choice(about.shapes) for n in _sizes(dim, sizes, choice)]
    if about.dtype == "integers":
        return torch.ones(shape, dtype=torch.int64)
    if about.dtype == "bool":
        return torch.ones(shape, dtype=torch.bool)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(choice.randrange(1000)))


def _sizes(dim: str, sizes: dict[str, Any], choice: random.Random) -> list[int]:
    if dim in ("*", "...", "*1"):
        return [*sizes["batch"]] if dim == "*" else []
    if dim.startswith("*"):
        return list(sizes.setdefault(dim[1:], (2,)))
    if dim.isdecimal():
        return [int(dim)]
    factor = re.match(r"(\d+) ", dim)
    letter = re.search(r"[A-Za-z_]\w*", dim)
    size = sizes.setdefault(letter[0] if letter else dim, choice.choice((2, 3, 4)))
    return [size * int(factor[1]) if factor else size + 1 if "+ 1" in dim else size]
