// The cotangent of a vector norm: arguments checked, dims sorted and merged.
//
//   manualgrad::norm_backward(Tensor grad, Tensor self, float p, Tensor norm, int[]? dim=None, bool keepdim=True)
//       -> Tensor
//
// The cotangent of self for norm = ||self||_p over dim (None or []: all dims); the formula and its edges are in
// math/norm.h. grad and norm are real and have self's shape with dim reduced (keepdim) or removed. The result has
// self's dtype and the strides of empty_like(self). Any strides, any size, 0 included.
// Deterministic: elements are independent, ties are counted in integers, and a norm that has to be computed again is
// summed in fixed blocks, so no bit depends on the number of threads.
//
// Called by the formula of this name in torch_manualgrad/derivatives/reduction/norm.py and, in plain backwards, by
// csrc/calls.
#pragma once

#include "../base/abi.h"
#include "../base/dispatch.h"
#include "../base/loop_nest.h"
#include "../math/norm.h"

#include <algorithm>

namespace manualgrad {

struct NormPlan {
  Power power;
  double p;
  int64_t slices, slice_size;
  LoopNest<3> elements;  // self, output, index of the slice
  LoopNest<3> kept;      // self, grad, norm: in the order of the slices' indices
  LoopNest<1> reduced;   // self: within one slice

  int64_t numel() const { return slices * slice_size; }
};

namespace detail {

#define NORM_BACKWARD "manualgrad::norm_backward: "

inline void check_shape(const char* name, const Tensor& tensor, const Tensor& self, const bool* reduced, bool keepdim) {
  const Geometry have = geometry(tensor), of = geometry(self);
  int64_t expected[kMaxDims], dims = 0;
  for (int64_t d = 0; d < of.dim; ++d) {
    if (!reduced[d] || keepdim) expected[dims++] = reduced[d] ? 1 : of.sizes[d];
  }
  MANUALGRAD_CHECK(have.dim == dims && std::equal(expected, expected + dims, have.sizes), NORM_BACKWARD, name,
                   ": expected shape ", list(expected, dims), " for self of shape ", list(of.sizes, of.dim),
                   " and keepdim=", keepdim ? "True" : "False", ", got ", list(have.sizes, have.dim));
}

}  // namespace detail

// Over all dims, grad and norm may be 0-dim whatever keepdim says.
inline bool whole(const Tensor& grad, const Tensor& norm, const Dims& dim) {
  return (!dim.has_value() || dim->empty()) && grad.dim() == 0 && norm.dim() == 0;
}

// Raises a RuntimeError that names the argument and its value where grad, norm, p or dim do not fit self.
inline void check_norm_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& norm, const Dims& dim,
                                bool keepdim, bool (&reduced)[kMaxDims]) {
  const Geometry of = geometry(self);
  MANUALGRAD_CHECK(of.dim <= kMaxDims, NORM_BACKWARD, "self: at most ", kMaxDims, " dims, got ", of.dim);
  MANUALGRAD_CHECK(p == p, NORM_BACKWARD, "p: expected a number, got nan");
  const ScalarType type = self.scalar_type(), real = real_dtype(type);
  dispatch_inexact(type, NORM_BACKWARD "self: ", [](auto) {});
  const bool all = !dim.has_value() || dim->empty();
  std::fill(reduced, reduced + of.dim, all);
  if (!all) {
    const int64_t dims = of.dim > 0 ? of.dim : 1;
    for (const int64_t given : *dim) {
      MANUALGRAD_CHECK(given >= -dims && given < dims, NORM_BACKWARD, "dim: expected values in [", -dims, ", ",
                       dims - 1, "], got ", given);
      const int64_t d = given < 0 ? given + dims : given;
      if (of.dim == 0) continue;
      MANUALGRAD_CHECK(!reduced[d], NORM_BACKWARD, "dim: ", given, " appears twice in ",
                       list(dim->data(), static_cast<int64_t>(dim->size())));
      reduced[d] = true;
    }
  }
  const std::pair<const char*, const Tensor*> others[] = {{"grad", &grad}, {"norm", &norm}};
  for (const auto& [name, tensor] : others) {
    const ScalarType have = tensor->scalar_type();
    MANUALGRAD_CHECK(have == real, NORM_BACKWARD, name, ": expected ", dtype_name(real), " for self of ",
                     dtype_name(type), ", got ", dtype_name(have));
    MANUALGRAD_CHECK(same_device(*tensor, self), NORM_BACKWARD, name, ": not on the device of self");
    detail::check_shape(name, *tensor, self, reduced, keepdim);
  }
}

inline NormPlan plan_norm_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& norm,
                                   const Tensor& out, bool keepdim, const bool (&reduced)[kMaxDims]) {
  const Geometry x = geometry(self), g = geometry(grad), n = geometry(norm), o = geometry(out);
  NormPlan plan;
  plan.power = classify(p);
  plan.p = p;
  plan.slices = plan.slice_size = 1;

  // Outermost first is by the output's strides: it is written once, densely, whatever the layout of self.
  int order[kMaxDims], at[kMaxDims];
  int64_t slice_stride[kMaxDims];
  int count = 0, kept = 0;
  for (int d = 0; d < x.dim; ++d) {
    at[d] = keepdim ? d : kept;
    kept += !reduced[d];
    (reduced[d] ? plan.slice_size : plan.slices) *= x.sizes[d];
    int i = count++;
    for (; i > 0 && o.strides[order[i - 1]] < o.strides[d]; --i) order[i] = order[i - 1];
    order[i] = d;
  }
  int64_t slice = 1;
  for (int i = count - 1; i >= 0; --i) {
    const int d = order[i];
    slice_stride[d] = reduced[d] ? 0 : slice;
    if (!reduced[d]) slice *= x.sizes[d];
  }
  for (int i = 0; i < count; ++i) {
    const int d = order[i];
    plan.elements.push(x.sizes[d], {x.strides[d], o.strides[d], slice_stride[d]});
    if (reduced[d]) {
      plan.reduced.push(x.sizes[d], {x.strides[d]});
    } else {
      plan.kept.push(x.sizes[d], {x.strides[d], g.strides[at[d]], n.strides[at[d]]});
    }
  }
  return plan;
}

// Device::run<S>(plan, grad, self, norm, out) fills out where there is something to compute.
template <class Device>
struct NormOperators {
  static Tensor norm_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& norm, const Dims& dim,
                              bool keepdim) {
    bool reduced[kMaxDims];
    keepdim = keepdim && !whole(grad, norm, dim);
    check_norm_backward(grad, self, p, norm, dim, keepdim, reduced);
    Tensor out = allocate_like(self);
    if (self.numel() == 0) return out;
    if (p == 0) return torch::stable::zero_(out);
    const NormPlan plan = plan_norm_backward(grad, self, p, norm, out, keepdim, reduced);
    dispatch_inexact(self.scalar_type(), NORM_BACKWARD "self: ", [&](auto tag) {
      Device::template run<typename decltype(tag)::type>(plan, grad, self, norm, out);
    });
    return out;
  }

  static void add_to(Library& library) { library.impl("norm_backward", TORCH_BOX(&norm_backward)); }
};

}  // namespace manualgrad
