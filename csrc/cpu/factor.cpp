// The derivatives of small factorisations and solves on the CPU; the contract is in factor_plan.h.
//
// Up to kLargestFactor one matrix a lane, and what the lanes leave over one at a time; the smallest have loops whose
// bounds the compiler knows, and unrolls. Larger ones: factor_blocks.h.
#include "../factor_plan.h"
#include "../lane_groups.h"
#include "factor_blocks.h"

namespace manualgrad {
namespace {

struct Cpu {
  template <template <class, int> class Family>
  static constexpr int64_t kLargest =
      std::is_same_v<Family<float, 0>, LuPush<float, 0>> || std::is_same_v<Family<float, 0>, CholeskyPush<float, 0>> ||
              std::is_same_v<Family<float, 0>, SolvePush<float, 0>>
          ? kLargestFactor
          : kLargestBlocks;

  // Whether matrices go one at a time through factor_blocks.h: large ones, and where that is faster, by measurement,
  // few ones, and those of which full products are formed.
  template <template <class, int> class Family, class S>
  static bool in_blocks(int64_t batch, int64_t m, int64_t n) {
    constexpr bool kSolve = std::is_same_v<Family<S, 0>, SolvePull<S, 0>>;
    if (std::max(m, n) > kLargestFactor) return true;
    if ((m != n && !kSolve) || n <= 4) return false;
    constexpr bool kFull = kSolve || std::is_same_v<Family<S, 0>, Inverse<S, 0>>;
    return batch < kLanes<RealOf<S>> || (kFull && n >= 16 && m > 4);
  }

  template <template <class, int> class Family, class Arguments>
  static void run(const Tensor&, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    using S = typename Arguments::Scalar;
    if constexpr (!NumberTraits<S>::kComplex && kLargest<Family> == kLargestBlocks) {
      if (in_blocks<Family, S>(batch, m, n)) {
        return pull_blocks(arguments, batch, static_cast<int>(m), static_cast<int>(n));
      }
    }
    constexpr bool kKnown = !NumberTraits<S>::kComplex && kLargest<Family> == kLargestBlocks;  // tangents: not worth it
    with_side<Family, kKnown>(arguments, batch, m, n, [](const auto& family) { run_in_lanes(family); });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) {
  using Operators = manualgrad::FactorOperators<manualgrad::Cpu>;
  m.impl("linalg_lu_backward.kernel", TORCH_BOX(&Operators::linalg_lu_backward));
  m.impl("linalg_lu_jvp.kernel", TORCH_BOX(&Operators::linalg_lu_jvp));
  m.impl("lu_factor_ex_backward.kernel", TORCH_BOX(&Operators::lu_factor_ex_backward));
  m.impl("lu_factor_ex_jvp.kernel", TORCH_BOX(&Operators::lu_factor_ex_jvp));
  m.impl("cholesky_backward.kernel", TORCH_BOX(&Operators::cholesky_backward));
  m.impl("cholesky_jvp.kernel", TORCH_BOX(&Operators::cholesky_jvp));
  m.impl("det_pullback", TORCH_BOX(&Operators::det_pullback));
  m.impl("slogdet_pullback", TORCH_BOX(&Operators::slogdet_pullback));
  m.impl("linalg_inv_backward.kernel", TORCH_BOX(&Operators::linalg_inv_backward));
  m.impl("linalg_inv_jvp.kernel", TORCH_BOX(&Operators::linalg_inv_jvp));
  m.impl("linalg_solve_backward.kernel", TORCH_BOX(&Operators::linalg_solve_backward));
  m.impl("linalg_solve_jvp.kernel", TORCH_BOX(&Operators::linalg_solve_jvp));
}
