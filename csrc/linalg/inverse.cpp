// The derivatives of the inverse on the CPU; the contract is in inverse.h.
#include "inverse.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

struct CachedInverse {
  template <class T, int Bytes>
  static void vjp(const InverseArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    using Matrix = CachedMatrix<T, Bytes>;
    const MatrixBatch<const T> inverse = at.vjp ? at.inverse.transposed() : at.inverse;
    const int pitch = row_pitch<T>(n);
    const bool direct = fills_vectors<T>(n);
    const int64_t width = direct ? n : pitch;
    const Rows<const T> X = rows_of(inverse, b, n, n, scratch.matrix(0), pitch);
    const Rows<T> product{scratch.matrix(1), pitch};
    const Rows<T> out = direct ? Rows<T>{&at.out.at(b, 0, 0), n} : Rows<T>{scratch.matrix(2), pitch};
    Matrix::add(matrix_of(at.given, b), X, n, n, width, product, false, true);
    Matrix::subtract(matrix_of(inverse, b), {product.data, pitch}, n, n, width, out, true);
    if (!direct) store_rows(out.data, pitch, n, n, at.out, b, nullptr);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::InverseOperators<manualgrad::Cpu<manualgrad::CachedInverse>>)
