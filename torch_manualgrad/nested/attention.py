"""Attention over sequences of unequal lengths, right in all six modes.

For one sequence, let $S = scale q k^T$ with masked entries $-inf$, $P = softmax(S)$ along the keys, and $y = P v$. For
changes of $S$ and $v$, and for a cotangent $g$ of $y$,

    dP = P (dS - sum P dS),   dy = dP v + P dv;        gP = g v^T,   gS = P (gP - sum P gP),   gv = P^T g,

and $q$ and $k$ enter through $S$ only. The fused kernels save the log-sum-exp of each row of $S$ instead of $P$. Higher
derivatives differentiate the formulas above, in terms of $q$, $k$ and $v$.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import described
from ..core.internals import breaks_graphs
from ..core.rule import formula
from .conversion import on_nested, require_same_structure
from .maps import dense_softmax
from .padded_groups import Group, Groups
from .ragged import Ragged
from .segments import wide

__all__ = ["scaled_dot_product_attention", "weighted_values"]

_READS_LENGTHS = "{}: attention of a Ragged reads the lengths then, which ends a graph"


def _scores(group: Group, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """$S$, and the mask of the keys that a query does not attend to."""
    S = (wide(q) * scale) @ wide(k).mT
    masked = group.masked
    if group.causal:
        positions = [torch.arange(n, device=q.device) for n in S.shape[-2:]]
        masked = positions[0][:, None] < positions[1]
    if masked is None:
        return S, None
    return S.masked_fill(
        masked & ~masked.all(-1, keepdim=True) if group.may_be_fully_masked else masked, -torch.inf
    ), masked


def _weights(group: Group, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """$P$, 0 for a query that attends to no key."""
    return _shares(group, *_scores(group, q, k, scale))


def _shares(group: Group, S: Tensor, masked: Tensor | None) -> Tensor:
    P = S.softmax(-1)
    return P.masked_fill(masked, 0) if group.may_be_fully_masked and masked is not None else P


def _by_groups(
    f: Callable[..., tuple[Tensor, ...]],
    queries: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    structure: tuple[Tensor, Tensor, bool],
    sides: tuple[int, ...],
) -> tuple[Tensor, ...]:
    """Apply ``f(group, *queries, *keys)`` to the padded tensors (n, P, L, d) of each group, and pack the results.

    Args:
        f: computes one group.
        queries: packed tensors.
        keys: packed tensors.
        structure: both offsets, and whether attention is causal.
        sides: for each result of ``f``, 0 if it has the positions of the queries, 1 if those of the keys.

    Returns:
        One packed tensor for each result of ``f``, (*b, T, d).
    """
    q_offsets, k_offsets, causal = structure
    lead, counts = queries[0].shape[:-2], (queries[0].shape[-2], keys[0].shape[-2])
    queries, keys = (tuple(x.reshape(lead.numel(), *x.shape[-2:]) for x in some) for some in (queries, keys))
    groups = Groups(q_offsets, k_offsets, *counts, causal)
    found = [
        f(group, *[group.queries.cut(x) for x in queries], *[group.keys.cut(x) for x in keys])
        for group in groups.groups
    ]
    joined = [groups.joined([parts[i] for parts in found], side) for i, side in enumerate(sides)]
    return tuple(x.reshape(*lead, *x.shape[-2:]) for x in joined)


# -- the fast path: PyTorch's fused kernels, on the CPU ---------------------------------------------------------------


def _fused(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and 0 not in q.shape


def _rows(*tensors: Tensor) -> list[Tensor]:
    """The tensors with contiguous rows that do not overlap: the fused kernels ignore the stride of the last dim."""
    return [x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in tensors]


def _bias(group: Group, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in the form that the fused kernels take: a tensor to add."""
    if group.masked is None:
        return None
    bias = q.new_zeros(group.masked.shape).masked_fill_(group.masked, -torch.inf)
    return bias.expand(q.shape[0], 1, q.shape[2], k.shape[2])


def _fused_forward(group: Group, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if not q.shape[2]:
        return torch.empty_like(q), wide(q.sum(-1, keepdim=True))
    y, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_rows(q, k, v), 0.0, group.causal, attn_mask=_bias(group, q, k), scale=scale
    )
    return y, sums.unsqueeze(-1)


def _fused_backward(
    group: Group, grad: Tensor, q: Tensor, y: Tensor, sums: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.shape[2]:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_rows(grad, q, k, v, y), sums.squeeze(-1), 0.0, group.causal, attn_mask=_bias(group, q, k), scale=scale
    )


# -- formulas ---------------------------------------------------------------------------------------------------------


@formula(kernel=("default",))
def nested_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $q$, $k$ and $v$, given that of attention: the module's $scale gS k$, $scale gS^T q$ and $P^T g$.

    Args:
        grad: $g$, (*b, Tq, m).
        q: (*b, Tq, d).
        k: (*b, Tk, d).
        v: (*b, Tk, m).
        y: the first result of `nested_attention`, (*b, Tq, m); only a kernel reads it.
        sums: the second result of `nested_attention`, (*b, Tq); only a kernel reads it.
        q_offsets: (B + 1,), int32 or int64.
        k_offsets: (B + 1,), int32 or int64.
        is_causal: as in `nested_attention`.
        scale: as in `nested_attention`.

    Returns:
        The shapes of $q$, $k$ and $v$.

    Note:
        Where not differentiable: nowhere; differentiable in every mode.

    References:
        Dao et al., FlashAttention (2022), appendix B; ATen _scaled_dot_product_flash_attention_backward.
    """

    def backward(group: Group, g: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        P, g = _weights(group, q, k, scale), wide(g)
        gP = g @ wide(v).mT
        gS = P * (gP - (P * gP).sum(-1, keepdim=True)) * scale
        return gS @ wide(k), gS.mT @ wide(q), P.mT @ g

    found = _by_groups(backward, (grad, q), (k, v), (q_offsets, k_offsets, is_causal), (0, 1, 1))
    return tuple(g.to(q.dtype).contiguous() for g in found)  # type: ignore[return-value]


@nested_attention_backward.impl("default")
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    sums: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    if not _fused(q, v):
        reference = nested_attention_backward.reference
        return reference(grad, q, k, v, y, sums, q_offsets, k_offsets, is_causal, scale)
    backward = partial(_fused_backward, scale=scale)
    sides = (grad, q, y, sums.unsqueeze(-1)), (k, v)
    found = _by_groups(backward, *sides, (q_offsets, k_offsets, is_causal), (0, 1, 1))
    return tuple(g.contiguous() for g in found)


@formula(kernel=("default",))
def nested_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over packed sequences, $softmax(scale q k^T) v$ for each, and the log-sum-exp of each row of $scale q k^T$.

    Args:
        q: (*b, Tq, d), real.
        k: (*b, Tk, d), the dtype of $q$.
        v: (*b, Tk, m), the dtype of $q$.
        q_offsets: (B + 1,), int32 or int64: where the sequences of queries begin.
        k_offsets: (B + 1,), int32 or int64: where the sequences of keys begin.
        is_causal: whether query $i$ of a sequence attends to the keys 0 to $i$ only.
        scale: the factor of the products.

    Returns:
        (*b, Tq, m), 0 where a sequence has no keys; and (*b, Tq), which every derivative treats as constant.

    Note:
        Where not differentiable: nowhere.

    References:
        ATen scaled_dot_product_attention; Vaswani et al., Attention is all you need (2017).
    """

    def forward(group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        S, masked = _scores(group, q, k, scale)
        return _shares(group, S, masked) @ wide(v), S.detach().logsumexp(-1, keepdim=True)

    y, sums = _by_groups(forward, (q,), (k, v), (q_offsets, k_offsets, is_causal), (0, 0))
    return y.to(q.dtype).contiguous(), sums.squeeze(-1).contiguous()


@nested_attention.impl("default")
def _(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if not _fused(q, v):
        return nested_attention.reference(q, k, v, q_offsets, k_offsets, is_causal, scale)
    forward = partial(_fused_forward, scale=scale)
    y, sums = _by_groups(forward, (q,), (k, v), (q_offsets, k_offsets, is_causal), (0, 0))
    return y.contiguous(), sums.squeeze(-1).contiguous()


@nested_attention.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return tuple(inputs), tuple(output)


def _backward(ctx: Any, saved: Any, grad: Tensor, _: Any) -> Any:
    (q, k, v, *structure), (y, sums) = saved
    found = nested_attention_backward(grad, q, k, v, y, sums, *structure)
    wanted = [g if ctx.needs_input_grad[n] else None for n, g in zip("qkv", found)]
    return {**dict(zip("qkv", wanted)), "q_offsets": None, "k_offsets": None}


nested_attention.impl_backward(_backward, output_differentiability=[True, False])


@nested_attention.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    q, k, v, q_offsets, k_offsets, causal, scale = inputs
    q_t, k_t, v_t = (torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tangents))

    def forward(group: Group, q: Tensor, q_t: Tensor, k: Tensor, v: Tensor, k_t: Tensor, v_t: Tensor) -> Any:
        P = _weights(group, q, k, scale)
        S_t = (wide(q_t) @ wide(k).mT + wide(q) @ wide(k_t).mT) * scale
        P_t = P * (S_t - (P * S_t).sum(-1, keepdim=True))
        return (P_t @ wide(v) + P @ wide(v_t),)

    (y_t,) = _by_groups(forward, (q, q_t), (k, v, k_t, v_t), (q_offsets, k_offsets, causal), (0,))
    return y_t.to(q.dtype), None


@nested_attention.impl_vmap
def _(info: Any, in_dims: Any, *args: Any) -> Any:
    if in_dims[3] is not None or in_dims[4] is not None:
        raise ValueError("offsets: vmap goes over a dim of the values, with the same offsets for all")
    front = [
        x.expand(info.batch_size, *x.shape) if d is None else x.movedim(d, 0) for x, d in zip(args[:3], in_dims[:3])
    ]
    return nested_attention.op(*front, *args[3:]), (0, 0)


# -- public functions -------------------------------------------------------------------------------------------------


@on_nested
def scaled_dot_product_attention(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Ragged:
    """$softmax(scale q k^T) v$ for each sequence of a batch, without padding, right in all six modes.

    Reads the lengths, which synchronizes with a GPU once per call.

    Args:
        query: (B, ..., *, d), ragged in the second to last dim: usually (B, heads, *, d). Floating point.
        key: (B, ..., *, d), with its own sequence lengths; the dtype of ``query``.
        value: (B, ..., *, m), with the lengths of ``key``; the dtype of ``query``.
        attn_mask: one mask for all sequences, (L, S), where $L$ is the largest number of queries and $S$ that of keys.
            Booleans, True where a query attends to a key, or numbers that are added to the products. A shorter sequence
            uses the first rows and columns. None for no mask.
        dropout_p: the probability of dropping a weight. A mask or dropout ends a graph.
        is_causal: whether query $i$ of a sequence attends to the keys 0 to $i$ only.
        scale: the factor of the products; None for $d^(-1/2)$.
        enable_gqa: whether key and value may have fewer heads (the third dim from the end), each of which serves the
            same number of heads of query.

    Returns:
        The components of ``query`` with $m$ instead of $d$; 0 for a sequence without keys.

    Raises:
        ValueError: shapes that do not fit, a mask of the wrong shape, both a mask and ``is_causal``, or a probability
            out of range.
        TypeError: a dtype that is not floating point, or different dtypes.

    Note:
        Where not differentiable: nowhere.

    References:
        `nested_attention`.
    """
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: expected 0 to 1, got {dropout_p}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: expected None with is_causal=True, as in torch")
    query, key, value = (_sequences(x, n) for x, n in ((query, "query"), (key, "key"), (value, "value")))
    for name, x in (("key", key), ("value", value)):
        if x.dim() != query.dim():
            raise ValueError(f"{name}: expected as many dims as query, {query.dim()}, got shape {x.shape}")
        if x.values.dtype != query.values.dtype:
            raise TypeError(f"{name}: expected the dtype of query, {query.values.dtype}, got {x.values.dtype}")
    require_same_structure(key, value, name="value")
    q, k, v = query.values, key.values, value.values
    if enable_gqa and query.dim() > 3:
        heads = q.shape[-3]
        if not k.shape[-3] or heads % k.shape[-3] or not v.shape[-3] or heads % v.shape[-3]:
            raise ValueError(
                f"key and value: {heads} heads of query are not a multiple of {k.shape[-3]} and {v.shape[-3]}"
            )
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
    if query.batch != key.batch or q.shape[:-2] != k.shape[:-2] or k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"key and value: shapes {key.shape} and {value.shape} do not fit a query {query.shape}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"key: expected a last dim of {q.shape[-1]}, as query, got {k.shape[-1]}")
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5
    if attn_mask is None and dropout_p == 0:
        y, _ = nested_attention.op(q, k, v, query.offsets, key.offsets, is_causal, scale)
    else:
        y = _general(query, key, q, k, v, attn_mask, dropout_p, is_causal, scale)
    return query.like(y, (*query.shape[:-1], value.shape[-1]))


def _longest(x: Ragged) -> int:
    at = x.read_offsets()
    return max((b - a for a, b in itertools.pairwise(at)), default=0)


def _added(mask: Tensor | None, query: Ragged, key: Ragged) -> Tensor | None:
    """The mask, checked, as numbers to add."""
    if mask is None:
        return None
    sizes = [_longest(query), _longest(key)]
    if list(mask.shape) != sizes:
        raise ValueError(
            f"attn_mask: expected {sizes}, the largest numbers of queries and of keys, got {described(mask)}"
        )
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(sizes, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _dropped_shares(S: Tensor, masked: Tensor | None, dropout_p: float) -> Tensor:
    """$P$ with dropout, for any mask; 0 for a query that attends to no key."""
    if masked is not None:
        S = S.masked_fill(masked, -torch.inf)
    none = (S == -torch.inf).all(-1, keepdim=True)
    P = dense_softmax(S.masked_fill(none, 0), -1).masked_fill(none, 0)
    return F.dropout(P, dropout_p) if dropout_p else P


@breaks_graphs(_READS_LENGTHS.format("attn_mask, dropout_p"))
def _general(
    query: Ragged,
    key: Ragged,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    causal: bool,
    scale: float,
) -> Tensor:
    """Attention with a mask or dropout, in torch's differentiable operators."""
    mask = _added(attn_mask, query, key)

    def forward(group: Group, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        S, masked = _scores(group, q, k, scale)
        if mask is not None:
            S = S + mask[: S.shape[-2], : S.shape[-1]]
        return (_dropped_shares(S, masked, dropout_p) @ wide(v),)

    (y,) = _by_groups(forward, (q,), (k, v), (query.offsets, key.offsets, causal), (0,))
    return y.to(q.dtype)


@breaks_graphs(_READS_LENGTHS.format("need_weights"))
def weighted_values(
    query: Ragged,
    key: Ragged,
    value: Ragged,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    average: bool,
) -> tuple[Ragged, Ragged]:
    """Attention within each sequence, and its weights.

    Args:
        query: (B, heads, *, d).
        key: (B, heads, *, d).
        value: (B, heads, *, m).
        attn_mask: as in `scaled_dot_product_attention`.
        dropout_p: as in `scaled_dot_product_attention`.
        is_causal: as in `scaled_dot_product_attention`.
        average: whether to average the weights over the heads.

    Returns:
        (B, heads, *, m), and (B, *, *) or (B, heads, *, *).
    """
    require_same_structure(key, value, name="value")
    mask, rows, shares = None if is_causal else _added(attn_mask, query, key), [], []
    for q, k, v in zip(query.components(), key.components(), value.components()):
        S, masked = (wide(q) * q.shape[-1] ** -0.5) @ wide(k).mT, None
        if mask is not None:
            S = S + mask[: S.shape[-2], : S.shape[-1]]
        if is_causal:
            masked = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
        P = _dropped_shares(S, masked, dropout_p)
        rows.append((P @ wide(v)).to(q.dtype))
        shares.append((P.mean(0) if average else P).to(q.dtype))
    heads = query.like(torch.cat(rows, -2) if rows else value.values, (*query.shape[:-1], value.shape[-1]))
    shape = (query.batch, *query.shape[1 : 1 if average else 2], None, None)
    if not shares:
        return heads, Ragged(query.values.new_zeros(0), query.offsets, shape, query.offsets.new_zeros(0, 2))
    return heads, Ragged.from_components(shares, ragged_dims=[d for d, n in enumerate(shape) if n is None])


def _sequences(x: Ragged, name: str) -> Ragged:
    """``x`` with the second to last dim as its only ragged dim, even if all components have the same size."""
    if x.dim() < 3 or not x.values.is_floating_point():
        what = f"shape {x.shape}" if x.dim() < 3 else f"{x.values.dtype}"
        raise (ValueError if x.dim() < 3 else TypeError)(
            f"{name}: expected shape (B, ..., *, d) and a floating point dtype, got {what}"
        )
    if x.ragged_dims == (x.dim() - 2,):
        return x
    try:
        return Ragged.from_components(x.components(), ragged_dims=[x.dim() - 2])
    except ValueError as error:
        raise ValueError(f"{name}: expected shape (B, ..., *, d), ragged in the last dim but one: {error}") from None
