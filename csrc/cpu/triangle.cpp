// The derivatives of triangular solves and of QR for small matrices on the CPU; the contract is in triangle_plan.h.
//
// One matrix a lane, and what the lanes leave over one at a time; the smallest have loops whose bounds the compiler
// knows, and unrolls.
#include "../lane_groups.h"
#include "../triangle_plan.h"

namespace manualgrad {
namespace {

struct Cpu {
  template <template <class, int> class Family, class Arguments>
  static void run(const Tensor&, const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
    constexpr bool kKnown = !NumberTraits<typename Arguments::Scalar>::kComplex;
    with_side<Family, kKnown>(arguments, batch, m, n, [](const auto& family) { run_in_lanes(family); });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) {
  using Operators = manualgrad::TriangleOperators<manualgrad::Cpu>;
  m.impl("linalg_solve_triangular_backward.kernel", TORCH_BOX(&Operators::linalg_solve_triangular_backward));
  m.impl("qr_pullback", TORCH_BOX(&Operators::qr_pullback));
}
