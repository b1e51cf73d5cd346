// Runs a kernel over a batch of small matrices on the CPU, one matrix per lane. Host code.
#pragma once

#include <memory>

#include "../../base/parallel.h"
#include "../../base/simd.h"
#include "../blas/shared_loops.h"
#include "../small_matrices.h"
#include "loader.h"

namespace manualgrad {

template <class Kernel, int Bytes>
struct LaneGroups {
  using S = typename Kernel::Scalar;
  using N = typename LanesOf<S, Bytes>::type;
  using Threads = std::conditional_t<(Kernel::kOrder > 0), InlinedThread, SingleThread>;
  static constexpr int64_t kCount = kLanesIn<N>;

  // Groups [begin, end).
  HOST_INLINE static void run(const Kernel& kernel, int64_t begin, int64_t end, N* scratch) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kCount, left = kernel.batch - first;
      kernel.run(LaneLoader<Threads>{{}, first, left < kCount ? left : kCount}, scratch);
    }
  }
};

// One matrix at a time, with bitwise identical results. Compiled for the baseline only, as GCC 12.2 fuses products of
// complex scalars with sums where possible, even if told not to.
template <class Kernel>
__attribute__((noinline)) void run_each(const Kernel& kernel, int64_t begin, int64_t end,
                                        typename Kernel::Scalar* scratch) {
  for (int64_t place = begin; place < end; ++place) kernel.run(MatrixLoader<SingleThread>{{}, place}, scratch);
}

// Runs all of a kernel in the widest lanes there are. A single matrix that is left after the last full group is
// computed alone, by the same kernel for any order, as lanes would take longer.
template <class Kernel, class AnyOrder>
void run_in_lanes(const Kernel& kernel, const AnyOrder& any) {
  with_native([&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    using Groups = LaneGroups<Kernel, kBytes>;
    const int64_t groups = (kernel.batch + Groups::kCount - 1) / Groups::kCount, whole = kernel.batch / Groups::kCount;
    const bool one_left = kernel.batch == whole * Groups::kCount + 1;
    parallel_for(groups, std::max<int64_t>(1, kGrain / (kernel.work() * Groups::kCount)),
                 [&](int64_t begin, int64_t end) {
                   const size_t size = static_cast<size_t>(kernel.scratch_size()) * sizeof(typename Groups::N);
                   const std::unique_ptr<char[]> buffer(new char[size + kLaneBytes]);
                   const uintptr_t start =
                       (reinterpret_cast<uintptr_t>(buffer.get()) + kLaneBytes - 1) / kLaneBytes * kLaneBytes;
                   auto* const scalars = reinterpret_cast<typename Kernel::Scalar*>(start);
                   if constexpr (kBytes > 16 || kBaselineHasLanes) {
                     const int64_t stop = one_left ? std::min(end, whole) : end;
                     run_native<kBytes, Groups>(kernel, begin, stop, reinterpret_cast<typename Groups::N*>(start));
                     if (stop < end) run_each(any, kernel.batch - 1, kernel.batch, scalars);
                   } else {
                     run_each(any, begin * Groups::kCount, std::min(end * Groups::kCount, kernel.batch), scalars);
                   }
                 });
  });
}

}  // namespace manualgrad
