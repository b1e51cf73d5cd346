"""Declarations of arguments in the docstrings of formulas, and the check of a call against them.

The section ``Args:`` is data: shapes such as ``(*, m, n)``, "the shape of ``x``", "real", "integers", "bool", "0, 1 or 2",
``"sum" or "mean"``, "which of the three", "see `other_formula`". One letter has one size in a call, and leading ``*`` are batch
dims, which broadcast. Other sentences declare nothing.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from .docstrings import documentation, entries

__all__ = ["Declared", "Lookup", "check_declared", "declared"]

Lookup = Callable[[str], "Mapping[str, Declared] | None"]


@dataclass(frozen=True)
class Declared:
    """The declaration of one argument.

    Attributes:
        shapes: alternatives, each a list of dims as written; empty if any shape is allowed.
        as_shape_of: another argument whose shape it has.
        dtype: "real", "integers" or "bool"; empty for any.
        choices: the allowed values; empty for any.
        length: of a list of bools; None for any.
        number: whether Python callers may pass a number, or None, instead of a tensor.
        complex: whether a number may be complex.
        anywhere: whether its device may differ from the others'.
        smallest: for k = min(m, n): k, m and n.
    """

    shapes: tuple[tuple[str, ...], ...] = ()
    as_shape_of: str = ""
    dtype: str = ""
    choices: tuple[Any, ...] = ()
    length: int | None = None
    number: bool = False
    complex: bool = False
    anywhere: bool = False
    smallest: tuple[str, str, str] | None = None


NOTHING = Declared()


# -- reading the docstring --------------------------------------------------------------------------------------------

_DIM = re.compile(
    r"\*\w*|\.\.\.|\d+|[A-Za-z_]\w*|\d+ [A-Za-z]\w*|(?:\d+ )?[A-Za-z]\w* [+-] \d+|[A-Za-z]\w* // \d+ \+ \d+"
    r"|[A-Za-z]\w* \([A-Za-z]\w* - 1\) / 2|[A-Za-z]\w* [A-Za-z]\w*|[A-Za-z]\w* / [A-Za-z]\w*"
)
_PARENTHESES = re.compile(r"(?<![\w|])\(((?:[^()]|\([^()]*\))*)\)")
_COUNTS = {"two": 2, "three": 3, "four": 4}


def declared(function: Callable[..., Any], lookup: Lookup) -> dict[str, Declared]:
    """The declarations of the arguments of a formula's body.

    Args:
        function: the body.
        lookup: returns the declarations of another formula, by its name.

    Returns:
        Name -> declaration; arguments without one are absent.
    """
    parameters = list(inspect.signature(function).parameters)
    texts = dict(entries(documentation(function).replace("$", "")))  # the marks of mathematics
    found: dict[str, Declared] = {}
    aliases = _aliases(texts)
    for names, text in texts.items():
        shapes = list(_shapes(text))
        one_each = len(names) > 1 and len(shapes) == len(names) and " or (" not in text
        for i, name in enumerate(names):
            if name in parameters:
                own = (
                    shapes[i : i + 1]
                    if one_each
                    else []
                    if len(names) > 1 and ", and " in text and len(shapes) > 1
                    else shapes
                )
                found[name] = _read(name, text, own, parameters, aliases, lookup)
    return found


def _aliases(texts: Mapping[tuple[str, ...], str]) -> dict[str, str]:
    """The letter of an argument in the mathematics -> its name."""
    found = {}
    for names, text in texts.items():
        letter = re.match(r"([A-Za-z]\w{0,2})(?=[,;.:])", text)
        if letter and len(names) == 1:
            found[letter[1]] = names[0]
    return found


def _shapes(text: str) -> Iterator[tuple[str, ...]]:
    for inner in _PARENTHESES.findall(text):
        dims = [d.strip() for d in inner.split(",")]
        is_tuple = inner.strip() in ("", "*") or len(dims) > 1
        dims = [d for d in dims if d]
        if is_tuple and all(_DIM.fullmatch(d) for d in dims):
            yield (*dims[:-3], "*1") if dims[-3:] == ["1", "...", "1"] else tuple(dims)


def _read(
    name: str,
    text: str,
    shapes: Sequence[tuple[str, ...]],
    parameters: Sequence[str],
    aliases: Mapping[str, str],
    lookup: Lookup,
) -> Declared:
    if other := re.match(r"(?:[a-z]\w*, )?(?:see|as in) `(\w+)`", text):
        there = lookup(other[1]) or {}
        other_names = name, name.removeprefix("saved_"), name.removesuffix("_p"), f"{name}_p"
        return next((there[n] for n in other_names if n in there), NOTHING)
    broadcasts = "broadcast" in text and not re.search(r"batch (dims )?(is |are )?broadcast", text)
    shapes = [] if broadcasts or "anything" in text else list(shapes)
    if size := re.search(r"\bof shape ``(\w+)``", text):
        shapes.append((f"*{size[1]}",))
    if shapes and re.search(r"\ba number\b", text):
        shapes.append(())
    same = ""
    if reference := re.search(r"\bthe (?:same )?shape of (?:``(\w+)``|(\w{1,3})\b(?! and))", text):
        same = reference[1] or aliases.get(reference[2], "")
    elif not shapes and not broadcasts and re.search(r"\btangents?\b", text) and re.search(r"_t$", name):
        same = next((p for p in (f"{name[:-2]}_p", name[:-2]) if p in parameters), "")
    smallest = re.search(r"\b(\w) = min\((\w), (\w)\)(?!, or)", text)
    return Declared(
        () if same else tuple(shapes),
        same if same in parameters and same != name else "",
        _dtype(text),
        _choices(text),
        _COUNTS[count[1]] if (count := re.search(r"which of the (two|three|four)\b", text)) else None,
        "Python callers may give" in text,
        "number, real or complex" in text,
        "CPU" in text,
        (smallest[1], smallest[2], smallest[3]) if smallest else None,
    )


def _dtype(text: str) -> str:
    if re.search(r"(?:^|[,;:] )(?:of )?(int32|int64|integers?|one integer)\b(?! or bool)", text):
        return "integers"
    if re.search(r"(?:^|[,;] )bool(ean)?\b", text):
        return "bool"
    return "real" if re.search(r"(?:^|[,;] )real\b(?! or complex)", text) else ""


def _choices(text: str) -> tuple[Any, ...]:
    if len(words := re.findall(r'"(\w+)"', text)) > 1:
        return tuple(words)
    if listed := re.match(r"(\d(?:, \d)*(?: or \d| or None))\b", text):
        return tuple(int(n) for n in re.findall(r"\d", listed[1]))
    numbers = re.findall(r"(?:^|, |: )(\d)(?= (?:for )?[a-z])", text)
    return tuple(map(int, numbers)) if numbers[:2] == ["0", "1"] else ()


# -- checking a call --------------------------------------------------------------------------------------------------

_IS: dict[str, tuple[Callable[[torch.dtype], bool], str]] = {
    "real": (lambda d: not d.is_complex, "a real dtype"),
    "integers": (lambda d: not d.is_complex and not d.is_floating_point and d is not torch.bool, "integers"),
    "bool": (lambda d: d in (torch.bool, torch.uint8), "torch.bool"),
}  # fmt: skip


def check_declared(name: str, about: Mapping[str, Declared], values: Mapping[str, Any]) -> None:
    """Check that the values are as declared.

    Args:
        name: of the formula, for messages.
        about: the declarations.
        values: by the names of the arguments.

    Raises:
        ArgumentError: a value is not as declared.
    """
    shaped: list[tuple[str, Declared, Tensor]] = []
    for argument, value in values.items():
        this = about.get(argument, NOTHING)
        if value is None:
            continue
        if isinstance(value, Tensor):
            if this.dtype and not _IS[this.dtype][0](value.dtype):
                raise ArgumentError(f"{name}: {argument}: expected {_IS[this.dtype][1]}, got {described(value)}")
            if (this.shapes or this.as_shape_of) and all(type(n) is int for n in value.shape):
                shaped.append((argument, this, value))
        elif this.choices and value not in this.choices:
            listed = ", ".join(map(repr, this.choices))
            raise ArgumentError(f"{name}: {argument}: expected one of {listed}, got {described(value)}")
        elif isinstance(value, (list, tuple)) and this.length not in (None, len(value)):
            raise ArgumentError(f"{name}: {argument}: expected {this.length} entries, got {described(value)}")
    _check_shapes(name, shaped, values)


@dataclass
class _Sizes:
    """The sizes of the letters so far.

    Attributes:
        of: letter -> its size, or sizes, and the argument that it comes from.
        batch: the shape that the leading ``*`` broadcast to.
        pending: expressions with unknown letters.
        failure: the message of the argument that got furthest.
        furthest: the place of that argument.
    """

    values: Mapping[str, Any]
    of: dict[str, tuple[Any, str]] = field(default_factory=dict)
    batch: tuple[int, ...] = ()
    pending: list[tuple[str, int, str]] = field(default_factory=list)
    failure: str = ""
    furthest: int = -1

    def copy(self) -> tuple[dict[str, tuple[Any, str]], tuple[int, ...], list[tuple[str, int, str]]]:
        return dict(self.of), self.batch, list(self.pending)

    def known(self, letter: str) -> tuple[Any, str] | None:
        if letter in self.of:
            return self.of[letter]
        value = self.values.get(letter)
        if isinstance(value, (list, tuple)) and all(type(n) is int for n in value):
            return tuple(value), letter
        return (value, letter) if type(value) is int else None


def _check_shapes(name: str, shaped: Sequence[tuple[str, Declared, Tensor]], values: Mapping[str, Any]) -> None:
    sizes = _Sizes(values)
    if not _fit(sizes, shaped, 0):
        raise ArgumentError(f"{name}: {sizes.failure}")


def _fit(sizes: _Sizes, shaped: Sequence[tuple[str, Declared, Tensor]], at: int) -> bool:
    """Whether some choice of alternatives fits, from this argument on."""
    if at == len(shaped):
        return _complete(sizes, shaped)
    argument, this, value = shaped[at]
    shape = tuple(value.shape)
    if this.as_shape_of:
        other = sizes.values.get(this.as_shape_of)
        if isinstance(other, Tensor) and tuple(other.shape) != shape:
            return _fail(
                sizes,
                at,
                f"{argument}: expected the shape of {this.as_shape_of}, {list(other.shape)}, got {list(shape)}",
            )
        return _fit(sizes, shaped, at + 1)
    before = sizes.copy()
    for alternative in this.shapes:
        why = _match(sizes, argument, alternative, shape)
        if why is None and _fit(sizes, shaped, at + 1):
            return True
        if why is not None:
            wanted = " or ".join(map(_written, this.shapes))
            _fail(sizes, at, f"{argument}: expected shape {wanted}{why}, got {list(shape)}")
        sizes.of, sizes.batch, sizes.pending = dict(before[0]), before[1], list(before[2])
    return False


def _fail(sizes: _Sizes, at: int, text: str) -> bool:
    if at > sizes.furthest:
        sizes.furthest, sizes.failure = at, text
    return False


def _written(dims: Sequence[str]) -> str:
    dims = ["1, ..., 1" if d == "*1" else d for d in dims]
    return f"({dims[0]},)" if len(dims) == 1 and dims[0] != "*" else f"({', '.join(dims)})"


def _match(sizes: _Sizes, argument: str, dims: Sequence[str], shape: tuple[int, ...]) -> str | None:
    """Why the shape does not match; None if it does."""
    dims = [d for dim in dims for d in _spread(sizes, dim)]
    many = [i for i, d in enumerate(dims) if d.startswith("*") or d == "..."]
    if len(many) > 1:
        return None if len(shape) >= len(dims) - len(many) else ""
    if not many:
        return _match_dims(sizes, argument, dims, shape) if len(shape) == len(dims) else ""
    before, after = many[0], len(dims) - many[0] - 1
    if len(shape) < before + after:
        return ""
    middle = shape[before : len(shape) - after]
    why = _match_dims(sizes, argument, dims[:before], shape[:before])
    if why is None and after:
        why = _match_dims(sizes, argument, dims[-after:], shape[-after:])
    if why is None:
        why = _match_many(sizes, argument, dims[before], before, middle)
    return why


def _spread(sizes: _Sizes, dim: str) -> list[str]:
    """``*normalized_shape`` as its sizes, once they are known."""
    known = sizes.known(dim[1:]) if dim[:1] == "*" and dim[1:] else None
    return [dim] if known is None or not isinstance(known[0], tuple) else [str(n) for n in known[0]]


def _match_many(sizes: _Sizes, argument: str, star: str, place: int, found: tuple[int, ...]) -> str | None:
    if star in ("*", "..."):
        if star == "..." or place:
            return None
        try:
            sizes.batch = tuple(torch.broadcast_shapes(sizes.batch, found))
        except RuntimeError:
            return f", whose batch dims broadcast with {list(sizes.batch)}"
        return None
    if star == "*1":  # written as 1, ..., 1
        return None if all(n == 1 for n in found) else ""
    sizes.of[star[1:]] = found, argument
    return None


def _match_dims(sizes: _Sizes, argument: str, dims: Sequence[str], shape: Sequence[int]) -> str | None:
    for dim, size in zip(dims, shape):
        if dim.lstrip("-").isdecimal():
            if size != int(dim):
                return ""
        elif dim.isidentifier():
            known = sizes.known(dim)
            if known is None:
                sizes.of[dim] = size, argument
            elif known[0] != size:
                return f" with {dim} = {known[0]}, from {known[1]}"
        else:
            sizes.pending.append((dim, size, argument))
    return None


def _complete(sizes: _Sizes, shaped: Sequence[tuple[str, Declared, Tensor]]) -> bool:
    """Whether the expressions have their values, as far as the letters are known."""
    for text, size, argument in sizes.pending:
        wanted = _value(sizes, text)
        if wanted is not None and wanted != size:
            at = next(i for i, (n, _, _) in enumerate(shaped) if n == argument)
            written = " or ".join(map(_written, shaped[at][1].shapes))
            shape = list(shaped[at][2].shape)
            return _fail(
                sizes, len(shaped), f"{argument}: expected shape {written} with {text} = {wanted}, got {shape}"
            )
    for argument, this, _ in shaped:
        if this.smallest is not None:
            k, m, n = (sizes.known(letter) for letter in this.smallest)
            if k and m and n and k[0] != min(m[0], n[0]):
                letters = this.smallest
                text = f"{letters[0]} = min({letters[1]}, {letters[2]}) = {min(m[0], n[0])}"
                return _fail(sizes, len(shaped), f"{k[1]}: expected {text}, as {argument} says, got {k[0]}")
    return True


@functools.cache
def _compiled(text: str) -> tuple[Any, tuple[str, ...]]:
    code = re.sub(r"(\w) (?=[\w(])", r"\1 * ", text).replace(" / ", " // ").replace("////", "//")
    return compile(code, text, "eval"), tuple(re.findall(r"[A-Za-z_]\w*", text))


def _value(sizes: _Sizes, text: str) -> int | None:
    code, letters = _compiled(text)
    known = {letter: sizes.known(letter) for letter in letters}
    numbers = {letter: found[0] for letter, found in known.items() if found is not None}
    if len(numbers) < len(letters) or not all(type(n) is int for n in numbers.values()):
        return None
    try:
        return int(eval(code, {"__builtins__": {}}, numbers))
    except ZeroDivisionError:
        return None
