// Numbers of float16 in blocks that stay in cache, converted to float and back: so that the derivative is compiled for
// float alone. Conversions of bfloat16 are so short that blocks take up to 1.7 times as long there. Host code.
#pragma once

#include "../base/simd.h"
#include "norm_elements.h"

namespace manualgrad {

template <class S>
inline constexpr bool kInBlocks = std::is_same_v<Real<S>, Half>;

// to := elements [begin, end) of x, in the order of the loops.
template <class S>
struct WidenBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const S* x, Compute<S>* to, int64_t begin, int64_t end) {
    const int64_t step = loops.inner_stride(0);
    int64_t done = 0;
    for_stretches(loops, begin, end, [&](int64_t at, int64_t, int64_t, int64_t count) MANUALGRAD_INLINED {
      const S* __restrict from = x + at;
      Compute<S>* __restrict wide = to + done;
      if (step == 1) {
        for (int64_t i = 0; i < count; ++i) wide[i] = load(from[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) wide[i] = load(from[i * step]);
      }
      done += count;
    });
  }
};

// The other way, to out.
template <class S>
struct NarrowBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const Compute<S>* from, S* out, int64_t begin, int64_t end) {
    const int64_t step = loops.inner_stride(1);
    int64_t done = 0;
    for_stretches(loops, begin, end, [&](int64_t, int64_t at, int64_t, int64_t count) MANUALGRAD_INLINED {
      const Compute<S>* __restrict wide = from + done;
      S* __restrict to = out + at;
      if (step == 1) {
        for (int64_t i = 0; i < count; ++i) store(to[i], wide[i]);
      } else {
        for (int64_t i = 0; i < count; ++i) store(to[i * step], wide[i]);
      }
      done += count;
    });
  }
};

// The same loops over elements that lie in their order in memory.
inline LoopNest<3> dense(const LoopNest<3>& loops) {
  LoopNest<3> result;
  int64_t step = 1;
  for (int d = 0; d < loops.dims; ++d) step *= loops.size[d];
  for (int d = 0; d < loops.dims; ++d) {
    step /= loops.size[d];
    result.push(loops.size[d], {step, step, loops.stride[2][d]});
  }
  return result;
}

// The start of an array whose elements after the first `count` are in `memory`.
template <class T>
T* before(T* memory, int64_t count) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) - static_cast<uintptr_t>(count) * sizeof(T));
}

// Elements [begin, end), by compute(dense loops, from, to, begin, end) for each block of them.
template <class S, class F>
void in_wide_blocks(const LoopNest<3>& loops, const S* x, S* out, int64_t begin, int64_t end, const F& compute) {
  constexpr int64_t kCount = 8192 / static_cast<int64_t>(sizeof(Compute<S>));
  const LoopNest<3> inside = dense(loops);
  alignas(64) Compute<S> memory[2][kCount];
  Compute<S>*const from = memory[0], *const to = memory[1];
  for (int64_t first = begin; first < end; first += kCount) {
    const int64_t last = std::min(first + kCount, end);
    Multiversion<WidenBody<S>>::call(loops, x, from, first, last);
    compute(inside, before(from, first), before(to, first), first, last);
    Multiversion<NarrowBody<S>>::call(loops, to, out, first, last);
  }
}

}  // namespace manualgrad
