"""Bilinear operators on jets: Leibniz's rule, a convolution of the coefficients.

Along many curves the last coefficient of a product is a sum over these, computed by one matrix product: no product
along a single curve is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.rule import operator

from . import taylor
from .elementwise import aligned
from .scaled import Scaled, matmul
from .taylor import Coefficients
from .tensor import Space, is_jet
from .trace import is_tensor
from .vmap import each_direction

__all__ = ["RULES", "Product", "leibniz"]

Map = Callable[[Any, Any], Any]


class Product(NamedTuple):
    """A bilinear function.

    Attributes:
        plain: of two tensors.
        left, right, both: with the directions first in the first, the second or both arguments, and in the result.
        contracted: the weighted sum of ``both`` over the directions of a space, its first argument.
    """

    plain: Map
    left: Map
    right: Map
    both: Map
    contracted: Callable[[Space, Any, Any], Any]


def leibniz(space: Space, x: Coefficients, y: Coefficients, product: Product) -> Coefficients:
    """The coefficients of the product of two series."""
    order = space.order
    if space.directions is None:
        return [taylor.convolve(x, y, k, product=product.plain) for k in range(order + 1)]
    found = [product.plain(x[0], y[0])]
    for k in range(1, order + 1):
        terms = []
        for j in range(k + 1):
            a, b = x[j], y[k - j]
            if a is None or b is None:
                continue
            if k == order and 0 < j < k:
                terms.append(product.contracted(space, a, b))
            elif k == order:
                terms.append(product.plain(a, b))
            else:
                terms.append((product.right if j == 0 else product.left if j == k else product.both)(a, b))
        found.append(taylor.sum_of(terms))
    return found


def _weighted(space: Space, x: Tensor) -> Tensor:
    return x if space.weights is None else space.weights.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1)) * x


def _times(x: Any, y: Any) -> Any:
    return x * y


_MUL = Product(_times, _times, _times, _times, Space.collapsed_product)


def _rows(x: Any, y: Tensor) -> Tensor:
    """x[r] @ y for each direction r; only for the first if all rows are equal, as in a seed of basis vectors."""
    if not isinstance(x, Scaled) and x.shape[1] > 1 and x.stride(1) == 0:
        return torch.matmul(x[:, 0], y).unsqueeze(1).expand(-1, x.shape[1], -1)
    return matmul(x, y)


_MM = Product(
    torch.matmul,
    _rows,
    torch.matmul,
    torch.matmul,
    lambda space, x, y: torch.einsum("rmk,rkn->mn", _weighted(space, x), y),
)
_BMM = Product(
    torch.matmul,
    lambda x, y: torch.einsum("rbmk,bkn->rbmn", x, y),
    lambda x, y: torch.einsum("bmk,rbkn->rbmn", x, y),
    torch.matmul,
    lambda space, x, y: torch.einsum("rbmk,rbkn->bmn", _weighted(space, x), y),
)


def _by_vmap(plain: Map) -> Product:
    def left(x: Any, y: Any) -> Any:
        return each_direction(lambda a: [plain(a, y)], x)[0]

    def right(x: Any, y: Any) -> Any:
        return each_direction(lambda b: [plain(x, b)], y)[0]

    def both(x: Any, y: Any) -> Any:
        return each_direction(lambda a, b: [plain(a, b)], x, y)[0]

    return Product(plain, left, right, both, lambda space, x, y: space.collapse(both(x, y)))


def _series(space: Space, x: Any, y: Any, product: Product) -> Coefficients:
    constant = product is _MM and not (is_jet(y) and y.space is space)
    left = space.factored(x) if constant else space.coefficients(x)
    return leibniz(space, left, space.coefficients(y), product)


def bilinear(product: Product) -> Callable[..., Any]:
    """The rule of an operator that computes this product."""
    return lambda space, x, y: space.jet(_series(space, x, y, product))


def _mul(space: Space, x: Any, y: Any) -> Any:
    if not is_tensor(y):
        return space.jet(taylor.scale(space.coefficients(x), y))
    ndim = max(x.ndim, y.ndim)
    return space.jet(leibniz(space, aligned(space, x, ndim), aligned(space, y, ndim), _MUL))


def _sum_with(product: Product) -> Callable[..., Any]:
    """beta bias + alpha x y."""

    def rule(space: Space, bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        found = _series(space, x, y, product)
        found = found if alpha == 1 else taylor.scale(found, alpha)
        if beta == 0:
            return space.jet(found)
        if is_jet(bias) and bias.space is space:
            return space.jet(found) + (bias if beta == 1 else beta * bias)
        return space.jet([found[0] + (bias if beta == 1 else beta * bias), *found[1:]])

    return rule


def _convolution(space: Space, input: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    op = operator("aten::convolution")
    product = _by_vmap(lambda x, w: op(x, w, None, *rest))
    found = space.jet(leibniz(space, space.coefficients(input), space.coefficients(weight), product))
    return found if bias is None else found + bias.reshape(-1, *[1] * (found.ndim - 2))


def _cross(space: Space, x: Any, y: Any, *, dim: int = -1) -> Any:
    return bilinear(_by_vmap(lambda a, b: torch.linalg.cross(a, b, dim=dim)))(space, x, y)


RULES: dict[str, Callable[..., Any]] = {
    "aten::mul.Tensor": _mul,
    "aten::mm": bilinear(_MM),
    "aten::bmm": bilinear(_BMM),
    "aten::mv": bilinear(_by_vmap(torch.mv)),
    "aten::dot": bilinear(_by_vmap(torch.dot)),
    "aten::vdot": bilinear(_by_vmap(torch.vdot)),
    "aten::addmm": _sum_with(_MM),
    "aten::baddbmm": _sum_with(_BMM),
    "aten::addmv": _sum_with(_by_vmap(torch.mv)),
    "aten::addr": _sum_with(_by_vmap(torch.outer)),
    "aten::addbmm": _sum_with(_by_vmap(lambda x, y: torch.bmm(x, y).sum(0))),
    "aten::convolution": _convolution,
    "aten::linalg_cross": _cross,
}
