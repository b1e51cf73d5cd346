"""torch.func and dual numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.autograd.forward_ad as fwAD
from rows import Call
from torch import Tensor

from torch_manualgrad.testing.comparison.problem import Problem
from torch_manualgrad.testing.numerics.arithmetic import inner

from .base import Numbers, first, gradient, named, product_with_hessian, total, variables, way
from .batched import cotangents
from .strides import from_cotangents


def _loss(p: Problem) -> Callable[..., Tensor]:
    return lambda *xs: total(p, p.call(*xs))


@way("func.grad", first)
def func_grad(c: Call) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    return named("gradient", torch.func.grad(_loss(p), argnums=everything)(*p.primals))


@way("func.vjp", lambda c: {**first(c), **from_cotangents(c)})
def func_vjp(c: Call) -> Numbers:
    p = c.problem
    out, pull = torch.func.vjp(p.call, *p.primals)
    return named("forward", out) | named("gradient", pull(tuple(cotangents(p, 1)[0])))


def slope(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    return {"slope": inner(gradient(_loss(p)(*xs), xs), p.u)}


@way("func.jvp", slope)
def func_jvp(c: Call) -> Numbers:
    p = c.problem
    return {"slope": torch.func.jvp(_loss(p), p.primals, p.u)[1]}


@way("dual numbers", slope)
def dual(c: Call) -> Numbers:
    p = c.problem
    with fwAD.dual_level():
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, p.u)))).tangent
    return {"slope": torch.zeros(()) if found is None else found}


@way("dual numbers, lazily conjugated tangents", slope)
def dual_conjugated(c: Call) -> Numbers:
    p = c.problem
    with fwAD.dual_level():
        tangents = [u.conj().resolve_conj().conj() for u in p.u]
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(p.primals, tangents)))).tangent
    return {"slope": torch.zeros(()) if found is None else found}


@way("dual numbers that require grad", lambda c: {**slope(c), **product_with_hessian(c.problem, c.problem.call)})
def dual_and_grad(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    with fwAD.dual_level():
        found = fwAD.unpack_dual(_loss(p)(*(fwAD.make_dual(x, u) for x, u in zip(xs, p.u)))).tangent
        assert found is not None
        return {"slope": found.detach()} | named("hessian", gradient(found, xs))


@way("vmap", lambda c: _mapped(c, loop=True))
def func_vmap(c: Call) -> Numbers:
    return _mapped(c, loop=False)


def _mapped(c: Call, loop: bool) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    f = torch.func.grad(_loss(p), argnums=everything)
    batch = [torch.stack((x, x + 0.01 * u)) for x, u in zip(p.primals, p.u)]
    if not loop:
        return named("gradient", torch.func.vmap(f)(*batch))
    found = []
    for at in zip(*batch):
        xs = [x.detach().clone().requires_grad_() for x in at]
        found.append(gradient(_loss(p)(*xs), xs))
    return named("gradient", [torch.stack(g) for g in zip(*found)])


@way("func.hessian times a direction", lambda c: product_with_hessian(c.problem, c.problem.call))
def func_second(c: Call) -> Numbers:
    p = c.problem
    everything = tuple(range(len(p.primals)))
    first = torch.func.grad(_loss(p), argnums=everything)
    return named("hessian", torch.func.grad(lambda *xs: inner(first(*xs), p.u), argnums=everything)(*p.primals))
