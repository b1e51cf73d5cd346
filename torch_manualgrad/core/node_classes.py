"""The classes of nodes: named as PyTorch's, with what a call has saved as attributes, ``_saved_self``, ``_raw_saved_self``.

Programs that inspect a graph read these: the name of a node, a saved tensor, hooks on one saved tensor. A node has the
attributes for what its rule saves, which may be less, or more, than what PyTorch's derivative saves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .calls_library import library
from .internals import SavedTensor, address, base_class, node_names, register_class, rename, skipped_by_dynamo
from .schema import Signature, unflatten

if TYPE_CHECKING:
    from .autograd import Derivative

__all__ = ["FACTS", "function_name", "node_name", "node_type", "show_saved"]

# What a fact of a tensor is called in PyTorch's nodes.
FACTS = {"sizes": "sym_sizes", "strides": "sym_strides", "storage_offset": "sym_storage_offset", "dtype": "scalar_type"}


def function_name(signature: Signature) -> str:
    """The autograd function's name; its node is called the same, with "Backward" after it."""
    words = signature.name.split("::")[-1].removesuffix("_forward").split("_")
    return "".join(word.title() for word in words)


def node_name(signature: Signature) -> str:
    """The name of the operator's nodes: that of PyTorch's, if PyTorch has one."""
    namespace, _, name = signature.full_name.partition("::")
    known = node_names() if namespace == "aten" else {}
    return known.get(name) or f"{function_name(signature)}Backward"


# -- nodes of an autograd function in Python --------------------------------------------------------------------------


def show_saved(function: Any, derivative: Derivative) -> None:
    """Name the nodes of an autograd function, and give them attributes for what it saves."""
    made = rename(function, node_name(derivative.signature))
    tensors, lists, constants = derivative.saved_names
    for i, name in enumerate(tensors):
        setattr(made, f"_saved_{name}", property(_from_context(i, lists, "saved_tensors")))
        setattr(made, f"_raw_saved_{name}", property(_from_context(i, lists, "_raw_saved_tensors")))
    for i, name in enumerate(constants):
        setattr(made, f"_saved_{name}", property(_constant_of_context(i, bool(lists))))


def _from_context(place: int, lists: list[int], attribute: str) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        found = getattr(node, attribute)
        if lists:
            found = unflatten(found, node.static[0])
        return tuple(found[place]) if place in lists else found[place]

    return read


def _constant_of_context(place: int, lists: bool) -> Callable[[Any], Any]:
    return lambda node: (node.static[1] if lists else node.static)[place]


# -- nodes of the library of calls ------------------------------------------------------------------------------------

_types: dict[Any, int] = {}  # by the name and the attributes


def node_type(derivative: Derivative) -> int:
    """The number of the C++ type of the nodes of plain calls: one for each name and set of attributes; 0 if none is left."""
    tensors, _, constants = derivative.saved_names
    key = (node_name(derivative.signature), tensors, constants)
    if key not in _types:
        number = len(_types) + 1
        if number >= library.manualgrad_calls_node_types():
            return 0
        register_class(library.manualgrad_calls_node_type(number), _node_class(*key))
        _types[key] = number
    return _types[key]


def _node_class(name: str, tensors: tuple[str, ...], constants: tuple[str, ...]) -> type:
    members: dict[str, Any] = {"__slots__": (), "__module__": "builtins", "__new__": _no_instance}
    for i, saved in enumerate(tensors):
        members[f"_saved_{saved}"] = property(_saved(i))
        members[f"_raw_saved_{saved}"] = property(_raw_saved(i))
    for i, constant in enumerate(constants):
        members[f"_saved_{constant}"] = property(_constant(i))
    return type(name, (base_class(),), members)


def _no_instance(cls: type, *args: Any, **kwargs: Any) -> Any:
    raise TypeError(f"cannot create '{cls.__name__}' instances")


def _saved(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        return torch.ops.manualgrad_calls.saved(address(node), place)

    return read


def _constant(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        found = torch.ops.manualgrad_calls.constant(address(node), place)
        return tuple(found) if isinstance(found, list) else found

    return read


def _raw_saved(place: int) -> Callable[[Any], Any]:
    def read(node: Any) -> Any:
        made = _SavedTensor.__new__(_SavedTensor)
        made.node, made.place = node, place
        return made

    return read


class _SavedTensor(SavedTensor):  # type: ignore[misc]
    """One saved tensor of a node of the library: PyTorch's class, whose own methods read an object that this one lacks."""

    node: Any
    place: int

    def register_hooks(self, pack_hook: Callable[[Any], Any], unpack_hook: Callable[[Any], Any]) -> None:
        number = next(_hook_numbers)
        _hooks[number] = (pack_hook, unpack_hook)
        torch.ops.manualgrad_calls.register_hooks(address(self.node), self.place, number)

    def unpack(self) -> Any:
        return torch.ops.manualgrad_calls.saved(address(self.node), self.place)

    @property
    def data(self) -> Any:
        """The tensor; under hooks, what they make of it again."""
        return self.unpack()


# -- hooks, called from C++ -------------------------------------------------------------------------------------------

_hook_numbers = itertools.count(1)
_hooks: dict[int, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}
_packed: dict[int, Any] = {}


def _pack(number: int, tensor: Any) -> bool:
    _packed[number] = _hooks[number][0](tensor)
    return True


def _unpack(number: int) -> Any:
    found = _hooks[number][1](_packed[number])
    if not isinstance(found, torch.Tensor):
        raise TypeError(
            f"Output of saved tensor unpack_hook expected to be a Tensor but got result of type {type(found).__name__}"
        )
    return found


def _drop(number: int) -> bool:
    _packed.pop(number, None)
    return _hooks.pop(number, None) is not None


if library is not None:
    _operators = torch.library.Library("manualgrad_calls", "FRAGMENT")
    _operators.define("pack(int number, Tensor tensor) -> bool")
    _operators.impl("pack", skipped_by_dynamo(_pack), "CPU")
    _operators.define("unpack(int number) -> Tensor")
    _operators.impl("unpack", skipped_by_dynamo(_unpack), "CPU")
    _operators.define("drop_hooks(int number) -> bool")
    _operators.impl("drop_hooks", skipped_by_dynamo(_drop), "CPU")
