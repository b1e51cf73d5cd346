"""Operators that write to an argument: they change the tangent in place, like the value."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...core.internals import below_levels, pytree
from ...core.schema import Signature
from .state import Levels, innermost, plainly, write

__all__ = ["is_written", "write_call"]


def is_written(op: Any) -> bool:
    """Whether an operator writes to an argument."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)


@functools.cache
def _functional(op: Any) -> tuple[Any, tuple[int, ...], bool]:
    """The operator that returns the values that ``op`` writes; the positions of its targets; whether it reads these.

    ``add`` of ``add_`` reads them, ``add`` of ``add.out`` does not. ``rrelu_with_noise_functional`` returns the
    results of ``rrelu_with_noise``, then the values that this writes. None if there is no operator.
    """
    namespace, _, packet = op._schema.name.partition("::")
    arguments = [(a.name, str(a.type)) for a in op._schema.arguments]
    written = tuple(i for i, a in enumerate(op._schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    out = all(a.kwarg_only for i, a in enumerate(op._schema.arguments) if i in written)
    unwritten = [a for i, a in enumerate(arguments) if i not in written]
    fresh = sum(r.alias_info is None for r in op._schema.returns)
    first = (packet, unwritten, False) if out else (packet.removesuffix("_"), arguments, True)
    for name, expected, reads in (first, (f"{packet}_functional", arguments, True)):
        found = getattr(getattr(torch.ops, namespace), name, None)
        for overload in found.overloads() if found is not None else ():
            candidate = getattr(found, overload)
            same = [(a.name, str(a.type)) for a in candidate._schema.arguments] == expected
            # the written values are returned after the results
            if same and len(candidate._schema.returns) == fresh + len(written) and not is_written(candidate):
                return candidate, written, reads
    return None, written, not out


def write_call(op: Any, name: str, signature: Signature, values: list[Any], levels: Levels) -> Any:
    """The operator, with tangents if an argument has one: runs the functional operator, and copies its results."""
    args, kwargs = signature.split(values)
    if torch.Tag.inplace_view in op.tags:  # x.t_(): no element is written
        return plainly(op, args, kwargs)
    functional, places, read = _functional(op)
    targets = [values[i] for i in places]
    if name in ("aten::copy_", "aten::_foreach_copy_"):
        made = _written(targets, [values[1]], levels)
        return made[0] if op._schema.returns else None
    if functional is None:
        raise NotImplementedError(
            f"{name}: an argument has a tangent at a dual level, and the operator writes to an argument and has no "
            "functional form"
        )
    if read:
        for i in places:  # a tensor saved for a gradient of the tangent must not be written to
            values[i] = pytree.tree_map_only(Tensor, Tensor.clone, values[i])
        args, kwargs = signature.split(values)
    else:
        kwargs = {k: v for k, v in kwargs.items() if signature.names.index(k) not in places}
    result = functional(*args, **kwargs)
    outputs = result if len(functional._schema.returns) > 1 else (result,)
    first = len(outputs) - len(targets)
    fresh, written = iter(outputs[:first]), dict(zip(places, _written(targets, outputs[first:], levels)))
    # an operator may return its targets in any order
    returns = tuple(next(fresh) if i is None else written[i] for i in (r.alias for r in signature.returns))
    return returns if len(returns) > 1 else returns[0] if returns else None


def _written(targets: Any, results: Any, levels: Levels) -> list[Any]:
    """The targets, with values and tangents of the results."""
    with below_levels():
        for target, result in zip(targets, results):
            if target is None:
                continue
            if isinstance(target, (list, tuple)):
                _written(target, result, levels)
                continue
            if target.shape != result.shape and not target.numel() and innermost([target], levels) is None:
                target.resize_(result.shape)  # out=torch.empty(0)
            write(target, result, levels)
    return list(targets)
