// Numbers in lanes: each lane holds the number of another matrix. Host code.
#pragma once

#include <cstring>

#include "../../math/matrix.h"

namespace manualgrad {

template <class S, int Bytes>
struct LanesOf {
  using type = Lanes<S, Bytes>;
  using base = S;
  static constexpr int kCount = kLanes<S, Bytes>;
  static constexpr int kReals = 1;  // in a number
};
template <class S, int Bytes>
struct LanesOf<const S, Bytes> : LanesOf<S, Bytes> {};
template <class T, int Bytes>
struct LanesOf<Complex<T>, Bytes> {
  using type = Complex<Lanes<T, Bytes>>;
  using base = T;
  static constexpr int kCount = kLanes<T, Bytes>;
  static constexpr int kReals = 2;
};
// How many lanes a number has.
template <class N>
constexpr int kLanesIn = RealOf<N>::kCount;

template <class T, int B>
HOST_INLINE void set_lane(Lanes<T, B>& number, int lane, const T& value) {
  number.v[lane] = value;
}
template <class T, int B>
HOST_INLINE void set_lane(Complex<Lanes<T, B>>& number, int lane, const Complex<T>& value) {
  number.re.v[lane] = value.re;
  number.im.v[lane] = value.im;
}
template <class T, int B>
HOST_INLINE T get_lane(const Lanes<T, B>& number, int lane) {
  return number.v[lane];
}
template <class T, int B>
HOST_INLINE Complex<T> get_lane(const Complex<Lanes<T, B>>& number, int lane) {
  return {number.re.v[lane], number.im.v[lane]};
}

// Numbers from as many integers.
template <class N>
HOST_INLINE N from_integers(const int* from) {
  typedef int32_t integers __attribute__((vector_size(kLanesIn<N> * 4)));
  integers v;
  std::memcpy(&v, from, sizeof(v));
  return {__builtin_convertvector(v, typename N::values)};
}

template <class N>
HOST_INLINE auto to_integers(const N& from) {
  using Integers = Lanes<int32_t, kLanesIn<N> * 4>;
  return Integers(__builtin_convertvector(from.v, typename Integers::values));
}

}  // namespace manualgrad
