"""What is registered for a custom op: functions, each checked against what it will be called with."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .gradients import location_of
from .schema import Signature

if TYPE_CHECKING:
    from .op import CustomOp

__all__ = [
    "DEVICE_KEYS",
    "KINDS",
    "BackwardContext",
    "Implementation",
    "check_reference",
    "count",
    "differentiability",
    "exchange",
    "implementation",
]

# Where a kernel for one type of device is registered with the dispatcher.
DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU", "hpu": "HPU", "meta": "Meta"}
KINDS = ("default", "fake", "vmap", "save_for_backward", "backward", "jvp", "autograd")

count = itertools.count(1)  # of what is to be told apart in this process
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class BackwardContext(NamedTuple):
    """The first argument of a backward.

    Attributes:
        needs_input_grad: input name -> whether its gradient is wanted; a list of bool for a list of tensors.
    """

    needs_input_grad: dict[str, Any]


@dataclass(frozen=True)
class Implementation:
    """One function registered for an op, and where it was written."""

    function: Callable[..., Any]
    output_differentiability: tuple[bool, ...] | None = None

    @property
    def identity(self) -> str:
        """The same for the same function in this process, and never for two."""
        try:
            number = _numbers.setdefault(self.function, next(count))
        except TypeError:  # a callable object that cannot be hashed or weakly referenced
            number = id(self.function)
        return f"{number}{self.output_differentiability or ''}"

    @functools.cached_property
    def location(self) -> str:
        return location_of(self.function)


def implementation(
    name: str, signature: Signature, kind: str, function: Callable[..., Any], marks: tuple[bool, ...] | None
) -> Implementation:
    """The function as an implementation of that kind of the op called ``name``.

    Raises:
        TypeError: it does not take what it will be given.
    """
    made = Implementation(function, marks)
    given = {
        "save_for_backward": ["inputs", "output"],
        "backward": ["ctx", "saved", *[f"grad_{n}" for n in signature.output_names]],
        "jvp": ["inputs", "output", "tangents"],
    }.get(kind)
    if given is None:
        return made
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # of what is written in C nothing is known
        return made
    try:
        parameters.bind(*given)
    except TypeError:
        raise TypeError(
            f"{name}: the {kind} implementation, written at {made.location}, is called with {len(given)} "
            f"arguments, ({', '.join(given)}), but its parameters are {parameters}"
        ) from None
    return made


def check_reference(name: str, signature: Signature, function: Callable[..., Any]) -> None:
    """Raise if a reference takes neither all arguments of the op called ``name`` nor those that have no default.

    Raises:
        TypeError: it takes neither.
    """
    try:
        parameters = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # of what is written in C nothing is known
        return
    every = signature.schema.arguments
    for given in ([a for a in every if not a.has_default_value()], every):
        by_place, by_name = ([a.name for a in given if a.kwarg_only is yes] for yes in (False, True))
        try:
            parameters.bind(*by_place, **dict.fromkeys(by_name))
            return
        except TypeError as error:
            reason = error
    names = ", ".join(a.name for a in every)
    raise TypeError(
        f"{name}: reference: expected a function of ({names}), got {function!r}, whose parameters are {parameters}: {reason}"
    )


def differentiability(name: str, signature: Signature, marks: Sequence[bool] | None) -> tuple[bool, ...] | None:
    """The marks, one for each output of the op called ``name``.

    Raises:
        RuntimeError: their number is another, or one marks what is not a tensor.
    """
    if marks is None:
        return None
    returns = signature.returns
    if len(marks) != len(returns):
        raise RuntimeError(
            f"{name}: output_differentiability={list(marks)} has {len(marks)} entries, but the op has "
            f"{len(returns)} outputs."
        )
    for i, (mark, output) in enumerate(zip(marks, returns)):
        if mark and not output.is_tensor_like:
            raise RuntimeError(
                f"{name}: output_differentiability={list(marks)} marks output {i} as differentiable, but it is "
                f"of type {signature.schema.returns[i].type}, not a Tensor or a list of them."
            )
    return tuple(bool(m) for m in marks)


def exchange(
    name: str, signature: Signature, registered: Mapping[str, Implementation], implementations: dict[str, Any]
) -> dict[str, Implementation | None]:
    """What `CustomOp.swap` is given, as implementations.

    Args:
        name: of the op.
        signature: of the op.
        registered: what is in its place otherwise.
        implementations: the arguments of `CustomOp.swap`.

    Returns:
        An implementation of each kind, or None for "as if none were registered".

    Raises:
        TypeError: no such kind of implementation, or not a function.
    """
    marks = implementations.pop("output_differentiability", None)
    if marks is not None and implementations.get("backward") is None:
        raise TypeError(f"{name}: swap(output_differentiability=...) goes with a backward, and there is none")
    known = (*KINDS, *DEVICE_KEYS)
    layer: dict[str, Implementation | None] = {}
    for kind, function in implementations.items():
        if kind not in known:
            raise TypeError(f"{name}: swap has no {kind!r}; expected some of {list(known)}")
        if function is not None and not callable(function):
            raise TypeError(f"{name}: swap({kind}=...) takes a function or None, got {type(function).__name__}")
        own = registered.get(kind)
        chosen = differentiability(name, signature, marks)
        if chosen is None and own is not None:
            chosen = own.output_differentiability
        chosen = chosen if kind == "backward" else None
        layer[kind] = None if function is None else implementation(name, signature, kind, function, chosen)
    return layer


class Swap:
    """Other implementations for a while; see `CustomOp.swap`.

    A signal may interrupt `__enter__` and `__exit__` at any line, or arrive before the first line of `__exit__`. What is
    left active then ends with this object.
    """

    def __init__(self, op: CustomOp, implementations: dict[str, Implementation | None]) -> None:
        self._op = op
        self._implementations = implementations
        self._entered: list[dict[str, Implementation | None]] = []

    def __enter__(self) -> CustomOp:
        layer = dict(self._implementations)
        self._entered.append(layer)
        self._op._push(layer)
        return self._op

    def __exit__(self, *exception: object) -> None:
        self._op._pop(self._entered[-1])
        del self._entered[-1]

    def __del__(self) -> None:
        for layer in self.__dict__.get("_entered", ()):
            self._op._pop(layer)
