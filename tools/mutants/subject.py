"""The input of a checker: a function, calls of it, and the rules that are active meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg
from torch_manualgrad.core.rule import Rule
from torch_manualgrad.testing.inputs import tree

REAL, COMPLEX = torch.float64, torch.complex128
#: The maximum number of calls of a function in each dtype.
SAMPLES = {REAL: 2, COMPLEX: 1}
#: The maximum number of differentiable numbers in a call: gradgradcheck takes time with their square.
LARGEST = 40


@dataclass(frozen=True)
class Subject:
    """A function to check.

    Attributes:
        name: what it is called in the list.
        fn: the function.
        samples: calls of it, the same for every checker.
        rules: what `mg.override` is given while it is checked.
        fault: what is wrong meanwhile, if not a rule or the function itself.
        compiled: check the compiled function: `fn` itself is right.
    """

    name: str
    fn: Callable[..., Any]
    samples: Sequence[mg.Sample]
    rules: tuple[Any, ...] = ()
    fault: Callable[[], AbstractContextManager[Any]] | None = None
    compiled: bool = False

    def active(self) -> AbstractContextManager[Any]:
        """The context that activates its derivatives."""
        if self.fault is not None:
            return self.fault()
        return mg.override(*self.rules) if self.rules else nullcontext()


@dataclass(frozen=True)
class Mutant:
    """A wrong derivative.

    Attributes:
        kind: what was done.
        name: of the right one, and the place.
        family: of operators, for an even choice.
        pair: makes the wrong function, and the right one.
        change: the original text and its replacement.
    """

    kind: str
    name: str
    family: str
    pair: Callable[[], tuple[Subject, Subject]]
    change: Callable[[], str] = str

    @property
    def key(self) -> str:
        return f"{self.kind}: {self.name}"


def of_rule(rule: Rule, name: str | None = None) -> Subject:
    """The operator of a rule, with that rule instead of PyTorch's derivatives, and the registered rule's calls."""
    known = mg.rules[rule.name]
    return Subject(name or rule.name, known.probe, tuple(calls(known)), (rule,))


def calls(rule: Rule) -> list[mg.Sample]:
    """A few calls of the operator of a rule, as someone who wrote it would check it with."""
    found = []
    for dtype, limit in SAMPLES.items():
        found += itertools.islice(filter(is_usable, rule.samples(dtype, "cpu") if rule.samples else ()), limit)
    return found


def is_plain(rule: Rule) -> bool:
    """Whether the rule has every mode, dense samples, and nothing that a checker would have to be told."""
    return not rule.gaps and not rule.sparse and not rule.drops_graph and bool(calls(rule))


def tensors(samples: Iterable[mg.Sample]) -> list[Tensor]:
    return [x for s in samples for x in tree.tensors((s.args, s.kwargs))]


def is_usable(sample: mg.Sample) -> bool:
    """Small, not empty, dense, and with something to differentiate."""
    given = tensors([sample])
    inputs = [x for x in given if tree.is_differentiable(x)]
    small = 0 < sum(x.numel() for x in inputs) <= LARGEST
    return small and all(x.numel() and not tree.is_sparse(x) and not x.is_nested for x in given)
