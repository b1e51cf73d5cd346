"""segment_reduce: the sum, mean, product, maximum or minimum of each of several segments of a dim.

Each entry $x_i$ is in one segment $s$, so that with $w_i = d y_s / d x_i$

    vjp: $w_i g_s$,        jvp: the sum of $w_i t_i$ over each segment.

$w$ is 1 for a sum, $1 / n_s$ for a mean, and the product of the others for a product. For extrema it is 1 over the number of
entries that attain the extremum if $x_i$ does, else 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import formula, rule


def _segments(data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
    """The segment of each entry, in the shape of ``data``, and the lengths of the segments."""
    if lengths is None:
        assert offsets is not None
        ends, lengths = offsets[..., 1:], offsets.diff(dim=-1)
    else:
        ends = lengths.cumsum(-1)
    place = torch.arange(data.shape[axis], device=data.device)
    found = (place[:, None] >= ends[..., None, :]).sum(-1)
    return _as_wide(found, data), lengths


def _as_wide(x: Tensor, data: Tensor) -> Tensor:
    """$x$, expanded along the last dims of ``data``."""
    rest = data.shape[x.dim() :]
    return x.reshape(*x.shape, *[1] * len(rest)).expand(*x.shape, *rest)


def _others(data: Tensor, segment: Tensor, axis: int) -> Tensor:
    """The product of the other entries of the same segment."""
    place = torch.arange(data.shape[axis], device=data.device)
    apart = (place[:, None] != place).reshape(*place.shape, *place.shape, *[1] * (data.dim() - axis - 1))
    together = segment.unsqueeze(axis) == segment.unsqueeze(axis + 1)
    return torch.where(together & apart, data.unsqueeze(axis), 1).prod(axis + 1)


def _segments_fit(
    grad: Tensor, output: Tensor, data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int
) -> str:
    """An error message if arguments of `segment_reduce_backward` do not fit, else "". Its kernel does not check them."""
    if not 0 <= axis < data.dim():
        return f"axis: expected one of the {data.dim()} dims of data, not negative, got {axis}"
    name, given = ("offsets", offsets) if lengths is None else ("lengths", lengths)
    if given is None:
        return "lengths: expected a Tensor, as offsets is None, got None"
    if given.dim() != axis + 1 or given.shape[:axis] != data.shape[:axis] or (lengths is None and not given.shape[-1]):
        return (
            f"{name}: expected {axis + 1} dims, those of data before axis and one more, got shape {list(given.shape)}"
        )
    sizes = given if lengths is not None else given.diff(dim=-1)
    ends = given.sum(-1) if lengths is not None else given[..., -1]
    if (
        bool(((sizes < 0) | (sizes > data.shape[axis])).any())
        or bool((ends > data.shape[axis]).any())
        or (lengths is None and bool((given < 0).any()))
    ):
        return f"{name}: expected segments within the {data.shape[axis]} entries of data along axis, got others"
    shape = [*data.shape[:axis], sizes.shape[-1], *data.shape[axis + 1 :]]
    for other, x in (("grad", grad), ("output", output)):
        if list(x.shape) != shape:
            return f"{other}: expected shape {shape}, got {list(x.shape)}"
    return ""


@formula(kernel=("default",), requires=_segments_fit)
def segment_reduce_backward(
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
    initial: Number | None,
) -> Tensor:
    """Cotangent of $x$, given that of its reduction over segments: $w_i g_s$.

    Args:
        grad: $g$, (*, segments, *).
        output: the reduction, as segment_reduce returns it; in further derivatives it is a function of ``data``.
        data: $x$, real; the segments are along its dim ``axis``.
        reduce: "sum", "mean", "prod", "max" or "min".
        lengths: the lengths of the segments, integers, (*, segments), with the dims of $x$ before ``axis``; or None.
        offsets: integers, where the segments start, and the last one ends, if ``lengths`` is None.
        axis: the dim, not negative.
        initial: the value that each reduction starts with, or None.

    Returns:
        The shape of ``data``.

    Note:
        Where not differentiable: at a tie of a maximum or minimum, whose cotangent is shared equally.

    References:
        ATen _segment_reduce_backward, which has no derivative.
    """
    segment, sizes = _segments(data, lengths, offsets, axis)
    inside = segment < sizes.shape[-1]
    place = torch.where(inside, segment, 0)
    slope = torch.ones_like(data)
    if reduce == "mean":
        slope = 1 / _as_wide(sizes, grad).gather(axis, place).to(data.dtype)
    elif reduce == "prod":
        slope = _others(data, segment, axis) * (1 if initial is None else initial)
    elif reduce != "sum":
        chosen = (data == output.gather(axis, place)).to(data.dtype)
        count = torch.zeros_like(output).scatter_add(axis, place, torch.where(inside, chosen, 0)).gather(axis, place)
        slope = chosen / count.clamp(min=1)
    return torch.where(inside, slope * grad.gather(axis, place), 0)


@segment_reduce_backward.impl("default")
def _(grad: Tensor, *given: Any) -> Tensor:
    *first, lengths, offsets, axis, initial = given
    rest = {"lengths": lengths, "offsets": offsets, "axis": axis, "initial": initial}
    return torch.ops.aten._segment_reduce_backward(grad.contiguous(), *first, **rest)


def _jvp(
    data_p: Tensor,
    data_t: Tensor,
    result: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
    initial: Number | None,
) -> Tensor:
    axis = axis % data_p.dim()
    ones = torch.ones_like(result)
    slope = segment_reduce_backward(ones, result, data_p, reduce, lengths, offsets, axis, initial)
    segment, sizes = _segments(data_p, lengths, offsets, axis)
    place = torch.where(segment < sizes.shape[-1], segment, 0)
    return torch.zeros_like(result).scatter_add(axis, place, slope * data_t)


rule(
    "aten::segment_reduce",
    vjp={
        "data": lambda grad, result, data, reduce, lengths, offsets, axis, initial: segment_reduce_backward(
            grad, result, data, reduce, lengths, offsets, axis % data.dim(), initial
        )
    },
    jvp={"result": _jvp},
    improves="missing",
    source="ATen _segment_reduce_backward; its derivatives are new",
)
