"""The backward operators of cdist and pdist, which PyTorch does not differentiate.

With w the gradient of the norm and H its Hessian, both at a difference d_ij = a_i - b_j (see `norm`), cdist's backward is
B_i = sum_j g_ij w(d_ij), and for a vector v_i in place of its cotangent

    g_ij gets <v_i, w(d_ij)>,      a_i gets sum_j g_ij H(d_ij) v_i,      b_j gets -sum_i g_ij H(d_ij) v_i.

The distances among the operator's arguments are those of the others, and get nothing by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, formula, operator, rule

from .distance import _differences, cdist_backward, cdist_jvp, pdist_backward, pdist_jvp
from .norm import cast_sum_to, norm_direction, spread, widened


def _curvature(x: Tensor, v: Tensor, p: float) -> Tensor:
    """H(x) v along the last dim, H the Hessian of the p-norm: (p - 1) (|x/n|^(p-2) v - w <w, v>) / n.

    Zero where w counts as constant: for p = 0, 1, inf, at x = 0, and at zero entries unless p is even.
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
    """Cotangents of grad, x1 and x2, given that of cdist's backward, see the module.

    Args:
        gg: v, the shape of what the backward returns, ``(*, P, M)``.
        grad: g, cotangent of the distances, ``(*, P, R)``.
        x1: a, ``(*, P, M)``, real.
        x2: b, ``(*, R, M)``, real; the batch dims broadcast.
        p: the order, 0 <= p <= inf.

    Returns:
        The shapes of ``grad``, ``x1`` and ``x2``. Memory: that of all differences.

    Note:
        Where not differentiable: as `cdist_backward`, 0.

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
    """Tangent of cdist's backward: sum_j dg_ij w(d_ij) + g_ij H(d_ij) (da_i - db_j).

    Args:
        grad, x1, x2, p, cdist: see `cdist_backward`.
        grad_t, x1_t, x2_t: tangents; None for zero.

    Returns:
        ``(*, P, M)``. Memory: that of all differences.

    Note:
        Where not differentiable: as `cdist_backward`, 0.

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


def _pairs(x: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows i < j of all pairs, and x_i - x_j."""
    i, j = torch.triu_indices(n, n, 1, device=x.device)
    return i, j, x.index_select(0, i) - x.index_select(0, j)


def _pdist_curved(grad: Tensor, self: Tensor, v: Tensor, p: float) -> Tensor:
    """Row i gets the sum over j of g_ij H(x_i - x_j) (v_i - v_j)."""
    x, v = widened(self), widened(v)
    i, j, difference = _pairs(x, self.shape[0])
    each = grad.unsqueeze(-1) * _curvature(difference, _pairs(v, self.shape[0])[2], p)
    return torch.zeros_like(x).index_add(0, i, each).index_add(0, j, -each).to(self.dtype)


@formula
def pdist_double_backward(gg: Tensor, grad: Tensor, self: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Cotangents of grad and x, given that of pdist's backward.

    Args:
        gg: v, ``(N, M)``.
        grad: cotangent of the distances, ``(N (N - 1) / 2,)``.
        self: x, ``(N, M)``, real.
        p: the order, 0 <= p <= inf.

    Returns:
        The shapes of ``grad`` and ``self``.

    Note:
        Where not differentiable: as `cdist_backward`, 0.

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
        grad, self, p, pdist: see `pdist_backward`.
        grad_t, self_t: tangents; None for zero.

    Returns:
        ``(N, M)``.

    Note:
        Where not differentiable: as `cdist_backward`, 0.

    References:
        The transpose of `pdist_double_backward`.
    """
    total = torch.zeros_like(self) if grad_t is None else pdist_backward(grad_t, self, p, pdist)
    return total if self_t is None else total + _pdist_curved(grad, self, self_t, p)


# -- the rules --------------------------------------------------------------------------------------------------------

_ORDERS = (2.0, 3.0, 1.0, 1.5, math.inf)


def _cdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    shapes: Sequence[tuple[tuple[int, ...], ...]] = [((3, 2), (2, 2))] * len(_ORDERS) + [((2, 3, 2), (2, 2, 2))]
    for p, (a, b) in zip((*_ORDERS, 2.5), shapes):
        x1, x2 = spread(a, dtype, device), spread(b, dtype, device, 1)
        g = spread((*a[:-1], b[-2]), dtype, device, 2)
        yield Sample(g, x1, x2, p, torch.cdist(x1, x2, p, compute_mode="donot_use_mm_for_euclid_dist"))


def _cdist_probe(grad: Tensor, x1: Tensor, x2: Tensor, p: float, cdist: Tensor) -> Tensor:
    """The backward with the distances of its points, in place of any others; it takes contiguous points only.

    PyTorch's derivative, which it has since 2.15, has a part that goes by the distances: they are no constants here.
    """
    x1 = x1 + 0 * grad.sum(-1, keepdim=True)  # the operator's batching rule is wrong where only grad is batched
    distances = torch.linalg.vector_norm(_differences(x1, x2), p, -1)
    return torch.ops.aten._cdist_backward(grad.contiguous(), x1.contiguous(), x2.contiguous(), p, distances)


def _pdist_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    for p in _ORDERS:
        x = spread((3, 2), dtype, device) / 2
        yield Sample(spread((3,), dtype, device, 2), x, p, torch.pdist(x, p))


def _pdist_probe(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Tensor:
    self = self.contiguous()
    torch.pdist(self.detach(), p)  # refuses shapes for which the backward's kernel would leave its memory
    distances = torch.linalg.vector_norm(_pairs(self, self.shape[0])[2], p, -1)
    return torch.ops.aten._pdist_backward(grad.contiguous(), self, p, distances)


# The first argument, g, is "grad" until torch 2.14, so that its cotangent has a longer name; then "grad_output".
_G = operator("aten::_cdist_backward")._schema.arguments[0].name
_GG = "grad_result" if _G == "grad" else "grad"

rule(
    "aten::_cdist_backward",
    vjp={(_G, "x1", "x2"): cdist_double_backward.bind(gg=_GG, grad=_G), "cdist": lambda: None},
    jvp={"result": cdist_backward_jvp.bind(grad=_G, grad_t=f"{_G}_t")},
    improves="missing",
    source="the Hessian of the norm; new",
    samples=_cdist_samples,
    probe=_cdist_probe,
)
rule(
    "aten::_pdist_backward",
    vjp={(_G, "self"): pdist_double_backward.bind(gg=_GG, grad=_G), "pdist": lambda: None},
    jvp={"result": pdist_backward_jvp.bind(grad=_G, grad_t=f"{_G}_t")},
    improves="missing",
    source="the Hessian of the norm; new",
    samples=_pdist_samples,
    probe=_pdist_probe,
)
