"""The complex Schur form of a batch of matrices, $A = Q T Q^H$, with $T$ upper triangular and $Q$ unitary.

PyTorch has no Schur form. LAPACK's eigenvectors, orthonormalized, are the Schur vectors unless they are nearly dependent. The
QR algorithm continues from there.

References:
    Golub and Van Loan, Matrix Computations, 7.1 and 7.5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..derivatives.linalg.smooth import smooth

__all__ = ["complex_schur", "fake_schur", "no_derivative", "schur_form"]

_EPS = torch.finfo(torch.float64).eps
_STEPS = 40  # steps of the QR algorithm for each row


def _shift(T: Tensor, last: Tensor, step: int) -> Tensor:
    """Of the block of order 2 that ends in row ``last``, the eigenvalue nearer to its last entry (Wilkinson)."""
    n, before = T.shape[-1], (last - 1).clamp(min=0)
    places = torch.stack((before * n + before, before * n + last, last * n + before, last * n + last), -1)
    a, b, c, d = T.flatten(-2).take_along_dim(places, -1).unbind(-1)
    half = (a - d) / 2
    root = (half * half + b * c).sqrt()
    far = half + torch.where((half.conj() * root).real < 0, -root, root)
    shift = d - b * c / torch.where(far == 0, 1, far)
    return shift + (c.abs() + 1e-3 * d.abs()) * complex(0.6, 0.8) if step % 10 == 9 else shift  # breaks a cycle


def complex_schur(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """$T$, $Q$ and LAPACK's eigenvalues, in its order.

    Args:
        A: (*, n, n), real or complex.

    Returns:
        (*, n, n), (*, n, n) and (*, n), complex128. The eigenvalues of a real matrix come in conjugate pairs; the
        diagonal of $T$ contains them up to rounding.

    Raises:
        RuntimeError: inf or nan in $A$.
        torch.linalg.LinAlgError: no convergence.
    """
    n, C = A.shape[-1], A.to(torch.complex128)
    if not C.numel():
        return C.clone(), C.clone(), C.new_empty(C.shape[:-1])
    values, vectors = torch.linalg.eig(C if A.is_complex() else A.double())
    Q = torch.linalg.qr(vectors).Q
    T = Q.mH @ C @ Q
    rounding = n * _EPS * torch.linalg.matrix_norm(C)[..., None]
    rows, identity = torch.arange(n, device=A.device), torch.eye(n, dtype=C.dtype, device=A.device)
    for step in range(_STEPS * n):
        last = torch.where(torch.linalg.vector_norm(T.tril(-1), dim=-1) > rounding, rows, 0).amax(-1)
        if not last.any():
            break
        shift = _shift(T, last, step)[..., None, None] * identity
        G, R = torch.linalg.qr(T - shift)
        going = (last > 0)[..., None, None]
        T, Q = torch.where(going, R @ G + shift, T), torch.where(going, Q @ G, Q)
    else:
        raise torch.linalg.LinAlgError("the Schur form did not converge")  # type: ignore[attr-defined]
    return T.triu().contiguous(), Q.contiguous(), values


def no_derivative(*_: Any) -> dict[str, Tensor]:
    """The vjp of an operator whose results are constants to every derivative."""
    return {}


def fake_schur(A: Tensor) -> tuple[Tensor, Tensor]:
    """$T$ and $Q$ without values."""
    T = A.new_empty(A.shape, dtype=torch.complex128)
    return T, torch.empty_like(T)


@smooth(vjp=no_derivative, jvp=lambda *_: (None, None), fake=fake_schur)
def schur_form(A: Tensor) -> tuple[Tensor, Tensor]:
    """$T$ and $Q$ with $A = Q T Q^H$, constants to every derivative, for operators that take them in addition to $A$.

    Args:
        A: (*, n, n), real or complex.

    Returns:
        $T$ and $Q$, (*, n, n), complex128.

    Raises:
        RuntimeError: inf or nan in $A$.
        torch.linalg.LinAlgError: no convergence.

    Note:
        Where not differentiable: the result is a constant; the function that uses it has the derivative.

    References:
        Golub and Van Loan, Matrix Computations, 7.1 and 7.5.
    """
    return complex_schur(A)[:2]
