"""Replacement primals for small matrices: what ``override(forward=True)`` and ``mg.linalg`` compute in place of LAPACK.

LAPACK takes one matrix at a time, and below some size spends its time on everything but arithmetic. The operators here
take as many matrices at once as a vector of the processor has places: csrc/math/jacobi.h and elimination.h. They are
as exact as LAPACK, small singular values of graded matrices more so. The singular values and vectors of a matrix are
bitwise identical wherever it stands in a batch. Where they differ from LAPACK's:

- Signs and phases: of each right singular vector, and of each eigenvector, the first entry of at least 0.37 of the
  modulus of the largest is real and positive. Away from degeneracy the vectors are smooth functions of A, but for a sign
  or phase where an entry passes this limit.
- A matrix with an inf or a nan gives nan for all of its results, and raises nothing. So `svd_small`, `eigh_small` and
  `lu_finite`, which are what is called, have LAPACK decide there: it raises, or gives nan elsewhere.
- Results are contiguous and row-major.
"""

from .eigh import linalg_eigh
from .lu import linalg_lu
from .svd import linalg_svd

__all__ = ["linalg_eigh", "linalg_lu", "linalg_svd"]
