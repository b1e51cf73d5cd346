// Torch's stable ABI: tensors, their geometry, new tensors, calls of torch's operators, registration. The other files
// use torch only through this file, check.h and dispatch.h.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "check.h"

namespace manualgrad {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Dims = std::optional<std::vector<int64_t>>;

// --- tensors --------------------------------------------------------------------------------------------------------

// A tensor's geometry, borrowed: valid as long as the tensor lives and is not resized.
struct Geometry {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
};

inline Geometry geometry(const Tensor& tensor) {
  return {tensor.sizes().data(), tensor.strides().data(), tensor.dim()};
}

// For messages.
inline std::string shape_of(const Tensor& tensor) {
  const Geometry at = geometry(tensor);
  return list(at.sizes, at.dim);
}

inline bool same_device(const Tensor& left, const Tensor& right) {
  return left.is_cpu() == right.is_cpu() && left.is_cuda() == right.is_cuda() &&
         left.get_device_index() == right.get_device_index();
}

// --- new tensors, without the dispatcher, whose overhead matters most in small calls --------------------------------

inline Tensor allocate_strided(const int64_t* sizes, const int64_t* strides, int64_t dim, const Tensor& like,
                               std::optional<int32_t> other_dtype = std::nullopt) {
  int32_t dtype = other_dtype.value_or(0), device = 0;
  AtenTensorHandle made = nullptr;
  if (!other_dtype) TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, dtype, device, like.get_device_index(), &made));
  return Tensor(made);
}

// A contiguous tensor of this shape, with the device of another, and its dtype unless one is given.
inline Tensor allocate(const std::vector<int64_t>& sizes, const Tensor& like,
                       std::optional<int32_t> dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return allocate_strided(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), like, dtype);
}

// A 0-dim bool on the CPU, false.
inline Tensor new_flag_on_cpu(const Tensor& like) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(0, nullptr, nullptr, aoti_torch_dtype_bool(),
                                                  aoti_torch_device_type_cpu(), like.get_device_index(), &made));
  Tensor flag(made);
  *static_cast<bool*>(flag.mutable_data_ptr()) = false;
  return flag;
}

// torch.empty_like.
inline Tensor allocate_like(const Tensor& self) {
  if (!self.is_contiguous()) return torch::stable::empty_like(self);
  const Geometry like = geometry(self);
  return allocate_strided(like.sizes, like.strides, like.dim, self);
}

// --- operators of torch ---------------------------------------------------------------------------------------------

template <class... Arguments>
Tensor call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// --- registration ---------------------------------------------------------------------------------------------------

using Library = torch::stable::detail::StableLibrary;

// Operators<Device>::add_to(library) lists the kernels of a file once, for both devices.
#define MANUALGRAD_REGISTER_CPU(...) \
  STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, library) { __VA_ARGS__::add_to(library); }

}  // namespace manualgrad
