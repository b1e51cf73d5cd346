"""Precision: values and first derivatives in low dtypes and under autocast, in units of what can be attained there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from ..comparison import modes, report
from ..comparison.context import Context
from ..comparison.modes import pull
from ..comparison.problem import Point, Problem
from ..inputs import tree
from ..numerics.arithmetic import widen

#: The low dtypes; complex inputs have one in complex64 only.
LOW = (torch.float32, torch.bfloat16, torch.float16)
#: An error up to this factor times the attainable error is right. For 487 entries of PyTorch's operator database at two
#: samples each, nine comparisons in ten have a ratio below 0.3. All right ones are below 9, and wrong ones start at 60.
#: Layers, and networks of about ten layers, are at most at 1.
FACTOR = 10.0
#: The number of random perturbations; the largest movement counts.
PERTURBATIONS = 4


def precision(c: Context) -> None:
    """In each low dtype in which the function runs, against double precision at the same rounded sample."""
    p = c.wide
    if p.random or not all(x.numel() for x in p.primals):
        return  # random numbers differ between dtypes, and empty tensors run in any dtype
    for dtype in LOW:
        low = p.at([_narrow(x, dtype) for x in p.leaves])
        if any(x.dtype.to_real() != dtype for x in low.primals) or not all(
            bool(x.isfinite().all()) for x in low.primals
        ):
            continue
        exact = p.at([widen(x) for x in low.leaves])
        try:
            given = Given.drawn(exact).map(partial(_narrow, dtype=dtype))
            _values(low, given)
        except Exception:
            continue
        _compare(c, "precision", exact, low, given, dtype, KINDS)


def autocast(c: Context) -> None:
    """Under `torch.autocast` in bfloat16, against the same in float32 without it; the backward runs outside of it."""
    p = c.wide.at([_narrow(x, torch.float32) for x in c.wide.leaves])  # autocast leaves double precision as it is

    def run_under(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(p.primals[0].device.type, dtype=torch.bfloat16):
            return p.fn(*args, **kwargs)

    try:
        given = Given.drawn(p)
    except Exception:
        return  # the function takes double precision only
    kinds = {kind: KINDS[kind] for kind in ("values", "rev")}
    _compare(c, "autocast", p, p.but(fn=run_under), given, torch.bfloat16, kinds)


@dataclass(frozen=True)
class Given:
    """Cotangents of the outputs and tangents of the inputs, both random."""

    cotangents: Point
    tangents: Point

    @classmethod
    def drawn(cls, p: Problem) -> Given:
        generator = torch.Generator().manual_seed(p.seed)
        cotangents = []
        for o in p.call(*p.primals):
            # mostly of one sign, so that a sum of many is larger than its terms
            ct = 1 + torch.randn(o.shape, dtype=o.dtype, generator=generator, device="cpu").to(o.device)
            # an entry that is infinite at the sample has no derivative
            cotangents.append(torch.where(o.detach().isfinite(), ct, torch.zeros_like(ct)))
        return cls(tuple(cotangents), tuple(u.to(x.dtype) for u, x in zip(p.u, p.primals, strict=True)))

    def map(self, f: Callable[[Any], Tensor]) -> Given:
        return Given(tuple(map(f, self.cotangents)), tuple(map(f, self.tangents)))


def _values(p: Problem, given: Given) -> Sequence[Tensor]:
    with torch.no_grad():
        return p.call(*p.primals)


def _gradients(p: Problem, given: Given) -> Sequence[Tensor | None]:
    xs = [x.detach().requires_grad_() for x in p.primals]
    outputs = p.call(*xs)
    return pull(outputs, [ct.to(o.dtype) for ct, o in zip(given.cotangents, outputs, strict=True)], xs)


def _tangents(p: Problem, given: Given) -> Sequence[Tensor]:
    with fwAD.dual_level():
        outputs = p.call(*(modes.make_dual(x, t.to(x.dtype)) for x, t in zip(p.primals, given.tangents, strict=True)))
        return [modes.tangent_of(o) for o in outputs]


Compute = Callable[[Problem, Given], Sequence[Tensor | None]]
KINDS: dict[str, Compute] = {"values": _values, "rev": _gradients, "fwd": _tangents}


def _compare(
    c: Context,
    check: str,
    exact: Problem,
    low: Problem,
    given: Given,
    dtype: torch.dtype,
    kinds: dict[str, Compute],
) -> None:
    """Judge `low`, which rounds to `dtype`, against `exact` for each kind of result that the latter has."""
    for kind, compute in kinds.items():
        engine = f"{_short(dtype)}, {kind}"
        if kind != "values" and c.gap(kind, "eager"):
            continue
        try:
            expected = compute(exact, given)
        except Exception:
            continue  # reported by its own mode
        found = c.run(check, engine, partial(compute, low, given))
        if found is None:
            continue
        names = [f"gradient of {n}" for n in low.names] if kind == "rev" else [f"output {j}" for j in low.outputs]
        moved = list(_movements(exact, given, compute, torch.finfo(dtype).eps))
        sizes = _sizes(exact, given, kind)
        worst = max(
            (
                _Error.of(name, a, b, [m[j] for m in moved], size, dtype)
                for j, (name, a, b, size) in enumerate(zip(names, found, expected, sizes, strict=True))
                if b is not None
            ),
            key=lambda error: error.ratio,
            default=None,
        )
        if worst is not None:
            worst.add_to(c, check, engine)


def _movements(p: Problem, given: Given, compute: Compute, eps: float) -> Iterator[Sequence[Tensor | None]]:
    """The movement of the results under relative rounding errors of this size in inputs, cotangents and tangents."""
    generator = torch.Generator().manual_seed(p.seed)

    def moved(x: Any) -> Any:
        if not tree.is_differentiable(x) or x.layout != torch.strided:
            return x
        return x * (1 + eps * (2 * torch.rand(x.shape, generator=generator, device="cpu") - 1).to(x.device, x.dtype))

    for _ in range(PERTURBATIONS):
        try:
            yield compute(p.at([moved(x) for x in p.leaves]), given.map(widen).map(moved))
        except Exception:
            continue  # out of the domain


def _sizes(p: Problem, given: Given, kind: str) -> list[float]:
    """The size of each result for a function of degree one, by which a derivative that vanishes identically is judged."""
    outputs, inputs = [_norm(o) for o in _values(p, given)], [_norm(x) for x in p.primals]
    if kind == "values":
        return [0.0] * len(outputs)
    if kind == "rev":
        pulled = sum(_norm(ct) * o for ct, o in zip(given.cotangents, outputs, strict=True))
        return [pulled / x if x else 0.0 for x in inputs]
    pushed = sum(_norm(t) / x for t, x in zip(given.tangents, inputs, strict=True) if x)
    return [pushed * o for o in outputs]


def _norm(x: Tensor) -> float:
    """The norm over the finite entries."""
    return float(widen(x.detach()).nan_to_num(0, 0, 0).norm())


@dataclass(frozen=True)
class _Error:
    """The largest error of a result; norms are Euclidean, over the entries that the dtype can represent."""

    name: str
    found: float
    expected: float
    error: float
    attainable: float
    flaw: str = ""

    @property
    def ratio(self) -> float:
        return math.inf if self.flaw else self.error / self.attainable

    @classmethod
    def of(
        cls,
        name: str,
        ours: Tensor | None,
        exact: Tensor,
        moved: Sequence[Tensor | None],
        size: float,
        dtype: torch.dtype,
    ) -> _Error:
        limits = torch.finfo(dtype)
        b = widen(exact.detach())
        keep = b.isfinite()
        norm = float(b[keep].norm())
        a = torch.zeros_like(b) if ours is None else widen(ours.detach())
        if a.shape != b.shape:
            return cls(name, math.nan, norm, math.nan, 0.0, f"the shape {tuple(a.shape)}, not {tuple(b.shape)}")
        # near the end of the range intermediate results may leave it
        if not bool(a[keep & (b.abs() < limits.max * limits.eps)].isfinite().all()):
            return cls(name, math.nan, norm, math.nan, 0.0, f"not finite in {_short(dtype)}, where it can be")
        keep &= a.isfinite()
        movement = (float((widen(m.detach()) - b)[keep].norm()) for m in moved if m is not None and m.shape == b.shape)
        rounding = limits.eps * (norm + size) + limits.smallest_normal * max(int(keep.sum()), 1) ** 0.5
        attainable = max((x for x in movement if math.isfinite(x)), default=0.0) + rounding
        return cls(name, float(a[keep].norm()), norm, float((a - b)[keep].norm()), attainable)

    def add_to(self, c: Context, check: str, engine: str) -> None:
        right, percent = self.ratio <= FACTOR, 100 / max(self.expected, 1e-300)
        if self.flaw:
            said = self.flaw
        elif self.error <= 10 * self.expected:
            said = f"{self.error * percent:.3g} percent off where {self.attainable * percent:.3g} percent is attainable"
        else:
            said = f"off by {self.error:.3g} where {self.attainable:.3g} is attainable"
        c.close_gap(
            check,
            engine,
            report.OK if right else report.WRONG,
            "" if right else f"{self.name}: {said}",
            ours=self.found,
            reference=self.expected,
            absolute=self.error,
            relative=self.error * percent / 100,
        )


def _narrow(x: Any, dtype: torch.dtype) -> Any:
    """A floating or complex tensor in this precision; complex ones at least in complex64."""
    if not tree.is_differentiable(x):
        return x
    return x.to(torch.complex64 if x.is_complex() else dtype)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
