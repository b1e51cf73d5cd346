"""A smooth real loss of the differentiable inputs, made of a function and a sample."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ...core.internals import DispatchMode
from ...core.rule import Sample
from ..inputs import tree
from ..numerics.arithmetic import add, computable, inner, magnitude, widen, with_zero_tangent
from ..numerics.finite_differences import STEP, Reference, first_derivative, mixed_derivative, stays, third_derivative
from ..numerics.kinks import ACCUSING, Range, ranges

Point = tuple[Tensor, ...]


def seed_generators(seed: int) -> None:
    """As `torch.manual_seed`, which without an accelerator takes several stack traces at every call."""
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)


class _Draws(DispatchMode):
    """Whether an operator changes the state of the generator."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        self.drawn |= not torch.equal(state, torch.get_rng_state())
        return result


class Problem:
    """The loss ``sum_j Re <w_j, o_j> + sum q_j |o_j|**2 / 2`` of the outputs o_j, scaled to about one, w and q random.

    The quadratic term makes the cotangent depend on the input, so that a second derivative also goes through the
    derivative of a vjp in its cotangent. For the same reason, second orders are computed through ``x + z + k z**2 / 2``
    at z = 0: the tangent that reaches `fn` then has a tangent of its own. Sparse tensors are held constant.

    Attributes:
        primals: the differentiable inputs.
        names: their paths.
        u: directions with the shapes of the inputs.
        v: directions with the shapes of the inputs.
        w: directions with the shapes of the inputs, for third derivatives.
        bend: k, with the shapes of the inputs.
        outputs: the indices of the floating point and complex outputs among all tensor leaves of the result.

    Raises:
        Exception: whatever `fn` raises on the sample.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        sample: Sample,
        *,
        readout: Callable[..., Any] | None = None,
        outputs: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.fn, self.sample, self.readout, self.seed = fn, sample, readout, seed
        self.arguments = (sample.args, sample.kwargs)
        found = tree.leaves(self.arguments)
        marked = any(isinstance(x, Tensor) and x.requires_grad for _, x in found)
        self.leaves: list[Any] = [x.detach() if isinstance(x, Tensor) else x for _, x in found]
        self.index = [
            i
            for i, (_, x) in enumerate(found)
            if tree.is_differentiable(x) and not tree.is_sparse(x) and (x.requires_grad or not marked)
        ]
        self.paths = [_readable(path) for path, _ in found]
        self.names = [self.paths[i] for i in self.index]
        self.primals: Point = tuple(self.leaves[i] for i in self.index)
        self.generator = torch.Generator().manual_seed(seed)
        self.random = False
        with torch.no_grad():
            state = torch.get_rng_state()
            base = self.flat(*self.primals)
            again = self.flat(*self.primals)
            # A function that draws random numbers is made to draw the same ones each time. Two draws may be equal.
            self.random = not torch.equal(state, torch.get_rng_state()) or any(
                not torch.equal(_nan_free(a), _nan_free(b)) for a, b in zip(base, again, strict=True)
            )
            self.random = self.random or self._draws()
            if self.random:
                base = self.flat(*self.primals)
        self.outputs = [
            i for i, o in enumerate(base) if tree.is_differentiable(o) and (outputs is None or i in outputs)
        ]
        self.base = base
        self._prepare_loss([base[i] for i in self.outputs])
        self.u, self.v, self.bend = (tuple(self.direction(x) for x in self.primals) for _ in range(3))
        self.w = tuple(self.direction(x) for x in self.primals)
        self.bend = tuple(k / magnitude(x) / magnitude(x) for k, x in zip(self.bend, self.primals, strict=True))

    def _draws(self) -> bool:
        """Whether an operator inside draws random numbers, even if the function itself restores the generator's state."""
        watched = _Draws()  # type: ignore[no-untyped-call]
        try:
            with watched:
                self.flat(*self.primals)
        except Exception:  # the function refuses the mode
            return False
        return watched.drawn

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype of the differentiable inputs and outputs."""
        dtypes = [x.dtype for x in (*self.primals, *(self.base[i] for i in self.outputs))] or [torch.float64]
        return min(dtypes, key=lambda d: d.itemsize // (2 if d.is_complex else 1))

    @property
    def applicable(self) -> bool:
        """Whether there is anything to differentiate."""
        return bool(self.primals) and bool(self.outputs)

    def direction(self, x: Tensor) -> Tensor:
        """A random tangent of the magnitude of `x`, so that a step of one changes it by its own magnitude."""
        # drawn in double precision, then rounded, so that the direction is the same in every dtype
        wide = torch.complex128 if x.is_complex() else torch.float64
        drawn = torch.randn(x.shape, dtype=wide, generator=self.generator, device="cpu").to(
            device=x.device
        ) * magnitude(x)
        return torch.empty_like(x).copy_(drawn) if x.layout == torch.strided else drawn.to(x.dtype)

    def flat(self, *primals: Tensor) -> list[Tensor]:
        """All tensor leaves of the result at these differentiable inputs."""
        values = list(self.leaves)
        for i, x in zip(self.index, primals, strict=True):
            values[i] = x
        args, kwargs = tree.rebuild(self.arguments, values)
        if self.random:
            seed_generators(self.seed)
        result = self.fn(*args, **kwargs)
        if self.readout is not None:
            result = self.readout(result)
        return tree.tensors(result)

    def call(self, *primals: Tensor) -> tuple[Tensor, ...]:
        """The differentiable outputs."""
        result = self.flat(*primals)
        return tuple(result[i] for i in self.outputs)

    def _prepare_loss(self, outputs: list[Tensor]) -> None:
        self.finite: list[Tensor | None] = []
        self.weights: list[Tensor] = []
        self.squares: list[Tensor] = []
        self.unit: list[float] = []
        for o in outputs:
            # an entry that is infinite at the sample (log 0, masked scores) has no derivative, and is not in the loss
            keep = o.isfinite()
            mask = None if bool(keep.all()) else keep.reshape(-1).nonzero().squeeze(-1)
            self.finite.append(mask)
            kept = o.reshape(-1)[mask] if mask is not None else o
            largest = float(widen(kept).abs().max()) if kept.numel() else 1.0
            self.unit.append(largest if 0 < largest < math.inf else 1.0)
            wide = torch.complex128 if o.is_complex() else torch.float64
            weight = torch.randn(kept.shape, dtype=wide, generator=self.generator, device="cpu")
            square = torch.randn(kept.shape, dtype=torch.float64, generator=self.generator, device="cpu")
            shrink = max(kept.numel(), 1) ** -0.5
            self.weights.append((weight * shrink).to(o.device))
            self.squares.append((square * shrink / 2).to(o.device))

    def losses(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """One real scalar for each differentiable output."""
        return [self.loss_of(j, o) for j, o in enumerate(outputs)]

    def loss_of(self, j: int, o: Tensor) -> Tensor:
        return self.terms(j, o).sum()

    def terms(self, j: int, o: Tensor) -> Tensor:
        """The loss of each element of an output."""
        mask = self.finite[j]
        o = computable(o if mask is None else o.reshape(-1)[mask])
        if self.unit[j] != 1:
            o = o / with_zero_tangent(o.new_full((), self.unit[j]), o)
        weight, square = (with_zero_tangent(x.to(o.dtype), o) for x in (self.weights[j].conj(), self.squares[j]))
        if not o.is_complex():
            return weight * o + square * o * o
        return (weight * o + square * o * o.conj()).real

    def loss(self, *primals: Tensor, subset: Sequence[int] | None = None) -> Tensor:
        """The loss of all outputs, or of a subset of them."""
        outputs = self.call(*primals)
        return add([self.loss_of(j, outputs[j]) for j in (range(len(outputs)) if subset is None else subset)])

    def bent(self, *z: Tensor) -> Point:
        """The inputs at the displacement z."""
        return tuple(
            with_zero_tangent(x, d) + d + with_zero_tangent(k / 2, d) * d * d
            for x, d, k in zip(self.primals, z, self.bend, strict=True)
        )

    def curve(self, *z: Tensor) -> Tensor:
        """The loss at the displacement z."""
        return self.loss(*self.bent(*z))

    def zero(self) -> Point:
        return tuple(torch.zeros_like(x) for x in self.primals)

    def wide(self) -> Problem:
        """The same problem in double precision: same directions, same weights."""
        if all(x.dtype in (torch.float64, torch.complex128) for x in self.primals):
            return self
        points = {name: tuple(map(widen, getattr(self, name))) for name in ("primals", "u", "v", "w", "bend")}
        other = self.but(leaves=[widen(x) for x in self.leaves], **points)
        with torch.no_grad():
            other.base = other.flat(*other.primals)
        return other

    def at(self, leaves: list[Any]) -> Problem:
        """The same problem at other arguments: same directions, same weights."""
        return self.but(leaves=leaves, primals=tuple(leaves[i] for i in self.index))

    def but(self, **changes: Any) -> Problem:
        """A copy with some attributes replaced."""
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other

    # references ------------------------------------------------------------------------------------------------------

    def _values(self, at: Sequence[Tensor]) -> list[float]:
        try:
            with torch.no_grad():
                return [float(value) for value in self.losses(self.call(*at))]
        except Exception:
            # a step out of the domain; at the sample itself the function has been called already
            return [math.nan] * len(self.outputs)

    def slope(self, direction: Sequence[Tensor | None]) -> list[Reference]:
        """The derivative of each output's loss along `direction` (None for an input that does not move), by finite
        differences.
        """

        def along(h: float) -> list[float]:
            return self._values([x if d is None else x + h * d for x, d in zip(self.primals, direction, strict=True)])

        found = first_derivative(along, self.noise)
        references = _references(*found, self.size)
        here = along(0)

        def jump(h: float) -> list[float]:
            return [(a + b - 2 * c) / h for a, b, c in zip(along(h), along(-h), here, strict=True)]

        if any(stays(jump, found[2])) or not all(r.settled for r in references):
            kinks = self._kinks(direction)
            return [replace(r, kink=kink) for r, kink in zip(references, kinks, strict=True)]
        return references

    def _kinks(self, direction: Sequence[Tensor | None]) -> list[Range | None]:
        """The possible derivatives of each output's loss; None if there is only one, or nothing is known."""

        def terms(*at: Tensor) -> Tensor:
            return torch.cat([self.terms(j, o).reshape(-1).double() for j, o in enumerate(self.call(*at))])

        lengths = [w.numel() for w in self.weights]
        moved = [torch.zeros_like(x) if d is None else d for x, d in zip(self.primals, direction, strict=True)]
        near = partial(ranges, terms, self.primals, [moved], [magnitude(x) for x in self.primals], lengths)
        try:
            with torch.no_grad():
                (found,) = near()
                if (found.bounded & ~found.smooth).any():
                    (found,) = near(ACCUSING)
        except Exception:
            return [None] * len(lengths)
        first = 0
        kinks: list[Range | None] = []
        for length in lengths:
            ours = torch.zeros_like(found.low)
            ours[first : first + length] = 1
            r, first = found.sum(ours), first + length
            kinks.append(r if bool(r.bounded & ~r.smooth) else None)
        return kinks

    def curvature(self, start: float = STEP) -> list[Reference]:
        """d/ds d/dt of each output's loss at the displacement s u + t v, by finite differences from the step `start` on."""

        def along(direction: Point) -> Callable[[float], list[float]]:
            return lambda h: self._values(self.bent(*(h * d for d in direction)))

        plus = tuple(a + b for a, b in zip(self.u, self.v, strict=True))
        minus = tuple(a - b for a, b in zip(self.u, self.v, strict=True))
        found = mixed_derivative(along(plus), along(minus), self.noise, start)

        def jump(h: float) -> list[float]:
            corners = (along(plus)(k * h) for k in (2, -2, 1, -1))
            return [(a - b - 2 * c + 2 * d) / (2 * h * h) for a, b, c, d in zip(*corners, strict=True)]

        return [
            replace(r, kink=Range.anything()) if kink else r
            for r, kink in zip(_references(*found, self.size), stays(jump, found[2]), strict=True)
        ]

    def curvature_of_gradient(self, start: float = STEP) -> Reference:
        """`curvature` of the whole loss, from the gradient: more accurate, but it relies on reverse mode."""

        def along(h: float) -> list[float]:
            z = [(h * d).detach().requires_grad_() for d in self.v]
            grads = torch.autograd.grad(self.curve(*z), z, allow_unused=True)
            return [float(inner(grads, self.u))]

        return _references(*first_derivative(along, self.noise, start), self.size)[0]

    def third(self, start: float = STEP) -> list[Reference]:
        """d/dr d/ds d/dt of each output's loss at the displacement r u + s v + t w, by finite differences of values."""

        def corner(h: float, signs: Sequence[int]) -> list[float]:
            a, b, c = (h * s for s in signs)
            return self._values(
                self.bent(*(a * u + b * v + c * w for u, v, w in zip(self.u, self.v, self.w, strict=True)))
            )

        return _references(*third_derivative(corner, self.noise, start), self.size)

    @property
    def size(self) -> float:
        """The magnitude of the loss: about one for each output."""
        return float(max(len(self.outputs), 1))

    @property
    def noise(self) -> float:
        """The rounding error of the loss."""
        return self.size * max((torch.finfo(self.base[i].dtype).eps for i in self.outputs), default=0.0)


def total(references: Sequence[Reference]) -> Reference:
    """The reference of a sum."""
    kinks = [r.kink or Range.one(r.value) for r in references]
    return Reference(
        sum(r.value for r in references),
        sum(r.error for r in references),
        max(r.scale for r in references),
        min(r.step for r in references),
        reduce(Range.__add__, kinks) if any(r.kink for r in references) else None,
    )


def _references(values: list[float], errors: list[float], step: float, scale: float) -> list[Reference]:
    return [Reference(v, e, scale, step) for v, e in zip(values, errors, strict=True)]


def _nan_free(x: Tensor) -> Tensor:
    return widen(x).nan_to_num() if tree.is_differentiable(x) else x  # not every dtype has it


def _readable(path: str) -> str:
    """``[0][1][0]`` is args[1][0], ``[1]['p']`` is p."""
    if path.startswith("[0]"):
        return "args" + path[3:]
    key, _, rest = path.removeprefix("[1][").partition("]")
    return key.strip("'") + rest
