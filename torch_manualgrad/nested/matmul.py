"""Products of nested tensors: matmul, linear and einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.rule import formula
from . import reductions
from .along import of_values
from .conversion import on_nested, require_same_structure
from .packing import readable, segments
from .products import nested_inner, nested_rows
from .ragged import Ragged
from .reshaping import one_ragged_dim

__all__ = ["einsum", "linear", "matmul"]


@on_nested
def matmul(self: Ragged | Tensor, other: Ragged | Tensor) -> Any:
    """The matrix product of each component of one with the matching component of the other, right in all six modes.

    By the components of self and other:

    - (l, k) and (k, m): nested, (l, m); also if a dim in front of the last two is ragged, with the same sizes in both.
    - (n, l) and (l, m), with the same ragged sizes: a dense (B, ..., n, m).
    - (l, k) and $(k, l')$: nested with two ragged dims. This product, and any with a factor that has several ragged
      dims, reads sizes, which synchronizes with a GPU, and is computed one component at a time.

    Args:
        self: nested, with $B$ components of at least two dims, or dense: one matrix for all, (k, m), or one per
            component, (B, ..., k, m) with as many dims. Dims in front of the last two are equal in both arguments.
        other: as ``self``; at least one of the two is nested.

    Returns:
        The products, as in the list above.

    Raises:
        ValueError: shapes that have no such product.
        TypeError: neither argument is nested.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen matmul_nested.
    """
    if isinstance(self, Ragged) and isinstance(other, Ragged):
        return _nested_nested(self, other)
    if isinstance(self, Ragged) and isinstance(other, Tensor):
        return _nested_dense(self, other)
    if isinstance(self, Tensor) and isinstance(other, Ragged):
        if self.dim() < 2 or other.dim() < 3 or other.sizes is not None:
            raise _no_product(self, other)
        swapped = _nested_dense(_transposed(other), self.mT, (self, other))
        return _transposed(swapped)
    raise TypeError(f"self and other: expected a nested tensor, got {type(self).__name__} and {type(other).__name__}")


def _no_product(self: Ragged | Tensor, other: Ragged | Tensor, why: str = "") -> ValueError:
    shapes = [tuple(x.shape) for x in (self, other)]
    return ValueError(f"self and other: no matrix product of shapes {shapes[0]} and {shapes[1]}{why}")


def _transposed(x: Ragged) -> Ragged:
    """``x``, with one ragged dim, and its last two dims swapped."""
    return x.like(x.values.mT, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


def _nested_dense(x: Ragged, w: Tensor, given: tuple[Any, Any] = (None, None)) -> Ragged:
    self, other = given if given[0] is not None else (x, w)  # errors name these
    if x.dim() < 3 or w.dim() < 2 or x.shape[-1] is None or x.shape[-1] != w.shape[-2]:
        raise _no_product(self, other)
    if x.sizes is not None:
        if w.dim() != 2:
            raise _no_product(self, other, "; with several ragged dims, the dense argument must have two dims")
        return _on_rows(x, w.shape[-1], lambda rows: rows @ w)
    shape = (*x.shape[:-1], w.shape[-1])
    if w.dim() == 2:
        return x.like(x.values @ w, shape)
    (ragged,), components = x.ragged_dims, x.batch
    fits = w.dim() == x.dim() and w.shape[0] in (1, components)
    if not fits or any(n not in (1, s) for n, s in zip(w.shape[1:-2], x.shape[1:-2])):
        raise _no_product(self, other)
    if w.shape[0] == 1:
        return x.like(x.values @ w[0], shape)
    if ragged == x.dim() - 2:
        matrices = w.movedim(0, -3).expand(*x.values.shape[:-2], *w.shape[:1], *w.shape[-2:])
        return x.like(nested_rows.op(x.values, matrices, x.offsets), shape)
    of_positions = w.squeeze(ragged).index_select(0, segments(x.offsets, x.values.shape[ragged - 1]))
    return x.like(x.values @ of_positions.movedim(0, ragged - 1), shape)


def _nested_nested(x: Ragged, y: Ragged) -> Any:
    if x.dim() != y.dim() or x.dim() < 3 or x.batch != y.batch:
        raise _no_product(x, y)
    pairs = [*zip(x.shape[1:-2], y.shape[1:-2]), (x.shape[-1], y.shape[-2])]
    if any(None not in pair and pair[0] != pair[1] for pair in pairs):
        raise _no_product(x, y)
    last = x.dim() - 1
    positions = x.ragged_dims + y.ragged_dims
    if any(a != b for a, b in pairs) or len(positions) > 2 or positions == (last - 1, last):
        return _by_components(x, y)
    _same_lengths(x, y)
    if positions == (last, last - 1):
        return nested_inner.op(x.values.mT, y.values, x.offsets).movedim(-3, 0)
    return x.like(x.values @ y.values, (*x.shape[:-1], y.shape[-1]))


def _same_lengths(x: Ragged, y: Ragged) -> None:
    """Check that the ragged dims agree; on the CPU all lengths are compared, elsewhere their sums.

    Raises:
        ValueError: the lengths differ.
    """
    if readable(x.offsets) and readable(y.offsets):
        if x.offsets is not y.offsets and x.read_offsets() != y.read_offsets():
            raise _no_product(x, y, f": the lengths differ, {x.lengths.tolist()} and {y.lengths.tolist()}")
        return
    ours, theirs = x.values.shape[x.packed_dim], y.values.shape[y.packed_dim]
    if ours != theirs:
        raise _no_product(x, y, f": the sums of the lengths differ, {ours} and {theirs}")


def _on_rows(x: Ragged, width: int, f: Any) -> Ragged:
    """Apply ``f`` to the rows along the last dim, a dense one, of a nested tensor with several ragged dims."""
    assert x.sizes is not None and x.shape[-1] is not None
    rows = x.sizes.prod(1)
    for size in x.shape[1:-1]:
        rows = rows if size is None else rows * size
    values = f(x.values.reshape(-1, x.shape[-1]) if x.shape[-1] else x.values.new_zeros(int(rows.sum()), 0))
    offsets = torch.cat([x.offsets.new_zeros(1), (rows * width).cumsum(0).to(x.offsets)])
    return Ragged(values.reshape(-1), offsets, (*x.shape[:-1], width), x.sizes)


def _by_components(x: Ragged, y: Ragged) -> Any:
    """The products, one component at a time. A dim of the result is ragged if it is ragged in the factors it comes from."""
    shape = (*(a if b is None else b for a, b in zip(x.shape[:-2], y.shape[:-2])), x.shape[-2], y.shape[-1])
    left, right = x.components(), y.components()
    for a, b in zip(left, right):
        if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            raise _no_product(x, y, f": components of shapes {list(a.shape)} and {list(b.shape)}")
    products = [a @ b for a, b in zip(left, right)]
    ragged = [d for d, size in enumerate(shape) if size is None]
    if products:
        return Ragged.from_components(products, ragged_dims=ragged) if ragged else torch.stack(products)
    empty = x.values.new_zeros([size or 0 for size in (shape[1:] if len(ragged) < 2 else [0])])
    if not ragged:
        return empty.unsqueeze(0)[:0]
    return Ragged(empty, x.offsets, shape, x.offsets.new_zeros(0, len(ragged)) if len(ragged) > 1 else None)


@on_nested
def linear(input: Ragged, weight: Tensor, bias: Tensor | None = None) -> Ragged:
    """$x W^T + b$ on the last dim, which is dense: one dense product of all packed rows, right in all six modes.

    Args:
        input: $x$, (B, ..., k), $k$ not ragged.
        weight: $W$, (m, k).
        bias: $b$, (m,), or None.

    Returns:
        The components with $m$ instead of $k$.

    Raises:
        ValueError: shapes that do not fit.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen nested_linear; the gradients are `nested_linear_backward`.
    """
    if weight.dim() != 2 or input.shape[-1] is None or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight: shape {list(weight.shape)} does not fit an input of shape {tuple(input.shape)}; expected [m, k] "
            "for a last dim k that is not ragged"
        )
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"bias: expected shape {[weight.shape[0]]}, got {list(bias.shape)}")
    if input.sizes is not None:
        return _on_rows(input, weight.shape[0], lambda rows: F.linear(rows, weight, bias))
    return input.like(F.linear(input.values, weight, bias), (*input.shape[:-1], weight.shape[0]))


def einsum(equation: str, *operands: Any) -> Any:
    """Sums of products over letters, as `torch.einsum`: ``einsum("bnd,dk->bnk", words, weight)``.

    Args:
        equation: with ``->``, without an ellipsis. The first letter of each `Ragged` is the batch, and stands only in
            such operands and first in the result.
        operands: one or more `Ragged` with the same components and one ragged dim, and dense tensors that have
            neither the batch nor the ragged dim.

    Returns:
        A `Ragged`; a dense (B, ...) if the ragged letter is summed, and a dense tensor if the batch is summed too.

    Raises:
        ValueError: an equation or operands that do not fit.
        RuntimeError: as in torch.
    """
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else list(operands)
    terms, arrow, result = equation.replace(" ", "").partition("->")
    named = terms.split(",")
    if not arrow or "." in equation or len(named) != len(given):
        raise ValueError(f"equation: expected terms of {len(given)} operands, '->' and a result, got {equation!r}")
    first = next(i for i, x in enumerate(given) if isinstance(x, Ragged))
    nested, lengths = given[first], [x.dim() for x in given]
    if lengths != [len(term) for term in named]:
        raise ValueError(f"equation: operands have {lengths} dims, and {equation!r} names others")
    batch, ragged = named[first][0], named[first][one_ragged_dim(nested, "einsum")]
    values: list[Tensor] = []
    for i, (x, term) in enumerate(zip(given, named)):
        if isinstance(x, Ragged):
            require_same_structure(nested, x, name=f"operands[{i}]")
            fits = term[0] == batch and term[x.ragged_dims[0]] == ragged and term.count(batch) == 1
            fits = fits and term.count(ragged) == 1
        else:
            fits = batch not in term and ragged not in term
        if not fits:
            raise ValueError(
                f"equation: {batch!r} is the batch and {ragged!r} the ragged dim, once in each Ragged and in no dense "
                f"operand; term {i} of {equation!r} does not fit. matmul has products of two ragged dims"
            )
        values.append(x.values if isinstance(x, Ragged) else x)
    inside = ",".join(term[1:] if isinstance(x, Ragged) else term for x, term in zip(given, named))
    if batch not in result and ragged not in result:
        return torch.einsum(f"{inside}->{result}", *values)
    if result[0] != batch or result.count(batch) != 1:
        raise ValueError(f"equation: the result of {equation!r} has to begin with {batch!r}, the batch")
    if ragged not in result:
        entries = of_values(nested, torch.einsum(f"{inside}->{ragged}{result[1:]}", *values), 0)
        return reductions.sum(entries, 1).to(entries.dtype)
    return of_values(nested, torch.einsum(f"{inside}->{result[1:]}", *values), result.index(ragged) - 1)


@formula
def nested_linear_backward(
    input: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, $W$, $b$, given that of $x W^T + b$: $g conj(W)$, $g^T conj(x)$, $sum g$ over packed rows.

    Args:
        input: $x$, packed, (*, k).
        grad_output: $g$, (*, m).
        weight: $W$, (m, k).
        output_mask: which of the three are wanted; the others come back empty.

    Returns:
        (*, k), (m, k) and (m,).

    Note:
        Where not differentiable: nowhere; differentiable in every mode.

    References:
        ATen nested_linear_backward.
    """
    grad_input = grad_weight = grad_bias = grad_output.new_zeros(0)
    rows = grad_output.reshape(-1, weight.shape[0]) if weight.shape[0] else grad_output.flatten(0, -2)
    if output_mask[0]:
        grad_input = grad_output @ weight.conj()
    if output_mask[1]:
        grad_weight = rows.mT @ input.reshape(rows.shape[0], weight.shape[1]).conj()
    if output_mask[2]:
        grad_bias = rows.sum(0)
    return grad_input, grad_weight, grad_bias
