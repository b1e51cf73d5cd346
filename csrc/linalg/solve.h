// Solves A X = B (left is true): the derivatives.
//
//   manualgrad::linalg_solve_backward.kernel(
//       Tensor grad_result, Tensor result, Tensor A, Tensor LU, Tensor pivots, bool left) -> (Tensor gA, Tensor gB)
//       results may be vectors, with one dim less than A
//   manualgrad::linalg_solve_jvp.kernel(
//       Tensor? dA, Tensor? dB, Tensor X, Tensor A, Tensor LU, Tensor pivots, bool left) -> Tensor
//
// Both dims up to kLaneOrder, for cotangents of real matrices on the CPU up to kCachedOrder; float32, float64 and their
// complex dtypes, int32 pivots; any strides, the same batch for all. Results are contiguous. The result of a matrix is
// bitwise identical at any position in the batch.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/solve.py, which state the mathematics,
// and, in plain backwards, by csrc/calls.
#pragma once

#include "../math/product.h"
#include "../math/triangular.h"
#include "matrix_loader.h"
#include "small_matrices.h"

#include <tuple>

namespace manualgrad {

// n: the order of the matrix; m: the number of right-hand sides.
template <class S>
struct SolveArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, solution, given;
  Pivots pivots;
  MatrixBatch<S> out, out_right;
};

template <class S, int F>
struct SolveVjp : SolveArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true, kFormsProducts = true;
  static bool cacheable(int64_t, int64_t) { return true; }
  int scratch_size() const { return this->n() * (this->n() + 2 * this->m() + 2); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), r = this->m(), pitch = loader.pitch(n), r_pitch = loader.pitch(r);
    N *factors = memory, *G = factors + n * pitch, *X = G + n * r_pitch, *inverse = X + n * r_pitch, *gA = factors;
    loader.read(this->factors, n, n, factors);
    loader.read(this->given, n, r, G);
    const int* order = loader.order(this->pivots, n, n, reinterpret_cast<int*>(inverse + n), G);
    lu_solve_adjoint(loader.threads, StridedMatrix<const N>{factors, pitch, 1}, StridedMatrix<N>{G, r_pitch, 1},
                     inverse, n, r);
    loader.write(G, n, r, this->out_right, order);
    loader.read(this->solution, n, r, X);
    conjugate_all(loader.threads, X, n * r_pitch);
    product<Sum::kReplaceNegative>(loader.threads, StridedMatrix<const N>{G, r_pitch, 1},
                                   StridedMatrix<const N>{X, 1, r_pitch}, n, r, n, gA, pitch);
    loader.write(gA, n, n, this->out, order);
  }
};

template <class S>
struct SolveJvpArguments {
  using Scalar = S;
  MatrixBatch<const S> factors, solution, matrix_tangent, right_tangent;  // tangents may be null, for zero
  Pivots pivots;
  MatrixBatch<S> out;
};

template <class S, int F>
struct SolveJvp : SolveJvpArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  int scratch_size() const { return this->n() * (this->n() + 2 * this->m() + 2); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), r = this->m(), pitch = loader.pitch(n), r_pitch = loader.pitch(r);
    N *dA = memory, *X = dA + n * pitch, *R = X + n * r_pitch, *inverse = R + n * r_pitch, *factors = dA;
    if (this->right_tangent.data != nullptr) {
      loader.read(this->right_tangent, n, r, R);
    } else {
      for (int e = loader.threads.rank(); e < n * r_pitch; e += loader.threads.size()) R[e] = N{};
      loader.threads.sync();
    }
    if (this->matrix_tangent.data != nullptr) {
      loader.read(this->matrix_tangent, n, n, dA);
      loader.read(this->solution, n, r, X);
      product<Sum::kSubtract>(loader.threads, StridedMatrix<const N>{dA, pitch, 1},
                              StridedMatrix<const N>{X, r_pitch, 1}, n, n, r, R, r_pitch);
    }
    loader.reorder(R, n, r, loader.order(this->pivots, n, n, reinterpret_cast<int*>(inverse + n), R), X);
    loader.read(this->factors, n, n, factors);
    const StridedMatrix<const N> triangles{factors, pitch, 1};
    const StridedMatrix<N> solution{X, r_pitch, 1};
    solve_lower(loader.threads, triangles, solution, n, r);
    solve_upper(loader.threads, triangles, solution, inverse, n, r);
    loader.write(X, n, r, this->out);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct SolveOperators {
  static std::tuple<Tensor, Tensor> linalg_solve_backward(const Tensor& grad_result, const Tensor& result,
                                                          const Tensor& A, const Tensor& LU, const Tensor& pivots,
                                                          bool left) {
    constexpr const char* where = "manualgrad::linalg_solve_backward: ";
    if (result.dim() == LU.dim() - 1 && grad_result.dim() == result.dim()) {  // vectors
      using torch::stable::unsqueeze;
      auto [gA, gB] = linalg_solve_backward(unsqueeze(grad_result, -1), unsqueeze(result, -1), A, LU, pivots, left);
      return {gA, torch::stable::squeeze(gB, -1)};
    }
    MANUALGRAD_CHECK(left, where, "left: expected True, got False");
    const MatrixShape shape = square_shape(where, "LU", LU, Device::kVjpOrder);
    const int64_t n = LU.size(-1), r = right_hand_sides(where, "result", result, LU);
    shape.check("result", result, {n, r});
    shape.check("grad_result", grad_result, {n, r});
    shape.check("A", A, {n, n});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor gA = allocate(shape.with({n, n}), LU), gB = allocate(shape.with({n, r}), LU);
    dispatch_filled(gA, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      SolveArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.solution = kept.matrices<S>(result);
      all.given = kept.matrices<S>(grad_result);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(gA);
      all.out_right = new_matrices<S>(gB);
      Device::template run<SolveVjp>(LU, all, shape.batch(), r, n);
    });
    return {gA, gB};
  }

  static Tensor linalg_solve_jvp(const OptionalTensor& dA, const OptionalTensor& dB, const Tensor& X, const Tensor& A,
                                 const Tensor& LU, const Tensor& pivots, bool left) {
    constexpr const char* where = "manualgrad::linalg_solve_jvp: ";
    MANUALGRAD_CHECK(left, where, "left: expected True, got False");
    const MatrixShape shape = square_shape(where, "LU", LU, kLaneOrder);
    const int64_t n = LU.size(-1), r = right_hand_sides(where, "X", X, LU);
    shape.check("X", X, {n, r});
    shape.check("dA", dA, {n, n});
    shape.check("dB", dB, {n, r});
    shape.check("A", A, {n, n});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor dX = allocate(shape.with({n, r}), LU);
    dispatch_filled(dX, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      SolveJvpArguments<S> all{};
      all.factors = kept.matrices<S>(LU);
      all.solution = kept.matrices<S>(X);
      all.matrix_tangent = kept.matrices<S>(dA);
      all.right_tangent = kept.matrices<S>(dB);
      all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(dX);
      Device::template run<SolveJvp>(LU, all, shape.batch(), r, n);
    });
    return dX;
  }

  static void add_to(Library& library) {
    library.impl("linalg_solve_backward.kernel", TORCH_BOX(&linalg_solve_backward));
    library.impl("linalg_solve_jvp.kernel", TORCH_BOX(&linalg_solve_jvp));
  }
};

}  // namespace manualgrad
