// The derivative of the thin QR factors of a small matrix.
#pragma once

#include "product.h"
#include "triangular.h"

namespace manualgrad {

// The upper triangle of c (n, n) += A^H B, or -= it, for A and B (m, n).
template <Sum How, class Threads, class N>
HOST_DEVICE void add_upper_of_inner(const Threads& threads, const N* A, const N* B, int m, int n, N* c) {
  for (int i = 0; i < n; ++i) {
    step<How, Factor::kConjugate>(threads, StridedVector<N>{c + i * n + i, 1}, {A + i, n}, {B + i, n, 1}, m, n - i);
  }
}

// The upper triangle of c += A B^H, or -= it, for upper triangles A and B.
template <Sum How, class Threads, class N>
HOST_DEVICE void add_upper_of_outer(const Threads& threads, const N* A, const N* B, int n, N* c) {
  for (int j = 0; j < n; ++j) {
    step<How, Factor::kConjugate>(threads, StridedVector<N>{c + j, n}, {B + j * n + j, 1}, {A + j, 1, n}, n - j, j + 1);
  }
}

// Q (m, n) with m > n, R (n, n). G and S: their cotangents, S null for zero, else an upper triangle. G becomes that of
// Q R. M: memory for (n, n). inverse: the diagonal of R, or what stands for it; becomes the conjugate of its inverse.
template <class Threads, class N>
HOST_DEVICE void tall_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse, int m,
                             int n) {
  clear(threads, Part::kAll, M, n, n);
  add_upper_of_inner<Sum::kAdd>(threads, Q, G, m, n, M);
  if (S != nullptr) add_upper_of_outer<Sum::kSubtract>(threads, S, R, n, M);
  for (int i = 0; i < n; ++i) {  // the Hermitian matrix of this upper triangle
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      if (j == i) M[i * n + i] = from_real<N>(real_part(M[i * n + i]));
      M[j * n + i] = conjugate(M[i * n + j]);
    }
  }
  threads.sync();
  product<Sum::kSubtract>(threads, StridedMatrix<const N>{Q, n, 1}, StridedMatrix<const N>{M, n, 1}, m, n, n, G);
  invert_diagonal<Factor::kConjugate>(threads, inverse, 0, n, inverse);
  solve_lower_adjoint(threads, StridedMatrix<const N>{R, 1, n}, StridedMatrix<N>{G, 1, n}, inverse, n,
                      m);  // transposed: G R^-H
}

// The same without using full rank: with H = Q^H G, T = R S^H and K = H + T it is
// (G + Q (phi(K - K^H) - H)) R^-H + Q S. H, T: memory for (n, n). inverse: the conjugate of the diagonal's.
template <class Threads, class N>
HOST_DEVICE void deficient_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, N* S, N* H, N* T,
                                  const N* inverse, int m, int n) {
  clear(threads, Part::kAll, H, n, n);
  add_upper_of_inner<Sum::kAdd>(threads, Q, G, m, n, H);
  clear(threads, Part::kAll, T, n, n);
  if (S != nullptr) {
    clear(threads, Part::kLower, S, n, n);
    for (int i = 0; i < n; ++i) {
      for (int j = threads.rank(); j < n; j += threads.size()) {
        for (int k = i < j ? j : i; k < n; ++k) T[i * n + j] += R[i * n + k] * conjugate(S[j * n + k]);
      }
    }
    threads.sync();
  }
  for (int i = 0; i < n; ++i) {  // what Q is multiplied by
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      const N h = H[i * n + j], k = h + T[i * n + j];
      if (j == i) {
        H[i * n + i] = (k - conjugate(k)) * real_number<RealOf<N>>(0.5f) - h;
      } else {
        H[i * n + j] = -h;
        H[j * n + i] = T[j * n + i] - conjugate(k);
      }
    }
  }
  threads.sync();
  product<Sum::kAdd>(threads, StridedMatrix<const N>{Q, n, 1}, StridedMatrix<const N>{H, n, 1}, m, n, n, G);
  solve_lower_adjoint(threads, StridedMatrix<const N>{R, 1, n}, StridedMatrix<N>{G, 1, n}, inverse, n, m);
  if (S != nullptr) {
    product<Sum::kAdd>(threads, StridedMatrix<const N>{Q, n, 1}, StridedMatrix<const N>{S, n, 1}, m, n, n, G);
  }
}

// The same as tall_qr_vjp() for a square Q, with W^H = R^H inner^H instead of W = inner R^-H: upper triangles, like all
// the others.
template <class Threads, class N>
HOST_DEVICE void square_qr_vjp(const Threads& threads, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse,
                               int n) {
  constexpr bool kComplex = NumberTraits<N>::kComplex;
  clear(threads, Part::kAll, M, n, n);
  add_upper_of_inner<Sum::kAdd>(threads, G, Q, n, n, M);
  add_upper_of_inner<Sum::kSubtract>(threads, Q, G, n, n, M);
  if (S != nullptr) {
    add_upper_of_outer<Sum::kAdd>(threads, S, R, n, M);
    add_upper_of_outer<Sum::kSubtract>(threads, R, S, n, M);
  }
  for (int i = threads.rank(); i < n; i += threads.size()) {  // what is left of the diagonal has no real part
    if constexpr (kComplex) {
      M[i * n + i] = {RealOf<N>{}, M[i * n + i].im * real_number<RealOf<N>>(0.5f)};
    } else {
      M[i * n + i] = N{};
    }
  }
  threads.sync();
  invert_diagonal<Factor::kPlain>(threads, inverse, 0, n, inverse);
  for (int i = n - 1; i >= 0; --i) {  // R^-1; for a real matrix, nothing is divided by the last pivot
    const int first = kComplex ? i : i + 1;
    step<Sum::kSubtract, Factor::kPlain>(threads, StridedVector<N>{M + i * n + first, 1}, {R + i * n + i + 1, 1},
                                         {M + (i + 1) * n + first, n, 1}, n - 1 - i, n - first, inverse[i]);
  }
  for (int i = 0; i < n; ++i) {  // the adjoint, and S
    for (int j = i + threads.rank(); j < n; j += threads.size()) {
      const N below = conjugate(M[i * n + j]), above = S == nullptr ? N{} : S[i * n + j];
      M[i * n + j] = above;
      M[j * n + i] = j == i ? below + above : below;
    }
  }
  threads.sync();
  product<Sum::kReplace>(threads, StridedMatrix<const N>{Q, n, 1}, StridedMatrix<const N>{M, n, 1}, n, n, n, G);
}

}  // namespace manualgrad
