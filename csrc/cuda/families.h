// Families of small matrices (csrc/small_plan.h, csrc/factor_plan.h, csrc/triangle_plan.h) on CUDA: a thread for a
// matrix, in its own memory, or a warp for a matrix, in shared memory. On the current stream; waits for nothing.
#pragma once

#include "../one_matrix.h"
#include "launch.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 128, kWarp = 32, kGroup = 4;

// The threads of a block of one warp. Those of a group share a pair of rows.
struct Warp {
  int thread;
  HOST_DEVICE int rank() const { return thread; }
  HOST_DEVICE int size() const { return kWarp; }
  HOST_DEVICE int group() const { return thread / kGroup; }
  HOST_DEVICE int groups() const { return kWarp / kGroup; }
  HOST_DEVICE int place() const { return thread % kGroup; }
  HOST_DEVICE int width() const { return kGroup; }
  HOST_DEVICE void sync() const {
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
  template <class T>
  HOST_DEVICE T largest(T value) const {
#if defined(__CUDA_ARCH__)
    for (int step = kWarp / 2; step > 0; step /= 2) {
      value = larger_of(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
#endif
    return value;
  }
};

template <int Numbers, class Family>
__global__ void __launch_bounds__(kThreads) thread_kernel(Family family) {
  typename Family::Scalar memory[Numbers];
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < family.batch; b += stride) {
    family.run(OneMatrix<Alone>{{}, b}, memory);
  }
}

template <class Family>
__global__ void __launch_bounds__(kWarp) warp_kernel(Family family) {
  extern __shared__ double2 shared[];
  for (int64_t b = blockIdx.x; b < family.batch; b += gridDim.x) {
    const OneMatrix<Warp> matrix{{static_cast<int>(threadIdx.x)}, b};
    family.run(matrix, reinterpret_cast<typename Family::Scalar*>(shared));
    matrix.team.sync();
  }
}

constexpr const char* kSmallMatrices = "manualgrad: small matrices: ";
constexpr int64_t kMostBlocks = 1 << 20;

// A thread has memory for so many numbers.
template <int Numbers, class Family>
void launch_threads(const Tensor& like, const Family& family) {
  const int64_t blocks = (family.batch + kThreads - 1) / kThreads;
  Stream(kSmallMatrices, like)
      .launch(thread_kernel<Numbers, Family>, std::min(blocks, kMostBlocks), kThreads, 0, family);
}

template <class Family>
void launch_warps(const Tensor& like, const Family& family) {
  const size_t bytes = static_cast<size_t>(family.numbers()) * sizeof(typename Family::Scalar);
  Stream(kSmallMatrices, like).launch(warp_kernel<Family>, std::min(family.batch, kMostBlocks), kWarp, bytes, family);
}

// Of a family with sides; where the compiler knows them a thread has memory for four matrices and a little more.
template <class Family>
void launch_sized(const Tensor& like, const Family& family) {
  constexpr int F = Family::kSide;
  if constexpr (F > 0) {
    launch_threads<4 * F * F + 4 * F>(like, family);
  } else {
    launch_warps(like, family);
  }
}

}  // namespace
}  // namespace manualgrad
