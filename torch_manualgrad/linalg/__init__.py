"""Linear algebra whose derivatives are right also at degenerate singular values and eigenvalues."""

from torch_manualgrad.derivatives.linalg.degeneracy import Degeneracy
from torch_manualgrad.derivatives.linalg.gauge import GaugeError, GaugeWarning

from .action import expm_multiply
from .decompositions import SVD, Eigh, eigh, eigh_generalized, svd
from .equations import solve_discrete_lyapunov, solve_lyapunov, solve_sylvester
from .functions import expm, funm_hermitian, logm, powm, rsqrtm, sqrtm
from .lu import LU, lu
from .norms import nuclear_norm, spectral_norm
from .polar import Alignment, Polar, kabsch, polar, procrustes
from .schur import Schur, schur

__all__ = [
    "LU",
    "SVD",
    "Alignment",
    "Degeneracy",
    "Eigh",
    "GaugeError",
    "GaugeWarning",
    "Polar",
    "Schur",
    "eigh",
    "eigh_generalized",
    "expm",
    "expm_multiply",
    "funm_hermitian",
    "kabsch",
    "logm",
    "lu",
    "nuclear_norm",
    "polar",
    "powm",
    "procrustes",
    "rsqrtm",
    "schur",
    "solve_discrete_lyapunov",
    "solve_lyapunov",
    "solve_sylvester",
    "spectral_norm",
    "sqrtm",
    "svd",
]
