"""Cumulative products, and logarithms of cumulative sums of exponentials.

Both tangents, and both cotangents from the last entry to the first, obey a linear recurrence $y_m = a_m y_(m-1) + b_m$.
With $P$ the result, for the product

    jvp: $y_m = x_m y_(m-1) + P_(m-1) t_m$,       vjp: $G_k = conj(P_(k-1)) S_k$,  $S_k = g_k + conj(x_(k+1)) S_(k+1)$,

and for $l = log cumsum exp(x)$

    jvp: $y_m = a_m y_(m-1) + w_m t_m$,           vjp: $G_k = conj(w_k) S_k$,      $S_k = g_k + conj(a_(k+1)) S_(k+1)$,
    $a_m = exp(l_(m-1) - l_m)$,  $w_m = exp(x_m - l_m)$.

Nothing is divided by $x$, so zeros are not a special case, and the exponentials of real numbers are at most 1. The
recurrence is solved by pairs, in $O(n)$ operations and $O(log n)$ steps: Blelloch, Prefix sums and their applications,
CMU-CS-90-190, section 1.4.

Args:
    dim: the dim along which the products or sums run.
    self_t: $t$, tangent of $x$.
    self_p: $x$, real or complex.
    result: $P$ or $l$, with its dependence on $x$ for higher orders.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from ..elementwise.saturating import logistic
from .dims import cast, laid_out_as
from .norm import widened


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    """$y_m = a_m y_(m-1) + b_m$ along the last dim, with $y_(-1) = 0$."""
    n = b.shape[-1]
    if n <= 1:
        return b
    half, later = n // 2, (n - 1) // 2
    a_even, a_odd, b_even, b_odd = a[..., ::2], a[..., 1::2], b[..., ::2], b[..., 1::2]
    # narrow and reshape, because the older of PyTorch's two vmaps supports neither a slice of a whole dim nor flatten
    odd = recurrence(a_odd * a_even.narrow(-1, 0, half), a_odd * b_even.narrow(-1, 0, half) + b_odd)
    after_first = a_even.narrow(-1, 1, later) * odd.narrow(-1, 0, later) + b_even.narrow(-1, 1, later)
    even = torch.cat([b_even.narrow(-1, 0, 1), after_first], -1)
    pairs = torch.stack([even.narrow(-1, 0, half), odd], -1).reshape(*b.shape[:-1], 2 * half)
    return torch.cat([pairs, even.narrow(-1, half, n - 2 * half)], -1)


def _last(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1) if x.dim() else x.unsqueeze(0)


def _back(y: Tensor, like: Tensor, dim: int) -> Tensor:
    return (y.movedim(-1, dim) if like.dim() else y.squeeze(0)).to(like.dtype)


def _before(x: Tensor, one: bool = True) -> Tensor:
    """The entry before each one along the last dim; before the first one, 1 or itself."""
    if x.shape[-1] == 0:
        return x
    first = x.narrow(-1, 0, 1)
    return torch.cat([torch.ones_like(first) if one else first, x[..., :-1]], -1)


def _pull(a: Tensor, g: Tensor) -> Tensor:
    """$S_k = g_k + conj(a_(k+1)) S_(k+1)$ along the last dim."""
    return recurrence(_before(a.conj().flip(-1)), g.flip(-1)).flip(-1)


def _are_normal(P: Tensor, g: Tensor) -> bool:
    """Whether all $P$ and $g_m P_m$ are normal numbers, and sums of these are finite; or $g_m$ is 0."""
    if P.numel() == 0:
        return False
    limits = torch.finfo(g.dtype)
    smallest, largest = (y.item() for y in P.abs().aminmax())
    if not (smallest >= limits.tiny and largest < limits.max):
        return False
    sizes = g.abs()
    low, high = (y.item() for y in sizes.aminmax())
    low = low or sizes.masked_fill(sizes == 0, inf).amin().item()
    return smallest * low >= limits.tiny and largest * max(high, 1) * g.shape[-1] < limits.max


def _by_division(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor | None:
    """The sum of $conj(P_m) g_m$ over $m >= k$, divided by $conj(x_k)$; None if anything may under- or overflow."""
    P, g = (_last(widened(y, grad), dim) for y in (output, grad))
    if not _are_normal(P, g):
        return None
    sums = (g * P.conj()).flip(-1).cumsum(-1).flip(-1)
    return laid_out_as(_back(sums / _last(widened(input, grad), dim).conj(), grad, dim), input)


@formula(kernels=Kernel("cpu", python=_by_division))
def cumprod_backward(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """Cotangent of $x$, given that of its cumulative products $P$: $conj(P_(k-1)) S_k$, see the module.

    Args:
        grad: cotangent of $P$.
        input: $x$, real or complex.
        output: $P$, with its dependence on $x$ for higher orders.

    Returns:
        The shape of ``input`` and its order of dims in memory, in the dtype of ``grad``.

    References:
        ATen cumprod_backward, which divides by x.
    """
    x, P, g = (_last(widened(y, grad), dim) for y in (input, output, grad))
    return laid_out_as(_back(_before(P).conj() * _pull(x, g), grad, dim), input)


@formula
def cumprod_jvp(self_t: Tensor, self_p: Tensor, result: Tensor, dim: int) -> Tensor:
    """Tangent of the cumulative products $P$ of $x$: $y_m = x_m y_(m-1) + P_(m-1) t_m$.

    Returns:
        The shape and dtype of ``result``.

    References:
        ATen cumprod_jvp, which divides by x, and whose derivative is wrong at zeros.
    """
    t, x, P = (_last(widened(y, result), dim) for y in (self_t, self_p, result))
    return _back(recurrence(x, _before(P) * t), result, dim)


def _ratios(x: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """$(a, w)$ of log cumsum exp along the last dim; $w = 0$ where $l$ is $-inf$: by convention, $x$ has no effect there."""
    before = _before(l, one=False)
    level = l.real if l.is_complex() else l
    level_before = before.real if l.is_complex() else before
    same = level.isinf() & (level == level_before)
    empty = level.detach() == -torch.inf
    a = torch.where(same, 0, before - l).exp()
    return a, torch.where(empty, 0, torch.where(empty, 0, x - l).exp())


def _shares(x: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:  # noqa: E741
    """`_ratios` for real $x$ where $l$ is finite, by $u = x_m - l_(m-1)$: $a = s(-u)$, $w = s(u)$, $s$ the sigmoid.

    Where $w$ is close to 1, the tangent of a difference of $l$ would be only rounding error.
    """
    a, w = _ratios(x, l)
    before = _before(l, one=False)
    first = torch.arange(l.shape[-1], device=l.device) == 0
    finite = x.isfinite() & before.isfinite() & ~first
    u = torch.where(finite, x - before, 0)
    return torch.where(finite, logistic(-u), a), torch.where(finite, logistic(u), w)


@formula
def logcumsumexp_backward(grad: Tensor, self: Tensor, result: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of $l = log cumsum exp(x)$: $conj(w_k) S_k$, see the module.

    Args:
        grad: cotangent of $l$.
        self: $x$, real or complex.

    Returns:
        The shape of ``self``.

    Note:
        Where not differentiable: where $l$ is $-inf$; the derivative there is 0. Where $x$ is inf it is nan.
    """
    x, l = _last(self, dim), _last(result, dim)  # noqa: E741
    a, w = _shares(x, l) if torch.is_grad_enabled() and not x.is_complex() else _ratios(x, l)
    return _back(w.conj() * _pull(a, _last(grad, dim)), self, dim)


@formula
def logcumsumexp_jvp(self_p: Tensor, self_t: Tensor, result: Tensor, dim: int) -> Tensor:
    """Tangent of $l = log cumsum exp(x)$: $y_m = exp(l_(m-1) - l_m) y_(m-1) + exp(x_m - l_m) t_m$.

    Returns:
        The shape of ``result``.

    Note:
        Where not differentiable: as `logcumsumexp_backward`.

    References:
        ATen logcumsumexp_jvp, which is nan for some complex x.
    """
    x, l = _last(self_p, dim), _last(result, dim)  # noqa: E741
    a, w = _ratios(x, l) if x.is_complex() else _shares(x, l)
    return _back(recurrence(a, w * _last(self_t, dim)), result, dim)


rule(
    "aten::cumprod",
    vjp={
        "self": lambda grad, self, dim, result: cast(
            cumprod_backward(grad, self.to(grad.dtype), dim, result), self.dtype
        )
    },
    jvp={"result": cumprod_jvp},
    improves="values",
    source="Blelloch, CMU-CS-90-190, section 1.4, for ATen cumprod_backward and cumprod_jvp",
)
rule(
    "aten::logcumsumexp",
    vjp={"self": logcumsumexp_backward},
    jvp={"result": logcumsumexp_jvp},
    improves="values",
    source="Blelloch, CMU-CS-90-190, section 1.4, for ATen logcumsumexp_backward and logcumsumexp_jvp",
)
