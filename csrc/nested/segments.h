// Operations within segments: arguments checked and seen as (outer, length, inner).
//
//   manualgrad::segment_sum(Tensor values, Tensor offsets, int dim) -> Tensor              (outer, segments, inner)
//   manualgrad::segment_amax(Tensor values, Tensor offsets, int dim) -> Tensor             (outer, segments, inner)
//   manualgrad::segment_softmax(Tensor values, Tensor offsets, int dim) -> Tensor          (outer, length, inner)
//   manualgrad::segment_log_softmax(Tensor values, Tensor offsets, int dim) -> Tensor      (outer, length, inner)
//   manualgrad::nested_softmax_backward(Tensor grad, Tensor output, Tensor offsets, int dim) -> Tensor
//   manualgrad::nested_log_softmax_backward(Tensor grad, Tensor output, Tensor offsets, int dim) -> Tensor
//   manualgrad::_nested_sum_backward(Tensor grad, Tensor offsets, int count, int dim) -> Tensor
//
// Segment s is the rows offsets[s] to offsets[s + 1] of the dim, which is `length` long; offsets are int32 or int64.
// The arithmetic is in math/segments.h. Values have any floating point dtype; for sums also a complex one, whose
// columns are two real columns each. Any strides and any size, 0 included. Half and bfloat16 are computed in float32.
// The result is contiguous. An empty segment sums to 0, and its maximum is -inf.
//
// Called by the formulas of these names in torch_manualgrad/nested/segments.py and segment_maxima.py.
#pragma once

#include "../base/abi.h"
#include "../base/dispatch.h"
#include "../math/segments.h"

#include <algorithm>

namespace manualgrad {

struct SegmentPlan {
  const char* where;  // the prefix of error messages
  int64_t outer, length, inner, segments;
  int64_t dim;     // as given
  Tensor offsets;  // int64, contiguous
};

namespace detail {

// A contiguous tensor of the dtype and on the device of `like`, with `size` in place of its size in dim.
inline Tensor allocate_with(const Tensor& like, int64_t dim, int64_t size) {
  const Geometry of = geometry(like);
  std::vector<int64_t> sizes(of.sizes, of.sizes + of.dim);
  sizes[static_cast<size_t>(dim)] = size;
  return allocate(sizes, like);
}

// Contiguous, and of that dtype.
inline Tensor prepared(const Tensor& tensor, ScalarType type) {
  const Tensor of_type = tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
  return of_type.is_contiguous() ? of_type : torch::stable::contiguous(of_type);
}

inline int64_t wrapped(const char* where, const char* name, const Tensor& values, int64_t dim) {
  const int64_t dims = values.dim();
  MANUALGRAD_CHECK(dims > 0, where, name, ": expected at least 1 dim, got a tensor of shape []");
  MANUALGRAD_CHECK(dim >= -dims && dim < dims, where, "dim: expected a value in [", -dims, ", ", dims - 1, "], got ",
                   dim);
  return dim < 0 ? dim + dims : dim;
}

// The plan for a tensor whose dim is divided into segments, or whose dim has one entry per segment.
inline SegmentPlan plan_segments(const char* where, const char* name, const Tensor& values, const Tensor& offsets,
                                 int64_t dim) {
  const Geometry of = geometry(values);
  SegmentPlan plan;
  plan.where = where;
  plan.dim = dim;
  dim = wrapped(where, name, values, dim);
  plan.outer = plan.inner = 1;
  for (int64_t d = 0; d < of.dim; ++d) {
    if (d != dim) (d < dim ? plan.outer : plan.inner) *= of.sizes[d];
  }
  plan.length = of.sizes[dim];
  const ScalarType type = offsets.scalar_type();
  MANUALGRAD_CHECK(type == ScalarType::Int || type == ScalarType::Long, where,
                   "offsets: expected torch.int32 or torch.int64, got ", dtype_name(type));
  MANUALGRAD_CHECK(offsets.dim() == 1 && offsets.numel() > 0, where,
                   "offsets: expected one more than there are segments, in one dim, got shape ", shape_of(offsets));
  MANUALGRAD_CHECK(same_device(offsets, values), where, "offsets: not on the device of ", name);
  plan.segments = offsets.numel() - 1;
  plan.offsets = prepared(offsets, ScalarType::Long);
  return plan;
}

// Checks that `other` has the dtype, shape and device of `values`.
inline void check_other(const char* where, const char* name, const Tensor& values, const char* other_name,
                        const Tensor& other) {
  const Geometry a = geometry(values), b = geometry(other);
  MANUALGRAD_CHECK(other.scalar_type() == values.scalar_type(), where, other_name, ": expected ",
                   dtype_name(values.scalar_type()), ", the dtype of ", name, ", got ",
                   dtype_name(other.scalar_type()));
  MANUALGRAD_CHECK(a.dim == b.dim && std::equal(a.sizes, a.sizes + a.dim, b.sizes), where, other_name,
                   ": expected shape ", shape_of(values), ", that of ", name, ", got ", shape_of(other));
  MANUALGRAD_CHECK(same_device(other, values), where, other_name, ": not on the device of ", name);
}

// The dtype of the arithmetic; raises for one that is not real and floating point.
inline ScalarType compute_dtype(ScalarType type, const char* where, const char* name) {
  switch (type) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return ScalarType::Float;
    case ScalarType::Float:
    case ScalarType::Double:
      return type;
    default:
      raise(where, name, ": expected a real floating point dtype, got ", dtype_name(type));
  }
}

// The operators on one device: Device::run<Op, T>(plan, like, x, y, out) and Device::repeat(plan, like, from, to, bytes
// of a row).
template <class Device>
struct SegmentOperators {
  // Runs Op on `values` and, if it has two inputs, on `other`; both have one dtype, and `real` is its real dtype.
  template <class Op>
  static Tensor run(const SegmentPlan& plan, const Tensor& values, const Tensor* other, const char* name,
                    ScalarType real) {
    const ScalarType type = values.scalar_type(), compute = compute_dtype(real, plan.where, name);
    const ScalarType wide = type == real ? compute : compute == real ? type : ScalarType::ComplexFloat;
    const Tensor y = prepared(values, wide), x = other != nullptr ? prepared(*other, wide) : y;
    const int64_t dim = plan.dim < 0 ? plan.dim + values.dim() : plan.dim;
    Tensor out = Op::kRows ? allocate_like(y) : allocate_with(y, dim, plan.segments);
    const auto with = [&](auto tag) {
      using T = typename decltype(tag)::type;
      Device::template run<Op, T>(plan, y, static_cast<const T*>(x.const_data_ptr()),
                                  static_cast<const T*>(y.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr()));
    };
    compute == ScalarType::Double ? with(Tag<double>{}) : with(Tag<float>{});
    return wide == type ? out : torch::stable::to(out, type);
  }

  template <class Op>
  static Tensor gather(const char* where, const Tensor& values, const Tensor& offsets, int64_t dim, ScalarType real) {
    SegmentPlan plan = plan_segments(where, "values", values, offsets, dim);
    if (real != values.scalar_type()) plan.inner *= 2;  // complex
    return run<Op>(plan, values, nullptr, "values", real);
  }

  template <class Op>
  static Tensor map(const char* where, const char* name, const Tensor& values, const char* other_name,
                    const Tensor* other, const Tensor& offsets, int64_t dim) {
    const SegmentPlan plan = plan_segments(where, name, values, offsets, dim);
    if (other != nullptr) check_other(where, name, values, other_name, *other);
    return run<Op>(plan, values, other, name, values.scalar_type());
  }

#define MANUALGRAD_SEGMENTS(name) "manualgrad::" name ": "

  static Tensor sum(const Tensor& values, const Tensor& offsets, int64_t dim) {
    return gather<SegmentSum>(MANUALGRAD_SEGMENTS("segment_sum"), values, offsets, dim,
                              real_dtype(values.scalar_type()));
  }
  static Tensor amax(const Tensor& values, const Tensor& offsets, int64_t dim) {
    return gather<SegmentAmax>(MANUALGRAD_SEGMENTS("segment_amax"), values, offsets, dim, values.scalar_type());
  }
  static Tensor softmax(const Tensor& values, const Tensor& offsets, int64_t dim) {
    return map<SegmentSoftmax>(MANUALGRAD_SEGMENTS("segment_softmax"), "values", values, "", nullptr, offsets, dim);
  }
  static Tensor log_softmax(const Tensor& values, const Tensor& offsets, int64_t dim) {
    return map<SegmentLogSoftmax>(MANUALGRAD_SEGMENTS("segment_log_softmax"), "values", values, "", nullptr, offsets,
                                  dim);
  }
  static Tensor softmax_backward(const Tensor& grad, const Tensor& output, const Tensor& offsets, int64_t dim) {
    return map<SoftmaxBackward>(MANUALGRAD_SEGMENTS("nested_softmax_backward"), "output", output, "grad", &grad,
                                offsets, dim);
  }
  static Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, const Tensor& offsets, int64_t dim) {
    return map<LogSoftmaxBackward>(MANUALGRAD_SEGMENTS("nested_log_softmax_backward"), "output", output, "grad", &grad,
                                   offsets, dim);
  }

  static Tensor sum_backward(const Tensor& grad, const Tensor& offsets, int64_t count, int64_t dim) {
    const char* where = MANUALGRAD_SEGMENTS("_nested_sum_backward");
    SegmentPlan plan = plan_segments(where, "grad", grad, offsets, dim);
    dispatch_inexact(grad.scalar_type(), MANUALGRAD_SEGMENTS("_nested_sum_backward") "grad: ", [](auto) {});
    MANUALGRAD_CHECK(plan.length == plan.segments, where, "grad: expected ", plan.segments, " in dim ", dim,
                     ", one for each segment of offsets, got shape ", shape_of(grad));
    MANUALGRAD_CHECK(count >= 0, where, "count: expected 0 or more, got ", count);
    plan.length = count;
    const Tensor from = prepared(grad, grad.scalar_type());
    Tensor out = allocate_with(grad, dim < 0 ? dim + grad.dim() : dim, count);
    Device::repeat(plan, from, from.const_data_ptr(), out.mutable_data_ptr(), plan.inner * from.element_size());
    return out;
  }

#undef MANUALGRAD_SEGMENTS

  static void add_to(Library& library) {
    library.impl("segment_sum", TORCH_BOX(&sum));
    library.impl("segment_amax", TORCH_BOX(&amax));
    library.impl("segment_softmax", TORCH_BOX(&softmax));
    library.impl("segment_log_softmax", TORCH_BOX(&log_softmax));
    library.impl("nested_softmax_backward", TORCH_BOX(&softmax_backward));
    library.impl("nested_log_softmax_backward", TORCH_BOX(&log_softmax_backward));
    library.impl("_nested_sum_backward", TORCH_BOX(&sum_backward));
  }
};

}  // namespace detail

using detail::SegmentOperators;

}  // namespace manualgrad
