// The derivative of samples of the gamma distribution on the CPU; the contract is in standard_gamma.h.
#include "standard_gamma.h"

#include "../base/parallel.h"
#include "../base/simd.h"

namespace manualgrad {
namespace {

template <class T>
struct Slopes {
  HOST_INLINE static void run(int64_t begin, int64_t end, const T* a, const T* x, T* out,
                              const GaussLegendre<GammaTerms<T>::kNodes>& rule) {
    for (int64_t i = begin; i < end; ++i) out[i] = gamma_sample_slope<T>(a[i], x[i], rule);
  }
};

struct CpuStandardGamma {
  template <class T>
  static void run(int64_t count, const T* a, const T* x, const Tensor& result) {
    T* const out = static_cast<T*>(result.mutable_data_ptr());
    constexpr int64_t kNumbers = 256;  // as each takes as long as a hundred products
    static const GaussLegendre<GammaTerms<T>::kNodes> rule;
    parallel_for(count, kNumbers,
                 [&](int64_t begin, int64_t end) { Multiversion<Slopes<T>>::call(begin, end, a, x, out, rule); });
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::StandardGammaOperators<manualgrad::CpuStandardGamma>)
