"""Checks of memory that is written to: by the user between forward and backward, by the function, by its backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.internals import version_of
from ..comparison.context import Context
from ..comparison.passes import cotangents, gradients, same
from ..comparison.problem import Problem
from ..inputs import tree
from ..numerics.arithmetic import magnitude
from ..numerics.finite_differences import tensors_close
from .transforms import variants_of

CHECK = "residuals"
LIMIT = 8  # of the inputs and of the outputs that are written to


def residuals(c: Context) -> None:
    """Writes to memory between forward and backward, by the user, the function or its backward.

    After a user's write to an argument or an output between forward and backward, either the gradient is unchanged or
    backward raises. The function and its backward write to no differentiable input, and backward does not write to
    outputs, cotangents or saved tensors either: a second backward returns the same as the first. An output that shares
    memory with an argument also shares its version counter.
    """
    p = c.problem
    if c.gap("rev", "eager"):
        return
    expected = c.run(CHECK, "backward", lambda: Pass(p).backward())
    if expected is None:
        return
    c.verdict(CHECK, "writes of its own", partial(_own_writes, p))
    c.verdict(CHECK, "backward twice", partial(_twice, c, expected))
    c.verdict(CHECK, "aliases", partial(_undeclared_alias, p))
    for i in [i for i, x in enumerate(p.leaves) if _has_memory(x)][:LIMIT]:
        c.verdict(CHECK, f"write to {p.paths[i]}", partial(users_write, c, expected, p.paths[i], "leaves", i))
    for i in [i for i, o in enumerate(p.base) if _has_memory(o)][:LIMIT]:
        c.verdict(CHECK, f"write to output {i}", partial(users_write, c, expected, f"output {i}", "outputs", i))


class Pass:
    """One forward pass on copies of all arguments, and what its backward needs."""

    def __init__(self, p: Problem) -> None:
        self.leaves = [x.clone() if isinstance(x, Tensor) else x for x in p.leaves]
        for i in p.index:
            self.leaves[i].requires_grad_()
        self.p = p.at(self.leaves)
        self.outputs = self.p.flat(*self.p.primals)
        self.cotangents = cotangents(p)

    def backward(self, retain_graph: bool = False) -> list[Tensor | None]:
        found = gradients(self.p, self.outputs, self.p.primals, self.cotangents, retain_graph=retain_graph)
        return [None if g is None else g.clone() for g in found]

    def named(self) -> list[tuple[str, Tensor]]:
        """The differentiable inputs, the outputs and the cotangents."""
        inputs = zip(self.p.names, self.p.primals, strict=True)
        outputs = ((f"output {i}", o) for i, o in enumerate(self.outputs))
        given = ((f"the cotangent of output {i}", ct) for i, ct in zip(self.p.outputs, self.cotangents, strict=True))
        return [*inputs, *outputs, *given]


def _own_writes(p: Problem) -> str:
    # a neighbour of the sample: the function has been called at the sample itself, and may have written to it already
    inputs = [variants_of(x, i)[1] for i, x in enumerate(p.primals)]
    unchanged = [x.clone() for x in inputs]
    with torch.no_grad():
        p.flat(*inputs)
    for name, x, before in zip(p.names, inputs, unchanged, strict=True):
        if not same(x, before):
            return f"the function writes to {name}, its input"
    run = Pass(p)
    snapshot = [(name, x, x.detach().clone()) for name, x in run.named()]
    run.backward()
    for name, x, before in snapshot:
        if not same(x.detach(), before):
            return f"backward writes to {name}"
    return ""


def _twice(c: Context, expected: list[Tensor | None]) -> str:
    run = Pass(c.problem)
    run.backward(retain_graph=True)
    changed = _changed(c, run.backward(), expected)
    return (
        f"a second backward gives another gradient of {changed}: the first writes to what is saved" if changed else ""
    )


def _undeclared_alias(p: Problem) -> str:
    for i, o in enumerate(p.base):
        if not _has_memory(o):
            continue
        run = Pass(p)
        before = [(version_of(x), x.detach().clone()) if _has_memory(x) else None for x in run.leaves]
        with _written(run.outputs[i]) as done:
            for path, x, was in zip(p.paths, run.leaves, before, strict=True):
                if done and was is not None and version_of(x) == was[0] and not same(x.detach(), was[1]):
                    return (
                        f"output {i} shares memory with {path}, and a write to one is not noticed in the other: return "
                        "a copy, or a view that PyTorch knows of"
                    )
    return ""


def users_write(c: Context, expected: list[Tensor | None], name: str, group: str, i: int) -> str:
    run = Pass(c.problem)
    with _written(getattr(run, group)[i]) as done:
        try:
            found = run.backward()
        except Exception:
            return ""  # backward noticed the write
    changed = _changed(c, found, expected)
    if not done or not changed:
        return ""
    return (
        f"an in-place write to {name} between forward and backward silently changes the gradient of {changed}: what "
        "backward needs has to be saved by ctx.save_for_backward, or copied"
    )


def _changed(c: Context, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> str:
    """The name of the first input whose gradient differs; empty if there is none."""
    for name, a, b in zip(c.problem.names, found, expected, strict=True):
        if a is not None and b is not None and not tensors_close(a, b, c.tolerance.first):
            return name
    return ""


def _has_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested and x.numel() > 0


@contextmanager
def _written(x: Tensor) -> Iterator[bool]:
    """Change all elements of a tensor in place, and restore them at the end, as the tensor may belong to the function.

    Yields:
        False if `x` cannot be written to, for example because several elements share one place in memory.
    """
    inner = x.detach()
    before = inner.clone()
    try:
        inner.copy_(_other_values(before))
    except RuntimeError:
        yield False
        return
    try:
        yield True
    finally:
        inner.copy_(before)


def _other_values(x: Tensor) -> Tensor:
    if tree.is_differentiable(x):
        wide = torch.complex128 if x.is_complex() else torch.float64
        step = torch.randn(x.shape, dtype=wide, generator=torch.Generator().manual_seed(0), device="cpu")
        return x + (magnitude(x) * step).to(x.device, x.dtype)
    # indices stay in their range
    return ~x if x.dtype == torch.bool else x.reshape(-1).roll(1).reshape(x.shape)
