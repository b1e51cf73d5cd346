// The derivatives of solves on the CPU; the contract is in solve.h.
#include "solve.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedSolve {
  template <class T, int Bytes>
  static void vjp(const SolveArguments<T>& at, int64_t b, int m, int n, CachedScratch<T>& scratch) {
    const CachedMatrix<T, Bytes> matrix{n, row_pitch<T>(n)};
    const bool direct = fills_vectors<T>(n);
    const int pitch = matrix.pitch, columns = row_pitch<T>(m);
    const StridedMatrix<const T> factors = matrix_of(at.factors, b);
    const Rows<T> G{scratch.matrix(0), columns};
    load_rows(at.given, b, n, m, G.data, columns);
    matrix.solve_upper_adjoint(factors, scratch.matrix(4), columns, G);
    matrix.solve_lower_adjoint(factors, nullptr, columns, G);
    store_rows(G.data, columns, n, m, at.out_right, b, scratch.order(at.pivots, b, n));
    const Rows<const T> X = rows_of(at.solution.transposed(), b, m, n, scratch.matrix(1), pitch);
    const Rows<T> out = direct ? Rows<T>{&at.out.at(b, 0, 0), n} : Rows<T>{scratch.matrix(2), pitch};
    matrix.subtract({&at.out_right.at(b, 0, 0), m, 1}, X, n, m, direct ? n : pitch, out, true);
    if (!direct) store_rows(out.data, pitch, n, n, at.out, b, nullptr);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::SolveOperators<manualgrad::Cpu<manualgrad::CachedSolve>>)
