// How a batch of small matrices runs on the CPU: one matrix per lane, or one at a time if a kernel supports that.
#pragma once

#include "blas/cached_matrix.h"
#include "lanes/run.h"

namespace manualgrad {

// Cached: see run_cached(); void where no kernel of the operators has it.
template <class Cached = void>
struct Cpu {
  // The largest order of real square matrices in vjps.
  static constexpr int64_t kVjpOrder = kCachedOrder;
  static constexpr bool kIsGpu = false;

  // Kernel<S, F> over a batch that is not empty.
  template <template <class, int> class Kernel, class Arguments>
  static void run(const Tensor&, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    using S = typename Arguments::Scalar;
    using Any = Kernel<S, 0>;
    constexpr bool kReal = !NumberTraits<S>::kComplex;
    constexpr bool kFixed = (Any::kUnroll == Unroll::kOnCpu || Any::kUnroll == Unroll::kAlways) && kReal;
    if constexpr (Any::kCached && kReal) {
      if (prefers_cache<Any>(batch, m, n)) return run_cached<Cached>(arguments, batch, m, n);
    }
    with_order<Kernel, false>(arguments, batch, m, n, [&](const auto& any) {
      with_order<Kernel, kFixed>(arguments, batch, m, n, [&](const auto& kernel) { run_in_lanes(kernel, any); });
    });
  }

 private:
  // Large matrices go one at a time. So do few small ones and, if full products are formed, those whose rows fill
  // vectors: it is faster (linalg.py --sizes 4 8 16 32, 2026-11-22).
  template <class Kernel>
  static bool prefers_cache(int64_t batch, int64_t m, int64_t n) {
    using S = typename Kernel::Scalar;
    if (std::max(m, n) > kLaneOrder) return true;
    if (!Kernel::cacheable(m, n) || n <= 4) return false;
    return batch < kLanes<S> || (Kernel::kFormsProducts && fills_vectors<S>(n) && m > 4);
  }
};

// Whether no number is inf or nan.
template <class S>
bool all_finite(const S* numbers, int64_t count) {
  using T = BaseOf<S>;
  constexpr int kSums = 16;  // so that none waits for another
  const T* parts = reinterpret_cast<const T*>(numbers);
  const int64_t n = count * static_cast<int64_t>(sizeof(S) / sizeof(T)), whole = n / kSums * kSums;
  T sums[kSums] = {};
  for (int64_t i = 0; i < whole; i += kSums) {
    for (int k = 0; k < kSums; ++k) sums[k] += parts[i + k] * 0;
  }
  for (int64_t i = whole; i < n; ++i) sums[0] += parts[i] * 0;
  return std::all_of(sums, sums + kSums, [](T sum) { return sum == 0; });
}

}  // namespace manualgrad
