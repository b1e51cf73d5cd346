"""The transpose of a linear map that a rule computes: a jvp from a bwd, a vjp from a jvp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.internals import is_tracked_here, value_of, values_readable
from ..implicit.operators import matching, pull_back

__all__ = ["transposed"]


def transposed(
    linear: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    like: Sequence[Tensor],
    values: Sequence[Tensor | None],
    what: str,
    names: Sequence[str],
) -> list[Tensor]:
    """The transpose of a linear map, applied to values.

    Args:
        linear: the map; a None among its results is zero.
        like: tensors like its arguments.
        values: one for each of its results, or None for zero.
        what: the user's function, in errors.
        names: of the results, in errors.

    Returns:
        A tensor for each argument of the map.

    Raises:
        RuntimeError: a result does not depend on the arguments in a way that autograd sees.
    """
    used: list[int] = []

    def probed(*arguments: Tensor) -> list[Tensor]:
        results = linear(arguments)
        used[:] = []
        made = []
        for i, (x, v) in enumerate(zip(results, values)):
            if x is None or v is None:
                continue
            if not is_tracked_here(x):
                if not values_readable([x]) or bool(value_of(x).any()):
                    raise RuntimeError(
                        f"{what} returns a value for {names[i]} that does not depend on its last argument in a way that "
                        "autograd sees, so its transpose is not known. Write it in differentiable operations, or return "
                        "None for zero."
                    )
                continue
            used.append(i)
            made.append(x)
        return made or [arguments[0].sum()]  # torch.func.vjp refuses a function without results

    # the point does not matter, as the map is linear; at zeros a value that does not depend on it could not be told
    point = [torch.ones_like(x) for x in like]
    if not point:
        return []
    results, pull = pull_back(probed, point)
    if not used:
        return [torch.zeros_like(x) for x in like]
    given = [values[i] for i in used]
    return list(pull(matching([g for g in given if g is not None], results)))
