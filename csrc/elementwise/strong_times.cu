// The product in which zero is strong on CUDA; the contract is in strong_times.h.
#include "strong_times.h"

#include "../base/cuda.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 256;
// Enough to fill any device several times over; the kernel strides over the rest.
constexpr int64_t kMostBlocks = 16384;

template <class S>
__global__ void strong_times_kernel(ElementLoops loops, int64_t count, const S* a, const S* b, S* out) {
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    int64_t offset[3];
    loops.offsets(i, offset);
    store(out[offset[0]], strong_product(load(a[offset[1]]), load(b[offset[2]])));
  }
}

struct CudaStrongTimes {
  template <class S>
  static void run(const ElementLoops& loops, int64_t count, const Tensor& factor, const Tensor& other,
                  const Tensor& out) {
    const Stream stream(STRONG_TIMES, factor);
    stream.launch(strong_times_kernel<S>, std::min((count + kThreads - 1) / kThreads, kMostBlocks), kThreads, 0, loops,
                  count, static_cast<const S*>(factor.const_data_ptr()), static_cast<const S*>(other.const_data_ptr()),
                  static_cast<S*>(out.mutable_data_ptr()));
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::StrongTimesOperators<manualgrad::CudaStrongTimes>)
