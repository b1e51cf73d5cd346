"""`audit`: the operators that a program differentiates, their modes, and PyTorch's known mistakes among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.internals import DispatchMode, current_node, has_tangent_below_autograd, in_functorch
from ...core.override.override import active
from ...core.rule import Rule, always, rules
from ...core.rule.catalogue import Entry, catalogue
from ..comparison.report import table
from ..inputs import tree
from .lines import line_of

__all__ = ["AuditReport", "Differentiated", "audit"]

#: The ways of differentiating an operator; the first is that of a plain training step.
REVERSE, SECOND, FORWARD, TRANSFORM = "reverse", "reverse, in a backward", "forward", "torch.func"
_MODES = {REVERSE: "rev", SECOND: "rev-rev", FORWARD: "fwd", TRANSFORM: "torch.func"}
MOST_LINES = 3
SILENT = "no gradient, and no error"
_ORDER = (REVERSE, SECOND, FORWARD, TRANSFORM)


@dataclass(frozen=True)
class Differentiated:
    """One operator of a program.

    Attributes:
        operator: ``aten::linalg_vector_norm``.
        ways: how it was differentiated, with the number of calls: "reverse"; "reverse, in a backward": for a further
            order; "forward": it had a tangent; "torch.func": by a transform, whose modes are not told apart.
        doubt: PyTorch's known mistake in these ways; "no gradient, and no error" where its result had no history though an
            input requires grad; "" where nothing is known.
        served: what serves the operator under ``mg.override()``: a rule, or PyTorch and why.
        cost: the cost of a plain call under ``mg.override()``.
        known: whether the registry has an entry about PyTorch's derivative.
        lines: at most three lines of the user's code, ``train.py:12: y = x.norm()``; for an operator in a backward, those of
            the forward.
        override: what to write if the derivative is doubtful, ``mg.override("aten::dist")``; "" if nothing has to be done.
    """

    operator: str
    ways: dict[str, int]
    doubt: str
    served: str
    cost: str
    known: bool = True
    lines: tuple[str, ...] = ()
    override: str = ""


@dataclass(frozen=True)
class AuditReport:
    """The findings of `audit`, complete when its block ends. Prints as a table, doubtful ones first."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    lines: dict[str, dict[str, None]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)  # in a call whose result had no history

    @property
    def operators(self) -> list[Differentiated]:
        """All that were differentiated, the doubtful ones first."""
        found = [
            replace(_judged(name, counted, name in self.silent), lines=tuple(self.lines.get(name, ())))
            for name, counted in self.counts.items()
            if _is_differentiable(name) or name in self.silent and _entry(name) is None
        ]
        return sorted(found, key=lambda d: (not d.doubt, d.operator))

    @property
    def doubtful(self) -> list[Differentiated]:
        """Those whose derivatives PyTorch is known to lack or get wrong, in the ways in which they were differentiated."""
        return [d for d in self.operators if d.doubt]

    def __str__(self) -> str:
        if not self.operators:
            return "nothing was differentiated"
        lines = [["operator", "mode", "PyTorch's derivative", "under override()", "cost", "override", "line"]]
        for d in self.operators:
            modes = ", ".join(f"{_MODES[way]} ({n})" for way, n in d.ways.items())
            doubt = d.doubt or ("right" if d.known else "not compared")
            first = d.lines[0] + f" and {len(d.lines) - 1} more" * (len(d.lines) > 1) if d.lines else ""
            lines.append([d.operator, modes, doubt, d.served, d.cost, d.override, first.replace("|", "\\|")])
        silent = sum(d.doubt == SILENT for d in self.operators)
        of_these = f", {silent} of them with {SILENT}" if silent else ""
        return f"{table(lines)}\n\n{len(self.operators)} operators, {len(self.doubtful)} doubtful{of_these}"


@contextmanager
def audit() -> Iterator[AuditReport]:
    """Watch what this thread differentiates in a block: ``with mg.audit() as report:``, then ``print(report)``.

    Run a training step in the block, including its backward. The audit sees PyTorch's own operators, below every module and
    function, in reverse and forward mode and under `torch.func`; compiled functions only as far as they fall back to eager
    mode. The block takes several times its usual time.

    Yields:
        The report, which fills while the block runs.

    Raises:
        RuntimeError: an `override` is active: an audit must see what PyTorch itself does.
    """
    if active():
        raise RuntimeError("an override is active; an audit is of PyTorch's own derivatives: enter it outside of one")
    report = AuditReport()
    surroundings = _Surroundings(report)
    # anomaly mode records the lines of the forward; the user's own anomaly mode stays as it is
    keeping_lines = (
        nullcontext() if torch.is_anomaly_enabled() else torch.autograd.set_detect_anomaly(True, check_nan=False)
    )
    with keeping_lines, surroundings, _Watch(report, surroundings):
        yield report


class _Surroundings(TorchFunctionMode):
    """Records facts about the running call that the dispatcher does not show: whether it is under a transform, and tracked.

    A result without a history shows here only: ``torch.linspace`` leaves autograd out before it calls an operator.
    """

    transform = tracked = False
    depth = 0

    def __init__(self, report: AuditReport) -> None:
        super().__init__()
        self.silent = report.silent
        self.called: list[str] = []  # the operators of the call that autograd tracks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.transform
        self.transform = before or in_functorch()
        if self.depth == 0:
            self.tracked = torch.is_grad_enabled()
            self.called.clear()
        self.depth += 1
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.depth -= 1
            self.transform = before
        if self.depth == 0 and self.called:
            results = [x for x in tree.tensors(result) if tree.is_differentiable(x)]
            if results and not any(x.requires_grad for x in results):
                self.silent.update(self.called)
        return result


class _Watch(DispatchMode):
    def __init__(self, report: AuditReport, surroundings: _Surroundings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.lines, self.surroundings = report.counts, report.lines, surroundings

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name) + (f".{func._schema.overload_name}" if func._schema.overload_name else "")
        tensors = [x for x in tree.tensors((args, kwargs)) if tree.is_differentiable(x)]
        # the forward of a custom operator runs inside of an autograd function, where tracking is off
        tracked = torch.is_grad_enabled() or not name.startswith("aten::") and self.surroundings.tracked
        if ways := self._ways(tensors, tracked):
            self.counts.setdefault(name, Counter()).update(ways)
            if REVERSE in ways:
                self.surroundings.called.append(name)
            lines = self.lines.setdefault(name, {})
            if len(lines) < MOST_LINES and (line := line_of(current_node())):
                lines[line] = None
        return func(*args, **kwargs)

    def _ways(self, tensors: list[Tensor], tracked: bool) -> list[str]:
        if self.surroundings.transform:
            return [TRANSFORM] if tensors else []
        found = []
        if tracked and any(x.requires_grad for x in tensors):
            found.append(REVERSE if current_node() is None else SECOND)
        if any(has_tangent_below_autograd(x) for x in tensors):
            found.append(FORWARD)
        return found


def _is_differentiable(name: str) -> bool:
    """Whether the operator has a derivative. The queries that PyTorch's transforms make about tensors have none."""
    entry = _entry(name)
    return (
        _rule(name) is not None
        or (entry is None and not name.startswith("aten::"))
        or (entry is not None and entry.kind not in ("nondifferentiable", "view"))
    )


def _judged(name: str, counted: Counter[str], silent: bool) -> Differentiated:
    ways = {way: counted[way] for way in _ORDER if counted[way]}
    rule = _rule(name)
    if rule is None:
        if not name.startswith("aten::"):
            return Differentiated(name, ways, "not PyTorch's own: check it", "its own derivative", "none")
        entry = _entry(name)
        served = "nothing" if entry is None else f"PyTorch's: {entry.reason or entry.kind}"
        return Differentiated(name, ways, SILENT if silent else "", served, "none", known=False)
    if silent:
        return Differentiated(name, ways, SILENT, "a rule", _cost(rule), override=f'mg.override("{rule.name}")')
    if not rule.improves:
        return Differentiated(name, ways, "", "PyTorch's, which is right", "none")
    deferred = rule.defer_to_stock is always
    doubt = "" if deferred and set(ways) == {REVERSE} else _doubt(rule)
    use = f'mg.override("{rule.name}")' if doubt else ""
    return Differentiated(name, ways, doubt, "a rule", _cost(rule), override=use)


def _entry(name: str) -> Entry | None:
    return catalogue.get(name) or catalogue.get(_functional(name))


def _rule(name: str) -> Rule | None:
    return rules.get(name) or rules.get(_functional(name))


def _functional(name: str) -> str:
    base, dot, overload = name.partition(".")
    return base.removesuffix("_") + dot + overload


def _doubt(rule: Rule) -> str:
    texts = {"values": "wrong or nan in some mode or at some input", "missing": "raises in some mode"}
    return "; ".join(texts[claim] for claim in rule.improves if claim in texts)


def _cost(rule: Rule) -> str:
    if rule.defer_to_stock is always:
        return "none in plain reverse mode"
    if rule.compiled_vjp is not None:
        return "a kernel, from C++"
    return "a vjp in Python"
