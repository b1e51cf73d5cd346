"""Tangents of the tangent and of the gradients of attention; the mathematics is in `attention_blocks`.

With T as there, U the same for other tangents u, W the tangent of T along u, and uP = P (U - <P U>), the tangent of do is

    E v + dP uv + uP dv + P duv,        E = uP (T - <P T>) + P (W - <uP T> - <P W>).

A block of queries is a formula of its own, and opaque: autograd keeps its inputs and computes it again, so that the
gradients of these tangents hold no more than one block of scores, either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

from . import attention_blocks
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
    weights_of_block,
)


@formula(kernel=("default",))
def attention_backward_jvp_of_block(
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
    first: int,
    is_causal: bool,
    scale: float | None,
    of_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attention_backward_jvp` for a block of queries.

    Args:
        grad_out, query: their rows for the block, as are those of the tangents and of the mask.
        key, value: all rows, and as many heads as ``query`` has, as have the tangents.
        first: the number of the block's first query.
        grad_out_t, query_t, key_t, value_t, attn_mask, attn_mask_t, is_causal, scale, of_mask: see there.

    Returns:
        The shape of ``query``; what the block adds to those of ``key`` and ``value``; and the block's rows of the mask's, for all
        heads, or an empty tensor.

    Note:
        Where not differentiable: nowhere.

    References:
        See `attention_backward_jvp`.
    """
    s = scale_of(scale, query)
    P = weights_of_block(query, key, attn_mask, first, is_causal, s)
    G = grad_out @ value.mT
    rest = G - (P * G).sum(-1, keepdim=True)
    D, dP = P * rest, change(P, scores_jvp(query, query_t, key, key_t, attn_mask_t, s))
    dG = total(product(grad_out_t, value.mT), product(grad_out, None if value_t is None else value_t.mT))
    dD = change(P, dG)
    if dP is not None:
        dD = total(dD, dP * rest - P * (dP * G).sum(-1, keepdim=True))
    of_q = total(product(dD, key), product(D, key_t))
    of_k = total(product(None if dD is None else dD.mT, query), product(D.mT, query_t))
    of_v = total(product(None if dP is None else dP.mT, grad_out), product(P.mT, grad_out_t))
    of_mask_rows = query.new_zeros(0) if not of_mask else torch.zeros_like(P) if dD is None else dD
    return (
        torch.zeros_like(query) if of_q is None else s * of_q,
        torch.zeros_like(key) if of_k is None else s * of_k,
        torch.zeros_like(value) if of_v is None else of_v,
        of_mask_rows,
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
    k, k_t, v, v_t = (heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        *[blocks_of(x) for x in (grad_out, grad_out_t, query, query_t)],
        *[blocks_of(x, query.shape[-2]) for x in (attn_mask, attn_mask_t)],
    )
    found, of_k, of_v, masks = [], torch.zeros_like(k), torch.zeros_like(v), []
    for i, (g, g_t, q, q_t, mask, mask_t) in enumerate(blocks):
        first = i * attention_blocks.ROWS
        of_q, k_part, v_part, rows = attention_backward_jvp_of_block(
            g, g_t, q, q_t, k, k_t, v, v_t, mask, mask_t, first, is_causal, scale, of_mask
        )
        found.append(of_q)
        of_k, of_v = of_k + k_part, of_v + v_part
        if of_mask:
            assert attn_mask is not None
            masks.append(like_mask(rows, attn_mask))
    last = joined_mask(masks, attn_mask) if of_mask else query.new_zeros(0)
    return torch.cat(found, -2).to(query.dtype), shared(of_k, key), shared(of_v, value), last


@formula(kernel=("default",))
def attention_jvp_jvp_of_block(
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
    first: int,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """`attention_jvp_jvp` for a block of queries.

    Args:
        query, attn_mask: their rows for the block, as are those of the tangents.
        key, value: all rows, and as many heads as ``query`` has, as have the tangents.
        first: the number of the block's first query.
        query_t, key_t, value_t, attn_mask_t, query_u, key_u, value_u, attn_mask_u: see there.
        query_tu, key_tu, value_tu, attn_mask_tu, is_causal, scale: see there.

    Returns:
        The shape of ``query``.

    Note:
        Where not differentiable: nowhere.

    References:
        See `attention_jvp_jvp`.
    """
    s = scale_of(scale, query)
    P = weights_of_block(query, key, attn_mask, first, is_causal, s)
    T = scores_jvp(query, query_t, key, key_t, attn_mask_t, s)
    U = scores_jvp(query, query_u, key, key_u, attn_mask_u, s)
    W = scores_jvp(query, query_tu, key, key_tu, attn_mask_tu, s)
    if query_t is not None and key_u is not None:
        W = total(W, s * query_t @ key_u.mT)
    if query_u is not None and key_t is not None:
        W = total(W, s * query_u @ key_t.mT)
    dP, uP, E = change(P, T), change(P, U), change(P, W)
    if T is not None and uP is not None:
        E = total(E, uP * (T - (P * T).sum(-1, keepdim=True)) - P * (uP * T).sum(-1, keepdim=True))
    terms = total(product(E, value), product(dP, value_u), product(uP, value_t), product(P, value_tu))
    return torch.zeros_like(query) if terms is None else terms


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
    keys = [heads(x, query) for x in (key, key_t, key_u, key_tu, value, value_t, value_u, value_tu)]
    blocks = zip(
        zip(*[blocks_of(x) for x in (query, query_t, query_u, query_tu)]),
        zip(*[blocks_of(x, query.shape[-2]) for x in (attn_mask, attn_mask_t, attn_mask_u, attn_mask_tu)]),
    )
    found = [
        attention_jvp_jvp_of_block(*queries, *keys, *masks, i * attention_blocks.ROWS, is_causal, scale)
        for i, (queries, masks) in enumerate(blocks)
    ]
    return torch.cat(found, -2).to(query.dtype)
