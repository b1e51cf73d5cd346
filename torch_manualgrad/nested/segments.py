"""Operators on segments, the parts of reductions along the ragged dim.

``offsets`` ($B + 1$ of them, from 0 to $T$) divide the dim ``dim`` of a tensor, $T$ long, into $B$ segments. Let $E$ be
the $0/1$ matrix that repeats a row of $B$ for each position of its segment, and $x_s$ the part of $x$ in segment $s$:

    sum:          $y = E^T x$,                         vjp: $E g$,                          jvp: $E^T t$
    softmax:      $y = exp(x) / E E^T exp(x)$,         vjp: $y (g - E E^T (y g))$,          jvp: the same, at $t$
    log_softmax:  $y = x - log E E^T exp(x)$,          vjp: $g - exp(y) E E^T g$,           jvp: $t - E E^T (exp(y) t)$
    amax:         $y_s = max x_s$,                     vjp: $g / count$ where attained,     jvp: the mean of $t$ there

$E$ and $E^T$ are each other's derivative, and the other operators are made of them, so all are differentiable to any
order in any mode. Exponents are shifted by the segment's maximum. Every derivative treats it as constant, because no result
depends on it. An empty segment sums to 0, and its maximum is $-inf$ (the least integer). Half precision is summed in
float32.

The kernels divide their work by entries, not by segments, and their results do not depend on the number of threads.
They check the offsets as they read them. The CPU raises. A GPU kernel, which would have to synchronize to raise, stays
within the bounds of its tensors and makes the whole result nan. The Python bodies, which run without kernels, check
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.internals import below_autograd, entry
from ..core.rule import Formula, formula
from .fast_path import fast_path, is_plain_call
from .packing import segments

__all__ = [
    "_nested_sum_backward",
    "largest",
    "log_softmaxes",
    "nested_log_softmax_backward",
    "nested_softmax_backward",
    "repeated",
    "segment_log_softmax",
    "segment_softmax",
    "segment_sum",
    "softmaxes",
    "sums",
    "wide",
    "with_backward",
    "with_size",
]


def wide(x: Tensor) -> Tensor:
    """$x$ in the dtype that accumulates sums."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def with_size(x: Tensor, dim: int, size: int) -> list[int]:
    return [size if d == dim % x.dim() else s for d, s in enumerate(x.shape)]


def _sum(x: Tensor, offsets: Tensor, dim: int) -> Tensor:
    zeros = torch.zeros(with_size(x, dim, offsets.shape[0] - 1), dtype=x.dtype, device=x.device)
    return zeros.index_add(dim, segments(offsets, x.shape[dim]), x)


def _repeat(x: Tensor, offsets: Tensor, count: int, dim: int) -> Tensor:
    return x.index_select(dim, segments(offsets, count))


def largest(x: Tensor, offsets: Tensor, dim: int) -> Tensor:
    least = -torch.inf if x.is_floating_point() else x.dtype != torch.bool and torch.iinfo(x.dtype).min
    start = torch.full(with_size(x, dim, offsets.shape[0] - 1), least, dtype=x.dtype, device=x.device)
    positions = segments(offsets, x.shape[dim])
    positions = positions.reshape([-1 if d == dim % x.dim() else 1 for d in range(x.dim())]).expand(x.shape)
    return start.scatter_reduce(dim, positions, x, "amax")


def _sum_all(x: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """$E E^T x$: each position has its segment's sum."""
    return _repeat(_sum(x, offsets, dim), offsets, x.shape[dim], dim)


def _shifted(x: Tensor, offsets: Tensor, dim: int) -> Tensor:
    return x - _repeat(largest(x.detach(), offsets, dim), offsets, x.shape[dim], dim)


Call = Callable[[Tensor, Tensor, int], Tensor]


def with_backward(op: Formula, keep: tuple[str, ...], backward: Callable[..., Tensor]) -> Call:
    """Register the backward of ``op(values, offsets, dim)``, and make its fast path (see `fast_path`).

    Args:
        op: the formula.
        keep: the residuals: "values", "result", both or neither.
        backward: ``(grad, *kept, offsets, count, dim) -> gradient of the values``.

    Returns:
        A function that calls ``op``, by the fast path where possible.
    """

    def kept(values: Tensor, result: Tensor) -> tuple[Tensor, ...]:
        return tuple(values if name == "values" else result for name in keep)

    @op.impl_save_for_backward
    def save(inputs: Any, output: Tensor) -> Any:
        values, offsets, dim = inputs
        return (*kept(values, output), offsets, values.shape[dim], dim)

    @op.impl_backward
    def pull_back(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor | None]:
        return {"values": backward(grad, *saved), "offsets": None}

    run = entry(op.op)

    def forward(values: Tensor, offsets: Tensor, dim: int, count: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        result = run(values, offsets, dim)
        return result, (*kept(values, result), offsets)

    def gradients(needed: Any, grad: Tensor, residuals: Any, dim: int, count: int) -> tuple[Tensor, None]:
        return backward(grad, *residuals, count, dim), None

    fast = fast_path(op.__name__, 2, forward, gradients)

    def call(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
        if is_plain_call(values, offsets):
            if values.requires_grad and torch.is_grad_enabled():
                return fast(values, offsets, dim, values.shape[dim])
            with below_autograd():
                return run(values, offsets, dim)
        return op.op(values, offsets, dim)  # Dynamo can trace this

    return call


# -- sum --------------------------------------------------------------------------------------------------------------


@formula(kernel=("cpu", "cuda"))
def segment_sum(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """The sum of each segment: $E^T x$.

    Args:
        values: $x$, (*, T, *), $T$ long in ``dim``; floating point or complex.
        offsets: (B + 1,), int32 or int64: where the segments begin, from 0 to $T$.
        dim: the dim that is divided.

    Returns:
        The shape of ``values`` with $B$ instead of $T$, its dtype; contiguous.

    Raises:
        RuntimeError: ``dim`` out of range (IndexError without kernels); offsets that do not start at 0, decrease, or do
            not end at $T$ (see the module's docstring), of another dtype or not one dim; integer values.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen sum.dim_IntList on nested tensors.
    """
    return _sum(wide(values), offsets, dim).to(values.dtype)


@formula(kernel=("cpu", "cuda"))
def _nested_sum_backward(grad: Tensor, offsets: Tensor, count: int, dim: int) -> Tensor:
    """Cotangent of $x$, given that of its segments' sums: $E g$, which repeats the cotangent of a segment at its positions.

    Args:
        grad: $g$, (*, B, *), $B$ long in ``dim``.
        offsets: (B + 1,), int32 or int64, from 0 to ``count``.
        count: $T$, the size of $x$ in ``dim``.
        dim: the dim that is divided.

    Returns:
        The shape of ``grad`` with $T$ instead of $B$, its dtype; contiguous.

    Raises:
        RuntimeError: as `segment_sum`; a grad of another length, a negative count.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen _nested_sum_backward_cpu.
    """
    return _repeat(grad, offsets, count, dim).contiguous()


def repeated(x: Tensor, offsets: Tensor, count: int, dim: int) -> Tensor:
    """$E x$, for ``count`` positions. In a graph by the body: a kernel takes plain integers, and so has one graph per count."""
    traced = torch.compiler.is_compiling() or isinstance(count, torch.SymInt)
    return (_nested_sum_backward.reference if traced else _nested_sum_backward)(x, offsets, count, dim)


sums = with_backward(segment_sum, (), repeated)


@segment_sum.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    t = tangents.values
    return None if t is None else segment_sum(t, inputs.offsets, inputs.dim)


@_nested_sum_backward.impl_save_for_backward
def _(inputs: Any, output: Tensor) -> Any:
    return inputs.offsets, inputs.dim


@_nested_sum_backward.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor | None]:
    return {"grad": segment_sum(grad, *saved), "offsets": None}


@_nested_sum_backward.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    t = tangents.grad
    return None if t is None else _nested_sum_backward(t, inputs.offsets, inputs.count, inputs.dim)


# -- softmax ----------------------------------------------------------------------------------------------------------


@formula(kernel=("cpu", "cuda"))
def segment_softmax(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """The softmax within each segment: $exp(x) / E E^T exp(x)$.

    Args:
        values: $x$, (*, T, *), $T$ long in ``dim``; real.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        The shape and dtype of ``values``, contiguous.

    Raises:
        RuntimeError: as `segment_sum`.

    Note:
        Where not differentiable: nowhere; a segment that holds nan or $+inf$, or only $-inf$, is nan.

    References:
        ATen softmax_nested.
    """
    e = _shifted(wide(values), offsets, dim).exp()
    return (e / _sum_all(e, offsets, dim)).to(values.dtype).contiguous()


@formula(kernel=("cpu", "cuda"))
def nested_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of $y = softmax(x)$ in segments: $y (g - E E^T (y g))$; with $g = t$, the tangent of $y$.

    Args:
        grad: $g$, the shape and dtype of ``output``.
        output: $y$, (*, T, *), real.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        The shape and dtype of ``output``, contiguous.

    Raises:
        RuntimeError: as `segment_sum`; a grad of another shape or dtype.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen nested_softmax_backward.
    """
    g, y = wide(grad), wide(output)
    return (y * (g - _sum_all(y * g, offsets, dim))).to(output.dtype).contiguous()


softmaxes = with_backward(
    segment_softmax,
    ("result",),
    lambda grad, output, offsets, count, dim: nested_softmax_backward(grad, output, offsets, dim),
)


@segment_softmax.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    t = tangents.values
    return None if t is None else nested_softmax_backward(t, output, inputs.offsets, inputs.dim)


@formula(kernel=("cpu", "cuda"))
def segment_log_softmax(values: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """The logarithm of the softmax within each segment: $x - log E E^T exp(x)$.

    Args:
        values: $x$, (*, T, *), $T$ long in ``dim``; real.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        The shape and dtype of ``values``, contiguous.

    Raises:
        RuntimeError: as `segment_sum`.

    Note:
        Where not differentiable: as `segment_softmax`.

    References:
        ATen _log_softmax, within segments.
    """
    x = _shifted(wide(values), offsets, dim)
    return (x - _sum_all(x.exp(), offsets, dim).log()).to(values.dtype).contiguous()


@formula(kernel=("cpu", "cuda"))
def nested_log_softmax_backward(grad: Tensor, output: Tensor, offsets: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of $y = log_softmax(x)$ within segments: $g - exp(y) E E^T g$.

    Args:
        grad: $g$, the shape and dtype of ``output``.
        output: $y$, (*, T, *), real.
        offsets: as in `segment_sum`.
        dim: as in `segment_sum`.

    Returns:
        The shape and dtype of ``output``, contiguous.

    Raises:
        RuntimeError: as `nested_softmax_backward`.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen _log_softmax_backward_data, within segments.
    """
    g = wide(grad)
    return (g - wide(output).exp() * _sum_all(g, offsets, dim)).to(output.dtype).contiguous()


log_softmaxes = with_backward(
    segment_log_softmax,
    ("result",),
    lambda grad, output, offsets, count, dim: nested_log_softmax_backward(grad, output, offsets, dim),
)


@segment_log_softmax.impl_jvp
def _(inputs: Any, output: Tensor, tangents: Any) -> Tensor | None:
    t = tangents.values
    if t is None:
        return None
    total = segment_sum(output.exp() * t, inputs.offsets, inputs.dim)
    return t - repeated(total, inputs.offsets, t.shape[inputs.dim], inputs.dim)
