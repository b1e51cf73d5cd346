"""Changes in place, of outputs, inputs and views."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rows import Call
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors

from torch_manualgrad.testing.comparison.problem import Problem

from .base import Numbers, gradient, named, once, total, variables, way


def tripled(p: Problem, *xs: Tensor) -> list[Tensor]:
    return [o * 3 + 1 for o in p.call(*xs)]


def out_of_place(c: Call) -> Numbers:
    return _without_forward(once(c.bare, partial(tripled, c.bare)))


def _without_forward(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if not k.startswith("forward")}


@way("in place on the output", out_of_place)
def in_place_on_output(c: Call) -> Numbers:
    p = c.bare

    def call(*xs: Tensor) -> Sequence[Tensor]:
        out = p.call(*xs)
        for o in out:
            o *= 3
            o += 1
        return out

    return _without_forward(once(p, call))


@way("in place on the output, mutation of saved tensors allowed", out_of_place)
def in_place_allowed(c: Call) -> Numbers:
    with allow_mutation_on_saved_tensors():
        return in_place_on_output(c)


def raw_gradient(c: Call) -> Numbers:
    return _without_forward(once(c.bare))


@way("in place on an input before the backward", raw_gradient)
def in_place_on_input(c: Call) -> Numbers:
    """Raises, or is right where the derivative does not read the input."""
    p = c.bare
    xs = variables(p)
    inputs = [x * 1 for x in xs]
    out = p.call(*inputs)
    value = total(p, out)
    for x in inputs:
        x.mul_(2)
    return named("gradient", gradient(value, xs))


def _one_written(c: Call, write: bool) -> Numbers:
    p = c.bare
    found: dict[str, Any] = {}
    for i in range(len(p.primals)):
        for j in range(len(p.primals)):
            xs = [x.detach().clone().requires_grad_(i == k) for k, x in enumerate(p.primals)]
            inputs = [x * 1 for x in xs]
            value = total(p, p.call(*inputs))
            if write:
                inputs[j].mul_(2)
            try:
                found[f"gradient {i}, {j} written"] = gradient(value, [xs[i]])[0]
            except RuntimeError as error:
                found[f"gradient {i}, {j} written"] = error
    return found


@way("in place on one input, a gradient of one asked for", partial(_one_written, write=False))
def in_place_on_one_input(c: Call) -> Numbers:
    """What only the gradients of other inputs read is not kept."""
    return _one_written(c, write=True)


@way("views written after the forward", lambda c: _without_forward(once(c.bare, partial(halved, c.bare))))
def views_of_output_written(c: Call) -> Numbers:
    p = c.bare

    def call(*xs: Tensor) -> Sequence[Tensor]:
        out = p.call(*xs)
        for o in out:
            view = o.view(o.shape) if not o.dim() else o.transpose(0, -1)[..., :1]
            view.mul_(0.5)
        return out

    return _without_forward(once(p, call))


def halved(p: Problem, *xs: Tensor) -> list[Tensor]:
    result = []
    for o in p.call(*xs):
        factor = torch.ones_like(o)
        (factor if not o.dim() else factor.transpose(0, -1)[..., :1]).mul_(0.5)
        result.append(o * factor)
    return result
