"""Derivatives of implicit functions: roots, fixed points, minima and solutions of linear systems, by one linear solve."""

from .arguments import HiddenTensorError
from .linear import linear_solve
from .minimize import minimize
from .roots import fixed_point, root
from .solving import ConvergenceError, ConvergenceWarning

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "HiddenTensorError",
    "fixed_point",
    "linear_solve",
    "minimize",
    "root",
]
