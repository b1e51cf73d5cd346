"""Scaled dot-product attention on the CPU, the fused operator and its backward.

With $S = s q k^T + M$, $P = softmax(S)$ along the keys, $<.>$ the sum along them, and $o = P v$: for tangents of $q$,
$k$, $v$ and $M$,

    T = s (dq k^T + q dk^T) + dM,        dP = P (T - <P T>),        do = dP v + P dv;

and for a cotangent $g$ of $o$,

    G = g v^T,    D = P (G - <P G>):     gq = s D k,    gk = s D^T q,    gv = P^T g,    gM = D.

These are the gradients of $<g, o>$, so their derivative in $q$, $k$, $v$ and $M$ is symmetric: tangents of the four are
also their cotangents. With $dG = dg v^T + g dv^T$,

    dD = dP (G - <P G>) + P (dG - <dP G> - <P dG>):
    dgq = s (dD k + D dk),    dgk = s (dD^T q + D^T dq),    dgv = dP^T g + P^T dg,    dgM = dD.

As a function of $g$, the gradient is the transpose of $do$. With $U$ the same as $T$ for other tangents $u$, $W$ the
tangent of $T$ along $u$, and $uP = P (U - <P U>)$, the tangent of $do$ is

    E v + dP uv + uP dv + P duv,        E = uP (T - <P T>) + P (W - <uP T> - <P W>).

None of this reads a saved output or log-sum-exp, which would be constants to the next derivative. Everything is computed for
one block of `ROWS` queries at a time, so that only a few blocks of scores are in memory. In the second derivatives, each block
is an opaque formula: autograd saves its inputs and recomputes it.

PyTorch has only the first order in reverse mode, and plain calls are left to it; the rule of the backward has the
higher orders. The log-sum-exp that attention returns is a constant to every derivative, as in PyTorch. The mask that is
added to the scores has derivatives too, which PyTorch has only for unfused attention. The operator has no dropout:
attention with dropout is composed of other operators.

Args:
    query: $q$, (N, H, L, d), real.
    key, value: $k$ and $v$, (N, h, S, d), where $h$ divides $H$: each of their heads serves $H / h$ adjacent heads of
        the queries.
    attn_mask: $M$, which is added to the scores, (L, S) or (N, H, L, S), or broadcast to it; None for 0.
    is_causal: whether query $i$ attends to the keys 0 to $i$ only.
    scale: $s$; None for $d^(-1/2)$.
    grad_out: $g$, the shape of ``query``.
    grad_out_t, query_t, key_t, value_t, attn_mask_t: tangents; None for zero.
    query_u, key_u, value_u, attn_mask_u: tangents $u$ of $q$, $k$, $v$ and $M$; None for zero.
    query_tu, key_tu, value_tu, attn_mask_tu: tangents of the tangents; None for zero.
    first: the number of the block's first query.
    of_mask: whether the last result is wanted; otherwise it is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, bound_to, formula, parameters, rule

from ..terms import total
from .normalization import wide

ROWS = 64


def _scale_of(scale: float | None, query: Tensor) -> Any:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _heads(x: Tensor | None, query: Tensor) -> Any:
    """Keys or values for each head of the queries, in at least float32. Several heads of the queries may share one."""
    if x is None:
        return None
    each = query.shape[1] // x.shape[1]
    return wide(x) if each == 1 else wide(x).repeat_interleave(each, 1)


def _shared(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_heads`."""
    if x.shape[1] != like.shape[1]:
        x = x.unflatten(1, (like.shape[1], x.shape[1] // like.shape[1])).sum(2)
    return x.to(like.dtype)


def _blocks_of(x: Tensor | None, rows: Any = None) -> Iterable[Any]:
    """Blocks of the rows of $x$, in at least float32. If ``rows`` is given, $x$ may have a single row for all of them."""
    if x is None:
        return repeat(None)
    if rows is not None:
        x = x.expand(*x.shape[:-2], rows, x.shape[-1])
    return map(wide, x.split(ROWS, -2))


def _weights_of_block(q: Tensor, k: Tensor, mask: Tensor | None, first: int, is_causal: bool, scale: Any) -> Tensor:
    """$P$ for the block of queries that starts at number ``first``; 0 for a query that attends to no key."""
    S = scale * q @ k.mT
    if mask is not None:
        S = S + mask
    if is_causal:
        rows, keys = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
        S = S.masked_fill((rows + first).unsqueeze(-1) < keys, -torch.inf)
    if mask is None:
        return S.softmax(-1)
    nothing = (S == -torch.inf).all(-1, keepdim=True)
    return S.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: Any) -> Iterator[Tensor]:
    """$P$ for each block of queries."""
    for i, (q_rows, mask_rows) in enumerate(zip(_blocks_of(q), _blocks_of(mask, q.shape[-2]))):
        yield _weights_of_block(q_rows, k, mask_rows, i * ROWS, is_causal, scale)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def _change(P: Tensor, T: Tensor | None) -> Tensor | None:
    """$P (T - <P T>)$."""
    return None if T is None else P * (T - (P * T).sum(-1, keepdim=True))


def _scores_jvp(
    q: Tensor, q_t: Tensor | None, k: Tensor, k_t: Tensor | None, mask_t: Tensor | None, scale: Any
) -> Tensor | None:
    """$T$."""
    of_both = total(_product(q_t, k.mT), _product(q, None if k_t is None else k_t.mT))
    return total(None if of_both is None else scale * of_both, mask_t)


def _like_mask(D: Any, mask: Tensor) -> Tensor:
    """A block of the mask's cotangent, summed over the dims, other than rows, that have size 1 in the mask."""
    return D.sum_to_size(*mask.shape[:-2], D.shape[-2], mask.shape[-1])


def _joined_mask(blocks: list[Tensor], mask: Any) -> Tensor:
    return torch.cat(blocks, -2).sum_to_size(mask.shape).to(mask.dtype)


# -- the first derivatives --------------------------------------------------------------------------------------------


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
    """Tangent of attention: $dP v + P dv$, with $dP = P (T - <P T>)$.

    Returns:
        The shape of ``query``; 0 for a query that attends to no key.

    Raises:
        RuntimeError: shapes or dtypes that do not fit each other, on the CPU.

    References:
        Vaswani et al., Attention is all you need (2017), eq. 1; in blocks as Dao et al., FlashAttention (2022).
    """
    s, rows = _scale_of(scale, query), query.shape[-2]
    k, k_t, v, v_t = (_heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        _weights(query, k, attn_mask, is_causal, s),
        _blocks_of(query),
        _blocks_of(query_t),
        _blocks_of(attn_mask_t, rows),
    )
    found = []
    for P, q, q_t, mask_t in blocks:
        dP = _change(P, _scores_jvp(q, q_t, k, k_t, mask_t, s))
        tangent = total(_product(dP, v), _product(P, v_t))
        found.append(torch.zeros_like(q) if tangent is None else tangent)
    return torch.cat(found, -2).to(query.dtype)


@attention_jvp.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return tuple(inputs)


@attention_jvp.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    """The formula is linear in the tangents; in the primals it is the derivative of a gradient along the tangents."""
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
    """An error message if the heads or the mask do not fit, else "". The kernel does not check them."""
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        return f"key: expected a number of heads that divides the {query.shape[1]} of query, got {key.shape[1]}"
    scores = [*query.shape[:3], key.shape[2]]
    if attn_mask is not None and (
        attn_mask.dim() not in (2, 4)
        or any(n not in (1, m) for n, m in zip(reversed(attn_mask.shape), reversed(scores)))
    ):
        return f"attn_mask: expected two or four dims that broadcast to {scores}, got {list(attn_mask.shape)}"
    return ""


def _heads_inside(x: Tensor) -> Tensor:
    """(N, H, L, d) with the memory layout of (N, L, H, d). Layers compute their heads as views of such tensors."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


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
    """Cotangents of query, key and value, given that of attention: $s D k$, $s D^T q$, $P^T g$; $D = P (G - <P G>)$.

    Args:
        out: the first result of attention, (N, H, L, d); only the kernel reads it.
        logsumexp: its second result, (N, H, L); only the kernel reads it.

    Returns:
        The shapes of ``query``, ``key`` and ``value``; heads vary faster in memory than positions, as in PyTorch's kernel.

    References:
        ATen _scaled_dot_product_flash_attention_for_cpu_backward; Dao et al., FlashAttention (2022), appendix B.
    """
    s = _scale_of(scale, query)
    k, v = _heads(key, query), _heads(value, query)
    found, of_k, of_v = [], torch.zeros_like(k), torch.zeros_like(v)
    for P, q, g in zip(_weights(query, k, attn_mask, is_causal, s), _blocks_of(query), _blocks_of(grad_out)):
        D: Any = _change(P, g @ v.mT)
        found.append(s * (D @ k))
        of_k = of_k + s * (D.mT @ q)
        of_v = of_v + P.mT @ g
    of_q = torch.cat(found, -2).to(query.dtype)
    return _heads_inside(of_q), _heads_inside(_shared(of_k, key)), _heads_inside(_shared(of_v, value))


@attention_backward.impl("default")
def _(grad_out: Tensor, *given: Any) -> tuple[Tensor, ...]:
    *tensors, logsumexp, attn_mask, is_causal, scale = given
    if not grad_out.is_cpu:
        return attention_backward.reference(grad_out, *given)
    # PyTorch's kernel assumes that rows are contiguous and do not overlap
    rows = [x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in tensors]
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, *rows, logsumexp, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return tuple(map(_heads_inside, found))


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
    """Cotangent of the mask that is added to the scores, given that of attention: $D = P (G - <P G>)$.

    Returns:
        The shape of ``attn_mask``.

    References:
        Dao et al., FlashAttention (2022), appendix B.
    """
    k, v = _heads(key, query), _heads(value, query)
    found = _weights(query, k, attn_mask, is_causal, _scale_of(scale, query))
    return _joined_mask(
        [_like_mask(_change(P, g @ v.mT), attn_mask) for P, g in zip(found, _blocks_of(grad_out))], attn_mask
    )


# -- the second derivatives -------------------------------------------------------------------------------------------


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
        grad_out, query, attn_mask: the block's rows of these. Their tangents have the same rows.
        key, value: all rows, with as many heads as ``query``. So have their tangents.

    Returns:
        The shape of ``query``; the block's terms for ``key`` and ``value``; and the block's rows for the mask, for all
        heads, or an empty tensor.

    References:
        See `attention_backward_jvp`.
    """
    s = _scale_of(scale, query)
    P = _weights_of_block(query, key, attn_mask, first, is_causal, s)
    G = grad_out @ value.mT
    rest = G - (P * G).sum(-1, keepdim=True)
    D, dP = P * rest, _change(P, _scores_jvp(query, query_t, key, key_t, attn_mask_t, s))
    dG = total(_product(grad_out_t, value.mT), _product(grad_out, None if value_t is None else value_t.mT))
    dD = _change(P, dG)
    if dP is not None:
        dD = total(dD, dP * rest - P * (dP * G).sum(-1, keepdim=True))
    of_q = total(_product(dD, key), _product(D, key_t))
    of_k = total(_product(None if dD is None else dD.mT, query), _product(D.mT, query_t))
    of_v = total(_product(None if dP is None else dP.mT, grad_out), _product(P.mT, grad_out_t))
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
    """Tangents of the gradients of attention.

    Without ``grad_out_t`` they are also the cotangents of $q$, $k$, $v$ and $M$, given those of the gradients.

    Returns:
        The shapes of ``query``, ``key``, ``value`` and ``attn_mask``.

    References:
        The derivative of `attention_backward`. It is symmetric, because `attention_backward` is a gradient.
    """
    k, k_t, v, v_t = (_heads(x, query) for x in (key, key_t, value, value_t))
    blocks = zip(
        *[_blocks_of(x) for x in (grad_out, grad_out_t, query, query_t)],
        *[_blocks_of(x, query.shape[-2]) for x in (attn_mask, attn_mask_t)],
    )
    found, of_k, of_v, masks = [], torch.zeros_like(k), torch.zeros_like(v), []
    for i, (g, g_t, q, q_t, mask, mask_t) in enumerate(blocks):
        first = i * ROWS
        of_q, k_part, v_part, rows = attention_backward_jvp_of_block(
            g, g_t, q, q_t, k, k_t, v, v_t, mask, mask_t, first, is_causal, scale, of_mask
        )
        found.append(of_q)
        of_k, of_v = of_k + k_part, of_v + v_part
        if of_mask:
            assert attn_mask is not None
            masks.append(_like_mask(rows, attn_mask))
    last = _joined_mask(masks, attn_mask) if of_mask else query.new_zeros(0)
    return torch.cat(found, -2).to(query.dtype), _shared(of_k, key), _shared(of_v, value), last


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
        query, attn_mask: the block's rows of these. Their tangents have the same rows.
        key, value: all rows, with as many heads as ``query``. So have their tangents.

    Returns:
        The shape of ``query``.

    References:
        See `attention_jvp_jvp`.
    """
    s = _scale_of(scale, query)
    P = _weights_of_block(query, key, attn_mask, first, is_causal, s)
    T = _scores_jvp(query, query_t, key, key_t, attn_mask_t, s)
    U = _scores_jvp(query, query_u, key, key_u, attn_mask_u, s)
    W = _scores_jvp(query, query_tu, key, key_tu, attn_mask_tu, s)
    if query_t is not None and key_u is not None:
        W = total(W, s * query_t @ key_u.mT)
    if query_u is not None and key_t is not None:
        W = total(W, s * query_u @ key_t.mT)
    dP, uP, E = _change(P, T), _change(P, U), _change(P, W)
    if T is not None and uP is not None:
        E = total(E, uP * (T - (P * T).sum(-1, keepdim=True)) - P * (uP * T).sum(-1, keepdim=True))
    terms = total(_product(E, value), _product(dP, value_u), _product(uP, value_t), _product(P, value_tu))
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
    """Tangent of `attention_jvp`: $E v + dP uv + uP dv + P duv$.

    Returns:
        The shape of ``query``.

    References:
        The derivative of `attention_jvp`.
    """
    keys = [_heads(x, query) for x in (key, key_t, key_u, key_tu, value, value_t, value_u, value_tu)]
    blocks = zip(
        zip(*[_blocks_of(x) for x in (query, query_t, query_u, query_tu)]),
        zip(*[_blocks_of(x, query.shape[-2]) for x in (attn_mask, attn_mask_t, attn_mask_u, attn_mask_tu)]),
    )
    found = [
        attention_jvp_jvp_of_block(*queries, *keys, *masks, i * ROWS, is_causal, scale)
        for i, (queries, masks) in enumerate(blocks)
    ]
    return torch.cat(found, -2).to(query.dtype)


# -- the rules --------------------------------------------------------------------------------------------------------

_GRADIENTS = ("grad_query", "grad_key", "grad_value")
_TANGENTS = parameters(attention_backward_jvp)[:-1]  # all but of_mask


def double_vjp(
    of_q: Tensor | None,
    of_k: Tensor | None,
    of_v: Tensor | None,
    of_mask: Tensor | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Cotangents of $g$, $q$, $k$, $v$ and $M$, given those of the four gradients; ``wanted`` selects among the five."""
    pairs = (query, of_q, key, of_k, value, of_v, attn_mask, of_mask, is_causal, scale)
    of_g = attention_jvp(*pairs) if wanted[0] else None
    if not any(wanted[1:]):
        return of_g, None, None, None, None
    *others, last = attention_backward_jvp(grad_out, None, *pairs, wanted[4])
    return of_g, *others, last if wanted[4] else None


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
    cotangents = (grad_grad_query, grad_grad_key, grad_grad_value, None)
    return double_vjp(*cotangents, grad_out, query, key, value, attn_mask, is_causal, scale, output_mask)


def _defer_to_stock(*values: Any) -> bool:
    """PyTorch has no derivative with respect to the mask."""
    mask = values[5]
    return mask is None or not mask.requires_grad


# gaps of the samples' probe, which views tensors as integers; a vmap over the cotangent alone does not reach it
_NO_BATCHES = dict.fromkeys(
    (*(f"vmap/over args[{i}]" for i in (1, 2, 3)), "vmap/over all", "vmap-grad"),
    ("PyTorch has no batching rule of a view of another dtype", "2.13"),
)
SOURCE = "Vaswani et al., Attention is all you need (2017); Dao et al., FlashAttention (2022), appendix B"

rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    vjp={
        ("query", "key", "value"): attention_backward.bind(grad_out="grad_output", out="output"),
        "attn_mask": attention_mask_backward.bind(grad_out="grad_output"),
    },
    jvp={"output": attention_jvp},
    not_differentiable="logsumexp",
    defer_to_stock=ByMetadata(_defer_to_stock),
    improves="missing",
    source=f"ATen _scaled_dot_product_flash_attention_for_cpu_backward; {SOURCE}",
)
rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    vjp={
        ("grad_out", "query", "key", "value", "attn_mask"): _double_vjp,
        ("out", "logsumexp"): lambda grad_grad_query: (None, None),
    },
    jvp={_GRADIENTS: bound_to(lambda *given: attention_backward_jvp(*given, False)[:3], _TANGENTS)},
    improves="missing",
    source=f"ATen has none; {SOURCE}",
    gaps=_NO_BATCHES,
)
