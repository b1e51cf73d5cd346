"""Mutation operators on rules: a formula is called with other arguments, or its result is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Rule, bound_to, rule
from torch_manualgrad.core.rule.formulas import EMPTY, sources

Formula = Callable[..., Any]
Wrapper = Callable[[Rule], Iterator[tuple[str, Rule]]]
#: Kind -> what makes wrong rules of a right one, each with a word on what was done.
WRAPPERS: dict[str, Wrapper] = {}


def wrapper(kind: str) -> Callable[[Wrapper], Wrapper]:
    def add(function: Wrapper) -> Wrapper:
        WRAPPERS[kind] = function
        return function

    return add


def rebuilt(r: Rule, *, vjp: Mapping[Any, Formula] | None = None, jvp: Mapping[Any, Formula] | None = None) -> Rule:
    """The rule with other formulas."""
    made: Rule = rule(
        r.name,
        vjp=r.vjp if vjp is None else vjp,
        jvp=r.jvp if jvp is None else jvp,
        not_differentiable=r.not_differentiable,
        samples=r.samples,
        probe=r.probe,
        register=False,
    )
    return made


def _names(f: Formula) -> list[str]:
    return [s.name for s in sources(f) if s.name is not None and s.value is EMPTY]


def _with(f: Formula, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Formula:
    """The formula, with its arguments changed; they are given by their names in the rule."""
    names = _names(f)
    return bound_to(lambda *values: f(*change(dict(zip(names, values))).values()), names)


def _then(f: Formula, change: Callable[..., Tensor], *more: str) -> Formula:
    """The formula, with its result, or each of its results, changed; `more` are names that the change is given."""
    names = _names(f)

    def changed(*values: Any) -> Any:
        found, known = f(*values[: len(names)]), values[len(names) :]
        if isinstance(found, (tuple, list)):
            return type(found)(change(x, *known) if isinstance(x, Tensor) else x for x in found)
        return change(found, *known) if isinstance(found, Tensor) else found

    return bound_to(changed, [*names, *more])


@wrapper("tangent")
def tangent(r: Rule) -> Iterator[tuple[str, Rule]]:
    """The jvp ignores the tangent of one input."""
    for key, f in r.jvp.items():
        for name in _names(f):
            if name.endswith("_t"):

                def change(known: dict[str, Any], name: str = name) -> dict[str, Any]:
                    return known | {name: _zero(known[name])}

                yield f"{name} of {', '.join(key)}", rebuilt(r, jvp={**r.jvp, key: _with(f, change)})


def _zero(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_zero(y) for y in x]
    return None if x is None else torch.zeros_like(x)


@wrapper("cotangent")
def cotangent(r: Rule) -> Iterator[tuple[str, Rule]]:
    """The vjp ignores the cotangent of one output."""
    for key, f in r.vjp.items():
        for name in _names(f):
            if name in r.signature.cotangent_names and len(r.signature.cotangent_names) > 1:

                def change(known: dict[str, Any], name: str = name) -> dict[str, Any]:
                    return known | {name: _zero(known[name])}

                yield f"{name} for {', '.join(key)}", rebuilt(r, vjp={**r.vjp, key: _with(f, change)})


@wrapper("broadcast")
def broadcast(r: Rule) -> Iterator[tuple[str, Rule]]:
    """In place of the sum over what was broadcast: the first, or the mean."""
    for key, f in r.vjp.items():
        if len(key) == 1 and r.kind == "elementwise" and f"{key[0]}_sizes" in (names := _names(f)):

            def first(known: dict[str, Any], sizes: str = f"{key[0]}_sizes") -> dict[str, Any]:
                return known | {"grad": _first(known["grad"], known[sizes])}

            def mean(found: Tensor, grad: Tensor, sizes: Sequence[int]) -> Tensor:
                return found * (prod(sizes) / grad.numel())

            yield f"the first for {key[0]}", rebuilt(r, vjp={**r.vjp, key: _with(f, first)})
            if names:
                yield f"the mean for {key[0]}", rebuilt(r, vjp={**r.vjp, key: _averaged(f, mean, f"{key[0]}_sizes")})


def _averaged(f: Formula, mean: Callable[..., Tensor], sizes: str) -> Formula:
    names = _names(f)
    grad, shape = names.index("grad"), names.index(sizes)
    return bound_to(lambda *values: mean(f(*values), values[grad], values[shape]), names)


def _first(grad: Tensor, sizes: Sequence[int]) -> Tensor:
    """The cotangent with zeros everywhere but at the first index of broadcast dims."""
    shape = (1,) * (grad.dim() - len(sizes)) + tuple(sizes)
    for dim, (n, m) in enumerate(zip(grad.shape, shape)):
        if m == 1 and n > 1:
            keep = (torch.arange(n) == 0).reshape((-1,) + (1,) * (grad.dim() - 1 - dim))
            grad = torch.where(keep, grad, 0)
    return grad


@wrapper("conjugate")
def conjugate(r: Rule) -> Iterator[tuple[str, Rule]]:
    """The gradient is conjugated, which is right for real inputs only."""
    for key, f in r.vjp.items():
        yield f"vjp of {', '.join(key)}", rebuilt(r, vjp={**r.vjp, key: _then(f, torch.conj)})


@wrapper("precision")
def precision(r: Rule) -> Iterator[tuple[str, Rule]]:
    """Digits are lost: through a narrower dtype, or where a large number is added and subtracted again."""
    for key, f in r.vjp.items():
        for what, change in LOSSES.items():
            yield f"{what} in the vjp of {', '.join(key)}", rebuilt(r, vjp={**r.vjp, key: _then(f, change)})


def _cancelling(x: Tensor) -> Tensor:
    return (x + 3e4) - 3e4


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cancellation": _cancelling,
    "float32": lambda x: x if x.is_complex() else x.float().to(x.dtype),
    "bfloat16": lambda x: x if x.is_complex() else x.bfloat16().to(x.dtype),
}


@wrapper("requires_grad")
def requires_grad(r: Rule) -> Iterator[tuple[str, Rule]]:
    """Wrong for one pattern of requires_grad only: where one input alone requires it, or does not."""
    inputs = [n for key in r.vjp for n in key]
    if len(inputs) > 1:
        for i, name in enumerate(inputs):
            only = [j == i for j in range(len(inputs))]
            yield f"{name} alone", rebuilt(r, vjp={tuple(inputs): _joint(r, i, only)})
            others = [j != i for j in range(len(inputs))]
            yield f"without {name}", rebuilt(r, vjp={tuple(inputs): _joint(r, (i + 1) % len(inputs), others)})


def _joint(r: Rule, wrong: int, pattern: list[bool]) -> Formula:
    """All formulas of the vjp as one; that for one input has another factor for one pattern of requires_grad."""
    names = list(dict.fromkeys(n for f in r.vjp.values() for n in _names(f) if n != "output_mask"))

    def vjp(*values: Any) -> Any:
        known, mask = dict(zip(names, values)), list(values[-1])
        found: list[Any] = []
        for key, f in r.vjp.items():
            part = known | {"output_mask": mask[len(found) : len(found) + len(key)]}
            results = f(*(part[n] for n in _names(f)))
            found += [results] if len(key) == 1 else list(results)
        if mask == pattern and isinstance(found[wrong], Tensor):
            found[wrong] = 2 * found[wrong]
        return tuple(found)

    return bound_to(vjp, [*names, "output_mask"])
