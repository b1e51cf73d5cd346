"""Forward mode: derivatives of high order along curves, and the operators made of them."""

from .jets import directional, jet
from .laplacian import biharmonic, ggn_vp, hessian_diagonal, hvp, laplacian, weighted_laplacian

__all__ = [
    "biharmonic",
    "directional",
    "ggn_vp",
    "hessian_diagonal",
    "hvp",
    "jet",
    "laplacian",
    "weighted_laplacian",
]
