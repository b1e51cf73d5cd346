// The derivatives of solves on the CPU; the contract is in solve.h.
#include "solve.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedSolve {
  template <class T, int Bytes>
  static void vjp(const SolveArguments<T>& at, int64_t b, int m, int n, CachedScratch<T>& scratch) {
    const CachedMatrix<T, Bytes> matrix{n, row_pitch<T>(n)};
    const int pitch = matrix.pitch, columns = row_pitch<T>(m);
    T *L = scratch.matrix(0), *U = scratch.matrix(1), *G = scratch.matrix(2), *X = scratch.matrix(3);
    load_lower(at.factors, b, n, L, pitch, false);
    load_upper(at.factors, b, n, U, pitch);
    load_rows(at.given, b, n, m, G, columns);
    matrix.solve_adjoint(U, false, false, G, columns);
    matrix.solve_adjoint(L, true, true, G, columns);
    const int* order = scratch.order(at.pivots, b, n);
    store_rows(G, columns, n, m, at.out_right, b, order);
    load_rows(at.solution.transposed(), b, m, n, X, pitch);
    scratch.clear(0);
    matrix.subtract({G, columns, 1}, X, n, m, pitch, L, pitch, pitch);
    store_rows(L, pitch, n, n, at.out, b, order);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::SolveOperators<manualgrad::Cpu<manualgrad::CachedSolve>>)
