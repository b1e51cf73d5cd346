"""The derivatives of select, split, chunk, unbind and padding of nested tensors, under ATen's names.

`structure` needs none of them, since autograd differentiates its indexing; these are the same derivatives as formulas on
buffers. ``nested_self`` is the values of a batch with one ragged dim, ``offsets`` its offsets, ``ragged_dim`` that dim,
counted with the batch as 0. Each formula scatters cotangents of pieces into a buffer of zeros. A missing cotangent is None
and counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.rule import formula
from .ragged import Ragged
from .structure import chunk_sizes

__all__: list[str] = []


def _ragged(values: Tensor, offsets: Tensor, ragged_dim: int) -> Ragged:
    if not 1 <= ragged_dim <= values.dim():
        raise IndexError(f"ragged_dim: {ragged_dim} is not a component dim of values of shape {list(values.shape)}")
    shape: list[int | None] = [offsets.shape[0] - 1, *values.shape]
    shape[ragged_dim] = None
    return Ragged(values, offsets, shape)


def _joined(grads: Sequence[Tensor | None], sizes: Sequence[int], dim: int, values: Tensor) -> Tensor:
    """The cotangents concatenated along a dim of the buffer, with zeros of these sizes for the missing ones."""
    if len(grads) != len(sizes):
        raise ValueError(f"grads: expected {len(sizes)}, got {len(grads)}")
    shape = list(values.shape)
    full = [values.new_zeros([*shape[:dim], n, *shape[dim + 1 :]]) if g is None else g for g, n in zip(grads, sizes)]
    return torch.cat(full, dim) if full else torch.zeros_like(values)


@formula
def _nested_select_backward(
    grad: Tensor, nested_self: Tensor, offsets: Tensor, dim: int, index: int, ragged_dim: int = 1
) -> Tensor:
    """Cotangent of a batch, given that of ``select(dim, index)``: grad at the index, 0 elsewhere. Does not synchronize.

    Args:
        grad: the shape of the result of `select`: a component's along dim 0; with the batch in front along the ragged dim;
            else that of the values without ``dim``.
        nested_self: the values of the batch; see the module's docstring.
        offsets: (B + 1,), int32 or int64.
        dim: may be negative.
        index: may be negative.
        ragged_dim: of the batch.

    Returns:
        The shape of ``nested_self``.

    Raises:
        IndexError: no such dim, or no such component along the batch.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen _nested_select_backward; there an index of -1 along the batch ends the process.
    """
    x = _ragged(nested_self, offsets, ragged_dim)
    dim, along = x.wrapped(dim), x.packed_dim
    zeros = torch.zeros_like(nested_self)
    if dim not in (0, ragged_dim):
        return torch.select_scatter(zeros, grad, dim - 1, index)
    if dim == 0:
        if not -x.batch <= index < x.batch:
            raise IndexError(f"index: {index} is out of range for {x.batch} components")
        local = torch.arange(grad.shape[along], device=offsets.device)
        return zeros.index_add(along, offsets[index % x.batch] + local, grad)
    positions = (x.offsets[1:] if index < 0 else x.offsets[:-1]) + index
    inside = (positions >= x.offsets[:-1]) & (positions < x.offsets[1:])
    kept = torch.where(inside.reshape([-1] + [1] * (grad.dim() - 1)), grad, 0)
    if not nested_self.shape[along]:
        return zeros
    return zeros.index_add(along, positions.clamp(0, nested_self.shape[along] - 1), kept.movedim(0, along))


def _padded_fits(grad: Tensor, input: Tensor, do_transform_0213: bool) -> str:
    """An error message about the dims of a padded tensor; empty if they fit."""
    least = 4 if do_transform_0213 else 2
    if input.dim() < least or (do_transform_0213 and input.dim() > 4):
        return (
            f"input: expected {least} dims, as do_transform_0213 is {do_transform_0213}, got shape {list(input.shape)}"
        )
    wanted = [input.shape[1] * input.shape[3]] if do_transform_0213 else list(input.shape[2:])
    if list(grad.shape[1:]) != wanted:
        return f"grad: expected {wanted} after its first dim, as input has shape {list(input.shape)}, got {list(grad.shape)}"
    return ""


@formula(requires=_padded_fits)
def _nested_from_padded_backward(
    grad: Tensor, input: Tensor, offsets: Tensor, do_transform_0213: bool = False
) -> Tensor:
    """Cotangent of a padded tensor, given that of the values taken from it: grad at their positions, 0 in the padding.

    Args:
        grad: (T, ...), cotangent of the values, whose ragged dim is 1.
        input: the padded tensor, (B, L, ...); with ``do_transform_0213`` (B, H, L, E), reshaped to (B, L, H E).
        offsets: (B + 1,), int32 or int64.
        do_transform_0213: see ``input``.

    Returns:
        The shape of ``input``.

    Raises:
        ValueError: components longer than $L$ (on the CPU).

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen _nested_from_padded_backward.
    """
    if not do_transform_0213:
        return _ragged(grad, offsets, 1).to_padded(0.0, input.shape[1])
    _, heads, length, size = input.shape
    return _ragged(grad, offsets, 1).to_padded(0.0, length).unflatten(2, (heads, size)).transpose(1, 2)


@formula
def _nested_split_with_sizes_backward(
    grads: Sequence[Tensor | None],
    split_sizes: Sequence[int],
    dim: int,
    nested_self: Tensor,
    offsets: Tensor,
    ragged_dim: int = 1,
) -> Tensor:
    """Cotangent of a batch, given those of its pieces along the batch or a dense dim: their concatenation.

    Args:
        grads: of the pieces' values, None where missing.
        split_sizes: as in the forward.
        dim: 0 or a dense dim. With 0, the offsets are read where a cotangent is missing.
        nested_self: the values of the batch; see the module's docstring.
        offsets: (B + 1,), int32 or int64.
        ragged_dim: of the batch.

    Returns:
        The shape of ``nested_self``.

    Raises:
        IndexError: no such dim.
        ValueError: the ragged dim, or another number of cotangents.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen _nested_split_with_sizes_backward.
    """
    x = _ragged(nested_self, offsets, ragged_dim)
    dim = x.wrapped(dim)
    if dim == ragged_dim:
        raise ValueError(f"dim: {dim} is the ragged dim")
    if dim:
        return _joined(grads, split_sizes, dim - 1, nested_self)
    counts = [0] * len(split_sizes)
    if any(g is None for g in grads):
        at, first = x.read_offsets(), 0
        for i, n in enumerate(split_sizes):
            counts[i], first = at[first + n] - at[first], first + n
    return _joined(grads, counts, x.packed_dim, nested_self)


@formula
def chunk_backward_nested(
    grads: Sequence[Tensor | None], self: Tensor, offsets: Tensor, chunks: int, dim: int, ragged_dim: int = 1
) -> Tensor:
    """Cotangent of a batch, given those of ``chunk(chunks, dim)``.

    `_nested_split_with_sizes_backward` with the sizes of the chunks.

    Args:
        grads: of the pieces' values, None where missing.
        self: the values of the batch; see the module's docstring.
        offsets: (B + 1,), int32 or int64.
        chunks: as in the forward.
        dim: 0 or a dense dim.
        ragged_dim: of the batch.

    Returns:
        The shape of ``self``.

    Raises:
        IndexError: no such dim.
        ValueError: the ragged dim, or another number of cotangents.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen chunk_backward_nested, for the jagged layout only.
    """
    x = _ragged(self, offsets, ragged_dim)
    dim = x.wrapped(dim)
    size = x.shape[dim] if dim else x.batch
    if size is None:
        raise ValueError(f"dim: {dim} is the ragged dim")
    return _nested_split_with_sizes_backward(grads, chunk_sizes(size, chunks), dim, self, offsets, ragged_dim)


@formula
def unbind_backward_nested(grads: Sequence[Tensor | None], nt_sizes: Tensor, dim: int, values: Tensor) -> Tensor:
    """Cotangent of a flat buffer (N,), given those of its components: flattened, one after the other.

    Args:
        grads: of the components, None where missing.
        nt_sizes: (B, D), the components' sizes; read where a cotangent is missing.
        dim: 0.
        values: the flat buffer; only its dtype and device are used.

    Returns:
        (N,).

    Raises:
        ValueError: another dim, or another number of cotangents.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen unbind_backward_nested.
    """
    if dim != 0:
        raise ValueError(f"dim: expected 0, got {dim}")
    missing = any(g is None for g in grads)
    counts = nt_sizes.prod(1).tolist() if missing else [0] * nt_sizes.shape[0]
    return _joined([g if g is None else g.reshape(-1) for g in grads], counts, 0, values)


@formula
def unbind_backward_nested_jagged(
    grads: Sequence[Tensor | None], self: Tensor, offsets: Tensor, dim: int, ragged_dim: int = 1
) -> Tensor:
    """Cotangent of a batch, given those of its components: their concatenation along the ragged dim.

    Args:
        grads: of the components, None where missing.
        self: the values of the batch; see the module's docstring.
        offsets: (B + 1,), int32 or int64.
        dim: 0.
        ragged_dim: of the batch.

    Returns:
        The shape of ``self``.

    Raises:
        ValueError: another dim, or another number of cotangents.

    Note:
        Where not differentiable: nowhere, it is linear.

    References:
        ATen unbind_backward_nested_jagged.
    """
    if dim != 0:
        raise ValueError(f"dim: expected 0, got {dim}")
    ones = [1] * (offsets.shape[0] - 1)
    return _nested_split_with_sizes_backward(grads, ones, 0, self, offsets, ragged_dim)
