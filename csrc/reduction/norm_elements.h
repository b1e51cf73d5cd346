// The elements of the cotangent of a norm, in loops for the CPU. Host code.
#pragma once

#include "norm.h"

#include <algorithm>

namespace manualgrad {

// Elements of one unit of work that must not depend on the number of threads.
constexpr int64_t kBlock = 8192;

// The slices' coefficients, one array each, so that a loop across slices loads vectors.
template <class T>
struct Coefficients {
  const T* a;
  const T* b;
  const T* n;
};

enum class Stride { kOneSlice, kAcrossSlices, kAny };

// Visits [begin, end) of the loops as stretches of the innermost one: visit(x, out, slice, count).
template <class Visit>
HOST_INLINE void for_stretches(const LoopNest<3>& loops, int64_t begin, int64_t end, Visit&& visit) {
  const int64_t inner = loops.inner();
  int64_t skip = begin % inner;
  while (begin < end) {
    int64_t offset[3];
    loops.offsets(begin, offset);
    // The loop around the innermost one is stepped, not decoded: rows may be a few elements long.
    const int around = loops.dims - 2;
    int64_t rows = around >= 0 ? loops.size[around] - (begin / inner) % loops.size[around] : 1;
    for (; rows > 0 && begin < end; --rows) {
      const int64_t count = std::min(inner - skip, end - begin);
      visit(offset[0], offset[1], offset[2], count);
      begin += count;
      if (around >= 0) {
        for (int k = 0; k < 3; ++k) offset[k] += loops.stride[k][around] - skip * loops.stride[k][around + 1];
      }
      skip = 0;
    }
  }
}

template <Power P, Stride L, class S>
struct FiniteStretch {
  using T = RealCompute<S>;
  const S* x;
  S* out;
  Coefficients<T> slices;
  double exponent;
  int64_t x_step, out_step, slice_step;

  HOST_INLINE void operator()(int64_t x_at, int64_t out_at, int64_t slice, int64_t count) const {
    const S* __restrict from = x + x_at;
    S* __restrict to = out + out_at;
    const T* __restrict a = slices.a + slice;
    const T* __restrict b = slices.b + slice;
    const T* __restrict n = slices.n + slice;
    const double e = exponent;
    if constexpr (L == Stride::kOneSlice) {
      const Slice<T> one{*a, *b, *n};
      for (int64_t i = 0; i < count; ++i) store(to[i], norm_backward_element<P>(load(from[i]), one, e));
    } else if constexpr (L == Stride::kAcrossSlices) {
      for (int64_t i = 0; i < count; ++i) {
        store(to[i], norm_backward_element<P>(load(from[i]), Slice<T>{a[i], b[i], n[i]}, e));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = i * slice_step;
        store(to[i * out_step], norm_backward_element<P>(load(from[i * x_step]), Slice<T>{a[j], b[j], n[j]}, e));
      }
    }
  }
};

template <Power P, Stride L, class S>
struct FiniteBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const S* x, S* out, const Coefficients<RealCompute<S>>& slices,
                              double exponent, int64_t begin, int64_t end) {
    for_stretches(loops, begin, end,
                  FiniteStretch<P, L, S>{x, out, slices, exponent, loops.inner_stride(0), loops.inner_stride(1),
                                         loops.inner_stride(2)});
  }
};

}  // namespace manualgrad
