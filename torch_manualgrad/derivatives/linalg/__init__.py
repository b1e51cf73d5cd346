"""Every family of linear algebra: importing one enters its formulas and rules in the registries."""

from . import cholesky, det, eig, eigh, householder, lstsq, lu, matmul, matrix_exp, qr, solve, svd

__all__ = ["cholesky", "det", "eig", "eigh", "householder", "lstsq", "lu", "matmul", "matrix_exp", "qr", "solve", "svd"]
