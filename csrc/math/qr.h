// The derivative of the thin QR factors of a small matrix.
#pragma once

#include "product.h"
#include "triangular.h"

namespace manualgrad {

// The upper triangle of c (n, n) += A^H B, or -= it, for A and B (m, n).
template <Sum How, class Threads, class N>
HOST_DEVICE void add_upper_of_inner(const Threads& threads, const N* A, const N* B, int m, int n, int pitch, N* c) {
  for (int i = 0; i < n; ++i) {
    step<How, Factor::kConjugate>(threads, StridedVector<N>{c + i * pitch + i, 1}, {A + i, pitch}, {B + i, pitch, 1}, m,
                                  n - i);
  }
}

// The upper triangle of c += A B^H, or -= it, for upper triangles A and B.
template <Sum How, class Threads, class N>
HOST_DEVICE void add_upper_of_outer(const Threads& threads, const N* A, const N* B, int n, int pitch, N* c) {
  for (int j = 0; j < n; ++j) {
    step<How, Factor::kConjugate>(threads, StridedVector<N>{c + j, pitch}, {B + j * pitch + j, 1}, {A + j, 1, pitch},
                                  n - j, j + 1);
  }
}

// The rows of all matrices are `pitch` apart. Q (m, n) with m > n, R (n, n). G and S: their cotangents, S null for
// zero, else an upper triangle. G becomes that of Q R. M: memory for (n, n). inverse: the diagonal of R, or what stands
// for it; becomes the conjugate of its inverse.
template <class Threads, class N>
HOST_DEVICE void tall_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse, int m,
                             int n, int pitch) {
  clear(threads, Part::kAll, M, n, n, pitch);
  add_upper_of_inner<Sum::kAdd>(threads, Q, G, m, n, pitch, M);
  if (S != nullptr) add_upper_of_outer<Sum::kSubtract>(threads, S, R, n, pitch, M);
  for (int i = 0; i < n; ++i) {  // the Hermitian matrix of this upper triangle
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      if (j == i) M[i * pitch + i] = from_real<N>(real_part(M[i * pitch + i]));
      M[j * pitch + i] = conjugate(M[i * pitch + j]);
    }
  }
  threads.sync();
  product<Sum::kSubtract>(threads, StridedMatrix<const N>{Q, pitch, 1}, StridedMatrix<const N>{M, pitch, 1}, m, n, n, G,
                          pitch);
  invert_diagonal<Factor::kConjugate>(threads, inverse, 0, n, inverse);
  solve_lower_adjoint(threads, StridedMatrix<const N>{R, 1, pitch}, StridedMatrix<N>{G, 1, pitch}, inverse, n,
                      m);  // transposed: G R^-H
}

// The same without using full rank: with H = Q^H G, T = R S^H and K = H + T it is
// (G + Q (phi(K - K^H) - H)) R^-H + Q S. H, T: memory for (n, n). inverse: the diagonal of R, with ones where it is
// zero; becomes the conjugate of its inverse. What is below the diagonal of S is cleared.
template <class Threads, class N>
HOST_DEVICE void deficient_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, N* S, N* H, N* T, N* inverse,
                                  int m, int n, int pitch) {
  clear(threads, Part::kAll, H, n, n, pitch);
  add_upper_of_inner<Sum::kAdd>(threads, Q, G, m, n, pitch, H);
  clear(threads, Part::kAll, T, n, n, pitch);
  if (S != nullptr) {
    clear(threads, Part::kLower, S, n, n, pitch);
    for (int i = 0; i < n; ++i) {
      for (int j = threads.rank(); j < n; j += threads.size()) {
        for (int k = i < j ? j : i; k < n; ++k) T[i * pitch + j] += R[i * pitch + k] * conjugate(S[j * pitch + k]);
      }
    }
    threads.sync();
  }
  for (int i = 0; i < n; ++i) {  // what Q is multiplied by
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      const N h = H[i * pitch + j], k = h + T[i * pitch + j];
      if (j == i) {
        H[i * pitch + i] = (k - conjugate(k)) * real_number<RealOf<N>>(0.5f) - h;
      } else {
        H[i * pitch + j] = -h;
        H[j * pitch + i] = T[j * pitch + i] - conjugate(k);
      }
    }
  }
  threads.sync();
  product<Sum::kAdd>(threads, StridedMatrix<const N>{Q, pitch, 1}, StridedMatrix<const N>{H, pitch, 1}, m, n, n, G,
                     pitch);
  invert_diagonal<Factor::kConjugate>(threads, inverse, 0, n, inverse);
  solve_lower_adjoint(threads, StridedMatrix<const N>{R, 1, pitch}, StridedMatrix<N>{G, 1, pitch}, inverse, n, m);
  if (S != nullptr) {
    product<Sum::kAdd>(threads, StridedMatrix<const N>{Q, pitch, 1}, StridedMatrix<const N>{S, pitch, 1}, m, n, n, G,
                       pitch);
  }
}

// The same as tall_qr_vjp() for a square Q. With W = K - K^H and K = Q^H G - S R^H it solves R X^H = W^H for an upper
// triangle X^H, instead of X R^H = W: all triangles are upper ones.
template <class Threads, class N>
HOST_DEVICE void square_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse,
                               int n, int pitch) {
  constexpr bool kComplex = NumberTraits<N>::kComplex;
  clear(threads, Part::kAll, M, n, n, pitch);
  add_upper_of_inner<Sum::kAdd>(threads, G, Q, n, n, pitch, M);
  add_upper_of_inner<Sum::kSubtract>(threads, Q, G, n, n, pitch, M);
  if (S != nullptr) {
    add_upper_of_outer<Sum::kAdd>(threads, S, R, n, pitch, M);
    add_upper_of_outer<Sum::kSubtract>(threads, R, S, n, pitch, M);
  }
  for (int i = threads.rank(); i < n; i += threads.size()) {  // what is left of the diagonal has no real part
    if constexpr (kComplex) {
      M[i * pitch + i] = {RealOf<N>{}, M[i * pitch + i].im * real_number<RealOf<N>>(0.5f)};
    } else {
      M[i * pitch + i] = N{};
    }
  }
  threads.sync();
  invert_diagonal<Factor::kPlain>(threads, inverse, 0, n, inverse);
  for (int i = n - 1; i >= 0; --i) {  // R^-1; for a real matrix, nothing is divided by the last pivot
    const int first = kComplex ? i : i + 1;
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{M + i * pitch + first, 1},
                                         {R + i * pitch + i + 1, 1}, {M + (i + 1) * pitch + first, pitch, 1}, n - 1 - i,
                                         n - first, inverse[i]);
  }
  for (int i = 0; i < n; ++i) {  // the adjoint, and S
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      const N below = conjugate(M[i * pitch + j]), above = S == nullptr ? N{} : S[i * pitch + j];
      M[i * pitch + j] = above;
      M[j * pitch + i] = j == i ? below + above : below;
    }
  }
  threads.sync();
  product<Sum::kReplace>(threads, StridedMatrix<const N>{Q, pitch, 1}, StridedMatrix<const N>{M, pitch, 1}, n, n, n, G,
                         pitch);
}

}  // namespace manualgrad
