"""`check`: every mode and every transform of one function, over samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..core.sample import Sample
from . import derivatives, report, transforms
from .context import Context
from .modes import MODES
from .numeric import TOLERANCES, Tolerance
from .problem import Problem
from .report import Report, Result

_MODES: dict[str, Callable[[Context], None]] = {
    "rev": derivatives.rev,
    "fwd": derivatives.fwd,
    **{m: derivatives.second(m) for m in MODES if "-" in m},
}
# name -> (check, whether it needs something to differentiate)
_CHECKS: dict[str, tuple[Callable[[Context], None], bool]] = {
    "forward": (transforms.forward, False),
    "agreement": (derivatives.agreement, True),
    "duality": (derivatives.duality, True),
    "undefined cotangents": (derivatives.undefined_cotangents, True),
    "vmap": (transforms.vmap, False),
    "vmap-grad": (transforms.vmap_grad, True),
    "noncontiguous": (transforms.noncontiguous, False),
    "kernel": (transforms.kernel, False),
    "fake": (transforms.fake, False),
    "opcheck": (transforms.opcheck, False),
    "compile": (transforms.compiled, True),
}

#: Every check; "compile" is expensive.
ALL_CHECKS: tuple[str, ...] = tuple(_CHECKS)
#: What `check` runs by default.
CHECKS: tuple[str, ...] = tuple(name for name in _CHECKS if name != "compile")


class CheckFailed(AssertionError):
    """A check failed; the message is the report, also at `report`."""

    def __init__(self, found: Report) -> None:
        super().__init__(f"{len(found.failures)} of {len(found.results)} comparisons failed\n{found}")
        self.report = found


def check(
    fn: Callable[..., Any],
    samples: Iterable[Sample | tuple[Any, ...]],
    *,
    modes: Sequence[str] = MODES,
    checks: Sequence[str] = CHECKS,
    tolerances: Mapping[torch.dtype, Tolerance] | None = None,
    gaps: Mapping[str, str] | None = None,
    readout: Callable[..., Any] | None = None,
    outputs: Sequence[int] | None = None,
    name: str | None = None,
    seed: int = 0,
    raise_on_failure: bool = True,
) -> Report:
    """Check the derivatives of `fn` and how it composes with PyTorch's transforms.

    Args:
        fn: any callable of tensors: a function, an operator overload or packet, a custom operator, a module.
        samples: calls of it, `Sample` or a tuple of positional arguments; small ones, off kinks. Inputs may be
            non-contiguous, empty, batched, of any shape; integer tensors and other values pass through; lists of
            tensors are inputs too.
        modes: which of `MODES`, the outer transform first. Each is compared with finite differences in double
            precision.
        checks: which of `ALL_CHECKS`.
        tolerances: replaces entries of `TOLERANCES`, keyed by the narrowest dtype of a sample's differentiable inputs.
        gaps: mode or check (or ``"fwd-fwd/func"``, one engine of it) -> reason. A declared gap must raise in that mode:
            a wrong value is a failure, and so is a right one.
        readout: applied to the result before it is differentiated or compared, to make it gauge-invariant or to leave
            out what is not differentiable. The checks "fake" and "opcheck" call `fn` itself.
        outputs: the indices, among the tensor leaves of the result, of those that depend differentiably on the inputs;
            by default every floating point and complex one. A constant output is allowed; one that is declared
            non-differentiable but varies is not.
        name: of `fn` in the report.
        seed: of directions and weights; two calls with one seed do the same.
        raise_on_failure: whether to raise `CheckFailed` if anything failed.

    Returns:
        The report.

    Raises:
        CheckFailed: with the report as its message.
        ValueError: for an unknown mode or check, or a gap declared for neither.
    """
    gaps = dict(gaps or {})
    _validate(modes, checks, gaps)
    table = TOLERANCES | dict(tolerances or {})
    label = name or _name_of(fn)
    found = Report()
    # only a function that draws random numbers seeds the generator; the caller's stream is restored
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for position, given in enumerate(samples):
            sample = given if isinstance(given, Sample) else Sample(*given)
            found.results += _check_one(fn, label, sample, position, modes, checks, table, gaps, readout, outputs, seed)
    if raise_on_failure and found.failures:
        raise CheckFailed(found)
    return found


def _check_one(
    fn: Any,
    label: str,
    sample: Sample,
    position: int,
    modes: Sequence[str],
    checks: Sequence[str],
    table: Mapping[torch.dtype, Tolerance],
    gaps: Mapping[str, str],
    readout: Any,
    outputs: Any,
    seed: int,
) -> list[Result]:
    try:
        problem = Problem(fn, sample, readout=readout, outputs=outputs, seed=seed)
    except Exception as error:
        return [
            Result(
                label, repr(sample), "", "forward", "eager", report.RAISES, detail=f"{type(error).__name__}: {error}"
            )
        ]
    tolerance = table.get(problem.dtype, TOLERANCES[torch.float64])
    context = Context(label, fn, problem, tolerance, gaps, position)
    wanted = [(m, _MODES[m], True) for m in modes] + [(k, *_CHECKS[k]) for k in checks]
    for column, run, derivative in wanted:
        before = len(context.results)
        if problem.applicable or not derivative:
            # an error of the checker itself (a reference that cannot be evaluated) is reported like one of fn
            context.run(column, "reference", partial(run, context))
        if len(context.results) == before:
            context.add(column, "", report.NOT_APPLICABLE)
    return context.results


def _validate(modes: Sequence[str], checks: Sequence[str], gaps: Mapping[str, str]) -> None:
    for given, known, what in ((modes, MODES, "mode"), (checks, ALL_CHECKS, "check")):
        unknown = [g for g in given if g not in known]
        if unknown:
            raise ValueError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    for gap in gaps:
        if gap.split("/")[0] not in (*MODES, *ALL_CHECKS):
            raise ValueError(f"a gap names a mode or a check, with /eager or /func for one engine; not {gap!r}")


def _name_of(fn: Any) -> str:
    op = transforms.operator_of(fn)
    if isinstance(op, (transforms.OVERLOAD, transforms.PACKET)):
        return str(op)
    return getattr(fn, "__name__", None) or getattr(fn, "_qualname", None) or type(fn).__name__
