// The derivatives of the inverse on the CPU; the contract is in inverse.h.
#include "inverse.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedInverse {
  template <class T, int Bytes>
  static void vjp(const InverseArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    using Matrix = CachedMatrix<T, Bytes>;
    const int pitch = row_pitch<T>(n);
    T *X = scratch.matrix(0), *G = scratch.matrix(1), *product = scratch.matrix(2);
    load_rows(at.vjp ? at.inverse.transposed() : at.inverse, b, n, n, X, pitch);
    load_rows(at.given, b, n, n, G, pitch);
    scratch.clear(2);
    Matrix::add({G, pitch, 1}, X, n, n, pitch, product, pitch, pitch);
    scratch.clear(1);
    Matrix::subtract({X, pitch, 1}, product, n, n, pitch, G, pitch, pitch);
    store_rows(G, pitch, n, n, at.out, b, scratch.order(Pivots{}, b, n));
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::InverseOperators<manualgrad::Cpu<manualgrad::CachedInverse>>)
