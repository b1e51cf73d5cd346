"""The functions registered for a custom op, with checks of their parameters and results."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...arguments import described
from ..internals import shares_memory
from ..schema import Signature, is_differentiable, tensors_in

__all__ = [
    "DEVICE_KEYS",
    "KINDS",
    "BackwardContext",
    "Implementation",
    "check_count",
    "check_gradient_of_rule",
    "check_gradients",
    "check_outputs",
    "check_reference",
    "check_tangents",
    "count",
    "differentiability",
    "exchange",
    "implementation",
    "is_foreign",
    "location_of",
]


# The dispatch keys of kernels for one type of device.
DEVICE_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU", "hpu": "HPU", "meta": "Meta"}
KINDS = ("default", "fake", "vmap", "save_for_backward", "backward", "jvp", "autograd")

count = itertools.count(1)  # numbers that identify implementations in this process
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class BackwardContext(NamedTuple):
    """The first argument of a backward.

    Attributes:
        needs_input_grad: input name -> whether its gradient is needed; a list of bool for a list of tensors.
    """

    needs_input_grad: dict[str, Any]


def location_of(function: Any) -> str:
    """The source location of a function, ``file:line``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


@dataclass(frozen=True)
class Implementation:
    """One function registered for an op, and its source location."""

    function: Callable[..., Any]
    output_differentiability: tuple[bool, ...] | None = None

    @property
    def identity(self) -> str:
        """An identifier that is unique to the function in this process."""
        try:
            number = _numbers.setdefault(self.function, next(count))
        except TypeError:  # an object that cannot be hashed or weakly referenced
            number = id(self.function)
        return f"{number}{self.output_differentiability or ''}"

    @functools.cached_property
    def location(self) -> str:
        return location_of(self.function)


def is_foreign(function: Callable[..., Any]) -> bool:
    """Whether a function is not the package's own, and may call ``torch.func``."""
    return not str(getattr(function, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")


def implementation(
    name: str, signature: Signature, kind: str, function: Callable[..., Any], marks: tuple[bool, ...] | None
) -> Implementation:
    """The function as an implementation of that kind of the op called ``name``.

    Raises:
        TypeError: its parameters do not fit the arguments.
    """
    made = Implementation(function, marks)
    given = {
        "save_for_backward": ["inputs", "output"],
        "backward": ["ctx", "saved", *[f"grad_{n}" for n in signature.output_names]],
        "jvp": ["inputs", "output", "tangents"],
    }.get(kind)
    if given is None:
        return made
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C have no signature
        return made
    try:
        parameters.bind(*given)
    except TypeError:
        raise TypeError(
            f"{name}: the {kind} implementation, written at {made.location}, is called with {len(given)} "
            f"arguments, ({', '.join(given)}), but its parameters are {parameters}"
        ) from None
    return made


def check_reference(name: str, signature: Signature, function: Callable[..., Any]) -> None:
    """Raise if a reference takes neither all arguments of the op called ``name`` nor those without a default.

    Raises:
        TypeError: it takes neither.
    """
    if isinstance(function, FunctionType):
        code, count, positional = function.__code__, len(signature.names), signature.positional
        if (code.co_argcount, code.co_kwonlyargcount) == (positional, count - positional):
            if [*code.co_varnames[:count]] == signature.names:
                return  # exactly the arguments of the op, found without the cost of an `inspect.Signature`
    try:
        parameters = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # functions written in C have no signature
        return
    every = signature.schema.arguments
    for given in ([a for a in every if not a.has_default_value()], every):
        by_place, by_name = ([a.name for a in given if a.kwarg_only is yes] for yes in (False, True))
        try:
            parameters.bind(*by_place, **dict.fromkeys(by_name))
            return
        except TypeError as error:
            reason = error
    names = ", ".join(a.name for a in every)
    raise TypeError(
        f"{name}: reference: expected a function of ({names}), got {function!r}, whose parameters are {parameters}: {reason}"
    )


def differentiability(name: str, signature: Signature, marks: Sequence[bool] | None) -> tuple[bool, ...] | None:
    """The marks, one for each output of the op called ``name``.

    Raises:
        RuntimeError: their number is wrong, or one marks an output that is not a tensor.
    """
    if marks is None:
        return None
    returns = signature.returns
    if len(marks) != len(returns):
        raise RuntimeError(
            f"{name}: output_differentiability={list(marks)} has {len(marks)} entries, but the op has "
            f"{len(returns)} outputs."
        )
    for i, (mark, output) in enumerate(zip(marks, returns)):
        if mark and not output.is_tensor_like:
            raise RuntimeError(
                f"{name}: output_differentiability={list(marks)} marks output {i} as differentiable, but it is "
                f"of type {signature.schema.returns[i].type}, not a Tensor or a list of them."
            )
    return tuple(bool(m) for m in marks)


def exchange(
    name: str, signature: Signature, registered: Mapping[str, Implementation], implementations: dict[str, Any]
) -> dict[str, Implementation | None]:
    """The arguments of `CustomOp.swap` as implementations.

    Args:
        name: of the op.
        signature: of the op.
        registered: the implementations of the op without the swap.
        implementations: the arguments of `CustomOp.swap`.

    Returns:
        An implementation of each kind, or None for "as if none were registered".

    Raises:
        TypeError: no such kind of implementation, or not a function.
    """
    marks = implementations.pop("output_differentiability", None)
    if marks is not None and implementations.get("backward") is None:
        raise TypeError(f"{name}: swap(output_differentiability=...) goes with a backward, and there is none")
    known = (*KINDS, *DEVICE_KEYS)
    layer: dict[str, Implementation | None] = {}
    for kind, function in implementations.items():
        if kind not in known:
            raise TypeError(f"{name}: swap has no {kind!r}; expected some of {list(known)}")
        if function is not None and not callable(function):
            raise TypeError(f"{name}: swap({kind}=...) takes a function or None, got {type(function).__name__}")
        own = registered.get(kind)
        chosen = differentiability(name, signature, marks)
        if chosen is None and own is not None:
            chosen = own.output_differentiability
        chosen = chosen if kind == "backward" else None
        layer[kind] = None if function is None else implementation(name, signature, kind, function, chosen)
    return layer


# -- results of the functions
# --------------------------------------------------------------------------------------------


def check_gradients(signature: Signature, location: str, values: Sequence[Any], found: Any) -> list[Any]:
    """The gradients in schema order, one for each argument.

    Args:
        signature: of the op.
        location: of the backward's source.
        values: the arguments of the call, with tensors replaced by their shapes, so that none is kept alive.
        found: the result of the backward.

    Returns:
        A gradient for each argument: None for zero, and for an argument that is not a tensor.

    Raises:
        RuntimeError: it is not a dict with exactly the names of the tensor arguments, or an entry does not fit.
    """
    result: list[Any] = [None] * len(values)
    if type(found) is dict and len(found) == len(signature.tensor_names):
        for i, name in zip(signature.tensor_like, signature.tensor_names):
            grad = found.get(name, signature)
            if grad is not None:
                if not isinstance(grad, Tensor) or grad.shape != values[i]:
                    break
                result[i] = grad
        else:
            return result
    return _check_each(signature, location, values, found)


def _check_each(signature: Signature, location: str, values: Sequence[Any], found: Any) -> list[Any]:
    """`check_gradients`, if there is a list or an error."""

    def error(what: str) -> NoReturn:
        raise RuntimeError(f"In the backward of {signature.name}, written at {location}: {what}")

    if not isinstance(found, dict):
        error(f"expected a dict from input name to gradient, got {_type(found)}.")
    expected = signature.tensor_names
    if len(found) != len(expected) or any(n not in found for n in expected):
        missing = [n for n in expected if n not in found]
        surplus = [n for n in found if n not in expected]
        parts = [f"missing {missing}"] * bool(missing) + [f"surplus {surplus}"] * bool(surplus)
        error(
            f"expected a gradient (None for zero) for each of the tensor arguments {expected} and for nothing else; "
            f"{' and '.join(parts)}."
        )
    result: list[Any] = [None] * len(values)
    for i, name in zip(signature.tensor_like, expected):
        grad, value = found[name], values[i]
        if grad is None:
            continue
        if isinstance(value, list):
            if not isinstance(grad, (list, tuple)):
                error(f"input '{name}' is a list: expected a list of gradients, got {_type(grad)}.")
            if len(grad) != len(value):
                error(f"input '{name}' is a list of {len(value)}: expected as many gradients, got {len(grad)}.")
            for k, (g, v) in enumerate(zip(grad, value)):
                _check_one(error, f"{name}[{k}]", v, g)
            result[i] = list(grad)
        else:
            _check_one(error, name, value, grad)
            result[i] = grad
    return result


def _check_one(error: Any, name: str, value: Any, grad: Any) -> None:
    if grad is None:
        return
    if not isinstance(grad, Tensor):
        error(f"expected a Tensor or None as the gradient for input '{name}', got {_type(grad)}.")
    if not isinstance(value, torch.Size):
        error(f"expected None as the gradient for input '{name}', which was not a Tensor but {value!r}; got a Tensor.")
    # Broadcasting would hide a wrong shape: the engine sums a gradient that is larger than its input.
    if grad.shape != value:
        error(f"the gradient for input '{name}' has shape {tuple(grad.shape)}, but the input has shape {tuple(value)}.")


def check_count(rule: str, what: str, names: Sequence[str], found: Any) -> None:
    """Check that a formula for several inputs or outputs returns as many gradients or tangents.

    Args:
        rule: its name.
        what: "vjp" or "jvp".
        names: of the inputs or outputs.
        found: the result of the formula.

    Raises:
        RuntimeError: it is not a tuple or list of that length.
    """
    if not isinstance(found, (tuple, list)) or len(found) != len(names):
        kind = "gradients" if what == "vjp" else "tangents"
        got = f"{len(found)}" if isinstance(found, (tuple, list)) else described(found)
        raise RuntimeError(
            f"rule {rule}: the {what} of {tuple(names)}: expected a tuple of {len(names)} {kind} (None for zero), got {got}"
        )


def check_gradient_of_rule(rule: str, name: str, grad: Any, size: Any, cotangents: Sequence[Any]) -> None:
    """Check that the result of a vjp for one input is a gradient of it.

    Args:
        rule: its name.
        name: of the input.
        grad: the gradient.
        size: of the input; a list of sizes for a list of tensors, None for None.
        cotangents: a gradient may have the shape of one of them. Autograd then sums it, as after broadcasting.

    Raises:
        RuntimeError: it is not.
    """
    if grad is None:
        return
    if isinstance(size, list):
        if not isinstance(grad, (tuple, list)) or len(grad) != len(size):
            got = f"{len(grad)}" if isinstance(grad, (tuple, list)) else described(grad)
            raise RuntimeError(f"rule {rule}: the vjp of {name!r}: expected a list of {len(size)} gradients, got {got}")
        for i, (g, s) in enumerate(zip(grad, size)):
            check_gradient_of_rule(rule, f"{name}[{i}]", g, s, cotangents)
        return
    if not isinstance(grad, Tensor) or not is_differentiable(grad):
        got = described(grad)
    elif size is None or grad.shape == size or any(grad.shape == c.shape for c in tensors_in(cotangents)):
        return
    else:
        got = f"shape {list(grad.shape)}"
    shape = "" if size is None else f" of shape {list(size)}"
    raise RuntimeError(
        f"rule {rule}: the vjp of {name!r}: expected a floating point or complex Tensor{shape}, or None, got {got}"
    )


def check_tangents(signature: Signature, location: str, outputs: Sequence[Any], found: Any) -> list[Any]:
    """The tangents of the outputs, one for each.

    Args:
        signature: of the op.
        location: of the jvp's source.
        outputs: the results of the op.
        found: the result of the jvp.

    Returns:
        The tangents, each in the dtype of its output; None for zero.

    Raises:
        RuntimeError: their number, types or shapes are not those of the outputs.
    """

    def error(what: str) -> NoReturn:
        raise RuntimeError(f"In the jvp of {signature.name}, written at {location}: {what}")

    if len(signature.returns) == 1:
        found = (found,)
    if not isinstance(found, (list, tuple)) or len(found) != len(outputs):
        got = f"{len(found)}" if isinstance(found, (list, tuple)) else _type(found)
        error(f"expected a tuple of {len(outputs)} tangents, one for each output (None for zero), got {got}.")
    result: list[Any] = []
    for name, output, tangent in zip(signature.output_names, outputs, found):
        listed = isinstance(output, (list, tuple))
        if listed and tangent is not None and (not isinstance(tangent, (list, tuple)) or len(tangent) != len(output)):
            got = f"{len(tangent)}" if isinstance(tangent, (list, tuple)) else _type(tangent)
            error(f"output '{name}' is a list of {len(output)}: expected as many tangents, got {got}.")
        pairs = zip(output, tangent) if listed and tangent is not None else [(output, tangent)]
        for o, t in pairs:
            if t is None:
                continue
            if not isinstance(t, Tensor):
                error(f"expected a Tensor or None as the tangent of output '{name}', got {_type(t)}.")
            if not isinstance(o, Tensor):
                error(f"expected None as the tangent of output '{name}', which is not a Tensor.")
            if tuple(t.shape) != tuple(o.shape):
                error(
                    f"the tangent of output '{name}' has shape {tuple(t.shape)}, but the output has shape "
                    f"{tuple(o.shape)}."
                )
            if t.is_complex() and not o.is_complex():
                error(f"the tangent of output '{name}' is {t.dtype}, but the output is {o.dtype}.")
        if tangent is not None:
            tangent = [_as(t, o) for o, t in zip(output, tangent)] if listed else _as(tangent, output)
        result.append(tangent)
    return result


def _as(tangent: Tensor | None, output: Tensor) -> Tensor | None:
    """The tangent in the dtype of the output, as the engine casts gradients."""
    return tangent if tangent is None or tangent.dtype == output.dtype else tangent.to(output.dtype)


def check_outputs(
    name: str, signature: Signature, location: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    """Check the result of an implementation of the op called ``name``.

    Args:
        name: of the op.
        signature: of the op.
        location: of the implementation's source.
        args, kwargs: of the call.
        result: its result.

    Raises:
        RuntimeError: it does not fit the schema, or shares memory with an input.
    """
    returns = signature.returns

    def error(what: str) -> NoReturn:
        raise RuntimeError(f"{name}, implemented at {location}: {what}")

    if len(returns) != 1 and (result is not None if not returns else not isinstance(result, tuple)):
        error(f"expected {f'a tuple of {len(returns)} outputs' if returns else 'None'}, got {type(result).__name__}.")
    outputs = signature.outputs(result)
    if len(outputs) != len(returns):
        error(f"expected a tuple of {len(returns)} outputs, got {len(outputs)}.")
    for declared, output in zip(returns, outputs):
        if output is None and declared.optional:
            continue
        if declared.is_tensor and not isinstance(output, Tensor):
            error(f"expected a Tensor as output '{declared.name}', got {type(output).__name__}.")
        if declared.is_tensor_list and not isinstance(output, (list, tuple)):
            error(f"expected a list of tensors as output '{declared.name}', got {type(output).__name__}.")
    made = tuple(tensors_in(outputs))
    if signature.written:
        made = tuple(tensors_in(o for o, r in zip(outputs, returns) if r.alias is None))
        values = signature.bind(args, kwargs)
        for declared, output in zip(returns, outputs):
            if declared.alias is not None and output is not values[declared.alias]:
                error(
                    f"output '{declared.name}' must be the argument '{signature.names[declared.alias]}' itself, "
                    "as the schema says."
                )
    if shares_memory(args, kwargs, made):
        for argument, value in (*zip(signature.names, args), *kwargs.items()):
            if any(x is y for x in made for y in tensors_in([value])):
                error(f"an output is the input '{argument}' itself. A custom op returns new tensors; return a clone.")
        error("an output shares memory with an input or another output. A custom op returns new tensors.")


def _type(x: object) -> str:
    return type(x).__name__
