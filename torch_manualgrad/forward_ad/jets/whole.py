"""Functions on jets that are differentiated as a whole, such as custom rules or solutions of equations.

Along a curve x(t), the function depends on the number t, and nested ``torch.func.jvp`` differentiates it in t. Order k
takes 2^k evaluations, as without jets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.forward import hooks
from torch_manualgrad.core.internals import pytree
from torch_manualgrad.core.schema import is_differentiable

from .fallback import by_series
from .linear import primal_of, term_of
from .rows import densified
from .tensor import is_jet

__all__ = ["by_jvps"]


def by_jvps(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """``function(*args)``, for pytrees that contain jets.

    Raises:
        NotImplementedError: jets of several spaces, or of a batch of examples, which the function might mix.
    """
    leaves, spec = pytree.tree_flatten(tuple(args))
    leaves = [densified(x) for x in leaves]
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    spaces = {id(x.space): x.space for x in leaves if is_jet(x)}
    (space,) = spaces.values() if len(spaces) == 1 else (None,)
    inner = [] if space is None else [primal_of(space, leaves[i]) for i in places]
    if space is None or any(map(is_jet, inner)):
        raise NotImplementedError(
            "Taylor series in each other, as in biharmonic, are not known of a function with a rule of its own, or of the solution "
            "of an equation; use torch.func.jvp for the outer derivatives"
        )
    if space.batch_of is not None:
        raise NotImplementedError(
            f"{space.batch_of}: it is not known whether a function with a rule of its own, or the solution of an equation, treats "
            "each example of the batch separately; use torch.vmap in place of batch_dims"
        )
    structure: list[Any] = []

    def flat(*tensors: Tensor) -> list[Any]:
        full = list(leaves)
        for i, x in zip(places, tensors):
            full[i] = x
        found, result = pytree.tree_flatten(function(*pytree.tree_unflatten(full, spec)))
        structure[:] = [result]
        return found

    outputs = flat(*inner)
    terms = [[term_of(space, leaves[i], k) for i in places] for k in range(1, space.order + 1)]
    smooth = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and is_differentiable(x)]

    def raised(rows: list[list[Any]], known: list[Any]) -> list[list[Any]]:
        return _derivatives(lambda *tensors: [flat(*tensors)[i] for i in smooth], rows)

    found = by_series(space, raised, inner, terms, [outputs[i] for i in smooth])
    for n, i in enumerate(smooth):
        outputs[i] = space.jet([outputs[i], *[row[n] for row in found]])
    return pytree.tree_unflatten(outputs, structure[0])


def _derivatives(function: Callable[..., Sequence[Tensor]], rows: list[list[Any]]) -> list[list[Any]]:
    """The coefficients of the results from the first order on, given those of the arguments, order by order."""
    order = len(rows) - 1
    numbers = [x for x in rows[0] if is_differentiable(x)]
    t = torch.zeros((), dtype=numbers[0].real.dtype, device=numbers[0].device)

    def at(t: Tensor) -> Any:
        given = []
        for x, *terms in zip(*rows):
            change: Any = None
            for term in reversed(terms):  # Horner's scheme
                change = term if change is None else change * t if term is None else change * t + term
            given.append(x if change is None else x + (change * t).to(x.dtype))
        return (tuple(function(*given)),)

    along: Callable[[Tensor], Any] = at
    for _ in range(order):
        along = _with_next(along)
    return [[x / math.factorial(k) for x in row] for k, row in enumerate(along(t)) if k]


def _with_next(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """A function that also returns the derivative of its last result."""

    def both(t: Tensor) -> Any:
        pair: Any = torch.func.jvp(function, (t,), (torch.ones_like(t),))
        values, slopes = pair
        return (*values, slopes[-1])

    return both


hooks.by_jvps = by_jvps
