// The cotangents of pairwise distances: arguments checked, batches matched.
//
//   manualgrad::cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor
//   manualgrad::pdist_backward(Tensor grad, Tensor self, float p, Tensor pdist) -> Tensor
//
// The cotangent of x1 (*, P, M): row i gets sum_j grad_ij w(x1_i - x2_j), with the arithmetic of math/distance.h. x2 is
// (*, R, M), grad and cdist are (*, P, R), batch dims broadcast, and rows that x1 repeats are summed. pdist is cdist of
// self with itself, where grad and pdist are the entries above the diagonal, row by row, and a row is not paired with
// itself. The result has x1's shape and dtype and is contiguous. Any strides, any size, 0 included. Half and bfloat16
// are computed in float32. Deterministic: a row of x1 is summed by one thread (CPU) or one block (CUDA) in a fixed
// order.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/reduction/distance.py.
#pragma once

#include "../base/abi.h"
#include "../base/dispatch.h"
#include "../base/loop_nest.h"
#include "../math/distance.h"

#include <algorithm>

namespace manualgrad {

#define CDIST_BACKWARD "manualgrad::cdist_backward: "
#define PDIST_BACKWARD "manualgrad::pdist_backward: "

// The most dims of x1 and x2: as many as a CUDA launch has room for.
constexpr int kMaxPairDims = 32;

// Where the entries (i, j) of grad or of the distances are, in elements.
struct PairStrides {
  int64_t row, column;
};

struct DistancePlan {
  Power power;
  double p;
  bool triangle;                           // pdist: x2 is x1, and a pair is stored once
  int64_t rows, others, columns;           // P, R, M
  int64_t batch, sums;                     // of x1, and over which it repeats
  LoopNest<3, kMaxPairDims> kept, summed;  // x2, grad, distances
  PairStrides grad, distances;

  // pdist: the index of the entry of the pair i < j.
  HOST_DEVICE int64_t at_pair(int64_t i, int64_t j) const { return i * (2 * rows - i - 1) / 2 + j - i - 1; }
};

// Row-major and in the dtype of the arithmetic.
inline Tensor prepared_points(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  const bool half = type == ScalarType::Half || type == ScalarType::BFloat16;
  return torch::stable::contiguous(half ? torch::stable::to(tensor, ScalarType::Float) : tensor);
}

namespace detail {

inline void check_distance_argument(const char* where, const char* name, const Tensor& tensor, const Tensor& x,
                                    const char* x_name) {
  MANUALGRAD_CHECK(tensor.scalar_type() == x.scalar_type(), where, name, ": expected ", dtype_name(x.scalar_type()),
                   ", the dtype of ", x_name, ", got ", dtype_name(tensor.scalar_type()));
  MANUALGRAD_CHECK(same_device(tensor, x), where, name, ": not on the device of ", x_name);
}

// Without pairs any dtype will do, as it does for the forward.
inline void check_distance_dtype_and_order(const char* where, const char* x_name, const Tensor& x, double p,
                                           bool pairs) {
  MANUALGRAD_CHECK(p >= 0, where, "p: expected a number, 0 or greater, got ", p);
  if (!pairs) return;
  switch (x.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      break;
    default:
      raise(where, x_name, ": expected a real floating point dtype, got ", dtype_name(x.scalar_type()));
  }
}

}  // namespace detail

// Raises a RuntimeError that names the argument and its value where the arguments do not fit each other.
inline DistancePlan plan_cdist_backward(const Tensor& grad, const Tensor& x1, const Tensor& x2, double p,
                                        const Tensor& cdist) {
  detail::check_distance_dtype_and_order(CDIST_BACKWARD, "x1", x1, p, grad.numel() > 0);
  detail::check_distance_argument(CDIST_BACKWARD, "x2", x2, x1, "x1");
  detail::check_distance_argument(CDIST_BACKWARD, "grad", grad, x1, "x1");
  detail::check_distance_argument(CDIST_BACKWARD, "cdist", cdist, x1, "x1");
  const Geometry a = geometry(x1), b = geometry(x2), g = geometry(grad), d = geometry(cdist);
  for (const auto& [name, x] : {std::pair{"x1", &x1}, std::pair{"x2", &x2}}) {
    MANUALGRAD_CHECK(x->dim() >= 2 && x->dim() <= kMaxPairDims, CDIST_BACKWARD, name, ": expected 2 to ", kMaxPairDims,
                     " dims, got shape ", shape_of(*x));
  }
  DistancePlan plan;
  plan.power = classify(p);
  plan.p = p;
  plan.triangle = false;
  plan.rows = a.sizes[a.dim - 2];
  plan.others = b.sizes[b.dim - 2];
  plan.columns = a.sizes[a.dim - 1];
  plan.batch = plan.sums = 1;
  MANUALGRAD_CHECK(b.sizes[b.dim - 1] == plan.columns, CDIST_BACKWARD, "x2: expected ", plan.columns,
                   " columns, as in x1, got shape ", shape_of(x2));

  const int64_t dims = std::max(a.dim, b.dim);
  int64_t expected[kMaxPairDims], x2_stride[kMaxPairDims];
  int64_t step = plan.others * plan.columns;  // x2 is made row-major
  for (int64_t i = dims - 3; i >= 0; --i) {
    const int64_t at_a = i - (dims - a.dim), at_b = i - (dims - b.dim);
    const int64_t size_a = at_a < 0 ? 1 : a.sizes[at_a], size_b = at_b < 0 ? 1 : b.sizes[at_b];
    MANUALGRAD_CHECK(size_a == size_b || size_a == 1 || size_b == 1, CDIST_BACKWARD, "x2: the batch dims of shape ",
                     shape_of(x2), " do not broadcast with those of x1, ", shape_of(x1));
    expected[i] = size_a == 1 ? size_b : size_a;
    x2_stride[i] = size_b == 1 ? 0 : step;
    step *= size_b;
  }
  expected[dims - 2] = plan.rows;
  expected[dims - 1] = plan.others;
  for (const auto& [name, have] : {std::pair{"grad", g}, std::pair{"cdist", d}}) {
    MANUALGRAD_CHECK(have.dim == dims && std::equal(expected, expected + dims, have.sizes), CDIST_BACKWARD, name,
                     ": expected shape ", list(expected, dims), " for x1 of shape ", shape_of(x1), " and x2 of shape ",
                     shape_of(x2), ", got ", list(have.sizes, have.dim));
  }
  plan.grad = {g.strides[dims - 2], g.strides[dims - 1]};
  plan.distances = {d.strides[dims - 2], d.strides[dims - 1]};
  for (int64_t i = 0; i < dims - 2; ++i) {
    const int64_t at_a = i - (dims - a.dim);
    const bool repeats = at_a < 0 || a.sizes[at_a] != expected[i];
    (repeats ? plan.sums : plan.batch) *= expected[i];
    (repeats ? plan.summed : plan.kept).push(expected[i], {x2_stride[i], g.strides[i], d.strides[i]});
  }
  return plan;
}

inline DistancePlan plan_pdist_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& pdist) {
  detail::check_distance_dtype_and_order(PDIST_BACKWARD, "self", self, p, grad.numel() > 0);
  detail::check_distance_argument(PDIST_BACKWARD, "grad", grad, self, "self");
  detail::check_distance_argument(PDIST_BACKWARD, "pdist", pdist, self, "self");
  const Geometry x = geometry(self), g = geometry(grad), d = geometry(pdist);
  MANUALGRAD_CHECK(x.dim == 2, PDIST_BACKWARD, "self: expected 2 dims, got shape ", shape_of(self));
  const int64_t n = x.sizes[0], pairs = n * (n - 1) / 2;
  for (const auto& [name, have] : {std::pair{"grad", g}, std::pair{"pdist", d}}) {
    MANUALGRAD_CHECK(have.dim == 1 && have.sizes[0] == pairs, PDIST_BACKWARD, name, ": expected shape [", pairs,
                     "] for self of shape ", shape_of(self), ", got ", list(have.sizes, have.dim));
  }
  DistancePlan plan;
  plan.power = classify(p);
  plan.p = p;
  plan.triangle = true;
  plan.rows = plan.others = n;
  plan.columns = x.sizes[1];
  plan.batch = plan.sums = 1;
  plan.grad = {0, g.strides[0]};
  plan.distances = {0, d.strides[0]};
  return plan;
}

// Called after the checks: allocates, handles cases that need no kernel, and passes the rest to Device::run<T>.
template <class Device>
Tensor run_distance(const DistancePlan& plan, const Tensor& grad, const Tensor& x1, const Tensor& x2,
                    const Tensor& distances) {
  const ScalarType type = x1.scalar_type();
  const Tensor left = prepared_points(x1), right = plan.triangle ? left : prepared_points(x2);
  Tensor out = torch::stable::empty(x1.sizes(), left.scalar_type(), std::nullopt, x1.device());
  if (out.numel() > 0) {
    if (plan.p == 0 || grad.numel() == 0) {
      torch::stable::zero_(out);
    } else if (left.scalar_type() == ScalarType::Double) {
      Device::template run<double>(plan, grad, left, right, distances, out);
    } else if (type == ScalarType::Float) {
      Device::template run<float>(plan, grad, left, right, distances, out);
    } else {  // converting changes strides that have gaps, so they are read again
      const Tensor g = torch::stable::to(grad, ScalarType::Float), d = torch::stable::to(distances, ScalarType::Float);
      const DistancePlan wide =
          plan.triangle ? plan_pdist_backward(g, left, plan.p, d) : plan_cdist_backward(g, left, right, plan.p, d);
      Device::template run<float>(wide, g, left, right, d, out);
    }
  }
  return out.scalar_type() == type ? out : torch::stable::to(out, type);
}

template <class Device>
struct DistanceOperators {
  static Tensor cdist_backward(const Tensor& grad, const Tensor& x1, const Tensor& x2, double p, const Tensor& cdist) {
    return run_distance<Device>(plan_cdist_backward(grad, x1, x2, p, cdist), grad, x1, x2, cdist);
  }
  static Tensor pdist_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& pdist) {
    return run_distance<Device>(plan_pdist_backward(grad, self, p, pdist), grad, self, self, pdist);
  }

  static void add_to(Library& library) {
    library.impl("cdist_backward", TORCH_BOX(&cdist_backward));
    library.impl("pdist_backward", TORCH_BOX(&pdist_backward));
  }
};

}  // namespace manualgrad
