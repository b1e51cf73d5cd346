"""The product in which zero is strong: 0 times anything, infinite or nan, is 0.

A cotangent is exactly 0 where a branch was not taken, or an element was masked. Times the derivative there, which may be
infinite or nan, it should stay 0; so should a tangent that came through such a branch, times the 0 of a mask. To put
`torch.where` around the product is right for its value, but not for its derivative: a second order differentiates the
product with respect to the cotangent, at a cotangent of 0 too, and the derivative there is the other factor. So the product
is an operator of its own, whose derivatives are made of itself.
"""

from __future__ import annotations

import cmath
from typing import Any

import torch
from torch import Tensor

from .formula import meets_nothing
from .internals import is_known_zero
from .op import custom_op

__all__ = ["strong_product", "strong_times"]


@custom_op("manualgrad::strong_times(Tensor factor, Tensor other) -> Tensor")
def strong_times(factor: Tensor, other: Tensor) -> Tensor:
    """factor * other, and 0 where either is 0.

    Args:
        factor: of any shape, real or complex.
        other: broadcasts with ``factor``.

    Returns:
        What ``factor * other`` would be, in shape and dtype.

    Note:
        Derivatives, of any order: as those of the product, made of such products.
    """
    return torch.where((factor == 0) | (other == 0), 0, factor * other)


@strong_times.impl_save_for_backward
def _save(inputs: Any, output: Any) -> Any:
    return inputs.factor, inputs.other


@strong_times.impl_backward
def _backward(ctx: Any, saved: Any, grad: Tensor) -> dict[str, Tensor]:
    factor, other = saved
    return {
        "factor": _like(strong_times(grad, other.conj()), factor),
        "other": _like(strong_times(grad, factor.conj()), other),
    }


@strong_times.impl_jvp
def _jvp(inputs: Any, output: Tensor, tangents: Any) -> Tensor:
    terms = []
    if tangents.factor is not None:
        terms.append(strong_times(tangents.factor, inputs.other))
    if tangents.other is not None:
        terms.append(strong_times(tangents.other, inputs.factor))
    return sum(terms[1:], terms[0])


def _like(grad: Tensor, x: Tensor) -> Tensor:
    grad = grad.real if grad.is_complex() and not x.is_complex() else grad
    return grad.sum_to_size(x.shape).to(x.dtype)


def strong_product(factor: Tensor, derivative: Any) -> Tensor:
    """`strong_times` of a cotangent or tangent and a derivative: a tensor, or a number."""
    if is_known_zero(factor) or isinstance(derivative, Tensor) and is_known_zero(derivative):
        return factor * derivative  # a known zero again
    if not isinstance(derivative, Tensor):
        if isinstance(derivative, (int, torch.SymInt)) or cmath.isfinite(derivative):
            return factor * derivative
        derivative = factor.new_full((), derivative)
    if meets_nothing((factor, derivative)):
        return strong_times.reference(factor, derivative)
    return strong_times(factor, derivative)
