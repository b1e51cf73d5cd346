"""The inverse: linalg_inv_ex.

For $X = A^-1$, $A dX + dA X = 0$ gives

    dX = -X dA X,        gA = -X^H gX X^H.

Args:
    inverse: $X$, (*, n, n).
"""

from __future__ import annotations

from torch import Tensor

from torch_manualgrad.core.libraries import kernel_limit
from torch_manualgrad.core.limits import LIMITS
from torch_manualgrad.core.rule import ButManySmall, Kernel, formula, rule

from .common import small

_IN_CACHE = kernel_limit("cached_inverse")

_LARGEST_TANGENT = LIMITS["inverse_tangent"]
_SMALL = LIMITS["inverse_small"]

# PyTorch's reverse derivative is right. On the CPU ours is faster for many small matrices.
_DEFERRED = ButManySmall(order=_IN_CACHE, complex_order=_SMALL, entries=LIMITS["inverse_entries"])


def _is_small(inverse: Tensor) -> bool:
    n = inverse.shape[-1]
    # for large batches of other matrices, BLAS is faster
    fast = n <= _SMALL or inverse.is_cpu and not inverse.is_complex()
    return small(inverse, n, in_cache=_IN_CACHE) and (fast or inverse.numel() < LIMITS["inverse_batch"] * n * n)


@formula(kernels=Kernel("cpu", "cuda", when=_is_small))
def linalg_inv_backward(grad_inverse: Tensor, inverse: Tensor) -> Tensor:
    """Cotangent of $A$, given that of its inverse $X$: $-X^H gX X^H$.

    Args:
        grad_inverse: cotangent of the inverse, (*, n, n).

    Returns:
        (*, n, n).

    References:
        ATen's derivatives.yaml, linalg_inv_ex.
    """
    XH = inverse.mH
    return -XH @ (grad_inverse @ XH)


def _is_small_for_tangents(inverse: Tensor) -> bool:
    return inverse.shape[-1] <= _LARGEST_TANGENT and small(inverse, inverse.shape[-1])


@formula(kernels=Kernel("cpu", "cuda", when=_is_small_for_tangents))
def linalg_inv_jvp(A_t: Tensor, inverse: Tensor) -> Tensor:
    """Tangent of the inverse $X$ of $A$: $-X dA X$.

    Args:
        A_t: tangent of $A$, (*, n, n).

    Returns:
        (*, n, n).

    References:
        ATen's derivatives.yaml, linalg_inv_ex.
    """
    return -inverse @ (A_t @ inverse)


rule(
    "aten::linalg_inv_ex",
    vjp={"A": linalg_inv_backward},
    jvp={"inverse": linalg_inv_jvp},
    improves="speed",
    source="ATen's derivatives.yaml, linalg_inv_ex",
    defer_to_stock=_DEFERRED,
)
