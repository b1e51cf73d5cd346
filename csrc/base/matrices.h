// Tensors as batches of matrices.
#pragma once

#include "../math/matrix.h"
#include "abi.h"

namespace manualgrad {

// The stride of all dims before the last `matrix_dims`, seen as one dim, if there is such a stride.
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
inline OptionalTensor with_single_batch(const OptionalTensor& tensor, int64_t matrix_dims = 2) {
  return tensor ? OptionalTensor(with_single_batch(*tensor, matrix_dims)) : std::nullopt;
}

// The matrices (or, with matrix_dims = 1, rows; or numbers) of a tensor that with_single_batch() returned.
template <class S>
MatrixBatch<const S> matrices(const Tensor& tensor, int64_t matrix_dims = 2) {
  const Geometry at = geometry(tensor);
  return {static_cast<const S*>(tensor.const_data_ptr()), batch_stride(tensor, matrix_dims).value_or(0),
          matrix_dims > 1 ? at.strides[at.dim - 2] : 0, matrix_dims > 0 ? at.strides[at.dim - 1] : 0};
}

// The number of matrices in a tensor.
inline int64_t batch_of(const Tensor& tensor, int64_t matrix_dims = 2) {
  const Geometry at = geometry(tensor);
  int64_t count = 1;
  for (int64_t d = 0; d < at.dim - matrix_dims; ++d) count *= at.sizes[d];
  return count;
}

// The matrices of a tensor that allocate() made.
template <class S>
MatrixBatch<S> new_matrices(Tensor& tensor) {
  const Geometry at = geometry(tensor);
  const int64_t rows = at.sizes[at.dim - 2], columns = at.sizes[at.dim - 1];
  return {static_cast<S*>(tensor.mutable_data_ptr()), rows * columns, columns, 1};
}

}  // namespace manualgrad
