// Triangular solves: the cotangents.
//
//   manualgrad::linalg_solve_triangular_backward.kernel(
//       Tensor grad, Tensor A, Tensor X, bool upper, bool left, bool unitriangular) -> (Tensor gA, Tensor gB)
//       A (*, n, n); X (*, n, k), or (*, k, n) if not left
//
// Both dims up to kLaneOrder; float32, float64 and their complex dtypes; any strides, the same batch for all. Only one
// triangle of A has an effect, without the diagonal if that counts as ones. A pivot of zero gives inf or nan in its
// matrix. Results are contiguous. The result of a matrix is bitwise identical at any position in the batch.
//
// Called by the formula of this name in torch_manualgrad/derivatives/linalg/triangular.py, which states the
// mathematics.
#pragma once

#include "../math/triangular.h"
#include "matrix_loader.h"
#include "small_matrices.h"

#include <tuple>

namespace manualgrad {

// n: the order of the triangle; m: the number of right-hand sides. The triangle is upper, or the transpose of a lower
// one, and so is its cotangent.
template <class S>
struct TriangularArguments {
  using Scalar = S;
  MatrixBatch<const S> triangle, solution, given;
  bool upper, unitriangular;
  MatrixBatch<S> out, out_right;
};

template <class S, int F>
struct TriangularVjp : TriangularArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  int scratch_size() const { return this->n() * (this->n() + 2 * this->m() + 1); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int n = this->n(), r = this->m(), pitch = loader.pitch(n), r_pitch = loader.pitch(r);
    N *T = memory, *G = T + n * pitch, *X = G + n * r_pitch, *inverse = X + n * r_pitch;
    read_upper(loader, this->triangle, n, T);
    loader.read(this->given, n, r, G);
    loader.read(this->solution, n, r, X);
    conjugate_all(loader.threads, X, n * r_pitch);
    if (this->unitriangular) {
      triangular_vjp(loader.threads, T, G, X, Ones{}, this->upper, true, n, r, pitch, r_pitch);
    } else {
      invert_diagonal<Factor::kConjugate>(loader.threads, T, pitch, n, inverse);
      triangular_vjp(loader.threads, T, G, X, inverse, this->upper, false, n, r, pitch, r_pitch);
    }
    loader.write(T, n, n, this->out);
    loader.write(G, n, r, this->out_right);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct TriangularOperators {
  static std::tuple<Tensor, Tensor> linalg_solve_triangular_backward(const Tensor& grad, const Tensor& A,
                                                                     const Tensor& X, bool upper, bool left,
                                                                     bool unitriangular) {
    constexpr const char* where = "manualgrad::linalg_solve_triangular_backward: ";
    const MatrixShape shape = square_shape(where, "A", A);
    const int64_t n = A.size(-1), k = right_hand_sides(where, "X", X, A, left ? -1 : -2);
    const int64_t rows = left ? n : k, columns = left ? k : n;
    shape.check("X", X, {rows, columns});
    shape.check("grad", grad, {rows, columns});
    Tensor gA = allocate(shape.with({n, n}), A), gB = allocate(shape.with({rows, columns}), A);
    dispatch_filled(gA, where, "A", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
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
      Device::template run<TriangularVjp>(A, all, shape.batch(), k, n);
    });
    return {gA, gB};
  }

  static void add_to(Library& library) {
    library.impl("linalg_solve_triangular_backward.kernel", TORCH_BOX(&linalg_solve_triangular_backward));
  }
};

}  // namespace manualgrad
