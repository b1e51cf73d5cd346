"""An entry of the ledger: a number, a program, and the expected result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["ENTRIES", "Entry", "along", "entry", "path", "total"]


@dataclass(frozen=True)
class Entry:
    """One issue of pytorch/pytorch.

    Attributes:
        number: of the issue.
        title: what it is about, in our words.
        program: returns what PyTorch computes: a tensor, or several.
        expected: what it should return: a value, a list of them, or a function that returns it.
        override: the arguments of ``mg.override`` for ours; None: the program needs no rule, and ``ours`` is run.
        ours: the program in its place, where the answer is a function or an operator of this package.
        tolerance: relative.
        open: why ours is not right either, on some version at least; "" where it is.
        slow: that the program takes seconds.
    """

    number: int
    title: str
    program: Callable[[], Any]
    expected: Any
    override: dict[str, Any] | None = field(default_factory=dict)
    ours: Callable[[], Any] | None = None
    tolerance: float = 1e-6
    open: str = ""
    slow: bool = False

    @property
    def source(self) -> str:
        return inspect.getsource(self.program)


ENTRIES: dict[int, Entry] = {}


def entry(number: int, title: str, expected: Any, **about: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter the decorated program; a number may be entered once."""

    def add(program: Callable[[], Any]) -> Callable[[], Any]:
        if number in ENTRIES:
            raise ValueError(f"ledger: #{number} is entered twice")
        ENTRIES[number] = Entry(number, title, program, expected, **about)
        return program

    return add


# -- derivatives along a path, in one mode ----------------------------------------------------------------------------


def rev(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The derivative of a scalar function of a scalar by reverse mode, which can be differentiated again.

    Outside of torch.func; forward mode over reverse mode is ``"fwd-func"``.
    """

    def derivative(t: Tensor) -> Tensor:
        t = t if t.requires_grad else t.detach().requires_grad_()
        y = f(t)
        if not y.requires_grad:
            return torch.zeros_like(t)
        return torch.autograd.grad(y, t, create_graph=True)[0]

    return derivative


def fwd(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The same by forward mode."""
    return lambda t: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]


_MODES = {"rev": rev, "fwd": fwd, "func": torch.func.grad}


def along(f: Callable[[Tensor], Tensor], t: float, modes: str) -> Tensor:
    """A derivative of f at t in the modes, the outer one first: ``along(f, 0.7, "fwd-func")``; "func" is torch.func.grad."""
    for mode in reversed(modes.split("-")):
        f = _MODES[mode](f)
    return f(torch.tensor(t, dtype=torch.float64)).detach()


def path(number: int, title: str, f: Callable[[Tensor], Tensor], t: float, modes: str, **about: Any) -> None:
    """Enter an issue by a scalar function of t and the modes that fail; finite differences of f are what is expected."""
    order = len(modes.split("-"))

    def program() -> Tensor:
        return along(f, t, modes)

    entry(number, title, lambda: _difference(f, t, order), **about)(program)


def _difference(f: Callable[[Tensor], Tensor], t: float, order: int, h: float = 0.02) -> float:
    """A central difference of eighth order, applied ``order`` times."""
    weights = {1: 4 / 5, 2: -1 / 5, 3: 4 / 105, 4: -1 / 280}
    if order == 0:
        with torch.no_grad():
            return float(f(torch.tensor(t, dtype=torch.float64)))
    return sum(
        w * (_difference(f, t + k * h, order - 1, h) - _difference(f, t - k * h, order - 1, h)) / h
        for k, w in weights.items()
    )


def total(*outputs: Tensor | Sequence[Any]) -> Tensor:
    """A scalar that depends on every entry in its own way."""
    found = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        parts = output if isinstance(output, (tuple, list)) else [output]
        for x in parts:
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
                found = found + (x * torch.arange(1.0, x.numel() + 1, dtype=x.dtype).reshape(x.shape).cos()).sum()
    return found
