"""Replacement primals for small matrices: ``override(forward=True)`` and ``mg.linalg`` call them instead of LAPACK.

LAPACK processes one matrix at a time, and for small orders most of its time is overhead. The operators here
process as many matrices at once as a vector register has lanes: csrc/math/svd.h, eigh.h and elimination.h.
Eigenvectors of real symmetric matrices of orders 13 to 128 are computed one matrix at a time, along rows:
csrc/linalg/spectrum/tridiagonal.h. They are as accurate as LAPACK, and more accurate for small singular values of graded
matrices. The singular values and vectors of a matrix are bitwise identical at every position in a batch. They differ from
LAPACK's in three ways:

- Signs and phases: in each right singular vector and in each eigenvector, the first entry whose modulus is at least 0.37
  of the largest is real and positive. Away from degeneracy the vectors are smooth functions of A, except that the sign or
  phase changes where an entry crosses this limit.
- A matrix with an inf or a nan gives nan for all of its results, and does not raise. So the entry points `svd_small`,
  `eigh_small` and `lu_finite` pass such a matrix to LAPACK, which raises, or gives nan in other entries.
- Results are contiguous and row-major.
"""

from .eigh import linalg_eigh
from .lu import linalg_lu
from .svd import linalg_svd

__all__ = ["linalg_eigh", "linalg_lu", "linalg_svd"]
