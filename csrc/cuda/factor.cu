// The derivatives of small factorisations and solves on CUDA; the contract is in factor_plan.h.
//
// Real matrices up to 4 by 4: a thread for a matrix, in registers. Else a warp for a matrix, in shared memory.
#include "../factor_plan.h"
#include "driver.h"
#include "families.h"

namespace manualgrad {
namespace {

struct Cuda {
  template <template <class, int> class Family>
  static constexpr int64_t kLargest = kLargestFactor;

  template <template <class, int> class Family, class Arguments>
  static void run(const Tensor& like, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    constexpr bool kKnown = !NumberTraits<typename Arguments::Scalar>::kComplex;
    with_side<Family, kKnown>(arguments, batch, m, n, [&](const auto& family) { launch_sized(like, family); });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, m) {
  using Operators = manualgrad::FactorOperators<manualgrad::Cuda>;
  if (manualgrad::cuda_obstacle() != nullptr) return;
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
