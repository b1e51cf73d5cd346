"""Scaled dot-product attention and its derivatives, for a block of queries at a time; the rules are in `attention_rules`.

With S = s q k^T + M, P = softmax(S) along the keys, <.> the sum along them, and o = P v: for tangents of q, k, v and M,

    T = s (dq k^T + q dk^T) + dM,        dP = P (T - <P T>),        do = dP v + P dv;

and for a cotangent g of o,

    G = g v^T,    D = P (G - <P G>):     gq = s D k,    gk = s D^T q,    gv = P^T g,    gM = D.

This is a gradient, that of <g, o>, and so its derivative in q, k, v and M is symmetric: tangents of the four are cotangents of
them too. With dG = dg v^T + g dv^T,

    dD = dP (G - <P G>) + P (dG - <dP G> - <P dG>):
    dgq = s (dD k + D dk),    dgk = s (dD^T q + D^T dq),    dgv = dP^T g + P^T dg,    dgM = dD.

As function of g, the gradient is the transpose of do. None of this reads a saved output or log sum exp, which would be constants to
the next derivative. What is held beside the results is a few blocks of `ROWS` queries by all keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.formula import formula

from .normalization import wide

__all__ = ["ROWS", "attention_backward", "attention_backward_jvp", "attention_jvp", "attention_mask_backward"]

ROWS = 64


def _scale(scale: float | None, query: Tensor) -> Any:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _heads(x: Tensor | None, query: Tensor) -> Any:
    """Keys or values for each head of the queries, wide: several of these may share one of those."""
    if x is None:
        return None
    shared = query.shape[1] // x.shape[1]
    return wide(x) if shared == 1 else wide(x).repeat_interleave(shared, 1)


def _shared(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_heads`."""
    if x.shape[1] != like.shape[1]:
        x = x.unflatten(1, (like.shape[1], x.shape[1] // like.shape[1])).sum(2)
    return x.to(like.dtype)


def _blocks(x: Tensor | None, rows: Any = None) -> Iterable[Any]:
    """Blocks of queries, wide, of what has a row for each; with a number of rows, of what may have one row for all."""
    if x is None:
        return repeat(None)
    if rows is not None:
        x = x.expand(*x.shape[:-2], rows, x.shape[-1])
    return map(wide, x.split(ROWS, -2))


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: Any) -> Iterator[Tensor]:
    """P for each block of queries; 0 for a query that attends to no key."""
    positions = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
    for rows, q_rows, mask_rows in zip(positions.split(ROWS), _blocks(q), _blocks(mask, q.shape[-2])):
        S = scale * q_rows @ k.mT
        if mask_rows is not None:
            S = S + mask_rows
        if is_causal:
            S = S.masked_fill(rows < torch.arange(k.shape[-2], device=q.device), -torch.inf)
        if mask_rows is None:
            yield S.softmax(-1)
        else:
            nothing = (S == -torch.inf).all(-1, keepdim=True)
            yield S.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _sum(*terms: Tensor | None) -> Any:
    given = [t for t in terms if t is not None]
    return sum(given[1:], given[0]) if given else None


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def _change(P: Tensor, T: Tensor | None) -> Tensor | None:
    """P (T - <P T>)."""
    return None if T is None else P * (T - (P * T).sum(-1, keepdim=True))


def _scores_t(
    q: Tensor, q_t: Tensor | None, k: Tensor, k_t: Tensor | None, mask_t: Tensor | None, scale: Any
) -> Tensor | None:
    """T."""
    of_both = _sum(_product(q_t, k.mT), _product(q, None if k_t is None else k_t.mT))
    return _sum(None if of_both is None else scale * of_both, mask_t)


def _like_mask(D: Any, mask: Tensor) -> Tensor:
    """A block of the mask's cotangent, of all rows, summed over what the mask has but one of."""
    return D.sum_to_size(*mask.shape[:-2], D.shape[-2], mask.shape[-1])


def _of_mask(blocks: list[Tensor], mask: Any) -> Tensor:
    return torch.cat(blocks, -2).sum_to_size(mask.shape).to(mask.dtype)


@formula
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

    Note:
        Where not differentiable: nowhere.

    References:
        Vaswani et al., Attention is all you need (2017), eq. 1; in blocks as Dao et al., FlashAttention (2022).
    """
    s, rows = _scale(scale, query), query.shape[-2]
    k, k_t, v, v_t = (_heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        _weights(query, k, attn_mask, is_causal, s), _blocks(query), _blocks(query_t), _blocks(attn_mask_t, rows)
    )
    found = []
    for P, q, q_t, mask_t in blocks:
        dP = _change(P, _scores_t(q, q_t, k, k_t, mask_t, s))
        tangent = _sum(_product(dP, v), _product(P, v_t))
        found.append(torch.zeros_like(q) if tangent is None else tangent)
    return torch.cat(found, -2).to(query.dtype)


@formula(kernel=("default",))
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
        out, logsumexp: the results of attention; only the kernel reads them.

    Returns:
        The shapes of ``query``, ``key`` and ``value``.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen _scaled_dot_product_flash_attention_for_cpu_backward; Dao et al., FlashAttention (2022), appendix B.
    """
    s = _scale(scale, query)
    k, v = _heads(key, query), _heads(value, query)
    found, of_k, of_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for P, q, g in zip(_weights(query, k, attn_mask, is_causal, s), _blocks(query), _blocks(grad_out)):
        D: Any = _change(P, g @ v.mT)
        found.append(s * (D @ k))
        of_k = of_k + s * (D.mT @ q)
        of_v = of_v + P.mT @ g
    return torch.cat(found, -2).to(query.dtype), _shared(of_k, key), _shared(of_v, value)


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
    k, v = _heads(key, query), _heads(value, query)
    weights = _weights(query, k, attn_mask, is_causal, _scale(scale, query))
    return _of_mask(
        [_like_mask(_change(P, g @ v.mT), attn_mask) for P, g in zip(weights, _blocks(grad_out))], attn_mask
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
    s, rows = _scale(scale, query), query.shape[-2]
    k, k_t, v, v_t = (_heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        _weights(query, k, attn_mask, is_causal, s),
        *[_blocks(x) for x in (query, query_t, grad_out, grad_out_t)],
        _blocks(attn_mask_t, rows),
    )
    found, of_k, of_v, masks = [], torch.zeros_like(k), torch.zeros_like(v), []
    for P, q, q_t, g, g_t, mask_t in blocks:
        G = g @ v.mT
        rest = G - (P * G).sum(-1, keepdim=True)
        D, dP = P * rest, _change(P, _scores_t(q, q_t, k, k_t, mask_t, s))
        dG = _sum(_product(g_t, v.mT), _product(g, None if v_t is None else v_t.mT))
        dD = _change(P, dG)
        if dP is not None:
            dD = _sum(dD, dP * rest - P * (dP * G).sum(-1, keepdim=True))
            of_v = of_v + dP.mT @ g
        of_v = of_v if g_t is None else of_v + P.mT @ g_t
        of_q = _sum(_product(dD, k), _product(D, k_t))
        found.append(torch.zeros_like(q) if of_q is None else s * of_q)
        if dD is not None:
            of_k = of_k + s * (dD.mT @ q)
        if q_t is not None:
            of_k = of_k + s * (D.mT @ q_t)
        if of_mask:
            assert attn_mask is not None
            masks.append(_like_mask(torch.zeros_like(P) if dD is None else dD, attn_mask))
    last = _of_mask(masks, attn_mask) if of_mask else query.new_zeros(0)
    return torch.cat(found, -2).to(query.dtype), _shared(of_k, key), _shared(of_v, value), last
