// The cotangents of pairwise distances on the CPU; the contract is in distance.h.
//
// A thread takes a few rows of x1 at a time, and for these a tile of the rows of x2, so that both stay in cache.
// Vectors run across x2 where points have few coordinates (x2 is transposed once), and along the coordinates where they
// have many. Sums are taken in an order that depends on the shapes alone.
#include "distance.h"

#include <memory>

#include "../base/parallel.h"
#include "../base/simd.h"
#include "distance_tile.h"

namespace manualgrad {
namespace {

// --- cdist ----------------------------------------------------------------------------------------------------------

template <Power P, class T, int Bytes>
struct CdistBody {
  // Rows [row, row + rows) of one batch of x1, with one batch of each of the other operands.
  HOST_INLINE static void tiles(const DistancePlan& plan, const Trust& trust, const DistanceOperands<T>& at,
                                int64_t row, int64_t rows) {
    using Row = RowBody<P, T, Bytes, false>;
    PairCoefficients<P, T> c;
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
  HOST_INLINE static void run(const DistancePlan& plan, const Trust& trust, const DistanceOperands<T>& operands,
                              int64_t rows, int64_t begin, int64_t end) {
    const int64_t units = (plan.rows + rows - 1) / rows, size = plan.rows * plan.columns;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t batch = unit / units, row = (unit - batch * units) * rows;
      const int64_t count = std::min(rows, plan.rows - row);
      DistanceOperands<T> at = operands;
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

template <Power P, class T, int Bytes>
struct PdistBody {
  HOST_INLINE static void run(const DistancePlan& plan, const Trust& trust, const DistanceOperands<T>& at,
                              const Parts& parts, T* sums, int64_t begin, int64_t end) {
    using Row = RowBody<P, T, Bytes, true>;
    PairCoefficients<P, T> c;
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
};

template <class T>
void add_up(const DistancePlan& plan, const DistanceOperands<T>& at, const Parts& parts, T* sums) {
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

// --- the operators --------------------------------------------------------------------------------------------------

// Memory that starts a line of the cache, so that no vector lies across two.
template <class T>
class AlignedMemory {
 public:
  explicit AlignedMemory(int64_t count) : bytes_(new char[static_cast<size_t>(count) * sizeof(T) + kLine]) {}
  T* data() const {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
    return reinterpret_cast<T*>(bytes_.get() + (kLine - address % kLine));
  }

 private:
  static constexpr size_t kLine = 64;
  std::unique_ptr<char[]> bytes_;
};

template <class T>
AlignedMemory<T> transposed(const T* x2, int64_t batches, int64_t others, int64_t columns) {
  const int64_t stride = padded(others);
  AlignedMemory<T> result(batches * columns * stride);
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

struct CpuDistance {
  template <Power P, class T>
  static void power(const DistancePlan& plan, const DistanceOperands<T>& operands) {
    const Trust trust = trust_range<T>(plan.p, plan.columns);
    const double pairs = static_cast<double>(plan.others) * static_cast<double>(plan.columns);
    if (plan.triangle) {
      const Parts parts(plan.rows, plan.columns, operands.x2_transposed != nullptr);
      const AlignedMemory<T> sums(parts.count * parts.size);
      const int64_t grain = pairs * static_cast<double>(plan.rows) < kGrain ? parts.count : 1;
      parallel_for(parts.count, grain, [&](int64_t begin, int64_t end) {
        with_native([&](auto bytes) {
          constexpr int kBytes = decltype(bytes)::value;
          run_native<kBytes, PdistBody<P, T, kBytes>>(plan, trust, operands, parts, sums.data(), begin, end);
        });
      });
      add_up(plan, operands, parts, sums.data());
      return;
    }
    // If there are few rows, units are smaller; the sum of a row does not depend on the units.
    const int64_t rows = std::max<int64_t>(1, std::min(kRows, plan.batch * plan.rows / 32));
    const int64_t units = plan.batch * ((plan.rows + rows - 1) / rows);
    const double work = static_cast<double>(rows * plan.sums) * pairs;
    parallel_for(units, std::max<int64_t>(1, static_cast<int64_t>(kGrain / work)), [&](int64_t begin, int64_t end) {
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        run_native<kBytes, CdistBody<P, T, kBytes>>(plan, trust, operands, rows, begin, end);
      });
    });
  }

  template <class T>
  static void run(const DistancePlan& plan, const Tensor& grad, const Tensor& x1, const Tensor& x2,
                  const Tensor& distances, Tensor& out) {
    DistanceOperands<T> operands{static_cast<const T*>(x1.const_data_ptr()),
                                 static_cast<const T*>(x2.const_data_ptr()),
                                 nullptr,
                                 static_cast<const T*>(grad.const_data_ptr()),
                                 static_cast<const T*>(distances.const_data_ptr()),
                                 static_cast<T*>(out.mutable_data_ptr())};
    std::optional<AlignedMemory<T>> memory;
    // Vectors across x2 also have pairs that are not pdist's, with a = 0: they must be finite.
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

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::DistanceOperators<manualgrad::CpuDistance>)
