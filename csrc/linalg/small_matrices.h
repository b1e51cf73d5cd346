// Shared by the operators on batches of small matrices: checks of their arguments against each other, and the form of a
// kernel.
//
// A kernel is a batch of matrices and an operation on one of them, or on as many as there are lanes: its Scalar, a
// member `batch`, m() and n(), scratch_size() (the amount of numbers it works on), work() (the approximate number of
// operations) and run(loader, scratch), where the loader reads and writes matrices: MatrixLoader or LaneLoader.
#pragma once

#include "../base/dispatch.h"
#include "../base/matrices.h"
#include "limits.h"

#include <algorithm>
#include <initializer_list>

namespace manualgrad {

enum class Unroll { kNever, kOnCpu, kOnCuda, kAlways };

using Pivots = MatrixBatch<const int32_t>;

// The dims of a kernel's matrices. F is the order of a square matrix if it is known at compile time, else 0.
template <int F>
struct Order {
  static constexpr int kOrder = F;
  // On which devices small orders are known at compile time; whether the CPU can process one matrix at a time, and
  // forms products then.
  static constexpr Unroll kUnroll = Unroll::kOnCuda;
  static constexpr bool kCached = false, kFormsProducts = false;
  // Whether it gets the distance between rows from the loader.
  static constexpr bool kPadded = false;
  // On CUDA, for orders unknown at compile time: the largest order with one thread per matrix, and whether control flow
  // is the same for all matrices, so that several groups can share a warp.
  static constexpr int kThreadOrder = 0;
  static constexpr bool kUniform = true;

  int64_t batch;
  int m_, n_;
  HOST_DEVICE int m() const { return F > 0 ? F : m_; }
  HOST_DEVICE int n() const { return F > 0 ? F : n_; }
  int64_t work() const {
    const int64_t larger = std::max(m(), n());
    return 2 * larger * larger * larger;
  }
};

// Calls run(kernel) with these arguments; if Fixed, with the order known at compile time if it is one of the smallest.
template <template <class, int> class Kernel, bool Fixed, class Arguments, class Run>
void with_order(const Arguments& arguments, int64_t batch, int64_t m, int64_t n, const Run& run) {
  const auto sized = [&](auto order) {
    constexpr int F = decltype(order)::value;
    Kernel<typename Arguments::Scalar, F> kernel{};
    static_cast<Arguments&>(kernel) = arguments;
    static_cast<Order<F>&>(kernel) = {batch, static_cast<int>(m), static_cast<int>(n)};
    run(kernel);
  };
  if constexpr (Fixed) {
    if (m == n && n == 2) return sized(std::integral_constant<int, 2>{});
    if (m == n && n == 3) return sized(std::integral_constant<int, 3>{});
    if (m == n && n == 4) return sized(std::integral_constant<int, 4>{});
  }
  sized(std::integral_constant<int, 0>{});
}

// Matrices of one batch, dtype and device, each checked against the first.
struct MatrixShape {
  const char* where;
  const Tensor& like;
  const char* name;
  int64_t dims;  // of `like`, after the batch

  int64_t batch() const { return batch_of(like, dims); }
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
        shape_of(tensor));
    MANUALGRAD_CHECK(tensor.scalar_type() == type, where, what, ": expected ", dtype_name(type), ", got ",
                     dtype_name(tensor.scalar_type()));
    MANUALGRAD_CHECK(same_device(tensor, like), where, what, ": not on the device of ", name);
  }
};

// real_square: the largest order of real square matrices.
inline MatrixShape matrix_shape(const char* where, const char* name, const Tensor& matrix,
                                int64_t real_square = kLaneOrder) {
  MANUALGRAD_CHECK(matrix.dim() >= 2, where, name, ": expected matrices, got ", matrix.dim(), " dims");
  const int64_t m = matrix.size(-2), n = matrix.size(-1);
  const bool real = real_dtype(matrix.scalar_type()) == matrix.scalar_type();
  const int64_t largest = m == n && real ? real_square : kLaneOrder;
  MANUALGRAD_CHECK(std::max(m, n) <= largest, where, name, ": expected sides up to ", largest, ", got ", m, " by ", n);
  return {where, matrix, name, 2};
}
inline MatrixShape square_shape(const char* where, const char* name, const Tensor& matrix,
                                int64_t real_square = kLaneOrder) {
  const MatrixShape shape = matrix_shape(where, name, matrix, real_square);
  MANUALGRAD_CHECK(matrix.size(-2) == matrix.size(-1), where, name, ": expected square matrices, got ", matrix.size(-2),
                   " by ", matrix.size(-1));
  return shape;
}

// Keeps the tensors alive that matrices point to.
class KeptMatrices {
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

// Checks a matrix to decompose: its larger dim is at most `largest`, its smaller at most `largest_rank`.
inline MatrixShape decomposed_shape(const char* where, const Tensor& A, int64_t largest, int64_t largest_rank) {
  MANUALGRAD_CHECK(A.dim() >= 2, where, "A: expected matrices, got ", A.dim(), " dims");
  const int64_t m = A.size(-2), n = A.size(-1);
  MANUALGRAD_CHECK(std::max(m, n) <= largest && std::min(m, n) <= largest_rank, where, "A: expected sizes up to ",
                   largest_rank, " and ", largest, ", got ", m, " by ", n);
  return {where, A, "A", 2};
}

// How many right-hand sides there are: the size of this dim of the solution X for the matrix A.
inline int64_t right_hand_sides(const char* where, const char* name, const Tensor& X, const Tensor& A,
                                int64_t dim = -1) {
  MANUALGRAD_CHECK(X.dim() == A.dim(), where, name, ": expected ", A.dim(), " dims, got ", X.dim());
  const int64_t count = X.size(dim), largest = std::max<int64_t>(A.size(-1), kLaneOrder);
  MANUALGRAD_CHECK(count <= largest, where, name, ": expected up to ", largest, " right-hand sides, got ", count);
  return count;
}

// Calls f(Tag<S>{}) for the dtype of the tensor to fill, if it has an entry.
template <class F>
void dispatch_filled(const Tensor& result, const char* where, const char* name, const F& f) {
  dispatch_matrix(result.scalar_type(), where, name, [&](auto tag) {
    if (result.numel() > 0) f(tag);
  });
}

}  // namespace manualgrad
