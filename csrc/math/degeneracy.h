// The quotients in the derivatives of the SVD and of the Hermitian eigendecomposition, by the four rules that
// torch_manualgrad/derivatives/linalg/degeneracy.py lays down. A pair of columns i, j has
//
//   q_ij = N_ij / (s_j - s_i)   and, in the SVD,   r_ij = M_ij / (s_i + s_j).
//
// The vjp, from X = U^H gU and Y = V^H gV (an absent one is 0; the eigendecomposition has X alone):
//   N = (X - X^H + Y - Y^H) / 2,   M = (X - X^H - Y + Y^H) / 2,   inner = q + r + diag g.
// Jvp, from P = U^H dA V:
//   N = (P + P^H) / 2 off the diagonal,   M = (P - P^H) / 2,   dU = U (q + r),   dV^H = (r - q) V^H.
//
// Host and device; plain() also in lanes.
#pragma once

#include "number.h"

#include <limits>

namespace manualgrad {

// Which derivative.
template <bool Jvp, bool Svd>
struct Derivative {
  static constexpr bool kJvp = Jvp;
  static constexpr bool kSvd = Svd;
};

// As in `Degeneracy` of the Python module, with the larger size of the matrix. rtol < 0: the default.
struct SpectrumOptions {
  double rtol, atol, broadening;
  int64_t size;
};

// The magnitudes by which one spectrum is judged.
template <class R>
struct Limits {
  R tolerance, window, width;
  bool broad;
};

// The larger of two; nan if one is.
template <class R>
HOST_DEVICE R larger(const R& a, const R& b) {
  return select((a >= b) | (a != a), a, b);
}

template <class R>
HOST_DEVICE Limits<R> limits_of(const R& largest, const SpectrumOptions& options) {
  using T = BaseOf<R>;
  const double eps = static_cast<double>(std::numeric_limits<T>::epsilon());
  const auto times = [&](double factor) { return largest * real_number<R>(static_cast<T>(factor)); };
  Limits<R> limits;
  limits.broad = options.broadening > 0;
  limits.tolerance = larger(times(options.rtol < 0 ? 4 * static_cast<double>(options.size) * eps : options.rtol),
                            real_number<R>(static_cast<T>(options.atol)));
  limits.window = larger(limits.tolerance, times(square_root(eps)));
  limits.width = larger(times(options.broadening), real_number<R>(std::numeric_limits<T>::min()));
  return limits;
}

template <class N>
HOST_DEVICE N over(const N& a, const RealOf<N>& d) {
  if constexpr (NumberTraits<N>::kComplex) {
    return {a.re / d, a.im / d};
  } else {
    return a / d;
  }
}
template <class N>
HOST_DEVICE N half(const N& a) {
  return a * real_number<RealOf<N>>(BaseOf<N>(0.5));
}
// |a|, of a scalar.
template <class N>
HOST_DEVICE RealOf<N> modulus_of(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return std::hypot(a.re, a.im);
  } else {
    return absolute(a);
  }
}

// --- without rules --------------------------------------------------------------------------------------------------

// 1/d, or its replacement with broadening.
template <class R>
HOST_DEVICE R broadened(const R& d, const Limits<R>& limits) {
  const R t = d / limits.width;
  return t / (t * t + real_number<R>(1)) / limits.width;
}

// N / d, 0 for equal values.
template <class N>
HOST_DEVICE N quotient(const N& n, const RealOf<N>& d, const Limits<RealOf<N>>& limits) {
  if (limits.broad) return n * broadened(d, limits);
  return select(absolute(d) <= limits.tolerance, N{}, over(n, d));
}

// The entries (i, j) and (j, i) of X and Y, or of P and nothing.
template <class N>
struct Entries {
  N x, x_turned, y, y_turned;
};
// A pair of N and M, or of q and r.
template <class N>
struct Two {
  N difference, sum;
};

template <class D, class N>
HOST_DEVICE Two<N> numerators(const Entries<N>& at) {
  if constexpr (D::kJvp) {
    const N turned = conjugate(at.x_turned);
    return {half(at.x + turned), half(at.x - turned)};
  } else if constexpr (D::kSvd) {
    const N a = at.x - conjugate(at.x_turned), b = at.y - conjugate(at.y_turned);
    return {half(a + b), half(a - b)};
  } else {
    return {half(at.x - conjugate(at.x_turned)), N{}};
  }
}

// q_ij and r_ij of values that are apart, or broadened.
template <class D, class N>
HOST_DEVICE Two<N> plain(const Entries<N>& at, const RealOf<N>& s_i, const RealOf<N>& s_j,
                         const Limits<RealOf<N>>& limits) {
  const Two<N> n = numerators<D>(at);
  if constexpr (D::kSvd) {
    return {quotient(n.difference, s_j - s_i, limits), quotient(n.sum, s_i + s_j, limits)};
  } else {
    return {quotient(n.difference, s_j - s_i, limits), N{}};
  }
}

// --- the rules, for scalars -----------------------------------------------------------------------------------------

// The size of rounding errors in the inner product of a vector of norm 1 with one of this norm and length.
template <class T>
HOST_DEVICE T noise_of(double norm, int64_t length) {
  return static_cast<T>(8 * square_root(static_cast<double>(length)) *
                        static_cast<double>(std::numeric_limits<T>::epsilon()) * norm);
}

// One matrix. `size()` is the largest entry of the gradient elsewhere, called only if rule 3 needs it.
template <class S, class Size>
struct Rules {
  using T = RealOf<S>;
  Limits<T> limits;
  Size size;
  bool gauge_dependent = false;

  // N / d by the rules; h is the quotient of rule 2.
  HOST_DEVICE S resolve(const S& n, T d, T noise, const S& h, bool contradicted = false) {
    if (limits.broad) return quotient(n, d, limits);
    const T distance = absolute(d);
    const bool equal = distance <= limits.tolerance;
    if (distance <= limits.window && modulus_of(n - h * d) <= noise) {
      gauge_dependent |= contradicted && equal;
      return h;
    }
    if (!equal || modulus_of(n) <= 4 * size() * distance) return over(n, d);
    gauge_dependent = true;
    return S{};
  }
  HOST_DEVICE S resolve(const S& n, T d, T noise) { return resolve(n, d, noise, S{}); }

  // q_ij and r_ij, i != j. `g` is null without a cotangent of the values; otherwise `g` and `diagonal`, the diagonal of
  // H, are used.
  template <class D>
  HOST_DEVICE Two<S> pair(const Entries<S>& at, int64_t i, int64_t j, const T* s, const T* g, T h_i, T h_j, T noise) {
    const Two<S> n = numerators<D>(at);
    Two<S> result{};
    if (D::kJvp || g == nullptr) {
      result.difference = resolve(n.difference, s[j] - s[i], noise);
    } else {
      const S h = (at.x + conjugate(at.x_turned) + at.y + conjugate(at.y_turned)) * T(D::kSvd ? 0.25 : 0.5);
      const T squares = h_i * h_i + h_j * h_j, products = g[i] * h_i + g[j] * h_j, size = g[i] * g[i] + g[j] * g[j];
      const bool known = squares > noise * noise;  // else the function is ambiguous, and zero is used
      const T c = known ? products / squares : T(0);
      const double eps = static_cast<double>(std::numeric_limits<T>::epsilon());
      const T small = static_cast<T>(square_root(eps) * square_root(square_root(eps)));
      const bool fits = size - c * products <= small * size;
      result.difference =
          resolve(n.difference, s[j] - s[i], noise, h * (fits ? c : T(0)), !(fits && known) && modulus_of(h) > noise);
    }
    if constexpr (D::kSvd) result.sum = resolve(n.sum, s[i] + s[j], noise);
    return result;
  }

  // r_ii; q_ii is 0, or a matter of phase.
  template <class D>
  HOST_DEVICE S diagonal(const Entries<S>& at, T s, T noise) {
    const Two<S> n = numerators<D>(at);
    if (NumberTraits<S>::kComplex && !D::kJvp && !limits.broad) {
      const T eps = std::numeric_limits<T>::epsilon();
      gauge_dependent |= modulus_of(n.difference) > noise / square_root(eps);
    }
    if constexpr (D::kSvd && NumberTraits<S>::kComplex) return resolve(n.sum, 2 * s, 2 * noise);
    return S{};
  }
};
template <class S, class Size>
HOST_DEVICE Rules<S, Size> rules_of(const Limits<RealOf<S>>& limits, Size size) {
  return {limits, size};
}

// q_ji and r_ji from q_ij and r_ij.
template <class D, class S>
HOST_DEVICE Two<S> turned(const Two<S>& at) {
  const S q = conjugate(at.difference);
  return {D::kJvp ? -q : q, -conjugate(at.sum)};
}

// H_ii.
template <class D, class S>
HOST_DEVICE RealOf<S> spectral_diagonal(const S& x, const S& y) {
  return (real_part(x) + real_part(y)) * RealOf<S>(D::kSvd ? 0.5 : 1);
}

}  // namespace manualgrad
