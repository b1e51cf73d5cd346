"""Replacement primals for small matrices: ``override(forward=True)`` and ``mg.linalg`` call them instead of LAPACK.

LAPACK processes one matrix at a time, and for small orders most of its time is overhead. Most operators here process as
many matrices at once as a vector register has lanes: csrc/math/svd.h, eigh.h, elimination.h and cholesky.h. Larger real
matrices are processed one at a time, along their rows: eigenvectors of orders 13 to 128 in
csrc/linalg/spectrum/tridiagonal.h, linear systems of orders 13 to 512 in csrc/linalg/gaussian_elimination.cpp, Cholesky
factors of orders 13 to 256 in csrc/linalg/cholesky_factor.cpp. A few small matrices are left to LAPACK, which is faster
there. The results are as accurate as LAPACK's, and small singular values of graded matrices are more accurate.
Those of a matrix are bitwise identical at every position in a batch. They differ from LAPACK's in three ways:

- Signs and phases: in each right singular vector and in each eigenvector, the first entry whose modulus is at least 0.37
  of the largest is real and positive. Away from degeneracy the vectors are smooth functions of A, except that the sign or
  phase changes where an entry crosses this limit.
- A matrix with an inf or a nan gives nan for all of its results, and does not raise. So the entry points `svd_small`,
  `eigh_small`, `lu_finite`, `solve_small` and `cholesky_small` pass such a matrix to LAPACK, which raises, or gives nan in other entries.
- Results are contiguous and row-major, except the factors of linear systems and of Cholesky, which are column-major.
"""

from .cholesky import linalg_cholesky_ex
from .eigh import linalg_eigh
from .lu import linalg_lu
from .solve import linalg_solve_ex
from .svd import linalg_svd

__all__ = ["linalg_cholesky_ex", "linalg_eigh", "linalg_lu", "linalg_solve_ex", "linalg_svd"]
