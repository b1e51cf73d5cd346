// QR: the cotangent of the matrix, on the CPU.
//
//   manualgrad::linalg_qr_backward.kernel(Tensor? grad_Q, Tensor? grad_R, Tensor Q, Tensor R) -> (Tensor, Tensor)
//       Q (*, m, n), R (*, n, n), m >= n; the second result is a 0-dim bool: whether nan is in the first
//
// Both dims up to kLaneOrder, for real square matrices up to kCachedOrder; float32, float64 and their complex dtypes;
// any strides, the same batch for all. Only the upper triangles of R and grad_R have an effect. The result is
// contiguous and column-major. The result of a matrix is bitwise identical at any position in the batch. From the first
// pivot on that is zero up to rounding, cotangents that are not zero become nan.
//
// Called by the formula of this name in torch_manualgrad/derivatives/linalg/qr.py, which states the mathematics, and,
// in plain backwards, by csrc/calls.
#pragma once

#include "../math/qr.h"
#include "matrix_loader.h"
#include "small_matrices.h"

#include <limits>

namespace manualgrad {

template <class S>
struct QrArguments {
  using Scalar = S;
  MatrixBatch<const S> Q, R, given_Q, given_R;  // the last two: null for zero
  MatrixBatch<S> out;
};

// How many columns of a square or tall matrix determine Q.
template <class S>
HOST_DEVICE int determining(int m, int n) {
  return m == n && !NumberTraits<S>::kComplex ? n - 1 : n;
}

// Without overflow.
template <class N>
HOST_DEVICE RealOf<N> modulus(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    using R = RealOf<N>;
    const R re = absolute(a.re), im = absolute(a.im), one = real_number<R>(1);
    const auto wide = re >= im;
    const R big = select(wide, re, im), ratio = select(wide, im, re) / select(big > R{}, big, one);
    return big * square_root(one + ratio * ratio);
  } else {
    return absolute(a);
  }
}

// From the first pivot of R on that is zero up to rounding, relative to the sum of its column's moduli: makes entries
// of the cotangents G of Q and S of R nan if they are not zero, and the pivots ones, as only zeros are divided by them.
// As vanishing() and nan_unless_zero() in the Python files. S may be null. Returns which matrices have such a pivot.
template <class N>
HOST_DEVICE MaskOf<N> settle_undefined(const N* R, N* G, N* S, N* pivots, int m, int n) {
  using T = RealOf<N>;
  const T rounding = real_number<T>(static_cast<BaseOf<N>>(m) * std::numeric_limits<BaseOf<N>>::epsilon());
  const N one = from_real<N>(real_number<T>(1));
  const N nan = from_real<N>(real_number<T>(std::numeric_limits<BaseOf<N>>::quiet_NaN()));
  MaskOf<N> undefined{};
  for (int j = 0; j < n; ++j) {
    if (j < determining<N>(m, n)) {
      T column{};
      for (int i = 0; i <= j; ++i) column += modulus(R[i * n + j]) * rounding;
      const T pivot = modulus(R[j * n + j]);
      undefined = undefined | !((pivot > column) | (pivot != pivot));  // GCC 12.2 crashes at <= here
    }
    pivots[j] = R[j * n + j];
    if (!any(undefined)) continue;
    const auto settle = [&](N& x) { x = select(undefined & !is_zero(x), nan, x); };
    pivots[j] = select(undefined, one, pivots[j]);
    for (int i = 0; i < m; ++i) settle(G[i * n + j]);
    for (int i = j; S != nullptr && i < n; ++i) settle(S[j * n + i]);
  }
  return undefined;
}

template <class S, int F>
struct QrVjp : QrArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return this->n() * (3 * this->m() + 4 * this->n() + 1); }

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
    const auto deficient = settle_undefined(R, G, S_R, inverse, m, n);
    if (m == n) {
      square_qr_vjp(loader.threads, Q, R, G, S_R, M, inverse, n);
    } else if (!any(deficient)) {
      tall_qr_vjp(loader.threads, Q, R, G, S_R, M, inverse, m, n);
    } else {  // both, each for its matrices
      N *T = inverse + n, *other = T + n * n;
      for (int e = 0; e < m * n; ++e) other[e] = G[e];
      tall_qr_vjp(loader.threads, Q, R, G, S_R, M, inverse, m, n);
      deficient_qr_vjp(loader.threads, Q, R, other, S_R, M, T, inverse, m, n);
      for (int e = 0; e < m * n; ++e) G[e] = select(deficient, other[e], G[e]);
    }
    loader.write(G, m, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class S>
bool has_nan(const Tensor& x) {
  const auto* data = static_cast<const Real<S>*>(x.const_data_ptr());
  const int64_t count = x.numel() * static_cast<int64_t>(sizeof(S) / sizeof(Real<S>));
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= data[i] != data[i];
  return found;
}

template <class Device>
struct QrOperators {
  static std::tuple<Tensor, Tensor> linalg_qr_backward(const OptionalTensor& grad_Q, const OptionalTensor& grad_R,
                                                       const Tensor& Q, const Tensor& R) {
    constexpr const char* where = "manualgrad::linalg_qr_backward: ";
    const MatrixShape shape = matrix_shape(where, "Q", Q, Device::kVjpOrder);
    const int64_t m = Q.size(-2), n = Q.size(-1);
    MANUALGRAD_CHECK(m >= n, where, "Q: expected no more columns than rows, got ", m, " by ", n);
    shape.check("R", R, {n, n});
    shape.check("grad_Q", grad_Q, {m, n});
    shape.check("grad_R", grad_R, {n, n});
    Tensor undefined = new_flag_on_cpu(Q),
           out = allocate(shape.with({n, m}), Q);  // column-major, as the formula and LAPACK have it
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
      *static_cast<bool*>(undefined.mutable_data_ptr()) = has_nan<S>(out);
    });
    return {torch::stable::transpose(out, -2, -1), undefined};
  }

  static void add_to(Library& library) { library.impl("linalg_qr_backward.kernel", TORCH_BOX(&linalg_qr_backward)); }
};

}  // namespace manualgrad
