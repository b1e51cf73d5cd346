"""One forward and one backward pass of a problem, with cotangents that do not depend on the outputs.

The loss of a problem saves the outputs. Here only the function itself saves tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .modes import pull
from .problem import Point, Problem

Pairs = list[tuple[str, Any, Any]]


def variables(p: Problem) -> Point:
    """Copies of the differentiable inputs that require grad."""
    return tuple(x.detach().clone().requires_grad_() for x in p.primals)


def cotangents(p: Problem) -> list[Tensor]:
    """The gradient of the loss with respect to each differentiable output, at the sample; zero where the output is infinite."""
    found = []
    with torch.enable_grad():
        for j, i in enumerate(p.outputs):
            o = p.base[i].detach().requires_grad_()
            found.append(torch.autograd.grad(p.loss_of(j, o), o)[0])
    return found


def gradients(
    p: Problem,
    outputs: Sequence[Tensor],
    at: Sequence[Tensor],
    given: Sequence[Tensor],
    retain_graph: bool = False,
) -> Sequence[Tensor | None]:
    """The gradient with respect to `at`, given all tensor leaves of a result and cotangents of the differentiable ones."""
    return pull([outputs[i] for i in p.outputs], given, at, retain_graph) if p.applicable else []


def both(p: Problem, at: Sequence[Tensor] | None = None, given: Sequence[Tensor] | None = None) -> list[Tensor | None]:
    """All tensor leaves of the result, then the gradient for each differentiable input; labelled by `labels`.

    Args:
        p: the problem.
        at: the differentiable inputs; by default copies of the sample's.
        given: the cotangents; by default those of the loss.
    """
    at = variables(p) if at is None else at
    outputs = p.flat(*at)
    return [*(o.detach() for o in outputs), *gradients(p, outputs, at, cotangents(p) if given is None else given)]


def labels(p: Problem) -> list[str]:
    """Names of the tensors that `both` returns."""
    return [f"output {i}" for i in range(len(p.base))] + [f"gradient of {n}" for n in p.names if p.applicable]


def compared(p: Problem, ours: Sequence[Any], reference: Sequence[Any]) -> Pairs:
    """Two results of `both`, for `Context.equal`."""
    if len(ours) != len(reference):
        raise AssertionError(f"{len(ours)} tensors are returned, expected {len(reference)}")
    return list(zip(labels(p), ours, reference, strict=True))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors of one shape are equal, with nan equal to nan; the values of sparse tensors are not compared."""
    if a is None or b is None or a.layout != torch.strided:
        return (a is None) == (b is None)
    return bool(((a == b) | ((a != a) & (b != b))).all())
