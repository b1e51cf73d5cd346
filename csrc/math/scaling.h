// Powers of two by which small matrices are scaled, so that squares neither overflow nor vanish.
#pragma once

#include "number.h"

#include <cstring>

namespace manualgrad {

template <class T>
struct FloatBits;
template <>
struct FloatBits<float> {
  using integer = int32_t;
  static constexpr int kMantissa = 23, kBias = 127;
};
template <>
struct FloatBits<double> {
  using integer = int64_t;
  static constexpr int kMantissa = 52, kBias = 1023;
};

// A power of two near 1 / a, for a >= 0: finite and normal, so that dividing by it is exact unless a value underflows.
template <class T>
HOST_DEVICE T near_reciprocal(const T& a) {
  using Bits = FloatBits<T>;
  typename Bits::integer bits;
  std::memcpy(&bits, &a, sizeof(bits));
  bits = 2 * Bits::kBias - (bits >> Bits::kMantissa);
  bits = (bits < 1 ? 1 : bits) << Bits::kMantissa;
  T result;
  std::memcpy(&result, &bits, sizeof(bits));
  return result;
}
#if !defined(__CUDACC__)
template <class T, int B>
HOST_DEVICE Lanes<T, B> near_reciprocal(const Lanes<T, B>& a) {
  using Bits = FloatBits<T>;
  using Integers = typename LaneMask<T, B>::values;
  const Integers power = 2 * Bits::kBias - ((Integers)a.v >> Bits::kMantissa);
  return {(typename Lanes<T, B>::values)((power < 1 ? Integers{} + 1 : power) << Bits::kMantissa)};
}
#endif

// The larger of |re| and |im|.
template <class N>
HOST_DEVICE RealOf<N> extent(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    const RealOf<N> re = absolute(a.re), im = absolute(a.im);
    return select(re > im, re, im);
  } else {
    return absolute(a);
  }
}

}  // namespace manualgrad
