// Moves as many small matrices as there are lanes from memory into lanes and back, in the widest vectors. Host code.
//
// For full groups of matrices without gaps, of the smallest orders: the compiler then knows the place of each entry.
// transpose.h loads and stores all others.
#pragma once

#include "../../base/simd.h"
#include "blocks.h"

namespace manualgrad {

#if defined(MANUALGRAD_LANE_GROUPS)
// Where entry (i, j) of a matrix goes: i * across + j * along, in numbers.
struct LanePlaces {
  int across, along;
};

// Matrices of Rows lines of Columns contiguous entries, without gaps, `stride` apart. If they are copied, there are no
// gaps between the matrices either.
template <class T, int Bytes, int Rows, int Columns>
struct MatrixGroup {
  using Q = Blocks<T, Bytes>;
  using N = Lanes<T, Bytes>;
  static constexpr int kLength = Rows * Columns, kCount = Q::kCount, kBlock = Q::kBlock;
  // Reading parts of several matrices in turn defeats the prefetcher: such groups are copied first.
  static constexpr bool kCopied = kLength % kCount == 0 && kLength > kCount;

  HOST_INLINE static int place(int e, const LanePlaces& places) {
    return e / Columns * places.across + e % Columns * places.along;
  }
  // In the order of memory, which the prefetcher needs and compilers would change.
  HOST_INLINE static void copy(const T* from, T* to) {
    for (int i = 0; i < kLength; ++i) {
      Q::load(from + i * kCount).store(to + i * kCount);
      asm volatile("" : : : "memory");
    }
  }
  struct Gather {
    HOST_INLINE static void run(const T* from, int64_t stride, N* to, const LanePlaces& places) {
      if constexpr (kCopied) {
        alignas(64) T near[kLength * kCount];
        copy(from, near);
        gather(near, kLength, to, places);
      } else {
        gather(from, stride, to, places);
      }
    }
    HOST_INLINE static void gather(const T* from, int64_t stride, N* to, const LanePlaces& places) {
      if constexpr (kLength % kCount == 0) {
        for (int e = 0; e < kLength; e += kCount) {
          Q q[kCount];
          for (int w = 0; w < kCount; ++w) q[w] = Q::load(from + w * stride + e);
          transpose_halves<kCount / 2>(q);
          for (int i = 0; i < kCount; ++i) to[place(e + i, places)].v = q[i].v;
        }
      } else if constexpr (kLength < kBlock) {
        if (stride == kLength) return neighbours(from, to, places);
        for (int e = 0; e < kLength; ++e) {
          typename N::values entries;
          for (int w = 0; w < kCount; ++w) entries[w] = from[w * stride + e];
          to[place(e, places)].v = entries;
        }
      } else {
        for (int e = 0; e < kLength; e += kBlock) {  // the last block may overlap the one before
          const int start = e + kBlock <= kLength ? e : kLength - kBlock;
          Q q[kBlock];
          for (int i = 0; i < kBlock; ++i) q[i] = Q::collect(from + i * stride + start, kBlock * stride);
          transpose_blocks(q);
          for (int i = e - start; i < kBlock; ++i) to[place(start + i, places)].v = q[i].v;
        }
      }
    }
    // Without gaps between the matrices either.
    HOST_INLINE static void neighbours(const T* from, N* to, const LanePlaces& places) {
      Q q[3];
      for (int e = 0; e < kLength; ++e) q[e] = Q::load(from + e * kCount);
      if constexpr (kLength == 1) {
        to[0].v = q[0].v;
      } else if constexpr (kLength == 2) {
        to[0].v = Q::template every<2, 0>(q[0], q[1]).v;
        to[place(1, places)].v = Q::template every<2, 1>(q[0], q[1]).v;
      } else {
        to[0].v = Q::template every<3, 0>(q[0], q[1], q[2]).v;
        to[place(1, places)].v = Q::template every<3, 1>(q[0], q[1], q[2]).v;
        to[place(2, places)].v = Q::template every<3, 2>(q[0], q[1], q[2]).v;
      }
    }
  };
  // Stores row r of matrix w to row order[r * kCount + w], if there is an order.
  struct Scatter {
    HOST_INLINE static void run(const N* from, const int* order, T* to, int64_t stride, const LanePlaces& places) {
      N entries[kLength];
      if (order == nullptr) {
        for (int e = 0; e < kLength; ++e) entries[e] = from[place(e, places)];
      } else {
        reorder(from, order, entries);
      }
      if constexpr (kCopied) {
        alignas(64) T near[kLength * kCount];
        scatter(entries, near, kLength);
        copy(near, to);
      } else {
        scatter(entries, to, stride);
      }
    }
    HOST_INLINE static void scatter(const N* entries, T* to, int64_t stride) {
      if constexpr (kLength % kCount == 0) {
        for (int e = 0; e < kLength; e += kCount) {
          Q q[kCount];
          for (int i = 0; i < kCount; ++i) q[i].v = entries[e + i].v;
          transpose_halves<kCount / 2>(q);
          for (int w = 0; w < kCount; ++w) q[w].store(to + w * stride + e);
        }
      } else if constexpr (kLength < kBlock) {
        for (int e = 0; e < kLength; ++e) {
          for (int w = 0; w < kCount; ++w) to[w * stride + e] = entries[e].v[w];
        }
      } else {
        for (int e = 0; e < kLength; e += kBlock) {
          const int start = e + kBlock <= kLength ? e : kLength - kBlock;
          Q q[kBlock];
          for (int i = 0; i < kBlock; ++i) q[i].v = entries[start + i].v;
          transpose_blocks(q);
          for (int i = 0; i < kBlock; ++i) q[i].distribute(to + i * stride + start, kBlock * stride);
        }
      }
    }
    HOST_INLINE static void reorder(const N* from, const int* order, N* to) {
      N row{};  // a counter: if GCC finds a constant late, it fills the vector lane by lane
      for (int r = 0; r < Rows; ++r, row += real_number<N>(1)) {
        for (int j = 0; j < Columns; ++j) to[r * Columns + j] = from[j];
        for (int i = 1; i < Rows; ++i) {
          const auto here = from_integers<N>(order + i * kCount) == row;
          for (int j = 0; j < Columns; ++j) {
            to[r * Columns + j] = select(here, from[i * Columns + j], to[r * Columns + j]);
          }
        }
      }
    }
  };
};

// Whether the matrix is without gaps; if so, the places of its entries in lanes whose rows have no gaps either.
template <class S>
HOST_INLINE bool without_gaps(const MatrixBatch<S>& matrix, int rows, int columns, LanePlaces& places) {
  if (rows * columns == 1 || (matrix.column_stride == 1 && matrix.row_stride == columns)) {
    places = {columns, 1};
    return true;
  }
  places = {1, columns};
  return rows == columns && matrix.row_stride == 1 && matrix.column_stride == rows;
}

// Calls body.run<MatrixGroup>() for matrices of this shape; returns false if it is not one of the smallest.
template <class T, int Bytes, class Body>
HOST_INLINE bool with_group(int rows, int columns, const Body& body) {
  if (columns == 1 && rows == 1) return body(MatrixGroup<T, Bytes, 1, 1>{});
  if (columns == 1 && rows == 2) return body(MatrixGroup<T, Bytes, 2, 1>{});
  if (columns == 1 && rows == 3) return body(MatrixGroup<T, Bytes, 3, 1>{});
  if (columns == 1 && rows == 4) return body(MatrixGroup<T, Bytes, 4, 1>{});
  if (columns == 2 && rows == 2) return body(MatrixGroup<T, Bytes, 2, 2>{});
  if (columns == 3 && rows == 3) return body(MatrixGroup<T, Bytes, 3, 3>{});
  if (columns == 4 && rows == 4) return body(MatrixGroup<T, Bytes, 4, 4>{});
  return false;
}

template <class T, int Bytes>
HOST_INLINE bool gather_group(const MatrixBatch<const T>& from, int64_t first, int rows, int columns,
                              Lanes<T, Bytes>* to) {
  LanePlaces places;
  if (!without_gaps(from, rows, columns, places)) return false;
  return with_group<T, Bytes>(rows, columns, [&](auto group) MANUALGRAD_INLINED {
    using Group = decltype(group);
    using Gather = typename Group::Gather;
    if (Group::kCopied && from.batch_stride != Group::kLength) return false;
    run_native<Bytes, Gather>(from.data + first * from.batch_stride, from.batch_stride, to, places);
    return true;
  });
}
template <class T, int Bytes>
HOST_INLINE bool scatter_group(const Lanes<T, Bytes>* from, int64_t first, int rows, int columns,
                               const MatrixBatch<T>& to, const int* order) {
  LanePlaces places;
  if (!without_gaps(to, rows, columns, places) || (order != nullptr && places.along != 1)) return false;
  return with_group<T, Bytes>(rows, columns, [&](auto group) MANUALGRAD_INLINED {
    using Group = decltype(group);
    using Scatter = typename Group::Scatter;
    if (Group::kCopied && to.batch_stride != Group::kLength) return false;
    run_native<Bytes, Scatter>(from, order, to.data + first * to.batch_stride, to.batch_stride, places);
    return true;
  });
}

// order_of_pivots() of a group of matrices with M rows.
template <int Count, int M>
struct OrderGroup {
  using I = Lanes<int32_t, Count * 4>;

  HOST_INLINE static void run(const int32_t* pivots, int64_t stride, int* found) {
    I with[M], order[M];
    MatrixGroup<int32_t, Count * 4, 1, M>::Gather::run(pivots, stride, with, {M, 1});
    order[0] = I{};
    for (int r = 1; r < M; ++r) order[r] = order[r - 1] + real_number<I>(1);
    interchange<0>(with, order);
    for (int r = 0; r < M; ++r) std::memcpy(found + r * Count, &order[r].v, Count * 4);
  }
  template <int J>
  HOST_INLINE static void interchange(const I* with, I* order) {
    const I kept = order[J];
    I row{};
    for (int r = 0; r < M; ++r) {
      row += real_number<I>(1);  // LAPACK counts from one
      if (r == J) continue;
      const auto here = with[J] == row;
      order[J] = select(here, order[r], order[J]);
      order[r] = select(here, kept, order[r]);
    }
    if constexpr (J + 1 < M) interchange<J + 1>(with, order);
  }
};

template <class N>
MANUALGRAD_NOT_INLINED bool order_group(const MatrixBatch<const int32_t>& pivots, int64_t first, int m, int* found) {
  if (pivots.column_stride != 1 || pivots.batch_stride != m) return false;
  const auto run = [&](auto order) MANUALGRAD_INLINED {
    using Order = OrderGroup<kLanesIn<N>, decltype(order)::value>;
    run_native<kVectorBytes<N>, Order>(pivots.data + first * pivots.batch_stride, pivots.batch_stride, found);
    return true;
  };
  if (m == 2) return run(std::integral_constant<int, 2>{});
  if (m == 3) return run(std::integral_constant<int, 3>{});
  if (m == 4) return run(std::integral_constant<int, 4>{});
  return false;
}
#else
template <class Matrices, class N>
HOST_INLINE bool gather_group(const Matrices&, int64_t, int, int, N*) {
  return false;
}
template <class N, class Matrices>
HOST_INLINE bool scatter_group(const N*, int64_t, int, int, const Matrices&, const int*) {
  return false;
}
template <class N>
HOST_INLINE bool order_group(const MatrixBatch<const int32_t>&, int64_t, int, int*) {
  return false;
}
#endif

}  // namespace manualgrad
