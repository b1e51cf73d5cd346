"""One operator in every transform and engine of PyTorch, against a plain implementation."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...arguments import checked
from ...core.rule import Sample
from ..checks import transforms
from ..comparison import modes, report
from ..comparison.modes import pull
from ..comparison.problem import Problem
from ..inputs import tree
from ..inputs.samples import as_sample
from ..inputs.written import without_writes
from ..numerics.arithmetic import inner, magnitude
from ..numerics.finite_differences import tensors_close, worst

Numbers = Sequence["Tensor | None"]


@dataclass(frozen=True)
class Row:
    """The outcome of one way to use the operator: ok, wrong, raises, or - (does not apply to operator or sample)."""

    name: str
    outcome: str
    error: float = math.nan
    detail: str = ""


@dataclass(frozen=True)
class Composition:
    """The rows of `composition`; prints as a Markdown table."""

    fn: str
    sample: str
    rows: tuple[Row, ...]

    @property
    def failures(self) -> list[Row]:
        return [r for r in self.rows if r.outcome in (report.WRONG, report.RAISES)]

    def outcome(self, name: str) -> str:
        """The outcome of the row of this name."""
        return next(r.outcome for r in self.rows if r.name == name)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = [["through", "outcome", "max error", "detail"]]
        lines += [[r.name, r.outcome, "" if math.isnan(r.error) else f"{r.error:.1e}", r.detail] for r in self.rows]
        return report.table(lines)


@checked
def composition(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    sample: Sample | tuple[Any, ...],
    *,
    backend: str = "aot_eager",
    compile: bool = True,
    rtol: float = 1e-8,
    seed: int = 0,
) -> Composition:
    """Run `fn` through every engine and transform, and compare numbers with `reference`.

    Args:
        fn: the operator. One that writes to arguments is treated as a function that returns its results and then the
            new values of these arguments.
        reference: the same function as plain differentiable torch code. Only its reverse mode is used, to every order,
            and under no transform but `torch.func.jacrev`.
        sample: one call, float64 or complex128, small; a `Sample` or a tuple of positional arguments.
        backend: of `torch.compile`.
        compile: False leaves out the rows that compile or export.
        rtol: of every comparison, relative to the largest component.
        seed: of directions and weights.

    Returns:
        The rows, in a fixed order. A failing row does not raise.
    """
    given = as_sample(sample, "composition: sample")
    fn, name = without_writes(fn), getattr(fn, "__name__", str(fn))
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        trusted = Problem(reference, given, seed=seed)
        ours = trusted.but(fn=fn)
        ways = [*_first_order(ours, trusted), *_nestings(ours, trusted), *_batched(ours, trusted)]
        ways += _compiled(ours, trusted, backend) if compile else []
        ways += [*_torch_checks(ours), *_autocast(ours, trusted)]
        rows = tuple(_row(*way, rtol=rtol) for way in ways)
    return Composition(name, repr(given), rows)


class Inapplicable(Exception):
    """The operator or the sample cannot be used in this way."""


#: A row's name, our numbers, the reference's. A string instead of our numbers describes a failure; empty means success.
Way = tuple[str, Callable[[], "Numbers | str"], Callable[[], Numbers]]


def _row(name: str, ours: Callable[[], Numbers | str], theirs: Callable[[], Numbers], rtol: float) -> Row:
    try:
        found = ours()
    except Inapplicable as reason:
        return Row(name, report.NOT_APPLICABLE, detail=str(reason))
    except Exception as failure:
        lines = str(failure).strip().splitlines() or [""]
        return Row(name, report.RAISES, detail=f"{type(failure).__name__}: {lines[0][:160]}")
    if isinstance(found, str):
        return Row(name, report.WRONG if found else report.OK, detail=found)
    limit = 0.1 if "bfloat16" in name else rtol  # bfloat16 has 8 bits: this checks the number, not its accuracy
    error, detail = 0.0, ""
    for i, (a, b) in enumerate(itertools.zip_longest(found, theirs())):
        if a is None and b is None:
            continue
        a, b = _filled(a, b), _filled(b, a)
        if a.shape != b.shape or a.dtype != b.dtype:
            detail = f"number {i}: {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}"
            return Row(name, report.WRONG, detail=detail)
        absolute, relative = worst(a, b)
        if not detail and not tensors_close(a, b, (limit, limit * 1e-3)):
            detail = f"number {i} differs, relative {relative:.1e}"
        error = absolute if math.isnan(absolute) else max(error, absolute)
    return Row(name, report.WRONG if detail else report.OK, error, detail)


def _filled(x: Tensor | None, like: Tensor | None) -> Tensor:
    if x is not None:
        return x
    assert like is not None
    return torch.zeros_like(like)


def _all(p: Problem) -> tuple[int, ...]:
    return tuple(range(len(p.primals)))


def _slope(p: Problem) -> Numbers:
    return [inner(modes.gradient(p), p.u)]


def _cotangents(p: Problem) -> tuple[Tensor, ...]:
    outputs = p.call(*p.primals)
    return tuple((w / unit).to(o.dtype) for w, unit, o in zip(p.weights, p.unit, outputs, strict=True))


def _first_order(p: Problem, ref: Problem) -> Iterator[Way]:
    F, xs, everything = torch.func, p.primals, _all(p)

    def pulled() -> Numbers:
        at = [x.detach().requires_grad_() for x in xs]
        return pull(ref.call(*at), _cotangents(ref), at)

    def jacobian(of: Callable[..., Any], *transforms: Callable[..., Any]) -> Numbers:
        # torch's Jacobian transforms take real inputs only; the nestings go through a real parameter instead
        if any(x.is_complex() for x in xs):
            raise Inapplicable("real inputs only")
        for transform in transforms:
            of = transform(of, argnums=everything)
        return tree.tensors(of(*xs))

    yield "forward", lambda: p.call(*xs), lambda: ref.call(*xs)
    yield "eager reverse", lambda: modes.gradient(p), lambda: modes.gradient(ref)
    yield "eager dual numbers", lambda: [modes.fwd_eager(p, p.u)], lambda: _slope(ref)
    yield "func.grad", lambda: modes.rev_func(p), lambda: modes.gradient(ref)
    yield "func.vjp", lambda: F.vjp(p.call, *xs)[1](_cotangents(ref)), pulled
    yield "func.jvp", lambda: [modes.fwd_func(p, p.u)], lambda: _slope(ref)
    yield "func.linearize", lambda: [F.linearize(p.loss, *xs)[1](*p.u)], lambda: _slope(ref)
    yield "func.jacrev", lambda: jacobian(p.call, F.jacrev), lambda: jacobian(ref.call, F.jacrev)
    yield "func.jacfwd", lambda: jacobian(p.call, F.jacfwd), lambda: jacobian(ref.call, F.jacrev)
    hessian = partial(jacobian, ref.loss, F.jacrev, F.jacrev)
    yield "func.hessian", lambda: jacobian(p.loss, F.hessian), hessian


def _path(p: Problem, parameters: int = 2) -> Callable[[Tensor], Tensor]:
    """The loss along a curved surface through the sample, a function of a few real numbers, so that its Jacobians are
    small.
    """
    generator = torch.Generator().manual_seed(p.seed + 1)
    sides = [
        [
            torch.randn(x.shape, dtype=torch.float64, generator=generator, device="cpu").to(x) * 0.3
            for _ in range(parameters)
        ]
        for x in p.primals
    ]
    sizes = [magnitude(x) for x in p.primals]

    def f(s: Tensor) -> Tensor:
        return p.curve(
            *(
                torch.stack([s[i] * d for i, d in enumerate(directions)]).sum(0) * size
                for directions, size in zip(sides, sizes, strict=True)
            )
        )

    return f


def _nestings(p: Problem, ref: Problem) -> Iterator[Way]:
    jacobians: dict[str, Callable[..., Any]] = {"rev": torch.func.jacrev, "fwd": torch.func.jacfwd}
    origin = torch.zeros(2, dtype=torch.float64, device=p.primals[0].device)

    def nested(of: Problem, nesting: Sequence[str]) -> Numbers:
        f: Callable[..., Any] = _path(of)
        for mode in reversed(nesting):
            f = jacobians[mode](f)
        return [f(origin)]

    for order in (2, 3):
        for nesting in itertools.product(jacobians, repeat=order):
            yield "-".join(nesting), partial(nested, p, nesting), partial(nested, ref, ("rev",) * order)
        if order == 2:
            for mode, engines in modes.SECOND.items():
                if "eager" in engines:
                    yield (
                        f"eager {mode}",
                        partial(_curvature, engines["eager"], p),
                        partial(_curvature, modes.rev_rev_eager, ref),
                    )


def _curvature(mode: Callable[..., Tensor], p: Problem) -> Numbers:
    return [mode(p, p.curve)]


def _batched(p: Problem, ref: Problem) -> Iterator[Way]:
    F, everything = torch.func, _all(p)
    rows = list(zip(*(transforms.variants_of(x, i) for i, x in enumerate(p.primals)), strict=True))
    stacked = tuple(torch.stack(x) for x in zip(*rows, strict=True))
    vmap = partial(F.vmap, randomness="same")

    def loop(f: Callable[[Problem], Numbers]) -> Numbers:
        columns = zip(*(f(ref.but(primals=row)) for row in rows), strict=True)
        return [None if any(x is None for x in column) else torch.stack(column) for column in columns]

    def outputs() -> Numbers:
        return loop(lambda q: q.call(*q.primals))

    per_sample = vmap(F.grad(p.loss, argnums=everything))
    summed = F.grad(lambda *x: vmap(p.loss)(*x).sum(), argnums=everything)
    yield "vmap", lambda: vmap(p.call)(*stacked), outputs
    yield "vmap of vmap", lambda: [o[0] for o in vmap(vmap(p.call))(*(x.unsqueeze(0) for x in stacked))], outputs
    yield "vmap of grad", lambda: per_sample(*stacked), lambda: loop(modes.gradient)
    yield "grad of vmap", lambda: summed(*stacked), lambda: loop(modes.gradient)
    yield "vmap of jvp", lambda: [vmap(lambda *x: F.jvp(p.loss, x, p.u)[1])(*stacked)], lambda: loop(_slope)


class _Call(torch.nn.Module):
    """A module for `torch.export`."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.p = p

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return self.p.call(*xs)


def _compiled(p: Problem, ref: Problem, backend: str) -> Iterator[Way]:
    F, xs = torch.func, p.primals
    gradient = F.grad(p.loss, argnums=_all(p))
    doubled = tuple(torch.stack([x, x]) for x in xs)

    def build(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(f, fullgraph=True, backend=backend, **options)

    def backward(**options: Any) -> Numbers:
        at = [x.detach().requires_grad_() for x in xs]
        return modes.backward(build(p.loss, **options)(*at), at)

    def twice() -> Numbers:
        return [None if g is None else torch.stack([g, g]) for g in modes.gradient(ref)]

    yield "compile forward", lambda: build(p.call)(*xs), lambda: ref.call(*xs)
    yield "compile backward", backward, lambda: modes.gradient(ref)
    yield "compile dynamic shapes", lambda: backward(dynamic=True), lambda: modes.gradient(ref)
    yield "compile func.grad", lambda: build(gradient)(*xs), lambda: modes.gradient(ref)
    yield "compile func.jvp", lambda: [build(lambda *x: F.jvp(p.loss, x, p.u)[1])(*xs)], lambda: _slope(ref)
    yield "compile vmap of grad", lambda: build(F.vmap(gradient))(*doubled), twice
    yield "export", lambda: torch.export.export(_Call(p), xs).module()(*xs), lambda: ref.call(*xs)


def _nothing() -> Numbers:
    return []


def _torch_checks(p: Problem) -> Iterator[Way]:
    def opcheck() -> str:
        if transforms.operator_of(p.fn) is None:
            raise Inapplicable("not an operator")
        return transforms.opcheck_says(p)

    def gradcheck(check: Callable[..., bool], **options: bool) -> str:
        if any(x.dtype not in (torch.float64, torch.complex128) for x in p.primals):
            raise Inapplicable("needs double precision")
        check(p.call, tuple(x.detach().clone().requires_grad_() for x in p.primals), **options)
        return ""

    both = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    yield "opcheck", opcheck, _nothing
    yield "gradcheck", lambda: gradcheck(torch.autograd.gradcheck, **both), _nothing
    twice = {"check_fwd_over_rev": True, "check_batched_grad": True}
    yield "gradgradcheck", lambda: gradcheck(torch.autograd.gradgradcheck, **twice), _nothing


def _autocast(p: Problem, ref: Problem) -> Iterator[Way]:
    def narrow() -> Numbers:
        if any(x.is_complex() for x in p.primals):
            raise Inapplicable("autocast leaves complex tensors alone")
        single = p.at([x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in p.leaves])
        with torch.autocast(p.primals[0].device.type, dtype=torch.bfloat16):
            return modes.gradient(single)  # asserts that a gradient has its input's dtype

    yield "autocast bfloat16", narrow, lambda: [None if g is None else g.float() for g in modes.gradient(ref)]
