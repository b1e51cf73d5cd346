"""Laplacians and similar operators in one forward pass, by collapsed Taylor series.

A series of second order along each of $n$ directions has the second derivatives of $f$ along these. The last
coefficient enters linearly, so its sum over all directions is carried instead of $n$ coefficients (Bettencourt et al.,
Li et al., Dangel et al.): a pass carries the value, the Jacobian and the trace of the Hessian.

References:
    Li et al., A computational framework for neural network-based variational Monte Carlo with Forward Laplacian,
    doi:10.1038/s42256-024-00794-x.
    Dangel et al., Collapsing Taylor mode automatic differentiation, arXiv:2505.13644.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.arguments import ArgumentError, checked, named
from torch_manualgrad.core.internals import pytree, tangents_possible, values_readable
from torch_manualgrad.core.override.override import under_active_rules

from .arguments import check_at_least, check_batch_dims, check_like, check_numbers
from .compiled import compiled_if_f_is
from .curves import series_of, start
from .rows import RowSpace, densified
from .tensor import Space
from .trace import is_tensor
from .vmap import each_direction

__all__ = ["biharmonic", "ggn_vp", "hessian_diagonal", "hvp", "laplacian", "weighted_laplacian"]

_FEW = 8  # up to this number of entries, keeping blocks apart costs more than it saves


@checked
@compiled_if_f_is
def laplacian(
    f: Callable[..., Any], *, batch_dims: int = 0, block_dim: int | None = None, with_jacobian: bool = False
) -> Callable[..., Any]:
    """The Laplacian of ``f`` in its first argument: the sum of the second derivatives in all its entries.

    Args:
        f: a function of a tensor, and of further constant ones; it returns tensors, in any pytree.
        batch_dims: the number of first dimensions of the argument that count examples: $f$ must act on each example
            separately, and the sum is over the other dimensions.
        block_dim: a dimension of the argument, such as that of electrons. While $f$ acts on each of its entries
            separately, the Jacobian is block-diagonal, and only its blocks are computed; once $f$ mixes them, all of
            it. The result is the same. By default the first dimension after the batch, if an example has more than 8
            entries.
        with_jacobian: also return the value and the Jacobian.

    Returns:
        A function with f's arguments that returns the Laplacian of each output; with ``with_jacobian`` the triple of
        f's value, its Jacobian and the Laplacian. The Jacobian has the shape of the output, followed by that of the
        argument without its batch dimensions.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``batch_dims`` is negative, or more than the argument's dimensions; ``block_dim`` is a dimension of
            the batch, or the argument has no such dimension; an operator in $f$ mixes the examples of the batch, or
            chooses among them.
    """
    check_at_least("laplacian: batch_dims", batch_dims, 0)
    batch_of = _batch_of("laplacian", batch_dims)

    @named("laplacian")
    def of(x: Tensor, *others: Any) -> Any:
        check_batch_dims("laplacian", x, batch_dims)
        first, same = batch_dims, [*range(batch_dims)]
        if block_dim is not None:
            if not -x.ndim <= block_dim < x.ndim or block_dim % x.ndim in same:
                raise ArgumentError(
                    f"laplacian: block_dim: expected one of the dimensions {list(range(batch_dims, x.ndim))} for an "
                    f"argument of shape {list(x.shape)} and batch_dims={batch_dims}, got {block_dim}"
                )
            first = block_dim % x.ndim
        apart = block_dim is not None or math.prod(x.shape[batch_dims:]) > _FEW
        if apart and x.ndim > batch_dims and x.shape[first] > 1:
            seeds = _seeds(x, [*same, first])
            space: Space = RowSpace(x, first, seeds, lambda: _seeds(x, same, first=first))
        else:
            seeds = _seeds(x, same)
            space = Space(2, len(seeds))
        space.batch_of = batch_of
        outputs, tree, sums = _collapsed(f, x, others, seeds, space, batch_dims)
        if not with_jacobian:
            return sums
        found = [space.coefficients(densified(y)) for y in outputs]
        values = [value for value, *_ in found]
        jacobians = [_jacobian(value, term, x.shape[batch_dims:], first - batch_dims) for value, term, _ in found]
        return pytree.tree_unflatten(values, tree), pytree.tree_unflatten(jacobians, tree), sums

    return of


def _jacobian(value: Tensor, term: Tensor | None, event: Sequence[int], first: int) -> Tensor:
    """The Jacobian with the argument's dimensions last. In ``term`` they come first, dimension ``first`` foremost."""
    if term is None:
        return torch.zeros_like(value).reshape(*value.shape, *[1] * len(event)).expand(*value.shape, *event)
    sizes = [*event[first : first + 1], *event[:first], *event[first + 1 :]]
    found = term.movedim(0, -1).reshape(*value.shape, *sizes)
    return found.movedim(value.ndim, value.ndim + first) if first else found


@checked
@compiled_if_f_is
def weighted_laplacian(f: Callable[..., Any], weight: Tensor, *, batch_dims: int = 0) -> Callable[..., Any]:
    """The trace of $W H$, with $H$ the Hessian of ``f`` in its first argument: the sum of $W[i, j] H[i, j]$.

    Args:
        f: as in `laplacian`.
        weight: $W$, (n, n), or its diagonal, (n,), with $n$ the number of entries of one example of the argument. Only
            the symmetric part of a matrix counts. A matrix takes $n$ directions if it is
            constant and real, and $2 n$ otherwise, in graphs and inside of transforms.
        batch_dims: as in `laplacian`.

    Returns:
        A function with f's arguments that returns this trace for each output.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the weight has another shape; ``batch_dims`` as in `laplacian`.
    """
    check_numbers("weighted_laplacian: weight", weight)
    check_at_least("weighted_laplacian: batch_dims", batch_dims, 0)
    batch_of = _batch_of("weighted_laplacian", batch_dims)

    @named("weighted_laplacian")
    def of(x: Tensor, *others: Any) -> Any:
        check_batch_dims("weighted_laplacian", x, batch_dims)
        n = math.prod(x.shape[batch_dims:])
        if tuple(weight.shape) not in ((n,), (n, n)):
            raise ArgumentError(
                f"weighted_laplacian: weight: expected shape [{n}] or [{n}, {n}] for an argument of shape {list(x.shape)} "
                f"and batch_dims={batch_dims}, got {list(weight.shape)}"
            )
        if weight.is_complex() and not x.is_complex():
            parts = [weighted_laplacian(f, w, batch_dims=batch_dims)(x, *others) for w in (weight.real, weight.imag)]
            return pytree.tree_map(lambda real, imag: real + 1j * imag, *parts)
        weights, seeds = weight, _seeds(x, range(batch_dims))
        if weight.ndim == 2:
            weights, vectors = _sum_of_squares(weight.to(x.dtype))
            seeds = _seeds(x, range(batch_dims), vectors)
        space = Space(2, len(seeds), weights)
        space.batch_of = batch_of
        return _collapsed(f, x, others, seeds, space, batch_dims)[2]

    return of


def _sum_of_squares(W: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and vectors as rows, whose squares $v v^T$ add up to the symmetric part of $W$.

    For a constant real matrix these are its $n$ eigenvalues and eigenvectors. Eigenvectors cannot be differentiated where
    eigenvalues are equal, and $v v^T$ needs a transpose where those of a complex matrix have an adjoint. Other matrices use
    $4 W = (c + W / c)^2 - (c - W / c)^2$ for a symmetric $W$ and any number $c$, which gives $2 n$ vectors.
    """
    symmetric = (W + W.mT) / 2
    in_graph = torch.compiler.is_compiling()  # which may be differentiated later
    if not (in_graph or W.is_complex() or W.requires_grad or tangents_possible([W])):
        if values_readable([W]) and not W.isfinite().all():
            raise ArgumentError("weighted_laplacian: weight: expected finite numbers in a matrix, got inf or nan")
        weights, vectors = torch.linalg.eigh(symmetric)
        return weights, vectors.mT
    largest = symmetric.detach().abs().amax() if W.numel() else W.abs().sum()
    scale = torch.where(largest > 0, largest, 1).sqrt()
    diagonal = scale * torch.eye(len(W), dtype=W.dtype, device=W.device)
    signs = torch.ones(len(W), dtype=W.dtype, device=W.device) / 4
    return torch.cat([signs, -signs]), torch.cat([diagonal + symmetric / scale, diagonal - symmetric / scale])


@checked
@compiled_if_f_is
def biharmonic(f: Callable[..., Any], *, batch_dims: int = 0) -> Callable[..., Any]:
    """The Laplacian of the Laplacian of ``f``; arguments, result and errors as in `laplacian`."""
    check_at_least("biharmonic: batch_dims", batch_dims, 0)
    return laplacian(laplacian(f, batch_dims=batch_dims), batch_dims=batch_dims)


@checked
@compiled_if_f_is
def hessian_diagonal(f: Callable[..., Any], *, batch_dims: int = 0) -> Callable[..., Any]:
    """The second derivatives of ``f`` in each entry of its first argument.

    Args:
        f: as in `laplacian`.
        batch_dims: as in `laplacian`.

    Returns:
        A function with f's arguments. Its value has, for each output, the shape of the output followed by that of the
        argument without its batch dimensions.

    Raises:
        TypeError, ValueError: as in `laplacian`.
    """
    check_at_least("hessian_diagonal: batch_dims", batch_dims, 0)
    batch_of = _batch_of("hessian_diagonal", batch_dims)

    @named("hessian_diagonal")
    def of(x: Tensor, *others: Any) -> Any:
        check_batch_dims("hessian_diagonal", x, batch_dims)
        trees: list[Any] = []

        def second(v: Tensor) -> list[Any]:
            space = Space(2)
            space.batch_of = batch_of
            values, found = series_of(space, lambda y: f(y, *others), (x,), ([v, None],), batch_dims)
            _check_results(pytree.tree_leaves(values))
            flat, tree = pytree.tree_flatten(found, is_leaf=lambda y: isinstance(y, list))
            trees[:] = [tree]
            return [terms[1] for terms in flat]

        event = x.shape[batch_dims:]
        if not math.prod(event):  # no directions: run one of zeros to find the results of f
            found = [h.new_zeros(*h.shape, *event) for h in second(torch.zeros_like(x))]
            return pytree.tree_unflatten(found, trees[0])
        found = [
            h.movedim(0, -1).reshape((*h.shape[1:], *event))
            for h in each_direction(second, _seeds(x, range(batch_dims)))
        ]
        return pytree.tree_unflatten(found, trees[0])

    return of


@checked
def hvp(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The Hessian of a scalar function times a vector: the derivative of its gradient along ``v``.

    Args:
        f: a function of one tensor that returns a scalar.
        x: where.
        v: the shape of ``x``.

    Returns:
        The shape of ``x``.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``v`` does not have the shape of ``x``, or is complex where ``x`` is real.
    """
    check_like("hvp: v", v, "x", x)
    return torch.func.jvp(torch.func.grad(under_active_rules(f)), (x,), (v,))[1]


@checked
def ggn_vp(model: Callable[[Tensor], Tensor], loss: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """The generalized Gauss-Newton matrix of $loss(model(x))$ times a vector: $J^T H J v$, $H$ the Hessian of the loss.

    Args:
        model: with the Jacobian $J$ at ``x``.
        loss: of the model's output, a scalar.
        x: where, such as the parameters.
        v: the shape of ``x``.

    Returns:
        The shape of ``x``.

    Raises:
        TypeError, ValueError: as in `hvp`.
    """
    check_like("ggn_vp: v", v, "x", x)
    model = under_active_rules(model)
    output, pullback = torch.func.vjp(model, x)  # type: ignore[misc]
    tangent = torch.func.jvp(model, (x,), (v,))[1]
    return pullback(hvp(loss, output, tangent))[0]


def _check_results(results: Sequence[Any]) -> None:
    for y in results or [None]:
        if not is_tensor(y):
            raise TypeError(f"f: expected a tensor, or a pytree of tensors, as its result, got {y!r}")


def _batch_of(name: str, batch_dims: int) -> str | None:
    return f"{name}(batch_dims={batch_dims})" if batch_dims else None


def _seeds(x: Tensor, same: Sequence[int], vectors: Tensor | None = None, first: int = 0) -> Tensor:
    """Directions: expanded along the ``same`` dimensions; in the others a basis, dimension ``first`` foremost, or
    ``vectors``."""
    shape = [1 if d in same else size for d, size in enumerate(x.shape)]
    if vectors is None:
        vectors = torch.eye(math.prod(shape), dtype=x.dtype, device=x.device)
        vectors = vectors.reshape(*shape, len(vectors)).movedim(first, 0).reshape(vectors.shape)
    return vectors.reshape(vectors.shape[0], *shape).expand(vectors.shape[0], *x.shape)


def _collapsed(
    f: Callable[..., Any], x: Tensor, others: Any, directions: Tensor, space: Space, batch_dims: int
) -> tuple[list[Any], Any, Any]:
    """The jets that $f$ returns, their tree, and the (weighted) sums of the second derivatives along the directions."""

    def run() -> tuple[list[Any], Any, Any]:
        outputs, tree = pytree.tree_flatten(f(start(space, [x, directions, None], batch_dims), *others))
        _check_results(outputs)
        found = [space.factored(y) for y in outputs]
        sums = [torch.zeros_like(y[0]) if y[2] is None else 2 * y[2] for y in found]
        return outputs, tree, pytree.tree_unflatten(sums, tree)

    return space.run(run)
