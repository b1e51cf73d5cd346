// The numbers for the arithmetic of small matrices, which is written once for all of them:
//   a scalar (float, double) or Complex of it: one matrix at a time (a CUDA thread, or a matrix too large for lanes);
//   Lanes<T> or Complex<Lanes<T>>: as many matrices at once as a vector of the processor has places (host only).
// Comparisons of Lanes give masks, one entry per lane, which select() takes; of scalars they give bool.
#pragma once

#include <cmath>
#include <cstring>

#include "element.h"

namespace manualgrad {

#if !defined(__CUDACC__)
// Everything here is inlined, so the calling convention of vectors, which depends on the instruction set, does not
// matter.
#pragma GCC diagnostic ignored "-Wpsabi"

// The bytes of the widest vectors there are. Code compiled for narrower vectors uses lanes of their width: GCC splits a
// vector that is too wide only in registers, and spills it to memory elsewhere.
constexpr int kLaneBytes = 64;
template <class T, int Bytes = kLaneBytes>
constexpr int kLanes = Bytes / static_cast<int>(sizeof(T));

template <class T, int Bytes = kLaneBytes>
struct LaneMask {
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> values __attribute__((vector_size(Bytes)));
  values v;
};
template <class T, int Bytes = kLaneBytes>
struct Lanes {
  typedef T values __attribute__((vector_size(Bytes)));
  static constexpr int kCount = kLanes<T, Bytes>;
  values v;

  Lanes() = default;
  HOST_DEVICE Lanes(const values& from) : v(from) {}
  // GCC copies a plain struct of 32 bytes in halves, through memory, and then stalls until both are stored.
  HOST_DEVICE Lanes(const Lanes& from) : v(from.v) {}
  HOST_DEVICE Lanes& operator=(const Lanes& from) {
    v = from.v;
    return *this;
  }
};

#define MANUALGRAD_LANE_OPERATOR(op)                                                 \
  template <class T, int B>                                                          \
  HOST_DEVICE Lanes<T, B> operator op(const Lanes<T, B>& a, const Lanes<T, B>& b) {  \
    return {a.v op b.v};                                                             \
  }                                                                                  \
  template <class T, int B>                                                          \
  HOST_DEVICE Lanes<T, B>& operator op## = (Lanes<T, B> & a, const Lanes<T, B>& b) { \
    a.v = a.v op b.v;                                                                \
    return a;                                                                        \
  }
MANUALGRAD_LANE_OPERATOR(+)
MANUALGRAD_LANE_OPERATOR(-)
MANUALGRAD_LANE_OPERATOR(*)
MANUALGRAD_LANE_OPERATOR(/)
#undef MANUALGRAD_LANE_OPERATOR
template <class T, int B>
HOST_DEVICE Lanes<T, B> operator-(const Lanes<T, B>& a) {
  return {-a.v};
}

#define MANUALGRAD_LANE_COMPARISON(op)                                                 \
  template <class T, int B>                                                            \
  HOST_DEVICE LaneMask<T, B> operator op(const Lanes<T, B>& a, const Lanes<T, B>& b) { \
    return {a.v op b.v};                                                               \
  }
MANUALGRAD_LANE_COMPARISON(<)
MANUALGRAD_LANE_COMPARISON(<=)
MANUALGRAD_LANE_COMPARISON(>)
MANUALGRAD_LANE_COMPARISON(>=)
MANUALGRAD_LANE_COMPARISON(==)
MANUALGRAD_LANE_COMPARISON(!=)
#undef MANUALGRAD_LANE_COMPARISON
template <class T, int B>
HOST_DEVICE LaneMask<T, B> operator&(const LaneMask<T, B>& a, const LaneMask<T, B>& b) {
  return {a.v & b.v};
}
template <class T, int B>
HOST_DEVICE LaneMask<T, B> operator|(const LaneMask<T, B>& a, const LaneMask<T, B>& b) {
  return {a.v | b.v};
}
template <class T, int B>
HOST_DEVICE LaneMask<T, B> operator!(const LaneMask<T, B>& a) {
  return {~a.v};
}
#endif

// --- what a number is made of ---------------------------------------------------------------------------------------

// Real<N>: the real number type; Scalar<N>: the element type in memory; Mask<N>: what a comparison gives.
template <class N>
struct NumberTraits {
  using real = N;
  using scalar = N;
  using mask = bool;
  static constexpr bool kComplex = false;
};
template <class R>
struct NumberTraits<Complex<R>> {
  using real = R;
  using scalar = Complex<typename NumberTraits<R>::scalar>;
  using mask = typename NumberTraits<R>::mask;
  static constexpr bool kComplex = true;
};
#if !defined(__CUDACC__)
template <class T, int B>
struct NumberTraits<Lanes<T, B>> {
  using real = Lanes<T, B>;
  using scalar = T;
  using mask = LaneMask<T, B>;
  static constexpr bool kComplex = false;
};
#endif
template <class N>
using RealOf = typename NumberTraits<N>::real;
template <class N>
using ScalarOf = typename NumberTraits<N>::scalar;
template <class N>
using MaskOf = typename NumberTraits<N>::mask;
// The real scalar in memory: float or double.
template <class N>
using BaseOf = ScalarOf<RealOf<N>>;

#if !defined(__CUDACC__)
// The bytes of the vectors that this number is made of; fewer than 16 where it is a scalar.
template <class N>
inline constexpr int kVectorBytes = sizeof(RealOf<N>);
#endif

// A real number with this value, in every lane.
template <class R>
HOST_DEVICE R real_number(BaseOf<R> value) {
  if constexpr (std::is_same_v<R, BaseOf<R>>) {
    return value;
  } else {
    return {typename R::values{} + value};
  }
}

#if !defined(__CUDACC__)
template <class N>
HOST_DEVICE N load_lanes(const BaseOf<N>* from) {
  N value;
  std::memcpy(&value.v, from, sizeof(value.v));
  return value;
}

template <class N>
HOST_DEVICE void store_lanes(BaseOf<N>* to, const N& value) {
  std::memcpy(to, &value.v, sizeof(value.v));
}
#endif

// --- complex arithmetic ---------------------------------------------------------------------------------------------

template <class R>
HOST_DEVICE Complex<R> operator+(const Complex<R>& a, const Complex<R>& b) {
  return {a.re + b.re, a.im + b.im};
}
template <class R>
HOST_DEVICE Complex<R> operator-(const Complex<R>& a, const Complex<R>& b) {
  return {a.re - b.re, a.im - b.im};
}
template <class R>
HOST_DEVICE Complex<R> operator-(const Complex<R>& a) {
  return {-a.re, -a.im};
}
template <class R>
HOST_DEVICE Complex<R> operator*(const Complex<R>& a, const Complex<R>& b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class R>
HOST_DEVICE Complex<R> operator*(const Complex<R>& a, const R& b) {
  return {a.re * b, a.im * b};
}
template <class R>
HOST_DEVICE Complex<R>& operator+=(Complex<R>& a, const Complex<R>& b) {
  return a = a + b;
}
template <class R>
HOST_DEVICE Complex<R>& operator-=(Complex<R>& a, const Complex<R>& b) {
  return a = a - b;
}

template <class N>
HOST_DEVICE N conjugate(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return {a.re, -a.im};
  } else {
    return a;
  }
}
template <class N>
HOST_DEVICE RealOf<N> real_part(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return a.re;
  } else {
    return a;
  }
}
template <class N>
HOST_DEVICE MaskOf<N> is_zero(const N& a) {
  const RealOf<N> zero = RealOf<N>{};
  if constexpr (NumberTraits<N>::kComplex) {
    return (a.re == zero) & (a.im == zero);
  } else {
    return a == zero;
  }
}
template <class N>
HOST_DEVICE N from_real(const RealOf<N>& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return {a, RealOf<N>{}};
  } else {
    return a;
  }
}
// |a|^2, without regard to overflow.
template <class N>
HOST_DEVICE RealOf<N> square_modulus(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    return a.re * a.re + a.im * a.im;
  } else {
    return a * a;
  }
}

// --- functions and choices ------------------------------------------------------------------------------------------

HOST_DEVICE float square_root(float a) { return std::sqrt(a); }
HOST_DEVICE double square_root(double a) { return std::sqrt(a); }
HOST_DEVICE float absolute(float a) { return std::fabs(a); }
HOST_DEVICE double absolute(double a) { return std::fabs(a); }
HOST_DEVICE bool any(bool mask) { return mask; }

// Chooses between values: a choice between two places in memory would keep an array out of registers on a GPU.
template <class N>
HOST_DEVICE N select(bool mask, const N& yes, const N& no) {
  const N first = yes, second = no;
  return mask ? N(first) : N(second);
}

#if !defined(__CUDACC__)
template <class T, int B>
HOST_DEVICE Lanes<T, B> select(const LaneMask<T, B>& mask, const Lanes<T, B>& yes, const Lanes<T, B>& no) {
  return {mask.v ? yes.v : no.v};
}
template <class T, int B>
HOST_DEVICE Complex<Lanes<T, B>> select(const LaneMask<T, B>& mask, const Complex<Lanes<T, B>>& yes,
                                        const Complex<Lanes<T, B>>& no) {
  return {select(mask, yes.re, no.re), select(mask, yes.im, no.im)};
}
template <class T, int B>
HOST_DEVICE Lanes<T, B> square_root(const Lanes<T, B>& a) {
  Lanes<T, B> result;
  for (int w = 0; w < kLanes<T, B>; ++w) result.v[w] = std::sqrt(a.v[w]);
  return result;
}
template <class T, int B>
HOST_DEVICE Lanes<T, B> absolute(const Lanes<T, B>& a) {
  return {a.v < 0 ? -a.v : a.v};
}
template <class T, int B>
HOST_DEVICE bool any(const LaneMask<T, B>& mask) {
  uint64_t words[B / 8], found = 0;  // lane by lane takes longer
  std::memcpy(words, &mask.v, B);
  for (int i = 0; i < B / 8; ++i) found |= words[i];
  return found != 0;
}
#endif

template <class N>
HOST_DEVICE void swap_where(const MaskOf<N>& mask, N& a, N& b) {
  const N first = a, second = b;
  a = select(mask, second, first);
  b = select(mask, first, second);
}

// 1 / a. Of a complex number by the smaller over the larger part, so that |a|^2 cannot overflow.
template <class N>
HOST_DEVICE N reciprocal(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    using R = RealOf<N>;
    const auto wide = absolute(a.re) >= absolute(a.im);
    const R big = select(wide, a.re, a.im), small = select(wide, a.im, a.re);
    const R ratio = small / big, scale = reciprocal(big + small * ratio);
    return {select(wide, scale, ratio * scale), -select(wide, ratio * scale, scale)};
  } else {
    return real_number<N>(1) / a;
  }
}

}  // namespace manualgrad
