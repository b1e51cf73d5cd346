// The step that the derivatives of triangular factors are made of: on a part of a row or a column, whose entries are
// shared among the threads of a group. N is a number of number.h; matrices are row-major, without gaps unless there is
// a `pitch`, the distance between neighbouring rows.
#pragma once

#include "matrix.h"
#include "thread_group.h"
#if !defined(__CUDACC__)
#include "../base/simd.h"
#endif

namespace manualgrad {

// Entries `step` apart.
template <class N>
struct StridedVector {
  N* data;
  int64_t step;
  HOST_DEVICE N& operator[](int i) const { return data[i * step]; }
};
struct Unscaled {};
template <class N>
HOST_DEVICE N scaled(const N& a, Unscaled) {
  return a;
}
template <class N>
HOST_DEVICE N scaled(const N& a, const N& by) {
  return a * by;
}

enum class Sum { kAdd, kSubtract, kReplace, kReplaceNegative };
enum class Factor { kPlain, kConjugate };

template <Sum How, Factor Of, int Width, class N, class Scale>
HOST_DEVICE void step_some(const StridedVector<N>& c, const StridedVector<const N>& a, const StridedMatrix<const N>& b,
                           int depth, int first, const Scale& scale) {
  N sum[Width];
  for (int q = 0; q < Width; ++q) sum[q] = How == Sum::kAdd || How == Sum::kSubtract ? c[first + q] : N{};
  for (int k = 0; k < depth; ++k) {
    const N factor = Of == Factor::kConjugate ? conjugate(a[k]) : a[k];
    for (int q = 0; q < Width; ++q) {
      if constexpr (How == Sum::kAdd || How == Sum::kReplace) {
        sum[q] += factor * b.at(k, first + q);
      } else {
        sum[q] -= factor * b.at(k, first + q);
      }
    }
  }
  for (int q = 0; q < Width; ++q) c[first + q] = scaled(sum[q], scale);
}

template <Sum How, Factor Of>
struct Step {
  template <class N, class Scale>
  HOST_DEVICE static void run(const StridedVector<N>& c, const StridedVector<const N>& a,
                              const StridedMatrix<const N>& b, int depth, int count, const Scale& scale) {
    constexpr int kWidth = 4;
    int j = 0;
    for (; j + kWidth <= count; j += kWidth) step_some<How, Of, kWidth>(c, a, b, depth, j, scale);
    for (; j < count; ++j) step_some<How, Of, 1>(c, a, b, depth, j, scale);
  }
};

// Whether linalg/blas/shared_loops.cpp compiles Body. shared_loops.h lists the bodies for which it does.
template <class Body>
inline constexpr bool kIsShared = false;

// Body::run(args...) by one thread. On the host it is a function of its own for each instruction set, which all callers
// share: that of the lanes of N. Inlined into each of them, it would be most of the library.
template <class Threads, class N, class Body, class... Args>
HOST_DEVICE void run_shared(const Args&... args) {
#if !defined(__CUDACC__)
  if constexpr (!std::is_same_v<Threads, InlinedThread>) {
    if constexpr (kIsShared<Body>) {
      run_shared_native<kVectorBytes<N>, Body>(args...);
    } else {
      run_native<kVectorBytes<N>, Body>(args...);
    }
    return;
  }
#endif
  Body::run(args...);
}

// c(j) := (c(j) -+ sum over k < depth of a(k) b(k, j)) scale for j < count, in order of k; a conjugated if it says so.
template <Sum How, Factor Of, class Threads, class N, class Scale = Unscaled>
HOST_DEVICE void step(const Threads& threads, const StridedVector<N>& c, const StridedVector<const N>& a,
                      const StridedMatrix<const N>& b, int depth, int count, const Scale& scale = {}) {
  if constexpr (kIsOneThread<Threads>) {
    using Body = Step<How, NumberTraits<N>::kComplex ? Of : Factor::kPlain>;
    if (count > 0) run_shared<Threads, N, Body>(c, a, b, depth, count, scale);
  } else {
    for (int j = threads.rank(); j < count; j += threads.size()) step_some<How, Of, 1>(c, a, b, depth, j, scale);
    threads.sync();
  }
}

// inverse[j] := 1 / F(j, j), or its conjugate.
template <Factor Of, class Threads, class N>
HOST_DEVICE void invert_diagonal(const Threads& threads, const N* F, int pitch, int count, N* inverse) {
  for (int j = threads.rank(); j < count; j += threads.size()) {
    const N one = reciprocal(F[j * pitch + j]);
    inverse[j] = Of == Factor::kConjugate ? conjugate(one) : one;
  }
  threads.sync();
}

// Clears a (m, n) below the diagonal, or on it and above.
template <class Threads, class N>
HOST_DEVICE void clear(const Threads& threads, Part part, N* a, int m, int n, int pitch) {
  for (int i = 0; i < m; ++i) {
    for (int j = threads.rank(); j < n; j += threads.size()) {
      if (belongs(part, i, j)) a[i * pitch + j] = N{};
    }
  }
  threads.sync();
}
template <class Threads, class N>
HOST_DEVICE void clear(const Threads& threads, Part part, N* a, int m, int n) {
  clear(threads, part, a, m, n, n);
}

}  // namespace manualgrad
