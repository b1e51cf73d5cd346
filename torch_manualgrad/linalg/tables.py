"""Tables of functions of real numbers at the eigenvalues: the derivatives $J$ and the divided differences $D$.

Both are arguments of `hermitian_function`. For the named functions, the divided differences over two nodes are written
so that no digits are lost where the nodes are close.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..arguments import ArgumentError
from ..core.internals import saved_tensors_are_hooked, saved_tensors_unhooked
from .hermitian import divided_difference

__all__ = ["Function", "exp", "log", "of_function", "power", "rsqrt", "sqrt"]

Function = Callable[[Tensor], Tensor]

_TERMS = 8  # derivatives of a named function that are tabulated
_FEWEST = 5  # derivatives of any other function; those that are not given are computed by torch.func.grad


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.unsqueeze(-1), x.unsqueeze(-2)


def _log_ratio(a: Tensor, b: Tensor) -> Tensor:
    """$log(a / b)$, to full relative accuracy also where $a$ is close to $b$."""
    x = (a - b) / (a + b)
    return torch.where(x.abs() < 0.5, 2 * torch.atanh(x), torch.log(a / b))


def _powers(p: float, x: Tensor) -> Tensor:
    """$J$ of $x^p$."""
    rows, binomial = [], 1.0
    for q in range(_TERMS + 1):
        rows.append(binomial * x.pow(p - q))
        binomial *= (p - q) / (q + 1)
    return torch.stack(rows, -2)


def sqrt(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $x^(1/2)$."""
    a, b = _pairs(x.sqrt())
    return _powers(0.5, x), 1 / (a + b)


def rsqrt(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $x^(-1/2)$."""
    a, b = _pairs(x.sqrt())
    return _powers(-0.5, x), -1 / (a * b * (a + b))


def log(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $log x$."""
    rows = [x.log(), *[(-1) ** (q + 1) / q * x.pow(-q) for q in range(1, _TERMS + 1)]]
    a, b = _pairs(x)
    equal = a == b
    return torch.stack(rows, -2), torch.where(equal, 1 / a, _log_ratio(a, b) / torch.where(equal, 1, a - b))


def exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $exp x$."""
    value = x.exp()
    rows = [value / math.factorial(q) for q in range(_TERMS + 1)]
    a, b = _pairs(x)
    equal, h = a == b, (a - b) / 2
    safe = torch.where(equal, 1, h)
    close = torch.exp((a + b) / 2) * torch.where(equal, 1, safe.clamp(-1, 1).sinh() / safe)
    (fa, fb) = _pairs(value)
    return torch.stack(rows, -2), torch.where(h.abs() < 1, close, (fa - fb) / (2 * safe))


def power(p: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $x^p$."""
    # with u = log(a / b): a^p - b^p = 2 (ab)^(p/2) sinh(pu/2), and a - b is the same with p = 1
    a, b = _pairs(x)
    u = _log_ratio(a, b) / 2
    equal = u == 0
    safe = torch.where(equal, 1, u)
    ratio = torch.where(equal, p, (p * safe).sinh() / safe.sinh())
    return _powers(p, x), (a.sqrt() * b.sqrt()).pow(p - 1) * ratio


def _derivative(f: Function) -> Function:
    slope = torch.func.grad(lambda x: f(x).sum())

    def derivative(x: Tensor) -> Tensor:
        # torch.func raises under hooks on saved tensors, including those of a checkpoint
        if torch.compiler.is_compiling() or not saved_tensors_are_hooked():
            return slope(x)
        with saved_tensors_unhooked():
            return slope(x)

    return derivative


def of_function(f: Function, derivatives: Sequence[Function], x: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of $f$.

    Raises:
        ArgumentError: $f$, or one of the derivatives, does not return a real tensor of the shape of ``x``.
    """
    functions = [f, *derivatives]
    while len(functions) <= _FEWEST:
        functions.append(_derivative(functions[-1]))
    rows = []
    for q, g in enumerate(functions):
        row = g(x)
        if not isinstance(row, Tensor) or row.shape != x.shape or row.is_complex():
            what = "f" if q == 0 else f"derivatives[{q - 1}]"
            given = list(row.shape) if isinstance(row, Tensor) else type(row).__name__
            raise ArgumentError(
                f"{what}: expected a real tensor of shape {list(x.shape)} for an input of that shape, got {given}"
            )
        rows.append(row.to(x.dtype).detach() / math.factorial(q))
    J = torch.stack(rows, -2)
    every = torch.arange(x.shape[-1], device=x.device)
    nodes = torch.stack(torch.meshgrid(every, every, indexing="ij")).sort(0).values
    return J, divided_difference(nodes.unbind(), x, J)
