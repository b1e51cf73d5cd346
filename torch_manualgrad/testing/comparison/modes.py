"""The six modes: each function computes a directional derivative of the loss with one of PyTorch's two engines.

"eager" is `torch.autograd.grad` and dual numbers, "func" is `torch.func`. In a mode's name the first word is the OUTER
transform: rev-fwd is reverse mode applied to a forward-mode derivative. First orders are computed at the sample itself,
second orders through `Problem.curve`, with inner direction u and outer direction v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..numerics.arithmetic import inner
from .problem import Point, Problem

MODES = ("rev", "fwd", "rev-rev", "fwd-rev", "fwd-fwd", "rev-fwd")

Subset = Sequence[int] | None
Directions = Sequence[Tensor | None]


def gradient(p: Problem, wanted: Sequence[int] | None = None, subset: Subset = None) -> list[Tensor | None]:
    """The eager gradient.

    Args:
        p: the problem.
        wanted: the indices of the inputs; None for all.
        subset: of the outputs; None for all.

    Returns:
        One gradient per requested input; None where autograd returns None.

    Raises:
        AssertionError: a gradient does not have the shape, dtype and device of its input.
    """
    wanted = range(len(p.primals)) if wanted is None else wanted
    xs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(p.primals)]
    value = p.loss(*xs, subset=subset)
    if not value.requires_grad:
        return [None] * len(wanted)
    grads = torch.autograd.grad(value, [xs[i] for i in wanted], allow_unused=True)
    for i, g in zip(wanted, grads, strict=True):
        x = p.primals[i]
        if g is not None and (g.shape, g.dtype, g.device) != (x.shape, x.dtype, x.device):
            raise AssertionError(
                f"the gradient of {p.names[i]} is {g.dtype} {tuple(g.shape)}, its input {x.dtype} {tuple(x.shape)}"
            )
    return list(grads)


def rev_func(p: Problem, subset: Subset = None) -> tuple[Tensor, ...]:
    return _grad(p, lambda *xs: p.loss(*xs, subset=subset))(*p.primals)


def fwd_eager(p: Problem, directions: Directions) -> Tensor:
    with fwAD.dual_level():
        duals = [x if d is None else make_dual(x, d) for x, d in zip(p.primals, directions, strict=True)]
        return tangent_of(p.loss(*duals))


def fwd_func(p: Problem, directions: Directions) -> Tensor:
    moving = [i for i, d in enumerate(directions) if d is not None]

    def f(*some: Tensor) -> Tensor:
        at = list(p.primals)
        for i, x in zip(moving, some, strict=True):
            at[i] = x
        return p.loss(*at)

    chosen = tuple(d for d in directions if d is not None)
    return _jvp(f, tuple(p.primals[i] for i in moving), chosen)


def make_dual(x: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = fwAD.make_dual(x, tangent)
    return dual


def tangent_of(x: Tensor) -> Tensor:
    """The tangent of a dual tensor; zero if it has none."""
    tangent = fwAD.unpack_dual(x).tangent
    return torch.zeros_like(x) if tangent is None else tangent


def backward(value: Tensor, at: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor | None]:
    """The gradient; None where there is none."""
    if not value.requires_grad:
        return [None] * len(at)
    return torch.autograd.grad(value, at, create_graph=create_graph, allow_unused=True)


def pull(
    outputs: Sequence[Tensor], cotangents: Sequence[Tensor], at: Sequence[Tensor], retain_graph: bool = False
) -> Sequence[Tensor | None]:
    """The eager gradient for given cotangents; outputs without history contribute nothing."""
    live = [(o, ct) for o, ct in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not live:
        return [None] * len(at)
    wanted, given = [o for o, _ in live], [ct for _, ct in live]
    return torch.autograd.grad(wanted, at, given, retain_graph=retain_graph, allow_unused=True)


def _variables(z: Point) -> Point:
    return tuple(x.detach().requires_grad_() for x in z)


def rev_rev_eager(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    z = _variables(p.zero())
    first = inner(backward(f(*z), z, create_graph=True), p.u)
    return inner(backward(first, z), p.v)


def fwd_rev_eager(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    with fwAD.dual_level():
        z = tuple(make_dual(x, v) for x, v in zip(_variables(p.zero()), p.v, strict=True))
        return tangent_of(inner(backward(f(*z), z, create_graph=True), p.u))


def rev_fwd_eager(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    z = _variables(p.zero())
    with fwAD.dual_level():
        first = tangent_of(f(*(make_dual(x, u) for x, u in zip(z, p.u, strict=True))))
        return inner(backward(first, z), p.v)


def _grad(p: Problem, f: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    gradient: Callable[..., tuple[Tensor, ...]] = torch.func.grad(f, argnums=tuple(range(len(p.primals))))
    return gradient


def _jvp(f: Callable[..., Tensor], at: Point, tangents: Point) -> Tensor:
    tangent: Tensor = torch.func.jvp(f, at, tangents)[1]
    return tangent


def rev_rev_func(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    first = _grad(p, f)
    return inner(_grad(p, lambda *z: inner(first(*z), p.u))(*p.zero()), p.v)


def fwd_rev_func(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    first = _grad(p, f)
    return _jvp(lambda *z: inner(first(*z), p.u), p.zero(), p.v)


def _directional(p: Problem, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *z: _jvp(f, z, p.u)


def fwd_fwd_func(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    return _jvp(_directional(p, f), p.zero(), p.v)


def rev_fwd_func(p: Problem, f: Callable[..., Tensor]) -> Tensor:
    return inner(_grad(p, _directional(p, f))(*p.zero()), p.v)


#: mode -> engine -> value of d/ds d/dt at s u + t v. Dual numbers do not nest, so fwd-fwd has one engine.
SECOND: dict[str, dict[str, Callable[[Problem, Callable[..., Tensor]], Tensor]]] = {
    "rev-rev": {"eager": rev_rev_eager, "func": rev_rev_func},
    "fwd-rev": {"eager": fwd_rev_eager, "func": fwd_rev_func},
    "fwd-fwd": {"func": fwd_fwd_func},
    "rev-fwd": {"eager": rev_fwd_eager, "func": rev_fwd_func},
}
