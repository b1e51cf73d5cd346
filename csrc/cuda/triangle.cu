// The derivative of small triangular solves on CUDA; the contract is in triangle_plan.h.
//
// Real matrices up to 4 by 4: a thread for a matrix, in registers. Else a warp for a matrix, in shared memory.
#include "../triangle_plan.h"
#include "driver.h"
#include "families.h"

namespace manualgrad {
namespace {

struct Cuda {
  template <template <class, int> class Family, class Arguments>
  static void run(const Tensor& like, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    constexpr bool kKnown = !NumberTraits<typename Arguments::Scalar>::kComplex;
    with_side<Family, kKnown>(arguments, batch, m, n, [&](const auto& family) { launch_sized(like, family); });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, m) {
  using Operators = manualgrad::TriangleOperators<manualgrad::Cuda>;
  if (manualgrad::cuda_obstacle() != nullptr) return;
  m.impl("linalg_solve_triangular_backward.kernel", TORCH_BOX(&Operators::linalg_solve_triangular_backward));
}
