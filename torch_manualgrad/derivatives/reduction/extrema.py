"""Largest, smallest and middle entries, as values: amax, amin, aminmax, and max, min, median, nanmedian of all entries.

All entries that attain the value share its cotangent equally, and its tangent is the mean of theirs.

Args:
    result: the values.
    dim: the reduced dim; None for all.
    input: $x$, (*), real.
    value: 0-dim; if it is nan, all entries that are nan have the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .dims import restore_reduced_dims


@formula
def scale_grad_by_count(grad: Tensor, mask: Tensor, dims: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given that of a value that some entries attain: an equal share for each of these.

    Args:
        grad: cotangent of the value, with the reduced dims kept.
        mask: the entries that attain it, (*).
        dims: the reduced dims; empty for all.

    Returns:
        The shape of ``mask``; nan where no entry attains the value, as if it is nan.
    """
    return torch.where(mask, grad, 0) / mask.sum(dims, True)


@formula
def amaxamin_jvp(x: Tensor, dx: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Tangent of the largest or smallest entries: the mean of the tangents of those that attain the value.

    Args:
        x: (*), real.
        dx: its tangent.
        dim: the reduced dims; empty for all.
        keepdim: whether ``result`` has the reduced dims.

    Returns:
        The shape of ``result``; nan where no entry attains the value, as if it is nan.
    """
    mask = x == restore_reduced_dims(result, x.dim(), dim, keepdim)
    return torch.where(mask, dx, 0).sum(dim, keepdim) / mask.sum(dim, keepdim)


@formula
def aminmax_backward(
    self: Tensor,
    dim: int | None,
    keepdim: bool,
    grad_min: Tensor | None,
    grad_max: Tensor | None,
    min: Tensor,
    max: Tensor,
) -> Tensor:
    """Cotangent of $x$, given those of its smallest and largest entries: equal shares for the entries that attain each.

    Args:
        self: $x$, (*), real.
        keepdim: whether the values have the reduced dims.
        grad_min, grad_max: cotangents of the values; None for zero.
        min, max: the values.

    Returns:
        The shape of ``self``.
    """
    dims = [] if dim is None else [dim]
    found = None
    for grad, value in ((grad_min, min), (grad_max, max)):
        if grad is not None:
            grad, value = (restore_reduced_dims(y, self.dim(), dims, keepdim) for y in (grad, value))
            share = scale_grad_by_count(grad, self == value, dims)  # the mask has the layout of self
            found = share if found is None else found + share
    return torch.zeros_like(self) if found is None else found


@formula
def aminmax_jvp(self_p: Tensor, self_t: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """Tangent of the smallest or the largest entries: the mean of the tangents of those that attain the value.

    Args:
        self_p: $x$, (*), real.
        self_t: its tangent.
        keepdim: whether ``result`` has the reduced dims.

    Returns:
        The shape of ``result``; nan where no entry attains the value, as if it is nan.
    """
    return amaxamin_jvp(self_p, self_t, result, [] if dim is None else [dim], keepdim)


def _attains(input: Tensor, value: Tensor) -> Tensor:
    return (input == value) | (input.isnan() & value.isnan())


@formula
def evenly_distribute_backward(grad: Tensor, input: Tensor, value: Tensor) -> Tensor:
    """Cotangent of $x$, given that of one of its values: an equal share for each entry that has the value.

    Args:
        grad: cotangent of the value, 0-dim.

    Returns:
        The shape of ``input``.
    """
    mask = _attains(input, value)
    return torch.where(mask, grad / mask.sum(), 0)


@formula
def evenly_read_jvp(fw_grad: Tensor, input: Tensor, value: Tensor) -> Tensor:
    """Tangent of one of the values of $x$: the mean of the tangents of the entries that have the value.

    Args:
        fw_grad: tangent of $x$.

    Returns:
        0-dim.
    """
    mask = _attains(input, value)
    return torch.where(mask, fw_grad / mask.sum(), 0).sum()


def _amax_vjp(grad: Tensor, self: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    grad, value = (restore_reduced_dims(y, self.dim(), dim, keepdim) for y in (grad, result))
    return scale_grad_by_count(grad, self == value, dim)  # the mask has the layout of self


for name in ("amax", "amin"):
    rule(
        f"aten::{name}",
        vjp={"self": _amax_vjp},
        jvp={"result": amaxamin_jvp.bind(x="self_p", dx="self_t")},
        source="ATen scale_grad_by_count, amaxamin_jvp",
    )
rule(
    "aten::aminmax",
    vjp={"self": aminmax_backward},
    jvp={"min": aminmax_jvp.bind(result="min"), "max": aminmax_jvp.bind(result="max")},
    improves={"missing": "2.13"},
    source="ATen aminmax_backward, aminmax_jvp",
)
for name in ("max", "min", "median", "nanmedian"):
    rule(
        f"aten::{name}",
        vjp={"self": evenly_distribute_backward.bind(input="self", value="result")},
        jvp={"result": evenly_read_jvp.bind(fw_grad="self_t", input="self_p", value="result")},
        source="ATen evenly_distribute_backward, evenly_read_jvp",
    )
