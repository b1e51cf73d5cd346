"""What the derivatives of scaled dot-product attention are made of, for a block of queries at a time.

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

from .normalization import wide

__all__ = [
    "ROWS",
    "blocks_of",
    "change",
    "heads",
    "joined_mask",
    "like_mask",
    "product",
    "scale_of",
    "scores_jvp",
    "shared",
    "total",
    "weights",
    "weights_of_block",
]

ROWS = 64


def scale_of(scale: float | None, query: Tensor) -> Any:
    return query.shape[-1] ** -0.5 if scale is None else scale


def heads(x: Tensor | None, query: Tensor) -> Any:
    """Keys or values for each head of the queries, wide: several of these may share one of those."""
    if x is None:
        return None
    each = query.shape[1] // x.shape[1]
    return wide(x) if each == 1 else wide(x).repeat_interleave(each, 1)


def shared(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `heads`."""
    if x.shape[1] != like.shape[1]:
        x = x.unflatten(1, (like.shape[1], x.shape[1] // like.shape[1])).sum(2)
    return x.to(like.dtype)


def blocks_of(x: Tensor | None, rows: Any = None) -> Iterable[Any]:
    """Blocks of queries, wide, of what has a row for each; with a number of rows, of what may have one row for all."""
    if x is None:
        return repeat(None)
    if rows is not None:
        x = x.expand(*x.shape[:-2], rows, x.shape[-1])
    return map(wide, x.split(ROWS, -2))


def weights_of_block(q: Tensor, k: Tensor, mask: Tensor | None, first: int, is_causal: bool, scale: Any) -> Tensor:
    """P for a block of queries, the first of which has this number; 0 for a query that attends to no key."""
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


def weights(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: Any) -> Iterator[Tensor]:
    """P for each block of queries."""
    for i, (q_rows, mask_rows) in enumerate(zip(blocks_of(q), blocks_of(mask, q.shape[-2]))):
        yield weights_of_block(q_rows, k, mask_rows, i * ROWS, is_causal, scale)


def total(*terms: Tensor | None) -> Any:
    given = [t for t in terms if t is not None]
    return sum(given[1:], given[0]) if given else None


def product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else a @ b


def change(P: Tensor, T: Tensor | None) -> Tensor | None:
    """P (T - <P T>)."""
    return None if T is None else P * (T - (P * T).sum(-1, keepdim=True))


def scores_jvp(
    q: Tensor, q_t: Tensor | None, k: Tensor, k_t: Tensor | None, mask_t: Tensor | None, scale: Any
) -> Tensor | None:
    """T."""
    of_both = total(product(q_t, k.mT), product(q, None if k_t is None else k_t.mT))
    return total(None if of_both is None else scale * of_both, mask_t)


def like_mask(D: Any, mask: Tensor) -> Tensor:
    """A block of the mask's cotangent, of all rows, summed over what the mask has but one of."""
    return D.sum_to_size(*mask.shape[:-2], D.shape[-2], mask.shape[-1])


def joined_mask(blocks: list[Tensor], mask: Any) -> Tensor:
    return torch.cat(blocks, -2).sum_to_size(mask.shape).to(mask.dtype)
