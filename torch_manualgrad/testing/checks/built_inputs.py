"""The check of inputs that the program computes: a base plus a number times a direction, and views of this sum.

A dual tensor that a user makes has a tangent with its own memory and layout. One that an operator returns may have an expanded
tangent, or be a view whose base has one. A formula that makes a view of its input then depends on what PyTorch does
with the tangent of a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..comparison import modes
from ..comparison.context import Context
from ..comparison.problem import Point, Problem, total

Build = Callable[[Tensor, Tensor, Tensor], Tensor]


def _moved(x: Tensor, t: Tensor, u: Tensor) -> Tensor:
    return x + t * u


def _view(x: Tensor, t: Tensor, u: Tensor) -> Tensor:
    """The same values as a column of a matrix, with other strides and storage."""
    return torch.stack([x + t * u, x], -1)[..., 0]


def _transposed(x: Tensor, t: Tensor, u: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return (x.permute(order) + t * u.permute(order)).contiguous().permute(order)


BUILDS: dict[str, Build] = {"base + t u": _moved, "a view of it": _view, "its transpose": _transposed}


def _number() -> Tensor:
    return torch.zeros((), dtype=torch.float64, device="cpu")


def _loss(p: Problem, build: Build, t: Tensor) -> Tensor:
    return p.loss(*(build(x, t, u) for x, u in zip(p.primals, p.u, strict=True)))


def _eager(p: Problem, build: Build) -> Tensor:
    with fwAD.dual_level():
        return modes.tangent_of(_loss(p, build, modes.make_dual(_number(), torch.ones_like(_number()))))


def _func(p: Problem, build: Build) -> Tensor:
    tangent: Tensor = torch.func.jvp(partial(_loss, p, build), (_number(),), (torch.ones_like(_number()),))[1]
    return tangent


def _displaced(p: Problem, build: Build, t: Tensor, s: Tensor) -> Tensor:
    first: Point = tuple(build(torch.zeros_like(x), t, u) for x, u in zip(p.primals, p.u, strict=True))
    return p.curve(*(build(z, s, v) for z, v in zip(first, p.v, strict=True)))


def _twice(p: Problem, build: Build) -> Tensor:
    one = torch.ones_like(_number())

    def first(s: Tensor) -> Tensor:
        slope: Tensor = torch.func.jvp(lambda t: _displaced(p, build, t, s), (_number(),), (one,))[1]
        return slope

    tangent: Tensor = torch.func.jvp(first, (_number(),), (one,))[1]
    return tangent


def _reverse(p: Problem, build: Build) -> Tensor:
    s = _number().requires_grad_()
    with fwAD.dual_level():
        t = modes.make_dual(_number(), torch.ones_like(_number()))
        (gradient,) = modes.backward(modes.tangent_of(_displaced(p, build, t, s)), [s])
    return torch.zeros_like(_number()) if gradient is None else gradient


def built_inputs(c: Context) -> None:
    """First and second order forward mode in a number t, with the inputs `base + t u` or views of them.

    Only in modes that are right for the sample itself, or in all if no mode is checked. Each construction is differentiated
    with dual numbers. One of them, which changes from sample to sample, is also differentiated in the other ways.
    """
    names = [name for name in BUILDS if _keeps_the_value(c.problem, BUILDS[name])]
    chosen = names[c.position % len(names) :][:1] if names else []
    for name in names:
        _compare(c, "fwd", "eager", name, _eager)
    for name in chosen:
        _compare(c, "fwd", "func", name, _func)
        _compare(c, "fwd-fwd", "func", name, _twice)
        _compare(c, "rev-fwd", "eager", name, _reverse)


def _keeps_the_value(p: Problem, build: Build) -> bool:
    """Whether the function takes such inputs and has the same value at them; `as_strided`, for example, does not."""
    try:
        there = float(_loss(p, build, _number()))
    except Exception:
        return False  # the check "noncontiguous" reports it
    here = float(p.loss(*p.primals))
    return abs(there - here) <= 1e-6 * max(abs(here), 1.0)


def _compare(c: Context, mode: str, engine: str, name: str, compute: Callable[[Problem, Build], Tensor]) -> None:
    if c.gap(mode, engine) is not None or c.modes and engine not in c.values.get(mode, {}):
        return
    label = f"{engine}, {name}" if mode == "fwd" else f"{mode}, {name}"
    reference = total(c.joint_slope) if mode == "fwd" else c.total_curvature
    c.number("built inputs", label, partial(compute, c.problem, BUILDS[name]), reference, second=mode != "fwd")
