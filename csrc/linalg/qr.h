// QR: the cotangent of the matrix, on the CPU.
//
//   manualgrad::linalg_qr_backward.kernel(Tensor? grad_Q, Tensor? grad_R, Tensor Q, Tensor R)
//       -> (Tensor grad_A, Tensor deficient)
//       Q (*, m, n), R (*, n, n), m >= n
//
// Either dim up to kLaneOrder; float32, float64 and their complex dtypes; any strides, all of one batch. Of R and
// grad_R the upper triangle has an effect. A pivot of zero gives inf or nan in its matrix. Results are contiguous
// column-major, those of a matrix bitwise identical wherever it stands in the batch. `deficient` is a 0-dim bool:
// whether a pivot of any matrix is zero to rounding. The mathematics is in torch_manualgrad/derivatives/linalg/qr.py.
#pragma once

#include "../math/qr.h"
#include "matrix_loader.h"
#include "small_matrices.h"

#include <cmath>
#include <limits>
#include <tuple>

namespace manualgrad {

template <class S>
struct QrArguments {
  using Scalar = S;
  MatrixBatch<const S> Q, R, given_Q, given_R;  // those given: null for zero
  MatrixBatch<S> out;
};

template <class S, int F>
struct QrVjp : QrArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kAlways;
  int scratch_size() const { return this->n() * (2 * this->m() + 3 * this->n() + 1); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int m = this->m(), n = this->n();
    N *Q = memory, *G = Q + m * n, *R = G + m * n, *S_R = R + n * n, *M = S_R + n * n, *inverse = M + n * n;
    loader.read(this->Q, m, n, Q);
    read_upper(loader, this->R, n, R);
    if (this->given_Q.data != nullptr) {
      loader.read(this->given_Q, m, n, G);
    } else {
      clear(loader.threads, Part::kAll, G, m, n);
    }
    if (this->given_R.data != nullptr) {
      read_upper(loader, this->given_R, n, S_R);
    } else {
      S_R = nullptr;
    }
    if (m > n) {
      tall_qr_vjp(loader.threads, Q, R, G, S_R, M, inverse, m, n);
    } else {
      square_qr_vjp(loader.threads, Q, R, G, S_R, M, inverse, n);
    }
    loader.write(G, m, n, this->out);
  }
};

// Whether in any of the matrices R, of as many A with m rows, a pivot is zero to rounding beside the sum of its
// column's moduli. As _vanishing() in the Python file.
template <class S>
bool any_deficient(const MatrixBatch<const S>& R, int64_t batch, int64_t m, int64_t n) {
  using T = Real<S>;
  const auto modulus = [](const S& x) {
    if constexpr (NumberTraits<S>::kComplex) {
      return std::hypot(x.re, x.im);
    } else {
      return std::fabs(x);
    }
  };
  const T rounding = static_cast<T>(m) * std::numeric_limits<T>::epsilon();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t j = 0; j < n; ++j) {
      T column{};
      for (int64_t i = 0; i <= j; ++i) column += modulus(R.at(b, i, j)) * rounding;
      if (modulus(R.at(b, j, j)) <= column) return true;
    }
  }
  return false;
}

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct QrOperators {
  static std::tuple<Tensor, Tensor> linalg_qr_backward(const OptionalTensor& grad_Q, const OptionalTensor& grad_R,
                                                       const Tensor& Q, const Tensor& R) {
    constexpr const char* where = "manualgrad::linalg_qr_backward: ";
    const MatrixShape shape = matrix_shape(where, "Q", Q);
    const int64_t m = Q.size(-2), n = Q.size(-1);
    MANUALGRAD_CHECK(m >= n, where, "Q: expected no more columns than rows, got ", m, " by ", n);
    shape.check("R", R, {n, n});
    shape.check("grad_Q", grad_Q, {m, n});
    shape.check("grad_R", grad_R, {n, n});
    Tensor out = allocate(shape.with({n, m}), Q);  // column-major, as the formula and LAPACK have it
    Tensor deficient = new_flag_on_cpu(Q);
    dispatch_filled(out, where, "Q", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      QrArguments<S> all{};
      all.Q = kept.matrices<S>(Q);
      all.R = kept.matrices<S>(R);
      all.given_Q = kept.matrices<S>(grad_Q);
      all.given_R = kept.matrices<S>(grad_R);
      all.out = new_matrices<S>(out).transposed();
      Device::template run<QrVjp>(Q, all, shape.batch(), m, n);
      *static_cast<bool*>(deficient.mutable_data_ptr()) = any_deficient(all.R, shape.batch(), m, n);
    });
    return {torch::stable::transpose(out, -2, -1), deficient};
  }

  static void add_to(Library& library) { library.impl("linalg_qr_backward.kernel", TORCH_BOX(&linalg_qr_backward)); }
};

}  // namespace manualgrad
