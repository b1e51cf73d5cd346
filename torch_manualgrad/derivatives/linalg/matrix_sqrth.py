"""The square root of a Hermitian positive definite matrix: linalg_matrix_sqrth.

$R R = A$, so the derivative in the direction $E$ is the Hermitian solution $X$ of

    $R X + X R = (E + E^H) / 2$,

whose solution divides by sums of roots of eigenvalues (see lyapunov.py): repeated eigenvalues need no special treatment. As a
map of $E$ it is self-adjoint, so the vjp is the jvp.

Note:
    Where not differentiable: at singular $A$, where the derivative is inf or nan in the null space.

References:
    Higham, Functions of Matrices (SIAM 2008), problem 6.10 and section 10.6; ATen linalg_matrix_sqrth_differential.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .lyapunov import eigenpairs, hermitian_lyapunov
from .smooth import smooth


def _root_vjp(needed: Any, inputs: Any, R: Tensor, grad: Tensor) -> dict[str, Tensor]:
    return {"A": hermitian_lyapunov(R, inputs.L, inputs.V, grad)}


def _root_jvp(inputs: Any, R: Tensor, tangents: Any) -> Tensor | None:
    return None if tangents.A is None else hermitian_lyapunov(R, inputs.L, inputs.V, tangents.A)


@smooth(vjp=_root_vjp, jvp=_root_jvp)
def hermitian_root(A: Tensor, L: Tensor, V: Tensor) -> Tensor:
    """$R = V diag(L) V^H$, the square root of $A$.

    Args:
        A: Hermitian, (*, n, n). Its value is not read.
        L: the roots of its eigenvalues, (*, n); a constant to every derivative.
        V: its eigenvectors, (*, n, n); constant.

    Returns:
        (*, n, n).
    """
    return (V * L.unsqueeze(-2)) @ V.mH


@formula
def linalg_matrix_sqrth_differential(self: Tensor, grad: Tensor) -> Tensor:
    """Derivative of the square root of $A$ in the direction $E$, a self-adjoint map of $E$: $X$ of the module's docstring.

    Args:
        self: $A$, (*, n, n), Hermitian positive definite. Its lower triangle is read.
        grad: $E$, or the cotangent of the root, (*, n, n).

    Returns:
        Hermitian, (*, n, n).
    """
    L, V = eigenpairs(self)
    L = L.sqrt()
    return hermitian_lyapunov(hermitian_root(self, L, V), L, V, grad)


rule(
    "aten::linalg_matrix_sqrth",
    vjp={"self": linalg_matrix_sqrth_differential},
    jvp={"result": linalg_matrix_sqrth_differential.bind(grad="self_t")},
    since="2.15",
    improves="values",
    source="ATen linalg_matrix_sqrth_differential; Higham (2008), section 10.6",
)
