"""Forward mode for operators that lack it, in levels of any depth, and of high order along curves."""

from .decomposition.functions import recompute_mean_var
from .decomposition.table import (
    Decomposition,
    decomposition_table,
    decompositions,
    enable,
    register_decomposition,
    unregister_decomposition,
)
from .jets.curves import directional, jet
from .jets.laplacian import biharmonic, ggn_vp, hessian_diagonal, hvp, laplacian, weighted_laplacian
from .levels.layout import has_same_meta
from .levels.level import Level, UnpackedDual, dual_level, make_dual, unpack_dual

__all__ = [
    "Decomposition",
    "Level",
    "UnpackedDual",
    "biharmonic",
    "decomposition_table",
    "decompositions",
    "directional",
    "dual_level",
    "enable",
    "ggn_vp",
    "has_same_meta",
    "hessian_diagonal",
    "hvp",
    "jet",
    "laplacian",
    "make_dual",
    "recompute_mean_var",
    "register_decomposition",
    "unpack_dual",
    "unregister_decomposition",
    "weighted_laplacian",
]
