"""Variances and standard deviations. With $m$ the mean of $N$ entries and $c$ the correction,

    $var = sum |x - m|^2 / (N - c)$,      gradient $2 (x - m) / (N - c)$,      $std = sqrt(var)$.

Where not differentiable: std of equal entries, whose derivatives are 0 in every order. With no more entries than $c$,
the variance is infinite or nan, and so is its derivative.

PyTorch's reverse mode is right in every order, and plain calls are left to it. The exception is an empty list of dims, which
means all dims: PyTorch takes $N = 1$ there. Its reverse over forward mode of std gives nan for equal entries.

Args:
    self: $x$, real or complex.
    dim: the reduced dims; None or empty for all.
    correction: $c$; None is 1.
    keepdim: whether the cotangents have the reduced dims.
    self_t: $t$, tangent of $x$.
    self_p: $x$, real or complex.
    result: $s$, with its dependence on $x$ for higher orders.
    gmean: cotangent of the mean; None for zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from torch_manualgrad.core.rule import ByMetadata, formula, rule

from .dims import restore_reduced_dims
from .sums import mean_backward


def _times_gradient(factor: Tensor, self: Tensor, dim: Sequence[int] | None, correction: Number | None) -> Tensor:
    """A factor times the gradient of the variance."""
    n = math.prod(self.shape[d] for d in dim) if dim and self.dim() else self.numel()
    freedom = n - (1 if correction is None else correction)
    scale = 2 / freedom if freedom > 0 else math.inf
    return scale * factor * (self - self.mean(dim or [], keepdim=True))


def _over_twice(x: Tensor, std: Tensor) -> Tensor:
    """$x / (2 std)$, and 0 where std is 0."""
    zero = std == 0
    return torch.where(zero, 0, x / torch.where(zero, 1, 2 * std))


@formula
def var_backward(
    grad: Tensor, self: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool
) -> Tensor:
    """Cotangent of $x$, given that of its variance: $2 grad (x - m) / (N - c)$.

    Args:
        grad: cotangent of the variance, real.
        keepdim: whether ``grad`` has the reduced dims.

    Returns:
        The shape and dtype of ``self``.
    """
    return _times_gradient(restore_reduced_dims(grad, self.dim(), dim, keepdim), self, dim, correction)


@formula
def var_jvp(
    self_t: Tensor, self_p: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool
) -> Tensor:
    """Tangent of the variance: the sum of $2 Re(conj(x - m) t) / (N - c)$.

    Args:
        keepdim: whether the variance has the reduced dims.

    Returns:
        The shape of the variance, real.

    References:
        ATen derivatives.yaml, var.correction.
    """
    return _times_gradient(self_t.conj(), self_p, dim, correction).real.sum(dim or [], keepdim)


@formula
def std_backward(
    result: Tensor, grad: Tensor, self: Tensor, dim: Sequence[int] | None, correction: Number | None, keepdim: bool
) -> Tensor:
    """Cotangent of $x$, given that of its standard deviation $s$: $grad (x - m) / ((N - c) s)$.

    Args:
        grad: cotangent of $s$, real.
        keepdim: whether ``grad`` and ``result`` have the reduced dims.

    Returns:
        The shape and dtype of ``self``.

    Note:
        Where not differentiable: $s = 0$, where the derivatives are 0.

    References:
        ATen std_backward, whose derivative at $s = 0$ may be nan.
    """
    return var_backward(_over_twice(grad, result), self, dim, correction, keepdim)


@formula
def std_jvp(
    self_t: Tensor,
    self_p: Tensor,
    result: Tensor,
    dim: Sequence[int] | None,
    correction: Number | None,
    keepdim: bool,
) -> Tensor:
    """Tangent of the standard deviation $s$: the sum of $Re(conj(x - m) t) / ((N - c) s)$.

    Args:
        keepdim: whether ``result`` has the reduced dims.

    Returns:
        The shape of ``result``, real.

    Note:
        Where not differentiable: as `std_backward`.

    References:
        ATen derivatives.yaml, std.correction.
    """
    return _over_twice(var_jvp(self_t, self_p, dim, correction, keepdim), result)


def _and_mean(
    found: Tensor | None, gmean: Tensor | None, self: Tensor, dim: Sequence[int] | None, keepdim: bool
) -> Tensor:
    if gmean is not None:
        of_mean = mean_backward(gmean, self.shape, dim, self.numel(), keepdim)
        found = of_mean if found is None else found + of_mean
    return torch.zeros_like(self) if found is None else found


@formula
def var_mean_backward(
    gvar: Tensor | None,
    gmean: Tensor | None,
    self: Tensor,
    dim: Sequence[int] | None,
    correction: Number | None,
    keepdim: bool,
) -> Tensor:
    """Cotangent of $x$, given those of its variance and its mean.

    Args:
        gvar: cotangent of the variance, real; None for zero.

    Returns:
        The shape and dtype of ``self``.
    """
    found = None if gvar is None else var_backward(gvar, self, dim, correction, keepdim)
    return _and_mean(found, gmean, self, dim, keepdim)


@formula
def std_mean_backward(
    gstd: Tensor | None,
    gmean: Tensor | None,
    self: Tensor,
    std: Tensor,
    dim: Sequence[int] | None,
    correction: Number | None,
    keepdim: bool,
) -> Tensor:
    """Cotangent of $x$, given those of its standard deviation and its mean.

    Args:
        gstd: cotangent of the standard deviation, real; None for zero.
        std: the standard deviation, with its dependence on $x$ for higher orders.

    Returns:
        The shape and dtype of ``self``.

    Note:
        Where not differentiable: as `std_backward`.
    """
    found = None if gstd is None else std_backward(std, gstd, self, dim, correction, keepdim)
    return _and_mean(found, gmean, self, dim, keepdim)


def _mean_jvp(self_t: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    return self_t.mean(dim or [], keepdim)


def _pytorch_is_right(self: Tensor, dim: Sequence[int] | None, *_: Any) -> bool:
    return dim is None or len(dim) > 0


rule(
    "aten::var.correction",
    vjp={"self": var_backward},
    jvp={"result": var_jvp},
    improves="values",
    defer_to_stock=ByMetadata(_pytorch_is_right),
    source="ATen var_backward",
)
rule(
    "aten::std.correction",
    vjp={"self": std_backward},
    jvp={"result": std_jvp},
    improves="values",
    defer_to_stock=ByMetadata(_pytorch_is_right),
    source="ATen std_backward",
)
rule(
    "aten::var_mean.correction",
    vjp={"self": var_mean_backward.bind(gvar="grad_result0", gmean="grad_result1")},
    jvp={"result0": var_jvp, "result1": _mean_jvp},
    improves="values",
    defer_to_stock=ByMetadata(_pytorch_is_right),
    source="ATen var_mean_backward",
)
rule(
    "aten::std_mean.correction",
    vjp={"self": std_mean_backward.bind(gstd="grad_result0", gmean="grad_result1", std="result0")},
    jvp={"result0": std_jvp.bind(result="result0"), "result1": _mean_jvp},
    improves="values",
    defer_to_stock=ByMetadata(_pytorch_is_right),
    source="ATen std_mean_backward",
)
