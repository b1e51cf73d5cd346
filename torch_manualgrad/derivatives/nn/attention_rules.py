"""The rules of the CPU's fused attention and of its backward; the formulas are in `attention` and `attention_second`.

PyTorch has the first order in reverse mode only, to which plain calls are left; the rule of the backward gives the higher
orders. The log sum exp that attention returns is a constant to every derivative, as in PyTorch. The mask that is added to the
scores has derivatives too, which PyTorch has for unfused attention only. There is no dropout in this operator: attention with
dropout is made of others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_manualgrad.core.rule import bound_to, parameters, rule

from .attention import attention_backward, attention_jvp, attention_mask_backward
from .attention_second import attention_backward_jvp

_GRADIENTS = ("grad_query", "grad_key", "grad_value")
_TANGENTS = parameters(attention_backward_jvp)[:-1]  # that of the mask is not wanted


def _double_vjp(
    grad_grad_query: Tensor | None,
    grad_grad_key: Tensor | None,
    grad_grad_value: Tensor | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    pairs = (query, grad_grad_query, key, grad_grad_key, value, grad_grad_value, attn_mask, None, is_causal, scale)
    of_g = attention_jvp(*pairs) if output_mask[0] else None
    if not any(output_mask[1:]):
        return of_g, None, None, None, None
    *others, of_mask = attention_backward_jvp(grad_out, None, *pairs, output_mask[4])
    return of_g, *others, of_mask if output_mask[4] else None


def _defer_to_stock(*values: Any) -> bool:
    """PyTorch has no derivative in the mask."""
    mask = values[5]
    return mask is None or not mask.requires_grad


# -- samples ----------------------------------------------------------------------------------------------------------


# of samples, which are views as integers and back; a vmap over the cotangent alone needs none
_NO_BATCHES = dict.fromkeys(
    (*(f"vmap/over args[{i}]" for i in (1, 2, 3)), "vmap/over all", "vmap-grad"),
    ("PyTorch has no batching rule of a view of another dtype", "2.13"),
)
_SOURCE = "Vaswani et al., Attention is all you need (2017); Dao et al., FlashAttention (2022), appendix B"

rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    vjp={
        ("query", "key", "value"): attention_backward.bind(grad_out="grad_output", out="output"),
        "attn_mask": attention_mask_backward.bind(grad_out="grad_output"),
    },
    jvp={"output": attention_jvp},
    not_differentiable="logsumexp",
    defer_to_stock=_defer_to_stock,
    improves="missing",
    source=f"ATen _scaled_dot_product_flash_attention_for_cpu_backward; {_SOURCE}",
)
rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    vjp={
        ("grad_out", "query", "key", "value", "attn_mask"): _double_vjp,
        ("out", "logsumexp"): lambda grad_grad_query: (None, None),
    },
    jvp={_GRADIENTS: bound_to(lambda *given: attention_backward_jvp(*given, False)[:3], _TANGENTS)},
    improves="missing",
    source=f"ATen has none; {_SOURCE}",
    gaps=_NO_BATCHES,
)
