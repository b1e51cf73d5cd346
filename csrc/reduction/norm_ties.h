// p = +-inf: the elements that attain the norm, counted, and their shares, in loops for the CPU. Host code.
#pragma once

#include "norm_elements.h"

namespace manualgrad {

// Ties are counted in the width of the elements, which lets the loops vectorise, and in stretches that cannot overflow.
template <class T>
using TieCount = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

// For a stretch: the sign of x where its modulus attains the norm, 0 elsewhere, and the number of ties.
template <Stride L, class S>
struct TieStretch {
  using T = RealCompute<S>;
  const S* x;
  S* out;
  const T* norm;
  int64_t* ties;  // by slice; other threads add to the same ones
  int64_t* found;
  int64_t x_step, out_step, slice_step;

  HOST_INLINE void operator()(int64_t x_at, int64_t out_at, int64_t slice, int64_t count) const {
    const S* __restrict from = x + x_at;
    S* __restrict to = out + out_at;
    const T* __restrict n = norm + slice;
    const int64_t sx = L == Stride::kAny ? x_step : 1, so = L == Stride::kAny ? out_step : 1;
    const int64_t ss = L == Stride::kAny ? slice_step : (L == Stride::kOneSlice ? 0 : 1);
    const T first = *n;
    for (int64_t start = 0; start < count; start += kBlock) {
      const int64_t stop = std::min(start + kBlock, count);
      TieCount<T> here = 0;
      for (int64_t i = start; i < stop; ++i) {
        const auto value = load(from[i * sx]);
        const T size = modulus(value);
        const bool tie = is_tie(size, L == Stride::kOneSlice ? first : n[i * ss]);
        store(to[i * so], tie_sign(value, size, tie));
        here += tie ? 1 : 0;
      }
      if (here == 0) continue;
      *found += here;
      if (ss == 0) {
        __atomic_fetch_add(ties + slice, static_cast<int64_t>(here), __ATOMIC_RELAXED);
        continue;
      }
      for (int64_t i = start; i < stop; ++i) {
        if (is_tie(modulus(load(from[i * sx])), n[i * ss])) {
          __atomic_fetch_add(ties + slice + i * ss, int64_t{1}, __ATOMIC_RELAXED);
        }
      }
    }
  }
};

template <Stride L, class S>
struct TieBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const S* x, S* out, const RealCompute<S>* norm, int64_t* ties,
                              uint8_t* block_has_ties, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t found = 0;
      const int64_t first = block * kBlock, numel = block_end(loops);
      for_stretches(loops, first, std::min(first + kBlock, numel),
                    TieStretch<L, S>{x, out, norm, ties, &found, loops.inner_stride(0), loops.inner_stride(1),
                                     loops.inner_stride(2)});
      block_has_ties[block] = found > 0;
    }
  }

  HOST_INLINE static int64_t block_end(const LoopNest<3>& loops) {
    int64_t numel = 1;
    for (int d = 0; d < loops.dims; ++d) numel *= loops.size[d];
    return numel;
  }
};

// out *= share of its slice. Values are signs and zeros: 0 times a nan or infinite share is nan, as it must be.
template <class S>
struct ShareStretch {
  using T = RealCompute<S>;
  S* out;
  const T* share;
  int64_t out_step, slice_step;

  HOST_INLINE void operator()(int64_t, int64_t out_at, int64_t slice, int64_t count) const {
    S* __restrict to = out + out_at;
    const T* __restrict factor = share + slice;
    if (slice_step == 0 && out_step == 1) {
      const T one = *factor;
      for (int64_t i = 0; i < count; ++i) store(to[i], scaled(load(to[i]), one));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        store(to[i * out_step], scaled(load(to[i * out_step]), factor[i * slice_step]));
      }
    }
  }
};

template <class S>
struct ShareBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, S* out, const RealCompute<S>* share, int64_t begin,
                              int64_t end) {
    for_stretches(loops, begin, end, ShareStretch<S>{out, share, loops.inner_stride(1), loops.inner_stride(2)});
  }
};

// Slices that lie in one piece and in cache: count the ties, then write the final values; no count leaves the slice.
template <class S>
struct TieRowsBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const S* x, S* out, const RealCompute<S>* grad,
                              const RealCompute<S>* norm, int64_t begin, int64_t end) {
    using T = RealCompute<S>;
    const int64_t length = loops.inner();
    for (int64_t row = begin; row < end; ++row) {
      int64_t offset[3];
      loops.offsets(row * length, offset);
      const S* __restrict from = x + offset[0];
      S* __restrict to = out + offset[1];
      const T n = norm[offset[2]];
      TieCount<T> ties = 0;
      for (int64_t i = 0; i < length; ++i) ties += is_tie(modulus(load(from[i])), n) ? 1 : 0;
      const T share = grad[offset[2]] / static_cast<T>(ties);
      for (int64_t i = 0; i < length; ++i) {
        const auto value = load(from[i]);
        const T size = modulus(value);
        store(to[i], scaled(tie_sign(value, size, is_tie(size, n)), share));
      }
    }
  }
};

// Slices side by side: the same for a tile of them at a time, narrow enough for its rows to stay in cache.
constexpr int64_t kTileBytes = 262144, kTileWidth = 2048, kTileMinWidth = 64;

template <class S>
struct TieTilesBody {
  HOST_INLINE static void run(const LoopNest<3>& loops, const S* x, S* out, const RealCompute<S>* grad,
                              const RealCompute<S>* norm, int64_t width, int64_t begin, int64_t end) {
    using T = RealCompute<S>;
    const int around = loops.dims - 2;
    const int64_t inner = loops.inner(), rows = loops.size[around], tiles = (inner + width - 1) / width;
    TieCount<T> ties[kTileWidth];
    T share[kTileWidth];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t outer = tile / tiles, column = (tile - outer * tiles) * width;
      const int64_t count = std::min(width, inner - column);
      int64_t offset[3];
      loops.offsets(outer * rows * inner + column, offset);
      const T* __restrict n = norm + offset[2];
      const T* __restrict a = grad + offset[2];
      for (int64_t i = 0; i < count; ++i) ties[i] = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const S* __restrict from = x + offset[0] + row * loops.stride[0][around];
        for (int64_t i = 0; i < count; ++i) ties[i] += is_tie(modulus(load(from[i])), n[i]) ? 1 : 0;
      }
      for (int64_t i = 0; i < count; ++i) share[i] = a[i] / static_cast<T>(ties[i]);
      for (int64_t row = 0; row < rows; ++row) {
        const S* __restrict from = x + offset[0] + row * loops.stride[0][around];
        S* __restrict to = out + offset[1] + row * loops.stride[1][around];
        for (int64_t i = 0; i < count; ++i) {
          const auto value = load(from[i]);
          const T size = modulus(value);
          store(to[i], scaled(tie_sign(value, size, is_tie(size, n[i])), share[i]));
        }
      }
    }
  }

  // The width of a tile, or 0 where the slices are too long, or not laid out as rows of side-by-side slices.
  static int64_t width(const NormPlan& plan) {
    const LoopNest<3>& loops = plan.elements;
    const int around = loops.dims - 2;
    if (around < 0 || loops.stride[2][around] != 0 || loops.size[around] != plan.slice_size) return 0;
    const int64_t fits = kTileBytes / (plan.slice_size * static_cast<int64_t>(sizeof(S)));
    return fits < std::min(kTileMinWidth, loops.inner()) ? 0 : std::min(fits, kTileWidth);
  }
};

}  // namespace manualgrad
