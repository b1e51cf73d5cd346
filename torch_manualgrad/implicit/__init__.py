"""Derivatives of implicit functions: of roots, minima, and solutions of linear, eigenvalue and differential equations."""

from ..core.captures import HiddenTensorError
from .eigenpairs import Eigenpairs, SingularTriplets, eigsh, svds
from .linear import linear_solve
from .minimize import minimize
from .odes import odeint
from .roots import fixed_point, root
from .solving import ConvergenceError, ConvergenceWarning

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "Eigenpairs",
    "HiddenTensorError",
    "SingularTriplets",
    "eigsh",
    "fixed_point",
    "linear_solve",
    "minimize",
    "odeint",
    "root",
    "svds",
]
