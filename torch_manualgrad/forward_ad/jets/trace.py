"""The operators that a function of torch calls, found once for given shapes by a run on fake tensors, and cached.

torch passes the function to ``__torch_function__``, so it depends only on its arguments. The cached trace
consists of plain values, which a compiled graph may contain as constants.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.forward import Series
from torch_manualgrad.core.internals import (
    ReadsValues,
    calls_seen,
    constant_in_graphs,
    constant_of,
    fakes,
    is_autocast_enabled,
    is_composite,
    value_of_constant,
)
from torch_manualgrad.core.override.kernels import without_overrides
from torch_manualgrad.core.rule import exists, operator

from .table import jet_rule

OpOverload = type(torch.ops.aten.sin.default)

__all__ = ["Node", "Trace", "completed", "decode", "encode", "functional_form", "is_tensor", "traced"]


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a tensor or a jet."""
    return isinstance(x, (Tensor, Series))


class Node(NamedTuple):
    """One call of an operator.

    Attributes:
        name: of the operator, ``"aten::mul.Tensor"``.
        arguments: positional and keyword ones, encoded; tensors are numbers of places.
        places: of the outputs; encoded like a result.
    """

    name: str
    arguments: Any
    results: Any


class Trace(NamedTuple):
    """The calls in order, and the results of the function; tensors are numbered, the arguments first.

    Other tensors, unless they represent numbers, are constants.
    """

    nodes: tuple[Node, ...]
    result: Any
    constants: tuple[tuple[int, Tensor], ...] = ()


# An encoded value is (kind, content): kinds distinguish the equal values 1, 1.0 and True.
def encode(value: Any, tensors: list[Any], place: Callable[[Any], Any] | None = None) -> Any:
    """A value with numbers for its tensors, hashable if its constants are; the tensors are appended to the list.

    Args:
        value: tensors, constants, and lists, tuples, dictionaries and slices of them.
        tensors: numbered by their positions in this list.
        place: encodes a tensor, instead of appending it.
    """
    if is_tensor(value):
        if place is not None:
            return place(value)
        tensors.append(value)
        return ("tensor", len(tensors) - 1)
    if isinstance(value, tuple) and hasattr(value, "n_unnamed_fields"):  # as from torch.max(x, 0)
        return ("named", (type(value), tuple([encode(v, tensors, place) for v in value])))
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return (kind, tuple([encode(v, tensors, place) for v in value]))
    if isinstance(value, dict):
        return ("dict", tuple([(k, encode(v, tensors, place)) for k, v in value.items()]))
    if isinstance(value, slice):
        return ("slice", tuple([encode(v, tensors, place) for v in (value.start, value.stop, value.step)]))
    if isinstance(value, float):
        return ("float", value.hex())  # nan is equal to itself, and -0.0 not to 0.0
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "constant"
    return (kind, value)


def decode(encoded: Any, tensors: Any) -> Any:
    """Decode a tree, with these tensors."""
    kind, content = encoded
    if kind == "tensor":
        return tensors[content]
    if kind == "list":
        return [decode(v, tensors) for v in content]
    if kind == "tuple":
        return tuple([decode(v, tensors) for v in content])
    if kind == "named":
        return content[0]([decode(v, tensors) for v in content[1]])
    if kind == "dict":
        return {k: decode(v, tensors) for k, v in content}
    if kind == "slice":
        return slice(*[decode(v, tensors) for v in content])
    if kind == "float":
        return float.fromhex(content)
    return content


#: Operators that accept a number instead of a tensor; it then does not affect the dtype of the result.
_TAKE_NUMBERS = frozenset({"add", "sub", "rsub", "mul", "div", "floor_divide", "copy", "bitwise_left_shift"})

_kept: dict[Any, Trace] = {}
_AT_MOST = 1024


def traced(func: Callable[..., Any], template: Any, tensors: list[Any]) -> Trace:
    """The operators that ``func`` calls.

    Args:
        func: of torch.
        template: its arguments, encoded.
        tensors: those in the arguments; of jets, only the shape matters.
    """
    if isinstance(func, OpOverload) and not is_composite(func):
        (_, (args, kwargs)), place = template, ("tensor", len(tensors))
        return Trace((Node(func.name().removesuffix(".default"), ("tuple", (args, kwargs)), place),), place)
    if any(not isinstance(x, Series) and x.layout is not torch.strided for x in tensors):
        return _trace(func, template, (), tensors)  # the calls depend on layouts; a jet is strided
    likes = tuple([(tuple(x.shape), x.dtype, x.device) for x in tensors])
    if torch.compiler.is_dynamo_compiling():
        nodes, result = _constant(func, template, likes)
        return Trace(tuple([Node(*n) for n in nodes]), result)
    key = (func, template, likes, is_autocast_enabled(), torch.get_default_dtype())
    try:
        found = _kept.get(key)
    except TypeError:  # an unhashable constant
        return _trace(func, template, likes, tensors)
    if found is None:
        if len(_kept) >= _AT_MOST:
            _kept.clear()
        try:
            found = _kept[key] = _trace(func, template, likes, None)
        except NotImplementedError:
            raise
        except RuntimeError:  # a shape that depends on values, or an operator without fake tensors
            return _trace(func, template, likes, tensors)
    return found


@constant_in_graphs
def _constant(func: Callable[..., Any], template: Any, likes: Any) -> Any:
    nodes, result, constants = _trace(func, template, likes, None)
    if constants:
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)}: a tensor that it has made of numbers has no place in a graph here"
        )
    for node in nodes:
        try:
            jet_rule(node.name)  # made now, because Dynamo does not read the registries
        except NotImplementedError:  # it may receive no jets
            pass
    return tuple([tuple(n) for n in nodes]), result


def _trace(func: Callable[..., Any], template: Any, likes: Any, tensors: list[Any] | None) -> Trace:
    known: list[Any] = []  # kept alive, so that ids stay unique
    places: dict[int, int] = {}
    nodes: list[Node] = []
    constants: list[tuple[int, Tensor]] = []
    kept: list[Any] = []
    own: set[int] = set()  # ids of tensors made by calls here that share memory with no other
    numbers: dict[int, Any] = {}  # by the ids of the tensors that represent them

    def number(x: Any) -> Any:
        """The number that a kernel in Python has turned into this tensor; None if there is none."""
        value = numbers.get(id(x), value_of_constant(x) if id(x) not in places else None)
        return None if isinstance(value, Tensor) else value

    def numbered(x: Any) -> Any:
        if id(x) not in places:
            places[id(x)] = len(known)
            known.append(x)
        return ("tensor", places[id(x)])

    def constant(x: Any) -> Any:
        if id(x) not in places and (value := constant_of(x)) is not None:
            constants.append((numbered(x)[1], value))
        return numbered(x)

    def constant_or_number(x: Any) -> Any:
        value = number(x)
        return constant(x) if value is None else encode(value, [])

    def see(op: Any, args: Any, kwargs: Any, result: Any) -> None:
        several = result if isinstance(result, (list, tuple)) else [result]
        if not any(isinstance(x, Tensor) for x in several) and not op._schema.is_mutable:
            return  # a query, already answered
        if op is torch.ops.aten.lift_fresh.default and value_of_constant(result) is not None:
            return  # of one number: a constant
        if op is torch.ops.aten.alias.default and number(args[0]) is not None:
            numbers[id(result)] = number(args[0])
            kept.append(result)
            return
        takes_numbers = op._opname.rstrip("_") in _TAKE_NUMBERS
        arguments = encode((args, kwargs), [], constant_or_number if takes_numbers else constant)
        name = op.name().removesuffix(".default")
        if op._schema.is_mutable and args and id(args[0]) in own and result is args[0]:
            # only later calls see the write
            functional = functional_form(name)
            numeric = {x.dtype for x in _tensors((args, kwargs)) if x.is_floating_point() or x.is_complex()}
            if functional != "aten::copy" and exists(functional) and numeric == {result.dtype}:  # it may promote
                name, args = functional, completed(name, functional, args, kwargs)
                arguments = encode((args, kwargs), [], constant_or_number if takes_numbers else constant)
                del places[id(result)]
        elif op._opname == "_unsafe_view" or any(r.alias_info for r in op._schema.returns):
            own.difference_update(map(id, _tensors(args)))
        else:
            own.update(map(id, _tensors(result)))
        nodes.append(Node(name, arguments, encode(result, [], numbered)))

    with fakes(real=tensors is not None) as fake:
        inputs = [fake(*like) for like in likes] if tensors is None else [_value(x) for x in tensors]
        for x in inputs:
            known.append(x)
            places[id(x)] = len(known) - 1
        args, kwargs = decode(template, inputs)
        try:
            # the cached trace does not depend on the active rules
            with without_overrides(), calls_seen(see):
                result = func(*args, **kwargs)
        except ReadsValues:
            name = getattr(func, "__name__", str(func))
            raise NotImplementedError(
                f"{name} reads the values of a tensor inside of a function that runs on Taylor series; compute with "
                "tensors, or call .detach() first to hold the value constant"
            ) from None
        if not nodes and (what := _unseen_write(func)):
            raise NotImplementedError(
                f"{what} changes a tensor, but not by an operator, inside of a function that runs on Taylor series; use what "
                "returns a new tensor, such as x = x.detach()"
            )
        return Trace(tuple(nodes), encode(result, [], numbered), tuple(constants))


def _tensors(x: Any) -> list[Any]:
    found: list[Any] = []
    encode(x, found)
    return found


@functools.cache
def functional_form(name: str) -> str:
    """The operator that returns the values that an in-place operator writes.

    Its overload may have another name: that of ``pow_.Scalar`` is ``pow.Tensor_Scalar``.
    """
    base, dot, overload = name.partition(".")
    same = f"{base[:-1]}{dot}{overload}"
    if base == "aten::copy_":
        return "aten::copy"
    wanted = [str(a.type) for a in operator(name)._schema.arguments]
    namespace, _, short = base[:-1].partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), short, None)
    overloads = [] if packet is None else packet.overloads()
    for candidate in (overload or "default", *overloads):
        if candidate not in overloads:
            continue
        found = f"{base[:-1]}.{candidate}".removesuffix(".default")
        if [str(a.type) for a in operator(found)._schema.arguments] == wanted:
            return found
    return same


def completed(name: str, functional: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of an in-place operator for its functional form, whose arguments may have no defaults."""
    found = list(args)
    pairs = zip(operator(name)._schema.arguments, operator(functional)._schema.arguments)
    for given, wanted in list(pairs)[len(args) :]:
        if given.name in kwargs or wanted.has_default_value() or not given.has_default_value():
            break
        found.append(given.default_value)
    return tuple(found)


def _unseen_write(func: Callable[..., Any]) -> str:
    """The name of a function that changes its argument without calling an operator; "" for others.

    ``detach_`` is one, and the setter of ``x.data = y``. ``dropout_`` in evaluation calls nothing because it does nothing.
    """
    name = getattr(func, "__name__", "")
    if name in ("__set__", "__delete__"):
        return f"setting {getattr(getattr(func, '__self__', None), '__name__', 'an attribute')}"
    if not name.endswith("_") or name.endswith("__"):
        return ""
    packet = getattr(torch.ops.aten, name, None)
    composite = packet is not None and all(is_composite(getattr(packet, o)) for o in packet.overloads())
    return "" if composite else name


def _value(x: Any) -> Tensor:
    while hasattr(x, "primal"):
        x = x.primal
    return x.detach().clone()
