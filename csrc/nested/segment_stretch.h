// A segment, or a piece of one, on the CPU, where there are fewer columns than a vector has lanes: vectors along
// memory. Host code.
#pragma once

#include "segment_columns.h"

namespace manualgrad {

// Fewer columns than a vector has lanes: a segment's rows are one stretch of memory, and each vector has the same
// columns in its lanes as the vector `period` before it.
struct Period {
  int columns, period, used;  // `used` vectors are gathered separately, to hide the latency of an addition

  HOST_INLINE Period(int64_t inner, int lanes) : columns(static_cast<int>(inner)) {
    int common = lanes;
    while (columns % common != 0) common /= 2;
    period = used = columns / common;
    while (used < 4) used += period;
  }
};

// The most that a Period of fewer columns than lanes uses: three columns use six.
template <class N>
constexpr int kMostVectors = kLanesIn<N> > 6 ? kLanesIn<N> : 6;

// Puts the value of a column into all lanes of that column.
template <class N>
MANUALGRAD_NOT_INLINED void spread(const Period& by, const BaseOf<N>* of_columns, N* vectors) {
  BaseOf<N> lane[kMostVectors<N> * kLanesIn<N>];
  for (int i = 0, c = 0; i < by.period * kLanesIn<N>; ++i, c = c + 1 == by.columns ? 0 : c + 1) lane[i] = of_columns[c];
  std::memcpy(static_cast<void*>(vectors), lane, sizeof(N) * static_cast<size_t>(by.period));
  for (int j = by.period; j < by.used; ++j) vectors[j] = vectors[j - by.period];
}

// Brings the lanes of a column together, and spreads the result. `count` elements were gathered.
template <class How, class N>
MANUALGRAD_NOT_INLINED void fold(const Period& by, int64_t count, N* vectors) {
  using T = BaseOf<N>;
  constexpr int kW = kLanesIn<N>;
  T lane[kMostVectors<N> * kW];
  const int lanes = static_cast<int>(std::min<int64_t>(count, int64_t{by.used} * kW)), once = by.period * kW;
  std::memcpy(lane, vectors, sizeof(N) * static_cast<size_t>(by.used));
  for (int i = once; i < lanes; i += kW) {
    T* to = lane + i % once;
    for (int w = 0; w < kW; ++w) to[w] = How::both(to[w], lane[i + w]);
  }
  if (by.period == 1) {  // columns are a power of two
    for (int half = kW / 2; half >= by.columns; half /= 2) {
      for (int w = 0; w < half; ++w) lane[w] = How::both(lane[w], lane[w + half]);
    }
  } else {
    for (int i = by.columns, c = 0; i < std::min(lanes, once); ++i, c = c + 1 == by.columns ? 0 : c + 1) {
      lane[c] = How::both(lane[c], lane[i]);
    }
  }
  spread<N>(by, lane, vectors);
}

template <class Op, class T, int Bytes>
struct Stretch {
  using N = Lanes<T, Bytes>;
  using First = typename Op::First;
  static constexpr int kW = kLanesIn<N>;

  N a[kMostVectors<N>], b[kMostVectors<N>];

  HOST_INLINE static N load_y(const OperandRows<T>& rows, int64_t at, int64_t count) {
    return Op::kInputs > 1 ? load_lanes<N>(rows.y + at, count) : real_number<N>(T(0));
  }

  HOST_INLINE void gather(const Period& by, const OperandRows<T>& rows, int64_t count) {
    for (int j = 0; j < by.used; ++j) {
      a[j] = First::template none<N>();
      b[j] = real_number<N>(T(0));
    }
    for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
      const int64_t lanes = std::min<int64_t>(kW, count - i);
      const N value = Op::first(load_lanes<N>(rows.x + i, lanes), load_y(rows, i, lanes));
      a[j] = First::both(a[j], lanes == kW ? value : select(first_lanes<N>(lanes), value, First::template none<N>()));
    }
    fold<First>(by, count, a);
    if constexpr (Op::kPasses == 2) {
      for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
        const int64_t lanes = std::min<int64_t>(kW, count - i);
        const N value = Op::second(load_lanes<N>(rows.x + i, lanes), Op::shift(a[j]));
        if constexpr (Op::kKeeps) store_lanes(rows.out + i, value, lanes);
        b[j] += lanes == kW ? value : select(first_lanes<N>(lanes), value, real_number<N>(T(0)));
      }
      fold<Added>(by, count, b);
    }
  }

  HOST_INLINE void apply(const Period& by, const OperandRows<T>& rows, int64_t count) const {
    for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
      const int64_t lanes = std::min<int64_t>(kW, count - i);
      const N x = load_lanes<N>((Op::kKeeps ? rows.out : rows.x) + i, lanes);
      store_lanes(rows.out + i, Op::apply(x, load_y(rows, i, lanes), Gathered<N>{a[j], b[j]}), lanes);
    }
  }

  HOST_INLINE void run(Step step, const OperandRows<T>& rows, const Parts<T>& parts) {
    const Period by(rows.stride, kW);
    const int64_t count = rows.count * by.columns;
    if (step == Step::kResult) {
      spread<N>(by, parts.a, a);
      spread<N>(by, parts.b, b);
    } else {
      gather(by, rows, count);
    }
    if (step == Step::kPiece) {
      store_lanes(parts.a, a[0]);
      store_lanes(parts.b, b[0]);
      return;
    }
    for (int j = 0; j < by.used && step == Step::kWhole; ++j) {
      const Gathered<N> of = Op::finish(Gathered<N>{a[j], b[j]});
      a[j] = of.a;
      b[j] = of.b;
    }
    if constexpr (Op::kRows) {
      apply(by, rows, count);
    } else {
      store_lanes(rows.out, a[0], by.columns);
    }
  }
};

}  // namespace manualgrad
