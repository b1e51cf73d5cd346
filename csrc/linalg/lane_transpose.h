// Batches of small matrices, from memory into lanes and back. Host code.
//
// Lanes want the same entry of many matrices side by side, memory has the entries of one matrix side by side: this is a
// transposition, done in blocks of 16 bytes, which every instruction set can shuffle.
#pragma once

#include <cstring>

#include "lane_groups.h"

namespace manualgrad {

// --- 16 bytes -------------------------------------------------------------------------------------------------------

template <class T>
struct Quad {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  typedef T values __attribute__((vector_size(16)));
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> places __attribute__((vector_size(16)));
  values v;

  HOST_DEVICE static Quad load(const T* from) {
    Quad quad;
    std::memcpy(&quad.v, from, sizeof(quad.v));
    return quad;
  }
  HOST_DEVICE void store(T* to) const { std::memcpy(to, &v, sizeof(v)); }
  template <int... Places>
  HOST_DEVICE static Quad shuffle(const Quad& a, const Quad& b) {
#if defined(__clang__)
    return {__builtin_shufflevector(a.v, b.v, Places...)};
#else
    return {__builtin_shuffle(a.v, b.v, places{Places...})};
#endif
  }
};

HOST_DEVICE void transpose(Quad<float> (&q)[4]) {
  using Q = Quad<float>;
  const Q a = Q::shuffle<0, 4, 1, 5>(q[0], q[1]), b = Q::shuffle<2, 6, 3, 7>(q[0], q[1]);
  const Q c = Q::shuffle<0, 4, 1, 5>(q[2], q[3]), d = Q::shuffle<2, 6, 3, 7>(q[2], q[3]);
  q[0] = Q::shuffle<0, 1, 4, 5>(a, c);
  q[1] = Q::shuffle<2, 3, 6, 7>(a, c);
  q[2] = Q::shuffle<0, 1, 4, 5>(b, d);
  q[3] = Q::shuffle<2, 3, 6, 7>(b, d);
}
HOST_DEVICE void transpose(Quad<double> (&q)[2]) {
  using Q = Quad<double>;
  const Q a = q[0];
  q[0] = Q::shuffle<0, 2>(a, q[1]);
  q[1] = Q::shuffle<1, 3>(a, q[1]);
}

// --- lines of matrices ----------------------------------------------------------------------------------------------

// What follows moves memory and does no arithmetic: it is compiled once, not for every instruction set.

// Where the entries of a line, counted in reals, go among the lanes: real e to places[e].
constexpr int kLineReals = 128;

// A line of `length` reals of each matrix, the matrices `stride` apart; there are `count` > 0 of them. Lanes without a
// matrix repeat others. Where a line is no multiple of 16 bytes, its last block overlaps the one before.
template <int Count, class T>
MANUALGRAD_NOT_INLINED void gather_line(const T* from, int64_t stride, int64_t count, int length, T* to,
                                        const int* places) {
  constexpr int kQuad = Quad<T>::kCount, kCacheLine = 64 / static_cast<int>(sizeof(T));
  if (length < kQuad) {
    for (int e = 0; e < length; ++e) {
      T* lanes = to + places[e] * Count;
      for (int w = 0; w < Count; ++w) lanes[w] = from[(w < count ? w : count - 1) * stride + e];
    }
    return;
  }
  const int64_t ahead = Count * stride;
  for (int w = 0; w < Count; w += kQuad) {
    const T* matrix[kQuad];
    for (int i = 0; i < kQuad; ++i) matrix[i] = from + (w + i < count ? w + i : count - 1) * stride;
    for (int e = 0; e < length; e += kQuad) {
      const int start = e + kQuad <= length ? e : length - kQuad;
      Quad<T> block[kQuad];
      for (int i = 0; i < kQuad; ++i) block[i] = Quad<T>::load(matrix[i] + start);
      // The next group's, where lines are long: processors do not guess such jumps. An address that is none is no harm.
      if (length >= 2 * kCacheLine && e % kCacheLine == 0) {
        for (int i = 0; i < kQuad; ++i) __builtin_prefetch(matrix[i] + start + ahead);
      }
      transpose(block);
      for (int i = 0; i < kQuad; ++i) block[i].store(to + places[start + i] * Count + w);
    }
  }
}

// The other way. Where lines change places in each matrix, lines[w] says which one it is in matrix w, and `apart` how
// far lines are apart; else there are no lines.
template <int Count, class T>
MANUALGRAD_NOT_INLINED void scatter_line(const T* from, int64_t stride, int64_t count, int length, T* to,
                                         const int* places, const int* lines = nullptr, int64_t apart = 0) {
  constexpr int kQuad = Quad<T>::kCount;
  T* matrix[Count];
  for (int w = 0; w < count; ++w) matrix[w] = to + w * stride + (lines != nullptr ? lines[w] * apart : 0);
  if (length < kQuad) {
    for (int e = 0; e < length; ++e) {
      for (int w = 0; w < count; ++w) matrix[w][e] = from[places[e] * Count + w];
    }
    return;
  }
  for (int w = 0; w < count; w += kQuad) {
    for (int e = 0; e < length; e += kQuad) {
      const int start = e + kQuad <= length ? e : length - kQuad;
      Quad<T> block[kQuad];
      for (int i = 0; i < kQuad; ++i) block[i] = Quad<T>::load(from + places[start + i] * Count + w);
      transpose(block);
      for (int i = 0; i < kQuad; ++i) {
        if (w + i < count) block[i].store(matrix[w + i] + start);
      }
    }
  }
}

// --- matrices -------------------------------------------------------------------------------------------------------

// How a matrix is cut into lines of neighbours in memory.
template <class S>
class Lines {
 public:
  static constexpr int kReals = LanesOf<S, 16>::kReals;

  // In the lanes, rows are `pitch` apart. False where neither rows nor columns are neighbours in memory.
  bool cut(const MatrixBatch<S>& matrix, int rows, int columns, int pitch, Part part) {
    part_ = part;
    row_major_ = matrix.column_stride == 1;
    if (!row_major_ && matrix.row_stride != 1) return false;
    const int length = row_major_ ? columns : rows, count = row_major_ ? rows : columns;
    const int64_t apart = row_major_ ? matrix.row_stride : matrix.column_stride;
    const int along = row_major_ ? 1 : pitch, across = row_major_ ? pitch : 1;
    // A small matrix without gaps is one line.
    const bool whole = part == Part::kAll && apart == length && length * count * kReals <= kLineReals;
    if (length * kReals > kLineReals) return false;
    lines_ = whole ? 1 : count;
    length_ = whole ? length * count : length;
    apart_ = apart;
    across_ = across;
    for (int line = 0, e = 0; line < (whole ? count : 1); ++line) {
      for (int i = 0; i < length; ++i) {
        for (int r = 0; r < kReals; ++r) places_[e++] = (line * across + i * along) * kReals + r;
      }
    }
    return true;
  }

  int count() const { return lines_; }
  int first(int line) const { return part_ == Part::kAll || before(line) ? 0 : row_major_ ? line : line + 1; }
  int last(int line) const {
    if (part_ == Part::kAll || !before(line)) return length_;
    const int end = row_major_ ? line : line + 1;
    return end < length_ ? end : length_;
  }
  // In reals: where a line starts in memory and among the lanes, and the places of its entries.
  int64_t offset(int line) const { return (line * apart_ + first(line)) * kReals; }
  int place(int line) const { return line * across_ * kReals; }
  const int* places(int line) const { return places_ + first(line) * kReals; }
  int length(int line) const { return (last(line) - first(line)) * kReals; }

 private:
  // Whether the part of a line ends at the diagonal; else it starts there.
  bool before(int) const { return (part_ == Part::kLower) == row_major_; }

  Part part_;
  bool row_major_;
  int lines_, length_, across_;
  int64_t apart_;
  int places_[kLineReals];
};

// Whether kernels run in such lanes at all, or only products of single matrices.
template <class N>
constexpr bool kHasGroups = sizeof(RealOf<N>) > 16 || kBaselineHasLanes;

// Matrices [first, first + count) into lanes, row-major, rows `pitch` apart.
template <class S, class N>
MANUALGRAD_NOT_INLINED void gather(const MatrixBatch<const S>& from, int64_t first, int64_t count, int rows,
                                   int columns, N* to, int pitch, Part part = Part::kAll) {
  using T = BaseOf<N>;
  constexpr int kReals = LanesOf<S, 16>::kReals, kCount = kLanesIn<N>;
  if constexpr (kReals == 1 && kHasGroups<N>) {
    if (count == kCount && part == Part::kAll && pitch == columns && gather_group(from, first, rows, columns, to))
      return;
  }
  Lines<const S> lines;
  if (lines.cut(from, rows, columns, pitch, part)) {
    const int64_t stride = from.batch_stride * kReals;
    const T* source = reinterpret_cast<const T*>(from.data) + first * stride;
    T* target = reinterpret_cast<T*>(to);
    for (int line = 0; line < lines.count(); ++line) {
      const int length = lines.length(line);
      if (length <= 0) continue;
      gather_line<kCount>(source + lines.offset(line), stride, count, length, target + lines.place(line) * kCount,
                          lines.places(line));
    }
    return;
  }
  for (int w = 0; w < kCount; ++w) {
    const int64_t b = first + (w < count ? w : count - 1);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        if (belongs(part, i, j)) set_lane(to[i * pitch + j], w, from.at(b, i, j));
      }
    }
  }
}
template <class S, class N>
void gather(const MatrixBatch<const S>& from, int64_t first, int64_t count, int rows, int columns, N* to) {
  gather(from, first, count, rows, columns, to, columns);
}

// Row r of matrix w to row places[r * kCount + w], if there are places.
template <class N, class S>
MANUALGRAD_NOT_INLINED void scatter(const N* from, int64_t first, int64_t count, int rows, int columns,
                                    const MatrixBatch<S>& to, const int* places = nullptr) {
  using T = BaseOf<N>;
  constexpr int kReals = LanesOf<S, 16>::kReals, kCount = kLanesIn<N>;
  if constexpr (kReals == 1 && kHasGroups<N>) {
    if (count == kCount && scatter_group(from, first, rows, columns, to, places)) return;
  }
  const T* source = reinterpret_cast<const T*>(from);
  const int64_t stride = to.batch_stride * kReals;
  T* target = reinterpret_cast<T*>(to.data) + first * stride;
  Lines<S> lines;
  if (places != nullptr && to.column_stride == 1 && columns * kReals <= kLineReals) {
    lines.cut({to.data, 0, columns + 1, 1}, 1, columns, columns, Part::kAll);
    for (int i = 0; i < rows; ++i) {
      scatter_line<kCount>(source + int64_t{i} * columns * kReals * kCount, stride, count, columns * kReals, target,
                           lines.places(0), places + i * kCount, to.row_stride * kReals);
    }
  } else if (places == nullptr && lines.cut(to, rows, columns, columns, Part::kAll)) {
    for (int line = 0; line < lines.count(); ++line) {
      scatter_line<kCount>(source + lines.place(line) * kCount, stride, count, lines.length(line),
                           target + lines.offset(line), lines.places(line));
    }
  } else {
    for (int w = 0; w < count; ++w) {
      for (int i = 0; i < rows; ++i) {
        const int row = places != nullptr ? places[i * kCount + w] : i;
        for (int j = 0; j < columns; ++j) to.at(first + w, row, j) = get_lane(from[i * columns + j], w);
      }
    }
  }
}

// They are compiled once, in lane_transpose.cpp.
#define MANUALGRAD_LANE_TRANSPOSE(prefix, S, Bytes)                                                                   \
  prefix template void gather(const MatrixBatch<const S>&, int64_t, int64_t, int, int, LanesOf<S, Bytes>::type*, int, \
                              Part);                                                                                  \
  prefix template void scatter(const LanesOf<S, Bytes>::type*, int64_t, int64_t, int, int, const MatrixBatch<S>&,     \
                               const int*);
#define MANUALGRAD_LANE_TRANSPOSES(prefix, Bytes)          \
  MANUALGRAD_LANE_TRANSPOSE(prefix, float, Bytes)          \
  MANUALGRAD_LANE_TRANSPOSE(prefix, double, Bytes)         \
  MANUALGRAD_LANE_TRANSPOSE(prefix, Complex<float>, Bytes) \
  MANUALGRAD_LANE_TRANSPOSE(prefix, Complex<double>, Bytes)
MANUALGRAD_LANE_TRANSPOSES(extern, 16)
MANUALGRAD_LANE_TRANSPOSES(extern, 32)
MANUALGRAD_LANE_TRANSPOSES(extern, 64)

}  // namespace manualgrad
