"""Running one comparison: exceptions become results, and so do declared gaps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..numerics.finite_differences import Reference, Tolerance, tensors_close, worst
from ..numerics.kinks import Range
from . import report
from .problem import Problem, total
from .report import Element, Result

#: Finite differences of results with at least this rounding error cannot settle.
ROUNDED = 1e-4


@dataclass
class Context:
    """One function at one sample: its problem, the tolerance, the declared gaps, and the list of results.

    Attributes:
        modes: the modes to check.
        checks: the checks to run.
        lowering: the lowering of the check "compiled".
    """

    name: str
    fn: Callable[..., Any]
    problem: Problem
    tolerance: Tolerance
    gaps: Mapping[str, str]
    position: int
    reference: Callable[..., Any] | None = None
    modes: Sequence[str] = ()
    checks: Sequence[str] = ()
    lowering: str = "eager"
    results: list[Result] = field(default_factory=list)
    #: mode -> engine -> value, if it is right or cannot be judged
    values: dict[str, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def wide(self) -> Problem:
        return self.problem.wide()

    @cached_property
    def joint_slope(self) -> list[Reference]:
        """First derivatives of each output's loss along u, with all inputs moving."""
        return self.wide.slope(self.wide.u)

    @cached_property
    def curvature(self) -> list[Reference]:
        """Second derivatives of each output's loss, with steps at which the first derivative can be trusted."""
        found = self.wide.curvature(total(self.joint_slope).step)
        # at a kink nothing is known about second derivatives
        return [
            replace(r, kink=Range.anything()) if slope.kink else r
            for r, slope in zip(found, self.joint_slope, strict=True)
        ]

    @cached_property
    def total_curvature(self) -> Reference:
        """The second derivative of the whole loss.

        If finite differences of values do not converge and reverse mode has passed its checks, finite differences of the
        gradient are used.
        """
        reference = total(self.curvature)
        if not reference.settled and all(r.outcome == report.OK for r in self.results if r.check == "rev"):
            try:
                return self.wide.curvature_of_gradient(total(self.joint_slope).step)
            except Exception:
                return reference
        return reference

    def add(
        self,
        check: str,
        engine: str,
        outcome: str,
        detail: str = "",
        ours: float = math.nan,
        reference: float = math.nan,
        absolute: float = math.nan,
        relative: float = math.nan,
        element: Element | None = None,
    ) -> None:
        self.results.append(
            Result(
                self.name,
                repr(self.problem.sample),
                str(self.problem.dtype).removeprefix("torch."),
                check,
                engine,
                outcome,
                ours,
                reference,
                absolute,
                relative,
                detail,
                element,
            )
        )

    def gap(self, check: str, engine: str) -> str | None:
        """The reason for a gap declared for this check, or for one engine of it, for example ``fwd-fwd/func``."""
        return self.gaps.get(f"{check}/{engine.split(',')[0]}", self.gaps.get(check))

    def run(self, check: str, engine: str, compute: Callable[[], Any]) -> Any:
        """Call `compute`; None after an exception, which is added to the results (a failure or a declared gap)."""
        try:
            return compute()
        except Exception as error:
            reason = self.gap(check, engine)
            first = f"{type(error).__name__}: {_first_line(error)}"
            self.add(
                check,
                engine,
                report.RAISES if reason is None else report.GAP,
                first if reason is None else f"{reason} ({first})",
            )
            return None

    def number(
        self, check: str, engine: str, compute: Callable[[], Tensor], reference: Reference, second: bool = False
    ) -> None:
        """Compare a directional derivative with its reference."""
        found = self.run(check, engine, compute)
        if found is not None:
            self.judge(
                check, engine, float(found), reference, self.tolerance.second if second else self.tolerance.first
            )

    def judge(
        self,
        check: str,
        engine: str,
        ours: float,
        reference: Reference,
        tolerance: tuple[float, float],
        wrong: str = "",
    ) -> None:
        """Compare a number with its reference; `wrong` is the detail to report if they differ."""
        absolute = abs(ours - reference.value)
        numbers = {
            "ours": ours,
            "reference": reference.value,
            "absolute": absolute,
            "relative": absolute / max(abs(reference.value), 1e-300),
        }
        if not math.isfinite(ours):
            outcome, detail = report.WRONG, "not finite"
        elif reference.kink is not None:
            outcome, detail = report.KINK, str(reference.kink)
            if bool(reference.kink.excludes(torch.tensor(ours, dtype=torch.float64, device="cpu"), tolerance)):
                outcome, detail = report.WRONG, f"no generalized gradient: {reference.kink}"
        elif not reference.settled and self.wide.noise > ROUNDED:
            near = absolute <= 2 * reference.error
            outcome = report.NOT_APPLICABLE if near else report.WRONG
            detail = f"the results are rounded: finite differences have an error of {reference.error:.1g}"
        elif not reference.settled:
            outcome, detail = (
                report.UNSETTLED,
                f"finite differences do not converge here (error {reference.error:.1g}): a kink or a pole?",
            )
        elif absolute <= reference.allowance(ours, tolerance):
            outcome, detail = report.OK, ""
        else:
            outcome, detail = report.WRONG, wrong
        if outcome in (report.OK, report.UNSETTLED, report.KINK, report.NOT_APPLICABLE):
            self.values.setdefault(check, {})[engine] = ours
        self.close_gap(check, engine, outcome, detail, **numbers)

    def close_gap(self, check: str, engine: str, outcome: str, detail: str, **numbers: Any) -> None:
        """Add an outcome. Success where a gap is declared is a failure too: gaps must not outlive their reason."""
        reason = self.gap(check, engine)
        if reason is not None and outcome == report.OK:
            outcome, detail = report.WORKS, f"declared gap now works ({reason})"
        elif reason is not None and outcome == report.WRONG:
            detail = f"a declared gap must raise ({reason}), this returns a wrong value {detail}".rstrip()
        self.add(check, engine, outcome, detail, **numbers)

    def equal(
        self,
        check: str,
        engine: str,
        compute: Callable[[], list[tuple[str, Any, Any]] | None],
        tolerance: tuple[float, float] | None = None,
    ) -> None:
        """Compare named pairs of tensors (ours, reference); the first pair that differs is added to the results.

        Nothing is added if `compute` returns None, which means that there is nothing to compare.
        """
        pairs = self.run(check, engine, compute)
        if pairs is None:
            return
        tolerance = tolerance or self.tolerance.first
        for name, ours, reference in pairs:
            if ours is None and reference is None:
                continue
            ours = torch.zeros_like(reference) if ours is None else ours
            reference = torch.zeros_like(ours) if reference is None else reference
            if ours.shape != reference.shape or ours.dtype != reference.dtype:
                detail = (
                    f"{name}: {ours.dtype} {tuple(ours.shape)}, reference {reference.dtype} {tuple(reference.shape)}"
                )
                return self.close_gap(check, engine, report.WRONG, detail)
            if not tensors_close(ours, reference, tolerance):
                absolute, relative = worst(ours, reference)
                return self.close_gap(
                    check,
                    engine,
                    report.WRONG,
                    name,
                    ours=_norm(ours),
                    reference=_norm(reference),
                    absolute=absolute,
                    relative=relative,
                    element=_worst_element(name, ours, reference),
                )
        self.close_gap(check, engine, report.OK, "")

    def verdict(self, check: str, engine: str, compute: Callable[[], str | None]) -> None:
        """Add the failure that `compute` returns; an empty string means right, and None adds nothing."""
        found = self.run(check, engine, compute)
        if found is not None:
            self.close_gap(check, engine, report.WRONG if found else report.OK, found)

    def pair(self, check: str, engine: str, ours: float, theirs: float, limit: float, detail: str = "") -> None:
        """Compare two numbers that should be equal."""
        absolute = abs(ours - theirs)
        right = absolute <= limit
        numbers = {"ours": ours, "reference": theirs, "absolute": absolute}
        numbers["relative"] = absolute / max(abs(theirs), 1e-300)
        self.close_gap(check, engine, report.OK if right else report.WRONG, "" if right else detail, **numbers)


def _norm(x: Tensor) -> float:
    """A number to show for a tensor: its largest magnitude."""
    return float(x.detach().to(torch.complex128 if x.is_complex() else torch.float64).abs().max()) if x.numel() else 0.0


def _worst_element(name: str, ours: Tensor, reference: Tensor) -> Element:
    a, b = (torch.view_as_real(x.detach().to("cpu", torch.complex128).resolve_conj()) for x in (ours, reference))
    # two nans, and two infinities of one sign, are equal
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf))
    at = tuple(int(i) for i in torch.unravel_index(gaps.argmax(), gaps.shape))
    part = ("Re ", "Im ")[at[-1]] if ours.is_complex() or reference.is_complex() else ""
    return Element(f"{part}{name}{list(at[:-1]) or ''}", "", float(a[at]), float(b[at]))


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else ""
