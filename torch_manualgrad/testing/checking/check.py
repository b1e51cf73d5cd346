"""`check`: every mode and every transform of one function, over samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...arguments import checked
from ...core.override.override import override
from ...core.rule import Rule, Sample
from ..checks import transforms
from ..checks.table import ALL_CHECKS, CHECKS, TABLE
from ..comparison import report
from ..comparison.context import Context
from ..comparison.modes import MODES
from ..comparison.problem import Problem
from ..comparison.report import Report, Result
from ..diagnosis.diagnosis import Diagnosis
from ..inputs.modules import with_parameters, without_parameters
from ..inputs.samples import as_samples
from ..inputs.written import without_writes
from ..numerics.finite_differences import TOLERANCES, Tolerance


class CheckFailed(AssertionError):
    """A check failed; the message is the report, which is also the attribute `report`."""

    def __init__(self, found: Report) -> None:
        super().__init__(f"{len(found.failures)} of {len(found.results)} comparisons failed\n{found}")
        self.report = found


@checked
def check(
    fn: Callable[..., Any] | Rule,
    samples: Iterable[Sample | tuple[Any, ...]] | None = None,
    *,
    modes: Sequence[str] = MODES,
    checks: Sequence[str] = CHECKS,
    tolerances: Mapping[torch.dtype, Tolerance] | None = None,
    gaps: Mapping[str, str] | None = None,
    readout: Callable[..., Any] | None = None,
    outputs: Sequence[int] | None = None,
    reference: Callable[..., Any] | None = None,
    name: str | None = None,
    seed: int = 0,
    raise_on_failure: bool = True,
    diagnose: bool = True,
    shrink: bool = True,
    lowering: str = "eager",
) -> Report:
    """Check the derivatives of `fn` and how it composes with PyTorch's transforms.

    Args:
        fn: any callable of tensors: a function, an operator overload or packet, a custom operator, a module. A module's
            parameters that require grad are differentiable inputs too, under their names; its buffers are constants,
            and are not changed. An operator that writes to arguments is checked on copies of them, whose new values are
            additional results. A rule is checked under its own override: ``check(mg.rules["aten::sin"])``.
        samples: small calls of `fn`, each a `Sample` or a tuple of positional arguments: ``[(x, y)]`` is one call with two
            arguments, ``[(x,), (y,)]`` are two calls with one. Inputs may be non-contiguous, empty, batched, of any shape;
            integer tensors and other values pass through; lists of tensors are inputs too. At a kink the outcome is "not
            differentiable", and only a value that is certainly not a generalized gradient is wrong. May be left out for
            a rule, which has its own samples in float64 and complex128.
        modes: which of `MODES`, the outer transform first. Each is compared with finite differences in double
            precision.
        checks: which of `ALL_CHECKS`; by default `CHECKS`. docs/checking.md says what each one compares.
        tolerances: replaces entries of `TOLERANCES`, keyed by the narrowest dtype of a sample's differentiable inputs.
        gaps: mode or check (or one engine of it: ``"fwd-fwd/func"``, ``"third order/rev-fwd-fwd"``,
            ``"precision/float16"``) -> reason. A declared gap must raise in that mode: a wrong value is a failure, and
            so is a right one.
        readout: applied to the result before it is differentiated or compared, to make it gauge-invariant or to leave
            out nondifferentiable parts. The checks "fake" and "opcheck" call `fn` itself.
        outputs: the indices, among the tensor leaves of the result, of those that depend differentiably on the inputs;
            by default every floating point and complex one. A constant output is allowed; one that is declared
            non-differentiable but varies is not.
        reference: a function of the same arguments, without a module's parameters, that returns what `fn` should return.
            The check "forward" compares values, to the dtype's tolerance, shapes and dtypes.
        name: the name of `fn` in the report.
        seed: of directions and weights; two calls with the same seed check the same.
        raise_on_failure: whether to raise `CheckFailed` if anything failed.
        diagnose: whether to search, after a failure, for the element with the largest error and for the likely cause.
            This calls `fn` again, for a limited time.
        shrink: whether to then also search for a smaller sample that fails in the same way: fewer and smaller dimensions,
            default arguments, simple values. This calls `fn` with such samples.
        lowering: how the check "compiled" compiles: "eager" runs the graphs as they are, "inductor" compiles them, which
            takes seconds per graph.

    Returns:
        The report.

    Raises:
        CheckFailed: with the report as its message.
        ValueError: there are no samples, for example from an exhausted iterator; an unknown mode or check; a gap that is
            declared for neither.
    """
    if isinstance(fn, Rule):
        return _check_rule(**locals())
    if samples is None:
        raise TypeError("samples: may be left out for a rule only, which has its own")
    gaps = dict(gaps or {})
    _validate(modes, checks, gaps)
    table = TOLERANCES | dict(tolerances or {})
    label = name or _name_of(fn)
    fn = without_writes(fn)
    found = Report()
    diagnosis = Diagnosis(shrink) if diagnose else None
    position = -1
    # only a function that draws random numbers seeds the generator; the caller's stream is restored
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        for position, sample in enumerate(as_samples(samples, "check: samples")):
            context = _check_one(
                fn, label, sample, position, modes, checks, table, gaps, readout, outputs, reference, seed, lowering
            )
            found.results += diagnosis.of(context) if diagnosis and isinstance(context, Context) else context.results
    if position < 0:
        raise ValueError(f"samples: there are none to check {label} on; an iterator gives them only once")
    if raise_on_failure and found.failures:
        raise CheckFailed(found)
    return found


def _check_rule(fn: Rule, samples: Any, gaps: Mapping[str, str] | None, name: str | None, **options: Any) -> Report:
    if samples is None:
        if fn.samples is None:
            raise ValueError(f"samples: {fn.name} has none of its own")
        samples = [sample for dtype in (torch.float64, torch.complex128) for sample in fn.samples(dtype, "cpu")]
    with override(fn):
        return check(fn.probe, samples, gaps={**fn.gaps, **(gaps or {})}, name=name or fn.name, **options)


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
    reference: Any,
    seed: int,
    lowering: str,
) -> Context | Report:
    try:
        if isinstance(fn, torch.nn.Module):
            fn, sample = with_parameters(fn, sample)
        problem = Problem(fn, sample, readout=readout, outputs=outputs, seed=seed)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return Report([Result(label, repr(sample), "", "forward", "eager", report.RAISES, detail=detail)])
    tolerance = table.get(problem.dtype, TOLERANCES[torch.float64])
    plain = reference and without_parameters(reference, sample)
    context = Context(label, fn, problem, tolerance, gaps, position, plain, modes, checks, lowering)
    for column in (*modes, *checks):
        before = len(context.results)
        if problem.applicable or not TABLE[column].differentiates:
            # an error of the checker itself (a reference that cannot be evaluated) is reported like one of fn
            context.run(column, "reference", partial(TABLE[column].run, context))
        if len(context.results) == before:
            context.add(column, "", report.NOT_APPLICABLE)
    return context


def _validate(modes: Sequence[str], checks: Sequence[str], gaps: Mapping[str, str]) -> None:
    for given, known, what in ((modes, MODES, "mode"), (checks, ALL_CHECKS, "check")):
        unknown = [g for g in given if g not in known]
        if unknown:
            raise ValueError(f"{what}s: unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
    for gap in gaps:
        if gap.split("/")[0] not in (*MODES, *ALL_CHECKS):
            raise ValueError(f"gaps: a gap names a mode or a check, with /eager or /func for one engine; not {gap!r}")


def _name_of(fn: Any) -> str:
    op = transforms.operator_of(fn)
    if isinstance(op, (transforms.OVERLOAD, transforms.PACKET)):
        return str(op)
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.__name__  # `fn` is the apply of this Function
    return getattr(fn, "__name__", None) or getattr(fn, "_qualname", None) or type(fn).__name__
