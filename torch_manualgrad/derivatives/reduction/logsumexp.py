"""logsumexp: its derivative is the softmax $w = exp(x - result)$, in every order, and 0 where the result is $-inf$.

$w$ is divided by its sum. So it does not depend on the result, which is a constant to every derivative. This is also more
accurate where $x$ is large: the exponentials add up to 1 only to within the rounding of the result.

Args:
    result: what the forward returned.
    dim: the reduced dims.

Note:
    Where not differentiable: where the result is $-inf$. The derivative there is 0. Where $x$ is inf it is nan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .dims import restore_reduced_dims


def _softmax(
    x: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool, differentiated: bool
) -> tuple[Tensor, Tensor]:
    """Multiples of $w$, and their sum, with the reduced dims; the sum is positive where $w$ is 0.

    If this is ``differentiated`` and $x$ is real, the largest multiple is the constant 1: where $w$ is close to 1, its
    tangent $w (t - <w, t>)$ would be only rounding error.
    """
    if x.is_complex() or differentiated:
        if not x.is_complex() and x.numel():
            shift = x.amax(dim, keepdim=True)
        else:
            shift = restore_reduced_dims(result.detach(), x.dim(), dim, keepdim)
        e = (x - torch.where(shift.isinf(), 0, shift)).exp()
        empty = (shift.real if shift.is_complex() else shift) == -torch.inf
        return e, torch.where(empty, 1, e.sum(dim, keepdim=True))
    limits = torch.finfo(x.dtype)  # the same in fewer operators: a finite shift leaves -inf, inf and nan as they are
    shift = restore_reduced_dims(result, x.dim(), dim, keepdim).clamp(limits.min, limits.max)
    e = (x - shift).exp_()
    return e, e.sum(dim, keepdim=True).clamp(min=limits.smallest_normal)


@formula
def logsumexp_backward(grad: Tensor, self: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Cotangent of $x$, given that of $log sum exp(x)$: $grad conj(w)$.

    Args:
        grad: cotangent of the result.
        self: $x$, real or complex.
        keepdim: whether ``grad`` and ``result`` have the reduced dims.

    Returns:
        The shape of ``self``.
    """
    differentiated = torch.is_grad_enabled()
    e, total = _softmax(self, result, dim, keepdim, differentiated)
    grad = restore_reduced_dims(grad, self.dim(), dim, keepdim)
    if differentiated or self.is_complex():
        return grad / total.conj() * e.conj()
    return e.div_(total) * grad  # in this order no factor overflows where e is 0


@formula
def logsumexp_jvp(self_p: Tensor, self_t: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Tangent of $log sum exp(x)$: the sum of $w t$.

    Args:
        self_p: $x$, real or complex.
        self_t: $t$, its tangent.
        keepdim: whether the result has the reduced dims.

    Returns:
        The shape of the result.

    References:
        ATen logsumexp_jvp and safe_logsumexp_jvp.
    """
    e, total = _softmax(self_p, result, dim, keepdim, differentiated=True)
    return (e * (self_t / total)).sum(dim, keepdim)


rule(
    "aten::logsumexp",
    vjp={"self": logsumexp_backward},
    jvp={"result": logsumexp_jvp},
    improves="values",
    source="ATen logsumexp_backward, logsumexp_jvp",
)
