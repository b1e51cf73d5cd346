"""svd, eigh and the generalized eigh, with options for their derivatives at degenerate values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.op.custom_op import CustomOp
from torch_manualgrad.core.op.define import custom_op
from torch_manualgrad.derivatives.linalg.degeneracy import Degeneracy
from torch_manualgrad.derivatives.linalg.eigh import linalg_eigh_backward, linalg_eigh_jvp
from torch_manualgrad.derivatives.linalg.svd import linalg_svd_jvp, svd_backward

from ..arguments import ArgumentError, checked
from ..derivatives.linalg.smooth import hermitian
from ..primal import linalg_eigh, linalg_svd
from .arguments import fits, matrix


class SVD(NamedTuple):
    """$U$ (*, m, k), $S$ (*, k) and $Vh$ (*, k, n), with $A = U diag(S) Vh$."""

    U: Tensor
    S: Tensor
    Vh: Tensor


class Eigh(NamedTuple):
    """Eigenvalues (*, n), ascending, and eigenvectors (*, n, n) in columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


_OPTIONS = "float? rtol=None, float atol=0., float broadening=0., str gauge='warn'"


@custom_op(f"manualgrad::svd(Tensor A, bool full_matrices=False, {_OPTIONS}) -> (Tensor U, Tensor S, Tensor Vh)")
def _svd(A: Tensor, full_matrices: bool = False, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return linalg_svd(A, full_matrices)


@custom_op(f"manualgrad::eigh(Tensor A, str UPLO='L', {_OPTIONS}) -> (Tensor eigenvalues, Tensor eigenvectors)")
def _eigh(A: Tensor, UPLO: str = "L", *options: Any) -> tuple[Tensor, Tensor]:
    return linalg_eigh(A, UPLO)


def _differentiate(op: CustomOp, backward: Any, jvp: Any) -> None:
    """Bind derivatives, which take the outputs and options of the operator; vmap adds a batch dimension."""

    @op.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return tuple(output), inputs[2:]

    @op.impl_backward
    def _(ctx: Any, saved: Any, *grads: Tensor | None) -> dict[str, Tensor]:
        outputs, options = saved
        return {"A": backward(*grads, *outputs, *options)}

    @op.impl_jvp
    def _(inputs: Any, output: Any, tangents: Any) -> Any:
        return jvp(tangents.A, *output, *inputs[2:])

    @op.impl_vmap
    def _(info: Any, in_dims: Any, A: Tensor, *options: Any) -> Any:
        output = op(A.movedim(in_dims.A, 0), *options)
        return output, tuple(0 for _ in output)


_differentiate(_svd, svd_backward, linalg_svd_jvp)
_differentiate(_eigh, linalg_eigh_backward, linalg_eigh_jvp)

EXACT = Degeneracy()
Gauge = Literal["warn", "error", "ignore"]


@checked
def svd(
    A: Tensor,
    full_matrices: bool = True,
    *,
    rank: int | None = None,
    degeneracy: Degeneracy = EXACT,
    gauge: Gauge = "warn",
) -> SVD:
    """Singular value decomposition, like `torch.linalg.svd`, with a derivative also at degenerate singular values.

    Args:
        A: (*, m, n), real or complex.
        full_matrices: whether $U$ is (*, m, m) and $Vh$ (*, n, n). A loss may then depend on the further columns
            through the projector onto their span. Ignored if ``rank`` is given.
        rank: the number of leading singular triplets to return, or None for all. The derivative is that of these
            triplets of $A$, not of a matrix of this rank: it includes the rest of the spectrum.
        degeneracy: when two values count as equal, and whether to broaden; see `Degeneracy`.
        gauge: what to do about a loss that depends on the choice of basis within a group of equal values, or on the
            phase of a complex vector, and so has no derivative: "warn", "error" or "ignore". Only "error" synchronizes
            with a GPU.

    Returns:
        `SVD`: $U$, $S$ in descending order, and $Vh$; at least float32 under autocast.

    Raises:
        ValueError: $A$ is not a matrix, ``rank`` is not between 1 and $min(m, n)$, or ``gauge`` is unknown.
        TypeError: $A$ is neither floating point nor complex.
        GaugeError: with ``gauge="error"``, for such a loss.
        torch.linalg.LinAlgError: no convergence, or nan in $A$. Small matrices with nan give nan instead.

    Note:
        Where not differentiable: at equal values. There the gradient is right for losses of $S$ that are symmetric in
        the group, for polar factors, for projectors onto the whole group, and for one function $U f(S) V^H$ of the
        matrix (a reconstruction). The tangent is right for the first three. derivatives/linalg/degeneracy.py has the rules,
        and the cases where $U$, $S$ and $V$ do not determine the derivative.

    References:
        `torch.linalg.svd`; for small matrices, primal/svd.py; for the derivative, derivatives/linalg/svd.py.
    """
    A = matrix(A, "A")
    k = min(A.shape[-2:])
    if rank is not None and not 1 <= rank <= k:
        raise ArgumentError(f"rank: expected 1 to {k} for a matrix of shape {list(A.shape[-2:])}, got {rank}")
    full = full_matrices and rank is None
    U, S, Vh = _svd(A, full, degeneracy.rtol, degeneracy.atol, degeneracy.broadening, gauge)
    if rank is None:
        return SVD(U, S, Vh)
    return SVD(U[..., :rank], S[..., :rank], Vh[..., :rank, :])


@checked
def eigh(A: Tensor, UPLO: Literal["L", "U"] = "L", *, degeneracy: Degeneracy = EXACT, gauge: Gauge = "warn") -> Eigh:
    """Eigendecomposition of a Hermitian matrix, like `torch.linalg.eigh`; derivatives also at degenerate eigenvalues.

    Args:
        A: (*, n, n), real or complex; only one triangle is read. The gradient is Hermitian.
        UPLO: "L" or "U": which triangle.
        degeneracy: as in `svd`.
        gauge: as in `svd`.

    Returns:
        `Eigh`: eigenvalues in ascending order and eigenvectors; at least float32 under autocast.

    Raises:
        ValueError: $A$ is not square, or ``UPLO`` or ``gauge`` is unknown.
        TypeError: $A$ is neither floating point nor complex.
        GaugeError: as `svd`.
        torch.linalg.LinAlgError: as `svd`.

    Note:
        Where not differentiable: as `svd`, with $V f(L) V^H$ for the function of the matrix (whitening, for example).

    References:
        `torch.linalg.eigh`; for small matrices, primal/eigh.py; for the derivative, derivatives/linalg/eigh.py.
    """
    A = matrix(A, "A", square=True)
    return Eigh(*_eigh(A, UPLO, degeneracy.rtol, degeneracy.atol, degeneracy.broadening, gauge))


@checked
def eigh_generalized(A: Tensor, B: Tensor, *, degeneracy: Degeneracy = EXACT, gauge: Gauge = "warn") -> Eigh:
    """The eigenvalues $l$ and vectors $v$ with $A v = l B v$, for Hermitian $A$ and positive definite $B$.

    With $B = L L^H$ (Cholesky), $l$ are the eigenvalues of $L^-1 A L^-H$, and $v = L^-H w$ for its eigenvectors $w$, so that
    $V^H B V = I$. The derivative is that of `eigh`, also at degenerate eigenvalues; in closed form

        dL = diag(V^H (dA - dB l_j) V),    dV = V K,    K_ij = [V^H (dA - dB l_j) V]_ij / (l_j - l_i),

    with $K_ii = -(V^H dB V)_ii / 2$.

    Args:
        A: (*, n, n), real or complex; $(A + A^H) / 2$ is used, so gradients are Hermitian. Batch dims broadcast.
        B: (*, n, n), in the dtype of $A$; likewise.
        degeneracy: as in `svd`, for the eigenvalues $l$.
        gauge: as in `svd`.

    Returns:
        `Eigh`: eigenvalues in ascending order, in units of $A$ over units of $B$, and eigenvectors; at least float32 under
        autocast.

    Raises:
        ValueError: shapes that do not fit, or an unknown ``gauge``.
        TypeError: neither floating point nor complex, or different dtypes.
        GaugeError: as `svd`.
        torch.linalg.LinAlgError: (a RuntimeError) $B$ is not positive definite, no convergence, or nan in $A$.

    Note:
        Where not differentiable: at equal eigenvalues, as `eigh`. There the gradient is right for losses of $l$ that are
        symmetric in the group, and for losses of one function $V f(L) V^H$, such as $A^-1$, $B^-1$ or the density matrix of
        the states below a gap. Errors grow with the condition number of $B$.

    References:
        Golub and Van Loan, Matrix Computations, 8.7.2; `scipy.linalg.eigh`.
    """
    A = matrix(A, "A", square=True)
    B = fits(matrix(B, "B", square=True), "B", A, "A")
    try:
        L = torch.linalg.cholesky(hermitian(B))
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise torch.linalg.LinAlgError(f"B: expected positive definite matrices: {error}") from None  # type: ignore[attr-defined]
    half = torch.linalg.solve_triangular(L, hermitian(A), upper=False)  # L^-1 A
    reduced = torch.linalg.solve_triangular(L.mH, half, upper=True, left=False)
    options = (degeneracy.rtol, degeneracy.atol, degeneracy.broadening, gauge)
    eigenvalues, W = _eigh(hermitian(reduced), "L", *options)
    return Eigh(eigenvalues, torch.linalg.solve_triangular(L.mH, W, upper=True))
