// A nest of strided loops: what a kernel iterates over once dims have been sorted out.
#pragma once

#include "../math/element.h"

namespace manualgrad {

constexpr int kMaxDims = 64;

// A nest of loops, outermost first, with one stride (in elements) for each operand.
template <int Operands, int Capacity = kMaxDims>
struct LoopNest {
  int dims = 0;
  int64_t size[Capacity];
  int64_t stride[Operands][Capacity];

  // Adds a loop inside the others; merges it with the enclosing loop if all operands step through both as one.
  void push(int64_t count, const int64_t (&steps)[Operands]) {
    if (count == 1) return;
    bool merges = dims > 0;
    for (int k = 0; merges && k < Operands; ++k) merges = stride[k][dims - 1] == steps[k] * count;
    if (merges) {
      size[dims - 1] *= count;
    } else {
      size[dims++] = count;
    }
    for (int k = 0; k < Operands; ++k) stride[k][dims - 1] = steps[k];
  }

  int64_t inner() const { return dims > 0 ? size[dims - 1] : 1; }
  int64_t inner_stride(int operand) const { return dims > 0 ? stride[operand][dims - 1] : 0; }

  // The offset of each operand at a linear index of all loops, or of the outermost ones.
  HOST_DEVICE void offsets(int64_t index, int64_t (&offset)[Operands]) const { offsets(index, dims, offset); }
  HOST_DEVICE void offsets(int64_t index, int outermost, int64_t (&offset)[Operands]) const {
    for (int k = 0; k < Operands; ++k) offset[k] = 0;
    for (int d = outermost - 1; d >= 0; --d) {
      const int64_t next = d > 0 ? quotient(index, size[d]) : 0, at = index - next * size[d];
      for (int k = 0; k < Operands; ++k) offset[k] += at * stride[k][d];
      index = next;
    }
  }

 private:
  // A division of 64 bits takes ten times as long as one of 32.
  HOST_DEVICE static int64_t quotient(int64_t index, int64_t by) {
    const uint64_t either = static_cast<uint64_t>(index | by);
    return either >> 32 == 0 ? static_cast<uint32_t>(index) / static_cast<uint32_t>(by) : index / by;
  }
};

}  // namespace manualgrad
