"""`custom_op`: an operator from a function, its schema and conditions on its calls."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import defined_ops
from ..schema import Signature
from .calls import CallRules
from .custom_op import CustomOp
from .implementation import DEVICE_KEYS
from .mutable import MutableOp

__all__ = ["custom_op"]


def custom_op(
    schema: str,
    *,
    mutates_args: str | Iterable[str] = (),
    device_types: str | Sequence[str] | None = None,
    same_device: bool = False,
    deterministic: bool = True,
    tags: Sequence[torch.Tag] = (),
    redefine: bool = False,
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Define an operator whose reference implementation is the decorated function.

    Args:
        schema: ``"namespace::name(Tensor x, Tensor? bias=None, *, float scale=1.0) -> (Tensor, Tensor)"``, in PyTorch's
            schema language; or ``"namespace::name"`` alone, with the types read from the function's annotations.
            Arguments include tensors, optional tensors and lists of tensors; results may be tensors, optional tensors,
            lists of tensors or numbers. A written argument is marked: ``Tensor(a!) buffer``. A result is a new value,
            or such an argument: ``-> Tensor(a!)``. Other aliases, such as views, are refused.
        mutates_args: the names of the tensor arguments that the function writes to, if the schema is read from
            annotations; "unknown" for all of them.
        device_types: the types of device that the function supports, such as "cuda". A tensor on another one raises,
            unless a kernel for that type is registered. None: any.
        same_device: whether all tensors must be on one device. CPU tensors without dimensions may be anywhere.
        deterministic: False if equal calls may differ. They then raise under ``torch.use_deterministic_algorithms(True)``,
            and the op has the tag ``nondeterministic_seeded``, so that compiled programs do not recompute it.
        tags: further tags of the operator.
        redefine: replace the custom op of that name, if there is one, with everything registered for it; the schema may
            differ. For notebooks, whose cells run again. No call of it may be in flight. ``torch.ops`` has the new op;
            the old `CustomOp` must not be used any more.

    Returns:
        A decorator that makes a `CustomOp`; the function is its implementation on every device until another is
        registered. An op that writes to arguments is a `MutableOp`.

    Raises:
        ValueError: the schema cannot be read, returns a view of an argument, has no namespace, or the name is taken;
            ``mutates_args`` names no tensor argument, or differs from the schema; a type of device is unknown.
        TypeError: no schema is given, or the decorated object is not a function.
    """
    if not isinstance(schema, str):
        raise TypeError(f"custom_op takes a schema, 'namespace::name(...) -> ...', got {type(schema).__name__}")
    names = mutates_args if isinstance(mutates_args, str) else tuple(mutates_args)
    if isinstance(names, str) and names != "unknown":
        raise TypeError(f"mutates_args: expected names of arguments in a tuple, or 'unknown', got {names!r}")
    devices = (device_types,) if isinstance(device_types, str) else device_types
    for device in devices or ():
        if device not in DEVICE_KEYS:
            raise ValueError(f"device_types: {device!r} is unknown; expected some of {list(DEVICE_KEYS)}")
    rules = CallRules(None if devices is None else tuple(devices), same_device, deterministic)
    marks = [*tags, *([] if deterministic else [torch.Tag.nondeterministic_seeded])]

    def define(function: Callable[..., Any]) -> CustomOp:
        text = schema
        if "(" not in schema:
            if not hasattr(function, "__globals__"):
                raise TypeError(
                    f"schema {schema!r} has no arguments, and reference: expected a Python function that has annotations, got {function!r}"
                )
            text = schema + _annotated_schema(function, names)
        elif names:
            written = [a.name for a in Signature(text).arguments if a.written]
            if names == "unknown" or {*names} != {*written}:
                raise ValueError(
                    f"mutates_args: the schema marks {written} as written to, but mutates_args={names!r}: {text}"
                )
        if redefine and (old := defined_ops.get(text.partition("(")[0].strip())) is not None:
            old.undefine()
        kind = MutableOp if "!" in text and Signature(text).written else CustomOp
        return kind(text, function, rules=None if rules == CallRules() else rules, tags=marks)

    return define


def _annotated_schema(function: Callable[..., Any], mutates_args: Any) -> str:
    """Arguments and results of a schema, by `torch.library.infer_schema`, which does not support optional results."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # the error of infer_schema names the annotation
        hints = {}
    declared = hints.get("return")
    results = typing.get_args(declared) if typing.get_origin(declared) is tuple else (declared,)
    optional = [_without_none(r) for r in results]
    if not any(o is not None for o in optional):
        return torch.library.infer_schema(function, mutates_args=mutates_args)
    inner = tuple(r if o is None else o for r, o in zip(results, optional))
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in signature.parameters.values()]
    result = tuple[inner] if len(inner) > 1 else inner[0]  # type: ignore[valid-type]
    shown = functools.wraps(function)(lambda *args, **kwargs: None)
    shown.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    arguments, _, found = torch.library.infer_schema(shown, mutates_args=mutates_args).rpartition(" -> ")
    pieces = [piece.strip() for piece in found.removeprefix("(").removesuffix(")").split(",")]
    written = ", ".join(p if o is None else f"{p}?" for p, o in zip(pieces, optional))
    return f"{arguments} -> {f'({written})' if len(pieces) > 1 else written}"


def _without_none(annotation: Any) -> Any:
    """X for ``X | None`` if X is a tensor or a list of tensors; else None."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return None
    inner = [a for a in typing.get_args(annotation) if a is not type(None)]
    return inner[0] if inner in ([Tensor], [list[Tensor]], [Sequence[Tensor]]) else None
