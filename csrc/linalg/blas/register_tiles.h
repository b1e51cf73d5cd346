// Products and triangular solves of real row-major matrices, in tiles of as many sums as fit into registers. Host code.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../math/matrix.h"

namespace manualgrad {

// Contiguous rows, `pitch` apart.
template <class T>
struct Rows {
  T* data;
  int64_t pitch;

  HOST_INLINE T* operator[](int64_t i) const { return data + i * pitch; }
};

template <class T, int Bytes>
struct RegisterTile {
  typedef T values __attribute__((vector_size(Bytes)));
  static constexpr int kCount = Bytes / static_cast<int>(sizeof(T));
  static constexpr int kRows = Bytes == 64 ? 8 : 4;

  HOST_INLINE static values load(const T* from) {
    values v;
    std::memcpy(&v, from, sizeof(v));
    return v;
  }
  HOST_INLINE static void store(T* to, const values& v) { std::memcpy(to, &v, sizeof(v)); }

  // sum := sum +- a (Count, k) b, the rows of b from `first` on.
  template <bool Subtract, int Count, int Vectors>
  HOST_INLINE static void accumulate(values (&sum)[Count][Vectors], const StridedMatrix<const T>& a,
                                     const Rows<const T>& b, int64_t first, int64_t k) {
    for (int64_t p = first; p < k; ++p) {
      values x[Vectors];
      for (int v = 0; v < Vectors; ++v) x[v] = load(b[p] + v * kCount);
      for (int i = 0; i < Count; ++i) {
        const T factor = a.at(i, p);
        for (int v = 0; v < Vectors; ++v) {
          if constexpr (Subtract) {
            sum[i][v] -= x[v] * factor;
          } else {
            sum[i][v] += x[v] * factor;
          }
        }
      }
    }
  }
};

// c (m, n) := c +- a (m, k) b (k, n); n is a multiple of kCount. b may be marked as lower triangular. `replace`: c
// counts as zero; then n may be any number that is at least kCount.
template <class T, int Bytes, bool Subtract>
struct Multiply : RegisterTile<T, Bytes> {
  using Tile = RegisterTile<T, Bytes>;
  using Tile::kCount, Tile::kRows;

  template <int Count, int Vectors>
  HOST_INLINE static void tile(const StridedMatrix<const T>& a, const Rows<const T>& b, int64_t first, int64_t k,
                               const Rows<T>& c, bool replace) {
    typename Tile::values sum[Count][Vectors];
    for (int i = 0; i < Count; ++i) {
      for (int v = 0; v < Vectors; ++v) sum[i][v] = replace ? typename Tile::values{} : Tile::load(c[i] + v * kCount);
    }
    Tile::template accumulate<Subtract>(sum, a, b, first, k);
    for (int i = 0; i < Count; ++i) {
      for (int v = 0; v < Vectors; ++v) Tile::store(c[i] + v * kCount, sum[i][v]);
    }
  }

  template <int Vectors>
  HOST_INLINE static void columns(const StridedMatrix<const T>& a, const Rows<const T>& b, int64_t first, int64_t m,
                                  int64_t k, const Rows<T>& c, bool replace) {
    int64_t done = 0;
    const auto from = [&](int64_t row) { return StridedMatrix<const T>{&a.at(row, 0), a.row, a.column}; };
    while (done + kRows <= m || (replace && done < m && m >= kRows)) {
      const int64_t i = std::min(done, m - kRows);  // the last tile overlaps the one before
      tile<kRows, Vectors>(from(i), b, first, k, {c[i], c.pitch}, replace);
      done = i + kRows;
    }
    for (; done < m; ++done) tile<1, Vectors>(from(done), b, first, k, {c[done], c.pitch}, replace);
  }

  HOST_INLINE static void run(const StridedMatrix<const T>& a, const Rows<const T>& b, int64_t m, int64_t k, int64_t n,
                              const Rows<T>& c, bool triangular, bool replace) {
    for (int64_t done = 0; done < n;) {
      const int64_t left = n - done;
      if (left >= 2 * kCount || (left > kCount && n >= 2 * kCount)) {
        const int64_t j = std::min(done, n - 2 * kCount);
        columns<2>(a, {b.data + j, b.pitch}, triangular ? j : 0, m, k, {c.data + j, c.pitch}, replace);
        done = j + 2 * kCount;
      } else {
        const int64_t j = std::min(done, n - kCount);
        columns<1>(a, {b.data + j, b.pitch}, triangular ? j : 0, m, k, {c.data + j, c.pitch}, replace);
        done = j + kCount;
      }
    }
  }
};

// Y (n, columns) := a^-1 Y for a lower triangular; columns is a multiple of kCount. inverse: memory for n numbers, or
// null if the diagonal counts as ones. triangular: whether Y is lower triangular too.
template <class T, int Bytes>
struct SolveLower : RegisterTile<T, Bytes> {
  using Tile = RegisterTile<T, Bytes>;
  using Tile::kCount, Tile::kRows;

  template <int Count, int Vectors>
  HOST_INLINE static void tile(const StridedMatrix<const T>& a, const T* inverse, int64_t first, int64_t begin,
                               const Rows<T>& Y) {
    typename Tile::values sum[Count][Vectors];
    for (int i = 0; i < Count; ++i) {
      for (int v = 0; v < Vectors; ++v) sum[i][v] = Tile::load(Y[begin + i] + v * kCount);
    }
    Tile::template accumulate<true>(sum, {&a.at(begin, 0), a.row, a.column}, Rows<const T>{Y.data, Y.pitch}, first,
                                    begin);
    settle<0>(sum, {&a.at(begin, begin), a.row, a.column}, inverse == nullptr ? nullptr : inverse + begin,
              {Y[begin], Y.pitch});
  }

  // Row I, from which nothing more has to be subtracted, and the rows after it. Recursive, because compilers do not
  // unroll a loop here, which would keep the sums in memory.
  template <int I, int Count, int Vectors>
  HOST_INLINE static void settle(typename Tile::values (&sum)[Count][Vectors], const StridedMatrix<const T>& a,
                                 const T* inverse, const Rows<T>& Y) {
    for (int v = 0; v < Vectors; ++v) {
      if (inverse != nullptr) sum[I][v] *= inverse[I];
      Tile::store(Y[I] + v * kCount, sum[I][v]);
    }
    for (int i = I + 1; i < Count; ++i) {
      const T factor = a.at(i, I);
      for (int v = 0; v < Vectors; ++v) sum[i][v] -= sum[I][v] * factor;
    }
    if constexpr (I + 1 < Count) settle<I + 1>(sum, a, inverse, Y);
  }

  template <int Vectors>
  HOST_INLINE static void columns(const StridedMatrix<const T>& a, const T* inverse, int64_t first, int64_t n,
                                  const Rows<T>& Y) {
    int64_t i = first;
    for (; i + kRows <= n; i += kRows) tile<kRows, Vectors>(a, inverse, first, i, Y);
    for (; i < n; ++i) tile<1, Vectors>(a, inverse, first, i, Y);
  }

  HOST_INLINE static void run(const StridedMatrix<const T>& a, T* inverse, int64_t n, int64_t count, const Rows<T>& Y,
                              bool triangular) {
    if (inverse != nullptr) {
      for (int64_t i = 0; i < n; ++i) inverse[i] = a.at(i, i);
      for (int64_t i = 0; i < n; ++i) inverse[i] = 1 / inverse[i];
    }
    for (int64_t j = 0; j < count;) {
      const int64_t first = triangular ? j / kRows * kRows : 0;
      if (j + 2 * kCount <= count) {
        columns<2>(a, inverse, first, n, {Y.data + j, Y.pitch});
        j += 2 * kCount;
      } else {
        columns<1>(a, inverse, first, n, {Y.data + j, Y.pitch});
        j += kCount;
      }
    }
  }
};

}  // namespace manualgrad
