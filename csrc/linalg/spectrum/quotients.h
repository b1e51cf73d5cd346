// The quotients in the derivatives of one decomposition on the CPU: first all of them, in vectors, as if values were
// apart, then the few pairs that are near each other, by the rules of math/degeneracy.h.
#pragma once

#include "../../base/parallel.h"
#include "../../base/simd.h"
#include "../blas/vector_product.h"
#include "decomposition.h"

#include <atomic>
#include <vector>

namespace manualgrad {

// One matrix of a batch of Spectra.
template <class D, class S>
class Spectrum {
 public:
  using T = RealOf<S>;

  Spectrum(const Spectra<S>& of, int64_t b)
      : k(of.k),
        x(of.x == nullptr ? nullptr : of.x + b * k * k),
        y(of.y == nullptr ? nullptr : of.y + b * k * k),
        columns_(view(of.columns, b)),
        rows_(view(of.rows, b)),
        lengths_{of.columns_length, of.rows_length},
        s(values(of.s, b, s_copy_)),
        g(values(of.g, b, g_copy_)) {
    T largest = 0;
    for (int64_t i = 0; i < k; ++i) largest = larger(largest, absolute(s[i]));
    limits = limits_of(largest, of.options);
  }

  // out = q + r + diag g, row-major; in a jvp out2 = r - q. Returns whether rule 4 applied.
  bool quotients(S* out, S* out2) {
    if (x == nullptr && y == nullptr) {
      std::fill(out, out + k * k, S{});
      for (int64_t i = 0; i < k; ++i) out[i * (k + 1)] = from_real<S>(g[i]);
      return false;
    }
    with_native([&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      parallel_for(k, std::max<int64_t>(kLaneBytes / sizeof(T), kGrain / k), [&](int64_t begin, int64_t end) {
        run_native<kBytes, Apart<kBytes>>(*this, begin, end, out, out2);
      });
    });
    const bool looked = !limits.broad && (NumberTraits<S>::kComplex || near());
    if (looked) find_noise();
    auto rules = rules_of<S>(limits, [&] { return size(); });
    const auto put = [&](int64_t i, int64_t j, const Two<S>& t) {
      out[i * k + j] = t.sum + t.difference;
      if (D::kJvp && D::kSvd) out2[i * k + j] = t.sum - t.difference;
    };
    for (int64_t i = 0; i < k; ++i) {
      const T noise = looked ? noise_[i] : T(0);
      for (int64_t j = i + 1; looked && j < k; ++j) {
        if (!(absolute(s[j] - s[i]) <= limits.window)) {
          if (sorted_) break;
          continue;
        }
        const Two<S> t = rules.template pair<D>(entries(i, j), i, j, s, g, diagonal(i), diagonal(j), noise + noise_[j]);
        put(i, j, t);
        put(j, i, turned<D>(t));
      }
      const S r = rules.template diagonal<D>(entries(i, i), s[i], noise);
      put(i, i, {g == nullptr ? S{} : from_real<S>(g[i]), r});
    }
    return rules.gauge_dependent;
  }

  // out += (left - projected) / s, where `left` are the vectors whose inner products are the numerators.
  // Returns whether rule 4 applied.
  bool complement(const S* projected, bool by_columns, S* out) {
    const View<S>& left = by_columns ? columns_ : rows_;
    const int64_t length = by_columns ? lengths_[0] : lengths_[1];
    std::vector<T> inverse(static_cast<size_t>(k));
    bool near = false;
    for (int64_t j = 0; j < k; ++j) {
      const bool apart = !(absolute(s[j]) <= limits.window);
      inverse[j] = limits.broad ? broadened(s[j], limits) : apart ? 1 / s[j] : T(0);
      near |= !limits.broad && !apart;
    }
    if (by_columns) {
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t j = 0; j < k; ++j) out[i * k + j] += (left.raw(i, j) - projected[i * k + j]) * inverse[j];
      }
    } else {
      for (int64_t j = 0; j < k; ++j) {
        for (int64_t i = 0; i < length; ++i) {
          out[j * length + i] += (left.raw(j, i) - projected[j * length + i]) * inverse[j];
        }
      }
    }
    if (!near) return false;
    auto rules = rules_of<S>(limits, [&] { return size(); });
    for (int64_t j = 0; j < k; ++j) {
      if (!(absolute(s[j]) <= limits.window)) continue;
      const auto given = [&](int64_t i) { return by_columns ? left.raw(i, j) : left.raw(j, i); };
      double square = 0;
      squares(by_columns, j, 1, &square);
      const T noise = noise_of<T>(square_root(square), length);
      for (int64_t i = 0; i < length; ++i) {
        const int64_t at = by_columns ? i * k + j : j * length + i;
        out[at] += rules.resolve(given(i) - projected[at], s[j], noise);
      }
    }
    return rules.gauge_dependent;
  }

 private:
  // Rows [begin, end) of all quotients, as if the values were apart.
  template <int Bytes>
  struct Apart {
    using N = typename LanesOf<S, Bytes>::type;
    using R = RealOf<N>;
    static constexpr int kCount = kLanesIn<N>;

    HOST_INLINE static void turn(const S* from, int64_t k, int rows, int columns, N* to) {
      gather(MatrixBatch<const S>{from, k, 0, 1}, 0, columns, 1, rows, to);
    }

    HOST_INLINE static void run(const Spectrum& at, int64_t begin, int64_t end, S* out, S* out2) {
      const int64_t k = at.k;
      const Limits<R> limits{real_number<R>(at.limits.tolerance), real_number<R>(at.limits.window),
                             real_number<R>(at.limits.width), at.limits.broad};
      const bool with_x = at.x != nullptr, with_y = at.y != nullptr;
      N x_turned[kCount] = {}, y_turned[kCount] = {};
      for (int64_t i0 = begin; i0 < end; i0 += kCount) {
        const int rows = static_cast<int>(std::min<int64_t>(kCount, end - i0));
        for (int64_t next = 0; next < k; next += kCount) {
          const int64_t j = k >= kCount ? std::min(next, k - kCount) : 0;
          const int count = static_cast<int>(std::min<int64_t>(kCount, k - j));
          for (int64_t w = j + kCount; w < std::min(j + 2 * kCount, k); ++w) {  // these strides defeat the prefetcher
            __builtin_prefetch((with_x ? at.x : at.y) + w * k + i0);
          }
          if (with_x) turn(at.x + j * k + i0, k, rows, count, x_turned);
          if (with_y) turn(at.y + j * k + i0, k, rows, count, y_turned);
          const R s_j = load_lanes<R>(at.s + j, count);
          for (int q = 0; q < rows; ++q) {
            const int64_t i = i0 + q, to = i * k + j;
            const Entries<N> entries{with_x ? load_lanes<N>(at.x + to, count) : N{}, x_turned[q],
                                     with_y ? load_lanes<N>(at.y + to, count) : N{}, y_turned[q]};
            const Two<N> t = plain<D>(entries, real_number<R>(at.s[i]), s_j, limits);
            store_lanes(t.difference + t.sum, count, out + to);
            if constexpr (D::kJvp && D::kSvd) store_lanes(t.sum - t.difference, count, out2 + to);
          }
        }
      }
    }
  };

  Entries<S> entries(int64_t i, int64_t j) const {
    const int64_t a = i * k + j, b = j * k + i;
    return {x == nullptr ? S{} : x[a], x == nullptr ? S{} : x[b], y == nullptr ? S{} : y[a], y == nullptr ? S{} : y[b]};
  }
  T diagonal(int64_t i) const {
    const Entries<S> at = entries(i, i);
    return spectral_diagonal<D>(at.x, at.y);
  }

  // Whether any two values are near each other, or may be because they are not sorted.
  bool near() {
    bool ascending = true, descending = true, found = false;
    for (int64_t i = 0; i + 1 < k; ++i) {
      ascending &= s[i] <= s[i + 1];
      descending &= s[i] >= s[i + 1];
      found |= absolute(s[i + 1] - s[i]) <= limits.window;
    }
    sorted_ = ascending || descending;
    return found || !sorted_;
  }

  HOST_INLINE static double exact_square(const S& a) {
    if constexpr (NumberTraits<S>::kComplex) {
      return static_cast<double>(a.re) * a.re + static_cast<double>(a.im) * a.im;
    } else {
      return static_cast<double>(a) * a;
    }
  }

  // The square norms of k vectors, which are `across` apart and have entries that are `along` apart.
  struct Squares {
    HOST_INLINE static void run(const S* from, int64_t length, int64_t along, int64_t k, int64_t across, double* to) {
      for (int64_t j = 0; j < k; ++j) to[j] = 0;
      if (across == 1) {
        for (int64_t i = 0; i < length; ++i) {
          for (int64_t j = 0; j < k; ++j) to[j] += exact_square(from[i * along + j]);
        }
        return;
      }
      constexpr int kSums = 8;  // which do not wait for each other
      for (int64_t j = 0; j < k; ++j) {
        const S* vector = from + j * across;
        double sums[kSums] = {};
        int64_t i = 0;
        for (; i + kSums <= length; i += kSums) {
          for (int q = 0; q < kSums; ++q) sums[q] += exact_square(vector[(i + q) * along]);
        }
        for (; i < length; ++i) sums[0] += exact_square(vector[i * along]);
        for (const double sum : sums) to[j] += sum;
      }
    }
  };
  // The square norms of column, or row, j and the following ones.
  void squares(bool by_columns, int64_t j, int64_t count, double* to) const {
    const View<S>& from = by_columns ? columns_ : rows_;
    const int64_t along = by_columns ? from.row : from.column, across = by_columns ? from.column : from.row;
    Multiversion<Squares>::call(from.data + j * across, lengths_[by_columns ? 0 : 1], along, count, across, to);
  }

  void find_noise() {
    near();  // determines whether they are sorted
    std::vector<double> norms(static_cast<size_t>(k)), found(static_cast<size_t>(k));
    for (const bool by_columns : {true, false}) {
      if ((by_columns ? columns_ : rows_).data == nullptr) continue;
      squares(by_columns, 0, k, found.data());
      for (int64_t j = 0; j < k; ++j) norms[j] += square_root(found[j]);
    }
    noise_.resize(static_cast<size_t>(k));
    for (int64_t j = 0; j < k; ++j) noise_[j] = noise_of<T>(norms[j], std::max(lengths_[0], lengths_[1]));
  }

  // The largest modulus of a quotient by a difference, or of the cotangent of a value.
  T size() {
    if (!size_) {
      T found = 0;
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j < i; ++j) {
          found = larger(found, modulus_of(plain<D>(entries(i, j), s[i], s[j], limits).difference));
        }
        if (g != nullptr) found = larger(found, absolute(g[i]));
      }
      size_ = found;
    }
    return *size_;
  }

  const T* values(const MatrixBatch<const T>& from, int64_t b, std::vector<T>& copy) const {
    if (from.data == nullptr) return nullptr;
    if (from.column_stride == 1) return &from.at(b, 0, 0);
    copy.resize(static_cast<size_t>(k));
    for (int64_t i = 0; i < k; ++i) copy[i] = from.at(b, 0, i);
    return copy.data();
  }

  const int64_t k;
  const S* x;
  const S* y;
  View<S> columns_, rows_;
  int64_t lengths_[2];
  std::vector<T> s_copy_, g_copy_;
  const T* s;
  const T* g;
  Limits<T> limits;
  std::vector<T> noise_;
  std::optional<T> size_;
  bool sorted_ = false;
};

// Sets a flag from any thread.
class GaugeFlag {
 public:
  explicit GaugeFlag(Tensor& tensor) : tensor_(tensor) {}
  ~GaugeFlag() {
    if (found_) *static_cast<bool*>(tensor_.mutable_data_ptr()) = true;
  }
  void operator|=(bool gauge_dependent) {
    if (gauge_dependent) found_ = true;
  }

 private:
  Tensor& tensor_;
  std::atomic<bool> found_{false};
};

}  // namespace manualgrad
