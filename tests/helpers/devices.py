"""One function on two devices: every mode of a sample on CUDA against the same on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.internals import pytree
from torch_manualgrad.core.rule import Sample
from torch_manualgrad.testing import check
from torch_manualgrad.testing.comparison import modes
from torch_manualgrad.testing.comparison.problem import Problem

# Both devices round, and a factorization's second derivative divides by gaps: a wrong term is orders of magnitude larger.
TOLERANCE = 1e-6


def to_cuda(tree: Any) -> Any:
    """With the strides of each tensor."""

    def move(x: Tensor) -> Tensor:
        if x.layout is not torch.strided:
            return x.detach().cuda().requires_grad_(x.requires_grad)
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if x.numel() else x.cuda()
        overlaps = x.numel() and any(s == 0 and n > 1 for n, s in zip(x.shape, x.stride()))
        moved = x.detach().cuda() if overlaps else moved.copy_(x.detach())
        return moved.requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, move, tree)


def every_mode(p: Problem) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "rev/eager", lambda: modes.gradient(p)
    yield "rev/func", lambda: modes.rev_func(p)
    yield "fwd/eager", lambda: modes.fwd_eager(p, p.u)
    yield "fwd/func", lambda: modes.fwd_func(p, p.u)
    for mode, engines in modes.SECOND.items():
        for engine, run in engines.items():
            yield f"{mode}/{engine}", lambda run=run: run(p, p.curve)


def attempt(run: Callable[[], Any]) -> tuple[list[Any], Exception | None]:
    try:
        return pytree.tree_leaves(run()), None
    except Exception as error:
        return [], error


def distance(found: list[Any], expected: list[Any]) -> float:
    """The largest difference, relative to the largest value expected; a gradient that is missing is zero."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros(()) if x is None else x.detach().cpu().to_dense().to(torch.complex128) for x in (a, b))
        if not torch.equal(a.isnan().broadcast_to(b.shape), b.isnan()):
            return float("inf")
        gap = torch.where(a == b, 0, a - b).nan_to_num(0).abs().amax() if b.numel() else torch.zeros(())
        worst = max(worst, float(gap / b.nan_to_num(0, 0, 0).abs().amax().clamp(min=1)) if b.numel() else 0.0)
    return worst


def runs(fn: Callable[..., Any], sample: Sample) -> bool:
    """Whether PyTorch has the operator itself, on this device, for this dtype and these options."""
    try:
        fn(*sample.args, **sample.kwargs)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def differences(fn: Callable[..., Any], sample: Sample, moved: Sample, gaps: Mapping[str, str]) -> list[str]:
    """The modes in which a sample's derivatives on CUDA differ from those on the CPU, one line for each.

    Args:
        fn: the function.
        sample: on the CPU.
        moved: the same on CUDA.
        gaps: as `check` has them.
    """
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        on_cpu, on_cuda = Problem(fn, sample), Problem(fn, moved)
        if not on_cpu.applicable:
            return []
        found = [] if [o.shape for o in on_cpu.base] == [o.shape for o in on_cuda.base] else ["other shapes"]
        if on_cuda.random:
            return found + against_finite_differences(fn, moved, gaps)
        off = False
        for (mode, ours), (_, theirs) in zip(every_mode(on_cuda), every_mode(on_cpu)):
            expected, refused = attempt(theirs)
            value, error = attempt(ours)
            if (error is None) != (refused is None):
                raised, where = (refused, "the CPU") if error is None else (error, "CUDA")
                found.append(f"{mode}: raises on {where} only, {type(raised).__name__}: {str(raised)[:300]}")
            elif error is None:
                off |= not distance(value, expected) <= TOLERANCE
    # the function itself may be another one there: its pivots, its phases, the kernel of a backward
    return found + (against_finite_differences(fn, moved, gaps) if off else [])


def on_cuda(sample: Sample) -> Sample:
    return Sample(*to_cuda(sample.args), **to_cuda(sample.kwargs)).named(sample.name)


def against_finite_differences(fn: Callable[..., Any], sample: Sample, gaps: Mapping[str, str]) -> list[str]:
    report = check(fn, [sample], checks=(), gaps=gaps, raise_on_failure=False, diagnose=False)
    return [str(failure) for failure in report.failures]
