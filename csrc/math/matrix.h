// Matrices in memory: batches at any strides, views of one, and parts of one.
#pragma once

#include "number.h"

namespace manualgrad {

// All of a matrix, what is below the diagonal, or what is on it and above.
enum class Part { kAll, kLower, kUpper };

HOST_DEVICE bool belongs(Part part, int i, int j) { return part == Part::kAll || (part == Part::kLower) == (j < i); }

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

// One matrix at any strides.
template <class N>
struct StridedMatrix {
  N* data;
  int64_t row, column;

  HOST_DEVICE N& at(int64_t i, int64_t j) const { return data[i * row + j * column]; }
};

// A matrix in memory, conjugated on the way if it says so.
template <class S>
struct View {
  const S* data;
  int64_t row, column;
  bool conjugated = false;

  HOST_DEVICE const S& raw(int64_t i, int64_t j) const { return data[i * row + j * column]; }
  HOST_DEVICE S at(int64_t i, int64_t j) const { return conjugated ? conjugate(raw(i, j)) : raw(i, j); }
  HOST_DEVICE View adjoint() const { return {data, column, row, !conjugated}; }
};
template <class S>
HOST_DEVICE View<S> view(const MatrixBatch<const S>& batch, int64_t b) {
  return {batch.data == nullptr ? nullptr : batch.data + b * batch.batch_stride, batch.row_stride, batch.column_stride};
}

}  // namespace manualgrad
