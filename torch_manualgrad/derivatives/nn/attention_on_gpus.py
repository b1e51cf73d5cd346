"""The fused attention operators of GPUs: flash, memory-efficient and cuDNN's. The mathematics is in `attention`.

PyTorch has only their first order in reverse mode, and plain calls are left to it. The rules of the backward operators
have the higher orders, and the rules of the operators themselves have forward mode. Both recompute the probabilities, in
blocks of queries.

Dropout is drawn in the kernel, and its mask is not available outside, so derivatives that PyTorch does not have raise.
With ``is_causal`` and unequal numbers of queries and keys, query $i$ attends to the keys 0 to $i$ in the
memory-efficient operator; the two others align the last query with the last key, and raise here too.

Args:
    grad_out: $g$, the shape of ``query``.
    query: $q$, (N, H, L, d), real.
    key, value: $k$ and $v$, (N, h, S, d), where $h$ divides $H$.
    attn_bias: $M$, which is added to the scores and broadcasts to (N, H, L, S); None for 0.
    dropout_p: the probability of dropping; must be 0.
    is_causal: whether query $i$ attends to the keys 0 to $i$ only.
    scale: $s$; None for $d^(-1/2)$.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Rule, always, bind, rule, rules
from torch_manualgrad.core.rule.catalogue import gap

from .attention import SOURCE, attention_backward, attention_backward_jvp, attention_jvp, double_vjp

_HERE = torch.cuda.is_available()
# the dtypes of the flash and cuDNN kernels; under autocast, a derivative gets everything in the precision of the logsumexp
_HALF = (torch.float16, torch.bfloat16)


def _check(query: Tensor, key: Tensor, dropout_p: float, is_causal: bool, any_length: bool) -> None:
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p: fused attention with dropout has a first derivative in reverse mode only, got {dropout_p}; "
            "all derivatives exist with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    if is_causal and not any_length and query.shape[-2] != key.shape[-2]:
        raise NotImplementedError(
            f"is_causal: expected as many queries as keys, got {query.shape[-2]} and {key.shape[-2]}; "
            "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH), all derivatives exist for any numbers"
        )


def _forward(operator: str, gradient: Any, takes_mask: bool, any_length: bool, constants: Sequence[str]) -> Rule:
    """The rule of an operator.

    Args:
        operator: its name.
        gradient: the gradient of query, key, value and, if ``any_length``, of the mask.
        takes_mask: whether it has an argument attn_bias.
        any_length: whether it aligns the first query with the first key.
        constants: its outputs other than ``output``.
    """

    def jvp(
        query: Tensor,
        query_t: Tensor | None,
        key: Tensor,
        key_t: Tensor | None,
        value: Tensor,
        value_t: Tensor | None,
        attn_bias: Tensor | None,
        attn_bias_t: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        _check(query, key, dropout_p, is_causal, any_length)
        pairs = (query, query_t, key, key_t, value, value_t, attn_bias, attn_bias_t)
        return attention_jvp(*pairs, is_causal, scale)

    differentiable = ("query", "key", "value", *(["attn_bias"] if any_length else []))
    of_mask: dict[str, Any] = {} if takes_mask else {"attn_bias": None, "attn_bias_t": None}
    return rule(
        operator,
        vjp={differentiable: gradient},
        jvp={"output": bind(jvp, **of_mask)},
        not_differentiable=tuple(constants),
        defer_to_stock=always,
        improves="missing",
        source=SOURCE,
        register=_HERE,
    )


def _backward(operator: str, g: str, results: Sequence[str], takes_mask: bool, any_length: bool) -> Rule:
    """The rule of a backward operator.

    Args:
        operator: its name.
        g: its name for the cotangent of the output.
        results: its results.
        takes_mask, any_length: as in `_forward`. If both hold, the last result is the gradient of the mask.
    """

    def vjp(
        of_q: Tensor | None,
        of_k: Tensor | None,
        of_v: Tensor | None,
        of_mask: Tensor | None,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        output_mask: list[bool],
    ) -> tuple[Tensor | None, ...]:
        _check(query, key, dropout_p, is_causal, any_length)
        wanted = [*output_mask, *[False] * (5 - len(output_mask))]
        cotangents = (of_q, of_k, of_v, of_mask)
        found = double_vjp(*cotangents, grad_out, query, key, value, attn_bias, is_causal, scale, wanted)
        return found[: len(output_mask)]

    def jvp(
        grad_out: Tensor,
        grad_out_t: Tensor | None,
        query: Tensor,
        query_t: Tensor | None,
        key: Tensor,
        key_t: Tensor | None,
        value: Tensor,
        value_t: Tensor | None,
        attn_bias: Tensor | None,
        attn_bias_t: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        wanted: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        _check(query, key, dropout_p, is_causal, any_length)
        pairs = (query, query_t, key, key_t, value, value_t, attn_bias, attn_bias_t)
        of_mask = len(wanted) > 3 and wanted[3]
        found = attention_backward_jvp(grad_out, grad_out_t, *pairs, is_causal, scale, of_mask)
        return tuple(t if yes else None for t, yes in zip(found, wanted))

    names = dict(zip(("of_q", "of_k", "of_v", "of_mask"), (f"grad_{name}" for name in results)))
    no_mask: dict[str, Any] = {} if takes_mask else {"attn_bias": None}
    no_tangent: dict[str, Any] = {} if takes_mask else {"attn_bias_t": None}
    no_gradient: dict[str, Any] = {} if any_length else {"of_mask": None}
    wanted: Any = "grad_input_mask" if any_length else (True, True, True)
    return rule(
        operator,
        vjp={
            (g, "query", "key", "value", *(["attn_bias"] if takes_mask else [])): bind(
                vjp, grad_out=g, **names, **no_mask, **no_gradient
            ),
            ("out", "logsumexp"): lambda: (None, None),
        },
        jvp={tuple(results): bind(jvp, grad_out=g, grad_out_t=f"{g}_t", wanted=wanted, **no_mask, **no_tangent)},
        improves="missing",
        source=f"ATen has none; {SOURCE}",
        register=_HERE,
    )


def _efficient(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    output: Tensor,
    log_sumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    found: tuple[Tensor | None, ...] = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad_output,
        query,
        key,
        value,
        attn_bias,
        output,
        log_sumexp,
        philox_seed,
        philox_offset,
        dropout_p,
        output_mask,
        is_causal,
        scale=scale,
    )
    return found


def _flash(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    scale: float | None,
) -> tuple[Tensor, ...]:
    if query.dtype not in _HALF:
        _check(query, key, dropout_p, is_causal, False)
        return attention_backward(grad_output, query, key, value, output, logsumexp, None, is_causal, scale)
    given = (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused)
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_output, query, key, value, *given, scale=scale
    )
    return found


def _cudnn(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    output: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    if query.dtype not in _HALF:
        _check(query, key, dropout_p, is_causal, False)
        of_mask = (attn_bias, is_causal, scale)
        return attention_backward(grad_output, query, key, value, output, logsumexp, *of_mask)
    given = (output, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k)
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        grad_output, query, key, value, *given, dropout_p, is_causal, scale=scale
    )
    return found


_NAMED = ("grad_query", "grad_key", "grad_value")
_NUMBERED = ("result0", "result1", "result2", "result3")
_RANDOM = ("philox_seed", "philox_offset")
_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")

GPU_RULES = [
    _backward("aten::_scaled_dot_product_efficient_attention_backward", "grad_out_", _NUMBERED, True, True),
    _backward("aten::_scaled_dot_product_flash_attention_backward", "grad_out", _NAMED, False, False),
    _backward("aten::_scaled_dot_product_cudnn_attention_backward", "grad_out", _NUMBERED[:3], True, False),
    _forward("aten::_scaled_dot_product_efficient_attention", _efficient, True, True, ("log_sumexp", *_RANDOM)),
    _forward(
        "aten::_scaled_dot_product_flash_attention",
        _flash,
        False,
        False,
        ("logsumexp", *_LENGTHS, "rng_state", "unused", "debug_attn_mask"),
    ),
    _forward(
        "aten::_scaled_dot_product_cudnn_attention",
        _cudnn,
        True,
        False,
        ("logsumexp", *_LENGTHS, *_RANDOM, "debug_attn_mask"),
    ),
]

for _rule in GPU_RULES:
    if _rule not in rules.entered():
        gap(_rule.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")
