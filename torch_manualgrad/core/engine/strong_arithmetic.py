"""Strong zeros in any derivative: the operators that it calls, with other arithmetic.

A vjp is linear in the cotangents, so each of its products, quotients and matrix products has at most one factor that
comes from them. Where that factor is exactly 0, `StrongArithmetic` makes the product 0, and leaves the term out of a
sum of products. Factors that come from a cotangent or tangent are told by their memory; what is made of one is one,
too.

It is a mode below autograd: values change, and what is tracked is the same as ever. A second order then differentiates
the derivative as it is written, by rules in which zero is as strong, and has the other factor at a cotangent of 0.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..internals import DispatchMode, decompositions, is_composite, memory_of, pytree, reading_bits, value_of
from ..registry import defined
from ..schema import is_differentiable

__all__ = ["StrongArithmetic", "by_element", "by_matrix", "linear_among", "stands_for"]

aten = torch.ops.aten
Handler = Callable[..., Any]

_handlers: dict[Any, Handler] = {}  # called with the mode first
_substitutes: dict[Any, Callable[..., Any]] = {}


def by_element(op: Any) -> None:
    """Declare an operator that works on each element: the result is 0 where all the cotangents are, whatever its kernel does."""
    _handlers.setdefault(op, _element_by_element)


def by_matrix(op: Any) -> None:
    """Declare an operator that works on each matrix of a batch: the result is 0 where the cotangents of a matrix are."""
    _handlers[op] = _matrix_by_matrix


def stands_for(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the function that computes the same as a fused operator of PyTorch's, in operators that are not fused: a decorator.

    For a custom op it is the reference.
    """

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        _substitutes[op] = function
        return function

    return declare


class _ThreadState(threading.local):
    mode: StrongArithmetic | None = None


_here = _ThreadState()


def linear_among(values: Sequence[Any]) -> list[int]:
    """The places of those that are cotangents or tangents in the strong arithmetic that runs on this thread."""
    mode = _here.mode
    if mode is None:
        return []
    return [i for i, x in enumerate(values) if isinstance(x, Tensor) and mode.is_linear(value_of(x))]


class StrongArithmetic(DispatchMode):
    """See the module's docstring.

    Args:
        linear: cotangents or tangents, on which what is computed depends linearly.
    """

    def __init__(self, linear: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before: list[StrongArithmetic | None] = []
        self._linear: dict[int | None, Tensor] = {}  # by its memory, which lives as long as the tensor here
        self._mark([*linear])

    def __enter__(self) -> Any:
        self._before.append(_here.mode)
        _here.mode = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _here.mode = self._before.pop()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _mark(self, values: Any) -> None:
        for x in pytree.tree_leaves(values):
            if isinstance(x, Tensor) and is_differentiable(x):
                value = value_of(x)
                if (memory := memory_of(value)) is not None:
                    self._linear[memory] = value

    def is_linear(self, x: Any) -> bool:
        """Whether this is a cotangent or tangent, or made of one."""
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
    """The function that computes the same as a fused operator, in operators that are not fused."""
    if func in _substitutes:
        return _substitutes[func]
    if (own := defined(func.name())) is not None:
        reference: Callable[..., Any] = own.reference
        return reference
    return decompositions.get(func) if "backward" in func._schema.name or func in _COMPOSED else None


_COMPOSED = {
    aten.addmm.default,
    aten.addmv.default,
    aten.addr.default,
    aten.baddbmm.default,
    aten.addcmul.default,
    aten.addcdiv.default,
    aten.lerp.Tensor,
    aten.mv.default,
    aten.dot.default,
    aten.vdot.default,
    aten.linalg_cross.default,
}


def _handles(*ops: Any) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        _handlers.update(dict.fromkeys(ops, function))
        return function

    return register


@_handles(aten.mul.Tensor, aten.mul.Scalar)
def _product(mode: StrongArithmetic, func: Any, a: Any, b: Any) -> Tensor:
    result = func(a, b)
    for factor in (a, b):
        if mode.is_linear(factor):
            result = torch.where(factor == 0, 0, result)
    return result


@_handles(aten.div.Tensor, aten.div.Scalar, aten.xlogy.Tensor, aten.special_xlog1py.default)
@_handles(aten.xlogy.Scalar_Other, aten.special_xlog1py.other_scalar)
def _quotient(mode: StrongArithmetic, func: Any, a: Any, b: Any) -> Tensor:
    result = func(a, b)
    return torch.where(a == 0, 0, result) if mode.is_linear(a) else result


@_handles(aten.mm.default, aten.bmm.default)
def _matrix_product(mode: StrongArithmetic, func: Any, a: Tensor, b: Tensor) -> Tensor:
    return _bilinear(mode, func, a, b)


@_handles(*filter(None, [getattr(aten._grouped_mm, "default", None)]))
def _grouped_product(mode: StrongArithmetic, func: Any, a: Tensor, b: Tensor, *how: Any, **kwargs: Any) -> Tensor:
    return _bilinear(mode, lambda a, b: func(a, b, *how, **kwargs), a, b)


@_handles(aten.convolution.default)
def _convolution(mode: StrongArithmetic, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Any:
    result = _bilinear(mode, lambda x, weight: func(x, weight, None, *how), x, weight)
    return result if bias is None else result + bias.view(-1, *[1] * (result.dim() - 2))


@_handles(aten.convolution_backward.default)
def _convolution_backward(
    mode: StrongArithmetic, func: Any, grad: Tensor, x: Tensor, weight: Tensor, sizes: Any, *how: Any
) -> list[Tensor | None]:
    *fixed, wanted = how
    result = list(func(grad, x, weight, sizes, *fixed, [False, False, wanted[2]]))
    if wanted[0]:
        result[0] = _bilinear(mode, lambda g, w: func(g, x, w, sizes, *fixed, [True, False, False])[0], grad, weight)
    if wanted[1]:
        result[1] = _bilinear(mode, lambda g, x: func(g, x, weight, sizes, *fixed, [False, True, False])[1], grad, x)
    return result


def _bilinear(mode: StrongArithmetic, function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Sums of products of an element of each, without the terms in which that of a cotangent is 0.

    These can be told from 0 only where the other element is not finite. It is taken for 0, unless in this sum it meets
    something that is not 0.
    """
    plain = function(a, b)
    met = torch.zeros_like(plain, dtype=torch.bool)
    finite_a, finite_b = a, b
    if mode.is_linear(a):
        met = function((a != 0).to(a.dtype), (~b.isfinite()).to(b.dtype)) != 0
        finite_b = torch.where(b.isfinite(), b, 0)
    if mode.is_linear(b):
        met = met | (function((~a.isfinite()).to(a.dtype), (b != 0).to(b.dtype)) != 0)
        finite_a = torch.where(a.isfinite(), a, 0)
    return torch.where(met, plain, function(finite_a, finite_b))


def _element_by_element(mode: StrongArithmetic, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    result = func(*args, **kwargs)
    zeros = [x == 0 for x in (*args, *kwargs.values()) if mode.is_linear(x)]
    return torch.where(functools.reduce(torch.logical_and, zeros), 0, result)


@_handles(aten._linalg_solve_ex.default, aten.linalg_lu_solve.default, aten.linalg_solve_triangular.default)
@_handles(aten.triangular_solve.default, aten.cholesky_solve.default, aten.ormqr.default)
def _matrix_by_matrix(mode: StrongArithmetic, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator on batches of matrices: its first result is 0 for a matrix for which all that is linear is 0."""
    matrices = [x for x in args if mode.is_linear(x) and x.dim() > 1]
    result = func(*args, **kwargs)
    if not matrices:
        return result
    zeros = [(x == 0).all(-1, keepdim=True).all(-2, keepdim=True) for x in matrices]
    zero = functools.reduce(torch.logical_and, zeros)
    if isinstance(result, Tensor):
        return torch.where(zero, 0, result)
    return (torch.where(zero, 0, result[0]), *result[1:])
