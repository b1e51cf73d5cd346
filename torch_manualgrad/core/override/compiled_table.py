"""Describes rules to the library in csrc/calls: the structs of csrc/calls/layout.h, and the code that fills them.

The library makes its own table from a description, once per rule, for all calls.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int64
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

import torch

from ..engine.node import node_name, node_type
from ..op.derivatives import ReferenceDerivative, SavedBackward
from ..rule.definition import ButManySmall, ByMetadata, CompiledVjp, always, real, where_finite
from ..rule.derivative import RuleDerivative
from ..schema import Signature

__all__ = [
    "DTYPES",
    "IN_PYTHON",
    "LAYOUT",
    "VERSION",
    "ByRule",
    "InPlaceByRule",
    "UnlessPlain",
    "Way",
    "describe",
    "layer",
    "value_at",
]

VERSION = 6  # kLayoutVersion in csrc/calls/layout.h

# By their numbers in libtorch's ABI (torch/headeronly/core/ScalarType.h): a node in C++ saves a dtype as a number.
DTYPES: tuple[torch.dtype | None, ...] = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
)  # fmt: skip


# -- the routes of calls ----------------------------------------------------------------------------------------------


class ByRule(NamedTuple):
    """Plain calls use a rule's derivative, except those left to stock.

    Attributes:
        derivative: the derivative.
        defers: which calls are left to stock.
        but: if given, all calls but these have a replacement forward, which the general kernel runs.
    """

    derivative: RuleDerivative
    defers: Callable[..., bool] | None
    but: ButManySmall | None = None


class InPlaceByRule(NamedTuple):
    """Plain calls of the operator's in-place form use a rule's derivative, unless it needs the overwritten values."""

    derivative: RuleDerivative


class UnlessPlain(NamedTuple):
    """Plain calls are stock's; all others go to the general kernel.

    A call with a list of tensors is plain only if none of them requires grad.

    Attributes:
        tensors: the places of the arguments to look at.
        untracked: a call that autograd tracks is not plain.
    """

    tensors: tuple[int, ...]
    untracked: bool = False


class InPython(NamedTuple):
    """All calls go to the general kernel."""


IN_PYTHON = InPython()
Way = ByRule | InPlaceByRule | UnlessPlain | InPython


# -- the structs and constants of csrc/calls ----------------------------------------------------------------------------


class Kind(IntEnum):
    """The field of a `Literal` that holds the value."""

    NONE, BOOL, INT, FLOAT, STRING = range(5)


class SourceKind(IntEnum):
    """The source of an argument of the compiled formula."""

    SAVED, CONSTANT, GRAD, LITERAL, NEEDED = range(5)


class Fact(IntEnum):
    """A property of a tensor that is saved instead of the tensor."""

    SIZES, STRIDES, DTYPE = range(3)


class Deferral(IntEnum):
    """The tracked calls that go to stock."""

    NEVER, PYTHON_DECIDES, BUT_MANY_SMALL, ALWAYS, REAL, UNLESS_PLAIN, UNLESS_TRACKED, METADATA_DECIDES = range(8)


class Records(IntEnum):
    """Whether the operators that the vjp calls may be recorded."""

    NOTHING, VJP, WHERE_FINITE = range(3)


class Devices(IntFlag):
    """The devices for which a compiled formula has a kernel."""

    CPU = 1
    CUDA = 2


def _span(item: Any) -> Any:
    """The struct of a pointer to items and their number."""
    fields = [("data", POINTER(item)), ("size", c_int64)]
    return type(f"Span_{item.__name__}", (ctypes.Structure,), {"_fields_": fields, "item": item})


Ints = _span(c_int64)


class Literal(ctypes.Structure):
    """A value of a schema: None, a bool, a number or a string."""

    _fields_ = [("kind", c_int64), ("integer", c_int64), ("real", c_double), ("text", c_char_p)]


class Condition(ctypes.Structure):
    """A constant of the call, and the value that it must have."""

    _fields_ = [("constant", c_int64), ("value", Literal)]


class Argument(ctypes.Structure):
    """The source of one argument of the compiled formula."""

    _fields_ = [("source", c_int64), ("index", c_int64), ("literal", Literal)]


Conditions, Arguments = _span(Condition), _span(Argument)


class Compiled(ctypes.Structure):
    """A compiled formula that is the whole vjp, and its calls: `CompiledVjp` by places."""

    _fields_ = [
        ("formula", c_char_p),
        ("inputs", Ints),
        ("devices", c_int64),
        ("largest", c_int64),
        ("reports", c_bool),
        ("real", c_bool),
        ("only", Conditions),
        ("contiguous", Ints),
        ("one_batch", Ints),
        ("square", Ints),
        ("nonzero", Ints),
        ("arguments", Arguments),
    ]


class SavedFact(ctypes.Structure):
    """A `Fact` of the value at a place."""

    _fields_ = [("place", c_int64), ("what", c_int64)]


class Use(ctypes.Structure):
    """One formula of the rule: the saved tensors that it reads, and the inputs whose gradients it computes."""

    _fields_ = [("saved", Ints), ("inputs", Ints)]


Facts, Uses = _span(SavedFact), _span(Use)


class Rule(ctypes.Structure):
    """A rule, by places in the operator's arguments followed by its outputs."""

    _fields_ = [
        ("version", c_int64),
        ("bytes", c_int64),
        ("number", c_int64),
        ("node", c_char_p),
        ("node_type", c_int64),
        ("in_python", c_bool),
        ("replaces_forward", c_bool),
        ("check_stock", c_bool),
        ("strong_zero", c_bool),
        ("selective", c_bool),
        ("lists", c_bool),
        ("in_place", c_bool),
        ("pushes", c_bool),
        ("records", c_int64),
        ("defers", c_int64),
        ("order", c_int64),
        ("complex_order", c_int64),
        ("entries", c_int64),
        ("argument_count", c_int64),
        ("tensors", Ints),
        ("saved", Ints),
        ("constants", Ints),
        ("pushed", Ints),
        ("facts", Facts),
        ("differentiable", Ints),
        ("uses", Uses),
        ("compiled", Compiled),
    ]


class Served(ctypes.Structure):
    """One operator's slot, and the number of its table."""

    _fields_ = [("slot", c_int64), ("table", c_int64)]


ServedOperators = _span(Served)


class Layer(ctypes.Structure):
    """The tables of one override."""

    _fields_ = [
        ("version", c_int64),
        ("bytes", c_int64),
        ("rules", ServedOperators),
        ("forward_modes", ServedOperators),
        ("nested", c_bool),
    ]


# By their names in C++.
LAYOUT: dict[str, Any] = {
    "Literal": Literal,
    "Condition": Condition,
    "Argument": Argument,
    "Compiled": Compiled,
    "Fact": SavedFact,
    "Use": Use,
    "Rule": Rule,
    "Served": Served,
    "Layer": Layer,
    "layout::Kind": Kind,
    "Source::Kind": SourceKind,
    "Table::Fact": Fact,
    "Table::Deferral": Deferral,
    "Table::Records": Records,
}


# -- filling them
# -------------------------------------------------------------------------------------------------------


def _filled(span: Any, items: Iterable[Any]) -> Any:
    """A span; its struct keeps the items alive."""
    values = [*items]
    return span((span.item * len(values))(*values), len(values)) if values else span()


def _ints(numbers: Iterable[int]) -> Any:
    return _filled(Ints, numbers)


def layer(rules: Sequence[tuple[int, int]], forward_modes: Sequence[tuple[int, int]], nested: bool) -> Layer:
    """The description of a layer, from pairs of a slot and the number of a table."""
    served = [_filled(ServedOperators, [Served(*one) for one in pairs]) for pairs in (rules, forward_modes)]
    return Layer(VERSION, ctypes.sizeof(Layer), *served, nested)


def describe_formula(number: int, derivative: ReferenceDerivative | SavedBackward) -> Rule:
    """The description of a formula's calls, which use its own derivative."""
    found = Rule(version=VERSION, bytes=ctypes.sizeof(Rule), number=number, node=b"", in_python=True)
    if isinstance(derivative, ReferenceDerivative):
        found.records = Records.VJP
        _fill_places(found, derivative)
    _fill_jvp(found, derivative)  # also records if no result is differentiable
    return found


def describe(number: int, way: Way) -> Rule:
    """The description of an operator's calls, under the number of its table."""
    found = Rule(version=VERSION, bytes=ctypes.sizeof(Rule), number=number, node=b"")
    if isinstance(way, ByRule):
        _fill(found, way.derivative, way.defers)
        if way.but is not None:
            found.replaces_forward = True
            found.order, found.complex_order, found.entries = way.but
    elif isinstance(way, InPlaceByRule):
        _fill(found, way.derivative, None)
        found.in_place = not found.in_python
        if found.in_python:  # if tracked; other writes are PyTorch's
            found.in_python, found.defers = False, Deferral.UNLESS_TRACKED
    elif isinstance(way, UnlessPlain):
        found.defers = Deferral.UNLESS_TRACKED if way.untracked else Deferral.UNLESS_PLAIN
        found.tensors = _ints(way.tensors)
    else:
        found.in_python = True
    return found


_FACTS = {"sizes": Fact.SIZES, "strides": Fact.STRIDES, "dtype": Fact.DTYPE}
_CONSTANTS = frozenset({"int", "float", "bool", "number", "str", "SymInt", "Scalar"})


def _fill(found: Rule, derivative: RuleDerivative, defers: Callable[..., bool] | None) -> None:
    _fill_places(found, derivative)
    found.in_python = found.in_python or derivative.forward is not None
    found.in_python = found.in_python or not all(what in _FACTS for _, what in derivative.facts)
    found.check_stock = derivative.strong_zero or defers is where_finite
    found.strong_zero = derivative.strong_zero
    found.selective = derivative.selective
    if not derivative.foreign:  # another package's formula is unchecked
        found.records = Records.VJP if derivative.finite is None else Records.WHERE_FINITE
        if not derivative.strong_zero:
            _fill_jvp(found, derivative)
    found.defers = _deferral(defers)
    if isinstance(defers, ButManySmall):
        found.order, found.complex_order, found.entries = defers
    facts = [(place, _FACTS[what]) for place, what in derivative.facts if what in _FACTS]
    found.facts = _filled(Facts, [SavedFact(*fact) for fact in facts])
    compiled = None if derivative.strong_zero else derivative.rule.compiled_vjp
    if compiled is not None and not (found.in_python or found.lists) and len(derivative.uses) == 1:
        found.compiled = _compiled(derivative, compiled)


def _fill_places(found: Rule, derivative: RuleDerivative | ReferenceDerivative) -> None:
    signature = derivative.signature
    arguments = signature.schema.arguments
    n = len(arguments)
    simple = all(i < n and _is_simple(arguments[i].type) for i in derivative.constant_places)
    found.node = node_name(signature).encode()
    found.node_type = node_type(derivative)
    found.lists = bool(signature.lists or signature.output_lists)
    readable = all(r.is_tensor or r.is_tensor_list for r in signature.returns)
    if isinstance(derivative, ReferenceDerivative):
        readable = derivative.plain_backward is not None
    found.in_python = not (simple and readable)
    found.argument_count = n
    found.tensors = _ints(signature.tensor_like)
    found.saved = _ints(derivative.tensor_places)
    found.constants = _ints(derivative.constant_places)
    found.differentiable = _ints(derivative.differentiable)
    found.uses = _filled(Uses, [Use(_ints(sorted(read)), _ints(inputs)) for read, inputs in derivative.uses])


def _fill_jvp(found: Rule, derivative: RuleDerivative | ReferenceDerivative | SavedBackward) -> None:
    signature = derivative.signature
    arguments = [signature.schema.arguments[i] for i in derivative.pushed_places]
    found.pushes = isinstance(derivative, RuleDerivative) or derivative.has_own_jvp
    found.pushes = found.pushes and all(_is_simple(a.type) and _is_pushed(a) for a in arguments)
    found.lists = bool(signature.lists or signature.output_lists)
    found.tensors = _ints(signature.tensor_like)
    found.differentiable = _ints(derivative.differentiable)
    found.pushed = _ints(derivative.pushed_places)


def _is_pushed(argument: Any) -> bool:
    """Whether `value_at` returns the argument in its Python form."""
    return not any(kind in str(argument.real_type) for kind in ("Layout", "MemoryFormat"))


def value_at(signature: Signature, place: int, value: Any) -> Any:
    """The argument at a place, in the form that the dispatcher passes to Python; in C++ a dtype is a number."""
    if value is not None and "ScalarType" in str(signature.schema.arguments[place].real_type):
        return DTYPES[value]
    return value


def _deferral(defers: Callable[..., bool] | None) -> Deferral:
    if defers is None:
        return Deferral.NEVER
    if isinstance(defers, ButManySmall):
        return Deferral.BUT_MANY_SMALL
    if isinstance(defers, ByMetadata):
        return Deferral.METADATA_DECIDES
    if defers in (always, where_finite):
        return Deferral.ALWAYS
    return Deferral.REAL if defers is real else Deferral.PYTHON_DECIDES


def _is_simple(type_: Any) -> bool:
    """Whether a value of this schema type is the same in C++ and in Python."""
    text = str(type_)
    while text.startswith(("Optional[", "List[")):
        text = text.partition("[")[2][:-1]
    return text in _CONSTANTS


def _compiled(derivative: RuleDerivative, compiled: CompiledVjp) -> Compiled:
    signature = derivative.signature
    known = [*signature.names, *signature.output_names]
    saved = [known[i] for i in derivative.tensor_places]
    constants = [known[i] for i in derivative.constant_places]
    devices = ("cpu",) if compiled.on_cpu else compiled.formula.kernels

    def argument(parameter: str) -> Argument:
        source = compiled.bind.get(parameter, parameter)
        name, default = source if isinstance(source, tuple) else (source, None)
        if not isinstance(name, str):
            return Argument(SourceKind.LITERAL, 0, _literal(name))
        if name in saved:
            return Argument(SourceKind.SAVED, saved.index(name))
        if name in constants:
            return Argument(SourceKind.CONSTANT, constants.index(name), _literal(default))
        if name.startswith("needs_"):
            return Argument(SourceKind.NEEDED, signature.tensor_names.index(name.removeprefix("needs_")))
        return Argument(SourceKind.GRAD, derivative.grad_names.index(name))

    def places(names: Iterable[str]) -> Any:
        return _ints(saved.index(name) for name in names)

    return Compiled(
        formula=compiled.operator.name.encode(),
        inputs=_ints(signature.tensor_names.index(name) for name in compiled.names),
        devices=sum(Devices[kind.upper()] for kind in devices),
        largest=-1 if compiled.largest is None else compiled.largest,
        reports=compiled.reports is not None,
        real=compiled.real,
        only=_filled(Conditions, [Condition(constants.index(n), _literal(x)) for n, x in compiled.only.items()]),
        contiguous=places(compiled.contiguous),
        one_batch=places(compiled.one_batch),
        square=places(compiled.square),
        nonzero=places(compiled.nonzero),
        arguments=_filled(Arguments, [argument(p) for p in compiled.operator.signature.names]),
    )


def _literal(value: Any) -> Literal:
    if value is None:
        return Literal(Kind.NONE)
    if isinstance(value, bool):
        return Literal(Kind.BOOL, integer=value)
    if isinstance(value, int):
        return Literal(Kind.INT, integer=value)
    if isinstance(value, str):
        return Literal(Kind.STRING, text=value.encode())
    assert isinstance(value, float) and not math.isnan(value)
    return Literal(Kind.FLOAT, real=value)
