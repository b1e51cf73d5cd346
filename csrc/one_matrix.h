// One matrix of a batch, viewed, or moved between memory and what its team works on.
#pragma once

#include <limits>

#include "math/team.h"
#include "matrices.h"

namespace manualgrad {

// A matrix in memory, conjugated on the way if it says so.
template <class S>
struct View {
  const S* data;
  int64_t row, column;
  bool conjugated = false;

  HOST_DEVICE const S& raw(int64_t i, int64_t j) const { return data[i * row + j * column]; }
  HOST_DEVICE S at(int64_t i, int64_t j) const { return conjugated ? conjugate(raw(i, j)) : raw(i, j); }
  HOST_DEVICE View adjoint() const { return {data, column, row, !conjugated}; }
};
template <class S>
HOST_DEVICE View<S> view(const MatrixBatch<const S>& batch, int64_t b) {
  return {batch.data == nullptr ? nullptr : batch.data + b * batch.batch_stride, batch.row_stride, batch.column_stride};
}

// The order that the row interchanges of LAPACK's pivots make of m rows: row i of L U is row order[i] of the matrix.
// Pivots out of range, which no factorisation gives, are passed over.
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

HOST_DEVICE int parity_of_pivots(const MatrixBatch<const int32_t>& pivots, int64_t place, int k) {
  int sign = 1;
  for (int i = 0; i < k; ++i) sign = pivots.at(place, 0, i) == i + 1 ? sign : -sign;
  return sign;
}

// The largest side for which a set of rows fits an integer.
constexpr int kLargestOrder = 32;

// Whether it has every one of m rows; if not, it is made to be the order as it stands.
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

template <class Team>
struct OneMatrix {
  Team team;
  int64_t place;

  // f(i, j) for each entry of a matrix.
  template <class F>
  HOST_DEVICE void for_entries(int rows, int columns, const F& f) const {
    if constexpr (std::is_same_v<Team, Alone>) {  // without divisions
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) f(i, j);
      }
    } else {
      for (int k = team.rank(); k < rows * columns; k += team.size()) f(k / columns, k % columns);
    }
  }

  // Whether so many numbers are read faster than a part of them.
  template <class S>
  HOST_DEVICE static constexpr bool whole(int) {
    return false;
  }
  template <class S>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, S* to, int pitch,
                        Part part = Part::kAll) const {
    for_entries(rows, columns, [&](int i, int j) {
      if (belongs(part, i, j)) to[i * pitch + j] = from.at(place, i, j);
    });
    team.sync();
  }
  template <class S>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, S* to) const {
    read(from, rows, columns, to, columns);
  }
  // Row i to row order[i], if there is an order.
  template <class S>
  HOST_DEVICE void write(const S* from, int rows, int columns, const MatrixBatch<S>& to,
                         const int* order = nullptr) const {
    for_entries(rows, columns,
                [&](int i, int j) { to.at(place, order == nullptr ? i : order[i], j) = from[i * columns + j]; });
  }

  // See order_of_pivots(); null without pivots.
  template <class N>
  HOST_DEVICE const int* order(const MatrixBatch<const int32_t>& pivots, int m, int k, int* found, const N*) const {
    if (pivots.data == nullptr) return nullptr;
    if (team.rank() == 0) order_of_pivots(pivots, place, m, k, found, 1);
    team.sync();
    return found;
  }
  // The same of a permutation matrix. If it is none, the numbers at `spoilt` become nan.
  template <class S>
  HOST_DEVICE const int* order(const MatrixBatch<const S>& P, int m, S*, int* found, S* spoilt, int numbers) const {
    if (P.data == nullptr) return nullptr;
    for (int c = team.rank(); c < m; c += team.size()) {
      RealOf<S> sum{};
      for (int r = 1; r < m; ++r) sum += real_part(P.at(place, r, c)) * static_cast<RealOf<S>>(r);
      found[c] = row_of_one(sum, m);
    }
    team.sync();
    if (team.rank() == 0 && !settle_order(found, 1, m)) {
      for (int e = 0; e < numbers; ++e) spoilt[e] = not_a_number<S>();
    }
    team.sync();
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
    for (int k = team.rank(); k < rows * columns; k += team.size()) {
      to[k] = from[order == nullptr ? k : order[k / columns] * columns + k % columns];
    }
    team.sync();
  }
  // Row i is row order[i] of the identity.
  template <class N>
  HOST_DEVICE void permutation(int n, const int* order, N* to) const {
    for (int k = team.rank(); k < n * n; k += team.size()) {
      to[k] = from_real<N>(RealOf<N>(order[k / n] == k % n ? 1 : 0));
    }
    team.sync();
  }
};

template <class N, class Team>
HOST_DEVICE void conjugate_all(const Team& team, N* numbers, int count) {
  if constexpr (NumberTraits<N>::kComplex) {
    for (int i = team.rank(); i < count; i += team.size()) numbers[i] = conjugate(numbers[i]);
    team.sync();
  }
}

}  // namespace manualgrad
