"""Determinants: _linalg_det and _linalg_slogdet, under det, logdet and slogdet.

With the adjugate $adj(A) = det(A) A^-1$, a polynomial in $A$ that exists for every $A$, and the derivative of
$log det(A)$,

    $d det(A) = tr(adj(A) dA)$,        vjp: $g adj(A)^H$;
    $d log|det(A)| + i d arg(det(A)) = tr(A^-1 dA)$,        vjp: $h A^-H$, $h = g_logabsdet - i Im(conj(g_sign) sign)$.

The forward returns its LU factorization as constants: of $A^T$ if $A$ is real and contiguous, else of $A$. Only first
derivatives use it; higher ones are derivatives of functions of $A$ alone.

Where not differentiable: det is differentiable everywhere. $log|det|$ is $-inf$ at a singular matrix: the gradient and
the tangents of that matrix are nan, those of the others in the batch are not affected, and nothing is raised.

Args:
    A: (*, n, n), real or complex; $n$ may be 0.
    result: the determinant, (*); like the factors, a constant to every derivative.
    LU: the packed factors of $A^T$ if $A$ is real and contiguous, else of $A$, (*b, n, n).
    pivots: those of the factorization, (*b, n), int32.
    A_t: tangent of $A$, (*, n, n).
    sign: $det / |det|$, (*); 0 where $A$ is singular.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.rule import CompiledVjp, Kernel, formula, rule

from .adjugate import adjugate, adjugate_from_lu
from .common import LARGEST, eye_like, pivots_fit, small

_IN_CACHE = kernel_limit("cached_det")

# -- with the factors of the forward ----------------------------------------------------------------------------------


def _is_of_transpose(A: Tensor) -> bool:
    """Whether the forward factorized $A^T$ instead of $A$. It first copies a tensor with a neg bit."""
    return (A.resolve_neg() if A.is_neg() else A).is_contiguous() and not A.is_complex()


def _laid_out(X: Tensor, A: Tensor) -> Tensor:
    """$X$ with the strides of a gradient of $A$: row-major where the forward factorized $A^T$, else column-major."""
    return X.contiguous() if _is_of_transpose(A) else X.mT.contiguous().mT


def _inverse(c: Tensor, A: Tensor, LU: Tensor, pivots: Tensor, adjoint: bool) -> Tensor:
    """$c A^-1$ or $c A^-H$ for $c$, (*), solved from the side on which LAPACK uses transposed factors."""
    transposed = adjoint != _is_of_transpose(A)
    right = torch.diag_embed(c.unsqueeze(-1).expand(pivots.shape))
    return torch.linalg.lu_solve(LU, pivots, right, left=transposed, adjoint=transposed).resolve_conj()


def _without_zeros(x: Tensor) -> bool:
    """Whether $x$ is known to have no zero entry. False outside of the CPU, where reading it would synchronize."""
    return x.is_cpu and bool(x.all())


def _underflowed(det: Tensor, LU: Tensor) -> bool:
    """Whether some determinant is known to be zero without a zero pivot. False outside of the CPU, too."""
    return det.is_cpu and not det.all() and bool(((det == 0) & (LU.diagonal(dim1=-2, dim2=-1) != 0).all(-1)).any())


def _has_factors(A: Tensor) -> bool:
    return A.numel() > 0 and (A.is_cpu or A.is_cuda)


def _is_small(A: Tensor) -> bool:
    return _has_factors(A) and small(A, A.shape[-1], in_cache=_IN_CACHE)


# -- det --------------------------------------------------------------------------------------------------------------


@formula(kernel=("default",), requires=pivots_fit)
def adjugate_again(A: Tensor, result: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """$adj(A)$ from the factors of the forward; its derivative is that of `adjugate`.

    Returns:
        (*, n, n), column-major if $A$ is real and contiguous, else row-major.

    References:
        `adjugate`, `adjugate_from_lu`.
    """
    return _laid_out((adjugate(A) if A.numel() else torch.zeros_like(A)).mT, A).mT


@adjugate_again.impl("default")
def _(A: Tensor, result: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    if A.numel() == 0:
        return torch.zeros_like(A)
    if _without_zeros(LU.diagonal(dim1=-2, dim2=-1)) and not _underflowed(result, LU):
        return _inverse(result, A, LU, pivots, adjoint=False)
    of_factors = adjugate_from_lu(LU, pivots).contiguous()
    return of_factors.mT if _is_of_transpose(A) else of_factors


def _det_of_small(grad: Tensor, det: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """$grad conj(adj(B))$, row-major: `linalg_det_backward` for $A = B^T$, $B = P L U$."""
    return (grad[..., None, None] * adjugate_from_lu(LU, pivots).conj()).contiguous()


def _det_unless_underflowed(
    compiled: Callable[..., Tensor], grad_result: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor
) -> Tensor | None:
    """`linalg_det_backward` of small matrices; None if a determinant has underflowed, as the kernel multiplies by it."""
    if _underflowed(result, LU):
        return None
    gradient = compiled(grad_result, result, LU, pivots)
    return gradient if _is_of_transpose(A) else gradient.mT


@formula(
    kernels=Kernel("cpu", "cuda", when=_is_small, compiled=_det_of_small, python=_det_unless_underflowed),
    requires=pivots_fit,
)
def linalg_det_backward(grad_result: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """Cotangent of $A$, given that of its determinant: $grad adj(A)^H$, also where $A$ is singular.

    Args:
        grad_result: cotangent of the determinant, (*).

    Returns:
        (*, n, n), row-major if $A$ is real and contiguous, else column-major.

    Note:
        Where not differentiable: nowhere. At rank $n - 4$ and above every derivative is right. Below that, the
        derivatives of det up to the fourth are right (they are zero), and higher ones are nan.

    References:
        ATen linalg_det_backward; for the adjugate, G. W. Stewart, On the adjugate matrix, 1998,
        doi:10.1016/S0024-3795(98)10098-8.
    """
    return _laid_out(grad_result[..., None, None] * adjugate_again(A, result, LU, pivots).mH, A)


@formula(requires=pivots_fit)
def linalg_det_jvp(A_t: Tensor, result: Tensor, A: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """Tangent of the determinant: $tr(adj(A) dA)$.

    Returns:
        (*).

    Note:
        Where not differentiable: nowhere; see `linalg_det_backward`.
    """
    adj_H = linalg_det_backward(torch.ones_like(result), result, A, LU, pivots)
    return (adj_H.conj() * A_t).sum((-2, -1))


# -- slogdet ----------------------------------------------------------------------------------------------------------


def _slogdet_factor(grad_sign: Tensor | None, grad_logabsdet: Tensor | None, A: Tensor, sign: Tensor) -> Tensor:
    """$h$ of the module's docstring."""
    h = torch.zeros_like(sign) if grad_logabsdet is None else grad_logabsdet.to(A.dtype)
    if A.is_complex() and grad_sign is not None:
        h = h - 1j * (grad_sign.conj() * sign).imag
    return h


def _slogdet_of_small(h: Tensor, LU: Tensor, pivots: Tensor) -> Tensor:
    """$h conj(B^-1)$, row-major, nan where a pivot is zero: `slogdet_backward` for $A = B^T$, $B = P L U$."""
    singular = (LU.diagonal(dim1=-2, dim2=-1) == 0).any(-1)[..., None, None]
    right = torch.diag_embed(h.conj().unsqueeze(-1).expand(pivots.shape))
    return torch.linalg.lu_solve(LU, pivots, right).conj().masked_fill(singular, math.nan)


def _slogdet_from_factors(
    compiled: Callable[..., Tensor],
    grad_sign: Tensor | None,
    grad_logabsdet: Tensor | None,
    A: Tensor,
    sign: Tensor,
    LU: Tensor,
    pivots: Tensor,
) -> Tensor:
    """`slogdet_backward` from the factors of the forward."""
    h = _slogdet_factor(grad_sign, grad_logabsdet, A, sign)
    if _is_small(A):
        gradient = compiled(h, LU, pivots)
        return gradient if _is_of_transpose(A) else gradient.mT
    result = _inverse(h, A, LU, pivots, adjoint=True)
    return result if _without_zeros(sign) else result.masked_fill_((sign == 0)[..., None, None], math.nan)


@formula(
    kernels=Kernel("cpu", "cuda", when=_has_factors, compiled=_slogdet_of_small, python=_slogdet_from_factors),
    requires=pivots_fit,
)
def slogdet_backward(
    grad_sign: Tensor | None, grad_logabsdet: Tensor | None, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor
) -> Tensor:
    """Cotangent of $A$, given those of sign and $log|det|$: $(grad_logabsdet - i Im(conj(grad_sign) sign)) A^-H$.

    Args:
        grad_sign: cotangent of the sign, (*), or None for zero. It has no effect if $A$ is real.
        grad_logabsdet: cotangent of $log|det|$, real, (*), or None for zero.

    Returns:
        (*, n, n), row-major if $A$ is real and contiguous, else column-major.

    Note:
        Where not differentiable: where $A$ is singular; the gradient of that matrix is nan.
    """
    h = _slogdet_factor(grad_sign, grad_logabsdet, A, sign)[..., None, None]
    singular = (sign == 0)[..., None, None]
    inverse = torch.linalg.inv_ex(torch.where(singular, eye_like(A), A))[0]
    return _laid_out(h * torch.where(singular, math.nan, inverse.mH), A)


@formula(requires=pivots_fit)
def slogdet_jvp(A_t: Tensor, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Tangents of sign and $log|det|$: with $r = tr(A^-1 dA)$, $i Im(r) sign$ and $Re(r)$.

    Returns:
        The two tangents, (*); that of a real sign is zero.

    Note:
        Where not differentiable: where $A$ is singular; the tangents of that matrix are nan.
    """
    ones = torch.ones_like(sign.real if sign.is_complex() else sign)
    rate = (slogdet_backward(None, ones, A, sign, LU, pivots).conj() * A_t).sum((-2, -1))
    if not A.is_complex():
        return torch.zeros_like(sign), rate
    return 1j * rate.imag * sign, rate.real


def _slogdet_vjp(
    grad_sign: Tensor | None, grad_logabsdet: Tensor | None, A: Tensor, sign: Tensor, LU: Tensor, pivots: Tensor
) -> Tensor | None:
    if grad_logabsdet is None and not A.is_complex():
        return None
    return slogdet_backward(grad_sign, grad_logabsdet, A, sign, LU, pivots)


# -- the rules --------------------------------------------------------------------------------------------------------


rule(
    "aten::_linalg_det",
    vjp={"A": linalg_det_backward},
    jvp={"result": linalg_det_jvp},
    compiled_vjp=CompiledVjp(
        "A",
        linalg_det_backward,
        {"grad": "grad_result", "det": "result"},
        LARGEST,
        real=True,
        contiguous=("A",),  # the factors are those of A^T
        nonzero=("result",),
    ),
    not_differentiable=("LU", "pivots"),
    improves="values",
    source="ATen linalg_det_backward, linalg_det_jvp",
)
rule(
    "aten::_linalg_slogdet",
    vjp={"A": _slogdet_vjp},
    jvp={("sign", "logabsdet"): slogdet_jvp},
    compiled_vjp=CompiledVjp("A", slogdet_backward, {"h": "grad_logabsdet"}, LARGEST, real=True, contiguous=("A",)),
    not_differentiable=("LU", "pivots"),
    improves={"values": "2.15"},
    source="ATen slogdet_backward, slogdet_jvp",
)
