"""Calls without Python: the library in csrc/calls, which serves plain calls of overridden operators in C++.

It was built for one release of torch, and is loaded there only; without it the general kernel, in Python, serves every
call. What it does for a rule is data, a table of places that is made here, so that no rule has C++ of its own.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import activation
from ..engine.node import node_name, node_type, pull_back
from ..internals import is_functionalizing, skipped_by_dynamo, tangents_possible
from ..libraries import calls_library, checked
from ..once import refuse_reload
from ..rule.definition import ButManySmall, CompiledVjp, always, real, where_finite
from ..rule.derivative import RuleDerivative

__all__ = [
    "IN_PYTHON",
    "ByRule",
    "CallsLayer",
    "Counts",
    "Served",
    "UnlessPlain",
    "activate",
    "attach",
    "attach_before_functorch",
    "before",
    "before_functorch",
    "collect",
    "counts",
    "detach",
    "detach_before_functorch",
    "in_python",
    "layers_here",
    "loaded",
    "scope_here",
    "suspend",
    "this_thread",
]

refuse_reload(globals())


class ByRule(NamedTuple):
    """Plain calls follow a rule's derivative, except those that are left to stock."""

    derivative: RuleDerivative
    defers: Callable[..., bool] | None


class UnlessPlain(NamedTuple):
    """Plain calls are stock's; all others go to the general kernel.

    A call with a list of tensors is plain where none of them requires grad, too.

    Attributes:
        tensors: the places of the arguments to look at.
        untracked: a call that autograd tracks is not plain.
    """

    tensors: tuple[int, ...]
    untracked: bool = False


class InPython(NamedTuple):
    """All calls go to the general kernel."""


IN_PYTHON = InPython()
Way = ByRule | UnlessPlain | InPython

# Numbers of dtypes in libtorch's ABI (torch/headeronly/core/ScalarType.h): a fact that a node of C++ keeps is a number.
_DTYPES: tuple[torch.dtype | None, ...] = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
)  # fmt: skip
_FACTS = ("sizes", "strides", "dtype")
_CONSTANTS = frozenset({"int", "float", "bool", "number", "str", "SymInt", "Scalar"})
_DEVICES = {"cpu": 1, "cuda": 2}
_SAVED, _CONSTANT, _GRAD, _LITERAL, _NEEDED = range(5)  # Source::Kind in csrc/calls
_UNLESS_PLAIN, _REAL, _UNLESS_TRACKED = 4, 5, 6  # Table::Deferral in csrc/calls


_numbers = itertools.count(1)
_derivatives: dict[
    int, RuleDerivative | None
] = {}  # by the number of the table that the library has of it, as long as it has it
_layers: dict[int, Any] = {}  # by number, what a layer was made for
_of_no_rule: dict[Any, int] = {}  # the numbers of the tables that no derivative has
_slots: dict[str, int] = {}  # of each operator whose calls have ever come here
_general = False  # all calls are for Python


def loaded() -> bool:
    """Whether there is a library for this torch."""
    return calls_library is not None


def _attach(op: Any, python: int) -> int:
    schema = op._schema
    call = calls_library.manualgrad_calls_attach
    return checked(call(schema.name.encode(), schema.overload_name.encode(), ctypes.c_int64(python)))


def before(op: Any) -> None:
    """To be called before a kernel in Python is registered for ``op``: what is there now is what stock calls go to."""
    if calls_library is not None:
        _attach(op, 0)


def attach(op: Any) -> None:
    """To be called after that: from now on the library has the calls, and hands on to Python what is not plain."""
    if calls_library is not None:
        _slots[op.name()] = _attach(op, 1)


def before_functorch(op: Any) -> None:
    """`before`, for a kernel that is called before functorch's."""
    _attach_before_functorch(op, 0)


def attach_before_functorch(op: Any) -> None:
    """`attach`, for a kernel that is called before functorch's: it gets the calls with a number, but under functionalize."""
    _attach_before_functorch(op, 1)


def _attach_before_functorch(op: Any, python: int) -> None:
    if calls_library is not None:
        call = calls_library.manualgrad_calls_numbers_attach
        checked(call(op._schema.name.encode(), op._schema.overload_name.encode(), ctypes.c_int64(python)))


def detach_before_functorch() -> None:
    """Take these kernels away."""
    if calls_library is not None:
        checked(calls_library.manualgrad_calls_numbers_detach())


def detach(op: Any) -> None:
    """Take the library's kernel away, if there is one. A thread that is inside of it crashes."""
    if calls_library is not None:
        schema = op._schema
        checked(calls_library.manualgrad_calls_detach(schema.name.encode(), schema.overload_name.encode()))


class Served(NamedTuple):
    """How the library serves the calls of one operator.

    Attributes:
        name: the operator.
        way: which way its calls go.
    """

    name: str
    way: Way


class CallsLayer:
    """What one override adds, in the library.

    Args:
        meaning: what `layers_here` returns for it.
        rules: how the calls of operators are served.
        forward_modes: the same, where no layer has a rule for the operator.
        nested: whether it has the replacements for nested tensors.

    Attributes:
        number: 0 without the library.
    """

    number = 0

    def __init__(self, meaning: Any, rules: Sequence[Served], forward_modes: Sequence[Served], nested: bool) -> None:
        if calls_library is None:
            return
        numbers = []
        for served in (rules, forward_modes):
            here = [one for one in served if one.name in _slots]
            numbers.append(len(here))
            for one in here:
                numbers += [_slots[one.name], _table(one.way)]
        size = ctypes.c_int64(len(numbers))
        self.number = checked(calls_library.manualgrad_calls_layer(_array(numbers), size, ctypes.c_int64(nested)))
        _layers[self.number] = meaning

    def __del__(self) -> None:
        if self.number:
            calls_library.manualgrad_calls_drop_layer(ctypes.c_int64(self.number))


def activate(numbers: Sequence[int]) -> None:
    """Make these layers the active ones, where the library was built without Python's headers and does not do so itself."""
    if calls_library is not None and not activation.in_library:
        checked(calls_library.manualgrad_calls_activate(_array(numbers), ctypes.c_int64(len(numbers))))


def collect() -> None:
    """Let go of what the library no longer uses: derivatives of which it has no table, and layers."""
    if calls_library is None:
        return
    found = (ctypes.c_int64 * 256)()
    while n := calls_library.manualgrad_calls_ended(found, ctypes.c_int64(256)):
        for number in found[:n]:
            if number < 0:
                _layers.pop(-1 - number, None)
            else:
                _derivatives.pop(number, None)


def scope_here() -> int:
    """The number of what is active on this thread beyond the process; 0 if nothing is."""
    return int(calls_library.manualgrad_calls_scope())


def this_thread() -> int:
    """The number of this thread in the library; no other thread ever has it."""
    return int(calls_library.manualgrad_calls_thread())


def layers_here() -> list[Any]:
    """What `CallsLayer` was given for each layer that is active on this thread beyond the process."""
    found = (ctypes.c_int64 * 64)()
    n = calls_library.manualgrad_calls_scope_layers(found, ctypes.c_int64(64))
    if n > 64:
        found = (ctypes.c_int64 * n)()
        calls_library.manualgrad_calls_scope_layers(found, ctypes.c_int64(n))
    return [_layers[number] for number in found[:n]]


@contextmanager
def in_python() -> Iterator[None]:
    """Leave all calls, on all threads, to the general kernel: to test it, and to compare with."""
    before = _general
    try:
        _set_general(True)
        yield
    finally:
        _set_general(before)


def _set_general(yes: bool) -> None:
    global _general
    _general = yes
    if calls_library is not None:
        calls_library.manualgrad_calls_in_python(ctypes.c_int64(yes))


def suspend(by: int) -> None:
    """Make eager calls of this thread PyTorch's own, for as long as the sum of these numbers is positive."""
    if calls_library is not None:
        calls_library.manualgrad_calls_suspend(ctypes.c_int64(by))


class Counts(NamedTuple):
    """What the library has done on one thread.

    Attributes:
        plain: calls with a derivative, without Python.
        compiled: backwards by a compiled formula.
        python: backwards by the rule's vjp.
    """

    plain: int
    compiled: int
    python: int


def counts() -> Counts:
    """What the library has done on this thread so far; zeros without it. For tests."""
    found = (ctypes.c_int64 * 3)()
    if calls_library is not None:
        calls_library.manualgrad_calls_counts(found)
    return Counts(*found)


# -- tables -----------------------------------------------------------------------------------------------------------


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(numbers), 1))(*numbers)


def _table(way: Way) -> int:
    """The number of a table, which exists until the next layer is made, and as long as a layer or a graph has it."""
    derivative = way.derivative if isinstance(way, ByRule) else None
    known: dict[Any, int] = _of_no_rule if derivative is None else derivative.tables
    key = way.defers if isinstance(way, ByRule) else way
    number = known.get(key)
    if number is not None and checked(calls_library.manualgrad_calls_hold(ctypes.c_int64(number))):
        return number
    name, formula = "", None
    if isinstance(way, ByRule):
        name, formula, numbers = _plan(way.derivative, way.defers)
    elif isinstance(way, UnlessPlain):
        numbers = [
            0,
            0,
            _UNLESS_TRACKED if way.untracked else _UNLESS_PLAIN,
            *[0] * 6,
            len(way.tensors),
            *way.tensors,
            *[0] * 5,
        ]
    else:
        numbers = [1, *[0] * 14]
    number = next(_numbers)
    _derivatives[number] = derivative
    call, size = calls_library.manualgrad_calls_table, ctypes.c_int64(len(numbers))
    checked(call(ctypes.c_int64(number), name.encode(), formula and formula.encode(), _array(numbers), size))
    known[key] = number
    return number


def _plan(derivative: RuleDerivative, defers: Callable[..., bool] | None) -> tuple[str, str | None, list[int]]:
    """The name of the node, the compiled formula if there is one, and the table as numbers; Table in csrc/calls."""
    signature = derivative.signature
    arguments = signature.schema.arguments
    n = len(arguments)
    simple = all(i < n and _is_simple(arguments[i].type) for i in derivative.constant_places)
    simple = simple and all(what in _FACTS for _, what in derivative.facts)
    in_python = derivative.plain_call is None or derivative.forward is not None or not simple
    if isinstance(defers, ButManySmall):
        to_stock = [2, *defers]
    else:
        all_calls = defers in (always, where_finite)
        to_stock = [3 if all_calls else _REAL if defers is real else int(bool(defers)), 0, 0, 0]
    checked_stock = derivative.strong_zero or defers is where_finite
    numbers: list[int] = [in_python, node_type(derivative), *to_stock, checked_stock, derivative.selective]
    numbers.append(n)
    for places in (signature.tensor_like, derivative.tensor_places, derivative.constant_places):
        numbers += [len(places), *places]
    facts = [(place, _FACTS.index(what)) for place, what in derivative.facts if what in _FACTS]
    numbers += [len(facts), *[x for fact in facts for x in fact]]
    numbers += [len(derivative.differentiable), *derivative.differentiable]
    numbers.append(len(derivative.uses))
    for read, inputs in derivative.uses:
        numbers += [len(read), *sorted(read), len(inputs), *inputs]
    formula = None
    compiled = None if derivative.strong_zero else derivative.rule.compiled_vjp
    if compiled is not None and not in_python and len(derivative.uses) == 1:
        formula = compiled.operator.name
        numbers += _sources(derivative, compiled)
    return node_name(signature), formula, [int(x) for x in numbers]


def _is_simple(type_: Any) -> bool:
    """Whether a value of this type of a schema is the same in C++ and, handed on, in Python."""
    text = str(type_)
    while text.startswith(("Optional[", "List[")):
        text = text.partition("[")[2][:-1]
    return text in _CONSTANTS


def _sources(derivative: RuleDerivative, compiled: CompiledVjp) -> list[int]:
    signature = derivative.signature
    known = [*signature.names, *signature.output_names]
    saved = [known[i] for i in derivative.tensor_places]
    constants = [known[i] for i in derivative.constant_places]
    devices = sum(_DEVICES[kind] for kind in (("cpu",) if compiled.declines else compiled.formula.kernels))
    inputs = [signature.tensor_names.index(name) for name in compiled.names]
    numbers = [
        len(inputs),
        *inputs,
        devices,
        -1 if compiled.largest is None else compiled.largest,
        2 if callable(compiled.declines) else compiled.declines,
        compiled.real,
        len(compiled.only),
    ]
    for name, value in compiled.only.items():
        numbers += [constants.index(name), *_literal(value)]
    for names in (compiled.contiguous, compiled.one_batch, compiled.square, compiled.nonzero):
        numbers += [len(names), *[saved.index(name) for name in names]]
    for parameter in compiled.operator.signature.names:
        source = compiled.bind.get(parameter, parameter)
        name, default = source if isinstance(source, tuple) else (source, None)
        if not isinstance(name, str):
            numbers += [_LITERAL, 0, *_literal(name)]
        elif name in saved:
            numbers += [_SAVED, saved.index(name), *_literal(None)]
        elif name in constants:
            numbers += [_CONSTANT, constants.index(name), *_literal(default)]
        elif name.startswith("needs_"):
            numbers += [_NEEDED, signature.tensor_names.index(name.removeprefix("needs_")), *_literal(None)]
        else:
            numbers += [_GRAD, derivative.grad_names.index(name), *_literal(None)]
    return numbers


def _literal(value: Any) -> tuple[int, int]:
    """(kind, bits), as Reader::literal in csrc/calls reads it."""
    if value is None:
        return 0, 0
    if isinstance(value, bool):
        return 1, int(value)
    if isinstance(value, int):
        return 2, value
    if isinstance(value, str):
        assert len(value.encode()) <= 8
        return 4, struct.unpack("q", value.encode().ljust(8, b"\0"))[0]
    assert isinstance(value, float) and not math.isnan(value)
    return 3, struct.unpack("q", struct.pack("d", value))[0]


# -- the vjp, called from C++ -----------------------------------------------------------------------------------------


class _Context(NamedTuple):
    """What the backward of an autograd function reads."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]
    static: tuple[Any, ...]


def _derivative(number: int) -> RuleDerivative:
    found = _derivatives[number]
    assert found is not None
    return found


def _pull_back(rule: int, needed: Any, tensors: Any, constants: Any, grads: Any) -> list[Tensor | None]:
    derivative = _derivative(rule)
    if derivative.facts:
        split = len(derivative.constant_places)
        facts = [_fact(what, x) for (_, what), x in zip(derivative.facts, constants[split:])]
        constants = (*constants[:split], *facts)
    context = _Context((False, *needed), tensors, constants)
    if tangents_possible((*tensors, *grads)):  # or a tracer: the vjp in the general way
        places = derivative.signature.tensor_like
        wanted: list[Any] = [None] * len(derivative.signature.names)
        for i, yes in zip(places, needed):
            wanted[i] = yes
        found = pull_back(derivative, context, wanted, grads)
        return [found[i] for i in places]
    assert derivative.plain_backward is not None
    return list(derivative.plain_backward(context, *grads))[1:]


def _defers(rule: int, values: Any) -> bool:
    defers = _derivative(rule).rule.defer_to_stock
    assert defers is not None
    return bool(defers(*values))


def _report(rule: int) -> bool:
    compiled = _derivative(rule).rule.compiled_vjp
    assert compiled is not None and callable(compiled.declines)
    compiled.declines()
    return True


def _fact(what: str, value: Any) -> Any:
    if value is None:
        return None
    return _DTYPES[value] if what == "dtype" else torch.Size(value) if what == "sizes" else tuple(value)


if calls_library is not None:
    _operators = torch.library.Library("manualgrad_calls", "FRAGMENT")
    _operators.define("pull_back(int rule, Any needed, Any tensors, Any constants, Any grads) -> Tensor?[]")
    _operators.impl("pull_back", skipped_by_dynamo(_pull_back), "CPU")
    _operators.define("report(int rule) -> bool")
    _operators.impl("report", skipped_by_dynamo(_report), "CPU")
    _operators.define("functionalizing() -> bool")
    _operators.impl("functionalizing", skipped_by_dynamo(is_functionalizing), "CPU")
    _operators.define("defers(int rule, Any values) -> bool")
    _operators.impl("defers", skipped_by_dynamo(_defers), "CPU")
