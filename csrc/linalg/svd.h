// The SVD: its derivatives, and the decomposition of small matrices.
//
//   manualgrad::svd_backward.kernel(Tensor? gU, Tensor? gS, Tensor? gVh, Tensor U, Tensor S, Tensor Vh, <options>)
//       -> (Tensor gA, Tensor gauge_dependent)
//   manualgrad::linalg_svd_jvp.kernel(Tensor dA, Tensor U, Tensor S, Tensor Vh, <options>)
//       -> (Tensor dU, Tensor dS, Tensor dVh, Tensor gauge_dependent)
//   <options>: float? rtol, float atol, float broadening
//   manualgrad::svd_jacobi(Tensor A) -> (Tensor U, Tensor S, Tensor Vh)
//       thin; min(m, n) up to kJacobiRank, max(m, n) up to kJacobiOrder
//
// U is (*, m, k), S (*, k), Vh (*, k, n) with k = min(m, n); float32, float64 and their complex dtypes; any strides.
// Results are contiguous. The last is a 0-dim bool: whether rule 4 applied anywhere.
// svd_jacobi: the results of a matrix are bitwise identical at any position in the batch; an inf or a nan makes all of
// them nan.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/svd.py and, in plain backwards, by
// csrc/calls; svd_jacobi by torch_manualgrad/primal/svd.py.
#pragma once

#include "../math/svd.h"
#include "matrix_loader.h"
#include "small_matrices.h"
#include "spectrum/decomposition.h"

#include <tuple>

namespace manualgrad {

// A (m, n) with m >= n: the given matrix, or its adjoint (`turned`). `y` gets the rows of U^H of A, `x` those of V^H.
template <class S>
struct SvdJacobiArguments {
  using Scalar = S;
  bool turned;
  MatrixBatch<const S> a;
  MatrixBatch<S> y, x;
  MatrixBatch<Real<S>> s;
};

template <class S, int F>
struct SvdJacobi : SvdJacobiArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kNever;
  static constexpr int kThreadOrder = 4;
  static constexpr bool kUniform = false;

  int scratch_size() const { return 2 * this->m() * this->n() + this->n() * this->n() + 4 * this->n(); }
  int64_t work() const { return 16 * scratch_size(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    using R = RealOf<N>;
    const int m = this->m(), n = this->n();
    const bool turned = this->turned;
    N *B = memory, *X = B + m * n, *Y = X + n * n, *phases = Y + n * m;
    R* reals = reinterpret_cast<R*>(phases + n);
    loader.read(this->a, m, n, B);
    if (turned) conjugate_all(loader.threads, B, m * n);
    svd(loader.threads, B, SvdMemory<N>{X, Y, phases, reals, reals + n, reals + 2 * n}, m, n, !turned);
    conjugate_all(loader.threads, turned ? X : Y, turned ? n * n : n * m);
    loader.write(X, n, n, this->x);
    loader.write(Y, n, m, this->y);
    loader.write(reals, 1, n, this->s);
  }
};

template <class Device>
struct SvdOperators {
  static std::tuple<Tensor, Tensor> svd_backward(const OptionalTensor& gu, const OptionalTensor& gs,
                                                 const OptionalTensor& gvh, const Tensor& u, const Tensor& s,
                                                 const Tensor& vh, std::optional<double> rtol, double atol,
                                                 double broadening) {
    const char* where = "manualgrad::svd_backward: ";
    return decomposition_vjp<Derivative<false, true>, Device>(where, {gu, gs, gvh},
                                                              decomposition(where, u, s, vh, rtol, atol, broadening));
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linalg_svd_jvp(const Tensor& da, const Tensor& u, const Tensor& s,
                                                                   const Tensor& vh, std::optional<double> rtol,
                                                                   double atol, double broadening) {
    const char* where = "manualgrad::linalg_svd_jvp: ";
    Tensor gauge_dependent = Device::new_flag(u);
    Tangents t = decomposition_jvp<Derivative<true, true>, Device>(
        where, da, decomposition(where, u, s, vh, rtol, atol, broadening), gauge_dependent);
    return {t.u, t.s, *t.vh, gauge_dependent};
  }

  static std::tuple<Tensor, Tensor, Tensor> svd_jacobi(const Tensor& A) {
    constexpr const char* where = "manualgrad::svd_jacobi: ";
    const MatrixShape shape = decomposed_shape(where, A, kJacobiOrder, kJacobiRank);
    const int64_t rows = A.size(-2), columns = A.size(-1), m = std::max(rows, columns), n = std::min(rows, columns);
    Tensor U = allocate(shape.with({rows, n}), A), Vh = allocate(shape.with({n, columns}), A);
    Tensor S = torch::stable::new_empty(A, shape.with({n}), real_dtype(A.scalar_type()));
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t batch = shape.batch();
      if (batch == 0 || n == 0) return;
      KeptMatrices kept;
      const MatrixBatch<const T> given = kept.matrices<T>(A);
      const MatrixBatch<T> u = new_matrices<T>(U).transposed(), vh = new_matrices<T>(Vh);
      const MatrixBatch<Real<T>> s{static_cast<Real<T>*>(S.mutable_data_ptr()), n, n, 1};
      Device::template run<SvdJacobi>(A,
                                      rows < columns ? SvdJacobiArguments<T>{true, given.transposed(), vh, u, s}
                                                     : SvdJacobiArguments<T>{false, given, u, vh, s},
                                      batch, m, n);
    });
    return {U, S, Vh};
  }

  static void add_to(Library& library) {
    library.impl("svd_backward.kernel", TORCH_BOX(&svd_backward));
    library.impl("linalg_svd_jvp.kernel", TORCH_BOX(&linalg_svd_jvp));
    library.impl("svd_jacobi", TORCH_BOX(&svd_jacobi));
  }
};

}  // namespace manualgrad
