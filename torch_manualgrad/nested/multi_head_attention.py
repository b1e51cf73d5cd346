"""``nn.MultiheadAttention`` of sequences of unequal lengths, and so ``nn.TransformerEncoderLayer`` and the like.

The module swaps the batch and sequence dims of its arguments and passes them to ``F.multi_head_attention_forward``. A batch
of sequences of unequal lengths has no such layout, so `SequencesFirst` represents it, and that function takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .attention import scaled_dot_product_attention, weighted_values
from .matmul import linear
from .ragged import Ragged
from .reshaping import unflatten

__all__ = ["SequencesFirst"]


class SequencesFirst:
    """(*, B, D), for a `Ragged` (B, *, D); only ``F.multi_head_attention_forward`` takes it."""

    __slots__ = ("batch",)

    def __init__(self, batch: Ragged) -> None:
        self.batch = batch

    def __repr__(self) -> str:
        return f"SequencesFirst({self.batch.summary()})"

    def transpose(self, dim0: int, dim1: int) -> Ragged:
        """Swap the two dims back: the `Ragged`."""
        if {dim0 % 3, dim1 % 3} != {0, 1}:
            raise ValueError(f"dim0, dim1: expected 0 and 1, the sequence and the batch, got {dim0} and {dim1}")
        return self.batch

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.multi_head_attention_forward:
            name = getattr(func, "__name__", func)
            raise TypeError(f"{name}: a Ragged with its sequences first is an argument of nn.MultiheadAttention only")
        return _forward(*args, **(kwargs or {}))


def _forward(
    query: SequencesFirst,
    key: SequencesFirst,
    value: SequencesFirst,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[SequencesFirst, Ragged | None]:
    for name, given in {
        "key_padding_mask": key_padding_mask,
        "bias_k": bias_k,
        "bias_v": bias_v,
        "static_k": static_k,
        "static_v": static_v,
        "add_zero_attn": add_zero_attn or None,
    }.items():
        if given is not None:
            why = "a Ragged has no padding" if name == "key_padding_mask" else "keys cannot be added to a Ragged"
            raise ValueError(f"MultiheadAttention: {name}: expected None, as {why}")
    inputs = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, SequencesFirst):
            raise TypeError(f"MultiheadAttention: {name}: expected a Ragged, like the other arguments, got {type(x)}")
        inputs.append(x.batch)
    if inputs[0].shape[2] != embed_dim_to_check:
        raise ValueError(f"query: expected {embed_dim_to_check} features, got {inputs[0].summary()}")
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = in_proj_weight.chunk(3)  # type: ignore[union-attr]
    biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        unflatten(linear(x, w, b), -1, (num_heads, -1)).transpose(1, 2) for x, w, b in zip(inputs, weights, biases)
    )
    dropped = dropout_p if training else 0.0
    shares = None
    if need_weights:
        heads, shares = weighted_values(q, k, v, attn_mask, dropped, is_causal, average_attn_weights)
    else:
        mask = None if is_causal else attn_mask  # with is_causal, attn_mask is the causal mask itself
        heads = scaled_dot_product_attention(q, k, v, mask, dropped, is_causal)
    return SequencesFirst(linear(heads.transpose(1, 2).flatten(-2), out_proj_weight, out_proj_bias)), shares
