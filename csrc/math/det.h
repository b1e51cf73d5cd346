// The adjugate of a singular matrix from its LU factors.
#pragma once

#include "thread_group.h"

namespace manualgrad {

// adj(L U) = det U D U^-1 E L^-1 if some pivots are zero: replaces these by ones, clears the entries of U that drop
// out, and returns the product of the other pivots. See adjugate_from_lu in
// torch_manualgrad/derivatives/linalg/adjugate.py. zeros[i]: how many of the pivots up to i were zero.
template <class N>
HOST_DEVICE N without_zeros(N* F, RealOf<N>* zeros, int n, int pitch) {
  using R = RealOf<N>;
  const N one = from_real<N>(real_number<R>(1));
  R count{};
  N product = one;
  for (int i = 0; i < n; ++i) {
    const auto zero = is_zero(F[i * (pitch + 1)]);
    count += select(zero, real_number<R>(1), R{});
    zeros[i] = count;
    F[i * (pitch + 1)] = select(zero, one, F[i * (pitch + 1)]);
    product = product * F[i * (pitch + 1)];
    for (int c = 0; c < i; ++c) {
      F[c * pitch + i] = select(zeros[i - 1] <= zeros[c], F[c * pitch + i], N{});
    }
  }
  return product;
}

// Clears the rows that do not contribute to the adjugate: those with a zero pivot after them, or before them. The
// caller synchronizes.
template <bool After, class Threads, class N>
HOST_DEVICE void clear_rows(const Threads& threads, const RealOf<N>* zeros, N* Y, int n, int pitch) {
  for (int i = 0; i < n; ++i) {
    const auto kept = After ? zeros[i] == zeros[n - 1] : (i > 0 ? zeros[i - 1] : RealOf<N>{}) == RealOf<N>{};
    for (int j = threads.rank(); j < n; j += threads.size()) Y[i * pitch + j] = select(kept, Y[i * pitch + j], N{});
  }
}

template <class N>
HOST_DEVICE RealOf<N> zero_pivots(const N* F, int n, int pitch) {
  RealOf<N> count{};
  for (int i = 0; i < n; ++i) {
    count += select(is_zero(F[i * (pitch + 1)]), real_number<RealOf<N>>(1), RealOf<N>{});
  }
  return count;
}

}  // namespace manualgrad
