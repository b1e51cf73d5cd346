// The inverse: its derivatives.
//
//   manualgrad::linalg_inv_backward.kernel(Tensor grad_inverse, Tensor inverse) -> Tensor
//   manualgrad::linalg_inv_jvp.kernel(Tensor A_t, Tensor inverse) -> Tensor
//
// Order n up to kLaneOrder, for real matrices on the CPU up to kCachedOrder; float32, float64 and their complex dtypes;
// any strides, the same batch for all. Results are contiguous. The result of a matrix is bitwise identical at any
// position in the batch.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/inverse.py, which state the mathematics.
#pragma once

#include "../math/product.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {

// -X^H g X^H, or -X g X.
template <class S>
struct InverseArguments {
  using Scalar = S;
  MatrixBatch<const S> inverse, given;
  bool vjp;
  MatrixBatch<S> out;
};

template <class S, int F>
struct Inverse : InverseArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true, kFormsProducts = true;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return 3 * this->n() * this->n(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), pitch = loader.pitch(n);
    N *X = memory, *G = X + n * pitch, *half = G + n * pitch;
    loader.read(this->vjp ? this->inverse.transposed() : this->inverse, n, n, X);
    loader.read(this->given, n, n, G);
    if (this->vjp) conjugate_all(loader.threads, X, n * pitch);
    product<Sum::kReplace>(loader.threads, StridedMatrix<const N>{G, pitch, 1}, StridedMatrix<const N>{X, pitch, 1}, n,
                           n, n, half, pitch);
    product<Sum::kReplaceNegative>(loader.threads, StridedMatrix<const N>{X, pitch, 1},
                                   StridedMatrix<const N>{half, pitch, 1}, n, n, n, G, pitch);
    loader.write(G, n, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct InverseOperators {
  static Tensor linalg_inv_backward(const Tensor& grad_inverse, const Tensor& inverse) {
    return inverse_derivative("manualgrad::linalg_inv_backward: ", "grad_inverse", grad_inverse, inverse, true);
  }
  static Tensor linalg_inv_jvp(const Tensor& A_t, const Tensor& inverse) {
    return inverse_derivative("manualgrad::linalg_inv_jvp: ", "A_t", A_t, inverse, false);
  }

  static void add_to(Library& library) {
    library.impl("linalg_inv_backward.kernel", TORCH_BOX(&linalg_inv_backward));
    library.impl("linalg_inv_jvp.kernel", TORCH_BOX(&linalg_inv_jvp));
  }

 private:
  static Tensor inverse_derivative(const char* where, const char* name, const Tensor& given, const Tensor& inverse,
                                   bool vjp) {
    const MatrixShape shape = square_shape(where, "inverse", inverse, Device::kVjpOrder);
    const int64_t n = inverse.size(-1);
    shape.check(name, given, {n, n});
    Tensor out = allocate(shape.with({n, n}), inverse);
    dispatch_filled(out, where, "inverse", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      InverseArguments<S> all{};
      all.inverse = kept.matrices<S>(inverse);
      all.given = kept.matrices<S>(given);
      all.vjp = vjp;
      all.out = new_matrices<S>(out);
      Device::template run<Inverse>(inverse, all, shape.batch(), n, n);
    });
    return out;
  }
};

}  // namespace manualgrad
