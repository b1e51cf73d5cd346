// The derivative of n = (sum |x|^p)^(1/p), one element or one slice at a time, on host and device.
//
//   x_bar = sgn(x) (|x| / n)^(p - 1) g,      sgn(x) = x / |x|, 0 at 0;      a slice is what one norm was taken over.
//
// No intermediate overflows or underflows unless the result does: every factor moves the product towards the result.
// p = inf and -inf: g is shared equally among the elements whose modulus is n (or nan); the others get 0 g.
// Identity: a slice of zeros gets zeros. nan: a nan norm makes its slice nan (p other than 0, 1 and +-inf, whose
// derivatives do not contain the norm); a nan element is nan whatever p but 0.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "element.h"

namespace manualgrad {

enum class Power { kOne, kTwo, kThree, kFour, kThreeHalves, kGeneral, kExtreme };

inline Power classify(double p) {
  if (std::isinf(p)) return Power::kExtreme;
  if (p == 1) return Power::kOne;
  if (p == 2) return Power::kTwo;
  if (p == 3) return Power::kThree;
  if (p == 4) return Power::kFour;
  if (p == 1.5) return Power::kThreeHalves;
  return Power::kGeneral;
}

// What an element needs to know of its slice. kTwo, kThree, kFour: g / n = a b b. Otherwise a = g (kExtreme: g / ties).
// n is the norm (kThreeHalves: its root).
template <class T>
struct Slice {
  T a, b, n;
};

// --- modulus and sign -----------------------------------------------------------------------------------------------

template <class T>
HOST_DEVICE T modulus(T x) {
  return std::fabs(x);
}
// hypot by one division and one root: no square of an input is formed, so none overflows.
template <class T>
HOST_DEVICE T modulus(Complex<T> x) {
  const T re = std::fabs(x.re), im = std::fabs(x.im);
  const T large = re < im ? im : re, small = re < im ? re : im;
  const T ratio = small / large;
  const T value = large * std::sqrt(T(1) + ratio * ratio);
  const T both = re + im;  // nan if either is; 0 if both are, where the ratio is 0 / 0
  const bool plain = (large <= std::numeric_limits<T>::max()) & (large > T(0)) & (both == both);
  return plain ? value : both;
}

// sgn(x) times a real number, given |x|. For real x, only the sign of x matters; nan stays nan, unlike in torch.sgn.
template <class T>
HOST_DEVICE T signed_by(T x, T /*size*/, T value) {
  return x > T(0) ? value : (x < T(0) ? -value : x * value);
}
template <class T>
HOST_DEVICE Complex<T> signed_by(Complex<T> x, T size, T value) {
  const bool zero = size == T(0);
  return {zero ? T(0) * value : x.re / size * value, zero ? T(0) * value : x.im / size * value};
}

template <class T>
HOST_DEVICE T scaled(T x, T factor) {
  return x * factor;
}
template <class T>
HOST_DEVICE Complex<T> scaled(Complex<T> x, T factor) {
  return {x.re * factor, x.im * factor};
}

// --- powers ---------------------------------------------------------------------------------------------------------

template <class To, class From>
HOST_DEVICE To bits_as(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bits_as");
  To result;
  std::memcpy(static_cast<void*>(&result), &value, sizeof(To));
  return result;
}

// r^e for r in [0, inf] or nan, correct to float32; branch-free, so that loops over it vectorise. Only normal r are
// exact: quotients of float32 numbers, in double, are. r^e = 2^(e log2 r), log2 by its series in (m - 1) / (m + 1) for
// the mantissa m in [sqrt(1/2), sqrt(2)), 2^f by Taylor's for |f| <= 1/2.
HOST_DEVICE double power_for_float(double r, double e) {
  constexpr uint64_t kOne = 0x3ff0000000000000u, kRootHalf = 0x3fe6a09e667f3bcdu;
  const uint64_t bits = bits_as<uint64_t>(r);
  const uint64_t biased = (bits - kRootHalf + kOne) >> 52;  // exponent + 1023
  const double m = bits_as<double>(bits - (biased << 52) + kOne);
  const double exponent = bits_as<double>(biased | 0x4330000000000000u) - (4503599627370496.0 + 1023.0);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double series = 1.0 / 15;
  series = series * z + 1.0 / 13;
  series = series * z + 1.0 / 11;
  series = series * z + 1.0 / 9;
  series = series * z + 1.0 / 7;
  series = series * z + 1.0 / 5;
  series = series * z + 1.0 / 3;
  series = series * z + 1.0;
  double y = e * (exponent + 2.8853900817779268 * s * series);
  y = y < -1022.0 ? -1022.0 : (y > 1023.0 ? 1023.0 : y);
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer in the low bits
  const double shifted = y + kRound;
  const double f = (y - (shifted - kRound)) * 0.69314718055994531;
  double value = 1.0 / 362880;
  value = value * f + 1.0 / 40320;
  value = value * f + 1.0 / 5040;
  value = value * f + 1.0 / 720;
  value = value * f + 1.0 / 120;
  value = value * f + 1.0 / 24;
  value = value * f + 1.0 / 6;
  value = value * f + 0.5;
  value = value * f + 1.0;
  value = value * f + 1.0;
  value = bits_as<double>(bits_as<uint64_t>(value) + (bits_as<uint64_t>(shifted) << 52));
  const double infinity = std::numeric_limits<double>::infinity();
  const double at_zero = e > 0 ? 0.0 : infinity, at_infinity = e > 0 ? infinity : 0.0;
  value = r == 0.0 ? at_zero : value;
  value = r == infinity ? at_infinity : value;
  return r == r ? value : r;
}

// g (x / n)^e for x, n > 0. In double the range of float leaves room for any quotient of two floats.
HOST_DEVICE float scaled_power(float x, float n, float g, double e) {
  return static_cast<float>(power_for_float(static_cast<double>(x) / static_cast<double>(n), e) *
                            static_cast<double>(g));
}
// (x / n)^e for x, n > 0, correct to a few rounding errors of float64; branch-free as above. The quotient is never
// formed: mantissas are divided and exponents subtracted, so it may leave the range. log2 carries its rounding errors
// along (f_lo, t_lo, s_lo, lo are what the variable beside them lost), since the exponent multiplies them.
HOST_DEVICE double quotient_power(double x, double n, double e) {
  constexpr uint64_t kOne = 0x3ff0000000000000u, kRootHalf = 0x3fe6a09e667f3bcdu, kMantissa = 0x000fffffffffffffu;
  constexpr double kLift = 18014398509481984.0;  // 2^54: makes subnormal numbers normal
  const bool tiny_x = x < DBL_MIN, tiny_n = n < DBL_MIN;
  const uint64_t bits_x = bits_as<uint64_t>(tiny_x ? x * kLift : x), bits_n = bits_as<uint64_t>(tiny_n ? n * kLift : n);
  const double mx = bits_as<double>((bits_x & kMantissa) | kOne), mn = bits_as<double>((bits_n & kMantissa) | kOne);
  const double inverse_n = 1.0 / mn, q = mx * inverse_n;
  const double q_lo = std::fma(-q, mn, mx) * inverse_n;

  const uint64_t bits_q = bits_as<uint64_t>(q);
  const uint64_t biased = (bits_q - kRootHalf + kOne) >> 52;  // 1022 or 1023, 1024 after rounding
  const double m = bits_as<double>(bits_q - (biased << 52) + kOne);
  const double f_lo = q_lo * bits_as<double>((2046 - biased) << 52);
  constexpr uint64_t kOffset = 8192;
  const uint64_t exponent =
      (bits_x >> 52) + biased + kOffset + (tiny_n ? 54u : 0u) - (bits_n >> 52) - (tiny_x ? 54u : 0u);
  const double k = bits_as<double>(exponent | 0x4330000000000000u) - (4503599627370496.0 + 1023.0 + 8192.0);

  const double f = m - 1.0, t = m + 1.0, t_lo = m - (t - 1.0) + f_lo;
  const double inverse_t = 1.0 / t, s = f * inverse_t;
  const double s_lo = (std::fma(-s, t, f) - s * t_lo + f_lo) * inverse_t;
  const double z = s * s;
  double series = 1.0 / 25;
  series = series * z + 1.0 / 23;
  series = series * z + 1.0 / 21;
  series = series * z + 1.0 / 19;
  series = series * z + 1.0 / 17;
  series = series * z + 1.0 / 15;
  series = series * z + 1.0 / 13;
  series = series * z + 1.0 / 11;
  series = series * z + 1.0 / 9;
  series = series * z + 1.0 / 7;
  series = series * z + 1.0 / 5;
  series = series * z + 1.0 / 3;
  constexpr double kC = 2.8853900817779268, kC_lo = 4.0710547481862066e-17;  // 2 / ln 2
  const double head = s * kC;
  const double tail = std::fma(s, kC, -head) + s * kC_lo + (s_lo + s * (z * series)) * kC;
  const double sum = k + head, sum_lo = (k - sum) + head + tail;
  const double log2 = sum + sum_lo, log2_lo = (sum - log2) + sum_lo;

  const double y = e * log2, y_lo = std::fma(e, log2, -y) + e * log2_lo;
  const bool below = y < -1021.0, above = y > 1022.0;
  const double inside = (below | above) ? 0.0 : y;
  constexpr double kRound = 6755399441055744.0;
  const double shifted = inside + kRound;
  const double u = ((inside - (shifted - kRound)) + ((below | above) ? 0.0 : y_lo)) * 0.69314718055994531;
  double value = 1.0 / 6227020800.0;
  value = value * u + 1.0 / 479001600.0;
  value = value * u + 1.0 / 39916800.0;
  value = value * u + 1.0 / 3628800.0;
  value = value * u + 1.0 / 362880.0;
  value = value * u + 1.0 / 40320.0;
  value = value * u + 1.0 / 5040.0;
  value = value * u + 1.0 / 720.0;
  value = value * u + 1.0 / 120.0;
  value = value * u + 1.0 / 24.0;
  value = value * u + 1.0 / 6.0;
  value = value * u + 0.5;
  value = value * u + 1.0;
  value = value * u + 1.0;
  value = bits_as<double>(bits_as<uint64_t>(value) + (bits_as<uint64_t>(shifted) << 52));

  const double infinity = std::numeric_limits<double>::infinity();
  const double at_zero = e > 0 ? 0.0 : infinity, at_infinity = e > 0 ? infinity : 0.0;
  value = below ? 0.0 : value;
  value = above ? infinity : value;
  value = n > DBL_MAX ? at_zero : value;
  value = x > DBL_MAX ? at_infinity : value;
  const bool undefined = (x != x) | (n != n) | ((x > DBL_MAX) & (n > DBL_MAX));
  return undefined ? std::numeric_limits<double>::quiet_NaN() : value;
}

// The power is applied as two equal factors: it may leave the range of double when g brings it back.
HOST_DEVICE double scaled_power(double x, double n, double g, double e) {
  const double half = quotient_power(x, n, 0.5 * e);
  return g * half * half;
}

// --- one element ----------------------------------------------------------------------------------------------------

// The cotangent of x, for finite p.
template <Power P, class C, class T>
HOST_DEVICE C norm_backward_element(C x, const Slice<T>& slice, double exponent) {
  if constexpr (P == Power::kOne) {
    return signed_by(x, modulus(x), slice.a);
  } else if constexpr (P == Power::kTwo || P == Power::kThree || P == Power::kFour) {
    C result = scaled(scaled(scaled(x, slice.a), slice.b), slice.b);
    if constexpr (P != Power::kTwo) {
      const T ratio = modulus(x) / slice.n;
      result = scaled(result, ratio);
      if constexpr (P == Power::kFour) result = scaled(result, ratio);
    }
    return result;
  } else if constexpr (P == Power::kThreeHalves) {
    const T size = modulus(x);
    return signed_by(x, size, slice.a * (std::sqrt(size) / slice.n));
  } else {
    const T size = modulus(x);
    // nan must not pass for zero: a nan cotangent or norm (then a is nan) reaches every element through 0 a.
    const bool zero = (size == T(0)) | (slice.a == T(0));
    return zero ? scaled(C{}, slice.a) : signed_by(x, size, scaled_power(size, slice.n, slice.a, exponent));
  }
}

// p = +-inf: whether the modulus attains the norm.
template <class T>
HOST_DEVICE bool is_tie(T size, T norm) {
  return (size == norm) | (size != size);
}

// sgn(x) at a tie, else 0; times g / ties it is the cotangent.
template <class C, class T>
HOST_DEVICE C tie_sign(C x, T size, bool tie) {
  return signed_by(x, size, tie ? T(1) : T(0));
}

// --- one slice ------------------------------------------------------------------------------------------------------

// Where a stored norm can be relied on. The forward sums |x|^p in float or double; where the sum is so near the bottom
// of the range that terms were lost, or left it (n = 0 or inf), the norm must be computed again, in scaled form.
struct Trust {
  double low, high;
};

// S is the stored real dtype; count the number of elements of a slice.
template <class S>
inline Trust trust_range(double p, int64_t count) {
  using T = Compute<S>;
  const double stored_min = kSmallestNormal<S>;
  const double largest = static_cast<double>(std::numeric_limits<T>::max());
  // log2 of the smallest sum of which a term lost below the normal range is no more than a rounding error.
  const double smallest_sum = std::log2(static_cast<double>(std::numeric_limits<T>::min())) -
                              std::log2(static_cast<double>(std::numeric_limits<T>::epsilon())) +
                              std::log2(static_cast<double>(count));
  const double edge = std::exp2(smallest_sum / p);
  return p > 0 ? Trust{edge > stored_min ? edge : stored_min, largest}
               : Trust{stored_min, edge < largest ? edge : largest};
}

template <class T>
HOST_DEVICE bool trusted(T n, const Trust& range) {
  return n != n || (n >= static_cast<T>(range.low) && n <= static_cast<T>(range.high));
}

// One term of the scaled sum: (|x| / m)^p, m the extreme modulus, so that the largest term is 1.
template <class T>
HOST_DEVICE double scaled_term(T size, T extreme, double p) {
  const double r = static_cast<double>(size) / static_cast<double>(extreme);
  return p == 2 ? r * r : (p == 3 ? r * r * r : std::pow(r, p));
}

template <class T>
HOST_DEVICE T norm_from_scaled_sum(T extreme, double sum, double p) {
  return static_cast<T>(static_cast<double>(extreme) * std::pow(sum, 1.0 / p));
}

// What an element needs from g and n. Zero slices (n = 0) give zero whatever g is.
template <class T>
HOST_DEVICE Slice<T> norm_slice(Power power, T g, T n) {
  if (power == Power::kOne || power == Power::kExtreme) return {g, T(1), n};
  if (n == T(0)) return {T(0), T(1), T(1)};
  if (power == Power::kThreeHalves) return {g, T(1), std::sqrt(n)};
  if (power == Power::kGeneral) return {n == n ? g : n, T(1), n};
  const T c = g / n, size = std::fabs(c);
  const bool plain = size >= std::numeric_limits<T>::min() && size <= std::numeric_limits<T>::max();
  const bool finite = std::fabs(g) <= std::numeric_limits<T>::max() && n <= std::numeric_limits<T>::max();
  if (plain || !finite || g == T(0)) return {c, T(1), n};
  // g / n is not a normal number but x g / n may be: split its power of two into three factors.
  int exponent_g, exponent_n;
  const T mantissa = std::frexp(g, &exponent_g) / std::frexp(n, &exponent_n);
  const int exponent = exponent_g - exponent_n, third = exponent / 3;
  return {std::ldexp(mantissa, exponent - 2 * third), std::ldexp(T(1), third), n};
}

}  // namespace manualgrad
