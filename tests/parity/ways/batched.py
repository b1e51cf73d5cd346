"""Batched gradients, vectorized Jacobians and Hessians."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rows import Call
from torch import Tensor

from torch_manualgrad.testing.comparison.problem import Problem

from .base import DEAR, Numbers, gradient, named, total, variables, way


def cotangents(p: Problem, count: int) -> list[list[Tensor]]:
    """Several cotangents of each output."""
    generator = torch.Generator().manual_seed(7)
    wide = [torch.complex128 if o.is_complex() else torch.float64 for o in (p.base[i] for i in p.outputs)]
    shapes = [(p.base[i].shape, p.base[i].dtype) for i in p.outputs]
    return [
        [torch.randn(s, dtype=w, generator=generator).to(d) for w, (s, d) in zip(wide, shapes)] for _ in range(count)
    ]


def pullback(out: Sequence[Tensor], xs: Sequence[Tensor], at: Sequence[Tensor], **options: Any) -> list[Tensor]:
    live = [(o, g) for o, g in zip(out, at) if o.requires_grad]
    found = torch.autograd.grad([o for o, _ in live], xs, [g for _, g in live], allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, xs)]


def rows_of_jacobian(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    found = [pullback(out, xs, at, retain_graph=True) for at in cotangents(p, 3)]
    return named("rows", [torch.stack(rows) for rows in zip(*found)])


@way("is_grads_batched", rows_of_jacobian)
def batched(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    live = [(o, torch.stack(g)) for o, g in zip(out, zip(*cotangents(p, 3))) if o.requires_grad]
    found = torch.autograd.grad(
        [o for o, _ in live], xs, [g for _, g in live], is_grads_batched=True, allow_unused=True
    )
    return named("rows", [torch.zeros_like(x).expand(3, *x.shape) if g is None else g for g, x in zip(found, xs)])


def rows_of_hessian(c: Call) -> Numbers:
    return _rows_of_hessian(c, batched=False)


def _rows_of_hessian(c: Call, batched: bool) -> Numbers:
    p = c.problem
    xs = variables(p)
    live = [g for g in gradient(total(p, p.call(*xs)), xs, create_graph=True) if g.requires_grad]
    generator = torch.Generator().manual_seed(8)
    wide = [torch.randn(3, *g.shape, dtype=torch.float64, generator=generator).to(g.dtype) for g in live]
    if batched:
        found = torch.autograd.grad(live, xs, wide, is_grads_batched=True, allow_unused=True)
        return named(
            "hessian", [torch.zeros_like(x).expand(3, *x.shape) if g is None else g for g, x in zip(found, xs)]
        )
    rows = [pullback(live, xs, at, retain_graph=True) for at in zip(*wide)]
    return named("hessian", [torch.stack(r) for r in zip(*rows)])


@way("is_grads_batched, second order", rows_of_hessian)
def batched_twice(c: Call) -> Numbers:
    return _rows_of_hessian(c, batched=True)


def jacobian(c: Call, **options: Any) -> Numbers:
    p = c.problem
    found = torch.autograd.functional.jacobian(p.call, p.primals, **options)
    return named("jacobian", [x for per_output in found for x in per_output])


def hessian(c: Call, **options: Any) -> Numbers:
    p = c.problem
    found = torch.autograd.functional.hessian(lambda *xs: total(p, p.call(*xs)), p.primals, **options)
    return named("hessian", [x for row in found for x in row])


REAL = (torch.float64,)  # of complex functions these are no Jacobians
way("jacobian, vectorize", jacobian, dtypes=REAL)(partial(jacobian, vectorize=True))
way("jacobian, vectorize, forward mode", jacobian, dtypes=REAL)(
    partial(jacobian, vectorize=True, strategy="forward-mode")
)
way("hessian, vectorize", hessian, cost=DEAR, dtypes=REAL)(partial(hessian, vectorize=True))
way("hessian, vectorize, forward over reverse", hessian, cost=DEAR, dtypes=REAL)(
    partial(hessian, vectorize=True, outer_jacobian_strategy="forward-mode")
)
