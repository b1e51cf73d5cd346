// Loads a group of matrices, one matrix per lane. Host code.
#pragma once

#include "../matrix_loader.h"
#include "groups.h"
#include "transpose.h"

namespace manualgrad {

// Loads as many matrices as there are lanes; the functions are those of MatrixLoader. Entry i of the order of the
// matrix in lane w is order[i * lanes + w].
template <class Threads>
struct LaneLoader {
  Threads threads;
  int64_t first, count;

  HOST_INLINE static constexpr int pitch(int columns) { return columns; }
  template <class S>
  HOST_INLINE static constexpr bool whole(int numbers) {
    return numbers * LanesOf<S, 16>::kReals <= kLineReals;
  }
  template <class S, class N>
  HOST_INLINE void read(const MatrixBatch<const S>& from, int rows, int columns, N* to, int pitch,
                        Part part = Part::kAll) const {
    gather(from, first, count, rows, columns, to, pitch, part);
  }
  template <class S, class N>
  HOST_INLINE void read(const MatrixBatch<const S>& from, int rows, int columns, N* to) const {
    gather(from, first, count, rows, columns, to);
  }
  template <class N, class S>
  HOST_INLINE void write(const N* from, int rows, int columns, const MatrixBatch<S>& to,
                         const int* order = nullptr) const {
    scatter(from, first, count, rows, columns, to, order);
  }
  HOST_INLINE int64_t place(int lane) const { return first + (lane < count ? lane : count - 1); }
  template <class N>
  HOST_INLINE const int* order(const MatrixBatch<const int32_t>& pivots, int m, int k, int* found, const N*) const {
    if (pivots.data == nullptr) return nullptr;
    constexpr int kCount = kLanesIn<N>;
    if (m == k && count == kCount && order_group<N>(pivots, first, m, found)) return found;
    for (int w = 0; w < kCount; ++w) {
      order_of_pivots(pivots, place(w), m, k, found + w, kCount);
    }
    return found;
  }
  template <class S, class N>
  HOST_INLINE const int* order(const MatrixBatch<const S>& P, int m, N* scratch, int* found, N* nan_target,
                               int numbers) const {
    using R = RealOf<N>;
    constexpr int kCount = kLanesIn<N>;
    read(P, m, m, scratch);
    const R one = real_number<R>(1);
    Lanes<int32_t, kCount * 4> seen{};
    for (int c = 0; c < m; ++c) {
      R sum{}, row = one;
      for (int r = 1; r < m; ++r, row += one) sum += real_part(scratch[r * m + c]) * row;
      const auto place = to_integers(select((sum >= R{}) & (sum < row), sum, R{}));  // row is m
      std::memcpy(found + c * kCount, &place.v, sizeof(place.v));
      seen.v |= 1 << place.v;
    }
    if (!any(!(seen == real_number<Lanes<int32_t, kCount * 4>>(static_cast<int32_t>((uint64_t{1} << m) - 1))))) {
      return found;
    }
    for (int w = 0; w < kCount; ++w) {
      if (settle_order(found + w, kCount, m)) continue;
      for (int e = 0; e < numbers; ++e) set_lane(nan_target[e], w, not_a_number<ScalarOf<N>>());
    }
    return found;
  }
  template <class N>
  HOST_INLINE RealOf<N> parity(const MatrixBatch<const int32_t>& pivots, int k, const N*) const {
    using T = BaseOf<N>;
    RealOf<N> sign;
    for (int w = 0; w < kLanesIn<N>; ++w) set_lane(sign, w, static_cast<T>(parity_of_pivots(pivots, place(w), k)));
    return sign;
  }
  template <class N>
  HOST_INLINE void reorder(const N* from, int rows, int columns, const int* order, N* to) const {
    using T = BaseOf<N>;
    constexpr int kCount = kLanesIn<N>, kReals = sizeof(N) / sizeof(RealOf<N>);
    const T* source = reinterpret_cast<const T*>(from);
    T* target = reinterpret_cast<T*>(to);
    const int length = columns * kReals * kCount;
    for (int i = 0; i < rows; ++i) {
      for (int w = 0; w < kCount; ++w) {
        const T* row = source + (order == nullptr ? i : order[i * kCount + w]) * length + w;
        for (int e = 0; e < length; e += kCount) target[i * length + e + w] = row[e];
      }
    }
  }
  template <class N>
  HOST_INLINE void permutation(int n, const int* order, N* to) const {
    using R = RealOf<N>;
    const R one = real_number<R>(1);
    for (int i = 0; i < n; ++i) {
      const R row = from_integers<R>(order + i * kLanesIn<N>);
      R column{};
      for (int j = 0; j < n; ++j, column += one) to[i * n + j] = from_real<N>(select(row == column, one, R{}));
    }
  }
};

}  // namespace manualgrad
