"""The first derivatives of QR where rounding errors are all that the leading columns leave of the matrix.

Of a matrix of rank p whose first p columns are independent, the rows of R from p on are rounding errors, and the columns of Q from
p on belong to them. A loss of Q R, such as a reconstruction, is smooth there. Its cotangent of column j of Q is proportional to
R_jj, so the quotient has all of its digits although R_jj has none, if nothing of another scale is added: the formulas for
full rank (qr_full_rank.py) keep the scales apart. A loss that depends on these columns alone gives a quotient as large as 1 / R_jj. It
has no derivative, and nan is left.

Where R_jj is exactly zero, the cotangent of column j of Q, G R^H with G the gradient, is zero. R has the rest of G down to its
diagonal only. So the cotangents do not determine G in column j, and it is nan.

A tangent cannot tell one loss from the other. It is what the formulas give, with a GaugeWarning.

A second derivative divides by R_jj twice, and has no digit. It is nan.

Args:
    Q: (*, m, w), with orthonormal columns.
    R: (*, w, n), upper triangular.
    c: how many columns of A determine Q.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_manualgrad.core.rule import formula, is_sharded, readable

from .common import total
from .gauge import report
from .qr_full_rank import full_rank_backward, full_rank_jvp, vanishing
from .undefined import nan_unless_zero

WHAT = "derivative of the QR factorisation of a matrix without full rank"

# How much larger the gradient in a dependent column may be than the others.
_LARGEST = 1e3
# How much larger than the rounding error that makes a pivot zero the others may be.
_NOISE = 16


def _left_by_rounding(Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor]:
    """(which matrices these are, (*), and which of their rows of R and columns of Q are rounding errors, (*, w)).

    Args:
        c: how many columns of A determine Q.
    """
    order = max(Q.shape[-2], R.shape[-1])
    after = vanishing(order, R[..., :c, :c]).cumsum(-1) > 0
    dependent = after[..., -1] if c else after.any(-1)
    after = torch.cat([after, dependent.unsqueeze(-1).expand(*after.shape[:-1], R.shape[-2] - c)], -1)
    size = R.triu().abs()
    small = (size <= size.sum(-2, keepdim=True) * (_NOISE * order * torch.finfo(R.dtype).eps)).all(-1)
    nonzero = (R.diagonal(dim1=-2, dim2=-1)[..., :c] != 0).all(-1)
    return dependent & nonzero & (small | ~after).all(-1), after


def may_be_left_by_rounding(Q: Tensor, R: Tensor, c: int) -> bool:
    """Whether some matrix may be one of these; False in traced graphs, which would compute two formulas, and if distributed."""
    known = readable(R)
    if known is False or is_sharded(R):
        return False
    return known is None or bool(vanishing(max(Q.shape[-2], R.shape[-1]), R[..., :c, :c]).any())


def _is_needed(grad_Q: Tensor | None, grad_R: Tensor | None, after: Tensor) -> Tensor:
    """Whether the loss depends on what is undefined, (*)."""
    needed = torch.zeros_like(after[..., 0])
    if grad_Q is not None:
        needed = needed | ((grad_Q != 0) & after.unsqueeze(-2)).any(-1).any(-1)
    if grad_R is not None:
        needed = needed | ((grad_R.triu() != 0) & after.unsqueeze(-1)).any(-1).any(-1)
    return needed


def _moderate(grad_A: Tensor, grad_Q: Tensor | None, grad_R: Tensor | None, R: Tensor, after: Tensor) -> Tensor:
    """Whether the gradient in the dependent columns is of the size that the cotangents of all else give it, (*)."""
    columns = grad_A.abs().amax(-2)
    dependent = pad(after, (0, max(0, columns.shape[-1] - after.shape[-1])), value=True)[..., : columns.shape[-1]]
    size = torch.zeros_like(columns[..., 0])
    if grad_R is not None:
        size = size + grad_R.triu().abs().amax((-2, -1))
    if grad_Q is not None:
        k = min(R.shape[-2:])
        pivots = torch.where(after[..., :k], math.inf, R.diagonal(dim1=-2, dim2=-1).abs())
        size = size + (grad_Q[..., :k].abs().amax(-2) / pivots).amax(-1)
    return torch.where(dependent, columns, 0).amax(-1) <= _LARGEST * size


def _undefined(settled: Tensor, given: Tensor, shape: torch.Size) -> Tensor:
    """nan for the matrices that are settled, where what is given is not zero; linear in it."""
    settled = settled[..., None, None]
    return nan_unless_zero(torch.where(settled, given, 0), settled).sum((-2, -1), keepdim=True).expand(shape)


def _vmap(op: Any) -> Any:
    """The batch is one more dim in front."""

    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        front = [
            x
            if not isinstance(x, Tensor)
            else x.unsqueeze(0).expand(info.batch_size, *x.shape)
            if d is None
            else x.movedim(d, 0)
            for x, d in zip(args, in_dims)
        ]
        found = op(*front)
        return found, (0,) * len(found)

    return vmap


@formula(kernel=("default",))
def qr_rounding_backward(
    grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int
) -> tuple[Tensor, Tensor]:
    """Cotangent of A, given those of Q and R, where the loss is smooth although A has not full rank.

    Args:
        grad_Q: cotangent of Q, (*, m, w); None for zero.
        grad_R: cotangent of R, (*, w, n); None for zero.

    Returns:
        (*, m, n), and a bool, (*), for which matrices that is the cotangent.

    Note:
        Where not differentiable: everywhere; a derivative of it is nan.

    References:
        See the module.
    """
    settled, after = _left_by_rounding(Q, R, c)
    settled = settled & _is_needed(grad_Q, grad_R, after)
    grad_A = full_rank_backward(grad_Q, grad_R, Q, R, c)
    return grad_A.contiguous(), settled & _moderate(grad_A, grad_Q, grad_R, R, after)


@qr_rounding_backward.impl("default")
def _(grad_Q: Tensor | None, grad_R: Tensor | None, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor]:
    if Q.is_cpu and not (settled := _left_by_rounding(Q, R, c)[0]).any():
        return Q.new_zeros(*Q.shape[:-1], R.shape[-1]), settled
    return qr_rounding_backward.reference(grad_Q, grad_R, Q, R, c)


qr_rounding_backward.impl_vmap(_vmap(qr_rounding_backward))
qr_rounding_backward.impl_save_for_backward(lambda inputs, output: (inputs, output[1]))


@qr_rounding_backward.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor | None, _: Tensor | None) -> dict[str, Tensor | None]:
    inputs, settled = saved
    given = {name: getattr(inputs, name) for name in ("grad_Q", "grad_R", "Q", "R")}
    return {n: None if x is None or grad is None else _undefined(settled, grad, x.shape) for n, x in given.items()}


@qr_rounding_backward.impl_jvp
def _(inputs: Any, output: tuple[Tensor, Tensor], tangents: Any) -> tuple[Tensor | None, None]:
    given = (tangents.grad_Q, tangents.grad_R, tangents.Q, tangents.R)
    return total(*[_undefined(output[1], x, output[0].shape) for x in given if x is not None]), None


@formula(kernel=("default",))
def qr_rounding_jvp(A_t: Tensor, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of Q and R where A has not full rank, and rounding errors have taken its place.

    Args:
        A_t: tangent of A, (*, m, n).

    Returns:
        The tangents, of the shapes of ``Q`` and ``R``, and a bool, (*, w): for which columns of Q and rows of R.

    Note:
        Where not differentiable: everywhere; a derivative of it is nan.

    References:
        See the module.
    """
    settled, after = _left_by_rounding(Q, R, c)
    return (*full_rank_jvp(A_t, Q, R), settled.unsqueeze(-1) & after)


@qr_rounding_jvp.impl("default")
def _(A_t: Tensor, Q: Tensor, R: Tensor, c: int) -> tuple[Tensor, Tensor, Tensor]:
    settled, after = _left_by_rounding(Q, R, c)
    settled = settled.unsqueeze(-1) & after
    if Q.is_cpu and not settled.any():
        return torch.zeros_like(Q).contiguous(), torch.zeros_like(R).contiguous(), settled
    report(settled.any(), "warn", WHAT)
    Q_t, R_t = full_rank_jvp(A_t, Q, R)
    return Q_t.contiguous(), R_t.contiguous(), settled


qr_rounding_jvp.impl_vmap(_vmap(qr_rounding_jvp))
qr_rounding_jvp.impl_save_for_backward(lambda inputs, output: (inputs, output[2].any(-1)))


@qr_rounding_jvp.impl_backward
def _(ctx: Any, saved: Any, grad_Q: Tensor | None, grad_R: Tensor | None, _: Any) -> dict[str, Tensor | None]:
    inputs, settled = saved
    given = [x for x in (grad_Q, grad_R) if x is not None]
    return {
        name: total(*[_undefined(settled, g, x.shape) for g in given])
        for name, x in (("A_t", inputs.A_t), ("Q", inputs.Q), ("R", inputs.R))
    }


@qr_rounding_jvp.impl_jvp
def _(inputs: Any, output: tuple[Tensor, ...], tangents: Any) -> tuple[Tensor | None, Tensor | None, None]:
    given = [x for x in (tangents.A_t, tangents.Q, tangents.R) if x is not None]
    settled = output[2].any(-1)
    Q_t, R_t = (total(*[_undefined(settled, g, x.shape) for g in given]) for x in output[:2])
    return Q_t, R_t, None
