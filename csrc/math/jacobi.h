// The singular value decomposition and the Hermitian eigendecomposition of small matrices, by Jacobi rotations.
//
// N is a number of number.h: of one matrix, or of as many as there are lanes. Matrices are stored by rows, without
// gaps. A lane takes part in a rotation only while its own matrix needs it, so that its result does not depend on the
// others; and as every operation rounds by itself, a matrix alone, in lanes, or shared by a warp gives the same bits.
//
// Singular values (Drmac and Veselic, New fast and accurate Jacobi SVD algorithm, 2008), for m >= n:
//   1. A = Q R with the columns in order of what is left of their norms, A = Q R P^T. Rows of R are far nearer to
//      orthogonal than columns of A.
//   2. J^H R = X with orthogonal rows, by rotations of pairs of rows; Y = J^H.
//   3. X = diag(s) W once sorted, and X = (triangle) W by reflections: W is unitary also where X has rows of zeros. As
//      the rows are orthogonal, the triangle is the diagonal, to the precision at hand.
//   4. A = (Y Q^H)^H diag(s) (W P^T).
// Eigenvalues: J^H A J = diag(L) by the classical cyclic method.
//
// A team is what works on one matrix: one thread (`Alone`), or a warp (csrc/cuda/jacobi.cu). Its threads share loops
// over rows or columns, in groups of `width()` those over pairs, and compute by themselves what all of them need to
// know.
#pragma once

#include "scaling.h"
#include "team.h"

#include <limits>

namespace manualgrad {

// More than enough; 6 or 7 are usual.
constexpr int kSweeps = 20;

// --- numbers --------------------------------------------------------------------------------------------------------

template <class N>
HOST_DEVICE N plus_real(const N& a, const RealOf<N>& b) {
  if constexpr (NumberTraits<N>::kComplex) {
    return {a.re + b, a.im + b};
  } else {
    return a + b;
  }
}

template <class R>
HOST_DEVICE R larger_of(const R& a, const R& b) {
  return select(a > b, a, b);
}
template <class R>
HOST_DEVICE R epsilon_times(double factor) {
  using T = BaseOf<R>;
  return real_number<R>(static_cast<T>(factor * static_cast<double>(std::numeric_limits<T>::epsilon())));
}
// Squares below this have lost digits.
template <class R>
HOST_DEVICE R least_square() {
  using T = BaseOf<R>;
  return real_number<R>(std::numeric_limits<T>::min() / std::numeric_limits<T>::epsilon());
}

template <class N>
HOST_DEVICE void swap_where(const MaskOf<N>& mask, N& a, N& b) {
  const N first = a, second = b;
  a = select(mask, second, first);
  b = select(mask, first, second);
}

// --- scaling --------------------------------------------------------------------------------------------------------

// The power of two by which a matrix was multiplied, and what its results are to be increased by: 0, or nan.
template <class R>
struct Scaling {
  R factor, poison;
};

// Entries of modulus near 1 at most. A matrix with an inf or a nan becomes zero, and its results nan.
template <class N, class Team>
HOST_DEVICE Scaling<RealOf<N>> scale(const Team& team, N* A, int count) {
  using R = RealOf<N>;
  R largest{}, poison{};
  for (int i = 0; i < count; ++i) {
    largest = larger_of(extent(A[i]), largest);
    poison += real_part(A[i]) * R{};
    if constexpr (NumberTraits<N>::kComplex) poison += A[i].im * R{};
  }
  const Scaling<R> scaling{near_reciprocal(largest), poison};
  const auto finite = scaling.poison == R{};
  team.sync();
  for (int i = team.rank(); i < count; i += team.size()) A[i] = select(finite, A[i] * scaling.factor, N{});
  team.sync();
  return scaling;
}

// --- reflections ----------------------------------------------------------------------------------------------------

// The reflection I - tau v v^H that takes a vector x to -phase |x| e_1: v = x, but for v_1 = phase (|x_1| + |x|).
template <class N>
struct Reflection {
  N first, phase;
  RealOf<N> tau;
};

// a = size * phase; of what is nearly zero the phase is 1.
template <class N>
struct Polar {
  RealOf<N> size;
  N phase;
};
template <class N>
HOST_DEVICE Polar<N> polar(const N& a) {
  using R = RealOf<N>;
  const R one = real_number<R>(1);
  if constexpr (NumberTraits<N>::kComplex) {
    const R square = square_modulus(a), size = square_root(square);
    const auto none = square < real_number<R>(std::numeric_limits<BaseOf<R>>::min());
    const R divisor = select(none, one, size);
    return {size, select(none, from_real<N>(one), N{a.re / divisor, a.im / divisor})};
  } else {
    return {absolute(a), select(a >= R{}, one, -one)};
  }
}

// Of a vector of this length, with this first entry and sum of squares. A vector of length one, or near zero, stays.
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

// --- rotations ------------------------------------------------------------------------------------------------------

// The pairs of one step of a tournament in which everyone of n meets everyone else, in n - 1 or n steps.
struct Tournament {
  int n;
  HOST_DEVICE explicit Tournament(int size) : n(size) {}
  HOST_DEVICE int players() const { return n + n % 2; }
  HOST_DEVICE int steps() const { return players() - 1; }
  HOST_DEVICE int pairs() const { return players() / 2; }
  // p < q; q = n says that p is left out.
  HOST_DEVICE void pair(int step, int k, int& p, int& q) const {
    const int last = steps();
    int a = step + k, b = step - k;
    a = a >= last ? a - last : a;
    b = b < 0 ? b + last : b;
    if (k == 0) b = last;
    p = a < b ? a : b;
    q = a < b ? b : a;
  }
};

// x := c x - s y, y := conj(s) x + c y. No rotation: c = 1, s = 0.
template <class N>
struct Rotation {
  RealOf<N> c;
  N s, tangent;

  HOST_DEVICE void apply(N& x, N& y) const {
    const N a = x, b = y;
    x = a * c - s * b;
    y = conjugate(s) * a + b * c;
  }
};

// The smaller rotation that makes (a, g; conj(g), b) diagonal; `square` is |g|^2.
template <class N>
HOST_DEVICE Rotation<N> rotation(const RealOf<N>& a, const RealOf<N>& b, const N& g, const RealOf<N>& square,
                                 const MaskOf<N>& wanted) {
  using R = RealOf<N>;
  const R one = real_number<R>(1), d = b - a;
  const R h = square_root(d * d + square * real_number<R>(4));
  const R factor = real_number<R>(2) / select(d >= R{}, d + h, d - h);
  const N tangent = select(wanted, g * factor, N{});
  const R c = one / square_root(one + square_modulus(tangent));
  return {c, tangent * c, tangent};
}

// --- singular values ------------------------------------------------------------------------------------------------

// B (m, n) := its reflections below and on the diagonal, with their tau; R goes to X (n, n), with the columns in the
// order of `order`, which holds n numbers.
template <class N, class Team>
HOST_DEVICE void factor_qr(const Team& team, N* B, N* X, RealOf<N>* tau, RealOf<N>* order, int m, int n) {
  using R = RealOf<N>;
  for (int j = team.rank(); j < n; j += team.size()) order[j] = real_number<R>(static_cast<BaseOf<R>>(j));
  team.sync();
  for (int j = 0; j < n; ++j) {
    // what is left of the columns, the largest first
    R best{}, at{};
    for (int c = j; c < n; ++c) {
      R square{};
      for (int r = j; r < m; ++r) square += square_modulus(B[r * n + c]);
      const R here = real_number<R>(static_cast<BaseOf<R>>(c));
      const auto better = c == j ? square == square : square > best;
      best = select(better, square, best);
      at = select(better, here, at);
    }
    team.sync();
    for (int c = j + 1; c < n; ++c) {
      const auto here = at == real_number<R>(static_cast<BaseOf<R>>(c));
      if (!any(here)) continue;
      for (int r = team.rank(); r < m; r += team.size()) swap_where(here, B[r * n + j], B[r * n + c]);
      for (int r = team.rank(); r < j; r += team.size()) swap_where(here, X[r * n + j], X[r * n + c]);
      if (team.rank() == 0) swap_where(here, order[j], order[c]);
    }
    team.sync();
    const Reflection<N> v = reflection(B[j * n + j], best, m - j);
    const R norm = square_root(best);
    team.sync();
    if (team.rank() == 0) {
      tau[j] = v.tau;
      B[j * n + j] = v.first;
      X[j * n + j] = -v.phase * norm;
    }
    for (int c = team.rank(); c < j; c += team.size()) X[j * n + c] = N{};
    team.sync();
    for (int c = j + 1 + team.rank(); c < n; c += team.size()) {
      N sum{};
      for (int r = j; r < m; ++r) sum += conjugate(B[r * n + j]) * B[r * n + c];
      sum = sum * v.tau;
      for (int r = j; r < m; ++r) B[r * n + c] -= B[r * n + j] * sum;
      X[j * n + c] = B[j * n + c];
    }
    team.sync();
  }
}

// Rows of X (n, n) made orthogonal, and the rows of Y, `pitch` apart, with them.
template <class N, class Team>
HOST_DEVICE void orthogonalize(const Team& team, N* X, N* Y, int n, int pitch) {
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
      for (int first = 0; first < tournament.pairs(); first += team.groups()) {
        int p = 0, q = n;
        if (first + team.group() < tournament.pairs()) tournament.pair(step, first + team.group(), p, q);
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
        team.sync();
        if (turns) {
          for (int k = team.place(); k < n; k += team.width()) turn.apply(x[k], y[k]);
          for (int k = team.place(); k < n; k += team.width()) turn.apply(Y[p * pitch + k], Y[q * pitch + k]);
        }
        team.sync();
      }
    }
    const auto again = team.largest(excess) > R{};
    if (!any(again)) return;
    done = select(again, done, never);
  }
}

// Rows in descending order of s.
template <class N, class Team>
HOST_DEVICE void sort_rows(const Team& team, RealOf<N>* s, N* X, N* Y, int n, int x_pitch, int x_length, int y_pitch,
                           int y_length) {
  for (int i = 0; i < n; ++i) {
    for (int j = i + 1; j < n; ++j) {
      const auto mask = s[j] > s[i];
      team.sync();
      if (!any(mask)) continue;
      if (team.rank() == 0) swap_where(mask, s[i], s[j]);
      for (int k = team.rank(); k < x_length; k += team.size())
        swap_where(mask, X[i * x_pitch + k], X[j * x_pitch + k]);
      for (int k = team.rank(); k < y_length; k += team.size())
        swap_where(mask, Y[i * y_pitch + k], Y[j * y_pitch + k]);
      team.sync();
    }
  }
}

// X (n, n), whose rows are orthogonal, or zero: the nearest unitary matrix. `tau` and `phases` hold n numbers.
template <class N, class Team>
HOST_DEVICE void normalize_rows(const Team& team, N* X, RealOf<N>* tau, N* phases, int n) {
  using R = RealOf<N>;
  for (int i = 0; i < n; ++i) {
    N* x = X + i * n;
    R square{};
    for (int k = i; k < n; ++k) square += square_modulus(x[k]);
    const Reflection<N> v = reflection(x[i], square, n - i);
    team.sync();
    if (team.rank() == 0) {
      tau[i] = v.tau;
      phases[i] = -v.phase;
      x[i] = v.first;
    }
    team.sync();
    for (int r = i + 1 + team.rank(); r < n; r += team.size()) {
      N* y = X + r * n;
      N sum{};
      for (int k = i; k < n; ++k) sum += y[k] * conjugate(x[k]);
      sum = sum * v.tau;
      for (int k = i; k < n; ++k) y[k] -= sum * x[k];
    }
    team.sync();
  }
  // Back again: row i of diag(phases) times the reflections i, i - 1, ..., 0. Those below are done when i is.
  for (int i = n - 1; i >= 0; --i) {
    N* x = X + i * n;
    for (int r = i + 1 + team.rank(); r < n; r += team.size()) {
      N* y = X + r * n;
      N sum{};
      for (int k = i + 1; k < n; ++k) sum += y[k] * conjugate(x[k]);
      sum = sum * tau[i];
      y[i] = -sum * x[i];
      for (int k = i + 1; k < n; ++k) y[k] -= sum * x[k];
    }
    team.sync();
    const N factor = phases[i], turned = conjugate(x[i]) * factor * tau[i];
    team.sync();
    for (int k = i + team.rank(); k < n; k += team.size()) {
      x[k] = k == i ? factor - turned * x[i] : -turned * x[k];
    }
    team.sync();
    team.sync();
  }
}

// Rows of Y (n, m), zero beyond n, times Q^H.
template <class N, class Team>
HOST_DEVICE void apply_q(const Team& team, const N* B, const RealOf<N>* tau, N* Y, int m, int n) {
  for (int i = team.rank(); i < n; i += team.size()) {
    N* y = Y + i * m;
    for (int j = n - 1; j >= 0; --j) {
      N sum{};
      for (int r = j; r < m; ++r) sum += y[r] * B[r * n + j];
      sum = sum * tau[j];
      for (int r = j; r < m; ++r) y[r] -= sum * conjugate(B[r * n + j]);
    }
  }
  team.sync();
}

// The convention for signs and phases: in each row of X, the first entry that is not small beside the largest, real and
// positive. The limit is no number that matrices met in practice are likely to have as a ratio of entries.
template <class N>
HOST_DEVICE void fix_phase(N* x, int x_length, N* y, int y_length, const RealOf<N>& poison) {
  using R = RealOf<N>;
  R largest{};
  for (int k = 0; k < x_length; ++k) {
    const R size = square_modulus(x[k]);
    largest = select(size > largest, size, largest);
  }
  largest = largest * real_number<R>(BaseOf<R>(0.1371));
  N chosen = from_real<N>(real_number<R>(1));
  for (int k = x_length - 1; k >= 0; --k) chosen = select(square_modulus(x[k]) >= largest, x[k], chosen);
  const N factor = conjugate(polar(chosen).phase);
  for (int k = 0; k < x_length; ++k) x[k] = plus_real(x[k] * factor, poison);
  for (int k = 0; k < y_length; ++k) y[k] = plus_real(y[k] * factor, poison);
}

// What the decomposition of an (m, n) matrix, m >= n, needs beside the matrix.
template <class N>
struct SvdMemory {
  N *X, *Y, *phases;
  RealOf<N>*s, *tau, *order;
};

// B (m, n), m >= n, overwritten: s, the rows of V^H in X (n, n), the rows of U^H in Y (n, m).
// of_v: whether the phases of V, or those of U, are fixed.
template <class N, class Team>
HOST_DEVICE void svd(const Team& team, N* B, const SvdMemory<N>& to, int m, int n, bool of_v) {
  using R = RealOf<N>;
  const Scaling<R> scaling = scale(team, B, m * n);
  factor_qr(team, B, to.X, to.tau, to.order, m, n);
  for (int i = team.rank(); i < n * m; i += team.size()) {
    to.Y[i] = from_real<N>(real_number<R>(BaseOf<R>(i % m == i / m ? 1 : 0)));
  }
  team.sync();
  orthogonalize(team, to.X, to.Y, n, m);
  for (int i = team.rank(); i < n; i += team.size()) {
    R square{};
    for (int k = 0; k < n; ++k) square += square_modulus(to.X[i * n + k]);
    to.s[i] = square_root(square);
  }
  team.sync();
  sort_rows(team, to.s, to.X, to.Y, n, n, n, m, n);
  apply_q(team, B, to.tau, to.Y, m, n);
  normalize_rows(team, to.X, to.tau, to.phases, n);
  // the columns back to their places
  for (int j = 0; j < n; ++j) {
    for (int c = j + 1; c < n; ++c) {
      const auto here = to.order[c] == real_number<R>(static_cast<BaseOf<R>>(j));
      team.sync();
      if (!any(here)) continue;
      if (team.rank() == 0) swap_where(here, to.order[j], to.order[c]);
      for (int i = team.rank(); i < n; i += team.size()) swap_where(here, to.X[i * n + j], to.X[i * n + c]);
      team.sync();
    }
  }
  for (int i = team.rank(); i < n; i += team.size()) {
    N *x = to.X + i * n, *y = to.Y + i * m;
    if (of_v) {
      fix_phase(x, n, y, m, scaling.poison);
    } else {
      fix_phase(y, m, x, n, scaling.poison);
    }
    to.s[i] = to.s[i] / scaling.factor + scaling.poison;
  }
  team.sync();
}

// --- eigenvalues ----------------------------------------------------------------------------------------------------

// A (n, n), of which the lower or the upper triangle counts, overwritten: L, and the rows of V^H in Y (n, n).
template <class N, class Team>
HOST_DEVICE void eigh(const Team& team, N* A, N* Y, RealOf<N>* L, int n, bool lower) {
  using R = RealOf<N>;
  // Only what is on the diagonal and above is kept.
  for (int i = team.rank(); i < n; i += team.size()) {
    A[i * (n + 1)] = from_real<N>(real_part(A[i * (n + 1)]));
    for (int j = 0; j < n; ++j) {
      if (j < i && lower) A[j * n + i] = conjugate(A[i * n + j]);
      Y[i * n + j] = from_real<N>(real_number<R>(BaseOf<R>(i == j ? 1 : 0)));
    }
  }
  team.sync();
  for (int i = team.rank(); i < n; i += team.size()) {
    for (int j = 0; j < i; ++j) A[i * n + j] = N{};
  }
  team.sync();
  const Scaling<R> scaling = scale(team, A, n * n);
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
        team.sync();
        for (int k = team.rank(); k < p; k += team.size()) turned.apply(A[k * n + p], A[k * n + q]);
        for (int k = p + 1 + team.rank(); k < q; k += team.size()) {
          N other = conjugate(A[k * n + q]);
          turn.apply(x[k], other);
          A[k * n + q] = conjugate(other);
        }
        for (int k = q + 1 + team.rank(); k < n; k += team.size()) turn.apply(x[k], y[k]);
        for (int k = team.rank(); k < n; k += team.size()) turn.apply(Y[p * n + k], Y[q * n + k]);
        if (team.rank() == 0) {
          x[p] = from_real<N>(a - moved);
          y[q] = from_real<N>(b + moved);
          x[q] = select(wanted, N{}, g);
        }
        team.sync();
      }
    }
    const auto again = team.largest(excess) > R{};
    if (!any(again)) break;
    done = select(again, done, never);
  }
  for (int i = team.rank(); i < n; i += team.size()) L[i] = -real_part(A[i * (n + 1)]);
  team.sync();
  sort_rows(team, L, A, Y, n, n, 0, n, n);
  for (int i = team.rank(); i < n; i += team.size()) {
    fix_phase(Y + i * n, n, Y, 0, scaling.poison);
    L[i] = -L[i] / scaling.factor + scaling.poison;
  }
  team.sync();
}

}  // namespace manualgrad
