"""Tangents of the tangent and of the gradients of attention; the mathematics is in `attention_blocks`.

With T as there, U the same for other tangents u, W the tangent of T along u, and uP = P (U - <P U>), the tangent of do is

    E v + dP uv + uP dv + P duv,        E = uP (T - <P T>) + P (W - <uP T> - <P W>).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula

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


@formula
def attention_backward_jvp(
    grad_out: Tensor,
    grad_out_t: Tensor | None,
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
    of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tangents of the gradients of attention; without ``grad_out_t`` also cotangents of q, k, v and M, given those of the gradients.

    Args:
        grad_out: g, the shape of ``query``.
        query, key, value, attn_mask, is_causal, scale: see `attention_jvp`.
        grad_out_t, query_t, key_t, value_t, attn_mask_t: tangents; None for zero.
        of_mask: whether the last result is wanted, which else is empty.

    Returns:
        The shapes of ``query``, ``key``, ``value`` and ``attn_mask``.

    Note:
        Where not differentiable: nowhere.

    References:
        The derivative of `attention_backward`, which is symmetric, as that is a gradient.
    """
    s, rows = scale_of(scale, query), query.shape[-2]
    k, k_t, v, v_t = (heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        weights(query, k, attn_mask, is_causal, s),
        *[blocks_of(x) for x in (query, query_t, grad_out, grad_out_t)],
        blocks_of(attn_mask_t, rows),
    )
    found, of_k, of_v, masks = [], torch.zeros_like(k), torch.zeros_like(v), []
    for P, q, q_t, g, g_t, mask_t in blocks:
        G = g @ v.mT
        rest = G - (P * G).sum(-1, keepdim=True)
        D, dP = P * rest, change(P, scores_jvp(q, q_t, k, k_t, mask_t, s))
        dG = total(product(g_t, v.mT), product(g, None if v_t is None else v_t.mT))
        dD = change(P, dG)
        if dP is not None:
            dD = total(dD, dP * rest - P * (dP * G).sum(-1, keepdim=True))
            of_v = of_v + dP.mT @ g
        of_v = of_v if g_t is None else of_v + P.mT @ g_t
        of_q = total(product(dD, k), product(D, k_t))
        found.append(torch.zeros_like(q) if of_q is None else s * of_q)
        if dD is not None:
            of_k = of_k + s * (dD.mT @ q)
        if q_t is not None:
            of_k = of_k + s * (D.mT @ q_t)
        if of_mask:
            assert attn_mask is not None
            masks.append(like_mask(torch.zeros_like(P) if dD is None else dD, attn_mask))
    last = joined_mask(masks, attn_mask) if of_mask else query.new_zeros(0)
    return torch.cat(found, -2).to(query.dtype), shared(of_k, key), shared(of_v, value), last


@formula
def attention_jvp_jvp(
    query: Tensor,
    query_t: Tensor | None,
    query_u: Tensor | None,
    query_tu: Tensor | None,
    key: Tensor,
    key_t: Tensor | None,
    key_u: Tensor | None,
    key_tu: Tensor | None,
    value: Tensor,
    value_t: Tensor | None,
    value_u: Tensor | None,
    value_tu: Tensor | None,
    attn_mask: Tensor | None,
    attn_mask_t: Tensor | None,
    attn_mask_u: Tensor | None,
    attn_mask_tu: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Tangent of `attention_jvp`: E v + dP uv + uP dv + P duv.

    Args:
        query, key, value, attn_mask, is_causal, scale: see `attention_jvp`.
        query_t, key_t, value_t, attn_mask_t: the tangents that it is given; None for zero.
        query_u, key_u, value_u, attn_mask_u: tangents of q, k, v and M; None for zero.
        query_tu, key_tu, value_tu, attn_mask_tu: tangents of the tangents; None for zero.

    Returns:
        The shape of ``query``.

    Note:
        Where not differentiable: nowhere.

    References:
        The derivative of `attention_jvp`.
    """
    s, rows = scale_of(scale, query), query.shape[-2]
    k, k_t, k_u, k_tu = (heads(x, query) for x in (key, key_t, key_u, key_tu))
    v, v_t, v_u, v_tu = (heads(x, query) for x in (value, value_t, value_u, value_tu))
    blocks = zip(
        weights(query, k, attn_mask, is_causal, s),
        *[blocks_of(x) for x in (query, query_t, query_u, query_tu)],
        *[blocks_of(x, rows) for x in (attn_mask_t, attn_mask_u, attn_mask_tu)],
    )
    found = []
    for P, q, q_t, q_u, q_tu, mask_t, mask_u, mask_tu in blocks:
        T, U = scores_jvp(q, q_t, k, k_t, mask_t, s), scores_jvp(q, q_u, k, k_u, mask_u, s)
        W = scores_jvp(q, q_tu, k, k_tu, mask_tu, s)
        if q_t is not None and k_u is not None:
            W = total(W, s * q_t @ k_u.mT)
        if q_u is not None and k_t is not None:
            W = total(W, s * q_u @ k_t.mT)
        dP, uP, E = change(P, T), change(P, U), change(P, W)
        if T is not None and uP is not None:
            E = total(E, uP * (T - (P * T).sum(-1, keepdim=True)) - P * (uP * T).sum(-1, keepdim=True))
        terms = total(product(E, v), product(dP, v_u), product(uP, v_t), product(P, v_tu))
        found.append(torch.zeros_like(q) if terms is None else terms)
    return torch.cat(found, -2).to(query.dtype)
