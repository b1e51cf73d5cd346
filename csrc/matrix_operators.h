// What operators on batches of small matrices share: arguments checked against each other, families for their sides.
#pragma once

#include "matrices.h"

#include <algorithm>
#include <initializer_list>

namespace manualgrad {

constexpr int kLargestFactor = 32;

using OptionalTensor = std::optional<Tensor>;

// Family<S, F> is what is done with each matrix of a batch (see lane_groups.h). F is the side of a square matrix where
// the compiler knows it, else 0.
template <int F>
struct Sides {
  static constexpr int kSide = F;
  int64_t batch;
  int m_, n_;
  HOST_DEVICE int m() const { return F > 0 ? F : m_; }
  HOST_DEVICE int n() const { return F > 0 ? F : n_; }
};

// run(family) with these arguments, where Known for a side that the compiler knows, if it is one of the smallest.
template <template <class, int> class Family, bool Known, class Arguments, class Run>
void with_side(const Arguments& arguments, int64_t batch, int64_t m, int64_t n, const Run& run) {
  const auto sized = [&](auto side) {
    constexpr int F = decltype(side)::value;
    Family<typename Arguments::Scalar, F> family{};
    static_cast<Arguments&>(family) = arguments;
    static_cast<Sides<F>&>(family) = {batch, static_cast<int>(m), static_cast<int>(n)};
    run(family);
  };
  if constexpr (Known) {
    if (m == n && n == 2) return sized(std::integral_constant<int, 2>{});
    if (m == n && n == 3) return sized(std::integral_constant<int, 3>{});
    if (m == n && n == 4) return sized(std::integral_constant<int, 4>{});
  }
  sized(std::integral_constant<int, 0>{});
}

namespace detail {

// Matrices of one batch, dtype and device, each checked against the first.
struct FactorShape {
  const char* where;
  const Tensor& like;
  const char* name;
  int64_t dims;  // of `like`, after the batch

  int64_t batch() const {
    const Geometry at = geometry(like);
    int64_t count = 1;
    for (int64_t d = 0; d < at.dim - dims; ++d) count *= at.sizes[d];
    return count;
  }
  std::vector<int64_t> with(std::initializer_list<int64_t> sizes) const {
    const Geometry at = geometry(like);
    std::vector<int64_t> all(at.sizes, at.sizes + at.dim - dims);
    all.insert(all.end(), sizes);
    return all;
  }
  void check(const char* what, const Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    check(what, tensor, sizes, like.scalar_type());
  }
  void check(const char* what, const OptionalTensor& tensor, std::initializer_list<int64_t> sizes) const {
    if (tensor) check(what, *tensor, sizes);
  }
  void check(const char* what, const Tensor& tensor, std::initializer_list<int64_t> sizes, ScalarType type) const {
    const std::vector<int64_t> expected = with(sizes);
    const Geometry at = geometry(tensor);
    MANUALGRAD_CHECK(
        at.dim == static_cast<int64_t>(expected.size()) && std::equal(expected.begin(), expected.end(), at.sizes),
        where, what, ": expected shape ", list(expected.data(), static_cast<int64_t>(expected.size())), ", got ",
        list(at.sizes, at.dim));
    MANUALGRAD_CHECK(tensor.scalar_type() == type, where, what, ": expected ", dtype_name(type), ", got ",
                     dtype_name(tensor.scalar_type()));
    MANUALGRAD_CHECK(same_device(tensor, like), where, what, ": not on the device of ", name);
  }
};

// real_square: the largest side of a real square matrix.
inline FactorShape factor_shape(const char* where, const char* name, const Tensor& matrix,
                                int64_t real_square = kLargestFactor) {
  MANUALGRAD_CHECK(matrix.dim() >= 2, where, name, ": expected matrices, got ", matrix.dim(), " dims");
  const int64_t m = matrix.size(-2), n = matrix.size(-1);
  const bool real = real_dtype(matrix.scalar_type()) == matrix.scalar_type();
  const int64_t largest = m == n && real ? real_square : kLargestFactor;
  MANUALGRAD_CHECK(std::max(m, n) <= largest, where, name, ": expected sides up to ", largest, ", got ", m, " by ", n);
  return {where, matrix, name, 2};
}
inline FactorShape square_factor(const char* where, const char* name, const Tensor& matrix,
                                 int64_t real_square = kLargestFactor) {
  const FactorShape shape = factor_shape(where, name, matrix, real_square);
  MANUALGRAD_CHECK(matrix.size(-2) == matrix.size(-1), where, name, ": expected square matrices, got ", matrix.size(-2),
                   " by ", matrix.size(-1));
  return shape;
}

// Keeps alive what matrices point to.
class Operands {
 public:
  template <class S>
  MatrixBatch<const S> matrices(const Tensor& tensor, int64_t matrix_dims = 2) {
    kept_.push_back(with_single_batch(tensor, matrix_dims));
    return manualgrad::matrices<S>(kept_.back(), matrix_dims);
  }
  template <class S>
  MatrixBatch<const S> matrices(const OptionalTensor& tensor, int64_t matrix_dims = 2) {
    return tensor ? matrices<S>(*tensor, matrix_dims) : MatrixBatch<const S>{};
  }

 private:
  std::vector<Tensor> kept_;
};

// How many right-hand sides there are: the size of this dim of the solution X for the matrix A.
inline int64_t right_hand_sides(const char* where, const Tensor& X, const Tensor& A, int64_t dim = -1) {
  MANUALGRAD_CHECK(X.dim() == A.dim(), where, "X: expected ", A.dim(), " dims, got ", X.dim());
  const int64_t count = X.size(dim), largest = std::max<int64_t>(A.size(-1), kLargestFactor);
  MANUALGRAD_CHECK(count <= largest, where, "X: expected up to ", largest, " right-hand sides, got ", count);
  return count;
}

// f(Tag<S>{}) for the dtype of what is to be filled, if it has an entry.
template <class F>
void dispatch_filled(const Tensor& result, const char* where, const char* name, const F& f) {
  dispatch_matrix(result.scalar_type(), where, name, [&](auto tag) {
    if (result.numel() > 0) f(tag);
  });
}

}  // namespace detail

}  // namespace manualgrad
