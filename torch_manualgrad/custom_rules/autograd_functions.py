"""``torch.autograd.Function`` in compiled functions: a call becomes a node with the traces of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import zip_longest
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..core.calls_in_graphs import marked
from ..core.internals import breaks_graphs, pytree
from ..core.schema import is_differentiable
from .function import CustomFunction
from .tracing import OUT_OF_CONSTANTS, marked_parts, moving

__all__ = ["AppliedFunction", "rule_of"]

_NAME = "_manualgrad_rule"
_once = once_differentiable(Function.backward).__code__  # of each function that the decorator returns
_GRAPH = "torch_manualgrad: an autograd.Function runs outside of compiled graphs"


@breaks_graphs("torch_manualgrad: an autograd.Function marks an argument as dirty, or returns too few gradients")
def _end_graph() -> None:
    """Dynamo ends the graph before ``apply``, which then runs uncompiled."""


class Context:
    """The ``ctx`` that Dynamo passes to the methods of a Function.

    Args:
        args: of ``apply``.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self.saved_tensors: tuple[Any, ...] = ()
        self._unfilled, self._constants = False, ()
        # the gradients that are not needed are removed from the graph later
        self.needs_input_grad = tuple([isinstance(x, Tensor) and is_differentiable(x) for x in args])

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """For a jvp, which the functions traced here lack."""

    def set_materialize_grads(self, value: bool) -> None:
        self._unfilled = not value

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._constants = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        _end_graph()


class AppliedFunction(CustomFunction):
    """The rule of a Function.

    Args:
        function: the class.
    """

    kind = "custom_vjp"

    def __init__(self, function: type[Function]) -> None:
        super().__init__(function.apply)
        self.function, self.name, self._signature = function, function.__name__, None
        self.fun = self._value
        self._has_setup = function.setup_context is not Function.setup_context
        parameters = inspect.signature(function.forward).parameters.values() if self._has_setup else ()
        defaults = [p.default for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._defaults = [value for value in defaults if value is not inspect.Parameter.empty]
        self._required = len(defaults) - len(self._defaults)

    def _forward(self, args: Sequence[Any]) -> tuple[Any, Context]:
        ctx = Context(args)
        if not self._has_setup:
            return self.function.forward(ctx, *args), ctx
        out = self.function.forward(*args)
        self.function.setup_context(ctx, tuple(args), out)
        return out, ctx

    def _value(self, *args: Any) -> Any:
        """The result, and for each of its parts whether it is a constant."""
        out, ctx = self._forward(args)
        parts = out if isinstance(out, tuple) else (out,)
        return out, tuple([_is_among(x, ctx._constants) for x in parts])

    def applied(self, *args: Any) -> Any:
        """The same as ``apply``; for Dynamo."""
        missing = self._defaults[max(len(args) - self._required, 0) :]  # setup_context receives them, too
        out, is_constant = self(*args, *missing)
        if isinstance(out, tuple):
            return tuple([x.detach() if fixed else x for x, fixed in zip(out, is_constant)])
        return out.detach() if is_constant[0] else out

    @breaks_graphs(_GRAPH)
    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same as `_value`, where Dynamo does not trace the call."""
        out = self.function.apply(*args, **kwargs)
        return out, (False,) * (len(out) if isinstance(out, tuple) else 1)

    def traced_rule(self, arguments: Sequence[Any], nondiff: Sequence[Any], moved: Sequence[Any], result: Any) -> Any:
        found, ctx = self._forward(arguments)
        kept = pytree.tree_map(lambda x: x.detach() if _is_among(x, ctx._constants) else x, dict(ctx.__dict__))
        out = marked(found, OUT_OF_CONSTANTS, self.number)
        for name, value in marked(kept, "residual", self.number).items():
            setattr(ctx, name, value)
        cotangents = moving(out, "cotangent", self.number)
        given = []
        for x, g in zip(out, cotangents) if isinstance(out, tuple) else [(out, cotangents)]:
            filled = isinstance(x, Tensor) and g is None and not ctx._unfilled
            given.append(torch.zeros(x.shape, dtype=x.dtype, device=x.device) if filled else g)
        found = self.function.backward(ctx, *given)
        grads = found if isinstance(found, tuple) else (found,)
        count = len(arguments)
        if any(g is not None for g in grads[count:]) or any(isinstance(x, Tensor) for x in arguments[len(grads) :]):
            _end_graph()
        fitted = [_fitted(g, x) if isinstance(x, Tensor) else None for g, x in zip_longest(grads[:count], arguments)]
        return out, None, cotangents, marked_parts(fitted, arguments, self.name, "grad", self.number)


def _is_among(x: Any, others: Sequence[Any]) -> bool:
    return any(x is other for other in others)


def _fitted(grad: Any, x: Tensor) -> Any:
    """A gradient, summed as by autograd to the shape of the argument."""
    if grad is None or not is_differentiable(x):
        return None
    return grad if grad.shape == x.shape else grad.sum_to_size(x.shape)


def rule_of(function: type[Function]) -> AppliedFunction | None:
    """The rule of a Function; None if it has more than a ``backward`` that can be differentiated."""
    base, code = Function, getattr(function.backward, "__code__", None)
    if function.jvp is not base.jvp or function.vjp is not base.vjp or code is None or code is _once:
        return None
    if not isinstance(function.forward, (FunctionType, MethodType)):
        return None
    if _NAME not in vars(function):  # kept by the class: a table would keep classes that functions define
        setattr(function, _NAME, AppliedFunction(function))
    rule: AppliedFunction = vars(function)[_NAME]
    return rule
