// manualgrad::cdist_backward and manualgrad::pdist_backward on the CPU; the contract is in distance_plan.h.
//
// A thread takes a few rows of x1 at a time, and for these a tile of the rows of x2, so that both stay in cache.
// Vectors run across x2 where points have few coordinates (x2 is transposed once), and along the coordinates where they
// have many. Sums are taken in an order that depends on the shapes alone.
#include "../distance_plan.h"

#include <algorithm>
#include <memory>

namespace manualgrad {
namespace {

// Rows of x1 and of x2 in a tile. Vectors across x2 run over a multiple of kLanes rows.
constexpr int64_t kRows = 8, kTile = 512, kLanes = 16;

constexpr int64_t padded(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <class T>
struct Operands {
  const T* x1;
  const T* x2;
  const T* x2_transposed;  // (columns, padded(others)) for each batch of x2; null where vectors run along coordinates
  const T* grad;
  const T* distances;
  T* out;
};

// sgn(x) at a tie, times a: as distance_element has it, in fewer instructions. idle is 0 a; where n = 0, so is a.
template <class T>
HOST_DEVICE T extreme_element(T x, T a, T n, T idle) {
  using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const T size = modulus(x), value = size == n ? a : (size == size ? idle : size);
  return bits_as<T>(bits_as<Bits>(value) ^ (bits_as<Bits>(x) ^ bits_as<Bits>(size)));
}

// The Slices of one row of x1 with a tile of the rows of x2.
template <Power P, class T>
struct Coefficients {
  static constexpr bool kQuotient = P == Power::kTwo || P == Power::kThree || P == Power::kFour;
  using Count = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

  alignas(64) T a[kTile], b[kTile], n[kTile];
  bool split;  // some b is not 1; else b is not set

  // Whether the Slice is more than a quotient.
  HOST_DEVICE static bool odd(T g, T n, T low, T high) {
    const T size = std::fabs(g / n);
    const bool plain = (size >= std::numeric_limits<T>::min()) & (size <= std::numeric_limits<T>::max());
    return !((n >= low) & (n <= high) & (!kQuotient | plain | (g == T(0))));
  }

  // Of finite p, from g and the stored norms of rows [begin, end) of the tile. The odd pairs are few.
  HOST_DEVICE void set(const DistancePlan& plan, const Trust& trust, const T* __restrict g, const T* __restrict stored,
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
      const Slice<T> slice = pair_slice(P, x1, x2 + j * plan.columns, plan.columns, g[j], stored[j], plan.p, trust);
      a[j] = slice.a;
      b[j] = slice.b;
      n[j] = slice.n;
      split |= slice.b != T(1);
    }
  }

  // Of p = inf: shares, given how many elements attain the norm.
  HOST_DEVICE void set_shares(const DistancePlan& plan, const T* g, const T* stored, const T* x1, const T* x2,
                              const Count* ties, int64_t begin, int64_t end) {
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
      const Slice<T> slice = extreme_slice(x1, x2 + j * plan.columns, plan.columns, g[j], stored[j]);
      a[j] = slice.n == T(0) ? T(0) * slice.a : slice.a;
      b[j] = T(0) * slice.a;
      n[j] = slice.n;
    }
  }

  HOST_DEVICE void set_nothing(int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      a[j] = T(0);
      b[j] = P == Power::kExtreme ? T(0) : T(1);
      n[j] = T(1);
    }
  }

  template <bool Split>
  HOST_DEVICE T element(T difference, int64_t j, double exponent) const {
    if constexpr (P == Power::kExtreme) {
      return extreme_element(difference, a[j], n[j], b[j]);
    } else {
      return distance_element<P>(difference, Slice<T>{a[j], Split ? b[j] : T(1), n[j]}, exponent);
    }
  }
};

// Equal, or not comparable: a tie, or a pair whose count does not matter.
template <class T>
HOST_DEVICE bool may_tie(T size, T n) {
  return !((size < n) | (size > n));
}

// One row of x1 with a tile of the rows of x2, the arrays starting where the tile does. Pairs: a pair adds to the row
// of x2 as well, the opposite of what it adds to the row of x1.
template <Power P, class T, bool Pairs>
struct RowBody {
  using C = Coefficients<P, T>;
  using Count = typename C::Count;

  // --- vectors across x2: [begin, end), both multiples of kLanes ----------------------------------------------------

  // K coordinates. x2 and others are transposed, with this stride; x1 and out have their own.
  template <int K, bool Split>
  HOST_DEVICE static void sum(const C& c, double e, const T* x1, const T* __restrict x2, T* __restrict others,
                              int64_t stride, int64_t begin, int64_t end, T* out, int64_t out_step) {
    constexpr int k1 = K > 1 ? 1 : 0, k2 = K > 2 ? 2 : 0, k3 = K > 2 ? 3 : 0;
    const T x_0 = x1[0], x_1 = x1[k1], x_2 = x1[k2], x_3 = x1[k3];
    T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t j = begin; j < end; ++j) {
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
  HOST_DEVICE static void sum_all(const C& c, const DistancePlan& plan, const T* x1, const T* x2, T* others,
                                  int64_t stride, int64_t begin, int64_t end, T* out, int64_t out_step) {
    const double e = plan.p - 1;
    const auto step = [&](auto count, int64_t k) {
      sum<decltype(count)::value, Split>(c, e, x1 + k, x2 + k * stride, Pairs ? others + k * stride : nullptr, stride,
                                         begin, end, out + k * out_step, out_step);
    };
    int64_t k = 0;
    if constexpr (P != Power::kGeneral) {
      for (; k + 4 <= plan.columns; k += 4) step(std::integral_constant<int, 4>{}, k);
      for (; k + 2 <= plan.columns; k += 2) step(std::integral_constant<int, 2>{}, k);
    }
    for (; k < plan.columns; ++k) step(std::integral_constant<int, 1>{}, k);
  }

  HOST_DEVICE static void across(C& c, const DistancePlan& plan, const Trust& trust, const T* g, const T* n,
                                 const T* x1, const T* x2, const T* transposed, T* others, int64_t stride,
                                 int64_t begin, int64_t end, T* out, int64_t out_step) {
    const int64_t first = begin / kLanes * kLanes, last = padded(end);
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
      c.set_shares(plan, g, n, x1, x2, ties, begin, end);
    } else {
      c.set(plan, trust, g, n, x1, x2, begin, end);
    }
    c.set_nothing(first, begin);
    c.set_nothing(end, last);
    if (c.split) {
      sum_all<true>(c, plan, x1, transposed, others, stride, first, last, out, out_step);
    } else {
      sum_all<false>(c, plan, x1, transposed, others, stride, first, last, out, out_step);
    }
  }

  // --- vectors along the coordinates --------------------------------------------------------------------------------

  template <int N, bool Split>
  HOST_DEVICE static void add(const C& c, const DistancePlan& plan, const T* __restrict x1, const T* __restrict x2,
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

  HOST_DEVICE static void along(C& c, const DistancePlan& plan, const Trust& trust, const T* g, const T* n, const T* x1,
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
      c.set_shares(plan, g, n, x1, x2, ties, begin, end);
    } else {
      c.set(plan, trust, g, n, x1, x2, begin, end);
    }
    constexpr int kAtOnce = P == Power::kGeneral ? 1 : 4;
    int64_t j = begin;
    if (c.split) {
      for (; j < end; ++j) add<1, true>(c, plan, x1, x2, others, j, out);
    }
    for (; j + kAtOnce <= end; j += kAtOnce) add<kAtOnce, false>(c, plan, x1, x2, others, j, out);
    for (; j < end; ++j) add<1, false>(c, plan, x1, x2, others, j, out);
  }
};

// --- cdist ----------------------------------------------------------------------------------------------------------

template <Power P, class T>
struct CdistBody {
  // Rows [row, row + rows) of one batch of x1, which come with one batch each of the others.
  HOST_DEVICE static void tiles(const DistancePlan& plan, const Trust& trust, const Operands<T>& at, int64_t row,
                                int64_t rows) {
    using Row = RowBody<P, T, false>;
    Coefficients<P, T> c;
    T g_tile[kRows][kTile], n_tile[kRows][kTile];
    const bool dense = plan.grad.column == 1 && plan.distances.column == 1;
    for (int64_t first = 0; first < plan.others; first += kTile) {
      const int64_t count = std::min(kTile, plan.others - first);
      const T* grad = at.grad + row * plan.grad.row + first * plan.grad.column;
      const T* distances = at.distances + row * plan.distances.row + first * plan.distances.column;
      for (int64_t j = 0; !dense && j < count; ++j) {
        for (int64_t i = 0; i < rows; ++i) {
          g_tile[i][j] = grad[i * plan.grad.row + j * plan.grad.column];
          n_tile[i][j] = distances[i * plan.distances.row + j * plan.distances.column];
        }
      }
      const T* x2 = at.x2 + first * plan.columns;
      for (int64_t i = 0; i < rows; ++i) {
        const T* g = dense ? grad + i * plan.grad.row : g_tile[i];
        const T* n = dense ? distances + i * plan.distances.row : n_tile[i];
        const T* x1 = at.x1 + (row + i) * plan.columns;
        T* out = at.out + (row + i) * plan.columns;
        if (at.x2_transposed != nullptr) {
          Row::across(c, plan, trust, g, n, x1, x2, at.x2_transposed + first, nullptr, padded(plan.others), 0, count,
                      out, 1);
        } else {
          Row::along(c, plan, trust, g, n, x1, x2, nullptr, 0, count, out);
        }
      }
    }
  }

  // Units of `rows` rows of x1 each.
  HOST_DEVICE static void run(const DistancePlan& plan, const Trust& trust, const Operands<T>& operands, int64_t rows,
                              int64_t begin, int64_t end) {
    const int64_t units = (plan.rows + rows - 1) / rows, size = plan.rows * plan.columns;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / units, row = (unit - batch * units) * rows;
      const int64_t count = std::min(rows, plan.rows - row);
      Operands<T> at = operands;
      at.x1 += batch * size;
      at.out += batch * size;
      std::fill(at.out + row * plan.columns, at.out + (row + count) * plan.columns, T(0));
      int64_t kept[3];
      plan.kept.offsets(batch, kept);
      for (int64_t s = 0; s < plan.sums; ++s) {
        int64_t summed[3];
        plan.summed.offsets(s, summed);
        const int64_t other = kept[0] + summed[0];
        at.x2 = operands.x2 + other;
        if (at.x2_transposed != nullptr) {
          at.x2_transposed = operands.x2_transposed + other / plan.others * padded(plan.others);
        }
        at.grad = operands.grad + kept[1] + summed[1];
        at.distances = operands.distances + kept[2] + summed[2];
        tiles(plan, trust, at, row, count);
      }
    }
  }
};

// --- pdist: each pair is visited once. Fixed parts of the rows have a sum of their own each, added up in the end. ----

constexpr int64_t kMaxParts = 16;

struct Parts {
  int64_t count, size;
  int64_t first[kMaxParts + 1];  // each has about as many pairs as the others

  Parts(int64_t rows, int64_t columns, bool across)
      : count(std::max<int64_t>(1, std::min(kMaxParts, rows / 128))), size((across ? padded(rows) : rows) * columns) {
    for (int64_t i = 0; i <= count; ++i) {
      const double rest = std::sqrt(1.0 - static_cast<double>(i) / static_cast<double>(count));
      first[i] = rows - static_cast<int64_t>(static_cast<double>(rows) * rest);
    }
  }
};

template <Power P, class T>
struct PdistBody {
  HOST_DEVICE static void run(const DistancePlan& plan, const Trust& trust, const Operands<T>& at, const Parts& parts,
                              T* sums, int64_t begin, int64_t end) {
    using Row = RowBody<P, T, true>;
    Coefficients<P, T> c;
    T g_tile[kTile], n_tile[kTile];
    const int64_t rows = plan.rows, columns = plan.columns, stride = padded(rows);
    const bool dense = plan.grad.column == 1 && plan.distances.column == 1;
    for (int64_t part = begin; part < end; ++part) {
      T* sum = sums + part * parts.size;
      std::fill(sum, sum + parts.size, T(0));
      for (int64_t first = parts.first[part] / kTile * kTile; first < rows; first += kTile) {
        const int64_t count = std::min(kTile, rows - first), stop = std::min(parts.first[part + 1], first + count - 1);
        for (int64_t i = parts.first[part]; i < stop; ++i) {
          const int64_t low = std::max<int64_t>(0, i + 1 - first), pair = plan.at_pair(i, first + low) - low;
          const T* g = at.grad + pair;
          const T* n = at.distances + pair;
          if (!dense) {
            for (int64_t j = low; j < count; ++j) {
              g_tile[j] = at.grad[(pair + j) * plan.grad.column];
              n_tile[j] = at.distances[(pair + j) * plan.distances.column];
            }
            g = g_tile;
            n = n_tile;
          }
          const T* x1 = at.x1 + i * columns;
          const T* x2 = at.x1 + first * columns;
          if (at.x2_transposed != nullptr) {
            Row::across(c, plan, trust, g, n, x1, x2, at.x2_transposed + first, sum + first, stride, low, count,
                        sum + i, stride);
          } else {
            Row::along(c, plan, trust, g, n, x1, x2, sum + first * columns, low, count, sum + i * columns);
          }
        }
      }
    }
  }

  HOST_DEVICE static void add_up(const DistancePlan& plan, const Operands<T>& at, const Parts& parts, T* sums) {
    const bool transposed = at.x2_transposed != nullptr;
    const int64_t lines = transposed ? plan.columns : 1, line = parts.size / lines;
    const int64_t step = transposed ? 1 : plan.columns;
    for (int64_t part = 1; part < parts.count; ++part) {
      for (int64_t k = 0; k < lines; ++k) {
        const T* __restrict from = sums + part * parts.size + k * line;
        T* __restrict to = sums + k * line;
        for (int64_t i = parts.first[part] * step; i < line; ++i) to[i] += from[i];
      }
    }
    for (int64_t i = 0; i < plan.rows; ++i) {
      for (int64_t k = 0; k < plan.columns; ++k) {
        at.out[i * plan.columns + k] = transposed ? sums[k * line + i] : sums[i * plan.columns + k];
      }
    }
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

// Memory that starts a line of the cache, so that no vector lies across two.
template <class T>
class Lines {
 public:
  explicit Lines(int64_t count) : bytes_(new char[static_cast<size_t>(count) * sizeof(T) + kLine]) {}
  T* data() const {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
    return reinterpret_cast<T*>(bytes_.get() + (kLine - address % kLine));
  }

 private:
  static constexpr size_t kLine = 64;
  std::unique_ptr<char[]> bytes_;
};

template <class T>
Lines<T> transposed(const T* x2, int64_t batches, int64_t others, int64_t columns) {
  const int64_t stride = padded(others);
  Lines<T> result(batches * columns * stride);
  T* to = result.data();
  parallel_for(batches * columns, std::max<int64_t>(1, kGrain / stride), [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / columns, k = unit - batch * columns;
      const T* from = x2 + batch * others * columns + k;
      for (int64_t j = 0; j < stride; ++j) to[unit * stride + j] = from[std::min(j, others - 1) * columns];
    }
  });
  return result;
}

template <class T>
bool all_finite(const T* x, int64_t count) {
  T zero = 0;
  for (int64_t k = 0; k < count; ++k) zero += T(0) * x[k];
  return zero == T(0);
}

template <class T>
struct Run {
  template <Power P>
  static void power(const DistancePlan& plan, const Operands<T>& operands) {
    const Trust trust = trust_range<T>(plan.p, plan.columns);
    const double pairs = static_cast<double>(plan.others) * static_cast<double>(plan.columns);
    if (plan.triangle) {
      const Parts parts(plan.rows, plan.columns, operands.x2_transposed != nullptr);
      const Lines<T> sums(parts.count * parts.size);
      const int64_t grain = pairs * static_cast<double>(plan.rows) < kGrain ? parts.count : 1;
      parallel_for(parts.count, grain, [&](int64_t begin, int64_t end) {
        Multiversion<PdistBody<P, T>>::call(plan, trust, operands, parts, sums.data(), begin, end);
      });
      PdistBody<P, T>::add_up(plan, operands, parts, sums.data());
      return;
    }
    // As the sum of a row does not depend on them, few rows are shared out in smaller units.
    const int64_t rows = std::max<int64_t>(1, std::min(kRows, plan.batch * plan.rows / 32));
    const int64_t units = plan.batch * ((plan.rows + rows - 1) / rows);
    const double work = static_cast<double>(rows * plan.sums) * pairs;
    parallel_for(units, std::max<int64_t>(1, static_cast<int64_t>(kGrain / work)), [&](int64_t begin, int64_t end) {
      Multiversion<CdistBody<P, T>>::call(plan, trust, operands, rows, begin, end);
    });
  }

  static void run(const DistancePlan& plan, const Tensor& grad, const Tensor& x1, const Tensor& x2,
                  const Tensor& distances, Tensor& out) {
    Operands<T> operands{static_cast<const T*>(x1.const_data_ptr()),
                         static_cast<const T*>(x2.const_data_ptr()),
                         nullptr,
                         static_cast<const T*>(grad.const_data_ptr()),
                         static_cast<const T*>(distances.const_data_ptr()),
                         static_cast<T*>(out.mutable_data_ptr())};
    std::optional<Lines<T>> memory;
    // Across, pdist meets pairs that are not its own, with a = 0: they must be finite.
    if (plan.columns < 64 && plan.others >= 4 && (!plan.triangle || all_finite(operands.x2, x2.numel()))) {
      const int64_t batches = x2.numel() / (plan.others * plan.columns);
      memory = transposed(operands.x2, batches, plan.others, plan.columns);
      operands.x2_transposed = memory->data();
    }
    switch (plan.power) {
      case Power::kOne:
        return power<Power::kOne>(plan, operands);
      case Power::kTwo:
        return power<Power::kTwo>(plan, operands);
      case Power::kThree:
        return power<Power::kThree>(plan, operands);
      case Power::kFour:
        return power<Power::kFour>(plan, operands);
      case Power::kThreeHalves:
        return power<Power::kThreeHalves>(plan, operands);
      case Power::kGeneral:
        return power<Power::kGeneral>(plan, operands);
      case Power::kExtreme:
        return power<Power::kExtreme>(plan, operands);
    }
  }
};

Tensor cdist_backward(const Tensor& grad, const Tensor& x1, const Tensor& x2, double p, const Tensor& cdist) {
  return run_distance<Run>(plan_cdist_backward(grad, x1, x2, p, cdist), grad, x1, x2, cdist);
}

Tensor pdist_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& pdist) {
  return run_distance<Run>(plan_pdist_backward(grad, self, p, pdist), grad, self, self, pdist);
}

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) {
  m.impl("cdist_backward", TORCH_BOX(&manualgrad::cdist_backward));
  m.impl("pdist_backward", TORCH_BOX(&manualgrad::pdist_backward));
}
