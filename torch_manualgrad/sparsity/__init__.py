"""Sparse Jacobians and Hessians: patterns from a run of the function, colors, and few products."""

from .coloring import color
from .hessian import HessianPlan, SparseHessian, hessian_blocks, sparse_hessian
from .jacobian import JacobianPlan, SparseJacobian, sparse_jacobian
from .trace import PatternError

__all__ = [
    "HessianPlan",
    "JacobianPlan",
    "PatternError",
    "SparseHessian",
    "SparseJacobian",
    "color",
    "hessian_blocks",
    "sparse_hessian",
    "sparse_jacobian",
]
