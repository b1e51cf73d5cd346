"""The derivatives of scaled dot-product attention; the rules are in `attention_rules`, the mathematics is in `attention_blocks`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

from .attention_blocks import (
    blocks_of,
    change,
    heads,
    joined_mask,
    like_mask,
    product,
    scale_of,
    scores_jvp,
    shared,
    total,
    weights,
)
from .attention_second import attention_backward_jvp, attention_jvp_jvp

__all__ = ["attention_backward", "attention_jvp", "attention_mask_backward"]


@formula(kernel=("cpu",))
def attention_jvp(
    query: Tensor,
    query_t: Tensor | None,
    key: Tensor,
    key_t: Tensor | None,
    value: Tensor,
    value_t: Tensor | None,
    attn_mask: Tensor | None,
    attn_mask_t: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Tangent of attention: dP v + P dv, with dP = P (T - <P T>).

    Args:
        query: q, (N, H, L, d), real.
        key, value: k and v, (N, h, S, d), where h divides H: each of their heads is for H / h neighbours of the queries'.
        attn_mask: M, which is added to the scores, (L, S) or (N, H, L, S), or broadcast to it; None for 0.
        query_t, key_t, value_t, attn_mask_t: tangents; None for zero.
        is_causal: whether query i attends to the keys 0 to i only.
        scale: s; None for d^(-1/2).

    Returns:
        The shape of ``query``; 0 for a query that attends to no key.

    Raises:
        RuntimeError: shapes or dtypes that do not fit each other, on the CPU.

    Note:
        Where not differentiable: nowhere.

    References:
        Vaswani et al., Attention is all you need (2017), eq. 1; in blocks as Dao et al., FlashAttention (2022).
    """
    s, rows = scale_of(scale, query), query.shape[-2]
    k, k_t, v, v_t = (heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        weights(query, k, attn_mask, is_causal, s), blocks_of(query), blocks_of(query_t), blocks_of(attn_mask_t, rows)
    )
    found = []
    for P, q, q_t, mask_t in blocks:
        dP = change(P, scores_jvp(q, q_t, k, k_t, mask_t, s))
        tangent = total(product(dP, v), product(P, v_t))
        found.append(torch.zeros_like(q) if tangent is None else tangent)
    return torch.cat(found, -2).to(query.dtype)


@attention_jvp.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return tuple(inputs)


@attention_jvp.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    """It is linear in the tangents, and the gradient of a loss along them is what is differentiated in the others."""
    q, q_t, k, k_t, v, v_t, mask, mask_t, is_causal, scale = saved
    needed = ctx.needs_input_grad
    primals = ("query", "key", "value", "attn_mask")
    tangents = tuple(f"{n}_t" for n in primals)
    found: dict[str, Any] = {}
    if any(needed[n] for n in primals):
        pairs = (q, q_t, k, k_t, v, v_t, mask, mask_t, is_causal, scale)
        found |= zip(primals, attention_backward_jvp(grad, None, *pairs, bool(needed["attn_mask"])))
    if any(needed[n] for n in tangents):
        pairs = (q, None, k, None, v, None, mask, None, is_causal, scale)
        found |= zip(tangents, attention_backward_jvp(grad, grad, *pairs, bool(needed["attn_mask_t"])))
    return {n: found.get(n) if needed[n] else None for n in (*primals, *tangents)}


@attention_jvp.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    pairs = [(inputs[i], inputs[i + 1], tangents[i], tangents[i + 1]) for i in (0, 2, 4, 6)]
    return attention_jvp_jvp(*[x for pair in pairs for x in pair], inputs.is_causal, inputs.scale)


def _heads_fit(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> str:
    """What is wrong with the heads and the mask, which the kernel trusts."""
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return f"key: expected a number of heads that divides the {query.shape[1]} of query, got {key.shape[1]}"
    scores = [*query.shape[:3], key.shape[2]]
    if attn_mask is not None and (
        attn_mask.dim() not in (2, 4)
        or any(n not in (1, m) for n, m in zip(reversed(attn_mask.shape), reversed(scores)))
    ):
        return f"attn_mask: expected two or four dims that broadcast to {scores}, got {list(attn_mask.shape)}"
    return ""


@formula(kernel=("default",), requires=_heads_fit)
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of query, key and value, given that of attention: s D k, s D^T q and P^T g, with D = P (G - <P G>).

    Args:
        grad_out: g, the shape of ``query``.
        query, key, value, attn_mask, is_causal, scale: see `attention_jvp`.
        out: the first result of attention, (N, H, L, d); only the kernel reads it.
        logsumexp: its second result, (N, H, L); only the kernel reads it.

    Returns:
        The shapes of ``query``, ``key`` and ``value``.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen _scaled_dot_product_flash_attention_for_cpu_backward; Dao et al., FlashAttention (2022), appendix B.
    """
    s = scale_of(scale, query)
    k, v = heads(key, query), heads(value, query)
    found, of_k, of_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for P, q, g in zip(weights(query, k, attn_mask, is_causal, s), blocks_of(query), blocks_of(grad_out)):
        D: Any = change(P, g @ v.mT)
        found.append(s * (D @ k))
        of_k = of_k + s * (D.mT @ q)
        of_v = of_v + P.mT @ g
    of_q = torch.cat(found, -2).to(query.dtype)
    return of_q.contiguous(), shared(of_k, key).contiguous(), shared(of_v, value).contiguous()


@attention_backward.impl("default")
def _(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    # PyTorch's reads rows as if each were contiguous, and none overlapped another
    query, key, value, out = (
        x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in (query, key, value, out)
    )
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return tuple(g.contiguous() for g in found)


@attention_backward.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return inputs.grad_out, inputs.query, inputs.key, inputs.value, inputs.attn_mask, inputs.is_causal, inputs.scale


@attention_backward.impl_backward
def _(ctx: Any, saved: Any, *grads: Tensor | None) -> Any:
    g, q, k, v, mask, is_causal, scale = saved
    q_t, k_t, v_t = grads
    of_mask = bool(ctx.needs_input_grad["attn_mask"])
    of_g = attention_jvp(q, q_t, k, k_t, v, v_t, mask, None, is_causal, scale)
    others = attention_backward_jvp(g, None, q, q_t, k, k_t, v, v_t, mask, None, is_causal, scale, of_mask)
    found = dict(zip(("query", "key", "value"), others), grad_out=of_g, attn_mask=others[3] if of_mask else None)
    return {**found, "out": None, "logsumexp": None}


@attention_backward.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    i, t = inputs, tangents
    given = (i.query, t.query, i.key, t.key, i.value, t.value, i.attn_mask, t.attn_mask, i.is_causal, i.scale)
    return attention_backward_jvp(i.grad_out, t.grad_out, *given, False)[:3]


@formula
def attention_mask_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Cotangent of the mask that is added to the scores, given that of attention: D = P (G - <P G>).

    Args:
        grad_out: g, the shape of ``query``.
        query, key, value, attn_mask, is_causal, scale: see `attention_jvp`.

    Returns:
        The shape of ``attn_mask``.

    Note:
        Where not differentiable: nowhere.

    References:
        Dao et al., FlashAttention (2022), appendix B.
    """
    k, v = heads(key, query), heads(value, query)
    found = weights(query, k, attn_mask, is_causal, scale_of(scale, query))
    return joined_mask(
        [like_mask(change(P, g @ v.mT), attn_mask) for P, g in zip(found, blocks_of(grad_out))], attn_mask
    )
