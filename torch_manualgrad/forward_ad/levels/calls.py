"""Runs an operator inside dual levels: its values, and its tangents by its rule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.internals import (
    accumulating,
    below_levels,
    decomposed,
    fwd_grad_is_enabled,
    in_functorch,
    is_composite,
    packing_later,
    storage_of,
)
from ...core.rule.catalogue import catalogue
from ...core.schema import Signature, is_differentiable, tensors_in, with_tensors
from .layout import detached
from .nested import nested_call
from .rules import jvp_of, not_differentiable, recomputed, reference_of, rule_of
from .state import (
    Level,
    Levels,
    as_packing,
    forget,
    give,
    in_formula,
    innermost,
    outside,
    packing,
    plainly,
    seeing,
    tangent,
    torch_unpacked,
    unknown_as,
    visible,
)
from .writes import is_written, write_call

__all__ = ["call"]

# Composite functions set these only if an input is differentiated, which they cannot see here.
_COMPLETE = {"aten::_linalg_svd": "compute_uv", "aten::_linalg_eigh": "compute_v"}

# These reinterpret memory, or replace a tensor's memory.
_REFUSED = {
    "aten::detach_": "write `x = x.detach()`",
    "aten::view.dtype": "a tangent cannot be read as another dtype",
    "aten::set_": "the tensor would lose its memory",
    "aten::set_.source_Tensor": "the tensor would lose its memory",
    "aten::set_.source_Storage": "the tensor would lose its memory",
    "aten::set_.source_Storage_storage_offset": "the tensor would lose its memory",
    "aten::resize_": "the tensor would lose its memory",
    "aten::resize_as_": "the tensor would lose its memory",
}  # fmt: skip


@functools.cache
def _facts(op: Any) -> tuple[str, Signature, bool, bool, bool]:
    """The name, the signature, and whether it is composite, returns a view, or writes to an argument."""
    schema = op._schema
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return op.name().removesuffix(".default"), Signature(schema), is_composite(op), view, is_written(op)


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator, at all levels that this thread sees."""
    levels = visible()
    tensors = list(tensors_in((*args, *kwargs.values())))
    if not levels or innermost(_parts(tensors), levels) is None:
        return plainly(op, args, kwargs)
    with packing_later(as_packing):
        return _dual_call(op, args, kwargs, tensors, levels)


def _dual_call(op: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor], levels: Levels) -> Any:
    """The operator on tensors, at least one in memory that has a tangent."""
    name, signature, composite, view, writes = _facts(op)
    level = innermost([x for x in _parts(tensors) if is_differentiable(x)], levels)
    if level is None:  # the others read the bits of memory with a tangent as integers
        if writes:
            raise NotImplementedError(f"{name}: integers are written to memory that has a tangent at a dual level")
        return plainly(op, args, kwargs)
    _refuse(name, tensors, args, levels)
    if name == "aten::detach":
        if packing() or accumulating():
            return plainly(op, args, kwargs)
        with below_levels():  # tensors that share memory share the tangent
            return detached(args[0])
    if name == "aten::_unpack_dual":  # PyTorch's own dual tensors: its level acts like the outermost
        with below_levels():
            return torch_unpacked(lambda x: op(x, *args[1:], **kwargs), args[0], levels)
    if any(x.is_nested for x in tensors):
        return nested_call(op, name, composite, args, kwargs)
    if (reference := reference_of(name)) is not None:
        return reference(*args, **kwargs)
    if composite:
        return decomposed(op, args, kwargs)
    if view:
        return plainly(op, args, kwargs)
    if writes:
        return write_call(op, name, signature, signature.bind(args, kwargs), levels)
    return _differentiated(op, name, signature, signature.bind(args, kwargs), levels, level)


def _parts(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors, and the tensors inside wrappers."""
    found = list(tensors)
    for x in tensors:
        if type(x) is not Tensor and hasattr(x, "__tensor_flatten__"):
            names, _ = x.__tensor_flatten__()
            found += _parts([getattr(x, n) for n in names])
    return found


def _refuse(name: str, tensors: Sequence[Tensor], args: Sequence[Any], levels: Levels) -> None:
    """Raise if a tangent would be lost."""
    if in_functorch():
        raise RuntimeError(
            f"{name}: a tensor with a tangent at a dual level is inside a torch.func transform; call make_dual and "
            "unpack_dual outside of it, or differentiate by levels alone"
        )
    if not fwd_grad_is_enabled():
        raise RuntimeError(
            f"{name}: a tensor with a tangent at a dual level is in inference mode, or inside of an autograd.Function, whose "
            "derivative dual levels do not know; make it a torch_manualgrad.custom_op, or call unpack_dual before"
        )
    for x in tensors:
        if x.layout is torch.jagged or hasattr(x, "__tensor_flatten__") and innermost(_parts([x]), levels) is not None:
            raise NotImplementedError(
                f"{name}: a {type(x).__name__} with layout {x.layout} is an argument next to a tensor with a tangent at "
                "a dual level, and cannot have one itself; for ragged batches use torch_manualgrad.nested.Ragged or "
                "the strided layout"
            )
    if name in _REFUSED and innermost(tensors[:1], levels) is not None:
        x = tensors[0]
        if (
            name != "aten::view.dtype"
            or is_differentiable(torch.empty(0, dtype=args[1], device="cpu"))
            and args[1] is not x.dtype
        ):
            raise NotImplementedError(f"{name} of a tensor with a tangent at a dual level: {_REFUSED[name]}")


def _differentiated(op: Any, name: str, signature: Signature, values: list[Any], levels: Levels, level: Level) -> Any:
    """The result, with its tangents at ``level``, the innermost at which an argument has one, and at outer levels."""
    values = with_tensors(signature, values)
    unread = _running(values, level) if name == "aten::native_batch_norm" else ()
    if name in _COMPLETE:
        values[signature.names.index(_COMPLETE[name])] = True
    args, kwargs = signature.split(values)
    with below_levels():
        constant = recomputed(rule_of(name))
        tangents = [
            None if i in unread or i in constant and unknown_as(v, level) else _tangents(v, level)
            for i, v in enumerate(values)
        ]
    known = [*tensors_in(values), *tensors_in(tangents)]
    others = [other for other in outside(levels, level) if innermost(known, [other]) is not None]
    with seeing(others) if others else below_levels():
        result = op(*args, **kwargs)
        outputs = signature.outputs(result)
        if name in catalogue and catalogue[name].kind == "nondifferentiable":
            return result
        if not any(is_differentiable(x) for x in tensors_in(outputs)):
            return result
        found = jvp_of(op, name, signature)(values, outputs, tangents, others)
    read = {id(storage_of(x)): x for x in known}  # the tensors keep their storages
    with below_levels():
        made = [_given(name, o, t, level, levels, read) for o, t in zip(outputs, found)]
        if not in_formula():  # formulas of rules handle such outputs
            for i, at in itertools.product(not_differentiable(rule_of(name)), (level, *others)):
                if outputs[i] is not None and is_differentiable(outputs[i]) and storage_of(outputs[i]) is not None:
                    forget(outputs[i], at, f"{signature.output_names[i]} of {name}")
    return tuple(made) if len(signature.returns) > 1 else made[0]


def _running(values: Sequence[Any], level: Level) -> tuple[int, ...]:
    """The positions of running statistics, whose tangents are not read.

    Batch normalization writes to them in training, but its schema does not say so: no rule has the tangent of the
    written values.
    """
    for i, what in ((3, "running_mean"), (4, "running_var")):
        if values[i] is None:
            continue
        if values[5]:
            with below_levels():
                forget(values[i], level, "a running statistic of aten::native_batch_norm")
        elif unknown := unknown_as(values[i], level):
            raise NotImplementedError(
                f"aten::native_batch_norm: the tangent of {what} at a dual level is unknown: it is {unknown}"
            )
    return (3, 4) if values[5] else ()


def _tangents(value: Any, level: Level) -> Any:
    """The tangents of an argument, for jvps."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [tangent(v, level) for v in value]
    return tangent(value, level)


def _given(name: str, output: Any, t: Any, level: Level, levels: Levels, read: dict[int, Tensor]) -> Any:
    """The output, with the tangent ``t``."""
    if isinstance(output, (list, tuple)):
        ts = [None] * len(output) if t is None else t
        return [_given(name, o, s, level, levels, read) for o, s in zip(output, ts)]
    if t is None or not isinstance(output, Tensor) or not is_differentiable(output):
        return output
    storage = storage_of(output)
    if storage is None:
        raise NotImplementedError(
            f"{name}: its result, of layout {output.layout}, cannot have a tangent at a dual level"
        )
    if t.shape != output.shape:
        t = t.expand(output.shape)
    if id(storage) in read:
        if level.shadows.get(storage) is not None:  # a view that the schema does not tell: it has its tangent by that
            return output
        output = output.clone()
    give(output, level, t, levels, own=name.startswith("aten::") and id(storage_of(t)) not in read)
    return output
