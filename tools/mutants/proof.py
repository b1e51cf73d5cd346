"""Whether a mutant is wrong at all: its numbers against those of the right function, in random directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad import override
from torch_manualgrad.core.internals import FakeTensorMode
from torch_manualgrad.testing.checks.table import transforms
from torch_manualgrad.testing.comparison import modes
from torch_manualgrad.testing.comparison.problem import Problem
from torch_manualgrad.testing.inputs import tree
from torch_manualgrad.testing.numerics.finite_differences import worst

from . import score
from .subject import Subject

DIFFERENT, SAME, RAISES = "different", "same", "raises"
#: By how much, relative to the largest entry, two derivatives differ that are not equal.
LEAST = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-3, torch.complex64: 1e-3}
Numbers = Iterator[Callable[[], list[Any]]]


def derivatives(p: Problem) -> Numbers:
    """First derivatives, of all inputs and of each, of all outputs and of each; then second ones."""
    yield lambda: modes.gradient(p)
    yield lambda: [modes.fwd_eager(p, p.u)]
    if len(p.primals) > 1:
        for i in range(len(p.primals)):
            yield partial(modes.gradient, p, [i])
            yield partial(modes.gradient, p, [j for j in range(len(p.primals)) if j != i])
            yield lambda i=i: [modes.fwd_eager(p, [u if j == i else None for j, u in enumerate(p.u)])]
    if len(p.outputs) > 1:
        for j in range(len(p.outputs)):
            yield partial(modes.gradient, p, None, [j])
    for mode in ("rev-rev", "fwd-rev", "rev-fwd"):
        yield lambda mode=mode: [modes.SECOND[mode]["eager"](p, p.curve)]


def third(p: Problem) -> Numbers:
    """The third derivative of the loss along a parabola."""

    def along() -> list[Any]:
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = p.curve(*(t * u for u in p.u))
        for order in (1, 2, 3):
            (value,) = torch.autograd.grad(value, t, create_graph=order < 3)
        return [value]

    yield along


def ties(p: Problem) -> Numbers:
    """Gradients and tangents where many inputs are equal."""
    tied = p.at([x.sign() if tree.is_differentiable(x) and not x.is_complex() else x for x in p.leaves])
    yield lambda: modes.gradient(tied)
    yield lambda: [modes.fwd_eager(tied, p.u)]


def single(p: Problem) -> Numbers:
    """Gradients in single precision, of numbers that single precision has."""
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    yield lambda: modes.gradient(
        p.at([x.to(narrow.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x for x in p.leaves])
    )
    yield lambda: modes.gradient(p)


def fake(p: Problem) -> Numbers:
    """Shape, dtype and strides of fake outputs."""

    def outputs() -> list[Any]:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            found = p.flat(*(mode.from_tensor(x) for x in p.primals))
        return [(tuple(o.shape), o.dtype, o.stride()) for o in found]

    yield outputs


def batched(p: Problem) -> Numbers:
    """Outputs and gradients of a batch."""
    stacked = tuple(torch.stack(transforms.variants_of(x, i)) for i, x in enumerate(p.primals))
    yield lambda: list(torch.func.vmap(p.call)(*stacked))
    yield lambda: list(torch.func.vmap(torch.func.grad(p.loss))(*stacked))


def compiled(p: Problem) -> Numbers:
    """Derivatives of the compiled function, twice, and at another point: some faults show where it runs again only."""
    with override():
        q = p.but(fn=score.compiled(p.fn))
        for point in (q, q, q.at([x * 0.75 for x in q.leaves])):
            yield from derivatives(point)


#: Kind -> where its mutants are wrong, if not in `derivatives`.
WHERE: dict[str, Callable[[Problem], Numbers]] = {
    "third order": third,
    "ties": ties,
    "precision": single,
    "fake kernel": fake,
    "vmap rule": batched,
    "compiled": compiled,
}


def compared(kind: str, wrong: Subject, right: Subject) -> str:
    """Whether the two differ at the samples; or that the mutant, or the right function, raises."""
    where = WHERE.get(kind, derivatives)
    verdict = SAME
    for sample in right.samples:
        for ours, theirs in zip(_numbers(where, wrong, sample), _numbers(where, right, sample)):
            if ours is None or theirs is None:
                return RAISES
            if any(_differ(a, b) for a, b in zip(ours, theirs)):
                verdict = DIFFERENT
    return verdict


def _numbers(where: Callable[[Problem], Numbers], subject: Subject, sample: Any) -> list[list[Any] | None]:
    found: list[list[Any] | None] = []
    with subject.active():
        try:
            p = Problem(subject.fn, sample)
            for compute in where(p):
                found.append(compute())
        except Exception:
            found.append(None)
    return found


def _differ(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return bool(a != b)
    a, b = (torch.zeros_like(y) if x is None else x for x, y in ((a, b), (b, a)))
    least = LEAST[b.dtype]
    absolute, relative = worst(a, b)
    # the loss is about one, so that a smaller number is the rounding error of zero
    return not absolute <= 1e-2 * least and not relative <= least
