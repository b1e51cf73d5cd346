// Loaders move a matrix between memory and the scratch of the thread group that works on it.
#pragma once

#include <limits>

#include "../math/matrix.h"
#include "../math/thread_group.h"

namespace manualgrad {

// The order of m rows after the row interchanges of LAPACK's pivots: row i of L U is row order[i] of the matrix.
// Pivots out of range, which no factorization returns, are ignored.
HOST_DEVICE void order_of_pivots(const MatrixBatch<const int32_t>& pivots, int64_t place, int m, int k, int* order,
                                 int step) {
  for (int i = 0; i < m; ++i) order[i * step] = i;
  for (int i = 0; i < k; ++i) {
    const int with = pivots.at(place, 0, i) - 1;
    if (with < 0 || with >= m) continue;
    const int kept = order[i * step];
    order[i * step] = order[with * step];
    order[with * step] = kept;
  }
}

// x[at] of `count` numbers `step` apart, and x[at] := value: without an index that is known only at run time, so that
// the numbers can stay in registers.
template <class T>
HOST_DEVICE T entry(const T* x, int step, int count, int at) {
  T found = x[0];
  for (int i = 1; i < count; ++i) found = select(i == at, x[i * step], found);
  return found;
}
template <class T>
HOST_DEVICE void set_entry(T* x, int count, int at, const T& value) {
  for (int i = 0; i < count; ++i) x[i] = select(i == at, value, x[i]);
}

// The same as order_of_pivots(), in registers. Without pivots the order stays.
HOST_DEVICE void order_in_registers(const MatrixBatch<const int32_t>& pivots, int64_t place, int m, int k, int* order) {
  for (int i = 0; i < m; ++i) order[i] = i;
  for (int i = 0; i < k; ++i) {
    const int with = pivots.data == nullptr ? i : pivots.at(place, 0, i) - 1;
    if (with < 0 || with >= m) continue;
    const int kept = order[i];
    order[i] = entry(order, 1, m, with);
    set_entry(order, m, with, kept);
  }
}

HOST_DEVICE int parity_of_pivots(const MatrixBatch<const int32_t>& pivots, int64_t place, int k) {
  int sign = 1;
  for (int i = 0; i < k; ++i) sign = pivots.at(place, 0, i) == i + 1 ? sign : -sign;
  return sign;
}

// The most rows of a matrix: `settle_order` keeps a set of rows in the bits of an integer.
constexpr int kMostRows = 32;

// Whether the order has every one of m rows; if not, it becomes the identity.
HOST_DEVICE bool settle_order(int* order, int step, int m) {
  uint64_t seen = 0;
  for (int i = 0; i < m; ++i) seen |= uint64_t{1} << order[i * step];
  if (seen == (uint64_t{1} << m) - 1) return true;
  for (int i = 0; i < m; ++i) order[i * step] = i;
  return false;
}

// Where column c of a permutation matrix has its one, from the sum of r P[r, c] over its rows.
template <class T>
HOST_DEVICE int row_of_one(T sum, int m) {
  return sum >= 0 && sum < m ? static_cast<int>(sum) : 0;
}

template <class S>
HOST_DEVICE S not_a_number() {
  return from_real<S>(std::numeric_limits<RealOf<S>>::quiet_NaN());
}

// Loads one matrix. Padded: the rows of a matrix in scratch are an odd number of entries apart, so that the entries of
// a column are in different banks of shared memory.
template <class Threads, bool Padded = false>
struct MatrixLoader {
  Threads threads;
  int64_t place;
  bool writes = true;  // else the group only takes part in the barriers

  // Whether the compiler knows all sizes.
  static constexpr bool kInRegisters = std::is_same_v<Threads, InlinedThread>;

  // The distance between rows of this many entries.
  HOST_DEVICE static constexpr int pitch(int columns) { return Padded ? columns | 1 : columns; }

  // f(i, j) for each entry of a matrix. `by_columns`: neighbouring threads take neighbours in a column, which
  // column-major matrices have side by side.
  template <class F>
  HOST_DEVICE void for_entries(int rows, int columns, const F& f, bool by_columns = false) const {
    if constexpr (kIsOneThread<Threads>) {  // without divisions
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) f(i, j);
      }
    } else if (by_columns) {
      for (int k = threads.rank(); k < rows * columns; k += threads.size()) f(k % rows, k / rows);
    } else {
      for (int k = threads.rank(); k < rows * columns; k += threads.size()) f(k / columns, k % columns);
    }
  }
  template <class S>
  HOST_DEVICE static bool by_columns(const MatrixBatch<S>& matrices) {
    return matrices.row_stride < matrices.column_stride;
  }

  // Whether reading this many numbers as a whole is faster than reading a part of them.
  template <class S>
  HOST_DEVICE static constexpr bool whole(int) {
    return false;
  }
  template <class S>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, S* to, int pitch,
                        Part part = Part::kAll) const {
    for_entries(
        rows, columns,
        [&](int i, int j) {
          if (belongs(part, i, j)) to[i * pitch + j] = from.at(place, i, j);
        },
        by_columns(from));
    threads.sync();
  }
  template <class S>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, S* to) const {
    read(from, rows, columns, to, pitch(columns));
  }
  // Stores row i to row order[i], if there is an order.
  template <class S>
  HOST_DEVICE void write(const S* from, int rows, int columns, const MatrixBatch<S>& to,
                         const int* order = nullptr) const {
    if (!writes) return;
    for_entries(
        rows, columns,
        [&](int i, int j) { to.at(place, order == nullptr ? i : order[i], j) = from[i * pitch(columns) + j]; },
        by_columns(to));
  }

  // See order_of_pivots(). Null without pivots, except in registers, where a pointer must be known to be one.
  template <class N>
  HOST_DEVICE const int* order(const MatrixBatch<const int32_t>& pivots, int m, int k, int* found, const N*) const {
    if constexpr (kInRegisters) {
      order_in_registers(pivots, place, m, k, found);
      return found;
    }
    if (pivots.data == nullptr) return nullptr;
    if (threads.rank() == 0) order_of_pivots(pivots, place, m, k, found, 1);
    threads.sync();
    return found;
  }
  // The order of a permutation matrix, which must be present. If it is not a permutation, the numbers at `nan_target`
  // become nan.
  template <class S>
  HOST_DEVICE const int* order(const MatrixBatch<const S>& P, int m, S*, int* found, S* nan_target, int numbers) const {
    for (int c = threads.rank(); c < m; c += threads.size()) {
      RealOf<S> sum{};
      for (int r = 1; r < m; ++r) sum += real_part(P.at(place, r, c)) * static_cast<RealOf<S>>(r);
      found[c] = row_of_one(sum, m);
    }
    threads.sync();
    if (threads.rank() == 0 && !settle_order(found, 1, m)) {
      for (int e = 0; e < numbers; ++e) nan_target[e] = not_a_number<S>();
    }
    threads.sync();
    return found;
  }
  // The sign of the order.
  template <class N>
  HOST_DEVICE RealOf<N> parity(const MatrixBatch<const int32_t>& pivots, int k, const N*) const {
    return static_cast<RealOf<N>>(parity_of_pivots(pivots, place, k));
  }
  // Row i := row order[i].
  template <class N>
  HOST_DEVICE void reorder(const N* from, int rows, int columns, const int* order, N* to) const {
    for_entries(rows, columns, [&](int i, int j) {
      const int row = order == nullptr ? i : order[i];
      if constexpr (kInRegisters) {
        to[i * columns + j] = entry(from + j, columns, rows, row);
      } else {
        to[i * pitch(columns) + j] = from[row * pitch(columns) + j];
      }
    });
    threads.sync();
  }
  // Row i is row order[i] of the identity.
  template <class N>
  HOST_DEVICE void permutation(int n, const int* order, N* to) const {
    for_entries(n, n, [&](int i, int j) { to[i * pitch(n) + j] = from_real<N>(RealOf<N>(order[i] == j ? 1 : 0)); });
    threads.sync();
  }
};

template <class N, class Threads>
HOST_DEVICE void conjugate_all(const Threads& threads, N* numbers, int count) {
  if constexpr (NumberTraits<N>::kComplex) {
    for (int i = threads.rank(); i < count; i += threads.size()) numbers[i] = conjugate(numbers[i]);
    threads.sync();
  }
}

// Reads the upper triangle; reading a small matrix as a whole is faster.
template <class Loader, class S, class N>
HOST_DEVICE void read_upper(const Loader& loader, const MatrixBatch<const S>& from, int n, N* to) {
  loader.read(from, n, n, to, loader.pitch(n), loader.template whole<S>(n * n) ? Part::kAll : Part::kUpper);
}

}  // namespace manualgrad
