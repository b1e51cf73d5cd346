"""_pack_padded_sequence: the steps of padded sequences, longest first, put one after the other without the padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, real, rule

__all__ = ["pack_padded_sequence_backward"]


@formula
def pack_padded_sequence_backward(
    grad: Tensor, input_size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    """Cotangent of padded sequences, given that of the packed ones: zero at the padding.

    Args:
        grad: (n, *), $n$ the sum of ``batch_sizes``.
        input_size: of the padded sequences, (t, b, *), or (b, t, *) with ``batch_first``.
        batch_sizes: for each step up to the last one of the longest sequence, the number of sequences that have it.
        batch_first: whether sequences are the first dim.

    Returns:
        Of shape ``input_size``.

    References:
        ATen _pack_padded_sequence_backward.
    """
    sizes = [input_size[1], input_size[0], *input_size[2:]] if batch_first else list(input_size)
    steps = batch_sizes.shape[0]
    real = torch.arange(sizes[1], device=batch_sizes.device) < batch_sizes[:, None]  # (steps, b)
    real = real.to(grad.device).reshape([steps, sizes[1]] + [1] * (len(sizes) - 2))
    found = grad.new_zeros([steps, *sizes[1:]]).masked_scatter(real, grad)
    found = torch.cat([found, grad.new_zeros([sizes[0] - steps, *sizes[1:]])])
    return found.transpose(0, 1) if batch_first else found


rule(
    "aten::_pack_padded_sequence",
    vjp={
        "input": pack_padded_sequence_backward.bind(
            grad="grad_result0", input_size="input_sizes", batch_sizes="result1"
        )
    },
    jvp={
        "result0": lambda input_t, lengths, batch_first: torch.ops.aten._pack_padded_sequence(
            input_t, lengths, batch_first
        )[0]
    },
    not_differentiable="result1",
    defer_to_stock=real,
    improves="missing",
    source="ATen derivatives.yaml; the operator is linear",
    gaps={"fake": "the shape of the result depends on the lengths"},
)
