// The Cholesky factor of a small matrix, and its derivatives.
#pragma once

#include "step.h"

namespace manualgrad {

// R (n, n): the upper triangle of A, the rest is ignored; becomes the upper triangle with A = R^H R. If A is not
// positive definite, a number on the diagonal is not positive.
template <class Threads, class N>
HOST_DEVICE void cholesky(const Threads& threads, N* R, int n, int pitch) {
  using Real = RealOf<N>;
  for (int i = 0; i < n; ++i) {
    N* row = R + i * pitch;
    const Real root = square_root(real_part(row[i]));
    const Real inverse = real_number<Real>(1) / root;
    threads.sync();
    for (int c = i + threads.rank(); c < n; c += threads.size()) {
      row[c] = c == i ? from_real<N>(root) : row[c] * inverse;
    }
    threads.sync();
    for (int j = i + 1; j < n; ++j) {
      const N factor = conjugate(row[j]);
      for (int c = j + threads.rank(); c < n; c += threads.size()) R[j * pitch + c] -= factor * row[c];
    }
    threads.sync();
  }
  clear(threads, Part::kLower, R, n, n, pitch);
}

// a := (a + a^H) / 2, or the transpose of this.
template <bool Transposed, class Threads, class N>
HOST_DEVICE void hermitian_part(const Threads& threads, N* a, int n, int pitch) {
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  for (int i = 0; i < n; ++i) {
    for (int j = threads.rank(); j <= i; j += threads.size()) {
      const N x = a[i * pitch + j], y = a[j * pitch + i];
      const N below = (Transposed ? y + conjugate(x) : x + conjugate(y)) * half;
      a[i * pitch + j] = below;
      a[j * pitch + i] = conjugate(below);
    }
  }
  threads.sync();
}

// R, G (n, n): the transposes of L and of its cotangent, upper triangles. G becomes the cotangent of L L^H.
template <class Threads, class N>
HOST_DEVICE void cholesky_vjp(const Threads& threads, const N* R, N* G, N* inverse, int n, int pitch) {
  constexpr Factor kConjugate = Factor::kConjugate;
  constexpr Sum kSubtract = Sum::kSubtract;
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  invert_diagonal<Factor::kPlain>(threads, R, pitch, n, inverse);
  clear(threads, Part::kLower, G, n, n, pitch);
  for (int i = 0; i < n; ++i) {  // K(i, j) at G[j, i]
    step<Sum::kReplace, kConjugate>(threads, StridedVector<N>{G + i, pitch}, {R + i * pitch + i, 1}, {G + i, 1, pitch},
                                    n - i, i);
    step<Sum::kReplace, kConjugate>(threads, StridedVector<N>{G + i * pitch + i, pitch}, {R + i * pitch + i, 1},
                                    {G + i * pitch + i, 1, pitch}, n - i, 1, half);
  }
  for (int j = n - 1; j >= 0; --j) {  // K L^-1
    step<kSubtract, Factor::kPlain>(threads, StridedVector<N>{G + j * pitch + j, 1}, {R + j * pitch + j + 1, 1},
                                    {G + (j + 1) * pitch + j, pitch, 1}, n - 1 - j, n - j, inverse[j]);
  }
  for (int i = n - 1; i >= 0; --i) {  // L^-H
    step<kSubtract, kConjugate>(threads, StridedVector<N>{G + i, pitch}, {R + i * pitch + i + 1, 1},
                                {G + i + 1, 1, pitch}, n - 1 - i, n, conjugate(inverse[i]));
  }
  hermitian_part<true>(threads, G, n, pitch);
}

// R (n, n): the transpose of L, an upper triangle. A: the tangent of L L^H, whose Hermitian part is taken; becomes the
// tangent of L.
template <class Threads, class N>
HOST_DEVICE void cholesky_jvp(const Threads& threads, const N* R, N* A, N* inverse, int n, int pitch) {
  constexpr Sum kSubtract = Sum::kSubtract;
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  invert_diagonal<Factor::kPlain>(threads, R, pitch, n, inverse);
  hermitian_part<false>(threads, A, n, pitch);
  for (int i = 0; i < n; ++i) {  // L^-1 A
    step<kSubtract, Factor::kPlain>(threads, StridedVector<N>{A + i * pitch, 1}, {R + i, pitch}, {A, pitch, 1}, i, n,
                                    inverse[i]);
  }
  for (int j = 0; j < n; ++j) {  // the lower triangle of that times L^-H
    step<kSubtract, Factor::kConjugate>(threads, StridedVector<N>{A + j * pitch + j, pitch}, {R + j, pitch},
                                        {A + j * pitch, 1, pitch}, j, n - j, conjugate(inverse[j]));
  }
  for (int i = 0; i < n; ++i) {  // phi
    for (int j = i + threads.rank(); j < n; j += threads.size())
      A[i * pitch + j] = j == i ? A[i * pitch + i] * half : N{};
  }
  threads.sync();
  for (int i = n - 1; i >= 0; --i) {  // L K
    step<Sum::kReplace, Factor::kPlain>(threads, StridedVector<N>{A + i * pitch, 1}, {R + i, pitch}, {A, pitch, 1},
                                        i + 1, i + 1);
  }
}

}  // namespace manualgrad
