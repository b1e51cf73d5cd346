"""The pseudo-inverse: linalg_pinv.

Where the rank of A is constant, its pseudo-inverse P has the derivative

    dP = -P dA P + (I - P A) dA^H P^H P + P P^H dA^H (I - A P),
    gA = -P^H gP P^H + P^H P gP^H (I - P A) + (I - A P) gP^H P P^H.

Without a tolerance only singular values that are zero to rounding are dropped, and this is the derivative. With one, values that
are not zero may be dropped: see pinv_truncated.py.

Args:
    grad: cotangent of P, (*, n, m).
    result: P, (*, n, m).
    self: A, (*, m, n), real or complex.
    self_t: tangent of A, (*, m, n).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Kernel, formula, rule

from .pinv_truncated import pinv_differential


@formula
def pinv_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor:
    """Cotangent of A, given that of its pseudo-inverse P: gA of the module's docstring.

    Returns:
        (*, m, n). Also for a Hermitian A it is the gradient of A as a general matrix.

    Note:
        Where not differentiable: where the rank changes, P is not continuous; the result is the derivative at constant
        rank.

    References:
        ATen pinv_backward; Golub and Pereyra, The differentiation of pseudo-inverses and nonlinear least squares
        problems whose variables separate, 1973, doi:10.1137/0710036, eq. (4.12).
    """
    if self.shape[-2] < self.shape[-1]:  # the products have the smaller dimension
        return pinv_backward(grad.mH, result.mH, self.mH).mH
    C = result @ grad.mH
    CP = C @ result
    return result.mH @ (C - CP @ self) - CP.mH + (grad.mH - self @ C) @ (result @ result.mH)


@formula
def pinv_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor:
    """Tangent of the pseudo-inverse P: dP of the module's docstring.

    Returns:
        (*, n, m).

    Note:
        Where not differentiable: see `pinv_backward`.

    References:
        ATen pinv_jvp; Golub and Pereyra, see `pinv_backward`.
    """
    if self.shape[-2] < self.shape[-1]:
        return pinv_jvp(self.mH, result.mH, self_t.mH).mH
    D = result @ self_t
    dAK = self_t @ (result @ result.mH)
    return dAK.mH + (D.mH - D - result @ (self @ D.mH) - dAK.mH @ self) @ result


def _rank(A: Tensor, P: Tensor) -> Tensor:
    """The number of singular values that P keeps: the trace of the projector P A."""
    A, P = A.detach(), P.detach()
    trace = (P.mT * A).sum((-2, -1))
    return (trace.real if trace.is_complex() else trace).round()


def _has_full_rank(A: Tensor, P: Tensor) -> bool:
    """Whether nothing is dropped, where this can be asked without synchronizing."""
    return A.is_cpu and bool((_rank(A, P) == min(A.shape[-2:])).all())


def _full_rank_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor | None:
    if not _has_full_rank(self, result):
        return None
    return pinv_backward.reference(grad, result, self).resolve_conj().contiguous()


def _full_rank_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor | None:
    if not _has_full_rank(self, result):
        return None
    return pinv_jvp.reference(self, result, self_t).resolve_conj().contiguous()


@formula(kernels=Kernel("cpu", python=_full_rank_backward, tracked=True))
def pinv_truncated_backward(grad: Tensor, result: Tensor, self: Tensor) -> Tensor:
    """Cotangent of A, given that of its pseudo-inverse P, also where nonzero singular values are dropped.

    Returns:
        (*, m, n). Also for a Hermitian A it is the gradient of A as a general matrix.

    Note:
        Where not differentiable: where a kept singular value equals a dropped one.

    References:
        See pinv_truncated.py; ATen pinv_backward has the derivative at constant rank, as if the dropped values were zero.
    """
    return pinv_differential(self, _rank(self, result), grad.mH.unsqueeze(-3)).mH.resolve_conj().contiguous()


@formula(kernels=Kernel("cpu", python=_full_rank_jvp, tracked=True))
def pinv_truncated_jvp(self: Tensor, result: Tensor, self_t: Tensor) -> Tensor:
    """Tangent of the pseudo-inverse P, also where nonzero singular values are dropped.

    Returns:
        (*, n, m).

    Note:
        Where not differentiable: see `pinv_truncated_backward`.

    References:
        See `pinv_truncated_backward`.
    """
    return pinv_differential(self, _rank(self, result), self_t.unsqueeze(-3))


def _pinv_backward(grad: Tensor, result: Tensor, self: Tensor, atol: Tensor | None, rtol: Tensor | None) -> Tensor:
    backward = pinv_backward if atol is None and rtol is None else pinv_truncated_backward
    return backward(grad, result, self)


def _pinv_jvp(self: Tensor, result: Tensor, self_t: Tensor | None, atol: Tensor | None, rtol: Tensor | None) -> Tensor:
    if self_t is None:  # P is constant in a tolerance, but for its jumps
        return torch.zeros_like(result)
    jvp = pinv_jvp if atol is None and rtol is None else pinv_truncated_jvp
    return jvp(self, result, self_t)


# -- the rule ---------------------------------------------------------------------------------------------------------


rule(
    "aten::linalg_pinv.atol_rtol_tensor",
    vjp={
        "self": _pinv_backward,
        ("atol", "rtol"): lambda output_mask: (None, None),  # P is constant in them, but for its jumps
    },
    jvp={"result": _pinv_jvp},
    improves=("speed", "values"),
    source="ATen pinv_backward, pinv_jvp; Golub and Pereyra, 1973, doi:10.1137/0710036, eq. (4.12)",
)
