// A segment, or a piece of one, on the CPU: vectors across columns. Host code.
#pragma once

#include "../linalg/lanes/transpose.h"
#include "segments.h"

#include <algorithm>
#include <cstring>

namespace manualgrad {

// This many rows are added up before they are added to the others.
constexpr int64_t kRun = 64;

// The first `count` lanes; the others are 0.
template <class N>
HOST_INLINE N load_lanes(const BaseOf<N>* from, int64_t count) {
  if (count == kLanesIn<N>) return load_lanes<N>(from);
  N part = real_number<N>(0);
  std::memcpy(&part.v, from, static_cast<size_t>(count) * sizeof(BaseOf<N>));
  return part;
}

template <class N>
HOST_INLINE void store_lanes(BaseOf<N>* to, const N& value, int64_t count) {
  if (count == kLanesIn<N>) return store_lanes(to, value);
  std::memcpy(to, &value.v, static_cast<size_t>(count) * sizeof(BaseOf<N>));
}

template <class N>
HOST_INLINE MaskOf<N> first_lanes(int64_t count) {
  MaskOf<N> mask;
  for (int w = 0; w < kLanesIn<N>; ++w) mask.v[w] = w < count ? -1 : 0;
  return mask;
}

// Rows of all operands, from their first column on.
template <class T>
struct OperandRows {
  const T* x;
  const T* y;
  T* out;
  int64_t count, stride;
};

// The gathered parts of a piece: two arrays, one entry per column, padded to whole vectors.
template <class T>
struct Parts {
  T* a;
  T* b;
};

// A segment that is not cut; a piece, which is gathered into its parts; a piece's result, from the merged parts.
enum class Step { kWhole, kPiece, kResult };

// K vectors side by side.
template <class Op, class T, int Bytes, int K>
struct Columns {
  using N = Lanes<T, Bytes>;
  using First = typename Op::First;
  static constexpr int kW = kLanesIn<N>;

  N a[K], b[K];

  HOST_INLINE static N load_y(const OperandRows<T>& rows, int64_t at) {
    return Op::kInputs > 1 ? load_lanes<N>(rows.y + at) : real_number<N>(T(0));
  }

  HOST_INLINE void gather(const OperandRows<T>& rows) {
    for (int k = 0; k < K; ++k) a[k] = First::template none<N>();
    for (int64_t start = 0; start < rows.count; start += kRun) {
      const int64_t stop = std::min(start + kRun, rows.count);
      N run[K];
      for (int k = 0; k < K; ++k) run[k] = First::template none<N>();
      for (int64_t r = start; r < stop; ++r) {
        for (int k = 0; k < K; ++k) {
          const int64_t at = r * rows.stride + k * kW;
          run[k] = First::both(run[k], Op::first(load_lanes<N>(rows.x + at), load_y(rows, at)));
        }
      }
      for (int k = 0; k < K; ++k) a[k] = First::both(a[k], run[k]);
    }
    for (int k = 0; k < K; ++k) b[k] = real_number<N>(T(0));
  }

  // The second pass; leaves its terms in `out` where the operation keeps them.
  HOST_INLINE void gather_again(const OperandRows<T>& rows) {
    N shift[K];
    for (int k = 0; k < K; ++k) shift[k] = Op::shift(a[k]);
    for (int64_t start = 0; start < rows.count; start += kRun) {
      const int64_t stop = std::min(start + kRun, rows.count);
      N run[K];
      for (int k = 0; k < K; ++k) run[k] = real_number<N>(T(0));
      for (int64_t r = start; r < stop; ++r) {
        for (int k = 0; k < K; ++k) {
          const int64_t at = r * rows.stride + k * kW;
          const N value = Op::second(load_lanes<N>(rows.x + at), shift[k]);
          if constexpr (Op::kKeeps) store_lanes(rows.out + at, value);
          run[k] += value;
        }
      }
      for (int k = 0; k < K; ++k) b[k] += run[k];
    }
  }

  HOST_INLINE void apply(const OperandRows<T>& rows) const {
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int k = 0; k < K; ++k) {
        const int64_t at = r * rows.stride + k * kW;
        const N x = load_lanes<N>((Op::kKeeps ? rows.out : rows.x) + at);
        store_lanes(rows.out + at, Op::apply(x, load_y(rows, at), Gathered<N>{a[k], b[k]}));
      }
    }
  }

  // The first `repeated` lanes of the first column are done already: kept values must not be scaled again there.
  HOST_INLINE void run(Step step, const OperandRows<T>& rows, const Parts<T>& parts, int64_t repeated) {
    if (step == Step::kResult) {
      for (int k = 0; k < K; ++k) {
        a[k] = load_lanes<N>(parts.a + k * kW);
        b[k] = load_lanes<N>(parts.b + k * kW);
      }
      if (Op::kKeeps && repeated > 0) b[0] = select(first_lanes<N>(repeated), real_number<N>(T(1)), b[0]);
    } else {
      gather(rows);
      if constexpr (Op::kPasses == 2) gather_again(rows);
    }
    if (step == Step::kPiece) {
      for (int k = 0; k < K; ++k) {
        store_lanes(parts.a + k * kW, a[k]);
        store_lanes(parts.b + k * kW, b[k]);
      }
      return;
    }
    for (int k = 0; k < K && step == Step::kWhole; ++k) {
      const Gathered<N> of = Op::finish(Gathered<N>{a[k], b[k]});
      a[k] = of.a;
      b[k] = of.b;
    }
    if constexpr (Op::kRows) {
      apply(rows);
    } else {
      for (int k = 0; k < K; ++k) store_lanes(rows.out + k * kW, a[k]);
    }
  }

  // Runs from this column on.
  HOST_INLINE static void run(Step step, const OperandRows<T>& all, const Parts<T>& parts, int64_t column,
                              int64_t repeated) {
    const OperandRows<T> rows{all.x + column, Op::kInputs > 1 ? all.y + column : nullptr, all.out + column, all.count,
                              all.stride};
    Columns().run(step, rows, Parts<T>{parts.a + column, parts.b + column}, repeated);
  }
};

}  // namespace manualgrad
