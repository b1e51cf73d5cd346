// Operations on a segment, one number (a scalar, or Lanes across columns) at a time, on host and device.
//
// An operation gathers its segment's rows into a and b, in one pass over them or in two; `finish` turns these into the
// values that each row of the result needs, and `apply` computes that row. Without an `apply`, a is the result.
//
//   sum:                   a = sum x
//   amax:                  a = max x, nan if there is one
//   softmax:               a = max x,   b = sum exp(x - a),     y = exp(x - a) / b
//   log_softmax:           a = max x,   b = sum exp(x - a),     y = x - a - log b
//   softmax_backward:      a = sum y g,                         y (g - a)
//   log_softmax_backward:  a = sum g,                           g - exp(y) a
//
// Parts of a segment merge: sums add, and sums of exponentials are brought to the larger maximum first.
#pragma once

#include "number.h"

#include "norm.h"

namespace manualgrad {

// --- exponential and logarithm --------------------------------------------------------------------------------------

template <class N>
struct IntegersOf {
  using type = std::conditional_t<sizeof(N) == 4, uint32_t, uint64_t>;
};
#if !defined(__CUDACC__)
template <class T, int B>
struct IntegersOf<Lanes<T, B>> {
  using type = typename LaneMask<T, B>::values;
};
#endif

// ln 2 in two parts, of which the first has trailing zeros: its multiples by an exponent are exact. Adding `round`,
// 1.5 times a power of two, leaves an integer in the low bits. Beyond the bounds the result is 0 or infinite.
template <class T>
struct Floating;
template <>
struct Floating<float> {
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr int32_t kRoundBits = 0x4b400000, kOne = 0x3f800000, kRootHalf = 0x3f3504f3, kInfinity = 0x7f800000,
                           kNoSign = 0x7fffffff;
  static constexpr float kRound = 12582912.0f, kLowest = -104.0f, kHighest = 89.0f;
  static constexpr float kLn2 = 0.693359375f, kLn2Rest = -2.12194440e-4f;
};
template <>
struct Floating<double> {
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr int64_t kRoundBits = 0x4338000000000000, kOne = 0x3ff0000000000000, kRootHalf = 0x3fe6a09e667f3bcd,
                           kInfinity = 0x7ff0000000000000, kNoSign = 0x7fffffffffffffff;
  static constexpr double kRound = 6755399441055744.0, kLowest = -746.0, kHighest = 710.0;
  static constexpr double kLn2 = 6.93147180369123816490e-01, kLn2Rest = 1.90821492927058770002e-10;
};

// Tests the bits: comparing a vector with itself is compiled to one comparison per lane.
template <class N>
HOST_DEVICE MaskOf<N> is_nan(const N& x) {
  using F = Floating<BaseOf<N>>;
  if constexpr (std::is_same_v<N, BaseOf<N>>) {
    return x != x;
  } else {
    return {(bits_as<typename IntegersOf<N>::type>(x) & F::kNoSign) > F::kInfinity};
  }
}

// c[0] + c[1] x + ...
template <class N, int Count>
HOST_DEVICE N polynomial(const N& x, const BaseOf<N> (&c)[Count]) {
  N value = real_number<N>(c[Count - 1]);
  for (int i = Count - 2; i >= 0; --i) value = value * x + real_number<N>(c[i]);
  return value;
}

// e^x = 2^exponent value, with value = e^r and |r| <= ln 2 / 2, where x is not far beyond the bounds. e^r is
// 1 + r + r^2 q(r): q is the best approximation of its degree for float, Taylor's for double. Branch-free.
template <class N>
struct ScaledExponential {
  using T = BaseOf<N>;
  using F = Floating<T>;
  using I = typename IntegersOf<N>::type;
  N value;
  I exponent;

  HOST_DEVICE explicit ScaledExponential(const N& x) {
    const N round = real_number<N>(F::kRound);
    const N shifted = x * real_number<N>(T(1.4426950408889634)) + round;
    const N n = shifted - round;
    const N r = (x - n * real_number<N>(F::kLn2)) - n * real_number<N>(F::kLn2Rest);
    N q;
    if constexpr (std::is_same_v<T, float>) {
      constexpr float kQ[] = {0.49999993f, 0.16666520f, 0.041668391f, 0.0083687451f, 0.0013814540f};
      q = polynomial(r, kQ);
    } else {
      constexpr double kQ[] = {1.0 / 2,       1.0 / 6,        1.0 / 24,        1.0 / 120,
                               1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                               1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
      q = polynomial(r, kQ);
    }
    value = real_number<N>(T(1)) + (r + r * r * q);
    exponent = bits_as<I>(shifted) - F::kRoundBits;
  }

  HOST_DEVICE static N power_of_two(const I& biased) { return bits_as<N>(static_cast<I>(biased << F::kMantissa)); }
};

// e^x to 1 or 2 units in the last place, subnormal results included. 2^n may leave the range on its own: it is applied
// as two factors.
template <class N>
HOST_DEVICE N exponential(const N& x) {
  using F = Floating<BaseOf<N>>;
  using E = ScaledExponential<N>;
  const N lowest = real_number<N>(F::kLowest), highest = real_number<N>(F::kHighest);
  const N above = select(x < lowest, lowest, x);
  const E e(select(above > highest, highest, above));
  const typename E::I biased = e.exponent + 2 * F::kBias, half = biased >> 1;
  return e.value * E::power_of_two(half) * E::power_of_two(biased - half);
}

// The same of an x that is not positive, or nan.
template <class N>
HOST_DEVICE N small_exponential(const N& x) {
  using F = Floating<BaseOf<N>>;
  using E = ScaledExponential<N>;
  constexpr int kLift = 64;  // more than subnormal numbers have bits
  const N lowest = real_number<N>(F::kLowest);
  const E e(select(x < lowest, lowest, x));
  constexpr BaseOf<N> kBack = BaseOf<N>(1) / (uint64_t{1} << (kLift - 1)) / 2;
  return e.value * E::power_of_two(e.exponent + (F::kBias + kLift)) * real_number<N>(kBack);
}

// ln x of a normal x > 0, or nan, to a few units in the last place. x = 2^k m with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 (s + s^3 / 3 + s^5 / 5 + ...) with s = (m - 1) / (m + 1).
template <class N>
HOST_DEVICE N logarithm(const N& x) {
  using T = BaseOf<N>;
  using F = Floating<T>;
  using I = typename IntegersOf<N>::type;
  const I bits = bits_as<I>(x), k = (bits + (F::kOne - F::kRootHalf)) >> F::kMantissa;  // exponent + bias
  const N m = bits_as<N>(bits - (k << F::kMantissa) + F::kOne), one = real_number<N>(T(1));
  const N n = bits_as<N>(k + F::kRoundBits) - real_number<N>(F::kRound + T(F::kBias));
  const N s = (m - one) / (m + one), z = s * s;
  N series;
  if constexpr (std::is_same_v<T, float>) {
    constexpr float kSeries[] = {2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9};
    series = polynomial(z, kSeries);
  } else {
    constexpr double kSeries[] = {2.0 / 3,  2.0 / 5,  2.0 / 7,  2.0 / 9,  2.0 / 11,
                                  2.0 / 13, 2.0 / 15, 2.0 / 17, 2.0 / 19, 2.0 / 21};
    series = polynomial(z, kSeries);
  }
  const N rest = s * z * series + n * real_number<N>(F::kLn2Rest);
  const N value = n * real_number<N>(F::kLn2) + (s + s + rest);
  return select(is_nan(x), x, value);
}

// --- how rows are gathered ------------------------------------------------------------------------------------------

struct Added {
  template <class N>
  HOST_DEVICE static N none() {
    return real_number<N>(0);
  }
  template <class N>
  HOST_DEVICE static N both(const N& a, const N& b) {
    return a + b;
  }
};

struct Largest {
  template <class N>
  HOST_DEVICE static N none() {
    return real_number<N>(-std::numeric_limits<BaseOf<N>>::infinity());
  }
  template <class N>
  HOST_DEVICE static N both(const N& a, const N& b) {
    return select(b > a, b, a);
  }
};

// nan is the largest. The bits of a nan are set in the result: two selections in a row would be compiled lane by lane.
struct LargestOrNan : Largest {
  template <class N>
  HOST_DEVICE static N both(const N& a, const N& b) {
    using I = typename IntegersOf<N>::type;
    const N largest = Largest::both(a, b), none = real_number<N>(0);
    return bits_as<N>(static_cast<I>(bits_as<I>(largest) | bits_as<I>(select(is_nan(b), b, none))));
  }
};

// --- operations -----------------------------------------------------------------------------------------------------

template <class N>
struct Gathered {
  N a, b;
};

// What most operations have in common: one input, one pass, and a result for each row.
template <class How>
struct Operation {
  using First = How;
  static constexpr int kInputs = 1, kPasses = 1;
  static constexpr bool kRows = true;
  // Whether `apply` takes what the second pass made of x, instead of x.
  static constexpr bool kKeeps = false;

  template <class N>
  HOST_DEVICE static N first(const N& x, const N&) {
    return x;
  }
  template <class N>
  HOST_DEVICE static Gathered<N> merge(const Gathered<N>& one, const Gathered<N>& other) {
    return {How::both(one.a, other.a), one.b};
  }
  template <class N>
  HOST_DEVICE static Gathered<N> finish(const Gathered<N>& of) {
    return of;
  }
  // The values that `apply` needs in a part, given the part's own a and the finished values of the whole segment.
  template <class N>
  HOST_DEVICE static Gathered<N> of_part(const Gathered<N>& finished, const N&) {
    return finished;
  }
};

struct SegmentSum : Operation<Added> {
  static constexpr bool kRows = false;
};

struct SegmentAmax : Operation<LargestOrNan> {
  static constexpr bool kRows = false;
};

// x is shifted by the maximum, but by 0 if that is -inf: such a part of a segment adds nothing to the others, and if
// the whole segment is such, x - a is nan. nan does not count in the maximum, and comes back with the sum.
struct Exponentials : Operation<Largest> {
  static constexpr int kPasses = 2;

  template <class N>
  HOST_DEVICE static N shift(const N& a) {
    return select(a == Largest::none<N>(), real_number<N>(0), a);
  }
  template <class N>
  HOST_DEVICE static N second(const N& x, const N& shift) {
    return small_exponential(x - shift);
  }
  template <class N>
  HOST_DEVICE static Gathered<N> merge(const Gathered<N>& one, const Gathered<N>& other) {
    const N a = Largest::both(one.a, other.a), by = shift(a);
    return {a, one.b * small_exponential(one.a - by) + other.b * small_exponential(other.a - by)};
  }
};

struct SegmentSoftmax : Exponentials {
  static constexpr bool kKeeps = true;

  template <class N>
  HOST_DEVICE static Gathered<N> finish(const Gathered<N>& of) {
    return {of.a, real_number<N>(1) / of.b};
  }
  template <class N>
  HOST_DEVICE static Gathered<N> of_part(const Gathered<N>& finished, const N& a) {
    return {a, small_exponential(a - shift(finished.a)) * finished.b};
  }
  template <class N>
  HOST_DEVICE static N apply(const N& kept, const N&, const Gathered<N>& of) {
    return kept * of.b;
  }
};

struct SegmentLogSoftmax : Exponentials {
  template <class N>
  HOST_DEVICE static Gathered<N> finish(const Gathered<N>& of) {
    return {of.a, logarithm(of.b)};
  }
  template <class N>
  HOST_DEVICE static N apply(const N& x, const N&, const Gathered<N>& of) {
    return x - of.a - of.b;
  }
};

// The inputs are g and y.
struct SoftmaxBackward : Operation<Added> {
  static constexpr int kInputs = 2;

  template <class N>
  HOST_DEVICE static N first(const N& g, const N& y) {
    return y * g;
  }
  template <class N>
  HOST_DEVICE static N apply(const N& g, const N& y, const Gathered<N>& of) {
    return y * (g - of.a);
  }
};

struct LogSoftmaxBackward : Operation<Added> {
  static constexpr int kInputs = 2;

  template <class N>
  HOST_DEVICE static N apply(const N& g, const N& y, const Gathered<N>& of) {
    return g - exponential(y) * of.a;
  }
};

}  // namespace manualgrad
