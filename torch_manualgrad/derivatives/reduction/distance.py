"""Pairwise distances: cdist, pdist, _euclidean_dist, and the backward operators of the first two.

$D_ij = ||a_i - b_j||_p$, so with $w$ the gradient field of the norm (see norm.py), taken along the last dim,

    vjp: $a_i$ gets $sum_j G_ij w(a_i - b_j)$, and $b_j$ the same with the roles exchanged, as $w$ is odd;
    jvp: $dD_ij = sum_k w(a_i - b_j)_k (da_i - db_j)_k$.

Written out, these take memory for all differences ($P R M$ entries). The bodies below do that, exactly and differentiably.
If nothing differentiates them, other code runs: kernels or, where there is none, the same expressions for one block at a
time.

PyTorch does not differentiate the backward operators. With $H$ the Hessian of the norm at a difference
$d_ij = a_i - b_j$, cdist's backward is $B_i = sum_j g_ij w(d_ij)$, and for a cotangent $v_i$

    $g_ij$ gets $<v_i, w(d_ij)>$,      $a_i$ gets $sum_j g_ij H(d_ij) v_i$,      $b_j$ gets $-sum_i g_ij H(d_ij) v_i$.

The distances among the operator's arguments are functions of the other arguments, and get no gradient themselves.

Args:
    grad: cotangent of the distances, ``(*, P, R)``.
    x1: ``(*, P, M)``, real.
    x2: ``(*, R, M)``, real; the batch dims broadcast.
    p: the order, $0 <= p <= inf$.
    cdist: the distances that the forward returned, ``(*, P, R)``. A kernel may start from their value, but no
        gradient flows through this argument.
    x1_p: ``(*, P, M)``, real.
    x1_t: its tangent; None for zero.
    x2_t: its tangent; None for zero.
    self: $x$, ``(N, M)``, real or complex; complex only if there is no pair.
    pdist: the distances that the forward returned, as for `cdist_backward`.
    res: the distances, ``(*, P, R)``, with their dependence on $x1$ and $x2$ for higher orders.

Note:
    Where not differentiable: as `norm_backward`, pair by pair: 0 for a pair of equal points; for $p = inf$ ties share
    equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, operator, rule

from .norm import cast_sum_to, inner, norm_direction, widened

# The number of differences in memory at once: as many as fit a CPU's cache.
_BLOCK = 1 << 17


def _differences(x1: Tensor, x2: Tensor) -> Tensor:
    """$a_i - b_j$: (*, P, R, M)."""
    return widened(x1).unsqueeze(-2) - widened(x2).unsqueeze(-3)


def _blocks(x1: Tensor, x2: Tensor) -> Iterator[tuple[slice, slice]]:
    """(slice of the batch, slice of the rows of $x1$), each with a bounded number of differences."""
    batch, rows = x1.shape[:2]
    row = max(x2.shape[1] * x2.shape[2], 1)
    by_row = max((_BLOCK if x1.device.type == "cpu" else _BLOCK << 7) // row, 1)
    by_batch = max(by_row // max(rows, 1), 1)
    for b in range(0, batch, by_batch):
        for r in range(0, rows, by_row):
            yield slice(b, b + by_batch), slice(r, r + by_row)


def _flat_batch(x: Tensor, batch: Sequence[int]) -> Tensor:
    return x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:])


@formula(kernel=("cpu", "cuda"))
def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """Cotangent of $x1$, given that of the distances: $sum_j grad_ij w(x1_i - x2_j)$.

    For that of $x2$, exchange the two and transpose grad.

    Returns:
        The shape and dtype of ``x1``. Memory: a bounded block, or all differences if it is differentiated.

    References:
        ATen _cdist_backward, which has no derivative.
    """
    w = norm_direction(_differences(x1, x2), p, (-1,))
    return cast_sum_to((w * grad.unsqueeze(-1)).sum(-2), x1)


@cdist_backward.impl("default")
def _(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
    a, b, g = (_flat_batch(x, batch) for x in (x1, x2, grad))
    out = torch.empty_like(a)
    for block, rows in _blocks(a, b):
        w = norm_direction(_differences(a[block, rows], b[block]), p, (-1,))
        # over j, as a row of grad times a matrix
        out[block, rows] = (g[block, rows].to(w.dtype).unsqueeze(-2) @ w).squeeze(-2).to(out.dtype)
    return out.reshape(*batch, *x1.shape[-2:]).sum_to_size(x1.shape)


@formula(kernel=("default",))
def cdist_jvp(x1_p: Tensor, x1_t: Tensor | None, x2_p: Tensor, x2_t: Tensor | None, p: float) -> Tensor:
    """Tangent of the distances: $sum_k w(x1_i - x2_j)_k (x1_t_i - x2_t_j)_k$.

    Args:
        x2_p: ``(*, R, M)``, real; the batch dims broadcast.

    Returns:
        ``(*, P, R)``. Memory as `cdist_backward`.

    References:
        None in ATen.
    """
    w = norm_direction(_differences(x1_p, x2_p), p, (-1,))
    tangent = torch.zeros_like(w)
    if x1_t is not None:
        tangent = tangent + x1_t.unsqueeze(-2)
    if x2_t is not None:
        tangent = tangent - x2_t.unsqueeze(-3)
    return inner(w, tangent).sum(-1).to(torch.promote_types(x1_p.dtype, x2_p.dtype))


@cdist_jvp.impl("default")
def _(x1_p: Tensor, x1_t: Tensor | None, x2_p: Tensor, x2_t: Tensor | None, p: float) -> Tensor:
    batch = torch.broadcast_shapes(x1_p.shape[:-2], x2_p.shape[:-2])
    a, b = _flat_batch(x1_p, batch), _flat_batch(x2_p, batch)
    a_t, b_t = (None if t is None else _flat_batch(t, batch) for t in (x1_t, x2_t))
    out = a.new_zeros(a.shape[0], a.shape[1], b.shape[1], dtype=torch.promote_types(a.dtype, b.dtype))
    for block, rows in _blocks(a, b):
        w = norm_direction(_differences(a[block, rows], b[block]), p, (-1,))
        if a_t is not None:
            out[block, rows] += (w @ a_t[block, rows].to(w.dtype).unsqueeze(-1)).squeeze(-1)
        if b_t is not None:
            out[block, rows] -= (w * b_t[block].to(w.dtype).unsqueeze(-3)).sum(-1)
    return out.reshape(*batch, *out.shape[-2:])


def _cdist_vjp(
    grad: Tensor, x1: Tensor, x2: Tensor, p: float, result: Tensor, output_mask: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    return (
        cdist_backward(grad, x1, x2, p, result) if output_mask[0] else None,
        cdist_backward(grad.mT, x2, x1, p, result.mT) if output_mask[1] else None,
    )


# pdist is cdist(x, x) above the diagonal. PyTorch's pdist takes complex numbers if there is no pair.


def _pairs(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows $i < j$ of all pairs, and $x_i - x_j$."""
    i, j = torch.triu_indices(n, n, 1, device=x.device)
    return i, j, x.index_select(0, i) - x.index_select(0, j)  # x[i] would add up its gradient in the order of threads


def _refuse_complex_pairs(name: str, x: Tensor) -> None:
    if x.is_complex() and x.shape[-2] > 1:
        raise ValueError(f"{name}: expected a real dtype, got {x.dtype}")


@formula(kernel=("cpu", "cuda"))
def pdist_backward(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    """Cotangent of $x$, given that of its pairwise distances.

    The pair $i < j$ adds $grad_ij w(x_i - x_j)$ to row $i$, and its negative to row $j$.

    Args:
        grad: cotangent of the distances, ``(N (N - 1) / 2,)``, pairs $i < j$ row by row.

    Returns:
        ``(N, M)``, the dtype of ``self``.

    References:
        ATen _pdist_backward, which has no derivative.
    """
    _refuse_complex_pairs("self", self)
    x = widened(self)
    i, j, difference = _pairs(x, self.shape[-2])
    each = norm_direction(difference, p, (-1,)) * grad.unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, i, each).index_add(0, j, -each).to(self.dtype)


@pdist_backward.impl("default")
def _(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    _refuse_complex_pairs("self", self)
    n = self.shape[-2]
    i, j = torch.triu_indices(n, n, 1, device=self.device)
    square = grad.new_zeros(n, n).index_put((i, j), grad)
    return cdist_backward(square + square.mT, self, self, p, square)


@formula
def pdist_jvp(self_p: Tensor, self_t: Tensor, p: float) -> Tensor:
    """Tangent of the pairwise distances: those of cdist_jvp(x, t, x, t) above the diagonal.

    Args:
        self_p: $x$, ``(N, M)``, real or complex; complex only if there is no pair.
        self_t: its tangent.

    Returns:
        ``(N (N - 1) / 2,)``.

    References:
        None in ATen.
    """
    _refuse_complex_pairs("self_p", self_p)
    if self_p.is_complex():
        return self_t.sum(-1)[:0]
    n = self_p.shape[-2]
    i, j = torch.triu_indices(n, n, 1, device=self_p.device)
    return cdist_jvp(self_p, self_t, self_p, self_t, p)[i, j]


# _euclidean_dist computes D^2 = |a_i|^2 + |b_j|^2 - 2 a_i . b_j by one matrix product, as do its derivatives:
# with R = G / D (0 where D = 0),  a gets diag(R 1) a - R b,  b gets diag(R^T 1) b - R^T a,  and
#     dD_ij = (a_i . da_i + b_j . db_j - a_i . db_j - da_i . b_j) / D_ij.
# D is the operator's own output and enters as a function of a and b, so further derivatives must flow through it.


def _quotient(x: Tensor, res: Tensor) -> Tensor:
    zero = res == 0
    return torch.where(zero, 0, x / torch.where(zero, 1, res))


@formula
def _euclidean_dist_backward(grad: Tensor, x1: Tensor, x2: Tensor, res: Tensor) -> tuple[Tensor, Tensor]:
    """Cotangents of $x1$ and $x2$, given that of the Euclidean distances, by matrix products.

    Args:
        x2: ``(*, R, M)``, real.

    Returns:
        Cotangents with the shapes of ``x1`` and ``x2``.

    Note:
        Where not differentiable: 0 for a pair at distance 0. Near 0, the matrix product cancels, as in the forward.
    """
    ratio = _quotient(grad, res)
    return x1 * ratio.sum(-1, keepdim=True) - ratio @ x2, x2 * ratio.sum(-2).unsqueeze(-1) - ratio.mT @ x1


@formula
def _euclidean_dist_jvp(x1_p: Tensor, x1_t: Tensor | None, x2_p: Tensor, x2_t: Tensor | None, res: Tensor) -> Tensor:
    """Tangent of the Euclidean distances: $(a . da + b . db - a . db - da . b) / D$.

    Args:
        x2_p: ``(*, R, M)``, real.

    Returns:
        ``(*, P, R)``.

    Note:
        Where not differentiable: 0 for a pair at distance 0.

    References:
        None in ATen.
    """
    half = torch.zeros_like(res)
    if x1_t is not None:
        half = half + (x1_p * x1_t).sum(-1, keepdim=True) - x1_t @ x2_p.mT
    if x2_t is not None:
        half = half + (x2_p * x2_t).sum(-1).unsqueeze(-2) - x1_p @ x2_t.mT
    return _quotient(half, res)


# -- the backward operators --------------------------------------------------------------------------------------------


def _curvature(x: Tensor, v: Tensor, p: float) -> Tensor:
    """$H(x) v$ along the last dim, $H$ the Hessian of the $p$-norm: $(p - 1) (|x/n|^(p-2) v - w <w, v>) / n$.

    Zero where $w$ counts as constant: for $p = 0$, 1, inf, at $x = 0$, and at zero entries unless $p$ is even.
    """
    if p in (0, 1, math.inf) or x.numel() == 0:
        return torch.zeros_like(x * v)
    w = norm_direction(x, p, (-1,))
    m = x.detach().abs().amax(-1, keepdim=True)
    vanishing = m == 0
    m = torch.where(vanishing, 1, m)
    zero = x == 0
    ratio = torch.where(zero, 1, x).abs() / m
    total = torch.where(vanishing, 1, torch.where(zero, 0, ratio.pow(p)).sum(-1, keepdim=True)).pow(1 / p)
    diagonal = torch.ones_like(x) if p == 2 else torch.where(zero, 0, (ratio / total).pow(p - 2))
    curved = (diagonal * v - w * (w * v).sum(-1, keepdim=True)) * ((p - 1) / (m * total))
    return torch.where(vanishing, 0, curved)


@formula
def cdist_double_backward(gg: Tensor, grad: Tensor, x1: Tensor, x2: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of grad, $x1$ and $x2$, given that of cdist's backward, see the module.

    Args:
        gg: $v$, the shape of what the backward returns, ``(*, P, M)``.
        grad: $g$, cotangent of the distances, ``(*, P, R)``.
        x1: $a$, ``(*, P, M)``, real.
        x2: $b$, ``(*, R, M)``, real; the batch dims broadcast.

    Returns:
        The shapes of ``grad``, ``x1`` and ``x2``. Memory: all differences.

    References:
        None in ATen.
    """
    x = _differences(x1, x2)
    curved = grad.unsqueeze(-1) * _curvature(x, widened(gg).unsqueeze(-2), p)
    of_grad = cdist_jvp(x1.expand(gg.shape), gg, x2, None, p)
    return cast_sum_to(of_grad, grad), cast_sum_to(curved.sum(-2), x1), cast_sum_to(-curved.sum(-3), x2)


@formula
def cdist_backward_jvp(
    grad: Tensor,
    grad_t: Tensor | None,
    x1: Tensor,
    x1_t: Tensor | None,
    x2: Tensor,
    x2_t: Tensor | None,
    p: float,
    cdist: Tensor,
) -> Tensor:
    """Tangent of cdist's backward: $sum_j dg_ij w(d_ij) + g_ij H(d_ij) (da_i - db_j)$.

    Args:
        grad_t, x1_t, x2_t: tangents; None for zero.

    Returns:
        ``(*, P, M)``. Memory: all differences.

    References:
        The transpose of `cdist_double_backward`.
    """
    batch = grad.shape[:-2]
    x1 = x1.expand(*batch, *x1.shape[-2:])
    total = torch.zeros_like(x1) if grad_t is None else cdist_backward(grad_t, x1, x2, p, cdist)
    if x1_t is not None or x2_t is not None:
        tangent = _differences(
            torch.zeros_like(x1) if x1_t is None else x1_t, torch.zeros_like(x2) if x2_t is None else x2_t
        )
        curved = grad.unsqueeze(-1) * _curvature(_differences(x1, x2), tangent, p)
        total = total + curved.sum(-2).to(total.dtype)
    return total


def _pdist_curved(grad: Tensor, self: Tensor, v: Tensor, p: float) -> Tensor:
    """Row $i$ gets the sum over $j$ of $g_ij H(x_i - x_j) (v_i - v_j)$."""
    x, v = widened(self), widened(v)
    i, j, difference = _pairs(x, self.shape[0])
    each = grad.unsqueeze(-1) * _curvature(difference, _pairs(v, self.shape[0])[2], p)
    return torch.zeros_like(x).index_add(0, i, each).index_add(0, j, -each).to(self.dtype)


@formula
def pdist_double_backward(gg: Tensor, grad: Tensor, self: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Cotangents of grad and $x$, given that of pdist's backward.

    Args:
        gg: $v$, ``(N, M)``.
        grad: cotangent of the distances, ``(N (N - 1) / 2,)``.
        self: $x$, ``(N, M)``, real.

    Returns:
        The shapes of ``grad`` and ``self``.

    References:
        None in ATen.
    """
    return pdist_jvp(self, gg, p), _pdist_curved(grad, self, gg, p)


@formula
def pdist_backward_jvp(
    grad: Tensor, grad_t: Tensor | None, self: Tensor, self_t: Tensor | None, p: float, pdist: Tensor
) -> Tensor:
    """Tangent of pdist's backward.

    Args:
        grad: see `pdist_backward`.
        grad_t, self_t: tangents; None for zero.

    Returns:
        ``(N, M)``.

    References:
        The transpose of `pdist_double_backward`.
    """
    total = torch.zeros_like(self) if grad_t is None else pdist_backward(grad_t, self, p, pdist)
    return total if self_t is None else total + _pdist_curved(grad, self, self_t, p)


# The name of the first argument, g, from which the name of its cotangent follows: "grad" until torch 2.14, then "grad_output".
_G = operator("aten::_cdist_backward")._schema.arguments[0].name
_GG = "grad_result" if _G == "grad" else "grad"


# -- the rules --------------------------------------------------------------------------------------------------------

rule(
    "aten::_cdist_forward",
    vjp={("x1", "x2"): _cdist_vjp},
    jvp={"result": cdist_jvp},
    source="ATen _cdist_backward; the tangent and all second orders are new",
    improves=("values", "missing", "speed"),
)
rule(
    "aten::_pdist_forward",
    vjp={"self": pdist_backward.bind(pdist="result")},
    jvp={"result": pdist_jvp},
    source="ATen _pdist_backward; the tangent and all second orders are new",
    improves=("values", "missing", "speed"),
    gaps={"noncontiguous": "aten::_pdist_forward takes contiguous input only; torch.pdist makes it so"},
)
rule(
    "aten::_euclidean_dist",
    vjp={("x1", "x2"): _euclidean_dist_backward.bind(res="result")},
    jvp={"result": _euclidean_dist_jvp.bind(res="result")},
    source="ATen _euclidean_dist_backward; the tangent is new",
    improves="missing",
)
rule(
    "aten::_cdist_backward",
    vjp={(_G, "x1", "x2"): cdist_double_backward.bind(gg=_GG, grad=_G), "cdist": lambda: None},
    jvp={"result": cdist_backward_jvp.bind(grad=_G, grad_t=f"{_G}_t")},
    improves="missing",
    source="the Hessian of the norm; new",
)
rule(
    "aten::_pdist_backward",
    vjp={(_G, "self"): pdist_double_backward.bind(gg=_GG, grad=_G), "pdist": lambda: None},
    jvp={"result": pdist_backward_jvp.bind(grad=_G, grad_t=f"{_G}_t")},
    improves="missing",
    source="the Hessian of the norm; new",
)
