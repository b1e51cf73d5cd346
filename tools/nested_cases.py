"""The operators on nested tensors, each with its arguments: what docs/nested_operators.md lists.

A `Case` is a call, written once over the functions of `torch_manualgrad.nested` or PyTorch's of the same names, and a
reference for the components of the result, made of dense torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_manualgrad.nested.operators import LIMITS

__all__ = ["CASES", "WIDTH", "Case", "Pieces"]

LENGTHS, WIDTH = (2, 5, 3, 4), 4
LONGEST, TOTAL = max(LENGTHS), sum(LENGTHS)
ROWS = tuple((n, WIDTH) for n in LENGTHS)
HEADS = tuple((2, n, 3) for n in LENGTHS)
SQUARES = ((3, WIDTH),) * 2  # a ragged dim whose components have equal sizes

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
        limit: the entry of `LIMITS` that it is an example of, or "".
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
