"""Laplacians and their like in one forward pass, by collapsed Taylor series.

A series of second order along each of n directions has the second derivatives of f along these. As the last coefficient
enters linearly, that of the sum of all directions is carried in place of n of them (Bettencourt et al., Li et al., Dangel et
al.): a pass carries the value, the Jacobian and the trace of the Hessian.

References:
    Li et al., A computational framework for neural network-based variational Monte Carlo with Forward Laplacian,
    doi:10.1038/s42256-024-00794-x.
    Dangel et al., Collapsing Taylor mode automatic differentiation, arXiv:2505.13644.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.internals import pytree

from .jet_tensor import Space
from .jet_vmap import each_direction
from .jets import directional, zeros_for

__all__ = ["biharmonic", "ggn_vp", "hessian_diagonal", "hvp", "laplacian", "weighted_laplacian"]


def laplacian(f: Callable[..., Any], *, batch_dims: int = 0, with_jacobian: bool = False) -> Callable[..., Any]:
    """The Laplacian of ``f`` in its first argument: the sum of the second derivatives in all its entries.

    Args:
        f: a function of a tensor, and of others that are constant; it returns tensors, in any pytree.
        batch_dims: how many first dimensions of the argument count examples: f must act on each example alone, and the sum is
            over the other dimensions.
        with_jacobian: return what else the pass computes.

    Returns:
        The function with f's arguments whose value is the Laplacian of each output; with ``with_jacobian`` the triple of
        f's value, its Jacobian and the Laplacian. The Jacobian has the shape of the output, followed by that of the
        argument without its batch dimensions.
    """

    def of(x: Tensor, *others: Any) -> Any:
        value, jacobian, sums = _collapsed(f, x, others, basis(x, batch_dims), None)
        if not with_jacobian:
            return sums
        event = x.shape[batch_dims:]
        return value, pytree.tree_map(lambda j: j.movedim(0, -1).reshape(*j.shape[1:], *event), jacobian), sums

    return of


def weighted_laplacian(f: Callable[..., Any], weight: Tensor, *, batch_dims: int = 0) -> Callable[..., Any]:
    """The trace of W H, with H the Hessian of ``f`` in its first argument: the sum of W[i, j] H[i, j].

    Args:
        f: as in `laplacian`.
        weight: W, symmetric, (n, n), or its diagonal, (n,), with n the number of entries that f has its argument's example
            by. A matrix is constant; a diagonal may be differentiated.
        batch_dims: as in `laplacian`.

    Returns:
        The function with f's arguments whose value is that of each output.

    Raises:
        ValueError: the weight has another shape.
    """

    def of(x: Tensor, *others: Any) -> Any:
        n = math.prod(x.shape[batch_dims:])
        if tuple(weight.shape) not in ((n,), (n, n)):
            raise ValueError(f"weighted_laplacian: a weight of shape {tuple(weight.shape)} for {n} entries")
        if weight.ndim == 1:
            return _collapsed(f, x, others, basis(x, batch_dims), weight)[2]
        weights, vectors = torch.linalg.eigh(weight.detach().to(x.dtype))
        return _collapsed(f, x, others, _seeds(vectors.mT, x, batch_dims), weights)[2]

    return of


def biharmonic(f: Callable[..., Any], *, batch_dims: int = 0) -> Callable[..., Any]:
    """The Laplacian of the Laplacian of ``f``; arguments and result as in `laplacian`."""
    return laplacian(laplacian(f, batch_dims=batch_dims), batch_dims=batch_dims)


def hessian_diagonal(f: Callable[..., Any], *, batch_dims: int = 0) -> Callable[..., Any]:
    """The second derivatives of ``f`` in each entry of its first argument.

    Args:
        f: as in `laplacian`.
        batch_dims: as in `laplacian`.

    Returns:
        The function with f's arguments whose value has, for each output, its shape followed by that of the argument
        without its batch dimensions.
    """

    def of(x: Tensor, *others: Any) -> Any:
        trees: list[Any] = []

        def second(v: Tensor) -> list[Any]:
            found = directional(lambda y: f(y, *others), x, v, 2)
            flat, tree = pytree.tree_flatten(found, is_leaf=lambda y: isinstance(y, list))
            trees[:] = [tree]
            return [terms[1] for terms in flat]

        event = x.shape[batch_dims:]
        found = [h.movedim(0, -1).reshape(*h.shape[1:], *event) for h in each_direction(second, basis(x, batch_dims))]
        return pytree.tree_unflatten(found, trees[0])

    return of


def hvp(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The Hessian of a scalar function times a vector: the derivative of its gradient along ``v``.

    Args:
        f: of one tensor, its value a scalar.
        x: where.
        v: the shape of ``x``.

    Returns:
        The shape of ``x``.
    """
    return torch.func.jvp(torch.func.grad(f), (x,), (v,))[1]


def ggn_vp(model: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The generalized Gauss-Newton matrix of loss(model(x)) times a vector: J^T H J v, H the Hessian of the loss.

    Args:
        model: with the Jacobian J at ``x``.
        loss: of the model's output, a scalar.
        x: where, such as the parameters.
        v: the shape of ``x``.

    Returns:
        The shape of ``x``.
    """
    output, pullback = torch.func.vjp(model, x)  # type: ignore[misc]
    tangent = torch.func.jvp(model, (x,), (v,))[1]
    return pullback(hvp(loss, output, tangent))[0]


def basis(x: Tensor, batch_dims: int) -> Tensor:
    """A direction for each entry of an example; the same for all examples, without copies."""
    n = math.prod(x.shape[batch_dims:])
    return _seeds(torch.eye(n, dtype=x.dtype, device=x.device), x, batch_dims)


def _seeds(rows: Tensor, x: Tensor, batch_dims: int) -> Tensor:
    return rows.reshape(rows.shape[0], *[1] * batch_dims, *x.shape[batch_dims:]).expand(rows.shape[0], *x.shape)


def _collapsed(
    f: Callable[..., Any], x: Tensor, others: Any, directions: Tensor, weights: Tensor | None
) -> tuple[Any, Any, Any]:
    """The value, the derivatives along the directions, the (weighted) sum of the second ones."""
    space = Space(2, directions.shape[0], weights)

    def run() -> tuple[Any, Any, Any]:
        leaves, tree = pytree.tree_flatten(f(space.jet([x, directions, None]), *others))
        found = [space.coefficients(y) for y in leaves]
        return (
            pytree.tree_unflatten([y[0] for y in found], tree),
            pytree.tree_unflatten([_or_zero(y[1], y[0], directions.shape[0]) for y in found], tree),
            pytree.tree_unflatten([zeros_for(y[0]) if y[2] is None else 2 * y[2] for y in found], tree),
        )

    return space.run(run)


def _or_zero(term: Any, value: Tensor, directions: int) -> Tensor:
    return zeros_for(value).expand(directions, *value.shape) if term is None else term
