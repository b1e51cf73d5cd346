"""Forward mode: for every operator that lacks it, and in levels to any depth."""

from .decomposition_functions import recompute_mean_var
from .decompositions import (
    Decomposition,
    decomposition_table,
    decompositions,
    enable,
    register_decomposition,
    unregister_decomposition,
)
from .layout import has_same_meta
from .levels import Level, UnpackedDual, dual_level, make_dual, unpack_dual

__all__ = [
    "Decomposition",
    "Level",
    "UnpackedDual",
    "decomposition_table",
    "decompositions",
    "dual_level",
    "enable",
    "has_same_meta",
    "make_dual",
    "recompute_mean_var",
    "register_decomposition",
    "unpack_dual",
    "unregister_decomposition",
]
