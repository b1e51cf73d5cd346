// The derivatives of the SVD and of the Hermitian eigendecomposition on the CPU; the contract is in spectrum_plan.h.
//
// Three routes, by size: tiny matrices in lanes, several at once, and those of them whose values are near each other
// again by the second route; small matrices one at a time, all in the cache; large ones through torch's products of
// whole batches. The last two share the quotients: all of them as if values were apart, in vectors, then the few pairs
// that are near each other by the rules.
#include "../products.h"
#include "../spectrum_plan.h"

#include <atomic>
#include <memory>
#include <vector>

namespace manualgrad {
namespace {

// Up to these sizes (of the larger side) a route is taken, by measurement.
constexpr int64_t kTiny = 16, kSmall = 32;
// As many floats fill a vector without being one a lane.
template <class S>
constexpr int64_t kFull = sizeof(RealOf<S>) == 4 ? 16 : 0;

// --- quotients ------------------------------------------------------------------------------------------------------

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

  // out = q + r + diag g, by rows; forward, out2 = r - q. Returns whether rule 4 applied.
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
      if (D::kForward && D::kSvd) out2[i * k + j] = t.sum - t.difference;
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
    return rules.doubt;
  }

  // out += (left - projected) / s, where `left` is what the numerators of the columns, or rows, are made of.
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
    return rules.doubt;
  }

 private:
  // Rows [begin, end) of all quotients, as if the values were apart.
  template <int Bytes>
  struct Apart {
    using N = typename LanesOf<S, Bytes>::type;
    using R = RealOf<N>;
    static constexpr int kCount = kLanesIn<N>;

    HOST_DEVICE static void turn(const S* from, int64_t k, int rows, int columns, N* to) {
      gather(MatrixBatch<const S>{from, k, 0, 1}, 0, columns, 1, rows, to);
    }

    HOST_DEVICE static void run(const Spectrum& at, int64_t begin, int64_t end, S* out, S* out2) {
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
          for (int64_t w = j + kCount; w < std::min(j + 2 * kCount, k); ++w) {  // strides that processors do not guess
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
            if constexpr (D::kForward && D::kSvd) store_lanes(t.sum - t.difference, count, out2 + to);
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

  // Whether any two values are near each other; where they are not sorted, that is left open.
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

  HOST_DEVICE static double exact_square(const S& a) {
    if constexpr (NumberTraits<S>::kComplex) {
      return static_cast<double>(a.re) * a.re + static_cast<double>(a.im) * a.im;
    } else {
      return static_cast<double>(a) * a;
    }
  }

  // The square norms of k vectors, which are `across` apart and have entries that are `along` apart.
  struct Squares {
    HOST_DEVICE static void run(const S* from, int64_t length, int64_t along, int64_t k, int64_t across, double* to) {
      for (int64_t j = 0; j < k; ++j) to[j] = 0;
      if (across == 1) {
        for (int64_t i = 0; i < length; ++i) {
          for (int64_t j = 0; j < k; ++j) to[j] += exact_square(from[i * along + j]);
        }
        return;
      }
      constexpr int kSums = 8;  // none of which has to wait for the one before
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
  // Of column, or row, j and those after it.
  void squares(bool by_columns, int64_t j, int64_t count, double* to) const {
    const View<S>& from = by_columns ? columns_ : rows_;
    const int64_t along = by_columns ? from.row : from.column, across = by_columns ? from.column : from.row;
    Multiversion<Squares>::call(from.data + j * across, lengths_[by_columns ? 0 : 1], along, count, across, to);
  }

  void find_noise() {
    near();  // which settles whether they are sorted
    std::vector<double> norms(static_cast<size_t>(k)), found(static_cast<size_t>(k));
    for (const bool by_columns : {true, false}) {
      if ((by_columns ? columns_ : rows_).data == nullptr) continue;
      squares(by_columns, 0, k, found.data());
      for (int64_t j = 0; j < k; ++j) norms[j] += square_root(found[j]);
    }
    noise_.resize(static_cast<size_t>(k));
    for (int64_t j = 0; j < k; ++j) noise_[j] = noise_of<T>(norms[j], std::max(lengths_[0], lengths_[1]));
  }

  // The largest quotient by a difference, and cotangent of a value.
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
class Doubts {
 public:
  explicit Doubts(Tensor& tensor) : tensor_(tensor) {}
  ~Doubts() {
    if (found_) *static_cast<bool*>(tensor_.mutable_data_ptr()) = true;
  }
  void operator|=(bool doubt) {
    if (doubt) found_ = true;
  }

 private:
  Tensor& tensor_;
  std::atomic<bool> found_{false};
};

// --- small matrices, one at a time ----------------------------------------------------------------------------------

// Memory for matrices of the largest size, for one thread.
template <class S>
class Scratch {
 public:
  Scratch(int64_t m, int64_t n)
      : size_(static_cast<size_t>(std::max(m, n) * std::max(m, n))), memory_(new S[kParts * size_]) {}
  S* operator[](size_t part) { return memory_.get() + part * size_; }

 private:
  static constexpr size_t kParts = 5;
  size_t size_;
  std::unique_ptr<S[]> memory_;
};

template <class D, class S>
bool small_pull(const PullOperands<S>& at, int64_t b, Scratch<S>& memory) {
  const int64_t m = at.m, n = at.n, k = at.k;
  const View<S> u = view(at.u, b), vh = D::kSvd ? view(at.vh, b) : u.adjoint();
  const View<S> gu = view(at.gu, b), gvh = view(at.gvh, b);
  S *x = memory[0], *y = memory[1], *inner = memory[2], *right = memory[3], *projected = memory[4];
  S* ga = at.ga + b * m * n;
  if (gu.data != nullptr) product(u.adjoint(), gu, k, m, k, x);
  if (gvh.data != nullptr) product(vh, gvh.adjoint(), k, n, k, y);
  const auto one = [&](auto batch) {
    if (batch.data != nullptr) batch.data += b * batch.batch_stride;
    return batch;
  };
  Spectrum<D, S> spectrum(
      {1, k, one(at.s), one(at.gs), gu.data != nullptr ? x : nullptr, gvh.data != nullptr ? y : nullptr, one(at.gu),
       one(at.gvh), gu.data != nullptr ? m : 0, gvh.data != nullptr ? n : 0, at.options},
      0);
  bool doubt = spectrum.quotients(inner, nullptr);
  product({inner, k, 1}, vh, k, k, n, right);
  if (n > k && gvh.data != nullptr) {
    product(View<S>{y, k, 1}.adjoint(), vh, k, k, n, projected);
    doubt |= spectrum.complement(projected, false, right);
  }
  product(u, {right, n, 1}, m, k, n, ga);
  if (m > k && gu.data != nullptr) {
    product(u, {x, k, 1}, m, k, k, projected);
    std::fill(right, right + m * k, S{});
    doubt |= spectrum.complement(projected, true, right);
    product({right, k, 1}, vh, m, k, n, ga, true);
  }
  return doubt;
}

template <class D, class S>
bool small_push(const PushOperands<S>& at, int64_t b, Scratch<S>& memory) {
  const int64_t m = at.m, n = at.n, k = at.k;
  const View<S> u = view(at.u, b), vh = D::kSvd ? view(at.vh, b) : u.adjoint(), da = view(at.da, b);
  S *p = memory[0], *outer = memory[1], *first = memory[2], *second = memory[3], *projected = memory[4];
  S *du = at.du + b * m * k, *dvh = D::kSvd ? at.dvh + b * k * n : nullptr;
  if (n > k) {
    product(u.adjoint(), da, k, m, n, outer);
    product({outer, n, 1}, vh.adjoint(), k, n, k, p);
  } else {
    product(da, vh.adjoint(), m, n, k, outer);
    product(u.adjoint(), {outer, k, 1}, k, m, k, p);
  }
  const S *columns = m > k ? outer : p, *rows = !D::kSvd ? nullptr : n > k ? outer : p;
  MatrixBatch<const RealOf<S>> s = at.s;
  s.data += b * s.batch_stride;
  Spectrum<D, S> spectrum(
      {1, k, s, {}, p, nullptr, {columns, 0, k, 1}, {rows, 0, n, 1}, m, rows != nullptr ? n : 0, at.options}, 0);
  bool doubt = spectrum.quotients(first, second);
  for (int64_t i = 0; i < k; ++i) at.ds[b * k + i] = real_part(p[i * (k + 1)]);
  product(u, {first, k, 1}, m, k, k, du);
  if constexpr (D::kSvd) {
    product({second, k, 1}, vh, k, k, n, dvh);
    if (m > k) {
      product(u, {p, k, 1}, m, k, k, projected);
      doubt |= spectrum.complement(projected, true, du);
    }
    if (n > k) {
      product({p, k, 1}, vh, k, k, n, projected);
      doubt |= spectrum.complement(projected, false, dvh);
    }
  }
  return doubt;
}

// --- tiny matrices, one a lane --------------------------------------------------------------------------------------

// Products of matrices in lanes, by rows; an operand may be the adjoint of what is there.
template <class N>
struct InLanes {
  const N* data;
  int64_t row, column;

  HOST_DEVICE const N& at(int64_t i, int64_t j) const { return data[i * row + j * column]; }
};

// c (m, n) = a (m, k) b (k, n), or c += a b; conjugates of the entries of a, of b.
template <bool OfA, bool OfB, class N>
struct Multiply {
  HOST_DEVICE static void run(const InLanes<N>& a, const InLanes<N>& b, int64_t m, int64_t k, int64_t n, bool add,
                              N* c) {
    const auto block = [&](int64_t i, int64_t j, auto height, auto width) __attribute__((always_inline)) {
      constexpr int kHeight = decltype(height)::value, kWidth = decltype(width)::value;
      N sum[kHeight][kWidth];
      for (int p = 0; p < kHeight; ++p) {
        for (int q = 0; q < kWidth; ++q) sum[p][q] = add ? c[(i + p) * n + j + q] : N{};
      }
      for (int64_t r = 0; r < k; ++r) {
        N right[kWidth];
        for (int q = 0; q < kWidth; ++q) right[q] = OfB ? conjugate(b.at(r, j + q)) : b.at(r, j + q);
        for (int p = 0; p < kHeight; ++p) {
          const N left = OfA ? conjugate(a.at(i + p, r)) : a.at(i + p, r);
          for (int q = 0; q < kWidth; ++q) sum[p][q] += left * right[q];
        }
      }
      for (int p = 0; p < kHeight; ++p) {
        for (int q = 0; q < kWidth; ++q) c[(i + p) * n + j + q] = sum[p][q];
      }
    };
    const auto rows = [&](int64_t i, auto height) __attribute__((always_inline)) {
      int64_t j = 0;
      for (; j + 4 <= n; j += 4) block(i, j, height, std::integral_constant<int, 4>{});
      for (; j < n; ++j) block(i, j, height, std::integral_constant<int, 1>{});
    };
    int64_t i = 0;
    for (; i + 2 <= m; i += 2) rows(i, std::integral_constant<int, 2>{});
    if (i < m) rows(i, std::integral_constant<int, 1>{});
  }
};
template <bool OfA, bool OfB, class N>
void multiply(const InLanes<N>& a, const InLanes<N>& b, int64_t m, int64_t k, int64_t n, N* c, bool add = false) {
  constexpr bool kComplex = NumberTraits<N>::kComplex;
  run_native<sizeof(RealOf<N>), Multiply<OfA && kComplex, OfB && kComplex, N>>(a, b, m, k, n, add, c);
}

template <class D, class S, int Bytes>
struct LaneGroup {
  using N = typename LanesOf<S, Bytes>::type;
  using R = RealOf<N>;
  using T = RealOf<S>;
  using Mask = LaneMask<T, Bytes>;
  static constexpr int kCount = kLanesIn<N>, kParts = 10;
  static constexpr bool kComplex = NumberTraits<S>::kComplex;

  struct Spectrum {
    const R* s;
    Limits<R> limits;
    Mask redo;  // the matrices that have values near each other
  };

  HOST_DEVICE static Spectrum spectrum(const MatrixBatch<const T>& from, const SpectrumOptions& options, int64_t first,
                                       int64_t count, int64_t k, bool with_complement, R* s) {
    gather(from, first, count, 1, static_cast<int>(k), s);
    R largest{};
    for (int64_t i = 0; i < k; ++i) largest = larger(largest, absolute(s[i]));
    Spectrum at{s, limits_of(largest, options), Mask{}};
    if (at.limits.broad) return at;
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < i; ++j) at.redo = at.redo | (absolute(s[i] - s[j]) <= at.limits.window);
      if ((D::kSvd && kComplex) || with_complement)
        at.redo = at.redo | (absolute(s[i] + s[i]) <= at.limits.window + at.limits.window);
    }
    return at;
  }

  // put(i, j, q_ij, r_ij) for all i and j.
  template <class Put>
  HOST_DEVICE static void quotients(const Spectrum& at, const N* x, const N* y, int64_t k, const Put& put) {
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        const int64_t a = i * k + j, b = j * k + i;
        if (i == j && !kComplex) {
          put(i, i, Two<N>{});
          continue;
        }
        const Entries<N> entries{x[a], x[b], y == nullptr ? N{} : y[a], y == nullptr ? N{} : y[b]};
        Two<N> t = plain<D>(entries, at.s[i], at.s[j], at.limits);
        if (i == j) {
          t.difference = N{};
        } else {
          put(j, i, turned<D>(t));
        }
        put(i, j, t);
      }
    }
  }

  // out += (left - projected) / s.
  HOST_DEVICE static void complement(const Spectrum& at, const N* left, const N* projected, int64_t rows,
                                     int64_t columns, bool by_columns, bool add, N* out) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t e = i * columns + j;
        const R d = at.s[by_columns ? j : i];
        const R inverse = at.limits.broad ? broadened(d, at.limits) : real_number<R>(1) / d;
        const N part = (left[e] - projected[e]) * inverse;
        out[e] = add ? out[e] + part : part;
      }
    }
  }

  // Where the phase of a vector may matter: where |N_ii| is near the bound of the rules, or above.
  HOST_DEVICE static Mask phases(const N* x, const N* y, const N* gu, const N* gvh, int64_t m, int64_t n, int64_t k) {
    Mask found{};
    const T factor = noise_of<T>(1, std::max(m, n)) / square_root(std::numeric_limits<T>::epsilon());
    for (int64_t i = 0; i < k; ++i) {
      R left{}, right{};
      for (int64_t r = 0; gu != nullptr && r < m; ++r) left += square_modulus(gu[r * k + i]);
      for (int64_t c = 0; gvh != nullptr && c < n; ++c) right += square_modulus(gvh[i * n + c]);
      const R noise = (square_root(left) + square_root(right)) * real_number<R>(factor / 2);
      const int64_t e = i * (k + 1);
      found = found | !(absolute((x == nullptr ? R{} : x[e].im) + (y == nullptr ? R{} : y[e].im)) <= noise);
    }
    return found;
  }

  HOST_DEVICE static void mark(const Mask& redo, int64_t count, bool* to) {
    for (int64_t w = 0; w < count; ++w) to[w] = redo.v[w] != 0;
  }
};

// Matrices [first, first + count); those marked in `redo` need rules, and their results stand for nothing.
template <class D, class S, int Bytes>
struct TinyPull {
  using Group = LaneGroup<D, S, Bytes>;
  using N = typename Group::N;
  using R = typename Group::R;

  HOST_DEVICE static void run(const PullOperands<S>& at, int64_t first, int64_t count, N* memory, bool* redo) {
    const int64_t m = at.m, n = at.n, k = at.k, size = std::max(m, n) * std::max(m, n);
    const auto part = [&](int p) { return memory + p * size; };
    const auto read = [&](const MatrixBatch<const S>& from, int64_t rows, int64_t columns, int p) -> N* {
      if (from.data == nullptr) return nullptr;
      gather(from, first, count, static_cast<int>(rows), static_cast<int>(columns), part(p));
      return part(p);
    };
    const N* u = read(at.u, m, k, 0);
    const N* vh = D::kSvd ? read(at.vh, k, n, 1) : nullptr;
    const N *gu = read(at.gu, m, k, 2), *gvh = read(at.gvh, k, n, 3);
    N *x = gu == nullptr ? nullptr : part(4), *y = gvh == nullptr ? nullptr : part(5);
    N *inner = part(6), *right = part(7), *projected = part(8), *out = part(9);
    R *s = reinterpret_cast<R*>(part(10)), *g = s + k;
    if (x != nullptr) multiply<true, false, N>({u, 1, k}, {gu, k, 1}, k, m, k, x);
    if (y != nullptr) multiply<false, true, N>({vh, n, 1}, {gvh, 1, n}, k, n, k, y);
    const bool tall = m > k && gu != nullptr, wide = n > k && gvh != nullptr;
    typename Group::Spectrum spectrum = Group::spectrum(at.s, at.options, first, count, k, tall || wide, s);
    if (at.gs.data != nullptr) gather(at.gs, first, count, 1, static_cast<int>(k), g);
    if constexpr (Group::kComplex) {
      if (!spectrum.limits.broad) spectrum.redo = spectrum.redo | Group::phases(x, y, gu, gvh, m, n, k);
    }
    if (x == nullptr && y == nullptr) {
      for (int64_t e = 0; e < k * k; ++e) inner[e] = N{};
    } else {
      Group::quotients(spectrum, x != nullptr ? x : y, y != nullptr && x != nullptr ? y : nullptr, k,
                       [&](int64_t i, int64_t j, const Two<N>& t) __attribute__((always_inline)) {
                         inner[i * k + j] = x != nullptr ? t.difference + t.sum : t.difference - t.sum;
                       });
    }
    for (int64_t i = 0; at.gs.data != nullptr && i < k; ++i) inner[i * (k + 1)] += from_real<N>(g[i]);
    const InLanes<N> v = D::kSvd ? InLanes<N>{vh, n, 1} : InLanes<N>{u, 1, n};
    multiply<false, !D::kSvd, N>({inner, k, 1}, v, k, k, n, right);
    if (wide) {
      multiply<true, false, N>({y, 1, k}, v, k, k, n, projected);
      Group::complement(spectrum, gvh, projected, k, n, false, true, right);
    }
    if (tall) {
      multiply<false, false, N>({u, k, 1}, {x, k, 1}, m, k, k, projected);
      Group::complement(spectrum, gu, projected, m, k, true, false, projected);
    }
    Group::mark(spectrum.redo, count, redo);
    multiply<false, false, N>({u, k, 1}, {right, n, 1}, m, k, n, out);
    if (tall) multiply<false, !D::kSvd, N>({projected, k, 1}, v, m, k, n, out, true);
    scatter(out, first, count, static_cast<int>(m), static_cast<int>(n), MatrixBatch<S>{at.ga, m * n, n, 1});
  }
};

template <class D, class S, int Bytes>
struct TinyPush {
  using Group = LaneGroup<D, S, Bytes>;
  using N = typename Group::N;
  using R = typename Group::R;

  HOST_DEVICE static void run(const PushOperands<S>& at, int64_t first, int64_t count, N* memory, bool* redo) {
    const int64_t m = at.m, n = at.n, k = at.k, size = std::max(m, n) * std::max(m, n);
    const auto part = [&](int p) { return memory + p * size; };
    const auto read = [&](const MatrixBatch<const S>& from, int64_t rows, int64_t columns, int p) {
      gather(from, first, count, static_cast<int>(rows), static_cast<int>(columns), part(p));
      return part(p);
    };
    const auto write = [&](const N* from, int64_t rows, int64_t columns, S* to) {
      scatter(from, first, count, static_cast<int>(rows), static_cast<int>(columns),
              MatrixBatch<S>{to, rows * columns, columns, 1});
    };
    const N *u = read(at.u, m, k, 0), *da = read(at.da, m, n, 2);
    const InLanes<N> v = D::kSvd ? InLanes<N>{read(at.vh, k, n, 1), n, 1} : InLanes<N>{u, 1, n};
    const InLanes<N> v_adjoint{v.data, v.column, v.row};
    N *p = part(3), *outer = part(4), *first_part = part(5), *second = part(6), *projected = part(7), *out = part(8);
    R* s = reinterpret_cast<R*>(part(10));
    if (n > k) {
      multiply<true, false, N>({u, 1, k}, {da, n, 1}, k, m, n, outer);
      multiply<false, D::kSvd, N>({outer, n, 1}, v_adjoint, k, n, k, p);
    } else {
      multiply<false, D::kSvd, N>({da, n, 1}, v_adjoint, m, n, k, outer);
      multiply<true, false, N>({u, 1, k}, {outer, k, 1}, k, m, k, p);
    }
    const typename Group::Spectrum spectrum = Group::spectrum(at.s, at.options, first, count, k, m > k || n > k, s);
    Group::mark(spectrum.redo, count, redo);
    Group::quotients(spectrum, p, nullptr, k,
                     [&](int64_t i, int64_t j, const Two<N>& t) __attribute__((always_inline)) {
                       first_part[i * k + j] = t.sum + t.difference;
                       second[i * k + j] = t.sum - t.difference;
                     });
    multiply<false, false, N>({u, k, 1}, {first_part, k, 1}, m, k, k, out);
    if (m > k) {
      multiply<false, false, N>({u, k, 1}, {p, k, 1}, m, k, k, projected);
      Group::complement(spectrum, outer, projected, m, k, true, true, out);
    }
    write(out, m, k, at.du);
    if constexpr (D::kSvd) {
      multiply<false, false, N>({second, k, 1}, v, k, k, n, out);
      if (n > k) {
        multiply<false, false, N>({p, k, 1}, v, k, k, n, projected);
        Group::complement(spectrum, outer, projected, k, n, false, true, out);
      }
      write(out, k, n, at.dvh);
    }
    R* values = s + k;
    for (int64_t i = 0; i < k; ++i) values[i] = real_part(p[i * (k + 1)]);
    scatter(values, first, count, 1, static_cast<int>(k), MatrixBatch<RealOf<S>>{at.ds, k, k, 1});
  }
};

// --- the routes -----------------------------------------------------------------------------------------------------

struct Cpu {
  static Tensor no_doubts(const Tensor& like) {
    AtenTensorHandle made = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
        0, nullptr, nullptr, aoti_torch_dtype_bool(), aoti_torch_device_type_cpu(), like.get_device_index(), &made));
    Tensor doubts(made);
    *static_cast<bool*>(doubts.mutable_data_ptr()) = false;
    return doubts;
  }

  template <class D>
  static void quotients(const SpectraTensors& tensors, const Decomposition& at, Tensor& out, Tensor* out2,
                        Tensor& doubts) {
    dispatch_matrix(at.u.scalar_type(), "", "", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Spectra<S> spectra = tensors.view<S>(at);
      S* to = static_cast<S*>(out.mutable_data_ptr());
      S* to2 = out2 == nullptr ? nullptr : static_cast<S*>(out2->mutable_data_ptr());
      const int64_t size = at.k * at.k;
      Doubts found(doubts);
      parallel_for(spectra.count, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          found |= Spectrum<D, S>(spectra, b).quotients(to + b * size, to2 == nullptr ? nullptr : to2 + b * size);
        }
      });
    });
  }

  template <class D>
  static void complement(const SpectraTensors& tensors, const Decomposition& at, const Tensor& projected,
                         bool by_columns, Tensor& out, Tensor& doubts) {
    dispatch_matrix(at.u.scalar_type(), "", "", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Spectra<S> spectra = tensors.view<S>(at);
      const Tensor kept = torch::stable::contiguous(projected);
      const S* from = static_cast<const S*>(kept.const_data_ptr());
      S* to = static_cast<S*>(out.mutable_data_ptr());
      const int64_t size = at.k * (by_columns ? at.m : at.n);
      Doubts found(doubts);
      parallel_for(spectra.count, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          found |= Spectrum<D, S>(spectra, b).complement(from + b * size, by_columns, to + b * size);
        }
      });
    });
  }

  // One of the first two routes over a batch; one(b, scratch) takes a matrix by the second, and says whether rule 4
  // applied.
  template <int Bytes, class Tiny, class S, class All, class One>
  static void run_small(const Decomposition& at, const All& all, Tensor& doubts, const One& one) {
    using Group = typename Tiny::Group;
    const int64_t size = std::max(at.m, at.n), work = 2 * (at.m + at.n) * at.k * at.k + 1, count = at.batch();
    // by groups of lanes also where threads share the work, so that no result depends on their number
    const int64_t group = size <= kTiny && at.k != kFull<S> ? Group::kCount : 1, groups = (count + group - 1) / group;
    Doubts found(doubts);
    parallel_for(groups, std::max<int64_t>(1, 4 * kGrain / (work * group)), [&](int64_t begin, int64_t end) {
      Scratch<S> memory(at.m, at.n);
      if (group == 1) {
        for (int64_t b = begin; b < end; ++b) found |= one(b, memory);
        return;
      }
      const std::unique_ptr<typename Group::N[]> lanes(new typename Group::N[Group::kParts * size * size + 2 * size]);
      for (int64_t first = begin * group; first < std::min(count, end * group); first += group) {
        bool redo[Group::kCount];
        const int64_t here = std::min(group, count - first);
        if (2 * here < group) {  // the results are the same
          for (int64_t w = 0; w < here; ++w) found |= one(first + w, memory);
          continue;
        }
        run_native<Bytes, Tiny>(all, first, here, lanes.get(), static_cast<bool*>(redo));
        for (int64_t w = 0; w < here; ++w) {
          if (redo[w]) found |= one(first + w, memory);
        }
      }
    });
  }

  template <class D>
  static Tensor pull_back(const char* where, const Cotangents& g, const Decomposition& at, Tensor& doubts) {
    if (std::max(at.m, at.n) > kSmall) return manualgrad::pull_back<D, Cpu>(g, at, doubts);
    return small_pull_back<D>(where, g, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        run_small<kBytes, TinyPull<D, S, kBytes>, S>(
            at, all, doubts, [&](int64_t b, Scratch<S>& memory) { return small_pull<D>(all, b, memory); });
      });
    });
  }

  template <class D>
  static Tangents push_forward(const char* where, const Tensor& da, const Decomposition& at, Tensor& doubts) {
    if (std::max(at.m, at.n) > kSmall) return manualgrad::push_forward<D, Cpu>(da, at, doubts);
    return small_push_forward<D>(where, da, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        run_small<kBytes, TinyPush<D, S, kBytes>, S>(
            at, all, doubts, [&](int64_t b, Scratch<S>& memory) { return small_push<D>(all, b, memory); });
      });
    });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) {
  using Operators = manualgrad::SpectrumOperators<manualgrad::Cpu>;
  m.impl("svd_pullback", TORCH_BOX(&Operators::svd_pullback));
  m.impl("svd_pushforward", TORCH_BOX(&Operators::svd_pushforward));
  m.impl("eigh_pullback", TORCH_BOX(&Operators::eigh_pullback));
  m.impl("eigh_pushforward", TORCH_BOX(&Operators::eigh_pushforward));
}
