"""The verdict of each checker on a function: `mg.testing.check`, and PyTorch's gradcheck, gradgradcheck and opcheck."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

import torch_manualgrad as mg
from torch_manualgrad.testing.checks.table import transforms
from torch_manualgrad.testing.comparison.problem import Problem

from .subject import Subject


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as `mg.compile` makes it, with its graphs run as they are."""
    torch.compiler.reset()
    made: Callable[..., Any] = mg.compile(lambda *args: fn(*args), dynamic=False, fullgraph=True, lowering="eager")
    return made


Checker = Callable[[Subject, mg.Sample, bool, Sequence[str]], list[str]]


def by_default(subject: Subject, sample: mg.Sample, first: bool, left_out: Sequence[str]) -> list[str]:
    """The failing columns of `check`, as it is called without further arguments; of a compiled function the check of it."""
    if subject.compiled:
        return _columns(subject, sample, (), ["compiled"])
    return _columns(subject, sample, mg.testing.MODES, [c for c in mg.testing.CHECKS if first or c != "opcheck"])


def others(subject: Subject, sample: mg.Sample, first: bool, left_out: Sequence[str]) -> list[str]:
    """The failing columns of the other checks."""
    if subject.compiled:
        return []
    known = (*mg.testing.CHECKS, *left_out)
    return _columns(subject, sample, (), [c for c in mg.testing.ALL_CHECKS if c not in known])


def _columns(subject: Subject, sample: mg.Sample, modes: Sequence[str], checks: Sequence[str]) -> list[str]:
    report = mg.testing.check(subject.fn, [sample], modes=modes, checks=checks, raise_on_failure=False, diagnose=False)
    return sorted({r.check for r in report.failures})


def theirs(subject: Subject, sample: mg.Sample, first: bool, left_out: Sequence[str]) -> list[str]:
    """The names of PyTorch's own checks that fail at one sample."""
    p = Problem(subject.fn, sample)
    if subject.compiled:
        p = p.but(fn=compiled(subject.fn))
    xs = tuple(x.detach().clone().requires_grad_() for x in p.primals)
    batched = {"check_batched_grad": True}
    checks = {
        "gradcheck": lambda: torch.autograd.gradcheck(
            p.call, xs, check_forward_ad=True, check_batched_forward_grad=True, **batched
        ),
        "gradgradcheck": lambda: torch.autograd.gradgradcheck(p.call, xs, check_fwd_over_rev=True, **batched),
    }
    found = []
    for name, run in checks.items():
        try:
            run()
        except Exception:
            found.append(name)
    if first and transforms.operator_of(subject.fn) is not None and transforms.opcheck_says(p):
        found.append("opcheck")
    return found


#: Whose checks -> what to run at each sample, the cheap ones first.
CHECKERS: dict[str, Sequence[Checker]] = {"ours": (by_default, others), "theirs": (theirs,)}


def failing(subject: Subject, checker: str, left_out: Sequence[str], known: Collection[str] | None = None) -> list[str]:
    """The checks that fail.

    Args:
        subject: the function.
        checker: whose checks.
        left_out: those of `check` that are not run.
        known: the failures of the right function, if this is a mutant: nothing more is run once something else fails.
    """
    found: set[str] = set()
    with subject.active(), warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for run in CHECKERS[checker]:
            for position, sample in enumerate(subject.samples):
                torch.manual_seed(0)
                found |= set(run(subject, sample, position == 0, left_out))
                if known is not None and found - set(known):
                    return sorted(found)
    return sorted(found)
