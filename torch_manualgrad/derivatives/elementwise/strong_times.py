"""The product with a strong zero: 0 times anything, even infinity or nan, is 0.

A cotangent is exactly 0 where a branch was not taken, or an element was masked. Its product with the derivative there, which
may be infinite or nan, must be 0. So must the product of a tangent that came through such a branch and the 0 of a mask. A
`torch.where` around the product gives the right value and the wrong derivative: a second order differentiates the
product with respect to the cotangent, at a cotangent of 0 too, and the derivative there is the other factor. So the
product is a separate operator, and its derivatives consist of such products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.engine.strong_arithmetic import multiplies
from torch_manualgrad.core.rule import Formula

__all__ = ["strong_times"]


def _strong_times(factor: Tensor, other: Tensor) -> Tensor:
    """$factor * other$, and 0 where either is 0.

    Args:
        factor: of any shape, real or complex.
        other: broadcasts with ``factor``.

    Returns:
        A tensor of the shape and dtype of ``factor * other``, in the layout of the first of the two that has this
        shape; contiguous if neither has it.

    Note:
        The derivatives, of any order, are those of the product, and consist of such products.
    """
    product = torch.where((factor == 0) | (other == 0), 0, factor * other)
    for x in (factor, other):
        if x.shape == product.shape:
            return torch.empty_like(x, dtype=product.dtype).copy_(product)
    return product.contiguous()


_strong_times.__name__ = "strong_times"
strong_times = multiplies(Formula(_strong_times, kernel=("cpu", "cuda")))


@strong_times.impl_fake
def _fake(factor: Tensor, other: Tensor) -> Tensor:
    dtype, shape = torch.result_type(factor, other), torch.broadcast_shapes(factor.shape, other.shape)
    for x in (factor, other):
        if x.shape == shape:
            return torch.empty_like(x, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=(factor if factor.dim() else other).device)


@strong_times.impl_vmap
def _vmap(info: Any, in_dims: Any, factor: Tensor, other: Tensor) -> tuple[Tensor, int]:
    """The product again, because the operators that it is made of have another derivative."""
    dims = max(x.dim() - (d is not None) for x, d in zip((factor, other), in_dims))
    batched = []
    for x, d in zip((factor, other), in_dims):
        if d is not None:
            x = x.movedim(d, 0)
            x = x.reshape(x.shape[0], *[1] * (dims + 1 - x.dim()), *x.shape[1:])
        batched.append(x)
    return strong_times(*batched), 0


@strong_times.impl_save_for_backward
def _save(inputs: Any, output: Any) -> Any:
    # as in PyTorch, save only what a gradient reads: the program may write to the rest
    factor, other = inputs
    if factor.requires_grad and other.requires_grad:
        return factor, other, None
    wanted = factor if factor.requires_grad else other
    known = wanted.shape == output.shape and wanted.dtype == output.dtype
    return (
        factor if wanted is other else None,
        other if wanted is factor else None,
        None if known else (wanted.shape, wanted.dtype),
    )


@strong_times.impl_backward
def _backward(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor | None]:
    factor, other, shape_and_dtype = saved
    if factor is not None and other is not None:
        return {
            "factor": _like(strong_times(grad, other.conj()), factor.shape, factor.dtype),
            "other": _like(strong_times(grad, factor.conj()), other.shape, other.dtype),
        }
    found = strong_times(grad, (other if factor is None else factor).conj())
    if shape_and_dtype is not None:
        found = _like(found, *shape_and_dtype)
    return {"factor": found if factor is None else None, "other": None if factor is None else found}


@strong_times.impl_jvp
def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    terms = []
    if tangents.factor is not None:
        terms.append(strong_times(tangents.factor, inputs.other))
    if tangents.other is not None:
        terms.append(strong_times(tangents.other, inputs.factor))
    return sum(terms[1:], terms[0])


def _like(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    grad = grad.real if grad.is_complex() and not dtype.is_complex else grad
    return grad.sum_to_size(shape).to(dtype)
