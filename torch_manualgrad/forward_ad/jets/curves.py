"""Derivatives of high order along curves, by truncated Taylor series: their cost grows with the square of the order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.arguments import ArgumentError, checked
from torch_manualgrad.core.internals import pytree

from .arguments import ORDERS, check_like, check_numbers, check_order
from .compiled import called_as_f_is
from .examples import first_examples
from .tensor import Space
from .trace import is_tensor

__all__ = ["directional", "jet", "series_of", "start"]


@checked
@called_as_f_is
def jet(f: Callable[..., Any], primals: Sequence[Tensor], series: Sequence[Sequence[Tensor | None]]) -> tuple[Any, Any]:
    """The derivatives of ``f`` along a curve, given those of the curve.

    With $x(t)$ the curve through the primals, whose $k$-th derivative at 0 is the $k$-th term, the $k$-th term of the
    result is the $k$-th derivative of $f(x(t))$ at 0. Neither includes $1/k!$, as in ``jax.experimental.jet``.

    Args:
        f: a function of tensors, made of functions of torch; it returns tensors, in any pytree.
        primals: its arguments.
        series: for each argument its terms, from the first order on, of the argument's shape; None for zero. The common
            length is the order.

    Returns:
        The value, and the same tree with the list of terms in place of each tensor.

    Raises:
        NotImplementedError: an operator has no known Taylor series; the message has its name.
        TypeError: a number is read from a tensor, or a tensor is passed to a function outside torch.
        ValueError: the series do not fit the primals.
    """
    lengths = [len(terms) for terms in series]
    if len(primals) != len(series):
        raise ArgumentError(f"jet: series: expected one for each of {len(primals)} primals, got {len(series)}")
    if len({*lengths}) != 1 or not lengths[0]:
        raise ArgumentError(f"jet: series: expected one length of at least 1, got lengths {lengths}")
    if lengths[0] > ORDERS:
        raise ArgumentError(f"jet: series: expected at most {ORDERS} terms, got {lengths[0]}")
    for i, (primal, terms) in enumerate(zip(primals, series)):
        check_numbers(f"jet: primals[{i}]", primal)
        for k, term in enumerate(terms):
            if term is not None:
                check_like(f"jet: series[{i}][{k}]", term, f"primals[{i}]", primal)
    return series_of(Space(lengths[0]), f, primals, series)


def series_of(
    space: Space, f: Callable[..., Any], primals: Sequence[Any], series: Sequence[Any], batch_dims: int = 0
) -> tuple[Any, Any]:
    """The result of `jet`, in a space; the first ``batch_dims`` dimensions of the primals count examples."""

    def run() -> tuple[Any, Any]:
        inputs = [start(space, [p, *_coefficients(terms)], batch_dims) for p, terms in zip(primals, series)]
        leaves, tree = pytree.tree_flatten(f(*inputs))
        found = [space.coefficients(y) for y in leaves]
        values = [y[0] for y in found]
        terms = [_terms(y) if is_tensor(y[0]) else [] for y in found]
        return pytree.tree_unflatten(values, tree), pytree.tree_unflatten(terms, tree)

    return space.run(run)


def start(space: Space, coefficients: Sequence[Any], batch_dims: int) -> Any:
    """The jet of an argument; if its first dimensions count examples, operators that mix these raise."""
    found = space.jet(coefficients)
    shape = tuple([next(iter({n: None})) for n in found.shape])  # Dynamo closes a size that is the key of a dictionary
    if space.batch_of is not None and math.prod(shape[:batch_dims]) > 1:
        found.examples = first_examples(shape, batch_dims)
    return found


def _coefficients(terms: Sequence[Any]) -> list[Any]:
    return [t if t is None or k < 2 else t / float(math.factorial(k)) for k, t in enumerate(terms, start=1)]


def _terms(y: list[Any]) -> list[Tensor]:
    return [
        torch.zeros_like(y[0]) if c is None else c if k < 2 else c * float(math.factorial(k))
        for k, c in enumerate(y[1:], start=1)
    ]


@checked
@called_as_f_is
def directional(f: Callable[[Tensor], Any], x: Tensor, v: Tensor, order: int) -> Any:
    """The derivatives of ``f`` at ``x`` along the straight line in direction ``v``, from the first to the given order.

    Args:
        f: a function of one tensor; it returns tensors, in any pytree.
        x: the point.
        v: the direction, the shape of ``x``.
        order: from 1 to 170.

    Returns:
        For each tensor that $f$ returns, the list of $d^k/dt^k f(x + t v)$ at $t = 0$, $k = 1, ..., order$.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``order`` is out of range; ``v`` does not have the shape of ``x``, or is complex where ``x`` is real.
    """
    check_order("directional: order", order)
    check_like("directional: v", v, "x", x)
    return jet(f, (x,), ([v, *[None] * (order - 1)],))[1]
