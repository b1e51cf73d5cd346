r"""Attention with any function of the scores, and a block mask.

For a query $i$ and a key $j$ of a head, with $f$ the modification of the scores,

    S_ij = f(s q_i . k_j, b, h, i, j) where the mask admits j, and -inf elsewhere;    o_i = sum_j softmax(S_i)_j v_j.

It is computed for about 128 queries at a time, with the blocks of keys that the mask lists for them, and the backward
computes each piece again (`torch_manualgrad.checkpoint`). So memory is linear in the length, in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask
from torch.overrides import TorchFunctionMode

from ..arguments import ArgumentError, checked, described
from ..checkpointing import checkpoint
from ..core.captures import HiddenTensorError
from .pieces import BlockTable, Piece

__all__ = ["flex_attention"]

_WHOLE = 1 << 30  # the size of PyTorch's blocks without a mask


class _IndexByTensor(TorchFunctionMode):
    """A context in which a vmapped integer can be an index, as in ``table[h]``.

    PyTorch converts it to a Python number, which raises under vmap.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            table, at = args
            at = at if isinstance(at, tuple) else (at,)
            numbers = [isinstance(x, Tensor) and x.dim() == 0 and x.dtype != torch.bool for x in at]
            if any(numbers) and all(isinstance(x, (Tensor, int)) for x in at):
                at = [torch.tensor(x, device=table.device) if isinstance(x, int) else x for x in at]
                found = table[tuple(x.unsqueeze(0) if x.dim() == 0 else x for x in at)]
                return found.squeeze(0) if all(x.dim() == 0 for x in at) else found
        return func(*args, **(kwargs or {}))


def _over_places(f: Callable[..., Any], scores: int) -> Callable[..., Any]:
    """``f(*scores, b, h, i, j)``, which takes numbers, for scores (b, h, i, j) and the places along each dim."""
    for dim in reversed(range(4)):
        places = [0 if d == dim else None for d in range(4)]
        f = torch.vmap(f, in_dims=(*[0] * scores, *places))
    return f


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    listed: Tensor,
    full: Tensor,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    scale: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of some queries, the logarithms of the sums of their exponentials, and their largest scores."""
    scores = (query @ key.mT) * scale
    batch, heads = (torch.arange(n, device=query.device) for n in scores.shape[:2])
    with _IndexByTensor():
        if score_mod is not None and scores.numel():  # vmap has no empty batches
            scores = _over_places(score_mod, 1)(scores, batch, heads, queries, keys).to(scores.dtype)
        if mask_mod is not None and scores.numel():
            allowed = full | _over_places(mask_mod, 0)(batch, heads, queries, keys) & listed
            scores = torch.where(allowed, scores, -torch.inf)
    masked = (scores == -torch.inf).all(-1, keepdim=True)
    some = torch.where(masked, 0.0, scores)  # a softmax of -inf alone has no derivative
    weights = torch.where(masked, 0.0, some.softmax(-1))
    log_sum = torch.where(masked, -torch.inf, some.logsumexp(-1, keepdim=True)).squeeze(-1)
    largest = scores.amax(-1) if scores.shape[-1] else torch.full_like(log_sum, -torch.inf)
    return weights.to(value.dtype) @ value, log_sum, largest


def _check(query: Tensor, key: Tensor, value: Tensor, block_mask: Any, enable_gqa: bool) -> None:
    """Raise an error for shapes that do not fit."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.is_nested or x.dim() != 4:
            raise ArgumentError(f"flex_attention: {name}: expected 4 dims (b, h, length, d), got {described(x)}")
        if not x.is_floating_point():
            raise ArgumentError(f"flex_attention: {name}: expected real floating point numbers, got {described(x)}")
        if x.dtype.itemsize > query.dtype.itemsize or x.device != query.device:
            raise ArgumentError(
                f"flex_attention: {name}: expected a precision up to {query.dtype}, on {query.device}, as query has, got "
                f"{described(x)} on {x.device}"
            )
    (b, heads, length, d), (b_key, heads_key, keys, _) = query.shape, key.shape
    if key.shape[-1] != d:
        raise ArgumentError(f"flex_attention: key: expected (b, h, s, {d}), as query has, got {described(key)}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ArgumentError(f"flex_attention: value: expected the first dims of key, got {described(value)}")
    if b_key not in (b, 1):
        raise ArgumentError(f"flex_attention: key: expected a batch of {b} or 1, got {described(key)}")
    if heads != heads_key and not (enable_gqa and heads_key and heads % heads_key == 0):
        how = f"a number of heads that divides {heads}" if enable_gqa else f"{heads} heads, or enable_gqa=True"
        raise ArgumentError(f"flex_attention: key: expected {how}, got {described(key)}")
    if block_mask is None:
        return
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"flex_attention: block_mask: expected a BlockMask or None, got {described(block_mask)}")
    whole = min(block_mask.BLOCK_SIZE) >= _WHOLE
    if tuple(block_mask.seq_lengths) != (length, keys) and not whole:
        raise ArgumentError(
            f"flex_attention: block_mask: expected one for {length} queries and {keys} keys, got one for "
            f"{block_mask.seq_lengths[0]} and {block_mask.seq_lengths[1]}"
        )
    sizes = (1, 1, *block_mask.kv_indices.shape[:-2])[-2:]
    for what, size, given in zip(("of the batch", "of the heads"), (b, heads), sizes):
        if given not in (size, 1):
            raise ArgumentError(f"flex_attention: block_mask: expected a size {what} of {size} or 1, got {given}")


@checked
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    r"""``torch.nn.attention.flex_attention.flex_attention``, with derivatives of every order and mode, on every device.

    PyTorch's has reverse mode of first order, on GPUs. Here the tensors that ``score_mod`` and ``mask_mod`` read by
    closure have derivatives, too, as those of `torch_manualgrad.checkpoint` do.

    Args:
        query: $q$, (b, h, l, d).
        key, value: (b, h', s, d) and (b, h', s, e); the batch may be 1. $h' = h$, or a divisor of it with ``enable_gqa``.
        score_mod: ``score_mod(score, b, h, i, j) -> score``, for 0-dim tensors; None for the identity.
        block_mask: a ``BlockMask`` of torch, or None. Blocks that it does not list are not computed.
        scale: $s$; None for $d^(-1/2)$.
        enable_gqa: whether each head of the keys serves $h / h'$ adjacent heads of the queries.
        return_lse: whether to return the logarithms of the sums of exponentials, too.
        kernel_options: has no effect; those of PyTorch choose its kernels.
        return_aux: an ``AuxRequest`` of torch: which of ``lse`` and ``max_scores`` to return.

    Returns:
        The outputs, (b, h, l, e), of the dtype of ``query``. A query without keys has 0. With ``return_lse``:
        ``(out, lse)``, with lse (b, h, l), in float32 for half precision. With ``return_aux``: ``(out, AuxOutput)``.

    Raises:
        TypeError: an argument is not of its type.
        ArgumentError: shapes do not fit, or ``return_lse`` and ``return_aux`` are both given.

    Note:
        Where not differentiable: ``max_scores`` of equal scores, whose gradient is shared, as by ``torch.amax``; and
        where ``score_mod`` is not.

    References:
        Dong et al., Flex Attention: A Programming Model for Generating Optimized Attention Kernels, MLSys 2025.
    """
    _check(query, key, value, block_mask, enable_gqa)
    if not isinstance(return_aux, AuxRequest | None):
        raise TypeError(f"flex_attention: return_aux: expected an AuxRequest or None, got {described(return_aux)}")
    if return_lse and return_aux is not None:
        raise ArgumentError(f"flex_attention: return_lse: expected False with return_aux, got {return_lse}")
    device = query.device.type if not query.is_meta else "cpu"
    if torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    with torch.autocast(device, enabled=False):
        out, lse, largest = _in_pieces(query, key, value, score_mod, block_mask, scale)
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, largest if return_aux.max_scores else None)
    return (out, lse) if return_lse else out


def _in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """All outputs, log-sum-exps and largest scores."""
    (batch, heads, length, d), keys = query.shape, key.shape[2]
    repeats = heads // max(key.shape[1], 1)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    value = value.expand(batch, -1, -1, -1).to(query.dtype)
    table = BlockTable(block_mask, length, keys, query.device)
    places = torch.arange(keys, device=query.device)[None, None]
    splits = [x.split(table.size, 2) for x in (key.to(wide), value, places)]
    factor = d**-0.5 if scale is None and d else 1.0 if scale is None else scale
    mask_mod = None if block_mask is None else block_mask.mask_mod
    pieces = list(table.pieces())

    def output(at: Piece) -> Any:
        parts = [[x[b] for b in at.blocks] or [x[0][:, :, :0]] for x in splits]
        q, i = query[:, :, at.first : at.last].to(wide), torch.arange(at.first, at.last, device=query.device)

        def attend(q: Tensor, i: Tensor, parts: list[list[Tensor]], listed: Tensor, full: Tensor) -> Any:
            k, v, places = (torch.cat(x, 2) for x in parts)
            j = places.flatten()
            listed, full = table.spread(listed, at, len(j)), table.spread(full, at, len(j))
            return _attend(q, k, v, i, j, listed, full, score_mod, mask_mod, factor)

        # also the tensors made here are arguments: a transform may follow them
        given = (q, i, parts, table.listed, table.full)
        if torch.compiler.is_dynamo_compiling():
            return attend(*given)
        try:
            return checkpoint(attend)(*given)
        except HiddenTensorError as error:
            raise HiddenTensorError(
                "flex_attention: score_mod or mask_mod reads a tensor that requires grad, or that a transform follows, and that was "
                "not found. Let the function read it as a closure variable, an attribute or by functools.partial"
            ) from error

    out, lse, largest = (torch.cat(parts, 2) for parts in zip(*map(output, pieces)))
    return out, lse, largest
