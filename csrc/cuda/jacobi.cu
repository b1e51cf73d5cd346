// manualgrad::svd_jacobi, manualgrad::eigh_jacobi and manualgrad::lu_small on CUDA; the contract is in small_plan.h.
//
// Up to 4 by 4, and for the LU: a thread for a matrix, in its own memory. Else a warp for a matrix, in shared memory.
// Runs on the current stream and waits for nothing. Without contraction of products, so the same bits as on the CPU.
#include "../small_plan.h"
#include "driver.h"
#include "families.h"

namespace manualgrad {
namespace {

constexpr int kTiny = 4;

struct Cuda {
  template <class S>
  static void run(const Tensor& A, const Svd<S>& family) {
    if (family.m > kTiny) return launch_warps(A, family);
    launch_threads<3 * kTiny * kTiny + 4 * kTiny>(A, family);
  }
  template <class S>
  static void run(const Tensor& A, const Eigh<S>& family) {
    if (family.n > kTiny) return launch_warps(A, family);
    launch_threads<2 * kTiny * kTiny + kTiny>(A, family);
  }
  template <class S>
  static void run(const Tensor& A, const Lu<S>& family) {
    launch_threads<2 * kLargestLu * kLargestLu + kLargestLu>(A, family);
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, m) {
  using Operators = manualgrad::SmallOperators<manualgrad::Cuda>;
  if (manualgrad::cuda_obstacle() != nullptr) return;
  m.impl("svd_jacobi", TORCH_BOX(&Operators::svd_jacobi));
  m.impl("eigh_jacobi", TORCH_BOX(&Operators::eigh_jacobi));
  m.impl("lu_small", TORCH_BOX(&Operators::lu_small));
}
