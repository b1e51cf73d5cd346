// QR: the cotangent of the matrix.
//
//   manualgrad::linalg_qr_backward.kernel(Tensor? grad_Q, Tensor? grad_R, Tensor Q, Tensor R) -> Tensor
//       Q (*, m, n), R (*, n, n), m >= n
//
// Both dims up to kLaneOrder, on the CPU for real square matrices up to kCachedOrder, on CUDA for complex128 up to
// kSharedQr; float32, float64 and their complex dtypes; any strides, the same batch for all. Only the upper triangles
// of R and grad_R have an effect. The result is dense and column-major. The result of a matrix is bitwise
// identical at any position in the batch.
//
// Called by the formula of this name in torch_manualgrad/derivatives/linalg/qr.py, which states the mathematics, and,
// in plain backwards on the CPU, by csrc/calls.
#pragma once

#include "../math/qr.h"
#include "../math/qr_rank.h"
#include "matrix_loader.h"
#include "small_matrices.h"

namespace manualgrad {

template <class S>
struct QrArguments {
  using Scalar = S;
  MatrixBatch<const S> Q, R, given_Q, given_R;  // the last two: null for zero
  MatrixBatch<S> out;
};

template <class S, int F>
struct QrVjp : QrArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kOnCpu;
  static constexpr bool kCached = true, kUniform = false, kPadded = true;
  static constexpr int kThreadOrder = 4;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return this->n() * (2 * this->m() + 4 * this->n() + 1); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int m = this->m(), n = this->n(), pitch = loader.pitch(n);
    N *Q = memory, *G = Q + m * pitch, *R = G + m * pitch, *S_R = R + n * pitch, *M = S_R + n * pitch,
      *pivots = M + n * pitch, *T = pivots + n;
    loader.read(this->Q, m, n, Q);
    read_upper(loader, this->R, n, R);
    const auto read_cotangents = [&] {
      if (this->given_Q.data != nullptr) {
        loader.read(this->given_Q, m, n, G);
      } else {
        clear(loader.threads, Part::kAll, G, m, n, pitch);
      }
      if (this->given_R.data != nullptr) read_upper(loader, this->given_R, n, S_R);
    };
    read_cotangents();
    if (this->given_R.data == nullptr) S_R = nullptr;
    const auto& threads = loader.threads;
    const QrRank<N> rank(threads, R, m, n, pitch);
    const MaskOf<N> regular = !rank.is_deficient();
    MaskOf<N> as_regular = regular, done{};
    RealOf<N> explained{};
    if (any(!regular)) {
      as_regular = regular | rank.left_by_rounding(threads, G, S_R);
      explained = rank.explained(threads, G, S_R);
    }
    constexpr bool kInLanes = !std::is_same_v<MaskOf<N>, bool>;
    // Round 0 is for matrices of full rank, and those with only rounding errors left. Round 1 computes the others
    // again, with cotangents of what is undefined set to nan; meanwhile lanes keep the first results in `out`.
    for (int round = any(as_regular) ? 0 : 1; round < 2 && any(!done); ++round) {
      if (round == 0) {
        for (int j = threads.rank(); j < n; j += threads.size()) pivots[j] = R[j * pitch + j];
        threads.sync();
      } else {
        if constexpr (kInLanes) loader.write(G, m, n, this->out);
        threads.sync();  // G has been read
        read_cotangents();
        rank.nan_unless_zero(threads, G, S_R, pivots);
      }
      if (m == n) {
        square_qr_vjp(threads, Q, R, G, S_R, M, pivots, n, pitch);
      } else if (round == 0) {
        tall_qr_vjp(threads, Q, R, G, S_R, M, pivots, m, n, pitch);
      } else {
        deficient_qr_vjp(threads, Q, R, G, S_R, M, T, pivots, m, n, pitch);
      }
      if (round == 0) {
        done = regular;
        if (any(!regular)) done = done | (as_regular & rank.is_moderate(threads, G, explained));
      } else if constexpr (kInLanes) {
        const MatrixBatch<S>& found = this->out;
        loader.read(MatrixBatch<const S>{found.data, found.batch_stride, found.row_stride, found.column_stride}, m, n,
                    Q);
        for (int e = 0; e < m * n; ++e) G[e] = select(done, Q[e], G[e]);
      }
    }
    loader.write(G, m, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct QrOperators {
  static Tensor linalg_qr_backward(const OptionalTensor& grad_Q, const OptionalTensor& grad_R, const Tensor& Q,
                                   const Tensor& R) {
    constexpr const char* where = "manualgrad::linalg_qr_backward: ";
    const MatrixShape shape = matrix_shape(where, "Q", Q, Device::kVjpOrder);
    const int64_t m = Q.size(-2), n = Q.size(-1);
    MANUALGRAD_CHECK(!Device::kIsGpu || Q.scalar_type() != ScalarType::ComplexDouble || m <= kSharedQr, where,
                     "Q: expected sides up to ", kSharedQr, " for complex128, got ", m, " by ", n);
    MANUALGRAD_CHECK(m >= n, where, "Q: expected no more columns than rows, got ", m, " by ", n);
    shape.check("R", R, {n, n});
    shape.check("grad_Q", grad_Q, {m, n});
    shape.check("grad_R", grad_R, {n, n});
    Tensor out = allocate(shape.with({n, m}), Q);  // column-major, as the formula and LAPACK have it
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
    });
    return torch::stable::transpose(out, -2, -1);
  }

  static void add_to(Library& library) { library.impl("linalg_qr_backward.kernel", TORCH_BOX(&linalg_qr_backward)); }
};

}  // namespace manualgrad
