// One row of x1 with a tile of the rows of x2, in loops for the CPU. Host code.
#pragma once

#include "../base/simd.h"
#include "distance.h"

#include <algorithm>

namespace manualgrad {

// Rows of x1 and of x2 in a tile. Vectors across x2 run over a multiple of kPadding rows.
constexpr int64_t kRows = 8, kTile = 512, kPadding = 16;

constexpr int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

template <class T>
struct DistanceOperands {
  const T* x1;
  const T* x2;
  const T* x2_transposed;  // (columns, padded(others)) for each batch of x2; null where vectors run along coordinates
  const T* grad;
  const T* distances;
  T* out;
};

// sgn(x) at a tie, times a: as in distance_element, in fewer instructions. idle is 0 a; where n = 0, so is a.
template <class T>
HOST_INLINE T extreme_element(T x, T a, T n, T idle) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const T size = modulus(x), value = size == n ? a : (size == size ? idle : size);
  return bits_as<T>(bits_as<Bits>(value) ^ (bits_as<Bits>(x) ^ bits_as<Bits>(size)));
}

// For odd pairs, which are few: compiled once, for the baseline.
template <class T>
MANUALGRAD_NOT_INLINED Slice<T> odd_slice(Power power, const T* left, const T* right, int64_t count, T g, T stored,
                                          double p, const Trust& trust) {
  if (power == Power::kExtreme) return extreme_slice(left, right, count, g, stored);
  return pair_slice(power, left, right, count, g, stored, p, trust);
}

// The Slices of one row of x1 with a tile of the rows of x2.
template <Power P, class T>
struct PairCoefficients {
  static constexpr bool kQuotient = P == Power::kTwo || P == Power::kThree || P == Power::kFour;
  using Count = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

  alignas(64) T a[kTile], b[kTile], n[kTile];
  bool split;  // some b is not 1 (only for quotients); else b is not set

  // Whether the Slice is more than a quotient.
  HOST_INLINE static bool odd(T g, T n, T low, T high) {
    const T size = std::fabs(g / n);
    const bool plain = (size >= std::numeric_limits<T>::min()) & (size <= std::numeric_limits<T>::max());
    return !((n >= low) & (n <= high) & (!kQuotient | plain | (g == T(0))));
  }

  // For finite p, from g and the stored norms of rows [begin, end) of the tile. The odd pairs are few.
  HOST_INLINE void set(const DistancePlan& plan, const Trust& trust, const T* __restrict g, const T* __restrict stored,
                       const T* x1, const T* x2, int64_t begin, int64_t end) {
    split = false;
    if constexpr (P == Power::kOne) {
      for (int64_t j = begin; j < end; ++j) a[j] = g[j];
      return;
    }
    const T low = static_cast<T>(trust.low), high = static_cast<T>(trust.high);
    int32_t any = 0;
    for (int64_t j = begin; j < end; ++j) {
      any |= odd(g[j], stored[j], low, high) ? 1 : 0;
      a[j] = kQuotient ? g[j] / stored[j] : g[j];
      if (P != Power::kTwo) n[j] = P == Power::kThreeHalves ? std::sqrt(stored[j]) : stored[j];
    }
    if (any == 0) return;
    for (int64_t j = begin; j < end; ++j) {
      b[j] = T(1);
      if (!odd(g[j], stored[j], low, high)) continue;
      const Slice<T> slice = odd_slice(P, x1, x2 + j * plan.columns, plan.columns, g[j], stored[j], plan.p, trust);
      a[j] = slice.a;
      b[j] = slice.b;
      n[j] = slice.n;
      split |= slice.b != T(1);
    }
  }

  // For p = inf: shares, given how many elements attain the norm.
  HOST_INLINE void set_shares(const DistancePlan& plan, const Trust& trust, const T* g, const T* stored, const T* x1,
                              const T* x2, const Count* ties, int64_t begin, int64_t end) {
    split = false;
    Count any = 0;
    for (int64_t j = begin; j < end; ++j) {
      any |= ties[j] ^ 1;
      a[j] = stored[j] == T(0) ? T(0) * g[j] : g[j];
      b[j] = T(0) * g[j];
      n[j] = stored[j];
    }
    for (int64_t j = begin; any != 0 && j < end; ++j) {
      if (ties[j] == 1) continue;
      const Slice<T> slice = odd_slice(P, x1, x2 + j * plan.columns, plan.columns, g[j], stored[j], plan.p, trust);
      a[j] = slice.n == T(0) ? T(0) * slice.a : slice.a;
      b[j] = T(0) * slice.a;
      n[j] = slice.n;
    }
  }

  HOST_INLINE void set_nothing(int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      a[j] = T(0);
      b[j] = P == Power::kExtreme ? T(0) : T(1);
      n[j] = T(1);
    }
  }

  template <bool Split>
  HOST_INLINE T element(T difference, int64_t j, double exponent) const {
    if constexpr (P == Power::kExtreme) {
      return extreme_element(difference, a[j], n[j], b[j]);
    } else {
      return distance_element<P>(difference, Slice<T>{a[j], Split ? b[j] : T(1), n[j]}, exponent);
    }
  }
};

// Equal, or not comparable: a tie, or a pair whose count does not matter.
template <class T>
HOST_INLINE bool may_tie(T size, T n) {
  return !((size < n) | (size > n));
}

// One row of x1 with a tile of the rows of x2; the arrays start where the tile does. Pairs: a pair also adds to the row
// of x2, the opposite of what it adds to the row of x1.
template <Power P, class T, int Bytes, bool Pairs>
struct RowBody {
  static constexpr bool kSmall = Bytes == 16 && !kBaselineHasLanes;  // one coordinate or pair at a time
  using C = PairCoefficients<P, T>;
  using Count = typename C::Count;

  // --- vectors across x2: [begin, end), both multiples of kPadding
  // ----------------------------------------------------

  // K coordinates. x2 and others are transposed, with this stride; x1 and out have their own.
  template <int K, bool Split>
  HOST_INLINE static void sum(const C& c, double e, const T* x1, const T* __restrict x2, T* __restrict others,
                              int64_t stride, int64_t begin, int64_t end, T* out, int64_t out_step) {
    constexpr int k1 = K > 1 ? 1 : 0, k2 = K > 2 ? 2 : 0, k3 = K > 2 ? 3 : 0;
    const T x_0 = x1[0], x_1 = x1[k1], x_2 = x1[k2], x_3 = x1[k3];
    T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    const int64_t count = (end - begin) & -kPadding;  // equal to end - begin; tells the compiler that no rest is left
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < count; ++i) {
      const int64_t j = begin + i;
      const T v0 = c.template element<Split>(x_0 - x2[j], j, e);
      s0 += v0;
      if constexpr (Pairs) others[j] -= v0;
      if constexpr (K > 1) {
        const T v1 = c.template element<Split>(x_1 - x2[k1 * stride + j], j, e);
        s1 += v1;
        if constexpr (Pairs) others[k1 * stride + j] -= v1;
      }
      if constexpr (K > 2) {
        const T v2 = c.template element<Split>(x_2 - x2[k2 * stride + j], j, e);
        const T v3 = c.template element<Split>(x_3 - x2[k3 * stride + j], j, e);
        s2 += v2;
        s3 += v3;
        if constexpr (Pairs) others[k2 * stride + j] -= v2;
        if constexpr (Pairs) others[k3 * stride + j] -= v3;
      }
    }
    out[0] += s0;
    if constexpr (K > 1) out[k1 * out_step] += s1;
    if constexpr (K > 2) out[k2 * out_step] += s2;
    if constexpr (K > 2) out[k3 * out_step] += s3;
  }

  template <bool Split>
  HOST_INLINE static void sum_all(const C& c, const DistancePlan& plan, const T* x1, const T* x2, T* others,
                                  int64_t stride, int64_t begin, int64_t end, T* out, int64_t out_step) {
    const double e = plan.p - 1;
    const auto step = [&](auto count, int64_t k) MANUALGRAD_INLINED {
      sum<decltype(count)::value, Split>(c, e, x1 + k, x2 + k * stride, Pairs ? others + k * stride : nullptr, stride,
                                         begin, end, out + k * out_step, out_step);
    };
    int64_t k = 0;
    if constexpr (P != Power::kGeneral && !Split && !kSmall) {  // pairs that are split are rare
      for (; k + 4 <= plan.columns; k += 4) step(std::integral_constant<int, 4>{}, k);
      for (; k + 2 <= plan.columns; k += 2) step(std::integral_constant<int, 2>{}, k);
    }
    for (; k < plan.columns; ++k) step(std::integral_constant<int, 1>{}, k);
  }

  HOST_INLINE static void across(C& c, const DistancePlan& plan, const Trust& trust, const T* g, const T* n,
                                 const T* x1, const T* x2, const T* transposed, T* others, int64_t stride,
                                 int64_t begin, int64_t end, T* out, int64_t out_step) {
    const int64_t first = begin / kPadding * kPadding, last = padded(end);
    if constexpr (P == Power::kExtreme) {
      Count ties[kTile] = {};
      int64_t k = 0;
      for (; k + 4 <= plan.columns; k += 4) {
        const T x_0 = x1[k], x_1 = x1[k + 1], x_2 = x1[k + 2], x_3 = x1[k + 3];
        const T* __restrict at = transposed + k * stride;
#pragma omp simd
        for (int64_t j = begin; j < end; ++j) {
          ties[j] += (may_tie(modulus(x_0 - at[j]), n[j]) ? 1 : 0) +
                     (may_tie(modulus(x_1 - at[stride + j]), n[j]) ? 1 : 0) +
                     (may_tie(modulus(x_2 - at[2 * stride + j]), n[j]) ? 1 : 0) +
                     (may_tie(modulus(x_3 - at[3 * stride + j]), n[j]) ? 1 : 0);
        }
      }
      for (; k < plan.columns; ++k) {
        const T x = x1[k];
        const T* __restrict at = transposed + k * stride;
#pragma omp simd
        for (int64_t j = begin; j < end; ++j) ties[j] += may_tie(modulus(x - at[j]), n[j]) ? 1 : 0;
      }
      c.set_shares(plan, trust, g, n, x1, x2, ties, begin, end);
    } else {
      c.set(plan, trust, g, n, x1, x2, begin, end);
    }
    c.set_nothing(first, begin);
    c.set_nothing(end, last);
    if constexpr (C::kQuotient) {
      if (c.split) return sum_all<true>(c, plan, x1, transposed, others, stride, first, last, out, out_step);
    }
    sum_all<false>(c, plan, x1, transposed, others, stride, first, last, out, out_step);
  }

  // --- vectors along the coordinates --------------------------------------------------------------------------------

  template <int N, bool Split>
  HOST_INLINE static void add(const C& c, const DistancePlan& plan, const T* __restrict x1, const T* __restrict x2,
                              T* __restrict others, int64_t j, T* __restrict out) {
    const double e = plan.p - 1;
    const int64_t columns = plan.columns;
    for (int64_t k = 0; k < columns; ++k) {
      T sum = out[k];
      for (int i = 0; i < N; ++i) {
        const T value = c.template element<Split>(x1[k] - x2[(j + i) * columns + k], j + i, e);
        sum += value;
        if constexpr (Pairs) others[(j + i) * columns + k] -= value;
      }
      out[k] = sum;
    }
  }

  HOST_INLINE static void along(C& c, const DistancePlan& plan, const Trust& trust, const T* g, const T* n, const T* x1,
                                const T* x2, T* others, int64_t begin, int64_t end, T* out) {
    if constexpr (P == Power::kExtreme) {
      Count ties[kTile];
      for (int64_t j = begin; j < end; ++j) {
        const T* __restrict other = x2 + j * plan.columns;
        const T norm = n[j];
        Count found = 0;
        for (int64_t k = 0; k < plan.columns; ++k) found += may_tie(modulus(x1[k] - other[k]), norm) ? 1 : 0;
        ties[j] = found;
      }
      c.set_shares(plan, trust, g, n, x1, x2, ties, begin, end);
    } else {
      c.set(plan, trust, g, n, x1, x2, begin, end);
    }
    constexpr int kAtOnce = P == Power::kGeneral || kSmall ? 1 : 4;
    int64_t j = begin;
    if constexpr (C::kQuotient) {
      for (; c.split && j < end; ++j) add<1, true>(c, plan, x1, x2, others, j, out);
    }
    for (; j + kAtOnce <= end; j += kAtOnce) add<kAtOnce, false>(c, plan, x1, x2, others, j, out);
    for (; j < end; ++j) add<1, false>(c, plan, x1, x2, others, j, out);
  }
};

}  // namespace manualgrad
