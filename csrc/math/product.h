// The product of two matrices of numbers of number.h.
#pragma once

#include "step.h"

namespace manualgrad {

// c (m, n, row-major) = a b, c + a b, c - a b or -a b, in order of k, with the entries of a, or of b, conjugated as OfA
// and OfB say. Rows by Columns entries of c at a time.
template <Sum How, Factor OfA, Factor OfB>
struct Product {
  static constexpr bool kFromC = How == Sum::kAdd || How == Sum::kSubtract;

  template <Factor Of, class N>
  HOST_DEVICE static N factor(const N& a) {
    return Of == Factor::kConjugate ? conjugate(a) : a;
  }

  template <int Rows, int Columns, class A, class B, class N>
  HOST_DEVICE static void tile(const A& a, const B& b, int i, int j, int k, int pitch, N* c) {
    N sum[Rows][Columns];
    for (int p = 0; p < Rows; ++p) {
      for (int q = 0; q < Columns; ++q) sum[p][q] = kFromC ? c[(i + p) * pitch + j + q] : N{};
    }
    for (int r = 0; r < k; ++r) {
      N right[Columns];
      for (int q = 0; q < Columns; ++q) right[q] = factor<OfB>(b.at(r, j + q));
      for (int p = 0; p < Rows; ++p) {
        const N left = factor<OfA>(a.at(i + p, r));
        for (int q = 0; q < Columns; ++q) {
          if constexpr (How == Sum::kAdd || How == Sum::kReplace) {
            sum[p][q] += left * right[q];
          } else {
            sum[p][q] -= left * right[q];
          }
        }
      }
    }
    for (int p = 0; p < Rows; ++p) {
      for (int q = 0; q < Columns; ++q) c[(i + p) * pitch + j + q] = sum[p][q];
    }
  }

  template <int Rows, class N>
  HOST_DEVICE static void rows(const StridedMatrix<const N>& a, const StridedMatrix<const N>& b, int i, int k, int n,
                               N* c) {
    int j = 0;
    for (; j + 4 <= n; j += 4) tile<Rows, 4>(a, b, i, j, k, n, c);
    for (; j < n; ++j) tile<Rows, 1>(a, b, i, j, k, n, c);
  }

  template <class N>
  HOST_DEVICE static void run(const StridedMatrix<const N>& a, const StridedMatrix<const N>& b, int m, int k, int n,
                              N* c) {
    int i = 0;
    for (; i + 2 <= m; i += 2) rows<2>(a, b, i, k, n, c);
    if (i < m) rows<1>(a, b, i, k, n, c);
  }
};

// A, B: StridedMatrix, or View. One thread leaves no gaps between the rows of c.
template <Sum How, Factor OfA = Factor::kPlain, Factor OfB = Factor::kPlain, class Threads, class N,
          class A = StridedMatrix<const N>, class B = StridedMatrix<const N>>
HOST_DEVICE void product(const Threads& threads, const A& a, const B& b, int m, int k, int n, N* c, int pitch) {
  constexpr bool kComplex = NumberTraits<N>::kComplex;
  using Body = Product<How, kComplex ? OfA : Factor::kPlain, kComplex ? OfB : Factor::kPlain>;
  if constexpr (kIsOneThread<Threads>) {
    run_shared<Threads, N, Body>(a, b, m, k, n, c);
  } else {
    for (int e = threads.rank(); e < m * n; e += threads.size())
      Body::template tile<1, 1>(a, b, e / n, e % n, k, pitch, c);
    threads.sync();
  }
}
template <Sum How, Factor OfA = Factor::kPlain, Factor OfB = Factor::kPlain, class Threads, class N,
          class A = StridedMatrix<const N>, class B = StridedMatrix<const N>>
HOST_DEVICE void product(const Threads& threads, const A& a, const B& b, int m, int k, int n, N* c) {
  product<How, OfA, OfB>(threads, a, b, m, k, n, c, n);
}

}  // namespace manualgrad
