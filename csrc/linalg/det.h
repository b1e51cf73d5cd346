// Determinants: the cotangent of the matrix.
//
//   manualgrad::linalg_det_backward.kernel(Tensor grad, Tensor det, Tensor LU, Tensor pivots) -> Tensor
//   manualgrad::slogdet_backward.kernel(Tensor h, Tensor LU, Tensor pivots) -> Tensor
//
// Order n up to kLaneOrder, for real matrices on the CPU up to kCachedOrder; float32, float64 and their complex dtypes,
// int32 pivots; any strides, the same batch for all. Results are contiguous. The result of a matrix is bitwise
// identical at any position in the batch.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/det.py, which state the mathematics,
// and, in plain backwards, by csrc/calls.
#pragma once

#include "../math/det.h"
#include "../math/triangular.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {

// g conj(det B^-1), B = P L U, with adj(B) where pivots are zero; with no det, h conj(B^-1), nan where pivots are zero.
template <class S>
struct DetArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, g, det;
  Pivots pivots;
  MatrixBatch<S> out;
};

template <class S, int F>
struct DetVjp : DetArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return 2 * this->n() * this->n() + 3 * this->n() + 2; }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    using R = RealOf<N>;
    const int n = this->n(), pitch = loader.pitch(n);
    N *factors = memory, *Y = factors + n * pitch, *inverse = Y + n * pitch, *counts = inverse + n,
      *scalars = counts + n;
    R* zeros = reinterpret_cast<R*>(counts);
    loader.read(this->factors, n, n, factors);
    loader.read(this->g, 1, 1, scalars);
    if (this->det.data != nullptr) loader.read(this->det, 1, 1, scalars + 1);
    loader.permutation(n, loader.order(this->pivots, n, n, reinterpret_cast<int*>(scalars + 2), Y), Y);
    const R found = zero_pivots(factors, n, pitch);
    const auto singular = found != R{};
    loader.threads.sync();
    const bool adjugate = this->det.data != nullptr && any(singular);
    N scale = conjugate(scalars[0]);
    if (adjugate && loader.threads.rank() == 0) {
      const N product = without_zeros(factors, zeros, n, pitch) * loader.parity(this->pivots, n, Y);
      scalars[1] = select(singular, product, scalars[1]);
    }
    loader.threads.sync();
    if (this->det.data != nullptr) {
      scale = scale * scalars[1];
    } else {
      const R nan = real_number<R>(std::numeric_limits<BaseOf<N>>::quiet_NaN());
      scale = select(singular, from_real<N>(nan), scale);
    }
    const StridedMatrix<const N> triangles{factors, pitch, 1};
    const StridedMatrix<N> solution{Y, pitch, 1};
    solve_lower(loader.threads, triangles, solution, n, n);
    if (adjugate) clear_rows<true>(loader.threads, zeros, Y, n, pitch);
    loader.threads.sync();
    solve_upper(loader.threads, triangles, solution, inverse, n, n);
    if (adjugate) clear_rows<false>(loader.threads, zeros, Y, n, pitch);
    loader.threads.sync();
    for (int e = loader.threads.rank(); e < n * pitch; e += loader.threads.size()) Y[e] = conjugate(Y[e] * scale);
    loader.threads.sync();
    loader.write(Y, n, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct DetOperators {
  static Tensor linalg_det_backward(const Tensor& grad, const Tensor& det, const Tensor& LU, const Tensor& pivots) {
    return determinant("manualgrad::linalg_det_backward: ", "grad", grad, det, LU, pivots);
  }
  static Tensor slogdet_backward(const Tensor& h, const Tensor& LU, const Tensor& pivots) {
    return determinant("manualgrad::slogdet_backward: ", "h", h, std::nullopt, LU, pivots);
  }

  static void add_to(Library& library) {
    library.impl("linalg_det_backward.kernel", TORCH_BOX(&linalg_det_backward));
    library.impl("slogdet_backward.kernel", TORCH_BOX(&slogdet_backward));
  }

 private:
  static Tensor determinant(const char* where, const char* name, const Tensor& g, const OptionalTensor& det,
                            const Tensor& LU, const Tensor& pivots) {
    const MatrixShape shape = square_shape(where, "LU", LU, Device::kVjpOrder);
    const int64_t n = LU.size(-1);
    shape.check(name, g, {});
    shape.check("det", det, {});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor out = allocate(shape.with({n, n}), LU);
    dispatch_filled(out, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      DetArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.g = kept.matrices<S>(g, 0);
      all.det = kept.matrices<S>(det, 0);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(out);
      Device::template run<DetVjp>(LU, all, shape.batch(), n, n);
    });
    return out;
  }
};

}  // namespace manualgrad
