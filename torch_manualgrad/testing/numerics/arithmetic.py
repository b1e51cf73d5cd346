"""Arithmetic of the checker: conversion to double precision, sums, pairings of gradients with tangents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}


def widen(x: Any) -> Any:
    """A floating or complex tensor in double precision."""
    return x.to(_WIDE.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x


def computable(x: Tensor) -> Tensor:
    """Complex32 as complex64, as PyTorch has hardly any arithmetic in complex32."""
    return x.to(torch.complex64) if x.dtype is torch.complex32 else x


def with_zero_tangent(value: Tensor, x: Tensor) -> Tensor:
    """`value`, with a tangent of zeros wherever `x`, which has its shape, has a tangent.

    Without a tangent, PyTorch's products and sums go through kernels in Python, which take a hundred times as long.
    """
    if x.layout is not torch.strided:
        return value
    with torch.no_grad():  # forward mode stays active; there is nothing to differentiate backward
        return torch.where(torch.ones((), dtype=torch.bool, device=x.device), value, x)


def inner(a: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
    """Re sum conj(a) b over all components: the pairing of a gradient with a tangent; None is zero."""
    terms = [
        (computable(x).conj() * computable(with_zero_tangent(y, x))).sum()
        for x, y in zip(a, b, strict=True)
        if x is not None
    ]
    return (
        add([x.real if x.is_complex() else x for x in terms])
        if terms
        else torch.zeros((), dtype=torch.float64, device="cpu")
    )


def add(terms: Sequence[Tensor]) -> Tensor:
    """The sum of the terms, which does not start with a zero: that would be a term without a tangent."""
    return reduce(Tensor.add, terms)


def magnitude(x: Tensor) -> float:
    largest = float(widen(x.detach()).abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
    return largest if 0 < largest < math.inf else 1.0
