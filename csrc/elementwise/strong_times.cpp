// The product in which zero is strong on the CPU; the contract is in strong_times.h.
#include "strong_times.h"

#include "../base/parallel.h"
#include "../base/simd.h"

namespace manualgrad {
namespace {

// One row. The most common strides are known at compile time, so that the compiler vectorizes the loops.
struct RowBody {
  template <class S>
  HOST_INLINE static void run(const ElementLoops& loops, S* out, const S* a, const S* b, int64_t count) {
    const int64_t to = loops.inner_stride(0), left = loops.inner_stride(1), right = loops.inner_stride(2);
    if (to == 1 && left == 1 && right == 1) {
      for (int64_t i = 0; i < count; ++i) store(out[i], strong_product(load(a[i]), load(b[i])));
    } else if (to == 1 && left == 1 && right == 0) {
      const Compute<S> one = load(b[0]);
      for (int64_t i = 0; i < count; ++i) store(out[i], strong_product(load(a[i]), one));
    } else if (to == 1 && left == 0 && right == 1) {
      const Compute<S> one = load(a[0]);
      for (int64_t i = 0; i < count; ++i) store(out[i], strong_product(one, load(b[i])));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        store(out[i * to], strong_product(load(a[i * left]), load(b[i * right])));
      }
    }
  }
};

struct CpuStrongTimes {
  template <class S>
  static void run(const ElementLoops& loops, int64_t count, const Tensor& factor, const Tensor& other,
                  const Tensor& out) {
    const S* a = static_cast<const S*>(factor.const_data_ptr());
    const S* b = static_cast<const S*>(other.const_data_ptr());
    S* to = static_cast<S*>(out.mutable_data_ptr());
    const int64_t inner = loops.inner();
    parallel_for(count, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        int64_t offset[3];
        loops.offsets(i, offset);
        const int64_t in_row = std::min(end - i, inner - i % inner);
        if constexpr (std::is_same_v<S, Complex<Half>>) {  // torch itself has hardly any operations on these
          run_baseline<RowBody>(loops, to + offset[0], a + offset[1], b + offset[2], in_row);
        } else {
          Multiversion<RowBody>::call(loops, to + offset[0], a + offset[1], b + offset[2], in_row);
        }
        i += in_row;
      }
    });
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::StrongTimesOperators<manualgrad::CpuStrongTimes>)
