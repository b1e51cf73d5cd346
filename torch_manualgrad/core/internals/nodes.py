"""The Python objects of nodes in autograd's graph: their classes and names.

PyTorch finds the class of a node of C++ by the node's type. The functions that do this are not in its Python interface,
so they are called by their names in its library.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import Node

__all__ = [
    "DERIVATIVES_TABLE",
    "SavedTensor",
    "address",
    "base_class",
    "followed",
    "function_of",
    "node_names",
    "register_class",
    "rename",
    "table_blocks",
]

SavedTensor: Any = torch._C._autograd.SavedTensor


def followed(ctx: Any) -> tuple[bool, ...]:
    """The gradients that the backward needs: ``needs_input_grad``, limited to those requested from
    ``autograd.grad``."""
    found = []
    for needed, (node, _) in zip(ctx.needs_input_grad[1:], ctx.next_functions):
        if needed and node is not None:
            try:
                needed = torch._C._will_engine_execute_node(node)
            except RuntimeError:  # a leaf whose gradient autograd.grad returns
                needed = True
        found.append(needed)
    return tuple(found)


# -- names ------------------------------------------------------------------------------------------------------------

DERIVATIVES_TABLE = Path(torch.__file__).parents[1] / "torchgen" / "packaged" / "autograd" / "derivatives.yaml"


def table_blocks() -> list[tuple[str, dict[str, str]]]:
    """PyTorch's table of derivatives: the schema of each entry, and its lines by their keys.

    Raises:
        FileNotFoundError: this torch comes without its table.
    """
    found = []
    for block in re.split(r"^- name: ", DERIVATIVES_TABLE.read_text(), flags=re.MULTILINE)[1:]:
        first, _, rest = block.partition("\n")
        found.append((first.strip(), dict(re.findall(r"^  (\w[\w, ]*): *(.*?) *$", rest, re.MULTILINE))))
    return found


@functools.cache
def node_names() -> dict[str, str]:
    """Operator, ``"mul.Tensor"`` -> the class of its nodes, ``"MulBackward0"``.

    The number counts the operators of the same name that have derivatives, in the order of the table.
    """
    if not DERIVATIVES_TABLE.exists():
        return {}
    found, seen = {}, Counter[str]()
    for schema, lines in table_blocks():
        operator, _, rest = schema.partition("(")
        outputs = rest.rpartition("->")[2]
        formulas = {
            key: text for key, text in lines.items() if not key.startswith(("result", "output_differentiability"))
        }
        words = frozenset(re.findall(r"\w+", outputs))
        if "dispatch" not in formulas and not any(
            text != "non_differentiable" and key not in words for key, text in formulas.items()
        ):
            continue
        prefix = "".join(word.title() for word in operator.partition(".")[0].split("_")) + "Backward"
        prefix = prefix.replace("ForwardBackward", "Backward")
        found[operator] = f"{prefix}{seen[prefix]}"
        seen[prefix] += 1
    return found


# -- classes ----------------------------------------------------------------------------------------------------------


class _Slot(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("function", ctypes.c_void_p))


class _Spec(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_int),
        ("item_size", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.POINTER(_Slot)),
    )


# Numbers and flags of Python's stable ABI: call, clear, dealloc, methods, traverse, getset; and a base class whose
# objects the garbage collector knows.
_SLOTS = (50, 51, 52, 64, 71, 73)
_FLAGS = 1 << 10 | 1 << 14 | 1 << 18


@functools.cache
def base_class() -> type:
    """A class with the methods of PyTorch's C++ nodes. Unlike PyTorch's own, it can have subclasses."""
    functions: Any = torch._C._functions
    like = functions.Error  # it has these methods and no others
    get = ctypes.pythonapi.PyType_GetSlot
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_int)
    slots = (_Slot * (len(_SLOTS) + 1))(*[_Slot(n, get(like, n)) for n in _SLOTS])
    make = ctypes.pythonapi.PyType_FromSpec
    make.restype, make.argtypes = ctypes.py_object, (ctypes.POINTER(_Spec),)
    spec = _Spec(b"torch_manualgrad.CppNode", like.__basicsize__, 0, _FLAGS, slots)
    found: type = make(ctypes.byref(spec))
    Node.register(found)
    return found


def register_class(type_info: int, made: type) -> None:
    """Let nodes of a C++ type, whose ``std::type_info`` is at an address, be objects of a subclass of `base_class`."""
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    register = library._ZN5torch8autograd19registerCppFunctionERKSt9type_infoP11_typeobject
    register.restype, register.argtypes = None, (ctypes.c_void_p, ctypes.py_object)
    register(type_info, made)


def address(node: Any) -> int:
    """Where the C++ object of a node is."""
    found = ctypes.c_int64.from_address(id(node) + object.__basicsize__).value
    assert found
    return found


def rename(function: Any, name: str) -> type:
    """Give another name to the class of the nodes of an autograd function, and return the class."""
    made: type = function._backward_cls
    made.__name__ = made.__qualname__ = name
    made.__module__ = "builtins"  # so that it prints like PyTorch's
    return made


def function_of(node: Any) -> type | None:
    """The class of the Python autograd function of a node; None for a C++ node."""
    return getattr(node, "_forward_cls", None)
