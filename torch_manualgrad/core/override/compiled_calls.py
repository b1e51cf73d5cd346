"""Calls without Python: the library in csrc/calls, which serves plain calls of overridden operators in C++.

It is built for one release of torch, and only loaded there. Without it the general kernel, in Python, makes every call.
Rules are described to it as data (compiled_table.py), so no rule needs its own C++.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import activation
from ..engine.node import pull_back, push_forward, spread
from ..internals import (
    are_finite,
    below_autograd,
    is_functionalizing,
    skipped_by_dynamo,
    tangents_possible,
    value_of,
    values_readable,
)
from ..libraries import calls_library, checked, forget_recordings
from ..once import refuse_reload
from ..op import shortcuts
from ..op.derivatives import ReferenceDerivative, SavedBackward
from ..rule.definition import Rule
from ..rule.derivative import RuleDerivative
from ..schema import unflatten
from . import compiled_table
from .compiled_table import IN_PYTHON, ByRule, InPlaceByRule, UnlessPlain, Way

__all__ = [
    "IN_PYTHON",
    "ByRule",
    "CallsLayer",
    "Counts",
    "InPlaceByRule",
    "Served",
    "UnlessPlain",
    "Way",
    "activate",
    "attach",
    "attach_before_functorch",
    "before",
    "before_functorch",
    "collect",
    "counts",
    "detach",
    "detach_before_functorch",
    "forget_recordings",
    "in_python",
    "layers_here",
    "loaded",
    "recording_after",
    "recordings_played",
    "scope_here",
    "suspend",
    "this_thread",
]

refuse_reload(globals())


_numbers = itertools.count(1)
_derivatives: dict[
    int, RuleDerivative | ReferenceDerivative | SavedBackward | None
] = {}  # by the number of its table in the library, while the library has it
_layers: dict[int, Any] = {}  # by number, the meaning of a layer
_of_no_rule: dict[Any, int] = {}  # the numbers of tables without a derivative
_slots: dict[str, int] = {}  # of each operator whose calls were ever handled here
_general = False  # whether Python handles all calls


def loaded() -> bool:
    """Whether there is a library for this torch."""
    return calls_library is not None


def _attach(op: Any, python: int) -> int:
    schema = op._schema
    call = calls_library.manualgrad_calls_attach
    return checked(call(schema.name.encode(), schema.overload_name.encode(), ctypes.c_int64(python)))


def before(op: Any) -> None:
    """Call this before registering a Python kernel for ``op``: the current kernel becomes the one for stock calls."""
    if calls_library is not None:
        _attach(op, 0)


def attach(op: Any) -> None:
    """Call this after that: from now on the library receives the calls, and passes other than plain ones to Python."""
    if calls_library is not None:
        _slots[op.name()] = _attach(op, 1)


def before_functorch(op: Any) -> None:
    """`before`, for a kernel that is called before functorch's."""
    _attach_before_functorch(op, 0)


def attach_before_functorch(op: Any) -> None:
    """`attach`, for a kernel called before functorch's: it receives calls with a number, except under functionalize."""
    _attach_before_functorch(op, 1)


def _attach_before_functorch(op: Any, python: int) -> None:
    if calls_library is not None:
        call = calls_library.manualgrad_calls_numbers_attach
        checked(call(op._schema.name.encode(), op._schema.overload_name.encode(), ctypes.c_int64(python)))


def detach_before_functorch() -> None:
    """Remove these kernels."""
    if calls_library is not None:
        checked(calls_library.manualgrad_calls_numbers_detach())


def detach(op: Any) -> None:
    """Remove the library's kernel, if there is one. A thread inside of it crashes."""
    if calls_library is not None:
        schema = op._schema
        checked(calls_library.manualgrad_calls_detach(schema.name.encode(), schema.overload_name.encode()))


class Served(NamedTuple):
    """How the library handles the calls of one operator.

    Attributes:
        name: the operator.
        way: the route of its calls.
    """

    name: str
    way: Way


class CallsLayer:
    """The part of one override in the library.

    Args:
        meaning: the entry of `layers_here` for it.
        rules: how the calls of operators are handled.
        forward_modes: the same, if no layer has a rule for the operator.
        nested: whether it has the replacements for nested tensors.

    Attributes:
        number: 0 without the library.
    """

    number = 0

    def __init__(self, meaning: Any, rules: Sequence[Served], forward_modes: Sequence[Served], nested: bool) -> None:
        if calls_library is None:
            return
        described = compiled_table.layer(_numbers_of(rules), _numbers_of(forward_modes), nested)
        self.number = checked(calls_library.manualgrad_calls_define_layer(ctypes.byref(described)))
        _layers[self.number] = meaning

    def __del__(self) -> None:
        if self.number:
            calls_library.manualgrad_calls_drop_layer(ctypes.c_int64(self.number))


def activate(numbers: Sequence[int]) -> None:
    """Activate these layers, if the library was built without Python's headers and cannot do so itself."""
    if calls_library is not None and not activation.in_library:
        checked(calls_library.manualgrad_calls_activate(_array(numbers), ctypes.c_int64(len(numbers))))


def collect() -> None:
    """Release the derivatives and layers that the library no longer uses."""
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
    """The number of the thread's scope, beyond the process; 0 if there is none."""
    return int(calls_library.manualgrad_calls_scope())


def this_thread() -> int:
    """The number of this thread in the library; no other thread ever has it."""
    return int(calls_library.manualgrad_calls_thread())


def layers_here() -> list[Any]:
    """The ``meaning`` of each layer that is active only on this thread, not in the process."""
    found = (ctypes.c_int64 * 64)()
    n = calls_library.manualgrad_calls_scope_layers(found, ctypes.c_int64(64))
    if n > 64:
        found = (ctypes.c_int64 * n)()
        calls_library.manualgrad_calls_scope_layers(found, ctypes.c_int64(n))
    return [_layers[number] for number in found[:n]]


@contextmanager
def in_python() -> Iterator[None]:
    """Leave all calls, on all threads, to the general kernel, for tests and comparisons."""
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
    """Make eager calls of this thread PyTorch's own while the sum of these numbers is positive."""
    if calls_library is not None:
        calls_library.manualgrad_calls_suspend(ctypes.c_int64(by))


class Counts(NamedTuple):
    """Counts of the library's work on one thread.

    Attributes:
        plain: calls with a derivative, without Python.
        compiled: backwards by a compiled formula.
        python: vjps and jvps of rules in Python.
    """

    plain: int
    compiled: int
    python: int


def counts() -> Counts:
    """The counts of this thread so far; zeros without the library. For tests."""
    found = (ctypes.c_int64 * 3)()
    if calls_library is not None:
        calls_library.manualgrad_calls_counts(found)
    return Counts(*found)


def recordings_played() -> int:
    """The number of vjps that this thread has replayed; see csrc/calls/recorded.h. For tests."""
    return 0 if calls_library is None else checked(calls_library.manualgrad_calls_played())


@contextmanager
def recording_after(calls: int) -> Iterator[None]:
    """Record a vjp after this number of calls with the same key; never if negative. For tests and comparisons.

    Earlier recordings are forgotten.
    """
    if calls_library is None:
        yield
        return
    before = calls_library.manualgrad_calls_record_after(ctypes.c_int64(calls))
    forget_recordings()
    try:
        yield
    finally:
        calls_library.manualgrad_calls_record_after(ctypes.c_int64(before))


# -- tables -----------------------------------------------------------------------------------------------------------


def _array(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * max(len(numbers), 1))(*numbers)


def _numbers_of(served: Sequence[Served]) -> list[tuple[int, int]]:
    """The slot and the table of each operator whose calls are handled here."""
    return [(_slots[one.name], _table(one.way)) for one in served if one.name in _slots]


def _table(way: Way) -> int:
    """The number of a table, which exists until the next layer is made, and while a layer or a graph uses it."""
    derivative = way.derivative if isinstance(way, (ByRule, InPlaceByRule)) else None
    known: dict[Any, int] = _of_no_rule if derivative is None else derivative.tables
    key = (way.defers, way.but) if isinstance(way, ByRule) else type(way) if derivative is not None else way
    number = known.get(key)
    if number is not None and checked(calls_library.manualgrad_calls_hold(ctypes.c_int64(number))):
        return number
    number = next(_numbers)
    _derivatives[number] = derivative
    described = compiled_table.describe(number, way)
    checked(calls_library.manualgrad_calls_define_rule(ctypes.byref(described)))
    known[key] = number
    return number


def _table_of_formula(derivative: ReferenceDerivative | SavedBackward) -> int:
    """The number of a formula's table; 0 if Python handles its calls."""
    number = next(_numbers)
    described = compiled_table.describe_formula(number, derivative)
    if described.in_python and not described.pushes and any(derivative.differentiable):
        return 0
    _derivatives[number] = derivative
    checked(calls_library.manualgrad_calls_define_rule(ctypes.byref(described)))
    return number


shortcuts.tables[:] = [_table_of_formula]


# -- the vjp, called from C++ -----------------------------------------------------------------------------------------


class _Context(NamedTuple):
    """The attributes that the backward of an autograd function reads."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor | None, ...]
    static: tuple[Any, ...]


def _rule(number: int) -> Rule:
    found = _derivatives[number]
    assert isinstance(found, RuleDerivative)
    return found.rule


def _with_facts(derivative: RuleDerivative, constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """The constants of a call, with facts in their Python form."""
    split, end = len(derivative.constant_places), len(derivative.constant_places) + len(derivative.facts)
    facts = [_fact(what, x) for (_, what), x in zip(derivative.facts, constants[split:end])]
    return (*constants[:split], *facts, *constants[end:])


def _pull_back(rule: int, finite: bool, needed: Any, tensors: Any, constants: Any, grads: Any) -> list[Tensor | None]:
    derivative = _derivatives[rule]
    assert isinstance(derivative, (RuleDerivative, ReferenceDerivative))
    if isinstance(derivative, RuleDerivative):
        if finite and derivative.finite is not None:
            derivative = derivative.finite
        constants = _with_facts(derivative, constants)
    places = derivative.signature.tensor_like
    if isinstance(derivative, RuleDerivative) and derivative.has_lists:
        return _pull_back_lists(derivative, needed, tensors, constants, grads)
    context = _Context((False, *needed), tensors, constants)
    if tangents_possible((*tensors, *grads)):  # or a tracer: run the vjp in the general way
        wanted: list[Any] = [None] * len(derivative.signature.names)
        for i, yes in zip(places, needed):
            wanted[i] = yes
        found = pull_back(derivative, context, wanted, grads)
        return [found[i] for i in places]
    assert derivative.plain_backward is not None
    return list(derivative.plain_backward(context, *grads))[1:]


def _pull_back_lists(
    derivative: RuleDerivative, needed: Any, tensors: Any, constants: Any, grads: Any
) -> list[Tensor | None]:
    """The same for an operator with lists: everything is flat, and the lengths of the lists are the last constants."""
    *constants, of_arguments, of_saved, of_results = constants
    of_arguments, of_saved, of_results = (
        tuple(None if n < 0 else n for n in lengths) for lengths in (of_arguments, of_saved, of_results)
    )
    static = tuple(constants)
    context = _Context((False,), tensors, (of_saved, static) if derivative.saved_names[1] else static)
    places, wanted = derivative.signature.tensor_like, [False] * len(derivative.signature.names)
    for place, yes in zip(places, unflatten(needed, of_arguments)):
        wanted[place] = yes
    found = pull_back(derivative, context, wanted, unflatten(grads, of_results))
    return spread([found[place] for place in places], of_arguments)


def _push_forward(rule: int, tensors: Any, constants: Any, tangents: Any) -> list[Tensor | None]:
    derivative = _derivatives[rule]
    assert derivative is not None
    signature = derivative.signature
    lengths: Any = [None] * len(signature.names)
    out_lengths = None
    if signature.lists or signature.output_lists:
        *constants, lengths, out_lengths = constants
        lengths, out_lengths = ([None if n < 0 else n for n in ns] for ns in (lengths, out_lengths))
    inputs, along = [], []  # flat, with the constants
    given, moving, others = iter(tensors), iter(tangents), dict(zip(derivative.pushed_places, constants))
    for place, length in enumerate(lengths):
        if place in signature.tensor_like:
            count = 1 if length is None else length
            inputs += [next(given) for _ in range(count)]
            along += [next(moving) for _ in range(count)]
        else:
            inputs.append(compiled_table.value_at(signature, place, others.get(place)))
            along.append(None)
    return push_forward(
        derivative,
        inputs,
        list(given),
        along,
        lengths if signature.lists else None,
        out_lengths if signature.output_lists else None,
    )


def _defers(rule: int, values: Any) -> bool:
    defers = _rule(rule).defer_to_stock
    assert defers is not None
    return bool(defers(*values))


def _report(rule: int) -> bool:
    compiled = _rule(rule).compiled_vjp
    assert compiled is not None and compiled.reports is not None
    compiled.reports()
    return True


def _are_finite(values: Any) -> bool:
    tensors = [x for x in values if x is not None]
    return values_readable(tensors) and are_finite(tensors)


def _are_same(values: Any) -> bool:
    x, y = map(value_of, values)
    if not values_readable((x, y)) or x.device != y.device or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.layout is not torch.strided:  # a sparse tensor has several representations
        return False
    with below_autograd():
        # a device's sums may differ between runs, and would require a synchronization
        return not x.is_cpu or bool(torch.isclose(x, y, rtol=0, atol=0, equal_nan=True).all().item())


def _fact(what: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list) and (
        what == "dtype" or (value and not isinstance(value[0], int))
    ):  # of a list's tensors
        return [_fact(what, x) for x in value]
    return compiled_table.DTYPES[value] if what == "dtype" else torch.Size(value) if what == "sizes" else tuple(value)


if calls_library is not None:
    _operators = torch.library.Library("manualgrad_calls", "FRAGMENT")
    _operators.define(
        "pull_back(int rule, bool finite, Any needed, Any tensors, Any constants, Any grads) -> Tensor?[]"
    )
    _operators.impl("pull_back", skipped_by_dynamo(_pull_back), "CPU")
    _operators.define("push_forward(int rule, Any tensors, Any constants, Any tangents) -> Tensor?[]")
    _operators.impl("push_forward", skipped_by_dynamo(_push_forward), "CPU")
    _operators.define("report(int rule) -> bool")
    _operators.impl("report", skipped_by_dynamo(_report), "CPU")
    _operators.define("functionalizing() -> bool")
    _operators.impl("functionalizing", skipped_by_dynamo(is_functionalizing), "CPU")
    _operators.define("are_finite(Any values) -> bool")
    _operators.impl("are_finite", skipped_by_dynamo(_are_finite), "CPU")
    _operators.define("are_same(Any values) -> bool")
    _operators.impl("are_same", skipped_by_dynamo(_are_same), "CPU")
    _operators.define("defers(int rule, Any values) -> bool")
    _operators.impl("defers", skipped_by_dynamo(_defers), "CPU")
