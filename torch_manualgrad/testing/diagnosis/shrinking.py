"""A smaller sample for which a check still fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.rule import Sample
from ..comparison.context import Context
from ..comparison.problem import Problem
from ..comparison.report import Result
from ..inputs import tree
from .probe import again

#: At most this many smaller samples are tried.
TRIES = 60


def shrink(c: Context, result: Result, deadline: float) -> Sample:
    """The smallest sample that was found.

    Sizes of dimensions, the number of dimensions and optional arguments are reduced as long as the check fails in the
    same way; then values are rounded.

    Args:
        c: where the check failed.
        result: the failure.
        deadline: the value of `time.monotonic` after which no more is tried.

    Returns:
        A sample of contiguous tensors, or the given one if that does not fail.
    """
    smallest, tried, tries = c.problem.sample, set(), 0
    progress = True
    while progress:
        progress = False
        for step, candidate in _candidates(smallest):
            if tries >= TRIES or time.monotonic() > deadline:
                return smallest
            key = step, repr(candidate)
            if key in tried:
                continue
            tried.add(key)
            tries += 1
            if fails(c, result, candidate):
                smallest, progress = candidate, True
                break
    return smallest


def fails(c: Context, result: Result, sample: Sample) -> bool:
    """Whether the check fails for the sample in the same way: the same engine, the same outcome, the same words."""
    p = c.problem
    try:
        problem = Problem(p.fn, sample, readout=p.readout, outputs=p.outputs, seed=p.seed)
    except Exception:
        return False
    if problem.dtype != p.dtype:
        return False
    return any(_kind(r) == _kind(result) for r in again(c, result.check, problem))


def _kind(r: Result) -> tuple[str, str, str]:
    # sizes and values in the words may differ
    return r.engine, r.outcome, re.sub(r"[\W\d]+", " ", r.detail)


def _candidates(sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Smaller samples, the greatest changes first; each with the kind of its change."""
    yield from _fewer_arguments(sample)
    yield from _smaller_sizes(sample)
    yield from _fewer_dimensions(sample)
    yield "contiguous", _mapped(sample, lambda i, x: x)
    for digits in (1, 2):
        rounded = _mapped(sample, lambda i, x, digits=digits: _rounded(x, digits))  # type: ignore[misc]
        # values that have become equal may lie on a kink
        if _distinct(rounded) == _distinct(sample):
            yield f"{digits} digits", rounded


def _fewer_arguments(sample: Sample) -> Iterator[tuple[str, Sample]]:
    for name in sample.kwargs:
        yield "arguments", Sample(*sample.args, **{k: v for k, v in sample.kwargs.items() if k != name})
    if len(sample.args) > 1:
        yield "arguments", Sample(*sample.args[:-1], **sample.kwargs)


def _smaller_sizes(sample: Sample) -> Iterator[tuple[str, Sample]]:
    shapes = {i: x.shape for i, x in _tensors(sample)}
    for n in sorted({n for shape in shapes.values() for n in shape if n > 1}, reverse=True):
        for size in sorted({k for k in (1, 2, n // 2, n - 1) if k < n}):
            places = [(i, d) for i, shape in shapes.items() for d, m in enumerate(shape) if m == n]
            # all dimensions of this size, then also arguments equal to it, then dimensions one by one
            for start in (0, n - size):
                yield f"from {start}", _narrowed(sample, places, start, size)
            yield "numbers", _narrowed(sample, places, 0, size, n)
            for place in places if len(places) > 1 else ():
                yield "from 0", _narrowed(sample, [place], 0, size)


def _fewer_dimensions(sample: Sample) -> Iterator[tuple[str, Sample]]:
    ranks = {i: x.dim() for i, x in _tensors(sample) if x.dim() and x.shape[0]}
    groups = [[i for i, rank in ranks.items() if rank == r] for r in sorted(set(ranks.values()), reverse=True)]
    for group in [list(ranks), *groups, *([i] for i in ranks)]:
        if group:
            yield "dimension", _mapped(sample, lambda i, x, group=group: x[0] if i in group else x)  # type: ignore[misc]


def _narrowed(sample: Sample, places: Sequence[tuple[int, int]], start: int, size: int, number: int = 0) -> Sample:
    def narrow(i: int, x: Tensor) -> Tensor:
        for j, d in places:
            x = x.narrow(d, start, size) if j == i else x
        return x

    return _mapped(sample, narrow, lambda v: size if number and type(v) is int and v == number else v)


def _mapped(
    sample: Sample, change: Callable[[int, Tensor], Tensor], other: Callable[[Any], Any] = lambda v: v
) -> Sample:
    """The sample with each strided tensor changed, and made contiguous, and each other leaf changed too."""
    arguments = (sample.args, sample.kwargs)
    leaves = [x for _, x in tree.leaves(arguments)]
    strided = dict(_tensors(sample))
    values = [
        change(i, x.detach()).contiguous().clone().requires_grad_(x.requires_grad) if i in strided else other(x)
        for i, x in enumerate(leaves)
    ]
    args, kwargs = tree.rebuild(arguments, values)
    return Sample(*args, **kwargs)


def _tensors(sample: Sample) -> list[tuple[int, Tensor]]:
    leaves = tree.leaves((sample.args, sample.kwargs))
    return [
        (i, x) for i, (_, x) in enumerate(leaves) if isinstance(x, Tensor) and not tree.is_sparse(x) and not x.is_nested
    ]


def _rounded(x: Tensor, digits: int) -> Tensor:
    if not tree.is_differentiable(x):
        return x
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    simple = torch.tensor(
        [float(f"{v:.{digits}g}") for v in parts.reshape(-1).tolist()], dtype=parts.dtype, device="cpu"
    )
    simple = simple.reshape(parts.shape).to(parts.device)
    return torch.view_as_complex(simple) if x.is_complex() else simple


def _distinct(sample: Sample) -> int:
    values = [x.detach().reshape(-1).abs().double() for _, x in _tensors(sample) if tree.is_differentiable(x)]
    return int(torch.cat([v.cpu() for v in values]).unique().numel()) if values else 0
