"""`torch.einsum` with a `Ragged` among the operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .along import of_values
from .conversion import require_same_structure
from .ragged import Ragged
from .reductions import sum
from .reshaping import one_ragged_dim

__all__ = ["einsum"]


def einsum(equation: str, *operands: Any) -> Any:
    """Sums of products over letters, as `torch.einsum`: ``einsum("bnd,dk->bnk", words, weight)``.

    Args:
        equation: with ``->``, without an ellipsis. The first letter of each `Ragged` is the batch, and stands only in
            such operands and first in the result.
        operands: one or more `Ragged` with the same components and one ragged dim, and dense tensors that have
            neither the batch nor the ragged dim.

    Returns:
        A `Ragged`; a dense (B, ...) if the ragged letter is summed, and a dense tensor if the batch is summed too.

    Raises:
        ValueError: an equation or operands that do not fit.
        RuntimeError: as in torch.
    """
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    terms, arrow, result = equation.replace(" ", "").partition("->")
    named = terms.split(",")
    if not arrow or "." in equation or len(named) != len(given):
        raise ValueError(f"equation: expected terms of {len(given)} operands, '->' and a result, got {equation!r}")
    first = next(i for i, x in enumerate(given) if isinstance(x, Ragged))
    nested, lengths = given[first], [x.dim() for x in given]
    if lengths != [len(term) for term in named]:
        raise ValueError(f"equation: operands have {lengths} dims, and {equation!r} names others")
    batch, ragged = named[first][0], named[first][one_ragged_dim(nested, "einsum")]
    values: list[Tensor] = []
    for i, (x, term) in enumerate(zip(given, named)):
        if isinstance(x, Ragged):
            require_same_structure(nested, x, name=f"operands[{i}]")
            fits = term[0] == batch and term[x.ragged_dims[0]] == ragged and term.count(batch) == 1
        else:
            fits = batch not in term and ragged not in term
        if not fits:
            raise ValueError(
                f"equation: {batch!r} is the batch and {ragged!r} the ragged dim; term {i} of {equation!r} does not fit"
            )
        values.append(x.values if isinstance(x, Ragged) else x)
    inside = ",".join(term[1:] if isinstance(x, Ragged) else term for x, term in zip(given, named))
    if batch not in result and ragged not in result:
        return torch.einsum(f"{inside}->{result}", *values)
    if result[0] != batch or result.count(batch) != 1:
        raise ValueError(f"equation: the result of {equation!r} has to begin with {batch!r}, the batch")
    if ragged not in result:
        return sum(of_values(nested, torch.einsum(f"{inside}->{ragged}{result[1:]}", *values), 0), 1)
    return of_values(nested, torch.einsum(f"{inside}->{result[1:]}", *values), result.index(ragged) - 1)
