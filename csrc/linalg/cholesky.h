// Cholesky: the derivatives of the factor.
//
//   manualgrad::cholesky_backward.kernel(Tensor grad_L, Tensor L, bool upper) -> Tensor
//   manualgrad::cholesky_jvp.kernel(Tensor self_t, Tensor L, bool upper) -> Tensor
//
// Order n up to kLaneOrder, for cotangents of real matrices on the CPU up to kCachedOrder; float32, float64 and their
// complex dtypes; any strides, the same batch for all. Results are contiguous. The result of a matrix is bitwise
// identical at any position in the batch.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/cholesky.py, which state the
// mathematics, and, in plain backwards, by csrc/calls.
#pragma once

#include "../math/cholesky.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {

template <class S>
struct CholeskyArguments {
  using Scalar = S;
  MatrixBatch<const S> factor, given;
  bool conjugated;  // factor and cotangent are those of an upper factor; their transposes are given for a lower one
  MatrixBatch<S> out;
};

template <class S, int F>
struct CholeskyVjp : CholeskyArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return 2 * this->n() * this->n() + this->n(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), pitch = loader.pitch(n);
    N *R = memory, *G = R + n * pitch, *inverse = G + n * pitch;
    const Part part = loader.template whole<S>(n * n) ? Part::kAll : Part::kUpper;
    loader.read(this->factor, n, n, R, pitch, part);
    loader.read(this->given, n, n, G, pitch, part);
    if (this->conjugated) {
      conjugate_all(loader.threads, R, n * pitch);
      conjugate_all(loader.threads, G, n * pitch);
    }
    cholesky_vjp(loader.threads, R, G, inverse, n, pitch);
    loader.write(G, n, n, this->out);
  }
};

template <class S, int F>
struct CholeskyJvp : CholeskyArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  int scratch_size() const { return 2 * this->n() * this->n() + this->n(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), pitch = loader.pitch(n);
    N *R = memory, *A = R + n * pitch, *inverse = A + n * pitch;
    loader.read(this->factor, n, n, R, pitch, loader.template whole<S>(n * n) ? Part::kAll : Part::kUpper);
    loader.read(this->given, n, n, A);
    if (this->conjugated) conjugate_all(loader.threads, R, n * pitch);
    cholesky_jvp(loader.threads, R, A, inverse, n, pitch);
    if (this->conjugated) conjugate_all(loader.threads, A, n * pitch);
    loader.write(A, n, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct CholeskyOperators {
  static Tensor cholesky_backward(const Tensor& grad_L, const Tensor& L, bool upper) {
    return cholesky<CholeskyVjp>("manualgrad::cholesky_backward: ", "grad_L", grad_L, L, upper);
  }
  static Tensor cholesky_jvp(const Tensor& self_t, const Tensor& L, bool upper) {
    return cholesky<CholeskyJvp>("manualgrad::cholesky_jvp: ", "self_t", self_t, L, upper);
  }

  static void add_to(Library& library) {
    library.impl("cholesky_backward.kernel", TORCH_BOX(&cholesky_backward));
    library.impl("cholesky_jvp.kernel", TORCH_BOX(&cholesky_jvp));
  }

 private:
  template <template <class, int> class Kernel>
  static Tensor cholesky(const char* where, const char* name, const Tensor& given, const Tensor& L, bool upper) {
    const MatrixShape shape = square_shape(where, "L", L, (Kernel<float, 0>::kCached ? Device::kVjpOrder : kLaneOrder));
    const int64_t n = L.size(-1);
    shape.check(name, given, {n, n});
    Tensor out = allocate(shape.with({n, n}), L);
    dispatch_filled(out, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      constexpr bool kVjp = std::is_same_v<Kernel<S, 0>, CholeskyVjp<S, 0>>;
      KeptMatrices kept;
      const MatrixBatch<const S> factor = kept.matrices<S>(L), g = kept.matrices<S>(given);
      const MatrixBatch<S> to = new_matrices<S>(out);
      CholeskyArguments<S> all{};
      all.factor = upper ? factor : factor.transposed();
      all.given = kVjp && !upper ? g.transposed() : g;
      all.conjugated = upper;
      all.out = !kVjp && upper ? to.transposed() : to;
      Device::template run<Kernel>(L, all, shape.batch(), n, n);
    });
    return out;
  }
};

}  // namespace manualgrad
