// The threads that work on one matrix together: their own one in host code and small CUDA kernels, a warp elsewhere.
#pragma once

#include "number.h"

namespace manualgrad {

struct Alone {
  HOST_DEVICE constexpr int rank() const { return 0; }
  HOST_DEVICE constexpr int size() const { return 1; }
  HOST_DEVICE constexpr int group() const { return 0; }
  HOST_DEVICE constexpr int groups() const { return 1; }
  HOST_DEVICE constexpr int place() const { return 0; }
  HOST_DEVICE constexpr int width() const { return 1; }
  HOST_DEVICE void sync() const {}
  // The largest that any of the threads has.
  template <class R>
  HOST_DEVICE R largest(const R& value) const {
    return value;
  }
};

}  // namespace manualgrad
