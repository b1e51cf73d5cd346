// Work shared among threads, in host code.
#pragma once

#include <torch/csrc/stable/ops.h>

namespace manualgrad {

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kGrain = 32768;

// f(begin, end) over [0, count), in the calling thread when there is no more than a grain of work.
template <class F>
inline void parallel_for(int64_t count, int64_t grain, const F& f) {
  if (count <= grain) {
    f(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, grain, f);
  }
}

}  // namespace manualgrad
