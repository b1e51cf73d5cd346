"""Derivatives that are sums: of terms that may be missing, or of one function for each tangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_manualgrad.core.rule import bind, bound_to, parameters

__all__ = ["fitted_to", "sum_over_tangents", "tangent_of_product", "total"]


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are not None; None if all are."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def sum_over_tangents(*terms: Callable[..., Any], then: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A jvp: the sum of functions, each of which is linear in the one tangent among its parameters, ``<input>_t``.

    Args:
        terms: bound by the names of their parameters. A term without its tangent is left out.
        then: a linear function of the sum, which is its first parameter. The others are bound by their names.
    """
    asked = [parameters(term) for term in terms]
    tangents = [name for each in asked for name in each if name.endswith("_t")]
    assert len(tangents) == len(terms), f"expected one tangent for each term, got {tangents}"
    others = [] if then is None else parameters(then)[1:]
    names = list(dict.fromkeys([*(name for each in asked for name in each), *others]))
    places = [[names.index(name) for name in each] for each in asked]
    tangent_places = [names.index(name) for name in tangents]
    last = [names.index(name) for name in others]

    def jvp(*known: Any) -> Any:
        given = [(f, at) for f, at, t in zip(terms, places, tangent_places) if known[t] is not None]
        found = total(*[f(*[known[i] for i in at]) for f, at in given])
        return found if then is None or found is None else then(found, *[known[i] for i in last])

    return bound_to(jvp, names)


def tangent_of_product(operator: Any, *factors: str, **constants: Any) -> Callable[..., Any]:
    """A jvp: the sum over the factors of an operator of its result with the tangent of the factor instead.

    Args:
        operator: an operator or a function, linear in each of the factors.
        factors: the names of its parameters.
        constants: values of others.
    """
    primals = {name: f"{name}_p" for name in factors}
    return sum_over_tangents(*[bind(operator, **{**primals, name: f"{name}_t"}, **constants) for name in factors])


def fitted_to(name: str, formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A vjp: the formula's result in the shape and dtype of an input that was broadcast."""

    def vjp(sizes: Any, dtype: Any, *known: Any) -> Tensor:
        return formula(*known).sum_to_size(sizes).to(dtype)

    return bound_to(vjp, [f"{name}_sizes", f"{name}_dtype", *parameters(formula)])
