"""Inputs that are views or have unusual strides, and cotangents of every kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from rows import Call
from torch import Tensor

from .base import Numbers, gradient, named, total, variables, way
from .batched import cotangents, pullback

LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Callable[[Tensor], Tensor]]]] = {
    "transposed": lambda x: (
        x.permute(*reversed(range(x.dim()))).contiguous(),
        lambda b: b.permute(*reversed(range(b.dim()))),
    ),
    "every second element": lambda x: (torch.stack((x, x + 1), -1), lambda b: b[..., 0]),
    "a slice": lambda x: (torch.cat((x.unsqueeze(0), x.unsqueeze(0) + 1)), lambda b: b[:1].squeeze(0)),
    "expanded": lambda x: (x.unsqueeze(0), lambda b: b.expand(2, *b.shape[1:])[1]),
    "lazily conjugated": lambda x: (x.conj().resolve_conj(), lambda b: b.conj()),
    "lazily negated": lambda x: (
        (x.conj().resolve_conj(), lambda b: torch.complex(b.real, b.imag).conj())
        if x.is_complex()
        else (-x, lambda b: torch.complex(torch.zeros_like(b), b).conj().imag)
    ),
}


def from_view(c: Call, form: str, copied: bool) -> Numbers:
    p = c.problem
    pairs = [LAYOUTS[form](x.detach()) for x in p.primals]
    bases = [b.clone().requires_grad_() for b, _ in pairs]
    views = [f(b) for b, (_, f) in zip(bases, pairs)]
    out = p.call(*(v.clone(memory_format=torch.contiguous_format) if copied else v for v in views))
    return named("output", [o.detach() for o in out]) | named("gradient", gradient(total(p, out), bases))


for form in LAYOUTS:
    way(f"input {form}", partial(from_view, form=form, copied=True))(partial(from_view, form=form, copied=False))


def pulled(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [o.detach().new_ones(()).expand(o.shape).clone() for o in out]))


@way("cotangent expanded", pulled)
def expanded_cotangent(c: Call) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [o.detach().new_ones(()).expand(o.shape) for o in out]))


def from_cotangents(c: Call, form: Callable[[Tensor], Tensor] = lambda g: g) -> Numbers:
    p = c.problem
    xs = variables(p)
    out = p.call(*xs)
    return named("gradient", pullback(out, xs, [form(g) for g in cotangents(p, 1)[0]]))


way("cotangent lazily conjugated", from_cotangents)(
    lambda c: from_cotangents(c, lambda g: g.conj().resolve_conj().conj())
)
way("cotangent with other strides", from_cotangents)(
    lambda c: from_cotangents(c, lambda g: torch.stack((g, g + 1), 0).movedim(0, -1)[..., 0])
)
