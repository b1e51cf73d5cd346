"""The complex Schur form, with eigenvalues in a chosen order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.op.define import custom_op
from torch_manualgrad.derivatives.linalg.schur import schur_backward, schur_jvp

from ..arguments import checked
from .arguments import matrix
from .decompositions import Gauge
from .schur_form import complex_schur

_EPS = torch.finfo(torch.float64).eps


class Schur(NamedTuple):
    """$T$ (*, n, n), upper triangular, and $Q$ (*, n, n), unitary, with $A = Q T Q^H$."""

    T: Tensor
    Q: Tensor


# The keys by which eigenvalues are sorted, ascending.
_KEYS: dict[str, Callable[[Tensor], Tensor]] = {"real": lambda values: values.real, "modulus": torch.abs}


def _ordered(T: Tensor, Q: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """$T$ and $Q$ with the eigenvalues in order. Rotations swap pairs of neighbours, at even and odd places in turn.

    $r = (t_12, t_22 - t_11)$ is an eigenvector for $t_22$ in the plane of two neighbours. The rotation to $r / |r|$ and its
    complement swaps them.
    """
    n, key = T.shape[-1], _KEYS[order]
    tolerance = n * _EPS * torch.linalg.matrix_norm(T)[..., None]
    for step in range(2 * n):
        first = torch.arange(step % 2, n - 1, 2, device=T.device)
        keys = key(T.diagonal(dim1=-2, dim2=-1))
        swapped = keys[..., first] > keys[..., first + 1] + tolerance
        if swapped.any():
            c, d = T[..., first, first + 1], T[..., first + 1, first + 1] - T[..., first, first]
            length = torch.sqrt(c.abs().square() + d.abs().square())
            length = torch.where(length == 0, 1, length)
            c, d = torch.where(swapped, c / length, 1), torch.where(swapped, d / length, 0)
            G = torch.eye(n, dtype=T.dtype, device=T.device).expand(T.shape).clone()
            G[..., first, first], G[..., first + 1, first] = c, d
            G[..., first, first + 1], G[..., first + 1, first + 1] = -d.conj(), c.conj()
            T, Q = (G.mH @ T @ G).triu(), Q @ G
    return T, Q


@custom_op("manualgrad::schur(Tensor A, str order='none', str gauge='warn') -> (Tensor T, Tensor Q)")
def _schur(A: Tensor, order: str = "none", gauge: str = "warn") -> tuple[Tensor, Tensor]:
    T, Q, _ = complex_schur(A)
    if order != "none" and A.numel() and A.shape[-1] > 1:
        T, Q = _ordered(T, Q, order)
    dtype = A.dtype.to_complex()
    return T.to(dtype).contiguous(), Q.to(dtype).contiguous()


@_schur.impl_fake
def _(A: Tensor, order: str = "none", gauge: str = "warn") -> tuple[Tensor, Tensor]:
    T = A.new_empty(A.shape, dtype=A.dtype.to_complex())
    return T, torch.empty_like(T)


@_schur.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return *output, inputs.A.is_complex(), inputs.gauge


@_schur.impl_backward
def _(ctx: Any, saved: Any, grad_T: Tensor | None, grad_Q: Tensor | None) -> dict[str, Tensor]:
    T, Q, is_complex, gauge = saved
    found = schur_backward(grad_T, grad_Q, T, Q, gauge)
    return {"A": found if is_complex else found.real}


@_schur.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    return schur_jvp(tangents.A, *output)


@_schur.impl_vmap
def _(info: Any, in_dims: Any, A: Tensor, order: str, gauge: str) -> Any:
    return _schur(A.movedim(in_dims.A, 0), order, gauge), (0, 0)


@checked
def schur(A: Tensor, *, order: Literal["none", "real", "modulus"] = "none", gauge: Gauge = "warn") -> Schur:
    """The complex Schur form $A = Q T Q^H$, which PyTorch does not have; with derivatives where the eigenvalues differ.

    Args:
        A: (*, n, n), real or complex.
        order: the order of the eigenvalues on the diagonal of $T$: "none" for any, "real" for ascending real parts, "modulus"
            for ascending moduli. With "real", the first columns of $Q$ span the invariant subspace of the eigenvalues left of
            the imaginary axis. Eigenvalues whose real parts or moduli are equal to rounding, such as a conjugate pair, are in
            any order.
        gauge: what to do about a loss that depends on the phases of the columns of $Q$, and so has no derivative: "warn",
            "error" or "ignore". Only "error" synchronizes with a GPU.

    Returns:
        `Schur`: $T$, upper triangular, and $Q$, unitary, in the complex dtype with the precision of $A$, also for a real
        $A$. They are computed in double precision.

    Raises:
        ValueError: $A$ is not square, or ``order`` or ``gauge`` is unknown.
        TypeError: $A$ is neither floating point nor complex.
        RuntimeError: inf or nan in $A$.
        GaugeError: with ``gauge="error"``, for such a loss.
        torch.linalg.LinAlgError: no convergence.

    Note:
        Where not differentiable: where two eigenvalues are equal. Derivatives of any loss are inf or nan there. Close
        eigenvalues give large derivatives of $Q$, also for a loss that depends only on the subspace of both.

    References:
        Golub and Van Loan, Matrix Computations, 7.1, 7.5 and 7.6.2; `scipy.linalg.schur`; for the derivative,
        derivatives/linalg/schur.py.
    """
    return Schur(*_schur(matrix(A, "A", square=True), order, gauge))
