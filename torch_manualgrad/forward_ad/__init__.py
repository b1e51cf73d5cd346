"""Forward mode: for every operator that lacks it."""

from .decomposition_functions import recompute_mean_var
from .decompositions import (
    Decomposition,
    decomposition_table,
    decompositions,
    enable,
    register_decomposition,
    unregister_decomposition,
)

__all__ = [
    "Decomposition",
    "decomposition_table",
    "decompositions",
    "enable",
    "recompute_mean_var",
    "register_decomposition",
    "unregister_decomposition",
]
