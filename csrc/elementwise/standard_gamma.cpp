// The derivative of samples of the gamma distribution on the CPU; the contract is in standard_gamma.h.
#include "standard_gamma.h"

#include "../base/parallel.h"

namespace manualgrad {
namespace {

struct CpuStandardGamma {
  template <class T>
  static void run(int64_t count, const T* a, const T* x, T* out) {
    constexpr int64_t kNumbers = 256;  // as each takes as long as a hundred products
    parallel_for(count, kNumbers, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = gamma_sample_slope<T>(a[i], x[i]);
    });
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::StandardGammaOperators<manualgrad::CpuStandardGamma>)
