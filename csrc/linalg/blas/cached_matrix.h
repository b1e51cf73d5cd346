// Products and triangular solves with one real matrix that stays in the cache: for matrices too large for lanes, and
// too small for BLAS, whose call overhead exceeds its arithmetic there. Row-major; rows are `pitch` apart and padded
// with zeros to a multiple of kRowStep entries. Host code.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "../../base/parallel.h"
#include "../../base/simd.h"
#include "../lanes/blocks.h"
#include "../limits.h"
#include "../matrix_loader.h"
#include "register_tiles.h"

namespace manualgrad {

template <class T>
constexpr int kRowStep = kLaneBytes / static_cast<int>(sizeof(T));
template <class T>
int row_pitch(int n) {
  return (n + kRowStep<T> - 1) / kRowStep<T> * kRowStep<T>;
}
// An odd number of cache lines, so that not all rows compete for the same places in the cache.
template <class T>
int spread_pitch(int n) {
  const int width = row_pitch<T>(n);
  return width / kRowStep<T> % 2 == 0 ? width + kRowStep<T> : width;
}

// to (n, m) := from (m, n)^T.
template <class T>
void transpose(const T* from, int64_t from_pitch, int m, int n, T* to, int64_t to_pitch) {
  using Block = Blocks<T, 16>;
  constexpr int kQuad = Block::kCount;
  const int rows = m / kQuad * kQuad, columns = n / kQuad * kQuad;
  for (int i = 0; i < rows; i += kQuad) {
    for (int j = 0; j < columns; j += kQuad) {
      Block block[kQuad];
      for (int q = 0; q < kQuad; ++q) block[q] = Block::load(from + (i + q) * from_pitch + j);
      transpose_blocks(block);
      for (int q = 0; q < kQuad; ++q) block[q].store(to + (j + q) * to_pitch + i);
    }
  }
  for (int i = 0; i < m; ++i) {
    for (int j = i < rows ? columns : 0; j < n; ++j) to[j * to_pitch + i] = from[i * from_pitch + j];
  }
}

template <class T>
void copy_row(const T* from, int n, T* to) {
  int j = 0;
  for (; j + kRowStep<T> <= n; j += kRowStep<T>) std::memcpy(to + j, from + j, kLaneBytes);
  if (j < n) std::memcpy(to + j, from + j, (n - j) * sizeof(T));
}

template <class T>
StridedMatrix<const T> matrix_of(const MatrixBatch<const T>& batch, int64_t b) {
  return {batch.data + b * batch.batch_stride, batch.row_stride, batch.column_stride};
}

// Copies matrix b of a batch, (m, n), to rows that are padded with zeros to `width` entries.
template <class T>
void load_rows(const MatrixBatch<const T>& from, int64_t b, int m, int n, T* to, int pitch, int width) {
  const T* start = from.data + b * from.batch_stride;
  if (from.column_stride == 1) {
    for (int i = 0; i < m; ++i) copy_row(start + i * from.row_stride, n, to + i * pitch);
  } else if (from.row_stride == 1) {
    transpose(start, from.column_stride, n, m, to, pitch);
  } else {
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) to[i * pitch + j] = start[i * from.row_stride + j * from.column_stride];
    }
  }
  if (n == width) return;
  for (int i = 0; i < m; ++i) std::fill(to + i * pitch + n, to + i * pitch + width, T(0));
}
template <class T>
void load_rows(const MatrixBatch<const T>& from, int64_t b, int m, int n, T* to, int pitch) {
  load_rows(from, b, m, n, to, pitch, pitch);
}
// Whether rows of n entries are no shorter than the widest vectors.
template <class T>
bool fills_vectors(int n) {
  return n >= kRowStep<T>;
}
// The rows in memory, if each is contiguous and fills vectors; otherwise a copy, as above.
template <class T>
Rows<const T> rows_of(const MatrixBatch<const T>& from, int64_t b, int m, int n, T* to, int pitch) {
  if (from.column_stride == 1 && fills_vectors<T>(n)) return {from.data + b * from.batch_stride, from.row_stride};
  load_rows(from, b, m, n, to, pitch);
  return {to, pitch};
}
// Copies a matrix of order n without the entries below the diagonal, or above it, the diagonal kept or not.
template <class T>
void load_upper(const MatrixBatch<const T>& from, int64_t b, int n, T* to, int pitch) {
  load_rows(from, b, n, n, to, pitch);
  for (int i = 1; i < n; ++i) std::fill(to + i * pitch, to + i * pitch + i, T(0));
}
template <class T>
void load_lower(const MatrixBatch<const T>& from, int64_t b, int n, T* to, int pitch, bool diagonal) {
  load_rows(from, b, n, n, to, pitch);
  for (int i = 0; i < n; ++i) std::fill(to + i * pitch + i + (diagonal ? 1 : 0), to + i * pitch + n, T(0));
}

// Operations on one matrix of order n, with rows `pitch` apart.
template <class T, int Bytes>
struct CachedMatrix {
  int n, pitch;
  static constexpr int kBlock = 16;

  // c (m, n) := c +- a (m, k) b (k, n), see Multiply.
  static void add(const StridedMatrix<const T>& a, const Rows<const T>& b, int64_t m, int64_t k, int64_t n,
                  const Rows<T>& c, bool triangular = false, bool replace = false) {
    run_shared_native<Bytes, Multiply<T, Bytes, false>>(a, b, m, k, n, c, triangular, replace);
  }
  static void subtract(const StridedMatrix<const T>& a, const Rows<const T>& b, int64_t m, int64_t k, int64_t n,
                       const Rows<T>& c, bool replace = false) {
    run_shared_native<Bytes, Multiply<T, Bytes, true>>(a, b, m, k, n, c, false, replace);
  }

  struct Divide {
    HOST_INLINE static void run(T* row, T by, int64_t count) {
      for (int64_t i = 0; i < count; ++i) row[i] /= by;
    }
  };
  static void divide(T* row, T by, int64_t count) { run_native<Bytes, Divide>(row, by, count); }

  // Y (n, columns) := t^-1 Y, for t lower triangular with a diagonal of ones, or upper; see SolveLower.
  void solve_lower(const StridedMatrix<const T>& t, int64_t columns, const Rows<T>& Y) const {
    run_shared_native<Bytes, SolveLower<T, Bytes>>(t, static_cast<T*>(nullptr), int64_t{n}, columns, Y, false);
  }
  void solve_upper(const StridedMatrix<const T>& t, T* inverse, int64_t columns, const Rows<T>& Y) const {
    // from the last row on
    run_shared_native<Bytes, SolveLower<T, Bytes>>(StridedMatrix<const T>{&t.at(n - 1, n - 1), -t.row, -t.column},
                                                   inverse, int64_t{n}, columns, Rows<T>{Y[n - 1], -Y.pitch}, false);
  }

  // Y (n, columns) := t^-T Y, for t upper triangular or lower; see SolveLower.
  void solve_upper_adjoint(const StridedMatrix<const T>& t, T* inverse, int64_t columns, const Rows<T>& Y,
                           bool triangular = false) const {
    run_shared_native<Bytes, SolveLower<T, Bytes>>(StridedMatrix<const T>{t.data, t.column, t.row}, inverse, int64_t{n},
                                                   columns, Y, triangular);
  }
  void solve_lower_adjoint(const StridedMatrix<const T>& t, T* inverse, int64_t columns, const Rows<T>& Y) const {
    // from the last row on
    run_shared_native<Bytes, SolveLower<T, Bytes>>(StridedMatrix<const T>{&t.at(n - 1, n - 1), -t.column, -t.row},
                                                   inverse, int64_t{n}, columns, Rows<T>{Y[n - 1], -Y.pitch}, false);
  }

  // Solves X u = tril(G^T L)^T for X lower triangular, column by column. The columns of X are rows of W; the
  // contribution of the entries above X, which W already holds, is subtracted first. G and L are lower triangular; the
  // coefficients of u^T are given. Y: memory for kBlock rows. strict: X has no diagonal; otherwise the diagonal of G^T
  // L counts half.
  void couple(const T* G, const T* L, const StridedMatrix<const T>& u, bool strict, T* W, T* Y) const {
    for (int end = n; end > 0;) {
      const int begin = (end - 1) / kBlock * kBlock, count = end - begin;
      const int64_t width = pitch - begin;
      std::fill(Y, Y + count * width, T(0));
      if (G != nullptr) {
        add({G + begin * pitch + begin, 1, pitch}, {L + begin * pitch + begin, pitch}, count, n - begin, width,
            {Y, width}, true);
      }
      if (!strict) {
        for (int c = 0; c < count; ++c) Y[c * width + c] /= 2;
      }
      subtract({&u.at(begin, end), u.row, u.column}, {W + end * pitch + begin, pitch}, count, n - end, width,
               {Y, width});
      for (int c = count - 1; c >= 0; --c) {
        const int row = begin + c, first = strict ? c + 1 : c;
        if (row == n - 1 && strict) continue;
        T *y = Y + c * width, *w = W + row * pitch + begin;
        subtract({&u.at(row, row + 1), u.row, u.column}, {W + (row + 1) * pitch + begin, pitch}, 1, count - 1 - c,
                 width, {y, width});
        divide(y, u.data[row * (u.row + u.column)], width);
        std::copy(y + first, y + width, w + first);
      }
      end = begin;
    }
  }
};

// Memory for four matrices of (n, pitch) and one block of rows.
template <class T>
class CachedScratch {
 public:
  CachedScratch(int n, int pitch)
      : size_(static_cast<size_t>(n) * pitch),
        data_(new T[4 * size_ + CachedMatrix<T, 16>::kBlock * static_cast<size_t>(pitch)]) {}

  T* matrix(int i) const { return data_.get() + i * size_; }
  void clear(int i) const { std::fill(matrix(i), matrix(i) + size_, T(0)); }

  // Row i of L U, of n rows, is row order[i] of the matrix.
  const int* order(const MatrixBatch<const int32_t>& pivots, int64_t b, int n) {
    order_.resize(static_cast<size_t>(n));
    std::iota(order_.begin(), order_.end(), 0);
    if (pivots.data != nullptr) order_of_pivots(pivots, b, n, n, order_.data(), 1);
    return order_.data();
  }
  // The order of a permutation matrix P; null if P is not a permutation matrix.
  const int* order(const MatrixBatch<const T>& P, int64_t b, int n) {
    order_.resize(static_cast<size_t>(n));
    std::vector<T> places(order_.size()), seen(order_.size());
    for (int r = 1; r < n; ++r) {
      for (int c = 0; c < n; ++c) places[c] += P.at(b, r, c) * static_cast<T>(r);
    }
    for (int c = 0; c < n; ++c) {
      order_[c] = row_of_one(places[c], n);
      seen[order_[c]] = 1;
    }
    return std::accumulate(seen.begin(), seen.end(), T(0)) == static_cast<T>(n) ? order_.data() : nullptr;
  }

 private:
  size_t size_;
  std::unique_ptr<T[]> data_;
  std::vector<int> order_;
};

// Copies row i to row order[i], if there is an order.
template <class T>
void store_rows(const T* from, int64_t pitch, int m, int n, const MatrixBatch<T>& to, int64_t b, const int* order) {
  for (int i = 0; i < m; ++i) copy_row(from + i * pitch, n, &to.at(b, order == nullptr ? i : order[i], 0));
}

// Calls Cached::vjp<T, Bytes>(arguments, b, m, n, scratch) for each matrix b of a batch of real matrices of order n; a
// solve has m right-hand sides.
template <class Cached, class Arguments>
void run_cached(const Arguments& arguments, int64_t batch, int64_t m, int64_t n) {
  using T = typename Arguments::Scalar;
  const int larger = static_cast<int>(std::max(m, n));
  parallel_for(batch, 1, [&](int64_t begin, int64_t end) {
    CachedScratch<T> scratch(larger, row_pitch<T>(larger));
    with_native([&](auto bytes) {
      for (int64_t b = begin; b < end; ++b) {
        Cached::template vjp<T, decltype(bytes)::value>(arguments, b, static_cast<int>(m), static_cast<int>(n),
                                                        scratch);
      }
    });
  });
}

}  // namespace manualgrad
