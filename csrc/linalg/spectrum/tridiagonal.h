// Eigenvalues and eigenvectors of one real symmetric matrix at a time: Householder's reduction to a tridiagonal matrix
// T, Q T Q^T, then the implicit QL method for T. Host code.
//
// All expensive steps go along rows, in vectors. No sum depends on the width of the vectors: in a sum of rows each
// entry is a sum of its own, and other sums consist of kSums partial ones. The rotations of QL are stored until those
// of many sweeps can be applied to some columns of all rows, which then stay in the cache.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "../../base/simd.h"
#include "../../math/jacobi.h"
#include "../blas/cached_matrix.h"

namespace manualgrad {

// Rows i and i + 1 become c Y_i - s Y_(i+1) and s Y_i + c Y_(i+1).
template <class T>
struct Turn {
  T c, s;
};
// The rotations of the rows [first, last], from the last two rows on.
struct Sweep {
  int first, last;
};

// One matrix of order n, with rows `pitch` apart, its parts, and memory for them.
template <class T>
class SymmetricMatrix {
 public:
  static constexpr int kTurns = 2048, kSweepsAtOnce = 256, kVectors = 8;

  explicit SymmetricMatrix(int size_of_it)
      : n(size_of_it),
        pitch(apart(row_pitch<T>(n))),
        order(n),
        sweeps(kSweepsAtOnce),
        memory_(new char[(2 * size() + kVectors * pitch + 2 * kTurns) * sizeof(T) + kLaneBytes]) {
    const uintptr_t start = reinterpret_cast<uintptr_t>(memory_.get());
    first = reinterpret_cast<T*>((start + kLaneBytes - 1) / kLaneBytes * kLaneBytes);
    second = first + size();
    T* next = second + size();
    for (T** vector : {&values, &e, &tau, &v, &w, &x, &y, &zero}) {
      *vector = next;
      std::fill(next, next + pitch, T(0));
      next += pitch;
    }
    turns = reinterpret_cast<Turn<T>*>(next);
  }

  // Reads one triangle of matrix b, and mirrors it.
  void read(const MatrixBatch<const T>& from, int64_t b, bool lower) {
    load_rows(from, b, n, n, first, pitch);
    load_rows(from.transposed(), b, n, n, second, pitch);
    for (int i = 0; i < n; ++i) {
      const T* other = second + i * pitch;
      std::copy(other + (lower ? i : 0), other + (lower ? n : i), first + i * pitch + (lower ? i : 0));
    }
  }

  // Transposes Q in `second` to Q^T in `first`.
  void turn() { turn(first, pitch); }

  // The eigenvectors are rows of `second`.
  void write(T* l, T* to) const {
    for (int i = 0; i < n; ++i) l[i] = values[order[i]] / scaling.factor + scaling.poison;
    turn(to, n);
  }

  const int n, pitch;
  T *first, *second;                           // matrices
  T *values, *e, *tau, *v, *w, *x, *y, *zero;  // vectors: the diagonal of T, its off-diagonal, and the parts of Q
  Turn<T>* turns;
  std::vector<int> order;  // of the values
  std::vector<Sweep> sweeps;
  Scaling<T> scaling;

 private:
  size_t size() const { return static_cast<size_t>(n) * pitch; }

  // Rows a power of two apart would share few sets of the cache.
  static int apart(int pitch) { return pitch * sizeof(T) % 256 == 0 ? pitch + kRowStep<T> : pitch; }

  // A few columns at a time, so that the rows that they become fit into the cache.
  void turn(T* to, int to_pitch) const {
    constexpr int kColumns = 16;
    for (int j = 0; j < n; j += kColumns) {
      transpose(second + j, pitch, n, std::min(kColumns, n - j), to + j * to_pitch, to_pitch);
    }
  }

  std::unique_ptr<char[]> memory_;
};

template <class T, int Bytes>
struct RowVectors : RegisterTile<T, Bytes> {
  using Tile = RegisterTile<T, Bytes>;
  using Tile::kCount, Tile::load, Tile::store;
  static constexpr int kSums = kLaneBytes / static_cast<int>(sizeof(T));

  HOST_INLINE static void clear(T* x, int first, int last) {
    for (int j = first; j < last; ++j) x[j] = 0;
  }

  // The inner product of entries [first, last); both are multiples of kSums.
  HOST_INLINE static T inner(const T* x, const T* y, int first, int last) {
    T sums[kSums] = {};
    for (int j = first; j < last; j += kSums) {
      for (int q = 0; q < kSums; ++q) sums[q] += x[j + q] * y[j + q];
    }
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int q = 0; q < half; ++q) sums[q] += sums[q + half];
    }
    return sums[0];
  }

  // Rows i to i + Count: a_r -= a[r] x + b[r] y (without y where Two is false), then sum += f[r] a_r.
  template <int Count, bool Two>
  HOST_INLINE static void step(T* rows, int pitch, int first, const T* a, const T* x, const T* b, const T* y,
                               const T* f, T* sum) {
    for (int j = first; j < pitch; j += kCount) {
      typename Tile::values total = load(sum + j), one = load(x + j), two = Two ? load(y + j) : one;
      for (int r = 0; r < Count; ++r) {
        typename Tile::values change = one * a[r];
        if constexpr (Two) change += two * b[r];
        const typename Tile::values row = load(rows + r * pitch + j) - change;
        store(rows + r * pitch + j, row);
        total += row * f[r];
      }
      store(sum + j, total);
    }
  }
  template <bool Two>
  HOST_INLINE static void steps(T* A, int n, int pitch, int row, int first, const T* a, const T* x, const T* b,
                                const T* y, const T* f, T* sum) {
    constexpr int kRows = 4;
    int i = row;
    for (; i + kRows <= n; i += kRows) {
      step<kRows, Two>(A + i * pitch, pitch, first, a + i, x, b + i, y, f + i, sum);
    }
    for (; i < n; ++i) step<1, Two>(A + i * pitch, pitch, first, a + i, x, b + i, y, f + i, sum);
  }
};

// A in `first` becomes Q^T A Q = T, with the diagonal `values` and the off-diagonal `e`; Q is in `second`.
template <class T, int Bytes>
struct Tridiagonalize : RowVectors<T, Bytes> {
  using Base = RowVectors<T, Bytes>;
  using Base::kCount, Base::kSums, Base::load, Base::store;

  HOST_INLINE static void run(SymmetricMatrix<T>* at) {
    scale(*at);
    reduce(*at);
    form(*at);
  }

  HOST_INLINE static void scale(SymmetricMatrix<T>& at) {
    typename Base::Tile::values largest{}, poison{};
    const int size = at.n * at.pitch;
    for (int j = 0; j < size; j += kCount) {
      const auto a = load(at.first + j), size_of_a = a < 0 ? -a : a;
      largest = size_of_a > largest ? size_of_a : largest;
      poison += a * T(0);
    }
    at.scaling = {0, 0};
    for (int q = 0; q < kCount; ++q) {
      at.scaling.factor = larger_of(T(largest[q]), at.scaling.factor);
      at.scaling.poison += poison[q];
    }
    at.scaling.factor = near_reciprocal(at.scaling.factor);
    const bool finite = at.scaling.poison == 0;
    for (int j = 0; j < size; ++j) at.first[j] = finite ? at.first[j] * at.scaling.factor : T(0);
  }

  // Reflector k, I - tau v v^T with v in row k, zero up to its entry k and one in the next, makes entries k + 2 on of
  // row k zero. Its update of the rows after it, - v w^T - w v^T, is applied when the next reflector reads them.
  HOST_INLINE static void reduce(SymmetricMatrix<T>& at) {
    const int n = at.n, pitch = at.pitch;
    T *w = at.w, *product = at.x;
    const T* before = at.zero;
    Base::clear(w, 0, pitch);
    for (int k = 0; k < n; ++k) {
      T* v = at.first + k * pitch;
      const int start = k / kSums * kSums;
      for (int j = start; j < pitch; ++j) v[j] -= before[k] * w[j] + w[k] * before[j];
      at.values[k] = v[k];
      at.tau[k] = at.e[k] = 0;
      if (k == n - 1) return;
      const T alpha = v[k + 1];
      Base::clear(v, start, k + 2);
      const T rest = Base::inner(v, v, start, pitch);
      T factor = 0;
      if (rest > least_square<T>()) {
        const T norm = square_root(alpha * alpha + rest), beta = alpha >= 0 ? -norm : norm;
        at.tau[k] = (beta - alpha) / beta;
        at.e[k] = beta;
        factor = 1 / (alpha - beta);
      } else {
        at.e[k] = alpha;
      }
      for (int j = start; j < pitch; ++j) v[j] *= factor;
      v[k + 1] = factor == 0 ? 0 : 1;
      Base::clear(product, start, pitch);
      Base::template steps<true>(at.first, n, pitch, k + 1, k / kCount * kCount, before, w, w, before, v, product);
      Base::clear(product, start, k + 1);
      const T tau = at.tau[k], half = tau * tau * Base::inner(product, v, start, pitch) / 2;
      for (int j = start; j < pitch; ++j) w[j] = product[j] * tau - v[j] * half;
      before = v;
    }
  }

  // Q, the product of the reflectors, from the last one on: each adds - tau v u^T with u = Q^T v, when the next one
  // reads the rows.
  HOST_INLINE static void form(SymmetricMatrix<T>& at) {
    const int n = at.n, pitch = at.pitch;
    T *Q = at.second, *u = at.x, *next = at.y, *scaled = at.v;
    Base::clear(Q, 0, n * pitch);
    for (int i = 0; i < n; ++i) Q[i * (pitch + 1)] = 1;
    Base::clear(u, 0, pitch);
    Base::clear(scaled, 0, pitch);
    for (int k = n - 3; k >= -1; --k) {
      const T* v = k < 0 ? at.zero : at.first + k * pitch;
      const int first = (k + 1) / kCount * kCount;
      Base::clear(next, first, pitch);
      Base::template steps<false>(Q, n, pitch, k + 1, first, scaled, u, scaled, u, v, next);
      if (k < 0) return;
      std::swap(u, next);
      for (int j = first; j < pitch; ++j) scaled[j] = v[j] * at.tau[k];
    }
  }
};

// The eigenvalues of T in `values`, ascending by `order`. The rotations that make T diagonal are applied to the rows of
// `first`. In this order, with signs by the convention in math/jacobi.h, they become the rows of `second`.
template <class T, int Bytes>
struct DiagonalizeTridiagonal : RowVectors<T, Bytes> {
  using Base = RowVectors<T, Bytes>;
  using Base::kCount, Base::load, Base::store;
  using values = typename Base::Tile::values;
  // Usually fewer than 2 are needed; a matrix that needs more than this many gets nan.
  static constexpr int kSweepsPerValue = 30;

  HOST_INLINE static void run(SymmetricMatrix<T>* matrix) {
    SymmetricMatrix<T>& at = *matrix;
    const int n = at.n;
    const T small = square_root(least_square<T>());
    T *d = at.values, *e = at.e;
    int turns = 0, sweeps = 0;
    for (int first = 0, left = kSweepsPerValue * n; first < n;) {
      int last = first;
      while (last < n - 1 && !negligible(e[last], d[last], d[last + 1], small)) ++last;
      if (last == first) {
        ++first;
        continue;
      }
      if (--left < 0) {
        at.scaling.poison = std::numeric_limits<T>::quiet_NaN();
        return;
      }
      if (turns + last - first > SymmetricMatrix<T>::kTurns || sweeps == SymmetricMatrix<T>::kSweepsAtOnce) {
        apply(at, sweeps);
        turns = sweeps = 0;
      }
      const int stopped = sweep(d, e, first, last, at.turns + turns);
      at.sweeps[sweeps++] = {stopped, last};
      turns += last - stopped;
    }
    apply(at, sweeps);
    arrange(at);
  }

  HOST_INLINE static void arrange(SymmetricMatrix<T>& at) {
    for (int i = 0; i < at.n; ++i) {
      int place = i;
      for (; place > 0 && at.values[at.order[place - 1]] > at.values[i]; --place) at.order[place] = at.order[place - 1];
      at.order[place] = i;
    }
    for (int i = 0; i < at.n; ++i) {
      const T* from = at.first + at.order[i] * at.pitch;
      T* to = at.second + i * at.pitch;
      values largest{};
      for (int j = 0; j < at.pitch; j += kCount) {
        const values x = load(from + j), square = x * x;
        largest = square > largest ? square : largest;
      }
      T limit = 0;
      for (int q = 0; q < kCount; ++q) limit = larger_of(T(largest[q]), limit);
      limit *= phase_limit<T>();
      int chosen = 0;
      while (chosen < at.n - 1 && from[chosen] * from[chosen] < limit) ++chosen;
      const T sign = from[chosen] < 0 ? -1 : 1;
      for (int j = 0; j < at.pitch; j += kCount) store(to + j, load(from + j) * sign + at.scaling.poison);
    }
  }

  HOST_INLINE static bool negligible(T e, T left, T right, T small) {
    const T size = absolute(e);
    return size <= epsilon_times<T>(0.5) * (absolute(left) + absolute(right)) || size <= small;
  }

  // One sweep with Wilkinson's shift; returns where it ended: at `first`, or where T fell apart.
  HOST_INLINE static int sweep(T* d, T* e, int first, int last, Turn<T>* to) {
    T g = (d[first + 1] - d[first]) / (2 * e[first]);
    const T root = square_root(g * g + 1);
    g = d[last] - d[first] + e[first] / (g >= 0 ? g + root : g - root);
    T s = 1, c = 1, moved = 0;
    for (int i = last - 1; i >= first; --i) {
      const T f = s * e[i], b = c * e[i];
      T size;
      if (!normalize(f, g, s, c, size)) {
        d[i + 1] -= moved;
        e[i + 1] = e[last] = 0;
        return i + 1;
      }
      e[i + 1] = size;
      g = d[i + 1] - moved;
      const T r = (d[i] - g) * s + 2 * c * b;
      moved = s * r;
      d[i + 1] = g + moved;
      g = c * r - b;
      *to++ = {c, s};
    }
    d[first] -= moved;
    e[first] = g;
    e[last] = 0;
    return first;
  }

  // (s, c) = (f, g) / size, size = |(f, g)|; false if that is zero.
  HOST_INLINE static bool normalize(T f, T g, T& s, T& c, T& size) {
    // the factor for small numbers, so that their squares have all digits
    constexpr T kUp = sizeof(T) == 4 ? T(0x1p90) : T(0x1p700);
    T square = f * f + g * g, factor = 1;
    if (square < least_square<T>()) {
      f *= kUp;
      g *= kUp;
      factor = kUp;
      square = f * f + g * g;
      if (square == 0) return false;
    }
    size = square_root(square);
    const T inverse = 1 / size;
    s = f * inverse;
    c = g * inverse;
    size /= factor;
    return true;
  }

  HOST_INLINE static void apply(SymmetricMatrix<T>& at, int sweeps) {
    int j = 0;
    for (; j + 4 * kCount <= at.pitch; j += 4 * kCount) columns<4>(at, j, sweeps);
    for (; j + 2 * kCount <= at.pitch; j += 2 * kCount) columns<2>(at, j, sweeps);
    for (; j < at.pitch; j += kCount) columns<1>(at, j, sweeps);
  }
  template <int Vectors>
  HOST_INLINE static void columns(SymmetricMatrix<T>& at, int first, int sweeps) {
    const int pitch = at.pitch;
    const Turn<T>* turn = at.turns;
    for (int q = 0; q < sweeps; ++q) {
      const Sweep sweep = at.sweeps[q];
      T* row = at.first + sweep.last * pitch + first;
      values carried[Vectors];
      for (int v = 0; v < Vectors; ++v) carried[v] = load(row + v * kCount);
      for (int i = sweep.last; i > sweep.first; --i, ++turn, row -= pitch) {
        for (int v = 0; v < Vectors; ++v) {
          const values other = load(row - pitch + v * kCount);
          store(row + v * kCount, other * turn->s + carried[v] * turn->c);
          carried[v] = other * turn->c - carried[v] * turn->s;
        }
      }
      for (int v = 0; v < Vectors; ++v) store(row + v * kCount, carried[v]);
    }
  }
};

}  // namespace manualgrad
