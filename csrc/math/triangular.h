// Solves with triangular factors, and their derivatives.
#pragma once

#include "step.h"

namespace manualgrad {

// F (n, n): L below the diagonal and U from it on. Y (n, r) := L^-1 Y.
template <class Threads, class N>
HOST_DEVICE void solve_lower(const Threads& threads, const N* F, N* Y, int n, int r) {
  for (int i = 1; i < n; ++i) {
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{Y + i * r, 1}, {F + i * n, 1}, {Y, r, 1}, i, r);
  }
}

// Y := U^-1 Y.
template <class Threads, class N>
HOST_DEVICE void solve_upper(const Threads& threads, const N* F, N* Y, N* inverse, int n, int r) {
  invert_diagonal<Factor::kPlain>(threads, F, n, n, inverse);
  for (int i = n - 1; i >= 0; --i) {
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{Y + i * r, 1}, {F + i * n + i + 1, 1},
                                         {Y + (i + 1) * r, r, 1}, n - 1 - i, r, inverse[i]);
  }
}

// The inverse of a diagonal that counts as ones.
struct Ones {
  HOST_DEVICE Unscaled operator[](int) const { return {}; }
};

// Y (n, r) := U^-H Y for an upper triangle U. inverse: the conjugate of that of its diagonal.
template <class Threads, class N, class Diagonal>
HOST_DEVICE void solve_upper_adjoint(const Threads& threads, const StridedMatrix<const N>& U, const StridedMatrix<N>& Y,
                                     const Diagonal& inverse, int n, int r) {
  for (int i = 0; i < n; ++i) {
    step<Sum::kSubtract, Factor::kConjugate>(threads, StridedVector<N>{Y.data + i * Y.row, Y.column},
                                             {U.data + i * U.column, U.row}, {Y.data, Y.row, Y.column}, i, r,
                                             inverse[i]);
  }
}

// Y := L^-H Y for a lower triangle L.
template <class Threads, class N, class Diagonal>
HOST_DEVICE void solve_lower_adjoint(const Threads& threads, const StridedMatrix<const N>& L, const StridedMatrix<N>& Y,
                                     const Diagonal& inverse, int n, int r) {
  for (int i = n - 1; i >= 0; --i) {
    step<Sum::kSubtract, Factor::kConjugate>(threads, StridedVector<N>{Y.data + i * Y.row, Y.column},
                                             {L.data + (i + 1) * L.row + i * L.column, L.row},
                                             {Y.data + (i + 1) * Y.row, Y.row, Y.column}, n - 1 - i, r, inverse[i]);
  }
}

// Y := L^-H U^-H Y.
template <class Threads, class N>
HOST_DEVICE void lu_solve_adjoint(const Threads& threads, const N* F, N* Y, N* inverse, int n, int r) {
  invert_diagonal<Factor::kConjugate>(threads, F, n, n, inverse);
  solve_upper_adjoint(threads, StridedMatrix<const N>{F, n, 1}, StridedMatrix<N>{Y, r, 1}, inverse, n, r);
  solve_lower_adjoint(threads, StridedMatrix<const N>{F, n, 1}, StridedMatrix<N>{Y, r, 1}, Ones{}, n, r);
}

// T (n, n): an upper triangle, or the transpose of a lower one; becomes its cotangent, zero elsewhere. G (n, r): the
// cotangent of the solution; becomes that of the right-hand sides. X: the conjugate of the solution.
template <class Threads, class N, class Diagonal>
HOST_DEVICE void triangular_vjp(const Threads& threads, N* T, N* G, const N* X, const Diagonal& inverse, bool upper,
                                bool unitriangular, int n, int r) {
  if (upper) {
    solve_upper_adjoint(threads, StridedMatrix<const N>{T, n, 1}, StridedMatrix<N>{G, r, 1}, inverse, n, r);
  } else {
    solve_lower_adjoint(threads, StridedMatrix<const N>{T, 1, n}, StridedMatrix<N>{G, r, 1}, inverse, n, r);
  }
  const int first = unitriangular ? 1 : 0;
  const N *rows = upper ? G : X, *columns = upper ? X : G;
  for (int i = 0; i < n; ++i) {
    for (int j = threads.rank(); j < i + first; j += threads.size()) T[i * n + j] = N{};
    step<Sum::kReplaceNegative, Factor::kPlain>(threads, StridedVector<N>{T + i * n + i + first, 1}, {rows + i * r, 1},
                                                {columns + (i + first) * r, 1, r}, r, n - i - first);
  }
}

}  // namespace manualgrad
