// The derivatives of small decompositions on the CPU, one matrix per lane. Host code.
#pragma once

#include "../../math/product.h"
#include "../lanes/transpose.h"
#include "small.h"

namespace manualgrad {

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

  HOST_INLINE static Spectrum spectrum(const MatrixBatch<const T>& from, const SpectrumOptions& options, int64_t first,
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
  HOST_INLINE static void quotients(const Spectrum& at, const N* x, const N* y, int64_t k, const Put& put) {
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
  HOST_INLINE static void complement(const Spectrum& at, const N* left, const N* projected, int64_t rows,
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
  HOST_INLINE static Mask phases(const N* x, const N* y, const N* gu, const N* gvh, int64_t m, int64_t n, int64_t k) {
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

  HOST_INLINE static void mark(const Mask& redo, int64_t count, bool* to) {
    for (int64_t w = 0; w < count; ++w) to[w] = redo.v[w] != 0;
  }
};

// Matrices [first, first + count); those marked in `redo` need the rules, and their results are invalid.
template <class D, class S, int Bytes>
struct LaneVjp {
  using Group = LaneGroup<D, S, Bytes>;
  using N = typename Group::N;
  using R = typename Group::R;
  static constexpr Factor kOfV = D::kSvd ? Factor::kPlain : Factor::kConjugate;

  HOST_INLINE static void run(const VjpOperands<S>& at, int64_t first, int64_t count, N* memory, bool* redo) {
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
    if (x != nullptr) product<Sum::kReplace, Factor::kConjugate>(SingleThread{}, {u, 1, k}, {gu, k, 1}, k, m, k, x);
    if (y != nullptr)
      product<Sum::kReplace, Factor::kPlain, Factor::kConjugate>(SingleThread{}, {vh, n, 1}, {gvh, 1, n}, k, n, k, y);
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
                       [&](int64_t i, int64_t j, const Two<N>& t) MANUALGRAD_INLINED {
                         inner[i * k + j] = x != nullptr ? t.difference + t.sum : t.difference - t.sum;
                       });
    }
    for (int64_t i = 0; at.gs.data != nullptr && i < k; ++i) inner[i * (k + 1)] += from_real<N>(g[i]);
    const StridedMatrix<const N> v = D::kSvd ? StridedMatrix<const N>{vh, n, 1} : StridedMatrix<const N>{u, 1, n};
    product<Sum::kReplace, Factor::kPlain, kOfV>(SingleThread{}, {inner, k, 1}, v, k, k, n, right);
    if (wide) {
      product<Sum::kReplace, Factor::kConjugate>(SingleThread{}, {y, 1, k}, v, k, k, n, projected);
      Group::complement(spectrum, gvh, projected, k, n, false, true, right);
    }
    if (tall) {
      product<Sum::kReplace>(SingleThread{}, {u, k, 1}, {x, k, 1}, m, k, k, projected);
      Group::complement(spectrum, gu, projected, m, k, true, false, projected);
    }
    Group::mark(spectrum.redo, count, redo);
    product<Sum::kReplace>(SingleThread{}, {u, k, 1}, {right, n, 1}, m, k, n, out);
    if (tall) product<Sum::kAdd, Factor::kPlain, kOfV>(SingleThread{}, {projected, k, 1}, v, m, k, n, out);
    scatter(out, first, count, static_cast<int>(m), static_cast<int>(n), MatrixBatch<S>{at.ga, m * n, n, 1});
  }
};

template <class D, class S, int Bytes>
struct LaneJvp {
  using Group = LaneGroup<D, S, Bytes>;
  using N = typename Group::N;
  using R = typename Group::R;
  static constexpr Factor kOfAdjoint = D::kSvd ? Factor::kConjugate : Factor::kPlain;  // of V

  HOST_INLINE static void run(const JvpOperands<S>& at, int64_t first, int64_t count, N* memory, bool* redo) {
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
    const StridedMatrix<const N> v =
        D::kSvd ? StridedMatrix<const N>{read(at.vh, k, n, 1), n, 1} : StridedMatrix<const N>{u, 1, n};
    const StridedMatrix<const N> v_adjoint{v.data, v.column, v.row};
    N *p = part(3), *outer = part(4), *first_part = part(5), *second = part(6), *projected = part(7), *out = part(8);
    R* s = reinterpret_cast<R*>(part(10));
    if (n > k) {
      product<Sum::kReplace, Factor::kConjugate>(SingleThread{}, {u, 1, k}, {da, n, 1}, k, m, n, outer);
      product<Sum::kReplace, Factor::kPlain, kOfAdjoint>(SingleThread{}, {outer, n, 1}, v_adjoint, k, n, k, p);
    } else {
      product<Sum::kReplace, Factor::kPlain, kOfAdjoint>(SingleThread{}, {da, n, 1}, v_adjoint, m, n, k, outer);
      product<Sum::kReplace, Factor::kConjugate>(SingleThread{}, {u, 1, k}, {outer, k, 1}, k, m, k, p);
    }
    const typename Group::Spectrum spectrum = Group::spectrum(at.s, at.options, first, count, k, m > k || n > k, s);
    Group::mark(spectrum.redo, count, redo);
    Group::quotients(spectrum, p, nullptr, k, [&](int64_t i, int64_t j, const Two<N>& t) MANUALGRAD_INLINED {
      first_part[i * k + j] = t.sum + t.difference;
      second[i * k + j] = t.sum - t.difference;
    });
    product<Sum::kReplace>(SingleThread{}, {u, k, 1}, {first_part, k, 1}, m, k, k, out);
    if (m > k) {
      product<Sum::kReplace>(SingleThread{}, {u, k, 1}, {p, k, 1}, m, k, k, projected);
      Group::complement(spectrum, outer, projected, m, k, true, true, out);
    }
    write(out, m, k, at.du);
    if constexpr (D::kSvd) {
      product<Sum::kReplace>(SingleThread{}, {second, k, 1}, v, k, k, n, out);
      if (n > k) {
        product<Sum::kReplace>(SingleThread{}, {p, k, 1}, v, k, k, n, projected);
        Group::complement(spectrum, outer, projected, k, n, false, true, out);
      }
      write(out, k, n, at.dvh);
    }
    R* values = s + k;
    for (int64_t i = 0; i < k; ++i) values[i] = real_part(p[i * (k + 1)]);
    scatter(values, first, count, 1, static_cast<int>(k), MatrixBatch<RealOf<S>>{at.ds, k, k, 1});
  }
};

}  // namespace manualgrad
