// The derivatives of triangular solves and of QR for small matrices: arguments checked, results allocated, and what is
// done with one matrix. The mathematics is in torch_manualgrad/derivatives/linalg.
//
//   manualgrad::linalg_solve_triangular_backward.kernel(
//       Tensor grad, Tensor A, Tensor X, bool upper, bool left, bool unitriangular) -> (Tensor gA, Tensor gB)
//       A (*, n, n); X (*, n, k), or (*, k, n) if not left
//   manualgrad::qr_pullback(Tensor? grad_Q, Tensor? grad_R, Tensor Q, Tensor R) -> Tensor
//       Q (*, m, n), R (*, n, n), m >= n; on the CPU
//
// Sides up to 32; float32, float64 and their complex dtypes; any strides, all of one batch. Of A, R and grad_R one
// triangle has an effect, of A without the diagonal if that counts as ones. A pivot of zero gives inf or nan in its
// matrix. Results are contiguous, that of qr_pullback by columns; those of a matrix are the same to the bit wherever it
// stands in the batch.
#pragma once

#include "math/triangular.h"
#include "matrix_operators.h"
#include "one_matrix.h"

#include <tuple>

namespace manualgrad {

// --- what is done with one matrix, or with as many as there are lanes -----------------------------------------------

// The upper triangle; a small matrix is read faster as a whole.
template <class Move, class S, class N>
HOST_DEVICE void read_upper(const Move& move, const MatrixBatch<const S>& from, int n, N* to) {
  move.read(from, n, n, to, n, move.template whole<S>(n * n) ? Part::kAll : Part::kUpper);
}

// n: the side of the triangle; m: the number of right-hand sides. The triangle is upper, or the transpose of a lower
// one, and so is its cotangent.
template <class S>
struct TriangularArguments {
  using Scalar = S;
  MatrixBatch<const S> triangle, solution, given;
  bool upper, unitriangular;
  MatrixBatch<S> out, out_right;
};

template <class S, int F>
struct TriangularPull : TriangularArguments<S>, Sides<F> {
  int numbers() const { return this->n() * (this->n() + 2 * this->m() + 1); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n(), r = this->m();
    N *T = memory, *G = T + n * n, *X = G + n * r, *inverse = X + n * r;
    read_upper(move, this->triangle, n, T);
    move.read(this->given, n, r, G);
    move.read(this->solution, n, r, X);
    conjugate_all(move.team, X, n * r);
    if (this->unitriangular) {
      triangular_pull_back(move.team, T, G, X, Ones{}, this->upper, true, n, r);
    } else {
      invert_diagonal<Factor::kConjugate>(move.team, T, n, n, inverse);
      triangular_pull_back(move.team, T, G, X, inverse, this->upper, false, n, r);
    }
    move.write(T, n, n, this->out);
    move.write(G, n, r, this->out_right);
  }
};

template <class S>
struct QrArguments {
  using Scalar = S;
  MatrixBatch<const S> Q, R, given_Q, given_R;  // those given: null for zero
  MatrixBatch<S> out;
};

template <class S, int F>
struct QrPull : QrArguments<S>, Sides<F> {
  int numbers() const { return this->n() * (2 * this->m() + 3 * this->n() + 1); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int m = this->m(), n = this->n();
    N *Q = memory, *G = Q + m * n, *R = G + m * n, *S_R = R + n * n, *M = S_R + n * n, *inverse = M + n * n;
    move.read(this->Q, m, n, Q);
    read_upper(move, this->R, n, R);
    if (this->given_Q.data != nullptr) {
      move.read(this->given_Q, m, n, G);
    } else {
      clear(move.team, Part::kAll, G, m, n);
    }
    if (this->given_R.data != nullptr) {
      read_upper(move, this->given_R, n, S_R);
    } else {
      S_R = nullptr;
    }
    if (m > n) {
      tall_qr_pull_back(move.team, Q, R, G, S_R, M, inverse, m, n);
    } else {
      square_qr_pull_back(move.team, Q, R, G, S_R, M, inverse, n);
    }
    move.write(G, m, n, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

// Device::run<Family>(like, arguments, batch, m, n) runs Family<S, F> over the batch; there is at least one entry.
template <class Device>
struct TriangleOperators {
  static std::tuple<Tensor, Tensor> linalg_solve_triangular_backward(const Tensor& grad, const Tensor& A,
                                                                     const Tensor& X, bool upper, bool left,
                                                                     bool unitriangular) {
    constexpr const char* where = "manualgrad::linalg_solve_triangular_backward: ";
    const detail::FactorShape shape = detail::square_factor(where, "A", A);
    const int64_t n = A.size(-1), k = detail::right_hand_sides(where, X, A, left ? -1 : -2);
    const int64_t rows = left ? n : k, columns = left ? k : n;
    shape.check("X", X, {rows, columns});
    shape.check("grad", grad, {rows, columns});
    Tensor gA = allocate(shape.with({n, n}), A), gB = allocate(shape.with({rows, columns}), A);
    detail::dispatch_filled(gA, where, "A", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      // X A = B is A^T X^T = B^T, and a lower triangle is given transposed
      const auto turned = [](const auto& matrix, bool turn) { return turn ? matrix.transposed() : matrix; };
      TriangularArguments<S> all{};
      all.upper = upper == left;
      all.unitriangular = unitriangular;
      all.triangle = turned(kept.matrices<S>(A), !upper);
      all.solution = turned(kept.matrices<S>(X), !left);
      all.given = turned(kept.matrices<S>(grad), !left);
      all.out = turned(new_matrices<S>(gA), !upper);
      all.out_right = turned(new_matrices<S>(gB), !left);
      Device::template run<TriangularPull>(A, all, shape.batch(), k, n);
    });
    return {gA, gB};
  }

  static Tensor qr_pullback(const OptionalTensor& grad_Q, const OptionalTensor& grad_R, const Tensor& Q,
                            const Tensor& R) {
    constexpr const char* where = "manualgrad::qr_pullback: ";
    const detail::FactorShape shape = detail::factor_shape(where, "Q", Q);
    const int64_t m = Q.size(-2), n = Q.size(-1);
    MANUALGRAD_CHECK(m >= n, where, "Q: expected no more columns than rows, got ", m, " by ", n);
    shape.check("R", R, {n, n});
    shape.check("grad_Q", grad_Q, {m, n});
    shape.check("grad_R", grad_R, {n, n});
    Tensor out = allocate(shape.with({n, m}), Q);  // by columns, as the formula and LAPACK have it
    detail::dispatch_filled(out, where, "Q", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      QrArguments<S> all{};
      all.Q = kept.matrices<S>(Q);
      all.R = kept.matrices<S>(R);
      all.given_Q = kept.matrices<S>(grad_Q);
      all.given_R = kept.matrices<S>(grad_R);
      all.out = new_matrices<S>(out).transposed();
      Device::template run<QrPull>(Q, all, shape.batch(), m, n);
    });
    return torch::stable::transpose(out, -2, -1);
  }
};

}  // namespace manualgrad
