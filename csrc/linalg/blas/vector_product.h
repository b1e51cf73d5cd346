// Products of small matrices, one at a time, in vectors along their rows. Host code.
#pragma once

#include <algorithm>

#include "../../base/simd.h"
#include "../lanes/transpose.h"

namespace manualgrad {

// The largest number of rows of b.
constexpr int64_t kLargestProduct = 32;

template <class N, class T>
HOST_INLINE N load_lanes(const T* from, int count) {
  N result{};
  if (count == kLanesIn<N>) {
    std::memcpy(&result.v, from, sizeof(result.v));
  } else {
    for (int w = 0; w < count; ++w) result.v[w] = from[w];
  }
  return result;
}
template <class N, class T>
HOST_INLINE N load_lanes(const Complex<T>* from, int count) {
  N result{};
  for (int w = 0; w < count; ++w) set_lane(result, w, from[w]);
  return result;
}
template <class T, int B>
HOST_INLINE void store_lanes(const Lanes<T, B>& from, int count, T* to) {
  if (count == kLanes<T, B>) {
    std::memcpy(to, &from.v, sizeof(from.v));
  } else {
    for (int w = 0; w < count; ++w) to[w] = from.v[w];
  }
}
template <class T, int B>
HOST_INLINE void store_lanes(const Complex<Lanes<T, B>>& from, int count, Complex<T>* to) {
  for (int w = 0; w < count; ++w) to[w] = get_lane(from, w);
}

// a times b. The compiler broadcasts a scalar to a vector only if both are operands of one operation.
template <class T, int B>
HOST_INLINE Lanes<T, B> times(const T& a, const Lanes<T, B>& b, bool) {
  return {a * b.v};
}
template <class T, int B>
HOST_INLINE Complex<Lanes<T, B>> times(const Complex<T>& a, const Complex<Lanes<T, B>>& b, bool conjugated) {
  const T im = conjugated ? -a.im : a.im;
  return {{a.re * b.re.v - im * b.im.v}, {a.re * b.im.v + im * b.re.v}};
}

// c (m, n, row-major) = a (m, k) b (k, n), or c += a b.
template <class S, int Bytes>
struct VectorProduct {
  using N = typename LanesOf<S, Bytes>::type;
  static constexpr int kCount = kLanesIn<N>;

  // The columns [first, first + count) of b, in lanes.
  HOST_INLINE static void pack(const View<S>& b, int64_t k, int64_t first, int count, N* to) {
    const S* from = b.data + first * b.column;
    if (b.row == 1 && b.column != 1) {
      gather(MatrixBatch<const S>{from, b.column, 0, 1}, 0, count, 1, static_cast<int>(k), to);
    } else if (b.column == 1) {
      for (int64_t r = 0; r < k; ++r) to[r] = load_lanes<N>(from + r * b.row, count);
    } else {
      for (int64_t r = 0; r < k; ++r) {
        to[r] = N{};
        for (int w = 0; w < count; ++w) set_lane(to[r], w, from[r * b.row + w * b.column]);
      }
    }
    if constexpr (NumberTraits<S>::kComplex) {
      if (b.conjugated) {
        for (int64_t r = 0; r < k; ++r) to[r] = conjugate(to[r]);
      }
    }
  }

  template <int Rows>
  HOST_INLINE static void rows(const View<S>& a, const N* b, int64_t i, int64_t k, bool add, int count, S* c,
                               int64_t pitch) {
    N sum[Rows];
    for (int q = 0; q < Rows; ++q) sum[q] = add ? load_lanes<N>(c + (i + q) * pitch, count) : N{};
    for (int64_t r = 0; r < k; ++r) {
      for (int q = 0; q < Rows; ++q) sum[q] += times(a.raw(i + q, r), b[r], a.conjugated);
    }
    for (int q = 0; q < Rows; ++q) store_lanes(sum[q], count, c + (i + q) * pitch);
  }

  HOST_INLINE static void run(const View<S>& a, const View<S>& b, int64_t m, int64_t k, int64_t n, bool add, S* c) {
    constexpr int kRows = NumberTraits<S>::kComplex ? 4 : 8;
    N packed[kLargestProduct];
    const bool overlap = n >= kCount && !add;
    for (int64_t next = 0; next < n; next += kCount) {
      const int64_t j = overlap ? std::min(next, n - kCount) : next;
      const int count = static_cast<int>(std::min<int64_t>(kCount, n - j));
      pack(b, k, j, count, packed);
      int64_t i = 0;
      for (; i + kRows <= m; i += kRows) rows<kRows>(a, packed, i, k, add, count, c + j, n);
      for (; i + 2 <= m; i += 2) rows<2>(a, packed, i, k, add, count, c + j, n);
      for (; i < m; ++i) rows<1>(a, packed, i, k, add, count, c + j, n);
    }
  }
};

template <class S>
void vector_product(const View<S>& a, const View<S>& b, int64_t m, int64_t k, int64_t n, S* c, bool add = false) {
  with_native([&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    run_shared_native<kBytes, VectorProduct<S, kBytes>>(a, b, m, k, n, add, c);
  });
}

}  // namespace manualgrad
