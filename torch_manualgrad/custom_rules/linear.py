"""The transpose of a linear map that a rule computes: a jvp from a bwd, a vjp from a jvp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.internals import is_tracked_here, value_of, values_readable
from ..implicit.operators import matching, pull_back

__all__ = ["not_linear", "transposed"]


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

    # The point does not matter, as the map is linear. At zeros a value that does not depend on it could not be told; large and
    # small numbers tell a map that is linear near 0 only, such as a clamp.
    point = [_mixed(x) for x in like]
    if not point:
        return []
    results, pull = pull_back(probed, point)
    if not used:
        return [torch.zeros_like(x) for x in like]
    given = matching([g for i in used if (g := values[i]) is not None], results)
    found = list(pull(given))
    _check_linearity(point, found, results, given, what)
    return found


def _mixed(x: Tensor) -> Tensor:
    numbers = 1 + 63 * (torch.arange(x.numel(), device=x.device) % 2 == 0).reshape(x.shape).to(x.dtype)
    return torch.ones_like(x) * numbers


def _check_linearity(
    point: Sequence[Tensor], found: Sequence[Tensor], results: Sequence[Tensor], given: Sequence[Tensor], what: str
) -> None:
    """Raise if <A u, v> and <u, A^T v> differ, where the values can be read: the map is then not linear.

    Raises:
        RuntimeError: it is not.
    """
    pairs = [*zip(results, given)], [*zip(point, found)]
    if not values_readable([x for side in pairs for pair in side for x in pair]):
        return
    tolerance = max(torch.finfo(x.dtype).eps for x in (*point, *results)) ** 0.5
    with torch.no_grad():
        products = [[(a.conj() * b).real.double() for a, b in side] for side in pairs]
        left, right = (torch.stack([x.sum() for x in side]).sum() for side in products)
        scale = torch.stack([x.abs().sum() for side in products for x in side]).sum()
        wrong = value_of((left - right).abs() > tolerance * scale)
    if bool(wrong.any()):
        raise not_linear(what)


def not_linear(what: str) -> RuntimeError:
    """The error for a function of the user that is not linear."""
    return RuntimeError(
        f"{what} is not linear in its last argument, so it has no transpose, which the other direction of derivatives needs: "
        "<A u, v> and <u, A^T v> differ"
    )
