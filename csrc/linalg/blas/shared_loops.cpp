// The loops that most matrix kernels share; the contract is in shared_loops.h.
#include "shared_loops.h"

#include <tuple>

namespace manualgrad {

template <class Body, class... Args>
void shared_baseline(const Args&... args) {
  Body::run(args...);
}
#if defined(MANUALGRAD_MULTIVERSION)
template <class Body, class... Args>
MANUALGRAD_AVX512 void shared_avx512(const Args&... args) {
  Body::run(args...);
}
template <class Body, class... Args>
MANUALGRAD_AVX2 void shared_avx2(const Args&... args) {
  Body::run(args...);
}
template <class Body, class... Args>
MANUALGRAD_SMALL void shared_small(const Args&... args) {
  Body::run(args...);
}
#endif

namespace {

// --- instantiations ----------------------------------------------------------------------------------------------

template <class N, Factor... Factors>
constexpr auto steps() {
  using Vector = StridedVector<N>;
  using From = StridedVector<const N>;
  using Matrix = StridedMatrix<const N>;
  constexpr int kBytes = kVectorBytes<N>;
  return std::tuple(
      &run_shared_native<kBytes, Step<Sum::kSubtract, Factors>, Vector, From, Matrix, int, int, N>...,
      &run_shared_native<kBytes, Step<Sum::kSubtract, Factors>, Vector, From, Matrix, int, int, Unscaled>...);
}

template <class N, class... Products>
constexpr auto products() {
  using Matrix = StridedMatrix<const N>;
  return std::tuple(&run_shared_native<kVectorBytes<N>, Products, Matrix, Matrix, int, int, int, N*>...);
}

template <Sum How, Factor OfA = Factor::kPlain, Factor OfB = Factor::kPlain>
using Of = Product<How, OfA, OfB>;

template <class N>
constexpr auto plain_products() {
  return products<N, Of<Sum::kReplace>, Of<Sum::kReplaceNegative>, Of<Sum::kAdd>, Of<Sum::kSubtract>>();
}

template <class T>  // float, double, or lanes of them
constexpr auto arithmetic() {
  using C = Complex<T>;
  return std::tuple(
      steps<T, Factor::kPlain>(), plain_products<T>(), steps<C, Factor::kPlain, Factor::kConjugate>(),
      plain_products<C>(),
      products<C, Of<Sum::kReplace, Factor::kConjugate>, Of<Sum::kReplace, Factor::kPlain, Factor::kConjugate>>());
}

template <class T, int Bytes>
constexpr auto tiles() {
  using A = StridedMatrix<const T>;
  using B = Rows<const T>;
  return std::tuple(
      &run_shared_native<Bytes, Multiply<T, Bytes, false>, A, B, int64_t, int64_t, int64_t, Rows<T>, bool, bool>,
      &run_shared_native<Bytes, Multiply<T, Bytes, true>, A, B, int64_t, int64_t, int64_t, Rows<T>, bool, bool>,
      &run_shared_native<Bytes, SolveLower<T, Bytes>, A, T*, int64_t, int64_t, Rows<T>, bool>);
}

template <int Bytes, class... S>
constexpr auto vector_products() {
  return std::tuple(
      &run_shared_native<Bytes, VectorProduct<S, Bytes>, View<S>, View<S>, int64_t, int64_t, int64_t, bool, S*>...);
}

template <int Bytes>
constexpr auto in_vectors() {
  return std::tuple(tiles<float, Bytes>(), tiles<double, Bytes>(),
                    vector_products<Bytes, float, double, Complex<float>, Complex<double>>());
}

template <int Bytes>
constexpr auto in_lanes() {
  return std::tuple(arithmetic<Lanes<float, Bytes>>(), arithmetic<Lanes<double, Bytes>>());
}

#if defined(MANUALGRAD_MULTIVERSION)
[[gnu::used]] const auto kInstances = std::tuple(arithmetic<float>(), arithmetic<double>(), in_lanes<32>(),
                                                 in_lanes<64>(), in_vectors<16>(), in_vectors<32>(), in_vectors<64>());
#else
[[gnu::used]] const auto kInstances =
    std::tuple(arithmetic<float>(), arithmetic<double>(), in_lanes<16>(), in_vectors<16>());
#endif

}  // namespace
}  // namespace manualgrad
