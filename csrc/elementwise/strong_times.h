// The product in which zero is strong, of tensors that broadcast: arguments converted to one dtype, loops ordered.
//
//   manualgrad::strong_times(Tensor factor, Tensor other) -> Tensor
//
// factor * other, and 0 where either is 0. Any strides, dtypes and shapes that broadcast. The result has the layout of
// the factor, if that has its shape, or else of the other, if that has, and is contiguous otherwise. Half and bfloat16
// are computed in float32. Dtypes that are neither floating point nor complex have no inf or nan, so that 0 need not be
// strong there.
//
// Called by torch_manualgrad/derivatives/elementwise/strong_times.py.
#pragma once

#include "../base/abi.h"
#include "../base/dispatch.h"
#include "../base/loop_nest.h"
#include "../math/strong_times.h"

#include <algorithm>

namespace manualgrad {

#define STRONG_TIMES "manualgrad::strong_times: "

// The most dims of the result: as many as a CUDA launch has room for, and as PyTorch's own elementwise operators allow.
constexpr int kMaxElementwiseDims = 25;

using ElementLoops = LoopNest<3, kMaxElementwiseDims>;  // out, factor, other

inline bool is_inexact(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
    case ScalarType::ComplexHalf:
    case ScalarType::ComplexFloat:
    case ScalarType::ComplexDouble:
      return true;
    default:
      return false;
  }
}

// Converts to the dtype of the result; a single number on the CPU combines with tensors on any device.
inline Tensor prepared(const Tensor& tensor, const Tensor& beside, ScalarType type) {
  const bool moves = tensor.dim() == 0 && tensor.is_cpu() && !beside.is_cpu();
  // by value: a copy would wait for the device, which is an error while a graph is captured
  if (moves) return call_torch("aten::fill_", "Tensor", torch::stable::new_empty(beside, {}, type), tensor);
  return tensor.scalar_type() == type ? tensor : torch::stable::to(tensor, type);
}

inline ScalarType common_type(const Tensor& factor, const Tensor& other) {
  if (factor.scalar_type() == other.scalar_type()) return factor.scalar_type();
  std::array<StableIValue, 2> stack{torch::stable::detail::from(factor), torch::stable::detail::from(other)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::result_type", "Tensor", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<ScalarType>(stack[0]);
}

inline std::vector<int64_t> broadcast(const Tensor& factor, const Tensor& other) {
  const Geometry a = geometry(factor), b = geometry(other);
  std::vector<int64_t> sizes(static_cast<size_t>(std::max(a.dim, b.dim)));
  for (int64_t i = 1; i <= static_cast<int64_t>(sizes.size()); ++i) {
    const int64_t of_a = i <= a.dim ? a.sizes[a.dim - i] : 1, of_b = i <= b.dim ? b.sizes[b.dim - i] : 1;
    MANUALGRAD_CHECK(of_a == of_b || of_a == 1 || of_b == 1, STRONG_TIMES "other: shape ", shape_of(other),
                     " does not broadcast with that of factor, ", shape_of(factor));
    sizes[sizes.size() - static_cast<size_t>(i)] = of_a == 1 ? of_b : of_a;
  }
  return sizes;
}

inline bool has_shape(const Tensor& tensor, const std::vector<int64_t>& sizes) {
  const Geometry of = geometry(tensor);
  return of.dim == static_cast<int64_t>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), of.sizes);
}

// The loops are ordered by the strides of the result, which is dense: tensors of one layout then need only one loop.
inline ElementLoops element_loops(const Tensor& out, const Tensor& factor, const Tensor& other) {
  const Geometry o = geometry(out), a = geometry(factor), b = geometry(other);
  int order[kMaxElementwiseDims];
  for (int d = 0; d < o.dim; ++d) {
    int i = d;
    for (; i > 0 && o.strides[order[i - 1]] < o.strides[d]; --i) order[i] = order[i - 1];
    order[i] = d;
  }
  const auto stride = [&o](const Geometry& of, int d) {
    const int64_t at = d - (o.dim - of.dim);
    return at < 0 || of.sizes[at] == 1 ? int64_t{0} : of.strides[at];
  };
  ElementLoops loops;
  for (int i = 0; i < o.dim; ++i) {
    const int d = order[i];
    loops.push(o.sizes[d], {o.strides[d], stride(a, d), stride(b, d)});
  }
  return loops;
}

// Device::run<S>(loops, count, factor, other, out) fills out.
template <class Device>
struct StrongTimesOperators {
  static Tensor strong_times(const Tensor& factor, const Tensor& other) {
    const ScalarType type = common_type(factor, other);
    if (!is_inexact(type)) return call_torch("aten::mul", "Tensor", factor, other);
    const std::vector<int64_t> sizes = broadcast(factor, other);
    MANUALGRAD_CHECK(sizes.size() <= kMaxElementwiseDims, STRONG_TIMES "factor: expected at most ", kMaxElementwiseDims,
                     " dims, got ", sizes.size());
    const Tensor a = prepared(factor, other, type), b = prepared(other, factor, type);
    MANUALGRAD_CHECK(same_device(a, b), STRONG_TIMES "other: not on the device of factor");
    const Tensor out = has_shape(a, sizes)   ? allocate_like(a)
                       : has_shape(b, sizes) ? allocate_like(b)
                                             : allocate(sizes, a);
    if (const int64_t count = out.numel(); count > 0) {
      dispatch_inexact(type, STRONG_TIMES "factor: ", [&](auto tag) {
        Device::template run<typename decltype(tag)::type>(element_loops(out, a, b), count, a, b, out);
      });
    }
    return out;
  }

  static void add_to(Library& library) { library.impl("strong_times", TORCH_BOX(&strong_times)); }
};

}  // namespace manualgrad
