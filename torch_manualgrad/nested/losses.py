"""Losses of nested predictions, as in ``torch.nn.functional``, over the actual entries: padding does not count.

They apply torch's own losses to the values, with torch's derivatives. "mean" averages over all entries of the batch, so that a
long component weighs more than a short one; "none" returns a `Ragged`, from which any other mean can be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .arithmetic import aligned, of_entries
from .conversion import require_same_lengths, require_same_structure
from .ragged import Ragged

__all__ = ["LOSSES", "cross_entropy", "nll_loss"]

_OF_ENTRIES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
)


def _of_entries(name: str) -> Callable[..., Any]:
    function = getattr(F, name)

    def call(input: Any, target: Any, *, reduction: str = "mean", **options: Any) -> Any:
        more = [key for key in ("weight", "var") if isinstance(options.get(key), (Ragged, Tensor))]
        nested, values = aligned([input, target, *(options[key] for key in more)], ["input", "target", *more])
        input, target, *values = torch.broadcast_tensors(*values)
        options.update(zip(more, values))
        if reduction == "batchmean":
            return function(input, target, reduction="sum", **options) / nested.batch
        found = function(input, target, reduction=reduction, **options)
        return of_entries(nested, found) if found.dim() else found

    call.__name__ = name
    call.__doc__ = f"``torch.nn.functional.{name}``, over the actual entries; a target may be dense as in `add`."
    return call


def _as_rows(input: Ragged, what: str) -> tuple[Tensor, int]:
    """Scores (T, C, ...) of (B, C, ..., *, ...), and the ragged dim."""
    if input.sizes is not None or input.dim() < 3:
        raise ValueError(f"input: {what} expected (B, C, *) with one ragged dim, got {input.summary()}")
    ragged = input.ragged_dims[0]
    if ragged == 1:
        raise ValueError(
            f"input: {what} expected the classes in dim 1, as in torch, got {input.summary()}; call it with "
            "input.transpose(1, 2), or with input.flatten(0, 1) and target.flatten(0, 1)"
        )
    return input.values.movedim(ragged - 1, 0), ragged


def _of_classes(name: str) -> Callable[..., Any]:
    function = getattr(F, name)

    def call(input: Ragged, target: Ragged, *args: Any, **kwargs: Any) -> Ragged | Tensor:
        if not isinstance(input, Ragged) or not isinstance(target, Ragged):
            raise TypeError(f"{name}: expected a Ragged as input and as target, got {type(input)} and {type(target)}")
        rows, ragged = _as_rows(input, name)
        if target.dim() == input.dim():  # probabilities
            require_same_structure(input, target, name="target")
            given = target.values.movedim(ragged - 1, 0)
        else:
            if target.dim() != input.dim() - 1 or target.ragged_dims != (ragged - 1,):
                raise ValueError(f"target: {target.summary()} does not fit input {input.summary()}")
            require_same_lengths(input, target, name="target")
            given = target.values.movedim(ragged - 2, 0)
        found = function(rows, given, *args, **kwargs)
        if not found.dim():
            return found
        shape = [n for d, n in enumerate(input.shape) if d != 1]
        return input.like(found.movedim(0, ragged - 2), shape)

    call.__name__ = name
    call.__doc__ = f"""``torch.nn.functional.{name}``, over the actual entries.

    Args:
        input: (B, C, ..., *, ...), the classes in dim 1.
        target: (B, ..., *, ...), class indices; for cross_entropy also probabilities, in the shape of ``input``.
        args: as in torch.
        kwargs: as in torch.

    Returns:
        As in torch; a `Ragged` (B, ..., *, ...) with ``reduction="none"``.

    Raises:
        TypeError: an argument that is not a `Ragged`.
        ValueError: classes in another dim, lengths that differ, or several ragged dims.
    """
    return call


cross_entropy, nll_loss = _of_classes("cross_entropy"), _of_classes("nll_loss")
LOSSES = {name: _of_entries(name) for name in _OF_ENTRIES} | {"cross_entropy": cross_entropy, "nll_loss": nll_loss}
