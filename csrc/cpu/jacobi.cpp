// manualgrad::svd_jacobi, manualgrad::eigh_jacobi and manualgrad::lu_small on the CPU; the contract is in small_plan.h.
#include "../lane_groups.h"
#include "../small_plan.h"

namespace manualgrad {
namespace {

struct Cpu {
  template <class Family>
  static void run(const Tensor&, const Family& family) {
    with_native([&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      in_groups<kBytes>(family, 16 * family.numbers(), 1, [&](int64_t begin, int64_t end, auto* memory) {
        run_native<kBytes, Groups<Family, kBytes>>(family, begin, end, memory);
      });
    });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) {
  using Operators = manualgrad::SmallOperators<manualgrad::Cpu>;
  m.impl("svd_jacobi", TORCH_BOX(&Operators::svd_jacobi));
  m.impl("eigh_jacobi", TORCH_BOX(&Operators::eigh_jacobi));
  m.impl("lu_small", TORCH_BOX(&Operators::lu_small));
}
