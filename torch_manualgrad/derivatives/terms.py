"""Derivatives that are sums: of terms that may be missing, or of one function for each tangent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_manualgrad.core.rule import ArgumentBinding, bound_to, parameters

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
    plan = [(_called(f), [names.index(n) for n in each], names.index(t)) for f, each, t in zip(terms, asked, tangents)]
    last = [names.index(name) for name in others]

    def jvp(*known: Any) -> Any:
        found = None
        for f, places, tangent in plan:
            if known[tangent] is not None and (term := f(*[known[i] for i in places])) is not None:
                found = term if found is None else found + term
        return found if then is None or found is None else then(found, *[known[i] for i in last])

    return bound_to(jvp, names)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The formula of a binding that only renames parameters and keeps their order; else the function itself."""
    return function.formula if isinstance(function, ArgumentBinding) and function.renames_only else function


def tangent_of_product(product: Callable[..., Any], *factors: str, others: Sequence[str] = ()) -> Callable[..., Any]:
    """The jvp of a product: the sum, over its factors, of the product with that factor replaced by its tangent.

    Args:
        product: an operator or a function, linear in each factor. It is called with the factors and then the others.
        factors: the names of its factors in the rule.
        others: the names of its other arguments.
    """

    def term(place: int) -> Callable[..., Any]:
        names = [f"{name}_t" if i == place else f"{name}_p" for i, name in enumerate(factors)]
        return bound_to(lambda *given: product(*given), [*names, *others])  # an operator takes no attributes

    return sum_over_tangents(*[term(place) for place in range(len(factors))])


def fitted_to(name: str, formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A vjp that reduces the formula's result to the shape and dtype of an input that was broadcast."""
    called = _called(formula)

    def vjp(sizes: Any, dtype: Any, *known: Any) -> Tensor:
        return called(*known).sum_to_size(sizes).to(dtype)

    return bound_to(vjp, [f"{name}_sizes", f"{name}_dtype", *parameters(formula)])
