"""logsumexp: its derivative is the softmax $w = exp(x - result)$, in every order, and 0 where the result is $-inf$.

Divided by its sum, $w$ does not depend on the result, which is a constant to every derivative. Where $x$ is large this
is more accurate, too: its exponentials add up to 1 only to within the rounding of the result.

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
    """Multiples of $w$, and their sum, with the reduced dims; the sum is 1 where $w$ is 0.

    Where this is ``differentiated`` and $x$ is real, the largest multiple is 1, and constant: where $w$ is close to 1,
    its tangent $w (t - <w, t>)$ would be all rounding.
    """
    if differentiated and not x.is_complex() and x.numel():
        shift = x.amax(dim, keepdim=True)
    else:
        shift = restore_reduced_dims(result.detach(), x.dim(), dim, keepdim)
    e = (x - torch.where(shift.isinf(), 0, shift)).exp()
    empty = (shift.real if shift.is_complex() else shift) == -torch.inf
    return e, torch.where(empty, 1, e.sum(dim, keepdim=True))


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
    e, total = _softmax(self, result, dim, keepdim, differentiated=torch.is_grad_enabled())
    return restore_reduced_dims(grad, self.dim(), dim, keepdim) / total.conj() * e.conj()


@formula
def logsumexp_jvp(self_p: Tensor, self_t: Tensor, result: Tensor, dim: Sequence[int], keepdim: bool) -> Tensor:
    """Tangent of $log sum exp(x)$: the sum of $w t$.

    Args:
        self_p: $x$, real or complex.
        self_t: $t$, its tangent.
        keepdim: whether the result has them.

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
