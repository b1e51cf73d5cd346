"""The check "edges": derivatives at inputs at the edge, which it makes itself from the user's ordinary sample.

Judged derivatives, and derivatives that are not judged:

- Where the function raises, or its values are not finite, nothing is judged. An error in a derivative alone is a
  failure, unless it refuses an input that is not finite.
- Where the function is differentiable, its derivative has to be that number. Where it has a kink, the outcome is "not
  differentiable", and only values that are certainly not generalized gradients are wrong (see `kinks`): sign(0) = 0, a half at
  relu's kink and evenly shared ties are right, and so is any other choice among the derivatives nearby. nan and inf are
  wrong at a kink whose derivatives nearby are bounded: a generalized gradient exists there, and it is finite. PyTorch
  holds to this too: a norm, a standard deviation and a distance have gradient 0 at 0.
- A function that returns numbers outside of its domain is judged there too, as is a sampler of a negative concentration.
- Where derivatives nearby grow without bound, such as those of the square root at 0, this entry of the result is not
  judged. A cotangent of 0 times an infinite derivative is nan throughout PyTorch, so that nan in a gradient counts as a
  fault only if no entry of the result is of this kind or infinite. It is not a fault at an infinite input, or at one whose
  square is too large or too small for the dtype, as in tanh(x**2), where the 0 of a saturated function is multiplied by
  the inf of its argument. It is a fault if the input is nan and the function hides it. A solver that raises for a
  singular matrix is at fault under the same conditions as nan.
- A derivative too small or too large for its dtype is not judged. Neither is one where the function in its own dtype is
  far from its value in double precision: this check finds only gross errors, and the other checks are sharp.
- A derivative that is mostly rounding error is not judged at a kink or at extreme scales. There, an error has to exceed
  the change that factors of a few units in the last place on all inputs cause.
- Second orders are judged where the gradient is differentiable.
- A kernel that does not check the sizes that it is given may read outside of its memory and end the process, as some of
  PyTorch's own backward kernels do: this check is not for those.
- A mode that raises or is wrong at the ordinary sample is left to the other checks, and so is a function that is
  constant around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from ...core.rule import Sample
from ..comparison import modes, report
from ..comparison.context import Context
from ..comparison.problem import Problem
from ..inputs import tree
from ..numerics.arithmetic import magnitude, widen
from ..numerics.finite_differences import Tolerance
from ..numerics.kinks import ACCUSING, Range, ranges, uniform
from .edge_samples import BROADCAST, STRIDED, edge_samples
from .fake_tensors import other_fakes

#: A gradient with more elements is not searched for the wrong one.
SEARCHED = 48
#: Units in the last place by which inputs are moved, to estimate the rounding error of a derivative.
MOVED = range(1, 17)

REVERSE: dict[str, Callable[[Problem], Sequence[Tensor | None]]] = {
    "rev/eager": modes.gradient,
    "rev/func": modes.rev_func,
}
FORWARD: dict[str, Callable[[Problem, Sequence[Tensor]], Tensor]] = {
    "fwd/eager": modes.fwd_eager,
    "fwd/func": modes.fwd_func,
}
SECOND = {f"{mode}/{engine}": f for mode, engines in modes.SECOND.items() for engine, f in engines.items()}
MODES = (*REVERSE, *FORWARD, *SECOND)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one mode: an outcome, its place, and both numbers."""

    outcome: str
    detail: str = ""
    ours: float = math.nan
    reference: float = math.nan


class Edge:
    """A function at one edge: what its derivatives can be there, and what they are.

    Its entries are the real and imaginary parts of all finite elements of its outputs.
    """

    def __init__(self, problem: Problem, tolerance: Tolerance) -> None:
        self.problem, self.tolerance = problem, tolerance
        self.plain = problem.at([widen(_plain(x)) for x in problem.leaves])
        self.scales = [magnitude(x) for x in problem.primals]
        generator = torch.Generator().manual_seed(problem.seed)

        def direction(low: float, high: float) -> list[Tensor]:
            return [
                (uniform(x, generator, low, high) * scale).to(x.dtype)
                for x, scale in zip(problem.primals, self.scales, strict=True)
            ]

        # the last is nearly the same for all elements, which shows that a tie counts twice
        self.directions = [direction(-1, 1), direction(-1, 1), direction(0.9, 1)]
        with torch.no_grad():
            self.here, self.there = (entries(p, *p.primals).detach() for p in (problem, self.plain))
        self._seen: dict[int, Range] = {}
        self.weights = uniform(self.here, generator, 0.5, 1.5)

    @property
    def constant(self) -> bool:
        """Whether all results are locally constant. Around a huge number, finite differences see steps as a slope."""
        return all(bool((r.largest == 0).all()) for r in self.ranges)

    @property
    def hopeless(self) -> bool:
        """Whether there are results, but none whose derivative can be judged."""
        return bool(self.here.numel()) and not bool(self._settled.any())

    @cached_property
    def values_differ(self) -> bool:
        """Whether the function reads the layout of its inputs."""
        copies = [_plain(x) for x in self.problem.leaves]
        if all(x is y for x, y in zip(copies, self.problem.leaves, strict=True)):
            return False
        with torch.no_grad():
            plain = entries(self.problem, *(copies[i] for i in self.problem.index))
        return bool((self._bounded & ~_close(self.here, plain, self.tolerance.first)).any())

    def agrees_with(self, other: Problem) -> bool:
        """Whether the results are those of another problem."""
        with torch.no_grad():
            results = [p.call(*p.primals) for p in (self.problem, other)]
            there = entries(other, *other.primals)
        if [o.shape for o in results[0]] != [o.shape for o in results[1]] or self.here.shape != there.shape:
            return False
        return bool(_close(self.here, there, self.tolerance.first).all())

    @cached_property
    def ranges(self) -> list[Range]:
        """The possible derivatives of each entry, along each direction."""
        return self._ranges(self.directions)

    def _ranges(self, directions: Sequence[Sequence[Tensor]], points: int | None = None) -> list[Range]:
        with torch.no_grad():
            return ranges(
                partial(entries, self.plain),
                self.plain.primals,
                [[widen(u) for u in direction] for direction in directions],
                self.scales,
                self._lengths,
                points,
            )

    @property
    def _lengths(self) -> list[int]:
        p = self.problem
        sizes = [
            p.base[i].numel() if mask is None else mask.numel() for i, mask in zip(p.outputs, p.finite, strict=True)
        ]
        return [n * (2 if p.base[i].is_complex() else 1) for i, n in zip(p.outputs, sizes, strict=True)]

    @property
    def _bounded(self) -> Tensor:
        return torch.stack([r.bounded for r in self.ranges]).all(0)

    @cached_property
    def _settled(self) -> Tensor:
        """The entries that can be judged."""
        fits = torch.stack([self._representable(r.largest) for r in self.ranges]).all(0)
        if self._extreme:
            # a result that has underflowed to 0 says nothing of its derivative: a norm of subnormal numbers
            fits &= (self.there != 0) | torch.stack([r.largest != 0 for r in self.ranges]).any(0)
        return self._bounded & fits & _close(self.here, self.there, self.tolerance.first)

    @property
    def _extreme(self) -> bool:
        """Whether the squares of inputs are too small or too large for the dtype."""
        limits = torch.finfo(self.problem.dtype)
        return any(not limits.tiny < s * s < limits.max for s in self.scales)

    @property
    def nan_counts(self) -> bool:
        """Whether nan is a fault of the function: its results are finite, none of them has a derivative that grows without
        bound, and its inputs and their squares fit into the dtype.
        """
        infinite = any(bool(x.isinf().any()) for x in self.problem.primals)
        finite = all(mask is None for mask in self.problem.finite)
        return finite and bool(self._settled.all()) and not (infinite or self._extreme)

    def _representable(self, slope: Tensor) -> Tensor:
        """Whether a gradient with this derivative along a direction fits into the dtype."""
        limits = torch.finfo(self.problem.dtype)
        low, high = slope / max(self.scales), slope / min(self.scales)
        return (slope == 0) | ((low > 1e4 * limits.tiny) & (high < 1e-4 * limits.max))

    @property
    def smooth(self) -> bool:
        """Whether second orders can be judged."""
        usual = all(1e-10 < s < 1e10 for s in self.scales)
        return usual and bool(self._settled.all()) and all(bool(r.smooth.all()) for r in self.ranges)

    def verdict(self, mode: str) -> Verdict | None:
        """The verdict on a mode; None if it cannot be judged.

        Raises:
            Exception: whatever the derivative raises.
        """
        if self.here.numel() == 0 and any(self.problem.base[i].numel() for i in self.problem.outputs):
            return None  # nothing is finite
        if mode in REVERSE:
            return self._reverse(REVERSE[mode])
        return self._forward(FORWARD[mode]) if mode in FORWARD else self._second(SECOND[mode])

    def _forward(self, compute: Callable[[Problem, Sequence[Tensor]], Tensor]) -> Verdict | None:
        vector = self.problem.but(loss=partial(entries, self.problem))
        kink, tiny = False, 1e4 * torch.finfo(self.problem.dtype).tiny

        def entry(j: int, direction: Sequence[Tensor], p: Problem) -> Tensor:
            return compute(p.but(loss=partial(entries, p)), direction).detach()[j]

        for k, direction in enumerate(self.directions):
            ours = compute(vector, direction).detach()

            def wrong(r: Range, ours: Tensor = ours) -> Tensor:
                # the tangent has to fit into the dtype, too
                fits = self._settled & ((r.largest == 0) | (r.largest > tiny)) & (ours.isfinite() | self.nan_counts)
                return fits & r.excludes(ours, self.tolerance.first)

            if wrong(self.ranges[k]).any() and wrong(r := self._again(k)).any():
                for j in wrong(r).nonzero().flatten().tolist():
                    if not self._is_noise(r, j, ours[j], partial(entry, j, direction)):
                        return _accused(self._name(j), r, j, ours)
                return None
            kink = kink or self._kink(k)
        return None if self.hopeless else _passed(kink)

    def _again(self, k: int) -> Range:
        """The possible derivatives along a direction, from more points, before a value is reported as wrong."""
        if k not in self._seen:
            self._seen[k] = self._ranges(self.directions[k : k + 1], ACCUSING)[0]
        return self._seen[k]

    def _is_noise(self, r: Range, j: Any, ours: Tensor, compute: Callable[[Problem], Tensor]) -> bool:
        """Whether slightly larger inputs change a derivative by about as much as its error.

        All inputs are scaled by one factor, so that ties and zeros stay, and values stay on their side of a bound. This is
        used only at kinks and at extreme scales: a formula that loses all digits at ordinary numbers is wrong.
        """
        usual = all(1e-10 < s < 1e10 for s in self.scales)
        if usual and bool(r.smooth[j]) or not bool(ours.isfinite().all()):
            return False
        eps = torch.finfo(self.problem.dtype).eps
        try:
            found = [compute(self._scaled(1 + n * eps)) for n in MOVED]
        except Exception:
            return False
        off = (r.low[j] - ours).clamp(min=0) + (ours - r.high[j]).clamp(min=0)
        return bool(max(found) - min(found) >= off / 2)

    def _scaled(self, factor: float) -> Problem:
        p = self.problem
        return p.at([x * factor if i in p.index else x for i, x in enumerate(p.leaves)])

    def _kink(self, k: int) -> bool:
        return bool((self._settled & ~self.ranges[k].smooth).any())

    def _reverse(self, compute: Callable[[Problem], Sequence[Tensor | None]]) -> Verdict | None:
        weights = self.weights * self._settled

        def gradient_of(p: Problem) -> list[Tensor]:
            def loss(*xs: Tensor, subset: Any = None) -> Tensor:
                return (entries(p, *xs) * weights).sum()

            return [
                torch.zeros_like(y) if g is None else widen(g.detach())
                for g, y in zip(compute(p.but(loss=loss)), self.plain.primals, strict=True)
            ]

        gradient = gradient_of(self.problem)
        finite = all(bool(g.isfinite().all()) for g in gradient)
        if self.hopeless or not (finite or self.nan_counts):
            return None
        for k, direction in enumerate(self.directions):
            ours = _inner(gradient, direction)

            def along(p: Problem, direction: Sequence[Tensor] = direction) -> Tensor:
                return _inner(gradient_of(p), direction)

            def wrong(r: Range, ours: Tensor = ours) -> bool:
                return bool(r.sum(weights).excludes(ours, self.tolerance.first))

            if wrong(self.ranges[k]) and wrong(r := self._again(k)):
                if self._is_noise(r.sum(weights), (), ours, along):
                    return None
                everywhere = _accused("along a direction of all elements", r.sum(weights), (), ours)
                return self._element(gradient, weights) or everywhere
        return _passed(any(self._kink(k) for k in range(len(self.directions))))

    def _element(self, gradient: Sequence[Tensor], weights: Tensor) -> Verdict | None:
        """The first element of a wrong gradient that is wrong on its own."""
        if sum(g.numel() for g in gradient) > SEARCHED:
            return None
        for k, g in enumerate(gradient):
            for at in range(g.numel()):
                single = [torch.zeros_like(x) for x in self.plain.primals]
                single[k].view(-1)[at] = self.scales[k]
                r = self._ranges([single])[0].sum(weights)
                value, unit = g.reshape(-1)[at], self.scales[k]
                ours = value.real.double() * unit
                if value.isfinite() and not r.excludes(ours, self.tolerance.first):
                    continue
                r = Range(r.low / unit, r.high / unit, r.bounded, r.smooth, r.scale / unit)
                return _accused(f"gradient of {self.problem.names[k]}{_index(g, at)}", r, (), ours / unit)
        return None

    @cached_property
    def _curvature(self) -> Range:
        """The derivative along v of the gradient of `Problem.curve` along u."""
        p = self.plain

        def gradient(*z: Tensor) -> Tensor:
            z = tuple(x.detach().requires_grad_() for x in z)
            found = modes.backward(p.curve(*z), z)
            return _flat([torch.zeros_like(x) if g is None else g.detach() for g, x in zip(found, z, strict=True)])

        u, v = ([widen(x) for x in d] for d in (self.problem.u, self.problem.v))
        return ranges(gradient, p.zero(), [v], self.scales, [sum(x.numel() for x in map(_real, u))])[0].sum(_flat(u))

    def _second(self, compute: Callable[[Problem, Callable[..., Tensor]], Tensor]) -> Verdict | None:
        r = self._curvature
        ours = compute(self.problem, self.problem.curve).detach().double()
        if not r.smooth:
            return None
        return _accused("", r, (), ours) if r.excludes(ours, self.tolerance.second) else _passed(False)

    def _name(self, j: int) -> str:
        """The name of the j-th entry."""
        p = self.problem
        for i, mask, length in zip(p.outputs, p.finite, self._lengths, strict=True):
            if j < length:
                j %= length // 2 if p.base[i].is_complex() else length
                return f"output {i}{_index(p.base[i], j if mask is None else int(mask[j]))}"
            j -= length
        raise IndexError(j)


def entries(p: Problem, *primals: Tensor) -> Tensor:
    """The real and imaginary parts of all elements of the outputs that are finite at the problem's own point."""
    parts: list[Tensor] = []
    for o, mask in zip(p.call(*primals), p.finite, strict=True):
        kept = o.reshape(-1) if mask is None else o.reshape(-1)[mask]
        parts += [kept.real.double(), kept.imag.double()] if kept.is_complex() else [kept.double()]
    return torch.cat(parts)


def _passed(kink: bool) -> Verdict:
    return Verdict(report.KINK if kink else report.OK)


def _accused(where: str, r: Range, j: Any, ours: Tensor) -> Verdict:
    low, high = float(r.low[j]), float(r.high[j])
    if bool(r.smooth[j]):
        said = "differentiable here"
    else:
        said = f"no generalized gradient: not between {low:.6g} and {high:.6g}, the derivatives nearby"
    value = float(ours[j])
    nearest = (low + high) / 2 if bool(r.smooth[j]) or not math.isfinite(value) else min(max(value, low), high)
    return Verdict(report.WRONG, f"{where}: {said}" if where else said, value, nearest)


def _inner(gradient: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    return (_flat(gradient) * _flat([widen(u) for u in direction])).sum()


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _flat(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat([_real(x).reshape(-1).double() for x in xs])


def _plain(x: Any) -> Any:
    """Contiguous, with neither a conj nor a neg bit; anything else as it is."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        return x
    return (
        x if x.is_contiguous() and not x.is_conj() and not x.is_neg() else x.resolve_conj().resolve_neg().contiguous()
    )


def _close(a: Tensor, b: Tensor, tolerance: tuple[float, float]) -> Tensor:
    largest = b.abs().max() if b.numel() else 0.0
    return (a - b).abs() <= tolerance[0] * b.abs() + tolerance[1] * largest


def _index(x: Tensor, at: int) -> str:
    return str([int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), x.shape)]) if x.dim() else ""


#: No edges are tried for samples with more numbers.
LARGEST = 1000


def edges(c: Context) -> None:
    """Derivatives at edge values, shapes and layouts made from the sample."""
    p = c.problem
    if sum(x.numel() for x in p.leaves if isinstance(x, Tensor)) > LARGEST:
        return
    able = _able(c)
    if not able:
        return
    fakes_right = _fakes_right(p)
    for label, leaves, second in edge_samples(p):
        try:
            edge = Edge(_problem_at(p, leaves), c.tolerance)
        except Exception:
            continue  # the function itself raises
        if label == f"inputs {STRIDED}" and edge.values_differ:
            break  # a function of the storage, as as_strided is; the check "noncontiguous" reports it
        if label.endswith(BROADCAST) and not _broadcasts(p, edge, leaves):
            continue
        if fakes_right and _shapes(leaves) != _shapes(p.leaves):
            c.verdict("edges", f"fake outputs, at {label}", partial(other_fakes, p, leaves))
        _judge(c, label, edge, able if second else [mode for mode in able if mode not in SECOND])


def _fakes_right(p: Problem) -> bool:
    """Whether the outputs of fake tensors are right at the ordinary sample."""
    try:
        return other_fakes(p, p.leaves) == ""
    except Exception:
        return False


def _shapes(leaves: Sequence[Any]) -> list[torch.Size]:
    return [x.shape for x in leaves if isinstance(x, Tensor)]


def _broadcasts(p: Problem, edge: Edge, leaves: Sequence[Any]) -> bool:
    """Whether the function broadcasts the smaller input. Raw kernels that accept any sizes read out of bounds."""
    full = [
        x.expand(y.shape) if isinstance(x, Tensor) and x.shape != y.shape else x
        for x, y in zip(leaves, p.leaves, strict=True)
    ]
    try:
        return edge.agrees_with(_problem_at(p, full))
    except Exception:
        return False


def _able(c: Context) -> list[str]:
    """The modes that work at the ordinary sample."""
    able: list[str] = []
    try:
        ordinary = Edge(c.problem, c.tolerance)
        if ordinary.constant:
            return able
    except Exception:
        return able  # nested and sparse tensors, which cannot be moved along a direction
    for mode in MODES:
        try:
            if c.gap(*mode.split("/")) is None and not _failed(ordinary.verdict(mode)):
                able.append(mode)
        except Exception:
            continue
    return able


def _problem_at(p: Problem, leaves: list[Any]) -> Problem:
    marked = [x.detach().requires_grad_() if i in p.index else x for i, x in enumerate(leaves)]
    args, kwargs = tree.rebuild(p.arguments, marked)
    return Problem(p.fn, Sample(*args, **kwargs), readout=p.readout, outputs=p.outputs, seed=p.seed)


def _failed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.outcome == report.WRONG


def _judge(c: Context, label: str, edge: Edge, able: Sequence[str]) -> None:
    if edge.values_differ:
        c.add("edges", f"outputs, at {label}", report.WRONG, "other values than of contiguous copies of the inputs")
        return
    for mode in able:
        if mode in SECOND and not edge.smooth:
            continue
        engine = f"{mode}, at {label}"
        verdict = c.run("edges", engine, partial(_verdict, edge, mode))
        if verdict is None:
            continue
        off = abs(verdict.ours - verdict.reference)
        relative = off / max(abs(verdict.reference), 1e-300)
        c.add("edges", engine, verdict.outcome, verdict.detail, verdict.ours, verdict.reference, off, relative)
        if _failed(verdict) and mode not in SECOND:
            able = [m for m in able if m not in SECOND]


def _verdict(edge: Edge, mode: str) -> Verdict | None:
    """The verdict on a mode, or an error if it is a fault of the function."""
    try:
        return edge.verdict(mode)
    except Exception as error:
        unable = edge.hopeless or not all(bool(x.isfinite().all()) for x in edge.problem.primals)
        if unable and "INTERNAL ASSERT" not in str(error):
            return None
        if isinstance(error, LinAlgError) and not edge.nan_counts:
            return None
        if not _works_of_views(edge, mode):
            return None
        raise


def _works_of_views(edge: Edge, mode: str) -> bool:
    """Whether PyTorch supports this mode for such inputs: it makes no dual number from an expanded tensor."""
    inputs = [x.detach().requires_grad_() for x in edge.problem.primals]
    try:
        Edge(Problem(lambda *xs: [x.view_as(x) for x in xs], Sample(*inputs)), edge.tolerance).verdict(mode)
    except Exception:
        return False
    return True
