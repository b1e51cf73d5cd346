// The eigendecomposition of a small Hermitian matrix by Jacobi rotations: J^H A J = diag(L) by the classical cyclic
// method.
#pragma once

#include "jacobi.h"

namespace manualgrad {

// A (n, n), of which one triangle is read, is overwritten. Results: L, and the rows of V^H in Y (n, n).
template <class N, class Threads>
HOST_DEVICE void eigh(const Threads& threads, N* A, N* Y, RealOf<N>* L, int n, bool lower) {
  using R = RealOf<N>;
  // Only what is on the diagonal and above is kept.
  for (int i = threads.rank(); i < n; i += threads.size()) {
    A[i * (n + 1)] = from_real<N>(real_part(A[i * (n + 1)]));
    for (int j = 0; j < n; ++j) {
      if (j < i && lower) A[j * n + i] = conjugate(A[i * n + j]);
      Y[i * n + j] = from_real<N>(real_number<R>(BaseOf<R>(i == j ? 1 : 0)));
    }
  }
  threads.sync();
  for (int i = threads.rank(); i < n; i += threads.size()) {
    for (int j = 0; j < i; ++j) A[i * n + j] = N{};
  }
  threads.sync();
  const Scaling<R> scaling = scale(threads, A, n * n);
  const Tournament tournament(n);
  R square{};
  for (int i = 0; i < n; ++i) {
    R above{};
    for (int j = i + 1; j < n; ++j) above += square_modulus(A[i * n + j]);
    square += square_modulus(A[i * (n + 1)]) + above + above;
  }
  // An entry is zero when it is no larger than a rounding error of the whole. A sweep all of whose rotations and
  // entries were below the square root of that leaves entries below it.
  const R precision = epsilon_times<R>(0.5) * epsilon_times<R>(1.0 / n);
  const R least = square * precision, small = epsilon_times<R>(0.25 / n);
  const R small_entry = square * small;
  const R never = real_number<R>(std::numeric_limits<BaseOf<R>>::infinity());
  R done{};
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    R excess{};
    for (int step = 0; step < tournament.steps(); ++step) {
      for (int pair = 0; pair < tournament.pairs(); ++pair) {
        int p, q;
        tournament.pair(step, pair, p, q);
        if (q == n) continue;
        N *x = A + p * n, *y = A + q * n;
        const N g = x[q];
        const R entry = square_modulus(g);
        const auto wanted = entry > least + done;
        if (!any(wanted)) continue;
        const R a = real_part(x[p]), b = real_part(y[q]);
        const Rotation<N> turn = rotation(a, b, g, entry, wanted);
        const R here = larger_of(entry - small_entry, square_modulus(turn.tangent) - small);
        excess = larger_of(excess, select(wanted, here, excess));
        const R moved = real_part(turn.tangent * conjugate(g));
        const Rotation<N> turned{turn.c, conjugate(turn.s), turn.tangent};
        threads.sync();
        for (int k = threads.rank(); k < p; k += threads.size()) turned.apply(A[k * n + p], A[k * n + q]);
        for (int k = p + 1 + threads.rank(); k < q; k += threads.size()) {
          N other = conjugate(A[k * n + q]);
          turn.apply(x[k], other);
          A[k * n + q] = conjugate(other);
        }
        for (int k = q + 1 + threads.rank(); k < n; k += threads.size()) turn.apply(x[k], y[k]);
        for (int k = threads.rank(); k < n; k += threads.size()) turn.apply(Y[p * n + k], Y[q * n + k]);
        if (threads.rank() == 0) {
          x[p] = from_real<N>(a - moved);
          y[q] = from_real<N>(b + moved);
          x[q] = select(wanted, N{}, g);
        }
        threads.sync();
      }
    }
    const auto again = threads.largest(excess) > R{};
    if (!any(again)) break;
    done = select(again, done, never);
  }
  for (int i = threads.rank(); i < n; i += threads.size()) L[i] = -real_part(A[i * (n + 1)]);
  threads.sync();
  sort_rows(threads, L, A, Y, n, n, 0, n, n);
  for (int i = threads.rank(); i < n; i += threads.size()) {
    fix_phase(Y + i * n, n, Y, 0, scaling.poison);
    L[i] = -L[i] / scaling.factor + scaling.poison;
  }
  threads.sync();
}

}  // namespace manualgrad
