"""Every operator on nested tensors, measured against a loop over the components with dense torch.

A `Case` is a call, written once over the functions of `torch_manualgrad.nested` or PyTorch's of the same names, and a
reference for the components of the result. It is measured as a `Ragged` and as torch's nested tensors of both layouts,
through a loss on the components of the result: values, gradient, gradient of the gradient, and directional derivative.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor

from .. import nested
from ..nested import Ragged
from ..nested.operators import LIMITS

__all__ = ["CASES", "KINDS", "MEASURES", "Case", "measure"]

KINDS = ("Ragged", "strided", "jagged")
MEASURES = ("forward", "backward", "second order", "jvp")

Pieces = list[Tensor]


@dataclass(frozen=True)
class Case:
    """One operator with one choice of arguments.

    Attributes:
        name: in the table.
        call: (functions, nested tensors..., dense operands...) -> result.
        reference: (lists of components..., dense operands...) -> the result's pieces, in the order of `pieces`.
        shapes: of the components, for each nested argument; the ragged dim is the one in which they differ.
        dense: the shapes of the dense operands.
        random: whether the result has to be drawn from the same seed; the reference is then given the pieces too.
        limit: the limit in `LIMITS` of which it is an example, or "".
    """

    name: str
    call: Callable[..., Any]
    reference: Callable[..., Pieces]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    dense: tuple[tuple[int, ...], ...] = ()
    random: bool = False
    limit: str = ""

    def declared(self, kind: str, what: str) -> str:
        """Why this is declared to raise; empty if it is not."""
        return LIMITS.get((kind, what)) or LIMITS.get((kind, self.limit), "")


# -- the functions ----------------------------------------------------------------------------------------------------


def _stock_functions(layout: torch.layout) -> Any:
    """PyTorch's functions under the names of `torch_manualgrad.nested`."""
    here: dict[str, Any] = {}
    for name in nested.__all__:
        found = getattr(torch, name, None) or getattr(F, name, None)
        if found is not None:
            here[name] = found
    here["gelu"], here["dropout"], here["silu"], here["threshold"] = F.gelu, F.dropout, F.silu, F.threshold
    here["layer_norm"], here["vector_norm"] = F.layer_norm, torch.linalg.vector_norm
    here["to_padded_tensor"] = torch.nested.to_padded_tensor
    here["slice"] = lambda x, dim, start, end: x[(slice(None),) * dim + (slice(start, end),)]
    here["values"] = lambda x: x.values().reshape(-1, WIDTH)
    here["from_values"] = _jagged_from_values if layout is torch.jagged else _strided_from_values
    here["from_padded"] = _jagged_from_padded if layout is torch.jagged else _strided_from_padded
    return types.SimpleNamespace(**here)


def _jagged_from_values(like: Any, values: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, like.offsets())


def _strided_from_values(like: Any, values: Tensor) -> Any:
    parts = values.split([c.shape[0] for c in like.unbind()])
    return torch.nested.as_nested_tensor(list(parts))


def _jagged_from_padded(like: Any, padded: Tensor) -> Any:
    lengths = like.offsets().diff()
    return torch.nested.narrow(padded, 1, torch.zeros_like(lengths), lengths, layout=torch.jagged)


def _strided_from_padded(like: Any, padded: Tensor) -> Any:
    sizes = torch.tensor([list(c.shape) for c in like.unbind()])
    return torch.ops.aten._nested_from_padded(padded, sizes)


def _our_functions() -> Any:
    here = {name: getattr(nested, name) for name in nested.__all__}
    here["values"] = lambda x: x.values
    here["from_values"] = lambda like, values: Ragged(values, like.offsets, like.shape)
    here["from_padded"] = lambda like, padded: Ragged.from_padded(padded, like.lengths)
    return types.SimpleNamespace(**here)


_LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


def _functions(kind: str) -> Any:
    return _stock_functions(_LAYOUTS[kind]) if kind in _LAYOUTS else _our_functions()


def _made(kind: str, components: Sequence[Tensor]) -> Any:
    """The nested tensor of these components."""
    ragged = [d for d, sizes in enumerate(zip(*(c.shape for c in components))) if len(set(sizes)) > 1] or [0]
    if kind == "Ragged":
        return Ragged.from_components(components)
    if kind == "jagged" and ragged != [0]:
        made = torch.nested.as_nested_tensor([c.transpose(0, ragged[0]) for c in components], layout=torch.jagged)
        return made.transpose(1, ragged[0] + 1)
    return torch.nested.as_nested_tensor(list(components), layout=_LAYOUTS[kind])


def pieces(result: Any) -> Pieces:
    """The components of a result, of lists one after the other; in a list a dense tensor is one piece."""
    if isinstance(result, Ragged):
        return result.components()
    if isinstance(result, (list, tuple)):
        return [p for r in result for p in ([r] if isinstance(r, Tensor) and not r.is_nested else pieces(r))]
    return list(result.unbind()) if result.dim() else [result]


# -- measuring --------------------------------------------------------------------------------------------------------


def _inputs(case: Case) -> Pieces:
    generator = torch.Generator().manual_seed(0)
    shapes = [s for argument in case.shapes for s in argument] + list(case.dense)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def _split(case: Case, inputs: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The inputs as lists of components, and dense operands."""
    lists, at = [], 0
    for argument in case.shapes:
        lists.append(list(inputs[at : at + len(argument)]))
        at += len(argument)
    return lists, list(inputs[at:])


def _result(case: Case, kind: str, inputs: Sequence[Tensor]) -> Pieces:
    lists, dense = _split(case, inputs)
    torch.manual_seed(0)
    return pieces(case.call(_functions(kind), *(_made(kind, c) for c in lists), *dense))


def _expected(case: Case, kind: str, inputs: Sequence[Tensor]) -> Pieces:
    lists, dense = _split(case, inputs)
    drawn = (_result(case, kind, [x.detach() for x in _inputs(case)]),) if case.random else ()
    return case.reference(*lists, *dense, *drawn)


def _loss(found: Pieces) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, p in enumerate(found):
        weight = torch.arange(1.0, 1 + p.numel(), dtype=p.dtype).reshape(p.shape) + i
        total = total + (weight.cos() * p.sin()).sum()
    return total


def _take(what: str, function: Callable[[Sequence[Tensor]], Pieces], inputs: Pieces) -> list[Tensor]:
    """The tensors that are compared."""
    if what == "forward":
        return function(inputs)
    if what == "jvp":
        with fwAD.dual_level():
            out = _loss(function([fwAD.make_dual(x, (1 + x).cos()) for x in inputs]))
            tangent = fwAD.unpack_dual(out).tangent
            return [out.detach(), torch.zeros_like(out) if tangent is None else tangent]
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(_loss(function(leaves)), leaves, create_graph=what == "second order", allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, first)]
    if what == "backward":
        return filled
    along = sum((g * (2 + x).detach().sin()).sum() for g, x in zip(filled, leaves))
    second = torch.autograd.grad(along, leaves, allow_unused=True)  # type: ignore[arg-type]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, second)]


def measure(case: Case, kind: str, what: str) -> tuple[str, str]:
    """Measure one case.

    Args:
        case: the case.
        kind: of `KINDS`; for the nested tensors it is PyTorch's calls that are measured, under any override that is
            active.
        what: of `MEASURES`.

    Returns:
        "right", "wrong" or "raises", and why.
    """
    inputs = _inputs(case)
    expected = _take(what, lambda given: _expected(case, kind, given), inputs)
    try:
        found = _take(what, lambda given: _result(case, kind, given), inputs)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    if [f.shape for f in found] != [e.shape for e in expected]:
        return "wrong", f"shapes {[list(f.shape) for f in found]} in place of {[list(e.shape) for e in expected]}"
    apart = max(float((f - e).detach().abs().max()) for f, e in zip(found, expected))
    return ("right", "") if apart < 1e-9 else ("wrong", f"off by {apart:.1e}")


# -- the cases --------------------------------------------------------------------------------------------------------

LENGTHS, WIDTH = (2, 5, 3, 4), 4
LONGEST, TOTAL = max(LENGTHS), sum(LENGTHS)
ROWS = tuple((n, WIDTH) for n in LENGTHS)
HEADS = tuple((2, n, 3) for n in LENGTHS)
SQUARES = ((3, WIDTH),) * 2  # a ragged dim in which the components' sizes are equal


def _each(function: Callable[..., Tensor]) -> Callable[..., Pieces]:
    """The reference of a function that treats components one by one; dense operands are the same for all."""

    def reference(components: Sequence[Tensor], *dense: Tensor) -> Pieces:
        return [function(c, *dense) for c in components]

    return reference


def _pairs(function: Callable[..., Tensor]) -> Callable[..., Pieces]:
    def reference(first: Sequence[Tensor], second: Sequence[Tensor]) -> Pieces:
        return [function(a, b) for a, b in zip(first, second)]

    return reference


def _all(function: Callable[[Tensor], Tensor]) -> Callable[..., Pieces]:
    """The reference of a function that reduces the whole batch."""
    return lambda components: [function(torch.cat([c.reshape(-1) for c in components]))]


def _pieces_of(function: Callable[[Tensor], Sequence[Tensor]]) -> Callable[..., Pieces]:
    """The reference of a function with several nested results: all components of the first, then of the second, ..."""
    return lambda components: [p for several in zip(*map(function, components)) for p in several]


def _reduction(what: str, name: str, plain: Callable[..., Any], dim: Any, **keep: bool) -> Case:
    """A reduction over ``dim``, or over all dims for None; of max and min the values."""

    def values(found: Any) -> Any:
        return found[0] if isinstance(found, tuple) else found

    if dim is None:
        return Case(f"{name}, {what}", lambda n, x: getattr(n, name)(x), _all(plain), (ROWS,))
    inside = tuple(d - 1 for d in dim) if isinstance(dim, tuple) else dim - 1
    return Case(
        f"{name}, {what}",
        lambda n, x: values(getattr(n, name)(x, dim=dim, **keep)),
        _each(lambda c: values(plain(c, dim=inside, **keep))),
        (ROWS,),
    )


def _reductions() -> Iterator[Case]:
    for name in ("sum", "mean", "amax", "amin", "max", "min", "prod", "logsumexp", "var", "std", "vector_norm"):
        plain = torch.linalg.vector_norm if name == "vector_norm" else getattr(torch, name)
        yield _reduction("dense dim", name, plain, 2)
        yield _reduction("ragged dim", name, plain, 1)
        if name in ("sum", "mean", "amax"):
            yield _reduction("keepdim", name, plain, 2, keepdim=True)
            yield _reduction("two dims", name, plain, (1, 2))
        if name != "logsumexp":
            yield _reduction("all", name, plain, None)


def _maps() -> Iterator[Case]:
    one, two = (ROWS,), (ROWS, ROWS)
    for name in ("softmax", "log_softmax", "cumsum"):
        plain = getattr(torch, name)
        for what, dim in (("dense", 2), ("ragged", 1)):
            yield Case(
                f"{name}, {what} dim",
                lambda n, x, name=name, dim=dim: getattr(n, name)(x, dim),
                _each(lambda c, f=plain, dim=dim: f(c, dim - 1)),
                one,
            )
    for approximate in ("none", "tanh"):
        yield Case(
            f"gelu, {approximate}",
            lambda n, x, a=approximate: n.gelu(x, approximate=a),
            _each(lambda c, a=approximate: F.gelu(c, approximate=a)),
            one,
        )
    yield Case("relu", lambda n, x: n.relu(x), _each(torch.relu), one)
    yield Case("silu", lambda n, x: n.silu(x), _each(F.silu), one)
    yield Case("threshold", lambda n, x: n.threshold(x, 0.3, -1.0), _each(lambda c: F.threshold(c, 0.3, -1.0)), one)
    for name in ("add", "sub", "mul", "div"):
        yield Case(f"{name}, nested", lambda n, x, y, f=name: getattr(n, f)(x, y), _pairs(getattr(torch, name)), two)
    yield Case("mul, number", lambda n, x: n.mul(x, 2.5), _each(lambda c: 2.5 * c), one)
    yield Case("mul, dense (D,)", lambda n, x, w: n.mul(x, w), _each(torch.mul), one, ((4,),))
    for name, shape in (("(B, 1, D)", (4, 1, WIDTH)), ("(B, L, D)", (4, LONGEST, WIDTH))):
        yield Case(
            f"mul, dense {name}",
            lambda n, x, w: n.mul(x, w),
            lambda cs, w: [c * w[b, : len(c)] for b, c in enumerate(cs)],
            one,
            (shape,),
        )
    yield Case(
        "dropout",
        lambda n, x: n.dropout(x, 0.4, True),
        lambda cs, drawn: [c * (p.detach() != 0) / 0.6 for c, p in zip(cs, drawn)],
        one,
        random=True,
    )


def _layers() -> Iterator[Case]:
    one = (ROWS,)
    yield Case(
        "matmul, (n, l) by (l, m)",
        lambda n, x, y: n.matmul(n.transpose(x, 1, 2), y),
        _pairs(lambda a, b: a.mT @ b),
        (ROWS, ROWS),
    )
    yield Case(
        "matmul, (l, k) by (k, l)",
        lambda n, x, y: n.matmul(x, n.transpose(y, 1, 2)),
        _pairs(lambda a, b: a @ b.mT),
        (ROWS, ROWS),
        limit="several ragged dims",
    )
    yield Case("matmul, dense", lambda n, x, w: n.matmul(x, w), _each(torch.matmul), one, ((4, 3),))
    yield Case(
        "matmul, dense (B, k, m)",
        lambda n, x, w: n.matmul(x, w),
        lambda cs, w: [c @ v for c, v in zip(cs, w)],
        one,
        ((4, 4, 3),),
    )
    yield Case("linear", lambda n, x, w, b: n.linear(x, w, b), _each(F.linear), one, ((3, 4), (3,)))
    yield Case(
        "layer_norm",
        lambda n, x, w, b: n.layer_norm(x, (4,), w, b),
        _each(lambda c, w, b: F.layer_norm(c, (4,), w, b)),
        one,
        ((4,), (4,)),
    )
    yield Case(
        "rms_norm",
        lambda n, x, w: n.rms_norm(x, (4,), w),
        _each(lambda c, w: c * (c.square().mean(-1, keepdim=True) + torch.finfo(c.dtype).eps).rsqrt() * w),
        one,
        ((WIDTH,),),
    )
    for causal in (False, True):
        yield Case(
            f"attention{', causal' * causal}",
            lambda n, q, k, v, c=causal: n.scaled_dot_product_attention(q, k, v, is_causal=c),
            lambda qs, ks, vs, c=causal: [_attention(*qkv, c) for qkv in zip(qs, ks, vs)],
            (HEADS, HEADS, HEADS),
        )


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def _structure() -> Iterator[Case]:
    one = (ROWS,)
    for index in (1, -1):
        yield Case(f"select(0, {index})", lambda n, x, i=index: n.select(x, 0, i), lambda cs, i=index: list(cs[i]), one)
    for dim, index in ((1, 0), (1, -1), (-1, 0), (-1, -1)):
        yield Case(
            f"select({dim}, {index})",
            lambda n, x, d=dim, i=index: n.select(x, d, i),
            _each(lambda c, d=dim, i=index: c.select(d if d < 0 else d - 1, i)),
            one,
        )
    yield Case("slice, batch", lambda n, x: n.slice(x, 0, 1, 3), lambda cs: list(cs[1:3]), one)
    yield Case("slice, ragged dim", lambda n, x: n.slice(x, 1, 0, 2), _each(lambda c: c[0:2]), one)
    yield Case("slice, dense dim", lambda n, x: n.slice(x, 2, 1, 3), _each(lambda c: c[:, 1:3]), one)
    yield Case(
        "split_with_sizes",
        lambda n, x: n.split_with_sizes(x, [1, 3], -1),
        _pieces_of(lambda c: c.split([1, 3], -1)),
        one,
    )
    yield Case("split", lambda n, x: n.split(x, 3, -1), _pieces_of(lambda c: c.split(3, -1)), one)
    yield Case("chunk", lambda n, x: n.chunk(x, 2, -1), _pieces_of(lambda c: c.chunk(2, -1)), one)
    yield Case("chunk, batch", lambda n, x: n.chunk(x, 2, 0), lambda cs: list(cs), one)
    yield Case(
        "chunk, ragged dim",
        lambda n, x: n.chunk(x, 2, 1),
        _pieces_of(lambda c: c.chunk(2, 0)),
        one,
        limit="pieces of a ragged dim",
    )
    yield Case("chunk, equal sizes", lambda n, x: n.chunk(x, 2, 1), _pieces_of(lambda c: c.chunk(2, 0)), (SQUARES,))
    yield Case("unbind", lambda n, x: n.unbind(x), lambda cs: list(cs), one)
    yield Case("unbind, dense dim", lambda n, x: n.unbind(x, -1), _pieces_of(lambda c: c.unbind(-1)), one)
    yield Case("transpose", lambda n, x: n.transpose(x, 1, 2), _each(lambda c: c.mT), one)
    yield Case(
        "to_padded",
        lambda n, x: n.to_padded_tensor(x, 0.5),
        _each(lambda c: F.pad(c, (0, 0, 0, LONGEST - len(c)), value=0.5)),
        one,
    )
    yield Case(
        "from_padded",
        lambda n, x, padded: n.from_padded(x, padded),
        lambda cs, padded: [p[: len(c)] for c, p in zip(cs, padded)],
        one,
        ((4, LONGEST, WIDTH),),
    )
    yield Case(
        "to values",
        lambda n, x: n.values(x),
        lambda cs: list(torch.cat(cs)),
        one,
    )
    yield Case(
        "from values",
        lambda n, x, values: n.from_values(x, values),
        lambda cs, values: list(values.split(LENGTHS)),
        one,
        ((TOTAL, WIDTH),),
    )


CASES: tuple[Case, ...] = (*_layers(), *_maps(), *_reductions(), *_structure())
