// The loops that most kernels of matrices have in common: compiled once, in shared_loops.cpp. Host code.
#pragma once

#include "../math/product.h"
#include "cached_matrix.h"
#include "vector_product.h"

namespace manualgrad {

#define MANUALGRAD_SHARED_STEP(prefix, run, N, Of, Scale)                                                    \
  prefix template void run<Step<Sum::kSubtract, Of>>(const StridedVector<N>&, const StridedVector<const N>&, \
                                                     const StridedMatrix<const N>&, const int&, const int&,  \
                                                     const Scale&);
#define MANUALGRAD_SHARED_PRODUCT(prefix, run, N, How, OfA, OfB)                                                      \
  prefix template void run<Product<Sum::How, OfA, OfB>>(const StridedMatrix<const N>&, const StridedMatrix<const N>&, \
                                                        const int&, const int&, const int&, N* const&);
#define MANUALGRAD_SHARED_REAL(prefix, run, N)                                                \
  MANUALGRAD_SHARED_STEP(prefix, run, N, Factor::kPlain, N)                                   \
  MANUALGRAD_SHARED_STEP(prefix, run, N, Factor::kPlain, Unscaled)                            \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kReplace, Factor::kPlain, Factor::kPlain)         \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kReplaceNegative, Factor::kPlain, Factor::kPlain) \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kAdd, Factor::kPlain, Factor::kPlain)             \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kSubtract, Factor::kPlain, Factor::kPlain)
#define MANUALGRAD_SHARED_COMPLEX(prefix, run, N)                                         \
  MANUALGRAD_SHARED_REAL(prefix, run, N)                                                  \
  MANUALGRAD_SHARED_STEP(prefix, run, N, Factor::kConjugate, N)                           \
  MANUALGRAD_SHARED_STEP(prefix, run, N, Factor::kConjugate, Unscaled)                    \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kReplace, Factor::kConjugate, Factor::kPlain) \
  MANUALGRAD_SHARED_PRODUCT(prefix, run, N, kReplace, Factor::kPlain, Factor::kConjugate)
#define MANUALGRAD_SHARED_NUMBERS(prefix, run, F, D) \
  MANUALGRAD_SHARED_REAL(prefix, run, F)             \
  MANUALGRAD_SHARED_REAL(prefix, run, D)             \
  MANUALGRAD_SHARED_COMPLEX(prefix, run, Complex<F>) \
  MANUALGRAD_SHARED_COMPLEX(prefix, run, Complex<D>)

#define MANUALGRAD_SHARED_MULTIPLY(prefix, run, T, Bytes, Subtract)                                           \
  prefix template void run<Multiply<T, Bytes, Subtract>>(const StridedMatrix<const T>&, const Rows<const T>&, \
                                                         const int64_t&, const int64_t&, const int64_t&,      \
                                                         const Rows<T>&, const bool&, const bool&);
#define MANUALGRAD_SHARED_SOLVE(prefix, run, T, Bytes)                                                     \
  prefix template void run<SolveLower<T, Bytes>>(const StridedMatrix<const T>&, T* const&, const int64_t&, \
                                                 const int64_t&, const Rows<T>&, const bool&);
#define MANUALGRAD_SHARED_TILES(prefix, run, Bytes)             \
  MANUALGRAD_SHARED_MULTIPLY(prefix, run, float, Bytes, false)  \
  MANUALGRAD_SHARED_MULTIPLY(prefix, run, float, Bytes, true)   \
  MANUALGRAD_SHARED_MULTIPLY(prefix, run, double, Bytes, false) \
  MANUALGRAD_SHARED_MULTIPLY(prefix, run, double, Bytes, true)  \
  MANUALGRAD_SHARED_SOLVE(prefix, run, float, Bytes)            \
  MANUALGRAD_SHARED_SOLVE(prefix, run, double, Bytes)

#define MANUALGRAD_SHARED_VECTOR_PRODUCT(prefix, S) \
  prefix template void vector_product(const View<S>&, const View<S>&, int64_t, int64_t, int64_t, S*, bool);

using FloatLanes32 = Lanes<float, 32>;
using DoubleLanes32 = Lanes<double, 32>;
using FloatLanes64 = Lanes<float, 64>;
using DoubleLanes64 = Lanes<double, 64>;

#if defined(MANUALGRAD_MULTIVERSION)
#define MANUALGRAD_SHARED_LANES(prefix)                                      \
  MANUALGRAD_SHARED_NUMBERS(prefix, run_avx2, FloatLanes32, DoubleLanes32)   \
  MANUALGRAD_SHARED_NUMBERS(prefix, run_avx512, FloatLanes64, DoubleLanes64) \
  MANUALGRAD_SHARED_TILES(prefix, run_small, 16)                             \
  MANUALGRAD_SHARED_TILES(prefix, run_avx2, 32)                              \
  MANUALGRAD_SHARED_TILES(prefix, run_avx512, 64)
#else
using FloatLanes16 = Lanes<float, 16>;
using DoubleLanes16 = Lanes<double, 16>;
#define MANUALGRAD_SHARED_LANES(prefix)                                        \
  MANUALGRAD_SHARED_NUMBERS(prefix, run_baseline, FloatLanes16, DoubleLanes16) \
  MANUALGRAD_SHARED_TILES(prefix, run_baseline, 16)
#endif
#define MANUALGRAD_SHARED_LOOPS(prefix)                          \
  MANUALGRAD_SHARED_LANES(prefix)                                \
  MANUALGRAD_SHARED_NUMBERS(prefix, run_baseline, float, double) \
  MANUALGRAD_SHARED_VECTOR_PRODUCT(prefix, float)                \
  MANUALGRAD_SHARED_VECTOR_PRODUCT(prefix, double)               \
  MANUALGRAD_SHARED_VECTOR_PRODUCT(prefix, Complex<float>)       \
  MANUALGRAD_SHARED_VECTOR_PRODUCT(prefix, Complex<double>)
MANUALGRAD_SHARED_LOOPS(extern)

}  // namespace manualgrad
