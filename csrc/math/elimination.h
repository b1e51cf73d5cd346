// LU with partial pivoting of small matrices. N is a number of number.h; row-major, without gaps.
#pragma once

#include "scaling.h"
#include "thread_group.h"

namespace manualgrad {

// What LAPACK compares when it looks for a pivot.
template <class N>
HOST_DEVICE RealOf<N> pivot_size(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return absolute(a.re) + absolute(a.im);
  } else {
    return absolute(a);
  }
}

// A (m, n) := L below the diagonal and U from it on. order[i]: the row of A that is row i of L U (m numbers).
// The first of equal candidates is the pivot; below a pivot of zero, L is zero. note(j, at): rows j and at were
// interchanged.
template <class Threads, class N, class Note>
HOST_DEVICE void lu(const Threads& threads, N* A, RealOf<N>* order, int m, int n, const Note& note) {
  using R = RealOf<N>;
  const auto index = [](int i) { return real_number<R>(static_cast<BaseOf<R>>(i)); };
  for (int i = threads.rank(); i < m; i += threads.size()) order[i] = index(i);
  threads.sync();
  const int k = m < n ? m : n;
  for (int j = 0; j < k; ++j) {
    R best = pivot_size(A[j * n + j]), at = index(j);
    for (int i = j + 1; i < m; ++i) {
      const R size = pivot_size(A[i * n + j]);
      const auto better = size > best;
      best = select(better, size, best);
      at = select(better, index(i), at);
    }
    note(j, at);
    threads.sync();
    for (int i = j + 1; i < m; ++i) {
      const auto here = at == index(i);
      for (int c = threads.rank(); c < n; c += threads.size()) swap_where(here, A[j * n + c], A[i * n + c]);
      if (threads.rank() == 0) swap_where(here, order[j], order[i]);
    }
    threads.sync();
    if (j + 1 == m) break;
    const R scale = near_reciprocal(extent(A[j * n + j]));
    N inverse = reciprocal(A[j * n + j] * scale);
    // all entries below a zero pivot are zero, and stay zero
    inverse = select(pivot_size(A[j * n + j]) == R{}, N{}, inverse);
    for (int i = j + 1 + threads.rank(); i < m; i += threads.size()) A[i * n + j] = A[i * n + j] * scale * inverse;
    threads.sync();
    for (int i = j + 1; i < m; ++i) {
      const N factor = A[i * n + j];
      for (int c = j + 1 + threads.rank(); c < n; c += threads.size()) A[i * n + c] -= factor * A[j * n + c];
    }
    threads.sync();
  }
}

}  // namespace manualgrad
