// Up to which order n the kernels take matrices. Python asks for these numbers by manualgrad::kernel_limit(name) (see
// torch_manualgrad/core/libraries.py); they stand nowhere else.
#pragma once

#include <cstdint>
#include <string_view>

namespace manualgrad {

// Derivatives of LU, Cholesky, QR, determinants, inverses and solves: both dims, on either device. One matrix per lane
// on the CPU, one per thread or warp on CUDA.
constexpr int64_t kLaneOrder = 32;
// The same for one real square matrix at a time, on the CPU: what the kernels of derivatives take ...
constexpr int64_t kCachedOrder = 256;
// ... and up to where each is faster than BLAS, by measurement.
constexpr int64_t kCachedCholesky = 200, kCachedDet = 100, kCachedSolve = 64, kCachedInverse = 48;
// Derivatives of the SVD and of eigh: the larger dim up to which a matrix does not go through products of whole
// batches.
constexpr int64_t kSpectrumOrder = 32;
// Decompositions of small matrices: Jacobi's take min(m, n) and max(m, n) up to these, lu_small takes both dims up to
// its.
constexpr int64_t kJacobiRank = 16, kJacobiOrder = 32, kLuSmallOrder = 8;
// Eigendecompositions of real symmetric matrices by QL, one at a time, on the CPU.
constexpr int64_t kTridiagonalOrder = 128;

struct Limit {
  std::string_view name;
  int64_t order;
};
constexpr Limit kLimits[] = {
    {"lane_order", kLaneOrder},
    {"cached_order", kCachedOrder},
    {"cached_cholesky", kCachedCholesky},
    {"cached_det", kCachedDet},
    {"cached_solve", kCachedSolve},
    {"cached_inverse", kCachedInverse},
    {"spectrum_order", kSpectrumOrder},
    {"jacobi_rank", kJacobiRank},
    {"jacobi_order", kJacobiOrder},
    {"lu_small_order", kLuSmallOrder},
    {"tridiagonal_order", kTridiagonalOrder},
};

}  // namespace manualgrad
