// Element types: S is what memory holds, Compute<S> what arithmetic uses. No torch header is needed for float, double
// and complex numbers of them; base/dispatch.h adds the half precisions.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define HOST_DEVICE inline __attribute__((always_inline))
#else
#define HOST_DEVICE inline
#endif
// For host code that is compiled for several instruction sets: a function that is not inlined keeps the baseline's
// instructions. The second is for lambdas.
#define HOST_INLINE inline __attribute__((always_inline))
#define MANUALGRAD_INLINED __attribute__((always_inline))
// For functions that several files or many callers share. GCC leaves the upper halves of registers dirty around calls
// of functions whose definition it sees, which stalls SSE code; it also makes a copy of them for each caller.
#if defined(__clang__) || defined(__CUDACC__)
#define MANUALGRAD_NOT_INLINED __attribute__((noinline))
#else
#define MANUALGRAD_NOT_INLINED __attribute__((noipa))
#endif

namespace manualgrad {

template <class T>
struct Complex {
  T re, im;
};

template <class S>
struct ElementTraits {
  using compute = S;
  using real = S;
};
template <class T>
struct ElementTraits<Complex<T>> {
  using compute = Complex<typename ElementTraits<T>::compute>;
  using real = T;
};

template <class S>
using Compute = typename ElementTraits<S>::compute;
// The real dtype that belongs to S, as stored (norms and their cotangents), and as computed with.
template <class S>
using Real = typename ElementTraits<S>::real;
template <class S>
using RealCompute = Compute<Real<S>>;
// The smallest normal number of a real dtype, as stored.
template <class S>
inline constexpr double kSmallestNormal = static_cast<double>(std::numeric_limits<Compute<S>>::min());

template <class S>
HOST_DEVICE Compute<S> load(const S& value) {
  return static_cast<Compute<S>>(value);
}
template <class T>
HOST_DEVICE Complex<Compute<T>> load(const Complex<T>& value) {
  return {load(value.re), load(value.im)};
}
template <class S>
HOST_DEVICE void store(S& target, Compute<S> value) {
  target = static_cast<S>(value);
}
template <class T>
HOST_DEVICE void store(Complex<T>& target, Complex<Compute<T>> value) {
  store(target.re, value.re);
  store(target.im, value.im);
}

}  // namespace manualgrad
