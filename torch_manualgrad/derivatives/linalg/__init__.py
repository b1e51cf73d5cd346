"""Every family of linear algebra: importing one enters its formulas and rules in the registries."""

from . import (
    cholesky,
    det,
    eig,
    eigh,
    geqrf,
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
    schur,
    solve,
    svd,
    triangular,
)
