// The Hermitian eigendecomposition: its derivatives, and that of small matrices.
//
//   manualgrad::linalg_eigh_backward.kernel(Tensor? gL, Tensor? gV, Tensor L, Tensor V, <options>)
//       -> (Tensor gA, Tensor gauge_dependent)
//   manualgrad::linalg_eigh_jvp.kernel(Tensor dA, Tensor L, Tensor V, <options>)
//       -> (Tensor dL, Tensor dV, Tensor gauge_dependent)
//   <options>: float? rtol, float atol, float broadening
//   manualgrad::eigh_jacobi(Tensor A, bool lower) -> (Tensor L, Tensor V)
//       n up to kJacobiRank; one triangle is read
//
// L is (*, n), V (*, n, n); float32, float64 and their complex dtypes; any strides. Results are contiguous. The last
// result of a derivative is a 0-dim bool: whether rule 4 applied anywhere. eigh_jacobi: the results of a matrix are
// bitwise identical at any position in the batch; an inf or a nan makes all of them nan.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/eigh.py and, in plain backwards, by
// csrc/calls; eigh_jacobi by torch_manualgrad/primal/eigh.py.
#pragma once

#include "../math/eigh.h"
#include "matrix_loader.h"
#include "small_matrices.h"
#include "spectrum/decomposition.h"

#include <tuple>

namespace manualgrad {

template <class S>
struct EighJacobiArguments {
  using Scalar = S;
  bool lower;
  MatrixBatch<const S> a;
  MatrixBatch<S> y;  // takes the rows of V^H
  MatrixBatch<Real<S>> l;
};

template <class S, int F>
struct EighJacobi : EighJacobiArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kNever;
  static constexpr int kThreadOrder = 4;
  static constexpr bool kUniform = false;

  int scratch_size() const { return 2 * this->n() * this->n() + this->n(); }
  int64_t work() const { return 16 * scratch_size(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n();
    N *A = memory, *Y = A + n * n;
    RealOf<N>* L = reinterpret_cast<RealOf<N>*>(Y + n * n);
    loader.read(this->a, n, n, A);
    eigh(loader.threads, A, Y, L, n, this->lower);
    conjugate_all(loader.threads, Y, n * n);
    loader.write(Y, n, n, this->y);
    loader.write(L, 1, n, this->l);
  }
};

template <class Device>
struct EighOperators {
  static std::tuple<Tensor, Tensor> linalg_eigh_backward(const OptionalTensor& gl, const OptionalTensor& gv,
                                                         const Tensor& l, const Tensor& v, std::optional<double> rtol,
                                                         double atol, double broadening) {
    const char* where = "manualgrad::linalg_eigh_backward: ";
    return decomposition_vjp<Derivative<false, false>, Device>(
        where, {gv, gl, std::nullopt}, decomposition(where, v, l, std::nullopt, rtol, atol, broadening));
  }

  static std::tuple<Tensor, Tensor, Tensor> linalg_eigh_jvp(const Tensor& da, const Tensor& l, const Tensor& v,
                                                            std::optional<double> rtol, double atol,
                                                            double broadening) {
    const char* where = "manualgrad::linalg_eigh_jvp: ";
    Tensor gauge_dependent = Device::new_flag(v);
    Tangents t = decomposition_jvp<Derivative<true, false>, Device>(
        where, da, decomposition(where, v, l, std::nullopt, rtol, atol, broadening), gauge_dependent);
    return {t.s, t.u, gauge_dependent};
  }

  static std::tuple<Tensor, Tensor> eigh_jacobi(const Tensor& A, bool lower) {
    constexpr const char* where = "manualgrad::eigh_jacobi: ";
    const MatrixShape shape = decomposed_shape(where, A, kJacobiRank, kJacobiRank);
    const int64_t n = A.size(-1);
    MANUALGRAD_CHECK(A.size(-2) == n, where, "A: expected square matrices, got ", A.size(-2), " by ", n);
    Tensor V = allocate(shape.with({n, n}), A);
    Tensor L = torch::stable::new_empty(A, shape.with({n}), real_dtype(A.scalar_type()));
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t batch = shape.batch();
      if (batch == 0 || n == 0) return;
      KeptMatrices kept;
      const MatrixBatch<Real<T>> l{static_cast<Real<T>*>(L.mutable_data_ptr()), n, n, 1};
      const EighJacobiArguments<T> all{lower, kept.matrices<T>(A), new_matrices<T>(V).transposed(), l};
      Device::template run<EighJacobi>(A, all, batch, n, n);
    });
    return {L, V};
  }

  static void add_to(Library& library) {
    library.impl("linalg_eigh_backward.kernel", TORCH_BOX(&linalg_eigh_backward));
    library.impl("linalg_eigh_jvp.kernel", TORCH_BOX(&linalg_eigh_jvp));
    library.impl("eigh_jacobi", TORCH_BOX(&eigh_jacobi));
  }
};

}  // namespace manualgrad
