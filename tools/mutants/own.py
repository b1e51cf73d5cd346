"""Custom operators with a wrong fake kernel, a wrong vmap rule, or a wrong convention at ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torch_manualgrad as mg

from .subject import COMPLEX, REAL, Mutant, Subject

_numbers = itertools.count()
Unary = Callable[[Tensor], Tensor]

# x -> f(x), and the cotangent of x given g and x; every other derivative follows from these
FUNCTIONS: dict[str, tuple[Unary, Callable[[Tensor, Tensor], Tensor]]] = {
    "sin": (torch.sin, lambda g, x: g * x.cos().conj()),
    "exp": (torch.exp, lambda g, x: g * x.exp().conj()),
    "tanh": (torch.tanh, lambda g, x: g * (1 - x.tanh() ** 2).conj()),
    "square": (lambda x: x * x, lambda g, x: g * (2 * x).conj()),
    "turned": (lambda x: x.mT.clone(), lambda g, x: g.mT),
    "sums": (lambda x: x.cumsum(-1), lambda g, x: g.flip(-1).cumsum(-1).flip(-1)),
    "centered": (lambda x: x - x.mean(), lambda g, x: g - g.mean()),
    "gram": (lambda x: x @ x.mT, lambda g, x: (g + g.mT) @ x.conj()),
    "inverse": (torch.linalg.inv, lambda g, x: -(x.inverse().mH @ g @ x.inverse().mH)),
    "scaled": (lambda x: x * x.sum(), lambda g, x: g * x.sum().conj() + (g * x.conj()).sum()),
}
# cotangent and x -> the cotangents of both, given that of g f'(x)
SECOND: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "sin": lambda h, g, x: (h * x.cos(), -h * g * x.sin()),
    "exp": lambda h, g, x: (h * x.exp(), h * g * x.exp()),
    "tanh": lambda h, g, x: (h * (1 - x.tanh() ** 2), -2 * h * g * x.tanh() * (1 - x.tanh() ** 2)),
    "square": lambda h, g, x: (h * 2 * x, h * 2 * g),
}
FAKES: dict[str, Unary] = {
    "strides": lambda x: x.mT.contiguous().mT,
    "dtype": lambda x: x.to(torch.complex64 if x.is_complex() else torch.float32),
    "shape": lambda x: torch.cat([x, x[:1]]),
}
# what is done with the results of a batch, which is in the first dim
MIXTURES: dict[str, Unary] = {
    "first": lambda out: out[:1].expand_as(out).clone(),
    "rolled": lambda out: out.roll(1, 0),
    "mean": lambda out: out.mean(0, keepdim=True).expand_as(out).clone(),
}


def points(*shape: int, dtype: torch.dtype = REAL) -> Tensor:
    made = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape)))
    return made + 2 * torch.eye(*shape, dtype=dtype)


def defined(
    f: Unary, vjp: Callable[[Tensor, Tensor], Any], fake: Callable[..., Any] | None = None, vmap: Any = None
) -> mg.CustomOp:
    """A custom operator of one tensor."""
    op = mg.custom_op(f"mutants::op{next(_numbers)}(Tensor x) -> Tensor")(lambda x: f(x))
    op.impl_save_for_backward(lambda inputs, output: inputs.x)
    op.impl_backward(lambda ctx, x, g: {"x": vjp(g, x)})
    if fake is not None:
        op.impl_fake(fake)
    if vmap is not None:
        op.impl_vmap(vmap)
    return op


def _subject(name: str, op: Any, dtypes: tuple[torch.dtype, ...] = (REAL, COMPLEX)) -> Subject:
    return Subject(name, op, [mg.Sample(points(3, 3, dtype=d)) for d in dtypes])


def _fake_mutants() -> Iterator[Mutant]:
    for (name, (f, vjp)), (what, change) in itertools.product(FUNCTIONS.items(), FAKES.items()):

        def right(name: str = name, f: Unary = f, vjp: Any = vjp) -> Subject:
            return _subject(f"operator {name}", defined(f, vjp))

        def wrong(name: str = name, f: Unary = f, vjp: Any = vjp, change: Unary = change) -> Subject:
            return _subject(name, defined(f, vjp, fake=lambda x: change(f(x))))

        yield Mutant("fake kernel", f"{name}: other {what}", name, lambda r=right, w=wrong: (w(), r()))


def _vmap_mutants() -> Iterator[Mutant]:
    for (name, (f, vjp)), (what, mix) in itertools.product(FUNCTIONS.items(), MIXTURES.items()):

        def right(name: str = name, f: Unary = f, vjp: Any = vjp) -> Subject:
            return _subject(f"operator {name}", defined(f, vjp))

        def wrong(name: str = name, f: Unary = f, vjp: Any = vjp, mix: Unary = mix) -> Subject:
            def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
                return mix(torch.stack([f(row) for row in x.unbind(in_dims.x)])), 0

            return _subject(name, defined(f, vjp, vmap=vmap))

        yield Mutant("vmap rule", f"{name}: {what}", name, lambda r=right, w=wrong: (w(), r()))
    for name, (what, mix) in itertools.product(SECOND, MIXTURES.items()):
        yield Mutant(
            "vmap rule",
            f"{name}, in the backward: {what}",
            f"backward of {name}",
            lambda name=name, mix=mix: (_backward_operator(name, mix), _backward_operator(name, None)),
        )


def _backward_operator(name: str, mix: Unary | None) -> Subject:
    """The function, whose vjp is an operator of its own, with a vmap rule."""
    f, vjp = FUNCTIONS[name]
    pull = mg.custom_op(f"mutants::op{next(_numbers)}(Tensor g, Tensor x) -> Tensor")(lambda g, x: vjp(g, x))
    pull.impl_save_for_backward(lambda inputs, output: (inputs.g, inputs.x))
    pull.impl_backward(lambda ctx, saved, h: dict(zip("gx", SECOND[name](h, *saved))))

    def batched(info: Any, in_dims: Any, g: Tensor, x: Tensor) -> tuple[Tensor, int]:
        rows = [y.unbind(d) if d is not None else [y] * info.batch_size for y, d in zip((g, x), in_dims)]
        out = torch.stack([vjp(*row) for row in zip(*rows)])
        return (out if mix is None else mix(out)), 0

    pull.impl_vmap(batched)
    return _subject(f"operator {name}, operator backward", defined(f, pull), dtypes=(REAL,))


# x -> the largest or smallest of some numbers, kept as a dim of one where there are several
EXTREMA: dict[str, Unary] = {
    "largest": lambda x: x.amax((0, 1), True),
    "smallest": lambda x: x.amin((0, 1), True),
    "largest of rows": lambda x: x.amax(1, True),
    "smallest of rows": lambda x: x.amin(1, True),
    "largest of columns": lambda x: x.amax(0, True),
    "smallest of columns": lambda x: x.amin(0, True),
}
READOUTS: dict[str, tuple[Unary, Unary]] = {
    "": (lambda m: m.clone(), torch.ones_like),
    ", sine": (torch.sin, torch.cos),
    ", cubed": (lambda m: m**3, lambda m: 3 * m**2),
}


def _tie_mutants() -> Iterator[Mutant]:
    """At ties every one gets the whole gradient."""
    for (name, extremum), (after, (f, d)) in itertools.product(EXTREMA.items(), READOUTS.items()):

        def subject(
            share: bool, name: str = name + after, extremum: Unary = extremum, f: Unary = f, d: Unary = d
        ) -> Subject:
            def vjp(g: Tensor, x: Tensor) -> Tensor:
                m = extremum(x)
                mask = (x == m).to(x.dtype)
                dims = [i for i in range(2) if m.shape[i] == 1]
                return g * d(m) * (mask / mask.sum(dims, True) if share else mask)

            return _subject(f"operator {name}", defined(lambda x: f(extremum(x)), vjp), dtypes=(REAL,))

        yield Mutant("ties", name + after, name, lambda s=subject: (s(False), s(True)))


def own() -> Iterator[Mutant]:
    yield from _fake_mutants()
    yield from _vmap_mutants()
    yield from _tie_mutants()
