// The steps of attention on a tile of queries, in vectors: products of small matrices, and the passes over rows of
// scores. Host code.
#pragma once

#include "../base/simd.h"
#include "../math/segments.h"

namespace manualgrad {

#define MANUALGRAD_UNROLL _Pragma("GCC unroll 8")

// Products of matrices keep this many rows and vectors of the result in registers.
constexpr int kRowsAtOnce = 6;
template <int Bytes>
constexpr int kVectorsAtOnce = Bytes == 64 ? 4 : 2;

// a b + c: with one rounding if there is an instruction for it; products take twice as long without.
template <class T, int B>
HOST_INLINE Lanes<T, B> multiply_add(const Lanes<T, B>& a, const Lanes<T, B>& b, const Lanes<T, B>& c) {
#if defined(MANUALGRAD_MULTIVERSION)
  constexpr bool kFused = B > 16;
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  constexpr bool kFused = true;
#else
  constexpr bool kFused = false;
#endif
  if constexpr (kFused) {
    Lanes<T, B> result;
    for (int w = 0; w < kLanes<T, B>; ++w) result.v[w] = std::fma(a.v[w], b.v[w], c.v[w]);
    return result;
  } else {
    return a * b + c;
  }
}

// c = a[0] b[0] + a[1] b[1], or as many of these terms as there are; or c += these.
template <class T>
struct ProductOperands {
  const T* a[2];  // (rows, depth)
  const T* b[2];  // (depth, columns)
  int terms;
  bool adds;
  T* c;
  int64_t a_row, b_row, c_row;   // strides
  int64_t rows, columns, depth;  // rows and columns are whole numbers of kRowsAtOnce and of vectors

  HOST_INLINE void term(const T* left, const T* right) {
    a[terms] = left;
    b[terms++] = right;
  }
};

template <class T, int Bytes>
struct ProductBody {
  using N = Lanes<T, Bytes>;
  static constexpr int kW = kLanes<T, Bytes>;

  template <int V>
  HOST_INLINE static void block(const ProductOperands<T>& of, int64_t row, int64_t column) {
    N sum[kRowsAtOnce][V];
    T* c = of.c + row * of.c_row + column;
    MANUALGRAD_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
      MANUALGRAD_UNROLL for (int v = 0; v < V; ++v) {
        sum[r][v] = of.adds ? load_lanes<N>(c + r * of.c_row + v * kW) : N{};
      }
    }
    for (int i = 0; i < of.terms; ++i) {
      const T* a = of.a[i] + row * of.a_row;
      const T* b = of.b[i] + column;
      for (int64_t k = 0; k < of.depth; ++k, b += of.b_row) {
        N line[V];
        MANUALGRAD_UNROLL for (int v = 0; v < V; ++v) line[v] = load_lanes<N>(b + v * kW);
        MANUALGRAD_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
          const N factor{a[r * of.a_row + k] - typename N::values{}};  // not +, which would take an instruction
          MANUALGRAD_UNROLL for (int v = 0; v < V; ++v) sum[r][v] = multiply_add(factor, line[v], sum[r][v]);
        }
      }
    }
    MANUALGRAD_UNROLL for (int r = 0; r < kRowsAtOnce; ++r) {
      MANUALGRAD_UNROLL for (int v = 0; v < V; ++v) store_lanes(c + r * of.c_row + v * kW, sum[r][v]);
    }
  }

  template <int V>
  HOST_INLINE static void columns(const ProductOperands<T>& of, int64_t& column) {
    for (; column + V * kW <= of.columns; column += V * kW) {
      for (int64_t row = 0; row < of.rows; row += kRowsAtOnce) block<V>(of, row, column);
    }
  }

  HOST_INLINE static void run(const ProductOperands<T>& of) {
    int64_t column = 0;
    if constexpr (kVectorsAtOnce<Bytes> == 4) columns<4>(of, column);
    columns<2>(of, column);
    columns<1>(of, column);
  }
};

// A row of scores and of their tangents, each a whole number of kStep elements long.
template <class T, int Bytes>
struct ScoresRow {
  using N = Lanes<T, Bytes>;
  static constexpr int kW = kLanes<T, Bytes>;
  static constexpr int kVectors = kVectorsAtOnce<Bytes>;  // as many sums at a time, so that none waits for another
  static constexpr int64_t kStep = kVectors * kW;

  template <class How>
  HOST_INLINE static T over_lanes(const N (&parts)[kVectors]) {
    N all = parts[0];
    for (int v = 1; v < kVectors; ++v) all = How::both(all, parts[v]);
    T result = all.v[0];
    for (int w = 1; w < kW; ++w) result = How::both(result, static_cast<T>(all.v[w]));
    return result;
  }

  HOST_INLINE static T largest(const T* s, int64_t size) {
    N parts[kVectors];
    MANUALGRAD_UNROLL for (int v = 0; v < kVectors; ++v) parts[v] = Largest::none<N>();
    for (int64_t j = 0; j < size; j += kStep) {
      MANUALGRAD_UNROLL for (int v = 0; v < kVectors; ++v) {
        parts[v] = Largest::both(parts[v], load_lanes<N>(s + j + v * kW));
      }
    }
    return over_lanes<Largest>(parts);
  }

  // s := P, and t := P (t - <P t>) where there are tangents.
  template <bool Tangents>
  HOST_INLINE static void change(T* s, T* t, T maximum, int64_t size) {
    const N shift = real_number<N>(maximum);
    N sums[kVectors], products[kVectors];
    MANUALGRAD_UNROLL for (int v = 0; v < kVectors; ++v) sums[v] = products[v] = real_number<N>(0);
    for (int64_t j = 0; j < size; j += kStep) {
      MANUALGRAD_UNROLL for (int v = 0; v < kVectors; ++v) {
        const N p = small_exponential(load_lanes<N>(s + j + v * kW) - shift);
        store_lanes(s + j + v * kW, p);
        sums[v] += p;
        if constexpr (Tangents) products[v] = multiply_add(p, load_lanes<N>(t + j + v * kW), products[v]);
      }
    }
    const T by = 1 / over_lanes<Added>(sums);
    const N factor = real_number<N>(by), mean = real_number<N>(Tangents ? over_lanes<Added>(products) * by : T(0));
    for (int64_t j = 0; j < size; j += kW) {
      const N p = load_lanes<N>(s + j) * factor;
      store_lanes(s + j, p);
      if constexpr (Tangents) store_lanes(t + j, p * (load_lanes<N>(t + j) - mean));
    }
  }
};

}  // namespace manualgrad
