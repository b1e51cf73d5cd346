// The derivatives of LU, and the factors of small matrices, on the CPU; the contract is in lu.h.
#include "lu.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedLu {
  template <class T, int Bytes>
  static void vjp(const LuArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    const CachedMatrix<T, Bytes> matrix{n, row_pitch<T>(n)};
    const int pitch = matrix.pitch;
    T *L = scratch.matrix(0), *U = scratch.matrix(1), *G = scratch.matrix(2), *W = scratch.matrix(3);
    const bool lower = at.given.lower.data != nullptr;
    load_lower(at.factors.lower, b, n, L, pitch, false);
    for (int i = 0; i < n; ++i) L[i * (pitch + 1)] = 1;
    load_upper(at.factors.upper, b, n, U, pitch);
    scratch.clear(3);
    if (at.given.upper.data != nullptr) {
      load_upper(at.given.upper, b, n, G, pitch);
      transpose(G, pitch, n, n, W, pitch);
    }
    if (lower) load_lower(at.given.lower, b, n, G, pitch, false);
    matrix.couple(lower ? G : nullptr, L, {U, pitch, 1}, true, W, scratch.matrix(4));
    transpose(W, pitch, n, n, G, pitch);
    matrix.solve_lower_adjoint({L, pitch, 1}, nullptr, pitch, {G, pitch});
    const int* order = at.P.data != nullptr ? scratch.order(at.P, b, n) : scratch.order(at.pivots, b, n);
    if (order == nullptr) {
      std::fill(G, W, not_a_number<T>());
      order = scratch.order(Pivots{}, b, n);
    }
    store_rows(G, pitch, n, n, at.out, b, order);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::LuOperators<manualgrad::Cpu<manualgrad::CachedLu>>)
