// Batches of matrices in memory, at any strides.
#pragma once

#include "math/part.h"

namespace manualgrad {

// A batch of matrices: (batch, rows, columns) in elements of S, at any strides; a stride of 0 broadcasts.
template <class S>
struct MatrixBatch {
  S* data;
  int64_t batch_stride, row_stride, column_stride;

  HOST_DEVICE S& at(int64_t b, int64_t i, int64_t j) const {
    return data[b * batch_stride + i * row_stride + j * column_stride];
  }
  HOST_DEVICE MatrixBatch transposed() const { return {data, batch_stride, column_stride, row_stride}; }
};

// Calls f(Tag<S>{}) for the dtypes that have decompositions.
template <class F>
inline void dispatch_matrix(ScalarType type, const char* where, const char* name, const F& f) {
  switch (type) {
    case ScalarType::Float:
      return f(Tag<float>{});
    case ScalarType::Double:
      return f(Tag<double>{});
    case ScalarType::ComplexFloat:
      return f(Tag<Complex<float>>{});
    case ScalarType::ComplexDouble:
      return f(Tag<Complex<double>>{});
    default:
      raise(where, name, ": expected float32, float64, complex64 or complex128, got ", dtype_name(type));
  }
}

// The stride of the dims before the last `matrix_dims` as one dim, where they have one.
inline std::optional<int64_t> batch_stride(const Tensor& tensor, int64_t matrix_dims) {
  const Geometry at = geometry(tensor);
  int64_t stride = 0, count = 1;
  for (int64_t d = at.dim - matrix_dims - 1; d >= 0; --d) {
    if (at.sizes[d] == 1) continue;
    if (count == 1) {
      stride = at.strides[d];
    } else if (at.strides[d] != stride * count) {
      return std::nullopt;
    }
    count *= at.sizes[d];
  }
  return stride;
}

// A tensor whose batch dims step as one: the tensor itself, or a copy.
inline Tensor with_single_batch(const Tensor& tensor, int64_t matrix_dims = 2) {
  return batch_stride(tensor, matrix_dims) ? tensor : torch::stable::contiguous(tensor);
}

// The matrices (or, with matrix_dims = 1, rows; or numbers) of a tensor that with_single_batch() returned.
template <class S>
MatrixBatch<const S> matrices(const Tensor& tensor, int64_t matrix_dims = 2) {
  const Geometry at = geometry(tensor);
  return {static_cast<const S*>(tensor.const_data_ptr()), batch_stride(tensor, matrix_dims).value_or(0),
          matrix_dims > 1 ? at.strides[at.dim - 2] : 0, matrix_dims > 0 ? at.strides[at.dim - 1] : 0};
}

// A new tensor of this shape, by rows, with the dtype and device of another.
inline Tensor allocate(const std::vector<int64_t>& sizes, const Tensor& like) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  int32_t dtype = 0, device = 0;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device, like.get_device_index(), &made));
  return Tensor(made);
}

// The matrices of a tensor that allocate() made.
template <class S>
MatrixBatch<S> new_matrices(Tensor& tensor) {
  const Geometry at = geometry(tensor);
  const int64_t rows = at.sizes[at.dim - 2], columns = at.sizes[at.dim - 1];
  return {static_cast<S*>(tensor.mutable_data_ptr()), rows * columns, columns, 1};
}

}  // namespace manualgrad
