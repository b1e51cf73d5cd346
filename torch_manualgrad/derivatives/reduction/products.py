"""Products of all entries, or of those along a dim.

The derivative with respect to an entry is the product $e$ of the others, which is computed without division. So it is right
for any number of zero entries, and where the product over- or underflows. It consists of products only, and so is right in
every order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .dims import cast, laid_out_as, restore_reduced_dims


def products_of_others(x: Tensor) -> Tensor:
    """$e$ along the last dim, by a tree: the $e$ of an entry of a pair is the $e$ of the pair's product, times its partner."""
    n = x.shape[-1]
    if n <= 1:
        return torch.ones_like(x)
    half = n // 2
    pairs, rest = x.split([2 * half, n - 2 * half], -1)
    even, odd = pairs[..., ::2], pairs[..., 1::2]
    of_pairs, of_rest = products_of_others(torch.cat([even * odd, rest], -1)).split([half, n - 2 * half], -1)
    return torch.cat([torch.stack([of_pairs * odd, of_pairs * even], -1).reshape(pairs.shape), of_rest], -1)


def _products_of_others(x: Tensor, dim: int | None) -> Tensor:
    if x.dim() == 0:
        return torch.ones_like(x)
    if dim is None:
        return products_of_others(x.flatten()).reshape(x.shape)
    return products_of_others(x.movedim(dim, -1)).movedim(-1, dim)


@formula
def prod_safe_zeros_backward(grad: Tensor, inp: Tensor, dim: int) -> Tensor:
    """Cotangent of $x$, given that of the product along ``dim``: $grad conj(e)$, with $e$ the product of the others.

    Args:
        grad: cotangent of the product, with ``dim`` kept.
        inp: $x$, real or complex.
        dim: the dim along which the product is taken.

    Returns:
        The shape of ``inp``.
    """
    return grad * _products_of_others(inp, dim).conj()


def _vanishes(x: Tensor, dim: int | None) -> Tensor:
    """Where all $e$ are certainly below the smallest number, judged by logarithms; False where an $x$ is zero."""
    logs = x.abs().log2()
    total, least = (logs.sum(), logs.amin()) if dim is None else (logs.sum(dim, True), logs.amin(dim, True))
    limits = torch.finfo(x.dtype)
    return total - least < math.log2(limits.tiny * limits.eps) - 8 + 1e-5 * total


def _by_division(grad: Tensor, input: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor | None:
    """`prod_backward` with $e$ as the product over $x$, if each product is a normal number or its $e$ are zero; else None."""
    normal = result.isfinite() & (result.abs() >= torch.finfo(result.dtype).tiny)
    g, product, regular = grad, result, normal
    if dim is not None:
        g, product, regular = (restore_reduced_dims(y, input.dim(), [dim], keepdim) for y in (grad, result, normal))
    if not normal.all():
        if input.numel() == 0 or not (regular | _vanishes(input, dim)).all():
            return None
        product = torch.where(regular, product, 0)
    return laid_out_as(g * (product / input).conj(), input)


@formula(kernels=Kernel("cpu", "cuda", python=_by_division))
def prod_backward(grad: Tensor, input: Tensor, result: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Cotangent of $x$, given that of its product: $grad conj(e)$, with $e$ the product of the others.

    Args:
        grad: cotangent of the product.
        input: $x$, real or complex.
        result: the product; a kernel may start from it, but no gradient flows through it.
        dim: the dim along which the product is taken; None for the product of all entries.
        keepdim: whether ``grad`` has ``dim``.

    Returns:
        The shape of ``input``, and its order of dims in memory.

    References:
        ATen prod_backward, both overloads, which divide the product by x where no entry is zero.
    """
    if dim is None:
        return laid_out_as(grad * _products_of_others(input, None).conj(), input)
    grad = restore_reduced_dims(grad, input.dim(), [dim], keepdim)
    return laid_out_as(prod_safe_zeros_backward(grad, input, dim), input)


def _vjp(grad: Tensor, self: Tensor, result: Tensor) -> Tensor:
    return cast(prod_backward(grad, self.to(grad.dtype), result), self.dtype)


def _dim_vjp(grad: Tensor, self: Tensor, result: Tensor, dim: int, keepdim: bool) -> Tensor:
    return cast(prod_backward(grad, self.to(grad.dtype), result, dim, keepdim), self.dtype)


def _jvp(self_p: Tensor, self_t: Tensor, result: Tensor) -> Tensor:
    return (_products_of_others(self_p.to(result.dtype), None) * self_t).sum()


def _dim_jvp(self_p: Tensor, self_t: Tensor, result: Tensor, dim: int, keepdim: bool) -> Tensor:
    return (_products_of_others(self_p.to(result.dtype), dim) * self_t).sum(dim, keepdim)


rule(
    "aten::prod",
    vjp={"self": _vjp},
    jvp={"result": _jvp},
    improves="values",
    source="ATen prod_backward; products of the others by a tree",
)
rule(
    "aten::prod.dim_int",
    vjp={"self": _dim_vjp},
    jvp={"result": _dim_jvp},
    improves="values",
    source="ATen prod_backward, prod_safe_zeros_backward; products of the others by a tree",
)
