"""`explain`: the rule and the kernels that serve an operator here, and the bytes that are saved for the backward."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from ..core.override import compiled_calls
from ..core.override.names import rules_named
from ..core.override.override import override
from ..core.rule import ButManySmall, Rule, Sample, always, where_finite
from ..core.rule.catalogue import KINDS, catalogue
from ..testing.comparison.problem import Problem
from ..testing.inputs import tree
from ..testing.inputs.samples import as_sample
from .answer import Answer, Fields, Part, Table
from .registry import ended_claims, kernels_of
from .targets import named_samples, own_samples, rules_of

__all__ = ["explain"]

CLAIMS = {
    "values": "PyTorch's derivative is wrong or nan in some mode or at some input",
    "missing": "PyTorch raises in some mode",
    "speed": "this derivative is faster than PyTorch's",
}
HEADER = ["sample", "forward", "backward", "kernels", "bytes saved by PyTorch", "bytes saved by the rule"]


def explain(name: str, samples: str | None, dtype: str = "float64") -> Answer:
    """Of each rule of the operator: when it acts, the cost of a call, and what its samples keep and run.

    Args:
        name: of an operator, or of a function of torch.
        samples: ``MODULE:NAME`` of samples instead of the rule's own.
        dtype: of the rule's own samples.
    """
    full = f"aten::{name.removeprefix('aten::')}".removesuffix(".default")
    if full in catalogue and not rules_named(name):
        entry = catalogue[full]
        why = f"by PyTorch: {entry.kind}, {entry.reason or KINDS[entry.kind]}"
        return Answer([Fields(entry.name, [("operator", entry.name), ("differentiated", why)])])
    found_rules = rules_of(name)
    parts: list[Part] = []
    if len(found_rules) > 1:
        names = ", ".join(rule.name for rule in found_rules)
        parts.append(
            Fields(name, [("reaches", f"{len(found_rules)} operators with rules; the arguments decide: {names}")])
        )
    for rule in found_rules:
        found = named_samples(samples) if samples else own_samples(rule, dtype)
        parts += [
            Fields(rule.name, _fields(rule)),
            Table(f"{rule.name}: samples", HEADER, _folded([_measured(rule, sample) for sample in found])),
        ]
    return Answer(parts)


def _folded(lines: list[list[str]]) -> list[list[str]]:
    """Lines that differ in the sample alone as one: the first sample, and the number of the others."""
    samples: dict[tuple[str, ...], list[str]] = {}
    for sample, *others in lines:
        samples.setdefault(tuple(others), []).append(sample)
    return [[f"{first} and {len(more)} more" if more else first, *others] for others, (first, *more) in samples.items()]


def _fields(rule: Rule) -> list[tuple[str, str]]:
    claims = [f"{claim}: {CLAIMS[claim]}" for claim in rule.improves]
    acts = "acts" if rule.improves else "leaves it to PyTorch, as the rule claims nothing over PyTorch's derivative"
    return [
        ("operator", rule.name),
        *[("claims", claim) for claim in claims],
        *[("claimed once", ended) for ended in ended_claims(rule)],
        ("override()", f"{acts}; {_deferral(rule)}" if rule.improves else acts),
        ('override("*")', "acts"),
        (
            "strong zero",
            "has a variant for strong_zero=True" if rule.has_strong_zero else "not needed: a zero stays a zero",
        ),
        ("saves", ", ".join(rule.residuals) or "nothing"),
        *[("formula", f"{f.__name__} ({', '.join(kernels_of(f)) or 'no kernel'})") for f in rule.formulas],
        *[("raises", f"{mode}: {reason}") for mode, reason in rule.gaps.items()],
    ]


def _deferral(rule: Rule) -> str:
    defers = rule.defer_to_stock
    if defers is None:
        return "takes every call"
    if defers is always:
        return "where only reverse mode can follow, PyTorch keeps the call"
    if defers is where_finite:
        return "in a plain backward PyTorch's gradients are tried first, and are the result if they are finite"
    if isinstance(defers, ButManySmall):
        return (
            "where only reverse mode can follow, on the CPU, takes batches of at least "
            f"{defers.entries} entries, of matrices up to order {defers.order}, and leaves the others to PyTorch"
        )
    return "where only reverse mode can follow, PyTorch keeps the calls that `defer_to_stock` names"


def _measured(rule: Rule, sample: Sample | tuple[Any, ...]) -> list[str]:
    problem = Problem(rule.probe, as_sample(sample, rule.name))
    stock, _ = _run(problem, nullcontext)
    before = compiled_calls.counts()
    ours, ran = _run(problem, lambda: override(rule))
    plain, compiled, python = (b - a for a, b in zip(before, compiled_calls.counts(), strict=True))
    backward = "a kernel, from C++" if compiled and not python else "Python"
    return [repr(sample), "C++" if plain else "Python", backward, ", ".join(ran) or "none", stock, ours]


@contextmanager
def _standard_error_closed() -> Iterator[None]:
    """In the context, what the profiler's C++ writes to standard error goes nowhere."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _run(problem: Problem, active: Callable[[], AbstractContextManager[Any]]) -> tuple[str, list[str]]:
    """Forward and backward: the bytes that are kept between them, inputs included; the kernels that run."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.layout == torch.strided:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    try:
        with _standard_error_closed(), active(), profile(use_kineto=False) as events:
            xs = [x.detach().requires_grad_() for x in problem.primals]
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                outputs = [o for o in problem.flat(*xs) if tree.is_differentiable(o) and o.requires_grad]
            torch.autograd.grad(outputs, xs, [torch.ones_like(o) for o in outputs], allow_unused=True)
    except Exception as error:
        return f"raises {type(error).__name__}", []
    names = {(e.name, getattr(e, "overload_name", "")) for e in events.function_events}
    ran = sorted(f"{name}.{overload}".rstrip(".") for name, overload in names if name.startswith("manualgrad::"))
    return str(sum(kept.values())), ran
