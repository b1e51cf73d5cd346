// The derivative of samples of the gamma distribution on CUDA; the contract is in standard_gamma.h.
#include "standard_gamma.h"

#include "../base/cuda.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 128;
// Enough to fill any device several times over; the kernel strides over the rest.
constexpr int64_t kMostBlocks = 16384;

template <class T>
__global__ void standard_gamma_kernel(int64_t count, const T* a, const T* x, T* out,
                                      GaussLegendre<GammaTerms<T>::kNodes> rule) {
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    out[i] = gamma_sample_slope<T>(a[i], x[i], rule);
  }
}

struct CudaStandardGamma {
  template <class T>
  static void run(int64_t count, const T* a, const T* x, const Tensor& out) {
    if (count == 0) return;
    static const GaussLegendre<GammaTerms<T>::kNodes> rule;
    Stream(STANDARD_GAMMA_GRAD, out)
        .launch(standard_gamma_kernel<T>, std::min((count + kThreads - 1) / kThreads, kMostBlocks), kThreads, 0, count,
                a, x, static_cast<T*>(out.mutable_data_ptr()), rule);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::StandardGammaOperators<manualgrad::CudaStandardGamma>)
