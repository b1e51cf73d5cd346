"""Checks of a function inside of programs that change how its backward runs: checkpoint, hooks, the compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...core.internals import compiled_backward
from ..comparison.context import Context
from ..comparison.passes import Pairs, both, compared, cotangents, variables
from ..comparison.problem import Problem


def checkpointed(c: Context) -> None:
    """Outputs and gradients do not change under `torch.utils.checkpoint`, or with hooks on saved tensors.

    Both values of `use_reentrant` are tried, hooks that copy saved tensors, and `torch.autograd.graph.save_on_cpu`.
    """
    p, check = c.problem, "checkpoint"
    if c.gap("rev", "eager"):
        return
    hooks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "hooks that copy": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
    }
    for reentrant in (False, True) if _tracked(p) else ():
        # copies: a reentrant checkpoint would add a history to a tensor that the function owns and returns as it is
        call = partial(checkpoint, lambda *xs: tuple(o.clone() for o in p.flat(*xs)), use_reentrant=reentrant)
        c.equal(check, f"use_reentrant={reentrant}", partial(_against_plain, p, call, nullcontext))
    for engine, hook in hooks.items():
        c.equal(check, engine, partial(_against_plain, p, p.flat, hook))


def _tracked(p: Problem) -> bool:
    """Whether there is anything to differentiate: a reentrant checkpoint raises if there is not."""
    try:
        return any(o.requires_grad for o in p.call(*variables(p)))
    except Exception:
        return True  # the error is raised again where it is reported


def _against_plain(p: Problem, call: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> Pairs:
    return compared(p, _accumulated(p, call, around), both(p))


def _accumulated(
    p: Problem, call: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]
) -> list[Tensor | None]:
    """As `passes.both`, with gradients accumulated by backward(): a reentrant checkpoint supports no other way."""
    xs = variables(p)
    with around():
        outputs = call(*xs)
    live = [(outputs[i], ct) for i, ct in zip(p.outputs, cotangents(p), strict=True) if outputs[i].requires_grad]
    if live:
        torch.autograd.backward([o for o, _ in live], [ct for _, ct in live])
    return [*(o.detach() for o in outputs), *(x.grad for x in xs)]


def compiled_autograd(c: Context) -> None:
    """The gradient with compiled autograd, which compiles the backward of an eager forward; first sample only."""
    p = c.problem
    if c.position > 0 or c.gap("rev", "eager"):
        return

    def pairs() -> Pairs:
        expected = both(p)
        torch.compiler.reset()
        with compiled_backward():
            found = _accumulated(p, p.flat, nullcontext)
        return compared(p, found, expected)

    c.equal("compiled autograd", "backward", pairs)
