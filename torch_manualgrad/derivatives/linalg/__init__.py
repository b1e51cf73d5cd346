"""Every family of linear algebra: importing one enters its formulas and rules in the registries."""

from . import (
    cholesky,
    det,
    eig,
    householder,
    inverse,
    linear,
    lstsq,
    lu,
    lu_solve,
    matmul,
    matrix_exp,
    pinv,
    qr,
    solve,
    svd,
    triangular,
)

__all__ = [
    "cholesky",
    "det",
    "eig",
    "householder",
    "inverse",
    "linear",
    "lstsq",
    "lu",
    "lu_solve",
    "matmul",
    "matrix_exp",
    "pinv",
    "qr",
    "solve",
    "svd",
    "triangular",
]
