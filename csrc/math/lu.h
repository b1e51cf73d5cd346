// The derivatives of the LU factors of a small matrix.
#pragma once

#include "step.h"

namespace manualgrad {

// F (m, n): L below the diagonal and U from it on. G: the cotangents of both likewise; becomes that of L U.
// inverse: memory for k = min(m, n). `lower`: whether L has a cotangent.
template <class Threads, class N>
HOST_DEVICE void lu_vjp(const Threads& threads, const N* F, N* G, N* inverse, int m, int n, int pitch, bool lower) {
  constexpr Sum kAdd = Sum::kAdd, kSubtract = Sum::kSubtract;
  constexpr Factor kConjugate = Factor::kConjugate;
  const int k = m < n ? m : n;
  invert_diagonal<kConjugate>(threads, F, pitch, k, inverse);
  if (m > n && lower) {  // the last rows R, and what they subtract from the cotangent of U
    N* R = G + k * pitch;
    for (int j = n - 1; j >= 0; --j) {
      step<kSubtract, kConjugate>(threads, StridedVector<N>{R + j, pitch}, {F + j * pitch + j + 1, 1},
                                  {R + j + 1, 1, pitch}, n - 1 - j, m - k, inverse[j]);
    }
    for (int i = 0; i < k; ++i) {
      step<kSubtract, kConjugate>(threads, StridedVector<N>{G + i * pitch + i, 1}, {F + k * pitch + i, pitch},
                                  {R + i, pitch, 1}, m - k, n - i);
    }
  }
  if (lower) {  // L^H gL below the diagonal
    for (int i = 1; i < k; ++i) {
      step<kAdd, kConjugate>(threads, StridedVector<N>{G + i * pitch, 1}, {F + (i + 1) * pitch + i, pitch},
                             {G + (i + 1) * pitch, pitch, 1}, k - 1 - i, i);
    }
  }
  for (int j = k - 2; j >= 0; --j) {  // T U'^-H
    N* column = G + (j + 1) * pitch + j;
    step<kSubtract, kConjugate>(threads, StridedVector<N>{column, pitch}, {F + j * pitch + j + 1, 1},
                                {column + 1, 1, pitch}, n - 1 - j, k - 1 - j, inverse[j]);
  }
  for (int i = k - 2; i >= 0; --i) {  // L^-H
    step<kSubtract, kConjugate>(threads, StridedVector<N>{G + i * pitch, 1}, {F + (i + 1) * pitch + i, pitch},
                                {G + (i + 1) * pitch, pitch, 1}, k - 1 - i, n);
  }
}

// B (m, n): the tangent of L U; becomes the tangent of L below the diagonal and zero from it on. dU (k, n): gets the
// tangent of U on the diagonal and above.
template <class Threads, class N>
HOST_DEVICE void lu_jvp(const Threads& threads, const N* F, N* B, N* dU, N* inverse, int m, int n, int pitch) {
  constexpr Sum kAdd = Sum::kAdd, kSubtract = Sum::kSubtract;
  constexpr Factor kPlain = Factor::kPlain;
  const int k = m < n ? m : n;
  invert_diagonal<kPlain>(threads, F, pitch, k, inverse);
  for (int i = 1; i < k; ++i) {  // Y
    step<kSubtract, kPlain>(threads, StridedVector<N>{B + i * pitch, 1}, {F + i * pitch, 1}, {B, pitch, 1}, i, n);
  }
  for (int j = 0; j + 1 < k; ++j) {  // S
    N* row = B + (j + 1) * pitch;
    step<kSubtract, kPlain>(threads, StridedVector<N>{row + j, pitch}, {F + j, pitch}, {row, 1, pitch}, j, k - 1 - j,
                            inverse[j]);
  }
  for (int i = 0; i < k; ++i) {
    for (int j = i + threads.rank(); j < n; j += threads.size()) dU[i * pitch + j] = B[i * pitch + j];
    threads.sync();
    step<kSubtract, kPlain>(threads, StridedVector<N>{dU + i * pitch + i, 1}, {B + i * pitch, 1}, {F + i, pitch, 1}, i,
                            n - i);
  }
  clear(threads, Part::kUpper, B, k, n, pitch);
  for (int i = k - 1; i > 1; --i) {  // L S
    step<kAdd, kPlain>(threads, StridedVector<N>{B + i * pitch, 1}, {F + i * pitch + 1, 1}, {B + pitch, pitch, 1},
                       i - 1, i - 1);
  }
  if (m == k) return;
  N* rest = B + k * pitch;  // (B - L dU) U^-1 of the last rows
  for (int j = 0; j < n; ++j) {
    step<kSubtract, kPlain>(threads, StridedVector<N>{rest + j, pitch}, {dU + j, pitch}, {F + k * pitch, 1, pitch},
                            j + 1, m - k);
  }
  for (int j = 0; j < n; ++j) {
    step<kSubtract, kPlain>(threads, StridedVector<N>{rest + j, pitch}, {F + j, pitch}, {rest, 1, pitch}, j, m - k,
                            inverse[j]);
  }
}

}  // namespace manualgrad
