"""The columns of the table: ways of using a differentiable function, each a small program that runs on stock PyTorch.

A way takes a `Call` and returns named numbers. What it returns under "forward" is the operator's output, the same bit for
bit with and without rules; a value that is no tensor has to be the same too. Every other number is compared with that of
the way's `reference`, which is the same mathematics with nothing special about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rows import Call
from torch import Tensor

from torch_manualgrad.testing.comparison.problem import Problem
from torch_manualgrad.testing.numerics.arithmetic import inner

Numbers = Mapping[str, Any]
Program = Callable[[Call], Numbers]

DTYPES = (torch.float64, torch.complex128)

# what a way costs: all rows always; a handful of rows always and all in the slow tests; the slow tests only
CHEAP, DEAR, SLOW = "cheap", "dear", "slow"
HANDFUL = (
    "aten::linalg_vector_norm",
    "aten::_cdist_forward",
    "aten::linalg_lu",
    "aten::linalg_qr",
    "aten::_linalg_svd",
    "aten::linalg_matrix_exp",
    "aten::mm",
)


@dataclass(frozen=True)
class Way:
    """One way of using a function.

    Attributes:
        reference: the same without the way; None: what stock gives this way is the reference.
        cost: one of `CHEAP`, `DEAR`, `SLOW`.
        dtypes: of the samples.
        rtol: how far rounding may go, relative to the largest component; by the dtype where it is None.
    """

    name: str
    run: Program
    reference: Program | None
    cost: str = CHEAP
    dtypes: Sequence[torch.dtype] = DTYPES
    rtol: float | None = None


WAYS: dict[str, Way] = {}


def way(name: str, reference: Program | None, **about: Any) -> Callable[[Program], Program]:
    """Enter a program in the registry."""

    def enter(run: Program) -> Program:
        assert name not in WAYS, name
        WAYS[name] = Way(name, run, reference, **about)
        return run

    return enter


def variables(p: Problem) -> list[Tensor]:
    """Fresh leaves that require grad."""
    return [x.detach().clone().requires_grad_() for x in p.primals]


def gradient(value: Tensor, at: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """The gradient of a real scalar; zero where autograd says None."""
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in at]
    found = torch.autograd.grad(value, at, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, at)]


def total(p: Problem, outputs: Sequence[Tensor]) -> Tensor:
    """The loss of outputs that a program has in hand."""
    losses = p.losses(outputs)
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


def named(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {f"{name} {i}": v for i, v in enumerate(values)}


def once(p: Problem, call: Callable[..., Sequence[Tensor]] | None = None, **options: Any) -> dict[str, Any]:
    """Forward and gradient of the loss."""
    xs = variables(p)
    out = (call or p.call)(*xs)
    kept = [o.detach().clone() for o in out]
    return named("forward", kept) | named("gradient", gradient(total(p, out), xs, **options))


def first(c: Call) -> Numbers:
    """The reference of most ways: forward and gradient."""
    return once(c.problem)


def product_with_hessian(p: Problem, call: Callable[..., Sequence[Tensor]]) -> dict[str, Any]:
    xs = variables(p)
    grads = gradient(total(p, call(*xs)), xs, create_graph=True)
    return named("hessian", gradient(inner(grads, p.u), xs))


def second(c: Call) -> Numbers:
    """Forward, gradient, and the product of the Hessian with a direction."""
    return twice(c.problem, c.problem.call)


def twice(p: Problem, call: Callable[..., Sequence[Tensor]]) -> dict[str, Any]:
    """First and second order; an error of the second stands in the place of its numbers, as stock may have the first only."""
    found = once(p, call)
    try:
        return found | product_with_hessian(p, call)
    except Exception as error:
        return found | {"hessian": error}


@way("plain", second)
def plain(c: Call) -> Numbers:
    """Backward twice: the row's own comparison of stock with the rule."""
    return second(c)


OTHER_DTYPES = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)


def first_in_double(c: Call) -> Numbers:
    """The reference for narrow dtypes."""
    return once(c.problem.wide())


@way("other dtypes", first_in_double, dtypes=OTHER_DTYPES)
def other_dtypes(c: Call) -> Numbers:
    return first(c)
