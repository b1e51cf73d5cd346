// Batches of small matrices worked on in groups, one matrix a lane. Host code.
//
// A family is a batch and what is done with each matrix of it: Scalar, batch, numbers() (how many it works on) and
// run(move, memory), where `move` brings matrices in and out.
#pragma once

#include <algorithm>
#include <memory>

#include "lanes.h"
#include "one_matrix.h"

namespace manualgrad {

// Moves as many matrices as there are lanes; the functions are those of OneMatrix. Entry i of the order of the matrix
// in lane w is order[i * lanes + w].
struct ManyMatrices {
  Alone team;
  int64_t first, count;

  template <class S>
  HOST_DEVICE static constexpr bool whole(int numbers) {
    return numbers * LanesOf<S, 16>::kReals <= kLineReals;
  }
  template <class S, class N>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, N* to, int pitch,
                        Part part = Part::kAll) const {
    gather(from, first, count, rows, columns, to, pitch, part);
  }
  template <class S, class N>
  HOST_DEVICE void read(const MatrixBatch<const S>& from, int rows, int columns, N* to) const {
    gather(from, first, count, rows, columns, to);
  }
  template <class N, class S>
  HOST_DEVICE void write(const N* from, int rows, int columns, const MatrixBatch<S>& to,
                         const int* order = nullptr) const {
    scatter(from, first, count, rows, columns, to, order);
  }
  HOST_DEVICE int64_t place(int lane) const { return first + (lane < count ? lane : count - 1); }
  template <class N>
  HOST_DEVICE const int* order(const MatrixBatch<const int32_t>& pivots, int m, int k, int* found, const N*) const {
    if (pivots.data == nullptr) return nullptr;
    constexpr int kCount = kLanesIn<N>;
    for (int w = 0; w < kCount; ++w) {
      order_of_pivots(pivots, place(w), m, k, found + w, kCount);
    }
    return found;
  }
  template <class S, class N>
  HOST_DEVICE const int* order(const MatrixBatch<const S>& P, int m, N* scratch, int* found, N* spoilt,
                               int numbers) const {
    using R = RealOf<N>;
    using T = BaseOf<N>;
    constexpr int kCount = kLanesIn<N>;
    if (P.data == nullptr) return nullptr;
    read(P, m, m, scratch);
    for (int c = 0; c < m; ++c) {
      R sum{};
      for (int r = 1; r < m; ++r) sum += real_part(scratch[r * m + c]) * real_number<R>(static_cast<T>(r));
      for (int w = 0; w < kCount; ++w) found[c * kCount + w] = row_of_one(get_lane(sum, w), m);
    }
    for (int w = 0; w < kCount; ++w) {
      if (settle_order(found + w, kCount, m)) continue;
      for (int e = 0; e < numbers; ++e) set_lane(spoilt[e], w, not_a_number<ScalarOf<N>>());
    }
    return found;
  }
  template <class N>
  HOST_DEVICE RealOf<N> parity(const MatrixBatch<const int32_t>& pivots, int k, const N*) const {
    using T = BaseOf<N>;
    RealOf<N> sign;
    for (int w = 0; w < kLanesIn<N>; ++w) set_lane(sign, w, static_cast<T>(parity_of_pivots(pivots, place(w), k)));
    return sign;
  }
  template <class N>
  HOST_DEVICE void reorder(const N* from, int rows, int columns, const int* order, N* to) const {
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
  HOST_DEVICE void permutation(int n, const int* order, N* to) const {
    using R = RealOf<N>;
    using T = BaseOf<N>;
    const R one = real_number<R>(1);
    for (int i = 0; i < n; ++i) {
      R row;
      for (int w = 0; w < kLanesIn<N>; ++w) set_lane(row, w, static_cast<T>(order[i * kLanesIn<N> + w]));
      for (int j = 0; j < n; ++j) {
        to[i * n + j] = from_real<N>(select(row == real_number<R>(static_cast<T>(j)), one, R{}));
      }
    }
  }
};

template <class Family, int Bytes>
struct Groups {
  using S = typename Family::Scalar;
  using N = typename LanesOf<S, Bytes>::type;
  static constexpr int64_t kCount = kLanesIn<N>;

  HOST_DEVICE static void run(const Family& family, int64_t begin, int64_t end, N* memory) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * kCount, left = family.batch - first;
      family.run(ManyMatrices{{}, first, left < kCount ? left : kCount}, memory);
    }
  }

  // One at a time, with the same bits: compiled for the baseline only, as GCC 12.2 fuses products of complex scalars
  // with sums, where it can, even if told not to.
  static void run_each(const Family& family, int64_t begin, int64_t end, N* memory) {
    for (int64_t place = begin; place < end; ++place) {
      family.run(OneMatrix<Alone>{{}, place}, reinterpret_cast<S*>(memory));
    }
  }
};

// call(begin, end, memory) for the groups [begin, end), shared among threads; but what is left after the last whole
// group goes one at a time where it is no more than `few`, for which lanes take longer. `work`: that of one matrix.
template <int Bytes, class Family, class Call>
void in_groups(const Family& family, int64_t work, int64_t few, const Call& call) {
  using All = Groups<Family, Bytes>;
  const int64_t groups = (family.batch + All::kCount - 1) / All::kCount, whole = family.batch / All::kCount;
  const bool apart = family.batch - whole * All::kCount <= few;
  parallel_for(groups, std::max<int64_t>(1, kGrain / (work * All::kCount)), [&](int64_t begin, int64_t end) {
    const size_t bytes = static_cast<size_t>(family.numbers()) * sizeof(typename All::N);
    const std::unique_ptr<char[]> buffer(new char[bytes + kLaneBytes]);
    const uintptr_t start = (reinterpret_cast<uintptr_t>(buffer.get()) + kLaneBytes - 1) / kLaneBytes * kLaneBytes;
    typename All::N* memory = reinterpret_cast<typename All::N*>(start);
    const bool has_last = apart && end == groups;
    call(begin, has_last ? std::min(end, whole) : end, memory);
    if (has_last) All::run_each(family, whole * All::kCount, family.batch, memory);
  });
}

// All of a family with sides, in the widest lanes there are.
template <class Family>
void run_in_lanes(const Family& family) {
  const int64_t side = std::max(family.m(), family.n());
  with_native([&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    using All = Groups<Family, kBytes>;
    in_groups<kBytes>(family, 2 * side * side * side, 1, [&](int64_t begin, int64_t end, auto* memory) {
      if constexpr (kBytes > 16) {
        run_native<kBytes, All>(family, begin, end, memory);
      } else {
        All::run_each(family, begin * All::kCount, std::min(end * All::kCount, family.batch), memory);
      }
    });
  });
}

}  // namespace manualgrad
