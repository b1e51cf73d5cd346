// The derivatives of Cholesky on the CPU; the contract is in cholesky.h.
#include "cholesky.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedCholesky {
  template <class T, int Bytes>
  static void vjp(const CholeskyArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    const CachedMatrix<T, Bytes> matrix{n, row_pitch<T>(n)};
    const int pitch = matrix.pitch;
    T *L = scratch.matrix(0), *G = scratch.matrix(1), *W = scratch.matrix(2);
    load_lower(at.factor.transposed(), b, n, L, pitch, true);
    load_lower(at.given.transposed(), b, n, G, pitch, true);
    scratch.clear(2);
    matrix.couple(G, L, {L, 1, pitch}, false, W, scratch.matrix(4));
    transpose(W, pitch, n, n, G, pitch);
    matrix.solve_lower_adjoint({L, pitch, 1}, scratch.matrix(4), pitch, {G, pitch});
    transpose(G, pitch, n, n, W, pitch);
    for (int i = 0; i < n; ++i) {
      T* to = &at.out.at(b, i, 0);
      for (int j = 0; j < n; ++j) to[j] = (G[i * pitch + j] + W[i * pitch + j]) / 2;
    }
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::CholeskyOperators<manualgrad::Cpu<manualgrad::CachedCholesky>>)
