"""Operators that write to arguments, as functions: they write to copies, and also return the copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.internals import custom_op_overload
from . import tree

__all__ = ["Unwritten", "without_grad", "without_writes"]


class Unwritten:
    """The function ``(*args) -> (results that are not arguments, new values of the written arguments)``.

    Attributes:
        op: the ``OpOverload``.
    """

    def __init__(self, fn: Callable[..., Any], op: Any) -> None:
        self.fn, self.op = fn, op
        reference = getattr(fn, "reference", None)
        if callable(reference):
            self.reference = Unwritten(reference, op)
        schema = op._schema
        self._places = [(i, schema.arguments[i].name) for i in written_places(op)]
        self._new = [i for i, r in enumerate(schema.returns) if r.alias_info is None]
        self._one = len(schema.returns) == 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values, named = list(args), dict(kwargs)
        others = tree.tensors((args, kwargs))
        written = []
        for i, name in self._places:
            given: Any = values if i < len(values) else named
            key = i if i < len(values) else name
            if given is named and name not in named:
                continue
            given[key] = _copy(given[key], others)
            written.append(given[key])
        result = self.fn(*values, **named)
        results = (result,) if self._one else result or ()
        found = (*[results[i] for i in self._new], *written)
        return found[0] if len(found) == 1 else found


def written_places(op: Any) -> list[int]:
    """The positions of the arguments that an ``OpOverload`` writes to."""
    arguments = op._schema.arguments
    return [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]


def without_writes(fn: Any) -> Any:
    """An operator that writes to arguments as `Unwritten`; anything else as it is."""
    op = custom_op_overload(fn) or custom_op_overload(getattr(fn, "op", None))
    return Unwritten(fn, op) if op is not None and written_places(op) else fn


def without_grad(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with those that are written to detached: writing to a leaf that requires grad is an error."""
    overload: Any = custom_op_overload(op)
    places = [] if overload is None else written_places(overload)
    names = [overload._schema.arguments[i].name for i in places]
    values = [_detached(v) if i in places else v for i, v in enumerate(args)]
    return values, {k: _detached(v) if k in names else v for k, v in kwargs.items()}


def _copy(value: Any, others: Sequence[Tensor]) -> Any:
    """A copy to write to; under vmap it has a batch dimension if another argument has one."""
    if isinstance(value, (list, tuple)):
        return [_copy(v, others) for v in value]
    if not isinstance(value, Tensor):
        return value
    for x in others:
        value = torch.where(torch.zeros_like(x, dtype=torch.bool).any(), torch.zeros_like(value), value)
    return value.clone()


def _detached(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_detached(v) for v in value]
    return value.detach() if isinstance(value, Tensor) else value
