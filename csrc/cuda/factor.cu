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
    using S = typename Arguments::Scalar;
    const auto sized = [&](auto side) {
      constexpr int F = decltype(side)::value;
      Family<S, F> family{};
      static_cast<Arguments&>(family) = arguments;
      static_cast<Sides<F>&>(family) = {batch, static_cast<int>(m), static_cast<int>(n)};
      if constexpr (F > 0) {
        launch_threads<4 * F * F + 4 * F>(like, family);
      } else {
        launch_warps(like, family);
      }
    };
    if constexpr (!NumberTraits<S>::kComplex) {
      if (m == n && n == 2) return sized(std::integral_constant<int, 2>{});
      if (m == n && n == 3) return sized(std::integral_constant<int, 3>{});
      if (m == n && n == 4) return sized(std::integral_constant<int, 4>{});
    }
    sized(std::integral_constant<int, 0>{});
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, m) {
  using Operators = manualgrad::FactorOperators<manualgrad::Cuda>;
  if (manualgrad::cuda_obstacle() != nullptr) return;
  m.impl("lu_pullback", TORCH_BOX(&Operators::lu_pullback));
  m.impl("lu_pushforward", TORCH_BOX(&Operators::lu_pushforward));
  m.impl("lu_factor_pullback", TORCH_BOX(&Operators::lu_factor_pullback));
  m.impl("lu_factor_pushforward", TORCH_BOX(&Operators::lu_factor_pushforward));
  m.impl("cholesky_pullback", TORCH_BOX(&Operators::cholesky_pullback));
  m.impl("cholesky_pushforward", TORCH_BOX(&Operators::cholesky_pushforward));
  m.impl("det_pullback", TORCH_BOX(&Operators::det_pullback));
  m.impl("slogdet_pullback", TORCH_BOX(&Operators::slogdet_pullback));
  m.impl("inv_pullback", TORCH_BOX(&Operators::inv_pullback));
  m.impl("inv_pushforward", TORCH_BOX(&Operators::inv_pushforward));
  m.impl("solve_pullback", TORCH_BOX(&Operators::solve_pullback));
  m.impl("solve_pushforward", TORCH_BOX(&Operators::solve_pushforward));
}
