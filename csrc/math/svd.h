// The singular value decomposition of a small matrix by Jacobi rotations: Drmac and Veselic, New fast and accurate
// Jacobi SVD algorithm, 2008. For m >= n:
//   1. A = Q R with the columns in order of their remaining norms, A = Q R P^T. Rows of R are far nearer to orthogonal
//      than columns of A.
//   2. J^H R = X with orthogonal rows, by rotations of pairs of rows; Y = J^H.
//   3. X = diag(s) W once sorted, and X = (triangle) W by reflections: W is unitary also where X has rows of zeros. As
//      the rows are orthogonal, the triangle is the diagonal, to the precision at hand.
//   4. A = (Y Q^H)^H diag(s) (W P^T).
#pragma once

#include "jacobi.h"

namespace manualgrad {

// --- reflections ----------------------------------------------------------------------------------------------------

// The reflection I - tau v v^H that takes a vector x to -phase |x| e_1: v = x, but for v_1 = phase (|x_1| + |x|).
template <class N>
struct Reflection {
  N first, phase;
  RealOf<N> tau;
};

// The reflection of a vector of this length, with this first entry and sum of squares. A vector of length one, or near
// zero, stays.
template <class N>
HOST_DEVICE Reflection<N> reflection(const N& first, const RealOf<N>& square, int length) {
  using R = RealOf<N>;
  const R one = real_number<R>(1);
  const auto none = square < least_square<R>();
  const R norm = square_root(square);
  const Polar<N> x = polar(first);
  if (length == 1) return {first, -x.phase, R{}};
  const R sum = x.size + norm;
  return {x.phase * sum, x.phase, select(none, R{}, one / select(none, one, sum * norm))};
}

// --- the decomposition ----------------------------------------------------------------------------------------------

// B (m, n) := its reflections below and on the diagonal, with their tau; R goes to X (n, n), with the columns in the
// order of `order`, which holds n numbers.
template <class N, class Threads>
HOST_DEVICE void factor_qr(const Threads& threads, N* B, N* X, RealOf<N>* tau, RealOf<N>* order, int m, int n) {
  using R = RealOf<N>;
  for (int j = threads.rank(); j < n; j += threads.size()) order[j] = real_number<R>(static_cast<BaseOf<R>>(j));
  threads.sync();
  for (int j = 0; j < n; ++j) {
    // the remaining norms of the columns, the largest first
    R best{}, at{};
    for (int c = j; c < n; ++c) {
      R square{};
      for (int r = j; r < m; ++r) square += square_modulus(B[r * n + c]);
      const R here = real_number<R>(static_cast<BaseOf<R>>(c));
      const auto better = c == j ? square == square : square > best;
      best = select(better, square, best);
      at = select(better, here, at);
    }
    threads.sync();
    for (int c = j + 1; c < n; ++c) {
      const auto here = at == real_number<R>(static_cast<BaseOf<R>>(c));
      if (!any(here)) continue;
      for (int r = threads.rank(); r < m; r += threads.size()) swap_where(here, B[r * n + j], B[r * n + c]);
      for (int r = threads.rank(); r < j; r += threads.size()) swap_where(here, X[r * n + j], X[r * n + c]);
      if (threads.rank() == 0) swap_where(here, order[j], order[c]);
    }
    threads.sync();
    const Reflection<N> v = reflection(B[j * n + j], best, m - j);
    const R norm = square_root(best);
    threads.sync();
    if (threads.rank() == 0) {
      tau[j] = v.tau;
      B[j * n + j] = v.first;
      X[j * n + j] = -v.phase * norm;
    }
    for (int c = threads.rank(); c < j; c += threads.size()) X[j * n + c] = N{};
    threads.sync();
    for (int c = j + 1 + threads.rank(); c < n; c += threads.size()) {
      N sum{};
      for (int r = j; r < m; ++r) sum += conjugate(B[r * n + j]) * B[r * n + c];
      sum = sum * v.tau;
      for (int r = j; r < m; ++r) B[r * n + c] -= B[r * n + j] * sum;
      X[j * n + c] = B[j * n + c];
    }
    threads.sync();
  }
}

// Rows of X (n, n) made orthogonal, and the rows of Y, `pitch` apart, with them.
template <class N, class Threads>
HOST_DEVICE void orthogonalize(const Threads& threads, N* X, N* Y, int n, int pitch) {
  using R = RealOf<N>;
  const Tournament tournament(n);
  const double root = std::sqrt(static_cast<double>(n));
  // Rows are orthogonal when their cosine is at most the tolerance. A sweep all of whose rotations and cosines were
  // below sqrt(tolerance / n) leaves cosines below the tolerance. Rows of nothing but rounding errors are left.
  const R tolerance = epsilon_times<R>(root) * epsilon_times<R>(root), small = epsilon_times<R>(1 / root);
  const R never = real_number<R>(std::numeric_limits<BaseOf<R>>::infinity());
  R least{};
  for (int i = 0; i < n * n; ++i) least += square_modulus(X[i]);
  least = least * (epsilon_times<R>(1) * epsilon_times<R>(1)) * (epsilon_times<R>(1) * epsilon_times<R>(1));
  R done{};  // 0, or inf once there is nothing left to do
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    R excess{};
    for (int step = 0; step < tournament.steps(); ++step) {
      for (int first = 0; first < tournament.pairs(); first += threads.groups()) {
        int p = 0, q = n;
        if (first + threads.group() < tournament.pairs()) tournament.pair(step, first + threads.group(), p, q);
        N *x = X + p * n, *y = X + q * n;
        Rotation<N> turn{};
        bool turns = false;
        if (q < n) {
          R a{}, b{};
          N g{};
          for (int k = 0; k < n; ++k) {
            a += square_modulus(x[k]);
            b += square_modulus(y[k]);
            g += x[k] * conjugate(y[k]);
          }
          const R square = square_modulus(g), product = a * b;
          const auto wanted = square > select(select(a < b, a, b) > least, tolerance * product, never) + done;
          turns = any(wanted);
          if (turns) {
            turn = rotation(a, b, g, square, wanted);
            const R here = larger_of(square - small * product, square_modulus(turn.tangent) - small);
            excess = larger_of(excess, select(wanted, here, excess));
          }
        }
        threads.sync();
        if (turns) {
          for (int k = threads.place(); k < n; k += threads.width()) turn.apply(x[k], y[k]);
          for (int k = threads.place(); k < n; k += threads.width()) turn.apply(Y[p * pitch + k], Y[q * pitch + k]);
        }
        threads.sync();
      }
    }
    const auto again = threads.largest(excess) > R{};
    if (!any(again)) return;
    done = select(again, done, never);
  }
}

// X (n, n), whose rows are orthogonal, or zero: the nearest unitary matrix. `tau` and `phases` hold n numbers.
template <class N, class Threads>
HOST_DEVICE void normalize_rows(const Threads& threads, N* X, RealOf<N>* tau, N* phases, int n) {
  using R = RealOf<N>;
  for (int i = 0; i < n; ++i) {
    N* x = X + i * n;
    R square{};
    for (int k = i; k < n; ++k) square += square_modulus(x[k]);
    const Reflection<N> v = reflection(x[i], square, n - i);
    threads.sync();
    if (threads.rank() == 0) {
      tau[i] = v.tau;
      phases[i] = -v.phase;
      x[i] = v.first;
    }
    threads.sync();
    for (int r = i + 1 + threads.rank(); r < n; r += threads.size()) {
      N* y = X + r * n;
      N sum{};
      for (int k = i; k < n; ++k) sum += y[k] * conjugate(x[k]);
      sum = sum * v.tau;
      for (int k = i; k < n; ++k) y[k] -= sum * x[k];
    }
    threads.sync();
  }
  // Back again: row i of diag(phases) times the reflections i, i - 1, ..., 0. Those below are done when i is.
  for (int i = n - 1; i >= 0; --i) {
    N* x = X + i * n;
    for (int r = i + 1 + threads.rank(); r < n; r += threads.size()) {
      N* y = X + r * n;
      N sum{};
      for (int k = i + 1; k < n; ++k) sum += y[k] * conjugate(x[k]);
      sum = sum * tau[i];
      y[i] = -sum * x[i];
      for (int k = i + 1; k < n; ++k) y[k] -= sum * x[k];
    }
    threads.sync();
    const N factor = phases[i], turned = conjugate(x[i]) * factor * tau[i];
    threads.sync();
    for (int k = i + threads.rank(); k < n; k += threads.size()) {
      x[k] = k == i ? factor - turned * x[i] : -turned * x[k];
    }
    threads.sync();
    threads.sync();
  }
}

// Rows of Y (n, m), zero beyond n, times Q^H.
template <class N, class Threads>
HOST_DEVICE void apply_q(const Threads& threads, const N* B, const RealOf<N>* tau, N* Y, int m, int n) {
  for (int i = threads.rank(); i < n; i += threads.size()) {
    N* y = Y + i * m;
    for (int j = n - 1; j >= 0; --j) {
      N sum{};
      for (int r = j; r < m; ++r) sum += y[r] * B[r * n + j];
      sum = sum * tau[j];
      for (int r = j; r < m; ++r) y[r] -= sum * conjugate(B[r * n + j]);
    }
  }
  threads.sync();
}

// What the decomposition of an (m, n) matrix, m >= n, needs besides the matrix.
template <class N>
struct SvdMemory {
  N *X, *Y, *phases;
  RealOf<N>*s, *tau, *order;
};

// B (m, n), m >= n, overwritten: s, the rows of V^H in X (n, n), the rows of U^H in Y (n, m).
// of_v: whether the phases of V, or those of U, are fixed.
template <class N, class Threads>
HOST_DEVICE void svd(const Threads& threads, N* B, const SvdMemory<N>& to, int m, int n, bool of_v) {
  using R = RealOf<N>;
  const Scaling<R> scaling = scale(threads, B, m * n);
  factor_qr(threads, B, to.X, to.tau, to.order, m, n);
  for (int i = threads.rank(); i < n * m; i += threads.size()) {
    to.Y[i] = from_real<N>(real_number<R>(BaseOf<R>(i % m == i / m ? 1 : 0)));
  }
  threads.sync();
  orthogonalize(threads, to.X, to.Y, n, m);
  for (int i = threads.rank(); i < n; i += threads.size()) {
    R square{};
    for (int k = 0; k < n; ++k) square += square_modulus(to.X[i * n + k]);
    to.s[i] = square_root(square);
  }
  threads.sync();
  sort_rows(threads, to.s, to.X, to.Y, n, n, n, m, n);
  apply_q(threads, B, to.tau, to.Y, m, n);
  normalize_rows(threads, to.X, to.tau, to.phases, n);
  // the columns back to their places
  for (int j = 0; j < n; ++j) {
    for (int c = j + 1; c < n; ++c) {
      const auto here = to.order[c] == real_number<R>(static_cast<BaseOf<R>>(j));
      threads.sync();
      if (!any(here)) continue;
      if (threads.rank() == 0) swap_where(here, to.order[j], to.order[c]);
      for (int i = threads.rank(); i < n; i += threads.size()) swap_where(here, to.X[i * n + j], to.X[i * n + c]);
      threads.sync();
    }
  }
  for (int i = threads.rank(); i < n; i += threads.size()) {
    N *x = to.X + i * n, *y = to.Y + i * m;
    if (of_v) {
      fix_phase(x, n, y, m, scaling.poison);
    } else {
      fix_phase(y, m, x, n, scaling.poison);
    }
    to.s[i] = to.s[i] / scaling.factor + scaling.poison;
  }
  threads.sync();
}

}  // namespace manualgrad
