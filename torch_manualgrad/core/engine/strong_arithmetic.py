"""Strong zeros in any derivative: its operators in a different arithmetic.

A vjp is linear in the cotangents, so each of its products, quotients and matrix products has at most one factor that
comes from them. If that factor is exactly 0, `StrongArithmetic` makes the product 0, and omits the term from a sum of
products. A factor from a cotangent or tangent is recognized by its memory, and marks the results of operators that use
it.

It is a mode below autograd: values change, but autograd tracks the same calls. A second order differentiates these
calls, by rules with equally strong zeros, and has the other factor at a cotangent of 0. A cotangent or tangent of a
call is also one in the derivatives of the call: see `linear_among`.

derivatives/strong_zeros.py, and the files of rules, declare which operators multiply, and how, with `runs_strongly`,
`by_element`, `by_matrix`, `stands_for` and `decomposed`.
"""

from __future__ import annotations

import cmath
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..internals import (
    DispatchMode,
    decompositions,
    is_composite,
    is_known_zero,
    memory_of,
    pytree,
    reading_bits,
    value_of,
)
from ..registry import defined
from ..schema import is_differentiable

__all__ = [
    "StrongArithmetic",
    "by_element",
    "by_matrix",
    "decomposed",
    "linear_among",
    "multiplies",
    "running",
    "runs_strongly",
    "stands_for",
    "strong_product",
]

Handler = Callable[..., Any]
Product = TypeVar("Product", bound=Callable[..., Any])

_handlers: dict[Any, Handler] = {}  # called with the mode first
_substitutes: dict[Any, Callable[..., Any]] = {}
_decomposed: set[Any] = set()
_times: Callable[[Tensor, Tensor], Tensor] = torch.mul  # see `multiplies`


# -- declarations for operators ---------------------------------------------------------------------------------------


def runs_strongly(*ops: Any) -> Callable[[Handler], Handler]:
    """Declare the function that runs instead of these operators: ``(mode, op, *args, **kwargs) -> result``; a decorator."""

    def declare(function: Handler) -> Handler:
        _handlers.update(dict.fromkeys(ops, function))
        return function

    return declare


def by_element(op: Any) -> None:
    """Declare an elementwise operator: the result is 0 where all cotangents are 0, whatever its kernel does."""
    _handlers.setdefault(op, _element_by_element)


def by_matrix(*ops: Any) -> None:
    """Declare operators on each matrix of a batch: the result is 0 where all cotangents of a matrix are 0."""
    _handlers.update(dict.fromkeys(ops, _matrix_by_matrix))


def stands_for(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the equivalent of a fused PyTorch operator as a function of unfused operators: a decorator.

    For a custom op it is the reference.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        _substitutes[op] = function
        return function

    return declare


def decomposed(*ops: Any) -> None:
    """Declare fused operators that are replaced by PyTorch's decompositions. Backward operators always are."""
    _decomposed.update(ops)


def multiplies(function: Product) -> Product:
    """Declare the product of two tensors that is 0 where one factor is 0, in every order: a decorator."""
    global _times
    _times = function
    return function


def strong_product(factor: Tensor, derivative: Any) -> Tensor:
    """The product of a cotangent or tangent and a derivative, a tensor or a number; 0 where one factor is 0."""
    if is_known_zero(factor) or isinstance(derivative, Tensor) and is_known_zero(derivative):
        return factor * derivative  # still a known zero
    if not isinstance(derivative, Tensor):
        if isinstance(derivative, (int, torch.SymInt)) or cmath.isfinite(derivative):
            return factor * derivative
        derivative = factor.new_full((), derivative)
    return _times(factor, derivative)


# -- the arithmetic ---------------------------------------------------------------------------------------------------


class _Running(threading.local):
    """The strong arithmetic that runs on this thread."""

    mode: StrongArithmetic | None = None


running = _Running()


def linear_among(values: Sequence[Any]) -> list[int]:
    """The places of cotangents and tangents in the strong arithmetic that runs on this thread."""
    mode = running.mode
    if mode is None:
        return []
    return [i for i, x in enumerate(values) if isinstance(x, Tensor) and mode.is_linear(value_of(x))]


class StrongArithmetic(DispatchMode):
    """See the module's docstring.

    Args:
        linear: cotangents or tangents, on which the results depend linearly.
    """

    def __init__(self, linear: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: list[StrongArithmetic | None] = []
        self._linear: dict[int | None, Tensor] = {}  # by memory, which lives as long as the tensor here
        self._mark([*linear])

    def __enter__(self) -> Any:
        self._before.append(running.mode)
        running.mode = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        running.mode = self._before.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _mark(self, values: Any) -> None:
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor) and is_differentiable(x):
                value = value_of(x)
                if (memory := memory_of(value)) is not None:
                    self._linear[memory] = value

    def is_linear(self, x: Any) -> bool:
        """Whether this is a cotangent or tangent, or computed from one."""
        return isinstance(x, Tensor) and memory_of(x) in self._linear

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        with reading_bits():
            if not any(map(self.is_linear, pytree.tree_leaves((args, kwargs)))):
                return func(*args, **kwargs or {})
            result = self._strong(func, args, kwargs or {})
        self._mark(result)
        return result

    def _strong(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if (handler := _handlers.get(func)) is not None:
            return handler(self, func, *args, **kwargs)
        if (substitute := _substitute(func)) is not None:
            with self:
                return substitute(*args, **kwargs)
        if is_composite(func):  # below autograd it comes as it is called
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _substitute(func: Any) -> Callable[..., Any] | None:
    """The equivalent of a fused operator, as a function of unfused operators."""
    if func in _substitutes:
        return _substitutes[func]
    if (own := defined(func.name())) is not None:
        reference: Callable[..., Any] = own.reference
        return reference
    return decompositions.get(func) if "backward" in func._schema.name or func in _decomposed else None


def _element_by_element(mode: StrongArithmetic, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    result = func(*args, **kwargs)
    zeros = [x == 0 for x in (*args, *kwargs.values()) if mode.is_linear(x)]
    return torch.where(functools.reduce(torch.logical_and, zeros), 0, result)


def _matrix_by_matrix(mode: StrongArithmetic, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on batches of matrices: its first result is 0 for a matrix whose linear arguments are all 0."""
    matrices = [x for x in args if mode.is_linear(x) and x.dim() > 1]
    result = func(*args, **kwargs)
    if not matrices:
        return result
    zeros = [(x == 0).all(-1, keepdim=True).all(-2, keepdim=True) for x in matrices]
    zero = functools.reduce(torch.logical_and, zeros)
    if isinstance(result, Tensor):
        return torch.where(zero, 0, result)
    return (torch.where(zero, 0, result[0]), *result[1:])
