"""Derivatives that are sums: of terms that may be missing, or of one function for each tangent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_manualgrad.core.rule import bound_to, parameters

__all__ = ["fitted_to", "sum_over_tangents", "total"]


def total(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are not None; None if all are."""
    given = [term for term in terms if term is not None]
    return sum(given[1:], given[0]) if given else None


def sum_over_tangents(*terms: Callable[..., Any], then: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A jvp: the sum of functions, each of which is linear in a tangent, its first parameter.

    Args:
        terms: bound by the names of their parameters. A term without its tangent is left out.
        then: a linear function of the sum, which is its first parameter. The others are bound by their names.
    """
    asked = [parameters(term) for term in terms]
    others = [] if then is None else parameters(then)[1:]
    names = list(dict.fromkeys([*(name for each in asked for name in each), *others]))
    places = [[names.index(name) for name in each] for each in asked]
    last = [names.index(name) for name in others]

    def jvp(*known: Any) -> Any:
        given = [f(*[known[i] for i in at]) for f, at in zip(terms, places) if known[at[0]] is not None]
        found = total(*given)
        return found if then is None or found is None else then(found, *[known[i] for i in last])

    return bound_to(jvp, names)


def fitted_to(name: str, formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A vjp: the formula's result in the shape and dtype of an input that was broadcast."""

    def vjp(sizes: Any, dtype: Any, *known: Any) -> Tensor:
        return formula(*known).sum_to_size(sizes).to(dtype)

    return bound_to(vjp, [f"{name}_sizes", f"{name}_dtype", *parameters(formula)])
