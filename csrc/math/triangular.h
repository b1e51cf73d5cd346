// Solves with triangular factors, and their derivatives.
#pragma once

#include "step.h"

namespace manualgrad {

// F (n, n): L below the diagonal and U from it on. Y (n, r) := L^-1 Y.
template <class Threads, class N>
HOST_DEVICE void solve_lower(const Threads& threads, const StridedMatrix<const N>& F, const StridedMatrix<N>& Y, int n,
                             int r) {
  for (int i = 1; i < n; ++i) {
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{Y.data + i * Y.row, Y.column},
                                         {F.data + i * F.row, F.column}, {Y.data, Y.row, Y.column}, i, r);
  }
}

// Y := U^-1 Y.
template <class Threads, class N>
HOST_DEVICE void solve_upper(const Threads& threads, const StridedMatrix<const N>& F, const StridedMatrix<N>& Y,
                             N* inverse, int n, int r) {
  invert_diagonal<Factor::kPlain>(threads, F.data, static_cast<int>(F.row), n, inverse);
  for (int i = n - 1; i >= 0; --i) {
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{Y.data + i * Y.row, Y.column},
                                         {F.data + i * F.row + (i + 1) * F.column, F.column},
                                         {Y.data + (i + 1) * Y.row, Y.row, Y.column}, n - 1 - i, r, inverse[i]);
  }
}

// The inverse of a diagonal that counts as ones.
struct Ones {
  HOST_DEVICE Unscaled operator[](int) const { return {}; }
};

// Y (n, r) := U^-H Y for an upper triangle U. inverse: the conjugate of the inverse of its diagonal.
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
HOST_DEVICE void lu_solve_adjoint(const Threads& threads, const StridedMatrix<const N>& F, const StridedMatrix<N>& Y,
                                  N* inverse, int n, int r) {
  invert_diagonal<Factor::kConjugate>(threads, F.data, static_cast<int>(F.row), n, inverse);
  solve_upper_adjoint(threads, F, Y, inverse, n, r);
  solve_lower_adjoint(threads, F, Y, Ones{}, n, r);
}

// T (n, n) := -A B^T above the diagonal, and on it unless that counts as ones; zero elsewhere.
template <class Threads, class N>
HOST_DEVICE void triangle_of_product(const Threads& threads, const N* A, const N* B, N* T, int n, int r, int pitch,
                                     int r_pitch, bool unitriangular) {
  const int first = unitriangular ? 1 : 0;
  for (int i = 0; i < n; ++i) {
    for (int j = threads.rank(); j < i + first; j += threads.size()) T[i * pitch + j] = N{};
    step<Sum::kReplaceNegative, Factor::kPlain>(threads, StridedVector<N>{T + i * pitch + i + first, 1},
                                                {A + i * r_pitch, 1}, {B + (i + first) * r_pitch, 1, r_pitch}, r,
                                                n - i - first);
  }
}

// T (n, n): an upper triangle, or the transpose of a lower one; becomes its cotangent, zero elsewhere. G (n, r): the
// cotangent of the solution; becomes that of the right-hand sides. X: the conjugate of the solution. r_pitch: the
// distance between the rows of both.
template <class Threads, class N, class Diagonal>
HOST_DEVICE void triangular_vjp(const Threads& threads, N* T, N* G, const N* X, const Diagonal& inverse, bool upper,
                                bool unitriangular, int n, int r, int pitch, int r_pitch) {
  if (upper) {
    solve_upper_adjoint(threads, StridedMatrix<const N>{T, pitch, 1}, StridedMatrix<N>{G, r_pitch, 1}, inverse, n, r);
    triangle_of_product(threads, G, X, T, n, r, pitch, r_pitch, unitriangular);
  } else {
    solve_lower_adjoint(threads, StridedMatrix<const N>{T, 1, pitch}, StridedMatrix<N>{G, r_pitch, 1}, inverse, n, r);
    triangle_of_product(threads, X, G, T, n, r, pitch, r_pitch, unitriangular);
  }
}

}  // namespace manualgrad
