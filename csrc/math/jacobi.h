// Shared by Jacobi's methods for small matrices: scaling, rotations, the order and the phases of the results.
//
// N is a number of number.h: of one matrix, or of as many as there are lanes. Matrices are row-major, without gaps. A
// lane takes part in a rotation only while its own matrix needs it, so that its result does not depend on the others.
// As every operation rounds separately, results are bitwise identical for one matrix, for matrices in lanes, and for
// a matrix that a warp shares.
#pragma once

#include "scaling.h"
#include "thread_group.h"

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

// --- scaling --------------------------------------------------------------------------------------------------------

// The power of two by which a matrix was multiplied, and the number to add to its results: 0, or nan.
template <class R>
struct Scaling {
  R factor, poison;
};

// Scales the entries to a modulus of at most about 1. A matrix with an inf or a nan becomes zero, and its results nan.
template <class N, class Threads>
HOST_DEVICE Scaling<RealOf<N>> scale(const Threads& threads, N* A, int count) {
  using R = RealOf<N>;
  R largest{}, poison{};
  for (int i = 0; i < count; ++i) {
    largest = larger_of(extent(A[i]), largest);
    poison += real_part(A[i]) * R{};
    if constexpr (NumberTraits<N>::kComplex) poison += A[i].im * R{};
  }
  const Scaling<R> scaling{near_reciprocal(largest), poison};
  const auto finite = scaling.poison == R{};
  threads.sync();
  for (int i = threads.rank(); i < count; i += threads.size()) A[i] = select(finite, A[i] * scaling.factor, N{});
  threads.sync();
  return scaling;
}

// --- phases ---------------------------------------------------------------------------------------------------------

// a = size * phase; if a is nearly zero, the phase is 1.
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

// --- rotations ------------------------------------------------------------------------------------------------------

// The pairs of one step of a round-robin tournament of n players, which has n - 1 or n steps.
struct Tournament {
  int n;
  HOST_DEVICE explicit Tournament(int size) : n(size) {}
  HOST_DEVICE int players() const { return n + n % 2; }
  HOST_DEVICE int steps() const { return players() - 1; }
  HOST_DEVICE int pairs() const { return players() / 2; }
  // p < q; q = n means that p is left out.
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

// --- order and phases of the results --------------------------------------------------------------------------------

// Rows in descending order of s.
template <class N, class Threads>
HOST_DEVICE void sort_rows(const Threads& threads, RealOf<N>* s, N* X, N* Y, int n, int x_pitch, int x_length,
                           int y_pitch, int y_length) {
  for (int i = 0; i < n; ++i) {
    for (int j = i + 1; j < n; ++j) {
      const auto mask = s[j] > s[i];
      threads.sync();
      if (!any(mask)) continue;
      if (threads.rank() == 0) swap_where(mask, s[i], s[j]);
      for (int k = threads.rank(); k < x_length; k += threads.size())
        swap_where(mask, X[i * x_pitch + k], X[j * x_pitch + k]);
      for (int k = threads.rank(); k < y_length; k += threads.size())
        swap_where(mask, Y[i * y_pitch + k], Y[j * y_pitch + k]);
      threads.sync();
    }
  }
}

// The convention for signs and phases: in each row of X, the first entry that is not small relative to the largest is
// real and positive. The limit, for squares, is an unlikely ratio of entries of matrices in practice.
template <class T>
HOST_DEVICE constexpr T phase_limit() {
  return T(0.1371);
}
template <class N>
HOST_DEVICE void fix_phase(N* x, int x_length, N* y, int y_length, const RealOf<N>& poison) {
  using R = RealOf<N>;
  R largest{};
  for (int k = 0; k < x_length; ++k) {
    const R size = square_modulus(x[k]);
    largest = select(size > largest, size, largest);
  }
  largest = largest * real_number<R>(phase_limit<BaseOf<R>>());
  N chosen = from_real<N>(real_number<R>(1));
  for (int k = x_length - 1; k >= 0; --k) chosen = select(square_modulus(x[k]) >= largest, x[k], chosen);
  const N factor = conjugate(polar(chosen).phase);
  for (int k = 0; k < x_length; ++k) x[k] = plus_real(x[k] * factor, poison);
  for (int k = 0; k < y_length; ++k) y[k] = plus_real(y[k] * factor, poison);
}

}  // namespace manualgrad
