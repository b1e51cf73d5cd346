"""Conversion of arguments: functions on `Ragged` take torch's nested tensors too, and return the same kind."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..arguments import ArgumentError, Check, arguments_of, described, explained, naming
from ..core.internals import JaggedStructure, breaks_graphs, jagged_structure, traced_nested_int
from .layouts import has_unused, jagged_values, to_jagged, tracked, unused_positions, used_positions
from .ragged import Ragged, check_values

__all__ = ["on_nested", "require_same_lengths", "require_same_structure", "same_structure"]


class _NeedsOffsets(Exception):
    """Raised when a function reads the offsets of a `_WithHoles`."""


class _WithHoles(Ragged):
    """The full buffer of a jagged tensor, with positions that belong to no component, and without its offsets.

    Most functions act on each position separately. They never read the offsets, and act on all positions, as PyTorch's
    do. A function that reads the offsets is called again with a copy without holes. So is a function with a dense argument
    that needs a gradient, because that gradient is a sum over positions; the holes are then computed separately.
    """

    __slots__ = ("structure",)

    structure: JaggedStructure

    def __init__(self, values: Tensor, shape: Sequence[int | None], structure: JaggedStructure) -> None:
        for name, value in (("values", values), ("shape", tuple(shape)), ("sizes", None), ("structure", structure)):
            object.__setattr__(self, name, value)
        check_values(self)

    @property
    def offsets(self) -> Tensor:  # type: ignore[override]
        raise _NeedsOffsets

    def read(self) -> Any:
        raise _NeedsOffsets

    @property
    def batch(self) -> int:
        return self.structure.offsets.shape[0] - 1

    def component(self, index: int) -> Tensor:
        starts, lengths = self._places()
        return self.values.narrow(self.packed_dim, starts[index], lengths[index])

    def components(self) -> list[Tensor]:
        starts, lengths = self._places()
        return [self.values.narrow(self.packed_dim, *place) for place in zip(starts, lengths)]

    def _places(self) -> tuple[list[int], list[int]]:
        offsets, lengths = self.structure.offsets, self.structure.lengths
        return offsets[:-1].tolist(), (offsets.diff() if lengths is None else lengths).tolist()

    def like(self, values: Tensor, shape: Sequence[int | None] | None = None) -> Ragged:
        made = _WithHoles(values, self.shape if shape is None else shape, self.structure)
        if values.shape[made.packed_dim] != self.values.shape[self.packed_dim]:
            raise ValueError(f"values: shape {list(values.shape)} does not fit {self.summary()}")
        return made


def on_nested(function: Callable[..., Any] | None = None, *, views: bool = False) -> Callable[..., Any]:
    """Let a function of `Ragged` accept torch nested tensors, strided or jagged, wherever it accepts a Ragged.

    Nested arguments, including those in lists and tuples, are converted. Every Ragged in the result (alone, in a list, a
    tuple or a named tuple) is converted back to the kind of the first nested argument. Tensors pass through. The function
    itself checks with `require_same_structure` which arguments must have the same structure.

    A result with the components of a jagged argument shares its structure: the same offsets tensor, the known bounds of
    its lengths, and the positions that belong to no component.

    Args:
        function: of one or more `Ragged`.
        views: whether its results may share memory with its arguments.

    Returns:
        The converting function; a decorator if ``function`` is None.

    Raises:
        TypeError: when called: no argument is a Ragged or a nested tensor, or an argument does not match its annotation.
    """

    if function is None:
        return functools.partial(on_nested, views=views)
    check = arguments_of(function, {Ragged: "a Ragged or a nested tensor"})

    def convert(*args: Any, **kwargs: Any) -> Any:
        try:
            return _converted_call(function, check, args, kwargs, _Conversion("all", views))
        except _NeedsOffsets:
            return _converted_call(function, check, args, kwargs, _Conversion("used", views))

    @breaks_graphs("torch_manualgrad.nested takes nested tensors outside of graphs only; a Ragged can be compiled")
    def outside_of_graph(*args: Any, **kwargs: Any) -> Any:
        return convert(*args, **kwargs)

    @functools.wraps(function)
    def on_either(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is Ragged and not any(map(_may_be_nested, (*args[1:], *kwargs.values()))):
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            check(args, kwargs)
            return naming(function, args, kwargs)
        if torch.compiler.is_dynamo_compiling() and any(map(_has_nested, (*args, *kwargs.values()))):
            return outside_of_graph(*args, **kwargs)
        return convert(*args, **kwargs)

    return on_either


def _converted_call(
    function: Callable[..., Any], check: Check, args: Sequence[Any], kwargs: dict[str, Any], conversion: _Conversion
) -> Any:
    try:
        inside, named = conversion.to_raggeds(args, kwargs)
    except ValueError as error:  # a nested tensor that cannot be converted
        given = {**dict(zip(inspect.signature(function).parameters, args)), **kwargs}
        raise explained(function.__name__, error, given) or error from None
    if not conversion.kinds:
        check(tuple(args), kwargs)
        found = ", ".join([type(a).__name__ for a in args] + [f"{k}={type(a).__name__}" for k, a in kwargs.items()])
        first = next(iter(inspect.signature(function).parameters))
        raise TypeError(f"{function.__name__}: {first}: expected a Ragged or a nested tensor, got ({found})")
    call: Callable[[], Any] = functools.partial(function, *inside, **named)
    if not torch.compiler.is_compiling():
        check(tuple(inside), named)
        _refuse_some_on_meta(function, inside, named)
        call = functools.partial(naming, function, inside, named)
    if not (conversion.has_holes and conversion.has_parameters):
        return conversion.convert_back(call())
    # the gradient of a dense argument is a sum over positions, which must leave out the holes
    if conversion.positions == "all":
        raise _NeedsOffsets
    result = call()
    inside, named = (unused := _Conversion("unused", conversion.views)).to_raggeds(args, kwargs)
    assert unused.has_holes
    try:
        rest = function(*inside, **named)
    except _NeedsOffsets:
        rest = None
    return conversion.convert_back(result, rest)


def _refuse_some_on_meta(function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> None:
    """Refuse a meta tensor among others, for which PyTorch returns uninitialized memory."""
    given = {**dict(zip(inspect.signature(function).parameters, args)), **named}
    devices = {n: x.device for n, x in given.items() if isinstance(x, (Tensor, Ragged))}
    if len({d.type for d in devices.values()}) > 1 and (meta := [n for n, d in devices.items() if d.type == "meta"]):
        others = ", ".join(f"{n} on {d}" for n, d in devices.items() if d.type != "meta")
        raise ArgumentError(
            f"{function.__name__}: {meta[0]}: expected a tensor with data, as {others}, got one on meta"
        )


def _may_be_nested(argument: Any) -> bool:
    return argument.is_nested or argument.is_meta if isinstance(argument, Tensor) else type(argument) in (list, tuple)


def _has_nested(argument: Any) -> bool:
    if type(argument) in (list, tuple):
        return any(map(_has_nested, argument))
    return isinstance(argument, Tensor) and argument.is_nested


class _Conversion:
    """Converts the arguments of one call to `Ragged`, and its results back to the arguments' kind and structure."""

    def __init__(self, positions: Literal["all", "used", "unused"], views: bool) -> None:
        # the positions of a buffer with holes: "all"; "used", those of the components; "unused", those of the holes, for
        # which dense arguments are constants
        self.positions = positions
        self.views = views
        self.has_holes = False
        self.has_parameters = False  # whether autograd tracks a dense argument
        self.kinds: list[torch.layout | None] = []
        self._known: dict[int, Ragged] = {}  # by the id of the nested tensor
        # by the id of a Ragged's offsets, which the entry keeps alive: their structure, the used positions, the total
        self._structures: dict[int, tuple[Tensor, JaggedStructure, Tensor | None, int]] = {}

    def to_raggeds(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [self.to_ragged(a) for a in args], {k: self.to_ragged(a) for k, a in kwargs.items()}

    def to_ragged(self, argument: Any) -> Any:
        if isinstance(argument, Ragged):
            self.kinds.append(None)
        elif isinstance(argument, Tensor):
            if argument.is_nested:
                self.kinds.append(argument.layout)
                if id(argument) not in self._known:  # as in x * x
                    jagged = argument.layout is torch.jagged
                    self._known[id(argument)] = self._jagged(argument) if jagged else Ragged.from_nested(argument)
                return self._known[id(argument)]
            if tracked(argument):
                self.has_parameters = True
                return argument.detach() if self.positions == "unused" else argument
        elif type(argument) in (list, tuple):
            return type(argument)(self.to_ragged(a) for a in argument)
        return argument

    def _jagged(self, nested: Tensor) -> Ragged:
        structure, values = jagged_structure(nested), jagged_values(nested, view=self.views)
        at, positions, offsets = structure.dim - 1, None, structure.offsets
        shape: list[int | None] = [offsets.shape[0] - 1, *values.shape]
        shape[structure.dim] = None
        total = values.shape[at]
        if has_unused(structure, total):
            self.has_holes = True
            if self.positions == "unused":
                values = values.index_select(at, unused_positions(structure, total))
            if self.positions != "used":
                return _WithHoles(values, shape, structure)
            positions, offsets = used_positions(structure)
            values = values.index_select(at, positions)
        self._structures[id(offsets)] = offsets, structure, positions, total
        return Ragged.trusted(values, offsets, shape)

    def convert_back(self, result: Any, rest: Any = None) -> Any:
        """Convert a result of the function; ``rest`` is its result for "unused"."""
        if self.kinds[0] is None:
            return result
        if isinstance(result, Ragged):
            return self._nested(result, rest)
        if isinstance(result, (list, tuple)):
            made = [self.convert_back(r, None if rest is None else rest[i]) for i, r in enumerate(result)]
            return type(result)(*made) if hasattr(result, "_fields") else type(result)(made)
        return result

    def _nested(self, result: Ragged, rest: Any) -> Tensor:
        layout = self.kinds[0]
        assert layout is not None  # `convert_back` has checked it
        if isinstance(result, _WithHoles):
            return self._jagged_of(result.values, result.structure._replace(dim=result.ragged_dims[0]))
        known = self._structures.get(id(result.offsets))
        if layout is not torch.jagged or result.sizes is not None or known is None:
            return result.to_nested(layout)
        _, structure, positions, total = known
        values, at = result.values, result.packed_dim
        if positions is not None and isinstance(rest, _WithHoles):
            order = torch.cat([positions, unused_positions(structure, total)]).argsort()
            values = torch.cat([values, rest.values], at).index_select(at, order)
        elif positions is not None:
            holes = values.new_zeros([total if d == at else n for d, n in enumerate(values.shape)])
            values = holes.index_copy(at, positions, values)
        return self._jagged_of(values, structure._replace(dim=at + 1))

    def _jagged_of(self, values: Tensor, structure: JaggedStructure) -> Tensor:
        view = values._is_view() and any(_base(values) is _base(x.values) for x in self._known.values())
        nested: Tensor = to_jagged(values, structure, view=view)
        return nested


def _base(x: Tensor) -> Tensor:
    """The tensor that ``x`` is a view of; ``x`` itself if it is not a view."""
    return x._base if x._base is not None else x


def require_same_structure(x: Ragged, other: Ragged, *, name: str = "other") -> None:
    """Check that the components of two batches have the same sizes in the same ragged dims; dense sizes may differ.

    If the two do not share one offsets tensor, the offsets are compared, which synchronizes with a GPU (not in a graph).

    Args:
        x: the first batch.
        other: the second batch.
        name: the second batch's name in errors.

    Raises:
        ValueError: names the difference: the number of components or dims, the ragged dims, the offsets or the sizes.
        TypeError: the second batch is none.
    """
    if not isinstance(other, Ragged):
        raise TypeError(f"{name}: expected a Ragged, got {described(other)}")
    if isinstance(x, _WithHoles) and isinstance(other, _WithHoles) and same_structure(x.structure, other.structure):
        return
    for what, a, b in (
        ("number of components", x.batch, other.batch),
        ("number of dims", x.dim(), other.dim()),
        ("ragged dims", x.ragged_dims, other.ragged_dims),
    ):
        if a != b:
            raise ValueError(f"{name}: the {what} differ: {a} and {b}")
    require_same_lengths(x, other, name=name)


def require_same_lengths(x: Ragged, other: Ragged, *, name: str = "other") -> None:
    """`require_same_structure` of the sizes in the ragged dims only, which need not be the same dims."""
    if x.offsets is other.offsets and x.sizes is other.sizes:
        return
    if torch.compiler.is_compiling() or type(x.offsets) is not Tensor or type(other.offsets) is not Tensor:
        totals = x.values.shape[x.packed_dim], other.values.shape[other.packed_dim]
        if x.sizes is None and totals[0] != totals[1]:
            raise ValueError(f"{name}: the sums of the lengths differ: {totals[0]} and {totals[1]}")
        if torch.compiler.is_dynamo_compiling():  # which traces this for a Ragged only
            return
        sizes = traced_nested_int(x.offsets), traced_nested_int(other.offsets)
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(f"{name}: in a graph, the sizes of the ragged dims differ: {sizes[0]} and {sizes[1]}")
        return
    if x.read() != other.read():
        what = "lengths" if x.sizes is None else "sizes"
        mine, others = (b.lengths if b.sizes is None else b.sizes for b in (x, other))
        raise ValueError(f"{name}: the {what} differ: {mine.tolist()} and {others.tolist()}")


def same_structure(a: JaggedStructure, b: JaggedStructure) -> bool:
    """Whether two structures are known to be equal without reading their numbers."""
    return a.offsets is b.offsets and a.lengths is b.lengths and a.dim == b.dim
