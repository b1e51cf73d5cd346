"""Batched gradients: vectorised reverse and forward mode against loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..comparison.context import Context
from ..comparison.modes import make_dual, tangent_of
from ..comparison.passes import Pairs, cotangents, variables
from ..comparison.problem import Problem
from ..inputs import tree
from ..numerics.arithmetic import magnitude

_jacobian: Any = torch.autograd.functional.jacobian  # it has no annotations
ROWS = 3  # cotangents or tangents in a batch, whatever the size of the sample


def batched_gradients(c: Context) -> None:
    """Vectorised gradients against a loop over cotangents, vectorised directional derivatives against one over tangents.

    `torch.autograd.grad(..., is_grads_batched=True)` for a few random cotangents; and
    `torch.autograd.functional.jacobian(..., vectorize=True)`, reverse and forward, of a few random combinations of the
    outputs along a few random directions. Not applicable if there is no loop to compare with, for example without forward
    mode; if an output is sparse; or, in forward mode, if random numbers are drawn.
    """
    p, check = c.problem, "batched gradients"
    if any(tree.is_sparse(o) for o in p.base):
        return
    if c.gap("rev", "eager") is None:
        c.equal(check, "is_grads_batched", partial(_grads, p))
        c.equal(check, "reverse jacobian", partial(_reverse, p))
    if c.gap("fwd", "eager") is None:
        try:
            columns = _columns(p)
        except Exception:
            return  # the mode fwd reports it
        c.equal(check, "forward jacobian", partial(_forward, p, columns))


def _drawn(p: Problem, like: Sequence[Tensor], scales: Sequence[float]) -> list[Tensor]:
    """For each tensor, `ROWS` random ones of its shape, stacked."""
    generator = torch.Generator().manual_seed(p.seed)
    found = []
    for x, scale in zip(like, scales, strict=True):
        wide = torch.complex128 if x.is_complex() else torch.float64
        found.append(
            (torch.randn((ROWS, *x.shape), dtype=wide, generator=generator, device="cpu") * scale).to(x.device, x.dtype)
        )
    return found


def _grads(p: Problem) -> Pairs:
    xs = variables(p)
    outputs = p.call(*xs)
    given = cotangents(p)
    live = [j for j, o in enumerate(outputs) if o.requires_grad]
    if not live:
        return []
    rows = [ct * w for ct, w in zip(given, _drawn(p, given, [1.0] * len(given)), strict=True)]
    wanted, batches = [outputs[j] for j in live], [rows[j] for j in live]
    options = {"retain_graph": True, "allow_unused": True}
    loop = [torch.autograd.grad(wanted, xs, [b[k] for b in batches], **options) for k in range(ROWS)]
    together = torch.autograd.grad(wanted, xs, batches, is_grads_batched=True, **options)
    return [
        (f"gradient of {name}", ours, None if one[0] is None else torch.stack(one))
        for name, ours, one in zip(p.names, together, zip(*loop, strict=True), strict=True)
    ]


def _narrow(p: Problem) -> Callable[[Tensor], Tensor]:
    """`ROWS` real numbers made of the outputs, as a function of `ROWS` real numbers that move the inputs."""
    sides = _drawn(p, p.primals, [magnitude(x) for x in p.primals])
    weights = _drawn(p, p.weights, [1.0] * len(p.weights))

    def f(s: Tensor) -> Tensor:
        # a tensor of zero dimensions does not widen the dtype of the others
        at = [x + sum(s[k] * d[k] for k in range(ROWS)) for x, d in zip(p.primals, sides, strict=True)]
        total = torch.zeros(ROWS, dtype=torch.float64, device=s.device)
        for j, o in enumerate(p.call(*at)):
            mask = p.finite[j]
            kept = (o if mask is None else o.reshape(-1)[mask]) / p.unit[j]
            terms = (weights[j].conj() * kept).reshape(ROWS, -1).sum(1)
            total = total + (terms.real if terms.is_complex() else terms)
        return total

    return f


def _origin(p: Problem) -> Tensor:
    return torch.zeros(ROWS, dtype=torch.float64, device=p.primals[0].device)


def _reverse(p: Problem) -> Pairs:
    f = _narrow(p)
    rows = _jacobian(f, _origin(p))
    return [("the Jacobian", _jacobian(f, _origin(p), vectorize=True), rows)]


def _columns(p: Problem) -> Tensor:
    """The Jacobian of `_narrow` by a loop of dual numbers."""
    f, columns = _narrow(p), []
    for direction in torch.eye(ROWS, dtype=torch.float64, device=p.primals[0].device):
        with fwAD.dual_level():
            columns.append(tangent_of(f(make_dual(_origin(p), direction))))
    return torch.stack(columns, 1)


def _forward(p: Problem, columns: Tensor) -> Pairs | None:
    try:
        ours = _jacobian(_narrow(p), _origin(p), vectorize=True, strategy="forward-mode")
    except RuntimeError as error:
        if "random operation" in str(error):
            return None  # vmap refuses random numbers here, and has no option to allow them
        raise
    return [("the Jacobian", ours, columns)]
