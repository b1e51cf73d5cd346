// The decompositions of small matrices: arguments checked, results allocated, and what is done with one matrix.
//
//   manualgrad::svd_jacobi(Tensor A) -> (Tensor U, Tensor S, Tensor Vh)          thin; min(m, n) <= 16, max(m, n) <= 32
//   manualgrad::eigh_jacobi(Tensor A, bool lower) -> (Tensor L, Tensor V)        n <= 16; one triangle is read
//   manualgrad::lu_small(Tensor A) -> (Tensor P, Tensor L, Tensor U)            m, n <= 8
//
// A is (*, m, n), float32, float64 or their complex dtypes, at any strides. Results are contiguous, those of a matrix
// the same to the bit wherever it stands in the batch. An inf or a nan gives nan in all of an SVD or
// eigendecomposition.
#pragma once

#include "math/elimination.h"
#include "math/jacobi.h"
#include "one_matrix.h"

#include <algorithm>
#include <tuple>

namespace manualgrad {

constexpr int kLargestSide = 32, kLargestRank = 16, kLargestLu = 8;

// A (m, n) with m >= n, or the adjoint of what was given (`turned`). `y` takes the rows of U^H of that, `x` those of
// V^H.
template <class S>
struct Svd {
  using Scalar = S;
  int64_t batch;
  int m, n;
  bool turned;
  MatrixBatch<const S> a;
  MatrixBatch<S> y, x;
  MatrixBatch<Real<S>> s;

  int numbers() const { return 2 * m * n + n * n + 4 * n; }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    using R = RealOf<N>;
    N *B = memory, *X = B + m * n, *Y = X + n * n, *phases = Y + n * m;
    R* reals = reinterpret_cast<R*>(phases + n);
    move.read(a, m, n, B);
    if (turned) conjugate_all(move.team, B, m * n);
    svd(move.team, B, SvdMemory<N>{X, Y, phases, reals, reals + n, reals + 2 * n}, m, n, !turned);
    conjugate_all(move.team, turned ? X : Y, turned ? n * n : n * m);
    move.write(X, n, n, x);
    move.write(Y, n, m, y);
    move.write(reals, 1, n, s);
  }
};

template <class S>
struct Eigh {
  using Scalar = S;
  int64_t batch;
  int n;
  bool lower;
  MatrixBatch<const S> a;
  MatrixBatch<S> y;  // takes the rows of V^H
  MatrixBatch<Real<S>> l;

  int numbers() const { return 2 * n * n + n; }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    N *A = memory, *Y = A + n * n;
    RealOf<N>* L = reinterpret_cast<RealOf<N>*>(Y + n * n);
    move.read(a, n, n, A);
    eigh(move.team, A, Y, L, n, lower);
    conjugate_all(move.team, Y, n * n);
    move.write(Y, n, n, y);
    move.write(L, 1, n, l);
  }
};

// By a team of one.
template <class S>
struct Lu {
  using Scalar = S;
  int64_t batch;
  int m, n;
  MatrixBatch<const S> a;
  MatrixBatch<S> p, l, u;

  int numbers() const { return m * n + m * std::max(m, n) + m; }

  template <class N, class Move>
  HOST_DEVICE void run(const Move& move, N* memory) const {
    using R = RealOf<N>;
    const R one = real_number<R>(1);
    const int k = m < n ? m : n;
    N *A = memory, *other = A + m * n;
    R* order = reinterpret_cast<R*>(other + m * (m > n ? m : n));
    move.read(a, m, n, A);
    lu(A, order, m, n);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < k; ++j) other[i * k + j] = j < i ? A[i * n + j] : from_real<N>(i == j ? one : R{});
    }
    move.write(other, m, k, l);
    for (int i = 0; i < k; ++i) {
      for (int j = 0; j < n; ++j) other[i * n + j] = j < i ? N{} : A[i * n + j];
    }
    move.write(other, k, n, u);
    for (int i = 0; i < m; ++i) {
      const R row = real_number<R>(static_cast<BaseOf<R>>(i));
      for (int j = 0; j < m; ++j) other[i * m + j] = from_real<N>(select(order[j] == row, one, R{}));
    }
    move.write(other, m, m, p);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

namespace detail {

struct MatrixShape {
  std::vector<int64_t> batch;
  int64_t count;
  int m, n;

  std::vector<int64_t> with(std::initializer_list<int64_t> sizes) const {
    std::vector<int64_t> all = batch;
    all.insert(all.end(), sizes);
    return all;
  }
};

inline MatrixShape matrix_shape(const char* where, const Tensor& A, int64_t largest, int64_t largest_rank) {
  MANUALGRAD_CHECK(A.dim() >= 2, where, "A: expected matrices, got ", A.dim(), " dims");
  const Geometry at = geometry(A);
  const int64_t m = at.sizes[at.dim - 2], n = at.sizes[at.dim - 1];
  MANUALGRAD_CHECK(std::max(m, n) <= largest && std::min(m, n) <= largest_rank, where, "A: expected sizes up to ",
                   largest_rank, " and ", largest, ", got ", m, " by ", n);
  MatrixShape shape{{at.sizes, at.sizes + at.dim - 2}, 1, static_cast<int>(m), static_cast<int>(n)};
  for (const int64_t size : shape.batch) shape.count *= size;
  return shape;
}

}  // namespace detail

// Device::run(A, family) does the work; families without a matrix never get there.
template <class Device>
struct SmallOperators {
  static std::tuple<Tensor, Tensor, Tensor> svd_jacobi(const Tensor& A) {
    constexpr const char* where = "manualgrad::svd_jacobi: ";
    const detail::MatrixShape shape = detail::matrix_shape(where, A, kLargestSide, kLargestRank);
    const int m = std::max(shape.m, shape.n), n = std::min(shape.m, shape.n);
    Tensor U = allocate(shape.with({shape.m, n}), A), Vh = allocate(shape.with({n, shape.n}), A);
    Tensor S = torch::stable::new_empty(A, shape.with({n}), real_dtype(A.scalar_type()));
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (shape.count == 0 || n == 0) return;
      const bool turned = shape.m < shape.n;
      const Tensor a = with_single_batch(A);
      const MatrixBatch<const T> given = matrices<T>(a);
      const MatrixBatch<T> u = new_matrices<T>(U).transposed(), vh = new_matrices<T>(Vh);
      const MatrixBatch<Real<T>> s{static_cast<Real<T>*>(S.mutable_data_ptr()), n, n, 1};
      Device::run(A, turned ? Svd<T>{shape.count, m, n, true, given.transposed(), vh, u, s}
                            : Svd<T>{shape.count, m, n, false, given, u, vh, s});
    });
    return {U, S, Vh};
  }

  static std::tuple<Tensor, Tensor> eigh_jacobi(const Tensor& A, bool lower) {
    constexpr const char* where = "manualgrad::eigh_jacobi: ";
    const detail::MatrixShape shape = detail::matrix_shape(where, A, kLargestRank, kLargestRank);
    const int n = shape.n;
    MANUALGRAD_CHECK(shape.m == n, where, "A: expected square matrices, got ", shape.m, " by ", n);
    Tensor V = allocate(shape.with({n, n}), A);
    Tensor L = torch::stable::new_empty(A, shape.with({n}), real_dtype(A.scalar_type()));
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (shape.count == 0 || n == 0) return;
      const Tensor a = with_single_batch(A);
      const MatrixBatch<Real<T>> l{static_cast<Real<T>*>(L.mutable_data_ptr()), n, n, 1};
      Device::run(A, Eigh<T>{shape.count, n, lower, matrices<T>(a), new_matrices<T>(V).transposed(), l});
    });
    return {L, V};
  }

  static std::tuple<Tensor, Tensor, Tensor> lu_small(const Tensor& A) {
    constexpr const char* where = "manualgrad::lu_small: ";
    const detail::MatrixShape shape = detail::matrix_shape(where, A, kLargestLu, kLargestLu);
    const int m = shape.m, n = shape.n, k = std::min(m, n);
    Tensor P = allocate(shape.with({m, m}), A);
    Tensor L = allocate(shape.with({m, k}), A), U = allocate(shape.with({k, n}), A);
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      if (shape.count == 0 || m == 0) return;
      const Tensor a = with_single_batch(A);
      Device::run(A,
                  Lu<T>{shape.count, m, n, matrices<T>(a), new_matrices<T>(P), new_matrices<T>(L), new_matrices<T>(U)});
    });
    return {P, L, U};
  }
};

}  // namespace manualgrad
