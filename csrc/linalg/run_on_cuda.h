// How a batch of small matrices runs on CUDA: a thread for a matrix, in its own memory, or a warp for a matrix, in
// shared memory. On the current stream; does not synchronize.
#pragma once

#include "../base/cuda.h"
#include "../math/jacobi.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 128, kWarp = 32, kGroup = 4;

// The threads of a block of one warp. Those of a subgroup share a pair of rows.
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

template <int Numbers, class Kernel>
__global__ void __launch_bounds__(kThreads) thread_kernel(Kernel kernel) {
  typename Kernel::Scalar memory[Numbers];
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < kernel.batch; b += stride) {
    kernel.run(MatrixLoader<SingleThread>{{}, b}, memory);
  }
}

template <class Kernel>
__global__ void __launch_bounds__(kWarp) warp_kernel(Kernel kernel) {
  extern __shared__ double2 shared[];
  for (int64_t b = blockIdx.x; b < kernel.batch; b += gridDim.x) {
    const MatrixLoader<Warp, Kernel::kPadded> matrix{{static_cast<int>(threadIdx.x)}, b};
    kernel.run(matrix, reinterpret_cast<typename Kernel::Scalar*>(shared));
    matrix.threads.sync();
  }
}

constexpr const char* kSmallMatrices = "manualgrad: small matrices: ";
constexpr int64_t kMostBlocks = 1 << 20;

// A thread has memory for so many numbers.
template <int Numbers, class Kernel>
void launch_threads(const Tensor& like, const Kernel& kernel) {
  const int64_t blocks = (kernel.batch + kThreads - 1) / kThreads;
  Stream(kSmallMatrices, like)
      .launch(thread_kernel<Numbers, Kernel>, std::min(blocks, kMostBlocks), kThreads, 0, kernel);
}

template <class Kernel>
void launch_warps(const Tensor& like, const Kernel& kernel) {
  Kernel largest = kernel;  // as large as with the gaps
  if (Kernel::kPadded) largest.m_ |= 1, largest.n_ |= 1;
  const size_t bytes = static_cast<size_t>(largest.scratch_size()) * sizeof(typename Kernel::Scalar);
  Stream(kSmallMatrices, like).launch(warp_kernel<Kernel>, std::min(kernel.batch, kMostBlocks), kWarp, bytes, kernel);
}

struct Cuda {
  static constexpr int64_t kVjpOrder = kLaneOrder;

  // Kernel<S, F> over a batch that is not empty.
  template <template <class, int> class Kernel, class Arguments>
  static void run(const Tensor& like, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    using S = typename Arguments::Scalar;
    constexpr bool kFixed = Kernel<S, 0>::kUnroll != Unroll::kNever && !NumberTraits<S>::kComplex;
    with_order<Kernel, kFixed>(arguments, batch, m, n, [&](const auto& kernel) {
      using Sized = std::decay_t<decltype(kernel)>;
      if constexpr (!Sized::kOnlyThreads) {
        if (std::max(m, n) > Sized::kThreadOrder) return launch_warps(like, kernel);
      }
      if constexpr (Sized::kThreadOrder > 0) launch_threads<Sized::kThreadScratch>(like, kernel);
    });
  }
};

}  // namespace
}  // namespace manualgrad
