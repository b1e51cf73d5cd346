// Thread groups: the threads that work on one matrix together. One thread in host code and in small CUDA kernels, a
// warp or a block elsewhere.
#pragma once

#include "number.h"

namespace manualgrad {

// Pairs of rows are shared among subgroups of `width()` threads; `place()` is a thread's place in its own.
struct SingleThread {
  HOST_DEVICE constexpr int rank() const { return 0; }
  HOST_DEVICE constexpr int size() const { return 1; }
  HOST_DEVICE constexpr int group() const { return 0; }
  HOST_DEVICE constexpr int groups() const { return 1; }
  HOST_DEVICE constexpr int place() const { return 0; }
  HOST_DEVICE constexpr int width() const { return 1; }
  HOST_DEVICE void sync() const {}
  // The largest value of all threads.
  template <class R>
  HOST_DEVICE R largest(const R& value) const {
    return value;
  }
};

// One thread whose steps are inlined, for orders that are known at compile time.
struct InlinedThread : SingleThread {};

template <class Threads>
inline constexpr bool kIsOneThread = std::is_base_of_v<SingleThread, Threads>;

}  // namespace manualgrad
