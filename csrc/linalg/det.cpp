// The derivatives of determinants on the CPU; the contract is in det.h.
#include "det.h"

#include "run_on_cpu.h"

namespace manualgrad {
namespace {

// The cotangent of one singular matrix.
template <class T>
MANUALGRAD_NOT_INLINED void singular_det_vjp(const DetArguments<T>& at, int64_t b, int n) {
  DetVjp<T, 0> kernel{};
  static_cast<DetArguments<T>&>(kernel) = at;
  static_cast<Order<0>&>(kernel) = {1, n, n};
  std::vector<T> numbers(static_cast<size_t>(kernel.scratch_size()));
  kernel.run(MatrixLoader<SingleThread>{{}, b}, numbers.data());
}

struct CachedDet {
  template <class T, int Bytes>
  static void vjp(const DetArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    for (int i = 0; i < n; ++i) {
      if (at.factors.at(b, i, i) == 0) return singular_det_vjp(at, b, n);
    }
    const CachedMatrix<T, Bytes> matrix{n, row_pitch<T>(n)};
    const int pitch = matrix.pitch;
    T *Y = scratch.matrix(0), *U = scratch.matrix(1);
    const StridedMatrix<const T> factors = matrix_of(at.factors, b);
    scratch.clear(0);
    const T scale = at.g.at(b, 0, 0) * (at.det.data != nullptr ? at.det.at(b, 0, 0) : T(1));
    for (int i = 0; i < n; ++i) Y[i * (pitch + 1)] = scale;
    matrix.solve_upper_adjoint(factors, scratch.matrix(4), pitch, {Y, pitch}, true);
    matrix.solve_lower_adjoint(factors, nullptr, pitch, {Y, pitch});
    // Y is the transpose of the result
    store_rows(Y, pitch, n, n, MatrixBatch<T>{U, 0, pitch, 1}, 0, scratch.order(at.pivots, b, n));
    transpose(U, pitch, n, n, &at.out.at(b, 0, 0), at.out.row_stride);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::DetOperators<manualgrad::Cpu<manualgrad::CachedDet>>)
