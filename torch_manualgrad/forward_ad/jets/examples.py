"""Examples of a batch in one series: an operator that mixes examples raises.

With ``batch_dims`` all examples share the directions of a Laplacian. That is right only if the function treats each
example separately. So a jet has the number of the example that each of its entries depends on. The effect of an
operator on these numbers is found once for given shapes: its rule runs on random numbers, along tangents scaled by a
power of two for each example. The ratio of two tangents then identifies the example exactly, in any precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.internals import apart, constant_in_graphs, value_of, values_readable

from .table import jet_rule
from .tensor import Space, is_jet
from .trace import decode, encode

__all__ = ["first_examples", "follow", "with_dim", "without_dim"]

_BITS = 3  # of an example's number per run: tangents are scaled by up to 2^7
_READ = 2**16  # integer tensors of at most this many elements are part of a call's cache key
_AT_MOST = 8192
NONE = -1  # an entry that depends on no example

_examples: list[Tensor] = []  # the numbers of examples, by their marks on a jet
_places: dict[Any, int] = {}
_found: dict[Any, Any] = {}


class _Mixed(Exception):
    """An entry depends on several examples."""


class _Like(NamedTuple):
    """A tensor in a call.

    Attributes:
        shape, dtype, device: of the tensor.
        examples: of a jet.
        values: of integers, as bytes; None if unknown.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    examples: int | None
    values: bytes | None


@constant_in_graphs
def first_examples(shape: tuple[int, ...], batch_dims: int) -> int:
    """The marks of examples for an argument whose first dimensions are the batch."""
    batch = shape[:batch_dims]
    with apart():
        return _place(torch.arange(math.prod(batch), device="cpu").reshape(*batch, *[1] * (len(shape) - batch_dims)))


@constant_in_graphs
def without_dim(examples: int | None, dim: int) -> int | None:
    """The marks of one entry of a dimension; None if the entries belong to several examples."""
    with apart():
        numbers = None if examples is None else _examples[examples]
        return None if numbers is None or numbers.shape[dim] > 1 else _place(numbers.squeeze(dim))


@constant_in_graphs
def with_dim(examples: int | None, dim: int) -> int | None:
    """The marks of tensors stacked along a new dimension."""
    with apart():
        return None if examples is None else _place(_examples[examples].unsqueeze(dim))


def _place(numbers: Tensor) -> int:
    key = (tuple(numbers.shape), numbers.numpy().tobytes())
    if key not in _places:
        _places[key] = len(_examples)
        _examples.append(numbers)
    return _places[key]


def follow(
    space: Space, name: str, rule: Callable[..., Any], elementwise: bool, args: Any, kwargs: Any, found: Any
) -> None:
    """Mark the results of an operator with the examples that they depend on.

    Args:
        space: of the jets.
        name: of the operator.
        rule: its rule for jets.
        elementwise: whether it acts on each entry separately.
        args, kwargs: of the call.
        found: the results; jets among them are marked.

    Raises:
        ValueError: it mixes examples.
    """
    results = found if isinstance(found, (list, tuple)) else [found]
    jets = [x for x in results if _has_series(space, x)]
    if all(x.examples is not None for x in jets):
        return
    compiling = torch.compiler.is_dynamo_compiling()
    if elementwise and not compiling and len(jets) == 1:
        given = [x.examples for x in (*args, *kwargs.values()) if is_jet(x) and space.has(x)]
        if given and all(e == given[0] for e in given) and given[0] is not None:
            if _examples[given[0]].ndim == jets[0].ndim:
                jets[0].examples = given[0]
                return
    tensors: list[Any] = []
    template = encode((args, kwargs), tensors)
    likes = tuple([_like(space, x, compiling) for x in tensors])
    if all(like[3] is None for like in likes):  # from a series started inside of the function
        return
    answer = _in_graph(name, template, likes) if compiling else _after(name, rule, template, likes)
    if isinstance(answer, str):
        raise ValueError(
            f"{space.batch_of}: {name} {answer} With batch_dims, f must act on each example alone: give the examples one "
            "by one, or put a module such as batch normalization into eval mode."
        )
    for x, examples in zip(results, answer):
        if is_jet(x) and space.has(x):
            x.examples = examples


def _has_series(space: Space, x: Any) -> bool:
    return is_jet(x) and space.has(x) and x.lost is None


def _like(space: Space, x: Any, compiling: bool) -> Any:
    jet = is_jet(x) and space.has(x)
    values = None
    if not compiling and not is_jet(x) and not (x.is_floating_point() or x.is_complex()) and x.numel() <= _READ:
        inside = value_of(x)
        if inside.shape == x.shape and values_readable([inside]):  # for a batch of torch.func it is the whole
            with apart():
                values = inside.detach().cpu().contiguous().numpy().tobytes()
    return (tuple(x.shape), x.dtype, x.device, x.examples if jet else None, values)


@constant_in_graphs
def _in_graph(name: str, template: Any, likes: Any) -> Any:
    return _after(name, jet_rule(name), template, likes)


def _after(name: str, rule: Callable[..., Any], template: Any, likes: Any) -> Any:
    """The marks of examples for each result, or an error message."""
    key = (name, template, likes)
    try:
        known = _found.get(key)
    except TypeError:  # an unhashable constant
        return _measured(rule, template, likes)
    if known is None:
        if len(_found) >= _AT_MOST:
            _found.clear()
        known = _found[key] = _measured(rule, template, likes)
    return known


def _measured(rule: Callable[..., Any], template: Any, likes: Any) -> Any:
    devices = {like[2].index for like in likes if like[2].type == "cuda"}
    with apart(), torch.random.fork_rng(devices=devices):
        error: Exception | None = None
        for definite in (False, True):  # last, definite matrices, for operators that require them
            try:
                return tuple([None if n is None else _place(n) for n in _numbers(rule, template, likes, definite)])
            except _Mixed:
                return "mixes examples of the batch, or chooses among them."
            except RuntimeError as failed:
                error = failed
        return f"may mix examples of the batch: it cannot be tried ({str(error).splitlines()[0]})."


def _numbers(rule: Callable[..., Any], template: Any, likes: Any, definite: bool) -> list[Tensor | None]:
    """The number of its example, or `NONE`, for each entry of the results that are jets."""
    likes = [_Like(*like) for like in likes]
    generator = torch.Generator().manual_seed(0)
    values, others = ([_random(like, generator, definite) for like in likes] for _ in range(2))
    opposite = [v if like.examples is None else -v for like, v in zip(likes, values)]
    found: list[Tensor | None] | None = None
    for at in (values, others) if definite else (values, opposite, others):
        numbers = _numbers_at(rule, template, likes, at, generator)
        found = numbers if found is None else [_merged(a, b) for a, b in zip(found, numbers)]
    return [None if n is None else _compressed(n, likes) for n in found or ()]


def _merged(numbers: Tensor | None, others: Tensor | None) -> Tensor | None:
    if numbers is None or others is None:
        return None
    if numbers.shape != others.shape:
        raise RuntimeError("the shape of its result depends on values")
    if ((numbers != others) & (numbers != NONE) & (others != NONE)).any():
        raise _Mixed
    return torch.where(numbers == NONE, others, numbers)


def _numbers_at(
    rule: Callable[..., Any], template: Any, likes: list[_Like], values: list[Tensor], generator: torch.Generator
) -> list[Tensor | None]:
    tangents = [
        None
        if like.examples is None
        else torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
        for like in likes
    ]
    count = 1 + max(int(_examples[like.examples].max()) for like in likes if like.examples is not None)

    def along(scales: list[Any]) -> list[Any]:
        space = Space(1)
        jets = [
            v if t is None or s is None else space.jet([v, (t * s).to(v.dtype).to(v.device)])
            for v, t, s in zip(values, tangents, scales)
        ]
        args, kwargs = decode(template, jets)
        found = space.run(lambda: rule(space, *args, **kwargs))
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        return [space.coefficients(x)[1] if _has_series(space, x) else None for x in found]

    base = along([None if like.examples is None else 1.0 for like in likes])
    numbers = [None if t is None else torch.zeros(t.shape, dtype=torch.int64, device="cpu") for t in base]
    for run in range(max(1, math.ceil(math.log2(max(2, count)) / _BITS))):
        digits = [None if like.examples is None else _digit(_examples[like.examples], run) for like in likes]
        scaled = along([None if d is None else 2.0**d for d in digits])
        for number, one, other in zip(numbers, base, scaled):
            if number is not None:
                number += _read(one, other) << (_BITS * run)
    return [None if n is None else _marked(n, one) for n, one in zip(numbers, base)]


def _random(like: _Like, generator: torch.Generator, definite: bool) -> Tensor:
    if not (like.dtype.is_floating_point or like.dtype.is_complex):
        if like.values is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        known = (
            torch.frombuffer(bytearray(like.values), dtype=like.dtype) if like.values else torch.empty(0, device="cpu")
        )
        return known.to(like.dtype).reshape(like.shape).to(like.device)
    x = (
        torch.rand(like.shape, generator=generator, dtype=torch.float64, device="cpu") * 0.9 + 0.05
    )  # a logarithm has its derivative
    if like.examples is not None:
        wide = torch.rand(like.shape, generator=generator, device="cpu") < 0.5
        x = torch.where(wide, 3 * torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu"), x)
    if definite and len(like.shape) > 1 and like.shape[-1] == like.shape[-2]:
        x = x @ x.mT + like.shape[-1] * torch.eye(like.shape[-1], dtype=torch.float64, device="cpu")
    return x.to(like.dtype).to(like.device)


def _digit(numbers: Tensor, run: int) -> Tensor:
    return (numbers.clamp(min=0) >> (_BITS * run)) & (2**_BITS - 1)


def _counts(t: Tensor) -> Tensor:
    """The entries of a tangent that are neither zero nor rounding errors."""
    size = t.abs()
    finite = size.isfinite()
    largest = torch.where(finite, size, 0).amax() if size.numel() else size.sum()
    return finite & (size > 1e-6 * largest)


def _read(one: Tensor, other: Tensor) -> Tensor:
    """The digit of the example that each entry depends on."""
    one, other = one.detach().cpu(), other.detach().cpu()
    matter = _counts(one) | _counts(other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    ratio = torch.where(matter & (a != 0), b.abs() / torch.where(a == 0, 1, a).abs(), 1.0)
    digit = ratio.log2().nan_to_num(0, 0, 0).round().clamp(0, 2**_BITS - 1)
    rounding = 4 * torch.finfo(one.dtype).eps
    if (matter & ((b - a * 2.0**digit).abs() > rounding * torch.maximum(a.abs() * 2.0**digit, b.abs()))).any():
        raise _Mixed
    return torch.where(matter, digit, 0).to(torch.int64)


def _marked(numbers: Tensor, one: Tensor) -> Tensor:
    return torch.where(_counts(one.detach().cpu()), numbers, NONE)


def _compressed(numbers: Tensor, likes: Any) -> Tensor | None:
    """The numbers, with one entry along each dimension on which they do not depend."""
    if not numbers.numel():
        return None
    if (numbers == NONE).all():  # constant in the trial: same as the arguments, if they agree
        given = {like.examples for like in likes} - {None}
        same = _examples[given.pop()] if len(given) == 1 else None
        fits = same is not None and same.ndim == numbers.ndim
        return same if fits and all(s in (1, n) for s, n in zip(same.shape, numbers.shape)) else None  # type: ignore[union-attr]
    for dim in range(numbers.ndim):
        largest = numbers.amax(dim, keepdim=True)
        if ((numbers == largest) | (numbers == NONE)).all():
            numbers = largest
    return numbers.contiguous()
