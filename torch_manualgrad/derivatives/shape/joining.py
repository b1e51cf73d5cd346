"""Tensors joined and split: cat, stack, block_diag, and splits that are not views.

Args:
    grads: the cotangent of each part, or None for zero; at least one is given.
    dim: the dim along which $x$ is split.
    sizes: the sizes of $x$.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, linear_in, rule

from .common import of_dtype

__all__ = [
    "block_diag_backward",
    "block_diag_jvp",
    "cat_jvp",
    "cat_tensors_backward",
    "split_backward",
    "split_with_sizes_backward",
    "stack_jvp",
    "stack_tensors_backward",
    "unbind_backward",
]


# These return an error message if arguments do not fit, else "".


def _of_all(dtypes: Sequence[torch.dtype], sizes: Sequence[Sequence[int]]) -> str:
    return "" if len(dtypes) == len(sizes) else f"dtypes: expected {len(sizes)}, one for each of sizes, got {dtypes}"


def _of_slices(dtypes: Sequence[torch.dtype], grad: Tensor, dim: int) -> str:
    n = grad.shape[dim]
    return "" if len(dtypes) == n else f"dtypes: expected {n}, one for each slice of grad, got {dtypes}"


def _tangents_fit(tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None]) -> str:
    n = len(tensors_p)
    return "" if len(tensors_t) == n else f"tensors_t: expected {n}, one for each of tensors_p, got {len(tensors_t)}"


def _is_any_given(grads: Sequence[Tensor | None]) -> str:
    return "" if any(g is not None for g in grads) else f"grads: expected at least one tensor, got {grads}"


@formula(requires=_is_any_given)
def split_with_sizes_backward(
    grads: Sequence[Tensor | None], split_sizes: Sequence[int], dim: int, sizes: Sequence[int]
) -> Tensor:
    """Cotangent of $x$, given those of its parts along a dim: their concatenation.

    Args:
        split_sizes: sizes of the parts along ``dim``.

    Returns:
        Of shape ``sizes``.
    """
    like = next(g for g in grads if g is not None)

    def zeros(n: int) -> Tensor:
        shape = list(sizes)
        shape[dim] = n
        return like.new_zeros(shape)

    return torch.cat([zeros(n) if g is None else g for g, n in zip(grads, split_sizes)], dim)


@formula(requires=_is_any_given)
def split_backward(grads: Sequence[Tensor | None], split_size: int, dim: int, sizes: Sequence[int]) -> Tensor:
    """Cotangent of $x$, given those of its parts of equal size, of which the last may be smaller.

    Args:
        split_size: the size of the parts along ``dim``.

    Returns:
        Of shape ``sizes``.
    """
    last = sizes[dim] - split_size * (len(grads) - 1)
    return split_with_sizes_backward(grads, [split_size] * (len(grads) - 1) + [last], dim, sizes)


def _parts(found: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [of_dtype(x, d) for x, d in zip(found, dtypes)]


def _tangents(tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None]) -> list[Tensor]:
    return [torch.zeros_like(p) if t is None else t for p, t in zip(tensors_p, tensors_t)]


@formula(requires=_of_all)
def cat_tensors_backward(
    grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dim: int
) -> list[Tensor]:
    """Cotangents of tensors, given that of their concatenation: its parts along the dim, of the tensors' dtypes.

    Args:
        grad: cotangent of the concatenation.
        sizes: the shape of each tensor. One of shape (0,) is left out of any concatenation.
        dtypes: the dtype of each tensor; a real one gets the real part.
        dim: the dim along which they were joined.

    Returns:
        One for each tensor, of its shape and dtype.
    """
    empty = [tuple(shape) == (0,) and grad.dim() > 1 for shape in sizes]
    lengths = [0 if skip else shape[dim] for shape, skip in zip(sizes, empty)]
    found = list(grad.split_with_sizes(lengths, dim))
    return _parts([grad.new_zeros(0) if skip else x for x, skip in zip(found, empty)], dtypes)


@formula(requires=_tangents_fit)
def cat_jvp(tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None], dim: int) -> Tensor:
    """Tangent of a concatenation: that of the tangents, with zeros for those that are missing.

    Args:
        tensors_p: the tensors that were joined, of any shapes that torch.cat takes.
        tensors_t: tangent of each tensor; None for zero.
        dim: the dim along which they were joined.

    Returns:
        The shape of the concatenation.
    """
    return torch.cat(_tangents(tensors_p, tensors_t), dim)


@formula(requires=_of_slices)
def stack_tensors_backward(grad: Tensor, dim: int, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Cotangents of tensors, given that of their stack: its slices along the new dim, of the tensors' dtypes.

    Args:
        grad: cotangent of the stack.
        dim: the new dim.
        dtypes: the dtype of each tensor; a real one gets the real part.

    Returns:
        One for each tensor, of its dtype.
    """
    return _parts(grad.unbind(dim), dtypes)


@formula(requires=_tangents_fit)
def stack_jvp(tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None], dim: int) -> Tensor:
    """Tangent of a stack: that of the tangents, with zeros for those that are missing.

    Args:
        tensors_p: the tensors that were stacked, of one shape.
        tensors_t: tangent of each tensor; None for zero.
        dim: the new dim.

    Returns:
        The shape of the stack.
    """
    return torch.stack(_tangents(tensors_p, tensors_t), dim)


@formula(requires=_of_all)
def block_diag_backward(grad: Tensor, sizes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Cotangents of matrices, given that of the matrix with them on its diagonal: its blocks.

    Args:
        grad: cotangent of the block-diagonal matrix, (m, n).
        sizes: the shape of each block: (), (n,) for a row, or (m, n).
        dtypes: the dtype of each block; a real one gets the real part.

    Returns:
        One for each block, of its shape and dtype.
    """
    found, row, column = [], 0, 0
    for shape in sizes:
        m, n = ([1, 1] + list(shape))[-2:]
        found.append(grad[row : row + m, column : column + n].reshape(shape))
        row, column = row + m, column + n
    return _parts(found, dtypes)


@formula(requires=_tangents_fit)
def block_diag_jvp(tensors_p: Sequence[Tensor], tensors_t: Sequence[Tensor | None]) -> Tensor:
    """Tangent of a block-diagonal matrix: that of the tangents, with zeros for those that are missing.

    Args:
        tensors_p: the blocks, of two dims at most.
        tensors_t: tangent of each block; None for zero.

    Returns:
        The shape of the block-diagonal matrix.
    """
    return torch.block_diag(*_tangents(tensors_p, tensors_t))


@formula(requires=_is_any_given)
def unbind_backward(grads: Sequence[Tensor | None], dim: int) -> Tensor:
    """Cotangent of $x$, given those of its slices along a dim: their stack.

    Args:
        grads: the cotangent of each slice, all of one shape; None for zero, and at least one is given.
        dim: the dim that the slices lack.

    Returns:
        The shape of $x$.
    """
    like = next(g for g in grads if g is not None)
    return torch.stack([torch.zeros_like(like) if g is None else g for g in grads], dim)


_OF_EACH = {"sizes": "tensors_sizes", "dtypes": "tensors_dtype"}

rule(
    "aten::cat",
    vjp={"tensors": cat_tensors_backward.bind(**_OF_EACH)},
    jvp={"result": cat_jvp},
    kind="linear",
    source="ATen cat_tensors_backward, cat_jvp",
)
rule(
    "aten::stack",
    vjp={"tensors": stack_tensors_backward.bind(dtypes="tensors_dtype")},
    jvp={"result": stack_jvp},
    kind="linear",
    source="ATen stack_tensors_backward, stack_jvp",
)
rule(
    "aten::block_diag",
    vjp={"tensors": block_diag_backward.bind(**_OF_EACH)},
    jvp={"result": block_diag_jvp},
    kind="linear",
    source="ATen block_diag_backward, block_diag_jvp",
)
linear_in("aten::unsafe_split.Tensor", {"self": split_backward.bind(grads="grad", sizes="self_sizes")})
linear_in(
    "aten::unsafe_split_with_sizes",
    {"self": split_with_sizes_backward.bind(grads="grad", sizes="self_sizes")},
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule for the operator"),
)
