// The derivatives of LU, Cholesky, determinants, inverses and solves of small matrices: arguments checked, results
// allocated, and what is done with one matrix. The mathematics is in torch_manualgrad/derivatives/linalg.
//
//   manualgrad::linalg_lu_backward.kernel(
//       Tensor? grad_L, Tensor? grad_U, Tensor P, Tensor L, Tensor U, bool pivot) -> Tensor
//   manualgrad::linalg_lu_jvp.kernel(Tensor A_t, Tensor P, Tensor L, Tensor U, bool pivot)
//       -> (Tensor dL, Tensor dU)
//   manualgrad::lu_factor_ex_backward.kernel(Tensor grad_LU, Tensor LU, Tensor pivots, bool pivot) -> Tensor
//   manualgrad::lu_factor_ex_jvp.kernel(Tensor A_t, Tensor LU, Tensor pivots, bool pivot) -> Tensor
//   manualgrad::cholesky_backward.kernel(Tensor grad_L, Tensor L, bool upper) -> Tensor
//   manualgrad::cholesky_jvp.kernel(Tensor self_t, Tensor L, bool upper) -> Tensor
//   manualgrad::det_pullback(Tensor grad, Tensor det, Tensor LU, Tensor pivots) -> Tensor
//   manualgrad::slogdet_pullback(Tensor h, Tensor LU, Tensor pivots) -> Tensor
//   manualgrad::linalg_inv_backward.kernel(Tensor grad_inverse, Tensor inverse) -> Tensor
//   manualgrad::linalg_inv_jvp.kernel(Tensor A_t, Tensor inverse) -> Tensor
//   manualgrad::linalg_solve_backward.kernel(Tensor gX, Tensor X, Tensor A, Tensor LU, Tensor pivots, bool left)
//       -> (Tensor gA, Tensor gB)
//   manualgrad::linalg_solve_jvp.kernel(
//       Tensor? dA, Tensor? dB, Tensor X, Tensor A, Tensor LU, Tensor pivots, bool left) -> Tensor
//
// Sides up to 32, those of real square matrices on the CPU up to 256 but for tangents of factors; float32, float64 and
// their complex dtypes, int32 pivots; any strides, all of one batch. Solves are of A X = B: left is true. Results are
// contiguous, those of a matrix the same to the bit wherever it stands in the batch.
#pragma once

#include "math/triangular.h"
#include "matrix_operators.h"
#include "one_matrix.h"

#include <algorithm>
#include <tuple>

namespace manualgrad {

static_assert(kLargestFactor <= kLargestOrder);

using Pivots = MatrixBatch<const int32_t>;

// --- what is done with one matrix, or with as many as there are lanes -----------------------------------------------

// Below the diagonal from one, and on it and above from the other, where they are; zero where not.
template <class S>
struct Packed {
  MatrixBatch<const S> lower, upper;
  bool one;  // both are parts of one matrix

  // `scratch`: memory for a matrix.
  template <class Move, class N>
  HOST_DEVICE void read(const Move& move, int m, int n, N* to, N* scratch) const {
    if (one) return move.read(upper, m, n, to);
    const int k = m < n ? m : n;
    read_part(move, lower, Part::kLower, m, k, n, to, scratch);
    read_part(move, upper, Part::kUpper, k, n, n, to, scratch);
    // what is above the diagonal and in neither
    if (upper.data == nullptr) clear(move.team, Part::kUpper, to, m, n);
    if (lower.data == nullptr) clear(move.team, Part::kLower, to, m, n);
  }

 private:
  // A small matrix is read faster as a whole.
  template <class Move, class N>
  HOST_DEVICE static void read_part(const Move& move, const MatrixBatch<const S>& from, Part part, int rows,
                                    int columns, int pitch, N* to, N* scratch) {
    if (from.data == nullptr) return;
    if (!move.template whole<S>(rows * columns)) return move.read(from, rows, columns, to, pitch, part);
    move.read(from, rows, columns, scratch);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        if (belongs(part, i, j)) to[i * pitch + j] = scratch[i * columns + j];
      }
    }
  }
};

template <class S>
struct LuArguments {
  using Scalar = S;
  Packed<S> factors, given;  // cotangents, or the tangent
  MatrixBatch<const S> P;
  Pivots pivots;
  MatrixBatch<S> out, out_upper;  // out_upper: null where all goes into one matrix

  template <class Move, class N>
  HOST_DEVICE const int* order(const Move& move, int m, int n, N* scratch, int* found, N* spoilt) const {
    if (P.data != nullptr) return move.order(P, m, scratch, found, spoilt, m * n);
    return move.order(pivots, m, m < n ? m : n, found, scratch);
  }
};

// The memory of one, as numbers: three matrices, one of them m by m, then the inverse pivots and the order.
inline int factor_numbers(int m, int n) { return 2 * m * n + std::max(m, n) * std::max(m, n) + 2 * std::max(m, n); }

template <class S, int F>
struct LuPull : LuArguments<S>, Sides<F> {
  int numbers() const { return factor_numbers(this->m(), this->n()); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int m = this->m(), n = this->n(), side = m > n ? m : n;
    N *factors = memory, *G = factors + m * n, *scratch = G + m * n, *inverse = scratch + side * side;
    this->factors.read(move, m, n, factors, scratch);
    this->given.read(move, m, n, G, scratch);
    const int* order = this->order(move, m, n, scratch, reinterpret_cast<int*>(inverse + side), G);
    lu_pull_back(move.team, factors, G, inverse, m, n, this->given.lower.data != nullptr);
    move.write(G, m, n, this->out, order);
  }
};

template <class S, int F>
struct LuPush : LuArguments<S>, Sides<F> {
  int numbers() const { return factor_numbers(this->m(), this->n()); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int m = this->m(), n = this->n(), k = m < n ? m : n, side = m > n ? m : n;
    N *factors = memory, *B = factors + m * n, *dU = B + m * n, *inverse = dU + side * side;
    move.read(this->given.upper, m, n, factors);
    const int* order = this->order(move, m, n, dU, reinterpret_cast<int*>(inverse + side), factors);
    move.reorder(factors, m, n, order, B);
    this->factors.read(move, m, n, factors, dU);
    lu_push_forward(move.team, factors, B, dU, inverse, m, n);
    const bool one = this->out_upper.data == nullptr;
    if (one) {
      for (int i = 0; i < k; ++i) {
        for (int j = i + move.team.rank(); j < n; j += move.team.size()) B[i * n + j] = dU[i * n + j];
      }
    } else {
      clear(move.team, Part::kLower, dU, k, n);
      move.write(dU, k, n, this->out_upper);
      for (int i = 0; i < m; ++i) {
        for (int j = move.team.rank(); j < k; j += move.team.size()) factors[i * k + j] = B[i * n + j];
      }
    }
    move.team.sync();
    move.write(one ? B : factors, m, one ? n : k, this->out);
  }
};

template <class S>
struct CholeskyArguments {
  using Scalar = S;
  MatrixBatch<const S> factor, given;
  bool conjugated;  // factor and cotangent are those of an upper factor; their transposes are given for a lower one
  MatrixBatch<S> out;
};

template <class S, int F>
struct CholeskyPull : CholeskyArguments<S>, Sides<F> {
  int numbers() const { return 2 * this->n() * this->n() + this->n(); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n();
    N *R = memory, *G = R + n * n, *inverse = G + n * n;
    const Part part = move.template whole<S>(n * n) ? Part::kAll : Part::kUpper;
    move.read(this->factor, n, n, R, n, part);
    move.read(this->given, n, n, G, n, part);
    if (this->conjugated) {
      conjugate_all(move.team, R, n * n);
      conjugate_all(move.team, G, n * n);
    }
    cholesky_pull_back(move.team, R, G, inverse, n);
    move.write(G, n, n, this->out);
  }
};

template <class S, int F>
struct CholeskyPush : CholeskyArguments<S>, Sides<F> {
  int numbers() const { return 2 * this->n() * this->n() + this->n(); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n();
    N *R = memory, *A = R + n * n, *inverse = A + n * n;
    move.read(this->factor, n, n, R, n, move.template whole<S>(n * n) ? Part::kAll : Part::kUpper);
    move.read(this->given, n, n, A);
    if (this->conjugated) conjugate_all(move.team, R, n * n);
    cholesky_push_forward(move.team, R, A, inverse, n);
    if (this->conjugated) conjugate_all(move.team, A, n * n);
    move.write(A, n, n, this->out);
  }
};

// g conj(det B^-1), B = P L U, with adj(B) where pivots are zero; with no det, h conj(B^-1), nan where pivots are zero.
template <class S>
struct DetArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, g, det;
  Pivots pivots;
  MatrixBatch<S> out;
};

template <class S, int F>
struct DetPull : DetArguments<S>, Sides<F> {
  int numbers() const { return 2 * this->n() * this->n() + 3 * this->n() + 2; }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    using R = RealOf<N>;
    const int n = this->n();
    N *factors = memory, *Y = factors + n * n, *inverse = Y + n * n, *counts = inverse + n, *scalars = counts + n;
    R* zeros = reinterpret_cast<R*>(counts);
    move.read(this->factors, n, n, factors);
    move.read(this->g, 1, 1, scalars);
    if (this->det.data != nullptr) move.read(this->det, 1, 1, scalars + 1);
    move.permutation(n, move.order(this->pivots, n, n, reinterpret_cast<int*>(scalars + 2), Y), Y);
    const R found = zero_pivots(factors, n);
    const auto singular = found != R{};
    move.team.sync();
    const bool adjugate = this->det.data != nullptr && any(singular);
    N scale = conjugate(scalars[0]);
    if (adjugate) {
      if (move.team.rank() == 0) {
        const N product = without_zeros(factors, zeros, n) * move.parity(this->pivots, n, Y);
        scalars[1] = select(singular, product, scalars[1]);
      }
      move.team.sync();
    }
    if (this->det.data != nullptr) {
      scale = scale * scalars[1];
    } else {
      const R nan = real_number<R>(std::numeric_limits<BaseOf<N>>::quiet_NaN());
      scale = select(singular, from_real<N>(nan), scale);
    }
    solve_lower(move.team, factors, Y, n, n);
    if (adjugate) clear_rows<true>(move.team, zeros, Y, n);
    solve_upper(move.team, factors, Y, inverse, n, n);
    if (adjugate) clear_rows<false>(move.team, zeros, Y, n);
    for (int e = move.team.rank(); e < n * n; e += move.team.size()) Y[e] = conjugate(Y[e] * scale);
    move.team.sync();
    move.write(Y, n, n, this->out);
  }
};

// -X^H g X^H, or -X g X.
template <class S>
struct InverseArguments {
  using Scalar = S;
  MatrixBatch<const S> inverse, given;
  bool pull;
  MatrixBatch<S> out;
};

template <class S, int F>
struct Inverse : InverseArguments<S>, Sides<F> {
  int numbers() const { return 3 * this->n() * this->n(); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n();
    N *X = memory, *G = X + n * n, *half = G + n * n;
    move.read(this->pull ? this->inverse.transposed() : this->inverse, n, n, X);
    move.read(this->given, n, n, G);
    if (this->pull) conjugate_all(move.team, X, n * n);
    multiply<Sum::kReplace>(move.team, Grid<const N>{G, n, 1}, Grid<const N>{X, n, 1}, n, n, n, half);
    multiply<Sum::kReplaceNegative>(move.team, Grid<const N>{X, n, 1}, Grid<const N>{half, n, 1}, n, n, n, G);
    move.write(G, n, n, this->out);
  }
};

// n: the side of the matrix; m: the number of right-hand sides.
template <class S>
struct SolveArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, solution, given;
  Pivots pivots;
  MatrixBatch<S> out, out_right;
};

template <class S, int F>
struct SolvePull : SolveArguments<S>, Sides<F> {
  int numbers() const { return 2 * this->n() * (this->n() + this->m() + 1); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n(), r = this->m();
    N *factors = memory, *G = factors + n * n, *X = G + n * r, *gA = X + n * r, *inverse = gA + n * n;
    move.read(this->factors, n, n, factors);
    move.read(this->given, n, r, G);
    const int* order = move.order(this->pivots, n, n, reinterpret_cast<int*>(inverse + n), G);
    lu_solve_adjoint(move.team, factors, G, inverse, n, r);
    move.write(G, n, r, this->out_right, order);
    move.read(this->solution, n, r, X);
    conjugate_all(move.team, X, n * r);
    multiply<Sum::kReplaceNegative>(move.team, Grid<const N>{G, r, 1}, Grid<const N>{X, 1, r}, n, r, n, gA);
    move.write(gA, n, n, this->out, order);
  }
};

template <class S>
struct SolvePushArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, solution, matrix_tangent, right_tangent;  // of the tangents null for zero
  Pivots pivots;
  MatrixBatch<S> out;
};

template <class S, int F>
struct SolvePush : SolvePushArguments<S>, Sides<F> {
  int numbers() const { return 2 * this->n() * (this->n() + this->m() + 1); }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    const int n = this->n(), r = this->m();
    N *factors = memory, *X = factors + n * n, *R = X + n * r, *dA = R + n * r, *inverse = dA + n * n;
    if (this->right_tangent.data != nullptr) {
      move.read(this->right_tangent, n, r, R);
    } else {
      for (int e = move.team.rank(); e < n * r; e += move.team.size()) R[e] = N{};
      move.team.sync();
    }
    if (this->matrix_tangent.data != nullptr) {
      move.read(this->matrix_tangent, n, n, dA);
      move.read(this->solution, n, r, X);
      multiply<Sum::kSubtract>(move.team, Grid<const N>{dA, n, 1}, Grid<const N>{X, r, 1}, n, n, r, R);
    }
    move.reorder(R, n, r, move.order(this->pivots, n, n, reinterpret_cast<int*>(inverse + n), R), X);
    move.read(this->factors, n, n, factors);
    solve_lower(move.team, factors, X, n, r);
    solve_upper(move.team, factors, X, inverse, n, r);
    move.write(X, n, r, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

// Device::kLargest<Family>: the largest side of a real square matrix, at least kLargestFactor, that of all others.
// Device::run<Family>(like, arguments, batch, m, n) runs Family<S, F> over the batch; there is at least one entry.
template <class Device>
struct FactorOperators {
  static Tensor linalg_lu_backward(const OptionalTensor& grad_L, const OptionalTensor& grad_U, const Tensor& P,
                                   const Tensor& L, const Tensor& U, bool pivot) {
    constexpr const char* where = "manualgrad::linalg_lu_backward: ";
    const detail::FactorShape shape = lu_shape<LuPull>(where, P, L, U, pivot);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    shape.check("grad_L", grad_L, {m, k});
    shape.check("grad_U", grad_U, {k, n});
    Tensor out = allocate(shape.with({m, n}), L);
    detail::dispatch_filled(out, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      LuArguments<S> all{};
      all.factors = {kept.matrices<S>(L), kept.matrices<S>(U), false};
      all.given = {kept.matrices<S>(grad_L), kept.matrices<S>(grad_U), false};
      if (pivot) all.P = kept.matrices<S>(P);
      all.out = new_matrices<S>(out);
      Device::template run<LuPull>(L, all, shape.batch(), m, n);
    });
    return out;
  }

  static std::tuple<Tensor, Tensor> linalg_lu_jvp(const Tensor& A_t, const Tensor& P, const Tensor& L, const Tensor& U,
                                                  bool pivot) {
    constexpr const char* where = "manualgrad::linalg_lu_jvp: ";
    const detail::FactorShape shape = lu_shape<LuPush>(where, P, L, U, pivot);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    shape.check("A_t", A_t, {m, n});
    Tensor dL = allocate(shape.with({m, k}), L), dU = allocate(shape.with({k, n}), L);
    detail::dispatch_filled(A_t, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      LuArguments<S> all{};
      all.factors = {kept.matrices<S>(L), kept.matrices<S>(U), false};
      all.given.upper = kept.matrices<S>(A_t);
      if (pivot) all.P = kept.matrices<S>(P);
      all.out = new_matrices<S>(dL);
      all.out_upper = new_matrices<S>(dU);
      Device::template run<LuPush>(L, all, shape.batch(), m, n);
    });
    return {dL, dU};
  }

  static Tensor lu_factor_ex_backward(const Tensor& grad_LU, const Tensor& LU, const Tensor& pivots, bool pivot) {
    return lu_factor<LuPull>("manualgrad::lu_factor_ex_backward: ", "grad_LU", grad_LU, LU, pivots, pivot);
  }
  static Tensor lu_factor_ex_jvp(const Tensor& A_t, const Tensor& LU, const Tensor& pivots, bool pivot) {
    return lu_factor<LuPush>("manualgrad::lu_factor_ex_jvp: ", "A_t", A_t, LU, pivots, pivot);
  }
  static Tensor cholesky_backward(const Tensor& grad_L, const Tensor& L, bool upper) {
    return cholesky<CholeskyPull>("manualgrad::cholesky_backward: ", "grad_L", grad_L, L, upper);
  }
  static Tensor cholesky_jvp(const Tensor& self_t, const Tensor& L, bool upper) {
    return cholesky<CholeskyPush>("manualgrad::cholesky_jvp: ", "self_t", self_t, L, upper);
  }
  static Tensor det_pullback(const Tensor& grad, const Tensor& det, const Tensor& LU, const Tensor& pivots) {
    return determinant("manualgrad::det_pullback: ", "grad", grad, det, LU, pivots);
  }
  static Tensor slogdet_pullback(const Tensor& h, const Tensor& LU, const Tensor& pivots) {
    return determinant("manualgrad::slogdet_pullback: ", "h", h, std::nullopt, LU, pivots);
  }
  static Tensor linalg_inv_backward(const Tensor& grad_inverse, const Tensor& inverse) {
    return inverse_derivative("manualgrad::linalg_inv_backward: ", "grad_inverse", grad_inverse, inverse, true);
  }
  static Tensor linalg_inv_jvp(const Tensor& A_t, const Tensor& inverse) {
    return inverse_derivative("manualgrad::linalg_inv_jvp: ", "A_t", A_t, inverse, false);
  }

  static std::tuple<Tensor, Tensor> linalg_solve_backward(const Tensor& gX, const Tensor& X, const Tensor& A,
                                                          const Tensor& LU, const Tensor& pivots, bool left) {
    constexpr const char* where = "manualgrad::linalg_solve_backward: ";
    MANUALGRAD_CHECK(left, where, "left: expected True, got False");
    const detail::FactorShape shape = detail::square_factor(where, "LU", LU, Device::template kLargest<SolvePull>);
    const int64_t n = LU.size(-1), r = detail::right_hand_sides(where, X, LU);
    shape.check("X", X, {n, r});
    shape.check("gX", gX, {n, r});
    shape.check("A", A, {n, n});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor gA = allocate(shape.with({n, n}), LU), gB = allocate(shape.with({n, r}), LU);
    detail::dispatch_filled(gA, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      SolveArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.solution = kept.matrices<S>(X);
      all.given = kept.matrices<S>(gX);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(gA);
      all.out_right = new_matrices<S>(gB);
      Device::template run<SolvePull>(LU, all, shape.batch(), r, n);
    });
    return {gA, gB};
  }

  static Tensor linalg_solve_jvp(const OptionalTensor& dA, const OptionalTensor& dB, const Tensor& X, const Tensor& A,
                                 const Tensor& LU, const Tensor& pivots, bool left) {
    constexpr const char* where = "manualgrad::linalg_solve_jvp: ";
    MANUALGRAD_CHECK(left, where, "left: expected True, got False");
    const detail::FactorShape shape = detail::square_factor(where, "LU", LU, Device::template kLargest<SolvePush>);
    const int64_t n = LU.size(-1), r = detail::right_hand_sides(where, X, LU);
    shape.check("X", X, {n, r});
    shape.check("dA", dA, {n, n});
    shape.check("dB", dB, {n, r});
    shape.check("A", A, {n, n});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor dX = allocate(shape.with({n, r}), LU);
    detail::dispatch_filled(dX, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      SolvePushArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.solution = kept.matrices<S>(X);
      all.matrix_tangent = kept.matrices<S>(dA);
      all.right_tangent = kept.matrices<S>(dB);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(dX);
      Device::template run<SolvePush>(LU, all, shape.batch(), r, n);
    });
    return dX;
  }

 private:
  template <template <class, int> class Family>
  static detail::FactorShape lu_shape(const char* where, const Tensor& P, const Tensor& L, const Tensor& U,
                                      bool pivot) {
    constexpr int64_t kLargest = Device::template kLargest<Family>;
    const detail::FactorShape shape = detail::factor_shape(where, "L", L, kLargest);
    detail::factor_shape(where, "U", U, kLargest);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    MANUALGRAD_CHECK(k == std::min(m, n), where, "L: expected ", std::min(m, n), " columns for a matrix of ", m, " by ",
                     n, ", got ", k);
    shape.check("U", U, {k, n});
    if (pivot) shape.check("P", P, {m, m});
    return shape;
  }

  template <template <class, int> class Family>
  static Tensor lu_factor(const char* where, const char* name, const Tensor& given, const Tensor& LU,
                          const Tensor& pivots, bool pivot) {
    const detail::FactorShape shape = detail::factor_shape(where, "LU", LU, Device::template kLargest<Family>);
    const int64_t m = LU.size(-2), n = LU.size(-1);
    shape.check(name, given, {m, n});
    if (pivot) shape.check("pivots", pivots, {std::min(m, n)}, ScalarType::Int);
    Tensor out = allocate(shape.with({m, n}), LU);
    detail::dispatch_filled(out, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      const MatrixBatch<const S> factors = kept.matrices<S>(LU), g = kept.matrices<S>(given);
      LuArguments<S> all{};
      all.factors = {factors, factors, true};
      all.given = {g, g, true};
      if (pivot) all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(out);
      Device::template run<Family>(LU, all, shape.batch(), m, n);
    });
    return out;
  }

  template <template <class, int> class Family>
  static Tensor cholesky(const char* where, const char* name, const Tensor& given, const Tensor& L, bool upper) {
    const detail::FactorShape shape = detail::square_factor(where, "L", L, Device::template kLargest<Family>);
    const int64_t n = L.size(-1);
    shape.check(name, given, {n, n});
    Tensor out = allocate(shape.with({n, n}), L);
    detail::dispatch_filled(out, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      constexpr bool kPull = std::is_same_v<Family<S, 0>, CholeskyPull<S, 0>>;
      detail::Operands kept;
      const MatrixBatch<const S> factor = kept.matrices<S>(L), g = kept.matrices<S>(given);
      const MatrixBatch<S> to = new_matrices<S>(out);
      CholeskyArguments<S> all{};
      all.factor = upper ? factor : factor.transposed();
      all.given = kPull && !upper ? g.transposed() : g;
      all.conjugated = upper;
      all.out = !kPull && upper ? to.transposed() : to;
      Device::template run<Family>(L, all, shape.batch(), n, n);
    });
    return out;
  }

  static Tensor determinant(const char* where, const char* name, const Tensor& g, const OptionalTensor& det,
                            const Tensor& LU, const Tensor& pivots) {
    const detail::FactorShape shape = detail::square_factor(where, "LU", LU, Device::template kLargest<DetPull>);
    const int64_t n = LU.size(-1);
    shape.check(name, g, {});
    shape.check("det", det, {});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor out = allocate(shape.with({n, n}), LU);
    detail::dispatch_filled(out, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      DetArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.g = kept.matrices<S>(g, 0);
      all.det = kept.matrices<S>(det, 0);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(out);
      Device::template run<DetPull>(LU, all, shape.batch(), n, n);
    });
    return out;
  }

  static Tensor inverse_derivative(const char* where, const char* name, const Tensor& given, const Tensor& inverse,
                                   bool pull) {
    const detail::FactorShape shape =
        detail::square_factor(where, "inverse", inverse, Device::template kLargest<Inverse>);
    const int64_t n = inverse.size(-1);
    shape.check(name, given, {n, n});
    Tensor out = allocate(shape.with({n, n}), inverse);
    detail::dispatch_filled(out, where, "inverse", [&](auto tag) {
      using S = typename decltype(tag)::type;
      detail::Operands kept;
      InverseArguments<S> all{};
      all.inverse = kept.matrices<S>(inverse);
      all.given = kept.matrices<S>(given);
      all.pull = pull;
      all.out = new_matrices<S>(out);
      Device::template run<Inverse>(inverse, all, shape.batch(), n, n);
    });
    return out;
  }
};

}  // namespace manualgrad
