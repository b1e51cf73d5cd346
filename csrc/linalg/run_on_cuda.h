// How a batch of small matrices runs on CUDA: a thread for a matrix, in its own registers or in shared memory, or a
// group of lanes for a matrix, in shared memory. On the current stream; does not synchronize.
#pragma once

#include "../base/cuda.h"
#include "../math/jacobi.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 128, kWarp = 32, kSubgroup = 4;

// Neighbouring lanes of a warp that share a matrix: 4, 8, 16 or all 32. The groups of a warp take the same steps,
// so that they reach the same barriers. The lanes of a subgroup share a pair of rows.
struct LaneGroup {
  int lane, lanes;
  HOST_DEVICE int rank() const { return lane; }
  HOST_DEVICE int size() const { return lanes; }
  HOST_DEVICE int group() const { return lane / kSubgroup; }
  HOST_DEVICE int groups() const { return lanes / kSubgroup; }
  HOST_DEVICE int place() const { return lane % kSubgroup; }
  HOST_DEVICE int width() const { return kSubgroup; }
  HOST_DEVICE void sync() const {
#if defined(__CUDA_ARCH__)
    __syncwarp();
#endif
  }
  template <class T>
  HOST_DEVICE T largest(T value) const {
#if defined(__CUDA_ARCH__)
    for (int step = lanes / 2; step > 0; step /= 2) {
      value = larger_of(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
#endif
    return value;
  }
};

// How many numbers a thread has for a matrix.
template <int Order>
constexpr int kThreadNumbers = 4 * Order * Order + 4 * Order;

// Matrices of an order that is known at compile time.
template <class Kernel>
__global__ void __launch_bounds__(kThreads) thread_kernel(Kernel kernel) {
  constexpr int kOrder = Kernel::kOrder;
  typename Kernel::Scalar memory[kThreadNumbers<kOrder>];
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < kernel.batch; b += stride) {
    kernel.run(MatrixLoader<InlinedThread>{{}, b}, memory);
  }
}

// `numbers`: the distance between the memory of two threads, which is odd, so that they use different banks.
template <class Kernel>
__global__ void __launch_bounds__(kWarp) shared_thread_kernel(Kernel kernel, int numbers) {
  extern __shared__ double2 shared[];
  auto* const memory = reinterpret_cast<typename Kernel::Scalar*>(shared) + static_cast<int>(threadIdx.x) * numbers;
  const int64_t stride = int64_t{gridDim.x} * kWarp;
  for (int64_t b = int64_t{blockIdx.x} * kWarp + threadIdx.x; b < kernel.batch; b += stride) {
    kernel.run(MatrixLoader<SingleThread>{{}, b}, memory);
  }
}

// `lanes` for a matrix; `numbers`: the distance between the memory of two groups.
template <class Kernel>
__global__ void __launch_bounds__(kThreads, 5) lane_kernel(Kernel kernel, int lanes, int numbers) {
  extern __shared__ double2 shared[];
  const int thread = static_cast<int>(threadIdx.x), group = thread / lanes,
            groups = static_cast<int>(blockDim.x) / lanes;
  auto* const memory = reinterpret_cast<typename Kernel::Scalar*>(shared) + group * numbers;
  const int64_t stride = int64_t{gridDim.x} * groups;
  for (int64_t first = int64_t{blockIdx.x} * groups; first < kernel.batch; first += stride) {
    // a group without a matrix of its own recomputes the last one and does not write
    const bool writes = first + group < kernel.batch;
    const MatrixLoader<LaneGroup, Kernel::kPadded> matrix{
        {thread % lanes, lanes}, writes ? first + group : kernel.batch - 1, writes};
    kernel.run(matrix, memory);
    matrix.threads.sync();
  }
}

constexpr const char* kSmallMatrices = "manualgrad: small matrices: ";
constexpr int64_t kMostBlocks = 1 << 20;

// Enough blocks for a batch, with `each` matrices per block.
inline int64_t blocks_of(int64_t batch, int64_t each) { return std::min((batch + each - 1) / each, kMostBlocks); }

template <class Kernel>
void launch_threads(const Tensor& like, const Kernel& kernel) {
  const Stream stream(kSmallMatrices, like);
  if constexpr (Kernel::kOrder > 0) {
    MANUALGRAD_CHECK(kernel.scratch_size() <= kThreadNumbers<Kernel::kOrder>, kSmallMatrices,
                     "a thread's memory is too small");
    stream.launch(thread_kernel<Kernel>, blocks_of(kernel.batch, kThreads), kThreads, 0, kernel);
  } else {
    const int numbers = kernel.scratch_size() | 1;
    const size_t bytes = static_cast<size_t>(kWarp * numbers) * sizeof(typename Kernel::Scalar);
    stream.launch(shared_thread_kernel<Kernel>, blocks_of(kernel.batch, kWarp), kWarp, bytes, kernel, numbers);
  }
}

template <class Kernel>
void launch_lanes(const Tensor& like, const Kernel& kernel, int64_t order) {
  MANUALGRAD_CHECK(order <= kWarp, kSmallMatrices, "expected orders up to ", kWarp, ", got ", order);
  int lanes = Kernel::kUniform ? kSubgroup : kWarp;
  while (lanes < order) lanes *= 2;
  Kernel largest = kernel;  // with the sizes that padded rows take
  if (Kernel::kPadded) largest.m_ |= 1, largest.n_ |= 1;
  int numbers = largest.scratch_size();
  // the same row in the matrices of a warp then uses different banks
  if (lanes < kWarp) numbers = ((numbers + lanes - 1) / lanes | 1) * lanes;
  const int64_t groups = kWarp / lanes, warps = (kernel.batch + groups - 1) / groups;
  const size_t bytes = static_cast<size_t>(groups * numbers) * sizeof(typename Kernel::Scalar);
  // more than one warp in a block if there are enough for every processor, and memory for them
  constexpr int64_t kManyWarps = 512;
  const int64_t each =
      std::clamp<int64_t>(std::min<int64_t>(warps / kManyWarps, kGivenShared / bytes), 1, kThreads / kWarp);
  Stream(kSmallMatrices, like)
      .launch(lane_kernel<Kernel>, blocks_of(warps, each), static_cast<int>(each) * kWarp,
              static_cast<size_t>(each) * bytes, kernel, lanes, numbers);
}

struct Cuda {
  static constexpr int64_t kVjpOrder = kLaneOrder;
  static constexpr bool kIsGpu = true;

  // Kernel<S, F> over a batch that is not empty.
  template <template <class, int> class Kernel, class Arguments>
  static void run(const Tensor& like, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    using S = typename Arguments::Scalar;
    constexpr Unroll kUnroll = Kernel<S, 0>::kUnroll;
    constexpr bool kFixed = (kUnroll == Unroll::kOnCuda || kUnroll == Unroll::kAlways) && !NumberTraits<S>::kComplex;
    with_order<Kernel, kFixed>(arguments, batch, m, n, [&](const auto& kernel) {
      using Sized = std::decay_t<decltype(kernel)>;
      if constexpr (Sized::kOrder > 0) {
        launch_threads(like, kernel);
      } else {
        if constexpr (Sized::kThreadOrder > 0) {
          if (std::max(m, n) <= Sized::kThreadOrder) return launch_threads(like, kernel);
        }
        launch_lanes(like, kernel, std::max(m, n));
      }
    });
  }
};

}  // namespace
}  // namespace manualgrad
