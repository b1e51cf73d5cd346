// Batches of small matrices, from memory into lanes and back; the contract is in transpose.h.
#include "transpose.h"

#include <tuple>

#include "groups.h"

namespace manualgrad {

template <class T>
using Quad = Blocks<T, 16>;

// --- lines of matrices ----------------------------------------------------------------------------------------------

// The code below moves memory and does no arithmetic: it is compiled once, not for every instruction set.

// Real e of a line goes to places[e] among the lanes.

// Loads a line of `length` reals from each of `count` > 0 matrices, which are `stride` apart. Lanes without a matrix
// repeat others. If the size of a line is not a multiple of 16 bytes, its last block overlaps the one before.
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
      // Prefetches the next group if lines are long: such jumps defeat the prefetcher. Invalid addresses do no harm.
      if (length >= 2 * kCacheLine && e % kCacheLine == 0) {
        for (int i = 0; i < kQuad; ++i) __builtin_prefetch(matrix[i] + start + ahead);
      }
      transpose_blocks(block);
      for (int i = 0; i < kQuad; ++i) block[i].store(to + places[start + i] * Count + w);
    }
  }
}

// Stores a line. If lines are permuted in each matrix, lines[w] is the number of the line in matrix w, and lines are
// `apart` apart; otherwise `lines` is null.
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
      transpose_blocks(block);
      for (int i = 0; i < kQuad; ++i) {
        if (w + i < count) block[i].store(matrix[w + i] + start);
      }
    }
  }
}

// --- matrices -------------------------------------------------------------------------------------------------------

// How a matrix is cut into lines that are contiguous in memory.
template <class S>
class Lines {
 public:
  static constexpr int kReals = LanesOf<S, 16>::kReals;

  // In the lanes, rows are `pitch` apart. Returns false if neither rows nor columns are contiguous in memory.
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

// Loads matrices [first, first + count) into lanes, row-major, rows `pitch` apart.
template <class S, class N>
MANUALGRAD_NOT_INLINED void gather(const MatrixBatch<const S>& from, int64_t first, int64_t count, int rows,
                                   int columns, N* to, int pitch, Part part) {
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
// Stores row r of matrix w to row places[r * kCount + w], if there are places.
template <class N, class S>
MANUALGRAD_NOT_INLINED void scatter(const N* from, int64_t first, int64_t count, int rows, int columns,
                                    const MatrixBatch<S>& to, const int* places) {
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

// --- instantiations --------------------------------------------------------------------------------------------------

template <class S, int... Bytes>
constexpr auto instances() {
  return std::tuple((void (*)(const MatrixBatch<const S>&, int64_t, int64_t, int, int,
                              typename LanesOf<S, Bytes>::type*, int, Part))gather...,
                    (void (*)(const typename LanesOf<S, Bytes>::type*, int64_t, int64_t, int, int,
                              const MatrixBatch<S>&, const int*))scatter...);
}

[[gnu::used]] const auto kInstances =
    std::tuple(instances<float, 16, 32, 64>(), instances<double, 16, 32, 64>(), instances<Complex<float>, 16, 32, 64>(),
               instances<Complex<double>, 16, 32, 64>());

}  // namespace manualgrad
