// PyTorch's strided nested tensors: the memory layout of their components, and operators on the whole buffer, for which
// PyTorch takes the components one by one.
#pragma once

#include <ATen/NestedTensorImpl.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/sum.h>

#include <type_traits>

namespace manualgrad {

using at::native::NestedTensorImpl;
using Arguments = at::ArrayRef<at::IValue>;

inline const NestedTensorImpl* nested(const at::Tensor& x) {
  return static_cast<const NestedTensorImpl*>(x.unsafeGetTensorImpl());
}

// The number of entries of a nested tensor whose components are row-major and one after the other, from the start of
// the buffer; -1 for any other layout. `dims`: of a component; if it is 2, a compile-time constant halves the time.
template <class Dims>
int64_t numbers_in_order(const int64_t* size, const int64_t* stride, const int64_t* start, int64_t count, Dims dims) {
  int64_t numbers = 0;
  for (int64_t i = 0; i < count; ++i, size += dims, stride += dims) {
    if (start[i] != numbers || stride[dims - 1] != 1) return -1;
    int64_t product = size[dims - 1];
    for (int64_t d = dims - 1; d-- > 0;) {
      if (stride[d] != product) return -1;
      product *= size[d];
    }
    numbers += product;
  }
  return numbers;
}

inline int64_t numbers_in_order(const at::Tensor& x) {
  const at::Tensor& sizes = nested(x)->get_nested_sizes();
  if (sizes.dim() != 2 || sizes.size(1) == 0) return -1;
  const int64_t count = sizes.size(0), dims = sizes.size(1);
  const auto* size = sizes.const_data_ptr<int64_t>();
  const auto* stride = nested(x)->get_nested_strides().const_data_ptr<int64_t>();
  const auto* start = nested(x)->get_storage_offsets().const_data_ptr<int64_t>();
  if (dims == 2) return numbers_in_order(size, stride, start, count, std::integral_constant<int64_t, 2>());
  return numbers_in_order(size, stride, start, count, dims);
}

// The rows along the last dim of all components, a view; undefined where they do not lie one after the other.
inline at::Tensor rows_of(const at::Tensor& x) {
  if (!x.is_nested() || !x.is_floating_point()) return {};
  const int64_t numbers = numbers_in_order(x);
  if (numbers <= 0 || static_cast<size_t>(numbers) != nested(x)->get_buffer_size()) return {};
  const auto size = nested(x)->opt_size(x.dim() - 1);
  return size ? nested(x)->get_unsafe_storage_as_tensor().view({-1, *size}) : at::Tensor();
}

inline at::Tensor from_rows(const at::Tensor& rows, const at::Tensor& sizes) {
  return at::detail::make_tensor<NestedTensorImpl>(rows.view(-1), sizes);
}

inline bool is_last(const at::Tensor& x, int64_t dim) { return dim == -1 || dim == x.dim() - 1; }

inline bool is_last_and_kept(const at::Tensor& x, const at::IValue& dims, const at::IValue& keepdim) {
  if (dims.isNone() || !keepdim.toBool()) return false;
  const auto list = dims.toIntVector();
  return list.size() == 1 && is_last(x, list[0]);
}

// Each of these takes the operator's arguments, and returns an undefined tensor if PyTorch has to serve the call.

inline at::Tensor softmax(Arguments arguments) {  // self, dim, half_to_float
  const at::Tensor& x = arguments[0].toTensor();
  if (arguments[2].toBool() || !is_last(x, arguments[1].toInt())) return {};
  const at::Tensor rows = rows_of(x);
  return rows.defined() ? from_rows(at::_softmax(rows, 1, false), nested(x)->get_nested_sizes()) : at::Tensor();
}

inline at::Tensor softmax_backward(Arguments arguments) {  // grad_output, output, dim, input_dtype
  const at::Tensor &grad = arguments[0].toTensor(), &y = arguments[1].toTensor();
  const auto dtype = y.scalar_type();
  if (!is_last(y, arguments[2].toInt()) || grad.scalar_type() != dtype || arguments[3].toScalarType() != dtype)
    return {};
  const at::Tensor g = rows_of(grad), rows = rows_of(y);
  if (!g.defined() || !rows.defined() || g.sizes() != rows.sizes()) return {};
  return from_rows(at::_softmax_backward_data(g, rows, 1, dtype), nested(y)->get_nested_sizes());
}

inline at::Tensor sum(Arguments arguments) {  // self, dim, keepdim, dtype
  const at::Tensor& x = arguments[0].toTensor();
  if (!is_last_and_kept(x, arguments[1], arguments[2]) || !arguments[3].isNone()) return {};
  const at::Tensor rows = rows_of(x);
  if (!rows.defined()) return {};
  const at::Tensor sizes = nested(x)->get_nested_sizes().clone();
  int64_t* size = sizes.mutable_data_ptr<int64_t>();
  for (int64_t i = sizes.size(1) - 1; i < sizes.numel(); i += sizes.size(1)) size[i] = 1;
  return from_rows(at::sum(rows, {1}, /*keepdim=*/true), sizes);
}

inline at::Tensor sum_backward(Arguments arguments) {  // grad, self, dim, keepdim
  const at::Tensor &grad = arguments[0].toTensor(), &x = arguments[1].toTensor();
  if (!is_last_and_kept(x, arguments[2], arguments[3])) return {};
  const at::Tensor g = rows_of(grad), rows = rows_of(x);
  if (!g.defined() || !rows.defined() || g.size(0) != rows.size(0) || g.size(1) != 1) return {};
  return from_rows(g.expand_as(rows).contiguous(), nested(x)->get_nested_sizes());
}

}  // namespace manualgrad
