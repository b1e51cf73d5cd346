"""Transposes the linear map of a rule: a jvp from a bwd, a vjp from a jvp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import is_tracked_here, value_of, values_readable
from ..programs.functions import matching, pull_back
from .randomness import RandomState

__all__ = ["transposed"]

# Raises when the graph runs if `wrong`, and returns 0, which makes results depend on the check.
_library = torch.library.Library("manualgrad_custom", "FRAGMENT")
_library.define("confirm_linear(Tensor wrong, str what) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
_confirm: Any = torch.ops.manualgrad_custom.confirm_linear.default


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
        RuntimeError: autograd does not see how a result depends on the arguments.
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

    # Any point works: the map is linear. At zeros, a result that does not depend on the point would not be detected.
    point = [_numbers(x, 1) for x in like]
    if not point:
        return []
    random = RandomState(like, what)
    with random.seen():
        results, pull = pull_back(probed, point)
    if not used:
        return [torch.zeros_like(x) for x in like]
    given = matching([g for i in used if (g := values[i]) is not None], results)
    found = pull(given)
    other = [_numbers(x, -1) for x in like]
    with torch.no_grad(), random.restored():
        images = linear(other)
    pairs = [(x, g) for i, g in zip(used, given) if (x := images[i]) is not None], [*zip(other, found)]
    tolerance = max(torch.finfo(x.dtype).eps for x in (*point, *results)) ** 0.5
    return _checked(found, pairs, tolerance, what)


def _numbers(x: Tensor, sign: int) -> Tensor:
    """Large and small numbers, to detect a map that is linear only near 0, such as a clamp. Both signs detect an
    absolute value, and the different ratios of the two a norm: these are homogeneous."""
    steps = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    size = torch.where(steps % 2 == 0, 64, 1)
    return torch.ones_like(x) * (size if sign > 0 else -size * (1 + steps % 3)).to(x.dtype)


def _checked(
    found: Sequence[Tensor], pairs: Sequence[Sequence[tuple[Any, Tensor]]], tolerance: float, what: str
) -> list[Tensor]:
    """The given A^T v. If <A u, v> and <u, A^T v> differ for a u other than the point of differentiation, A is not
    linear. A traced graph checks this when it runs.

    Args:
        found: A^T v.
        pairs: of tensors whose dot products are summed, for either side.
        tolerance: relative.
        what: the user's function, in errors.

    Raises:
        RuntimeError: they differ.
    """
    with torch.no_grad():
        products = [[(a.conj() * b).real.double() for a, b in side] for side in pairs]
        scale = torch.stack([x.abs().sum() for side in products for x in side]).sum()
        left, right = (sum([x.sum() for x in side], torch.zeros_like(scale)) for side in products)
        wrong = (left - right).abs() > tolerance * scale
    if values_readable([x for side in pairs for pair in side for x in pair]):
        _raise_if(value_of(wrong), what)
        return list(found)
    nothing = _confirm(wrong, what)
    return [g - nothing for g in found]


def _raise_if(wrong: Tensor, what: str) -> None:
    if bool(wrong.any()):
        raise RuntimeError(
            f"{what} is not linear in its last argument, so it has no transpose, which the other direction of derivatives needs: "
            "<A u, v> and <u, A^T v> differ"
        )


def _confirmed(wrong: Tensor, what: str) -> Tensor:
    if values_readable([wrong]):
        _raise_if(wrong, what)
    return torch.zeros((), dtype=torch.int32, device=wrong.device)


def _confirmed_for_all(info: Any, in_dims: Any, wrong: Tensor, what: str) -> tuple[Tensor, None]:
    return _confirm(wrong.any(), what), None


_library.impl("confirm_linear", _confirmed, "CompositeExplicitAutograd")
torch.library.register_fake(_confirm, lambda wrong, what: wrong.new_empty((), dtype=torch.int32), lib=_library)
torch.library.register_vmap(_confirm, _confirmed_for_all, lib=_library)
