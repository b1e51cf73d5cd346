"""Derivatives of PyTorch's functions under our rules next to JAX's. Finite differences decide where the two differ.

``python tests/against_jax/compare.py docs/against_jax.md`` writes the document; without a path, differences are printed.

Both libraries agree on tangents. Their cotangents of complex numbers are conjugates of each other: ours is
``conj(vjp_jax(conj(g)))``. A Hessian-vector product is the derivative, along a direction, of the gradient of Re <g, f(x)>.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from functions import FUNCTIONS, Function
from torch import Tensor

import torch_manualgrad as mg

TOLERANCE = 1e-9  # of the two libraries, relative, at points of any scale
HESSIAN = "Hessian-vector product"


@dataclass(frozen=True)
class Difference:
    """An entry in which the libraries differ.

    Attributes:
        derivative: "value", "vjp", "jvp" or one of the Hessian-vector products.
        point: the inputs of an elementwise function, or the entry.
        truth: by finite differences; None where they do not settle, as at a kink or a pole.
        wrong: "JAX", "ours" or "both" where there is a truth, else "".
    """

    function: str
    dtype: str
    derivative: str
    point: str
    ours: complex
    jax: complex
    truth: complex | None
    wrong: str


# -- where it is evaluated --------------------------------------------------------------------------------------------


def inputs_of(function: Function, dtype: torch.dtype) -> list[Tensor]:
    """Random inputs; for an elementwise function, random points of its domain and the edges in all combinations."""
    generator = torch.Generator().manual_seed(sum(map(ord, function.name)))
    if not function.elementwise:
        found = [torch.randn(shape, dtype=dtype, generator=generator) for shape in function.inputs]
        return [x.contiguous() for x in (function.prepare(*found) if function.prepare else found)]
    random, edges = [], []
    for low, high in function.domains:
        start, end = max(low, min(-3.0, high - 6)), min(high, max(3.0, low + 6))
        random.append(start + (end - start) * (0.02 + 0.96 * torch.rand(8, dtype=torch.float64, generator=generator)))
        edges.append(torch.tensor([e for e in function.edges if low <= e <= high], dtype=torch.float64))
    if dtype.is_complex:
        return [torch.complex(x, torch.randn(8, dtype=torch.float64, generator=generator)) for x in random]
    grids = torch.meshgrid(*edges, indexing="ij")
    return [torch.cat([x, grid.reshape(-1)]) for x, grid in zip(random, grids)]


def directions(inputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in inputs]


# -- the derivatives --------------------------------------------------------------------------------------------------


def gradients(y: Tensor, inputs: Sequence[Tensor], cotangent: Tensor | None = None, **options: Any) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(y, inputs, cotangent, allow_unused=True, **options)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def our_derivatives(
    function: Function, inputs: Sequence[Tensor], cotangent: Tensor, tangents: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """By derivative, the Hessian-vector product in two modes."""
    f, given = function.torch, (tuple(inputs), tuple(tangents))
    tracked = [x.detach().requires_grad_() for x in inputs]
    first = gradients(f(*tracked), tracked, cotangent, create_graph=True)
    slope = sum((g * t.conj()).real.sum() if g.is_complex() else (g * t).sum() for g, t in zip(first, tangents))
    return {
        "value": [f(*inputs)],
        "vjp": [g.detach() for g in first],
        "jvp": [torch.func.jvp(f, *given)[1]],
        HESSIAN: gradients(slope, tracked),  # type: ignore[arg-type]
        f"{HESSIAN}, forward over reverse": list(
            torch.func.jvp(lambda *x: torch.func.vjp(f, *x)[1](cotangent), *given)[1]
        ),
    }


def jax_derivatives(
    function: Function, inputs: Sequence[Tensor], cotangent: Tensor, tangents: Sequence[Tensor]
) -> dict[str, list[Tensor]]:
    """The same, in our conventions."""
    import jax
    import jax.numpy as jnp
    import jax.scipy.linalg
    import jax.scipy.special
    import numpy as np

    jax.config.update("jax_enable_x64", True)
    names = {"jax": jax, "jnp": jnp, "lax": jax.lax, "nn": jax.nn, "jsp": jax.scipy, "np": np}
    f = eval(function.jax, names)

    def pulled(g: Any, *x: Any) -> Any:
        y, pull = jax.vjp(f, *x)
        return [d.conj() for d in pull(jnp.asarray(g.conj(), y.dtype))]

    def every(x: Any, g: Any, t: Any) -> Any:
        y, dy = jax.jvp(f, x, t)
        d, dd = jax.jvp(lambda *x: pulled(g, *x), x, t)
        return {"value": [y], "jvp": [dy], "vjp": d, HESSIAN: dd}

    x, g, t = ([jnp.asarray(v.resolve_conj().numpy()) for v in vs] for vs in (inputs, [cotangent], tangents))
    found = jax.jit(every)(tuple(x), g[0], tuple(t))
    return {name: [torch.from_numpy(np.array(v)) for v in vs] for name, vs in found.items()}


# -- the truth --------------------------------------------------------------------------------------------------------

_STENCIL = (-25 / 12, 4.0, -3.0, 4 / 3, -1 / 4)  # f' from f(0), f(h), ..., f(4 h), of fourth order


def finite_difference(
    f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], tangents: Sequence[Tensor], elementwise: bool
) -> list[Tensor]:
    """The derivative of f along the tangents; nan where it does not settle.

    It settles where steps of two sizes, to the left and to the right, agree, and rounding does not hide it. Elementwise, steps are relative to the point.
    """
    scale: Any = 1.0
    if elementwise:
        scale = torch.stack([torch.where(x == 0, 1.0, x.abs()) for x in inputs]).amin(0)

    def one_sided(h: float) -> list[tuple[Tensor, Tensor]]:
        """The derivative, and what rounding may have done to it."""
        points = [f(*[x + k * h * scale * t for x, t in zip(inputs, tangents)]) for k in range(5)]
        slopes = [sum(w * p for w, p in zip(_STENCIL, ps)) / (h * scale) for ps in zip(*points)]
        noise = [2e-15 * torch.stack([p.abs() for p in ps]).amax(0) / abs(h * scale) for ps in zip(*points)]
        return list(zip(slopes, noise))  # type: ignore[arg-type]

    found = []
    for parts in zip(*map(one_sided, (1e-3, 5e-4, -1e-3, -5e-4))):
        mean = sum(slope for slope, _ in parts) / len(parts)
        error = torch.stack([(slope - mean).abs() + noise for slope, noise in parts]).amax(0)
        found.append(torch.where(error <= 1e-5 * mean.abs() + 1e-9, mean, torch.nan))
    return found


def truth(
    function: Function,
    derivative: str,
    inputs: Sequence[Tensor],
    cotangent: Tensor,
    tangents: Sequence[Tensor],
    place: int,
) -> Tensor:
    """A derivative with respect to, or of, the entries of one input, by finite differences.

    Those of a Hessian-vector product are of the gradient under the rules, which the vjp is compared for.
    """

    def along(f: Callable[..., Sequence[Tensor]], t: Sequence[Tensor]) -> list[Tensor]:
        return finite_difference(f, inputs, t, function.elementwise)

    def value(*x: Tensor) -> list[Tensor]:
        return [function.torch(*x)]

    def gradient(*x: Tensor) -> list[Tensor]:
        tracked = [v.detach().requires_grad_() for v in x]
        return gradients(function.torch(*tracked), tracked, cotangent)

    if derivative == "jvp":
        return along(value, tangents)[0]
    if derivative == HESSIAN:
        return along(gradient, tangents)[place]
    x = inputs[place]
    units = (
        [torch.ones_like(x)] if function.elementwise else [*torch.eye(x.numel(), dtype=x.dtype).reshape(-1, *x.shape)]
    )
    parts = []
    for unit in (1.0, 1j)[: 1 + x.is_complex()]:
        part = []
        for u in units:
            t = [u * unit if i == place else torch.zeros_like(v) for i, v in enumerate(inputs)]
            pairing = (cotangent.conj() * along(value, t)[0]).real
            part.append(pairing if function.elementwise else pairing.sum())
        parts.append(part[0] if function.elementwise else torch.stack(part).reshape(x.shape))
    return torch.complex(*parts) if x.is_complex() else parts[0]


# -- the comparison ---------------------------------------------------------------------------------------------------


def agrees(x: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Relative to the entry, or a thousandth of the largest finite one of its kind."""
    close = (x - y).abs() <= tolerance * torch.maximum(x.abs(), y.abs()).clamp(1e-6)
    return close | (x == y) | (x.isnan() & y.isnan())


def compare(function: Function, dtype: torch.dtype, *rules: str) -> Iterator[Difference]:
    """Every entry in which a derivative under ``override(*rules)`` differs from JAX's."""
    inputs = inputs_of(function, dtype)
    cotangent, tangents = directions([function.torch(*inputs)], 1)[0], directions(inputs, 2)
    theirs = jax_derivatives(function, inputs, cotangent, tangents)
    with mg.override(*rules):
        ours = our_derivatives(function, inputs, cotangent, tangents)
        for what, found in ours.items():
            derivative = what.partition(",")[0]
            for place, (x, y) in enumerate(zip(found, theirs[derivative], strict=True)):
                x, y = x.resolve_conj(), y.to(x.dtype)
                if not (differs := ~agrees(x, y, TOLERANCE)).any():
                    continue
                known = torch.full_like(x, torch.nan)
                if derivative != "value":
                    known = truth(function, derivative, inputs, cotangent, tangents, place)
                for index in map(tuple, differs.nonzero().tolist()):
                    point = f"entry {list(index)} of input {place}"
                    if function.elementwise:
                        point = ", ".join(f"{v[index].item():.6g}" for v in inputs)
                    yield _judged(function, dtype, what, point, x[index], y[index], known[index])


def _judged(
    function: Function, dtype: torch.dtype, what: str, point: str, ours: Tensor, jax: Tensor, known: Tensor
) -> Difference:
    wrong = ""
    if not known.isnan():
        right = [bool(agrees(x, known, 1e-4)) for x in (ours, jax)]
        wrong = {(True, False): "JAX", (False, True): "ours", (False, False): "both"}.get(tuple(right), "")  # type: ignore[arg-type]
    name = str(dtype).removeprefix("torch.")
    return Difference(
        function.name, name, what, point, ours.item(), jax.item(), None if known.isnan() else known.item(), wrong
    )


def cases() -> Iterator[tuple[Function, torch.dtype]]:
    for function in FUNCTIONS:
        yield from ((function, torch.float64),) * function.is_real
        yield from ((function, torch.complex128),) * function.is_complex


# -- the document -----------------------------------------------------------------------------------------------------

_ABOUT = """# Next to JAX

Generated by `make jax`. {functions} functions that PyTorch and JAX both have, in {cases} cases (real and complex): values,
vjp, jvp and Hessian-vector products in two modes, at random points and at edges, under `override("*")`, next to those of
JAX {version}. Where the two differ by more than 1e-9, finite differences decide: one-sided ones of fourth order, with two
steps on each side, which have to agree, and be free of rounding.

The conventions differ in one point: JAX's cotangent of a complex number is the conjugate of PyTorch's.

Ours is wrong in {ours} entries.

## Where JAX is wrong

The first entry of each function and derivative.

| function | dtype | derivative | at | ours | JAX | finite differences | entries |
| --- | --- | --- | --- | --- | --- | --- | --- |
{wrong}

## Points without a derivative, with different conventions

Kinks, ends of domains and poles, where finite differences do not settle.

| function | dtype | derivative | at | ours | JAX | entries |
| --- | --- | --- | --- | --- | --- | --- |
{conventions}
"""


def _number(x: complex | None) -> str:
    if x is None:
        return ""
    return f"{x:.6g}" if isinstance(x, float) else f"{x.real:.6g}{x.imag:+.6g}i"


def _rows(found: Sequence[Difference], with_truth: bool) -> str:
    groups: dict[tuple[str, ...], list[Difference]] = {}
    for d in found:
        groups.setdefault((d.function, d.dtype, d.derivative.partition(",")[0]), []).append(d)
    rows = []
    for key, ds in groups.items():
        d = ds[0]
        values = [_number(d.ours), _number(d.jax), *([_number(d.truth)] if with_truth else [])]
        rows.append(f"| {' | '.join([*key, d.point, *values, str(len(ds))])} |")
    return "\n".join(rows)


def document(found: Sequence[Difference]) -> str:
    import jax

    return _ABOUT.format(
        functions=len(FUNCTIONS),
        cases=len(list(cases())),
        version=jax.__version__,
        ours=sum(d.wrong in ("ours", "both") for d in found) or "no",
        wrong=_rows([d for d in found if d.wrong == "JAX"], True),
        conventions=_rows([d for d in found if not d.wrong and d.derivative != "value"], False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("document", nargs="?", type=Path)
    parser.add_argument("-k", default="", help="only functions whose name contains this")
    arguments = parser.parse_args()
    found = []
    for function, dtype in cases():
        if arguments.k in function.name:
            for d in compare(function, dtype, "*"):
                found.append(d)
                if arguments.document is None or d.wrong in ("ours", "both"):
                    print(d, flush=True)
    if arguments.document is not None:
        arguments.document.write_text(document(found))


if __name__ == "__main__":
    main()
