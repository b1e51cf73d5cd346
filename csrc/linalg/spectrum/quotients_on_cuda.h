// The quotients in the derivatives of decompositions on CUDA: the data of a matrix that the rules of
// math/degeneracy.h need, and then the quotients of a pair by one thread. Deterministic: every sum is computed by one
// thread in a fixed order, and a maximum does not depend on the order.
#pragma once

#include "../../base/cuda.h"
#include "decomposition.h"

namespace manualgrad {

namespace {

constexpr int kSpectrumThreads = 256;

// The data of the rules for a matrix. If its values are apart, the size is not set.
template <class T>
struct Judgement {
  Limits<T> limits;
  T size;
  bool near;
};

template <class S>
struct Matrix {
  using T = RealOf<S>;
  int64_t k;
  const S* x;
  const S* y;
  const T* s;
  const T* g;
  int64_t s_step, g_step;
  View<S> columns, rows;
  int64_t columns_length, rows_length;
  // The square norms of the columns, and after them of the rows: set where the values are near or S is complex.
  double* squares;
  Judgement<T>* judgement;

  __device__ Entries<S> entries(int64_t i, int64_t j) const {
    const int64_t a = i * k + j, b = j * k + i;
    return {x == nullptr ? S{} : x[a], x == nullptr ? S{} : x[b], y == nullptr ? S{} : y[a], y == nullptr ? S{} : y[b]};
  }
  __device__ T value(int64_t i) const { return s[i * s_step]; }
  __device__ T noise(int64_t i) const {
    return noise_of<T>(square_root(squares[i]) + square_root(squares[k + i]),
                       columns_length > rows_length ? columns_length : rows_length);
  }
};

template <class S>
__device__ Matrix<S> matrix(const Spectra<S>& of, int64_t b, double* squares, Judgement<RealOf<S>>* judgements) {
  const int64_t k = of.k;
  return {k,
          of.x == nullptr ? nullptr : of.x + b * k * k,
          of.y == nullptr ? nullptr : of.y + b * k * k,
          of.s.data + b * of.s.batch_stride,
          of.g.data == nullptr ? nullptr : of.g.data + b * of.g.batch_stride,
          of.s.column_stride,
          of.g.column_stride,
          view(of.columns, b),
          view(of.rows, b),
          of.columns_length,
          of.rows_length,
          squares + b * 2 * k,
          judgements + b};
}

template <class S>
__device__ double square_norm(const View<S>& from, int64_t length, int64_t j, bool by_columns) {
  double sum = 0;
  for (int64_t i = 0; from.data != nullptr && i < length; ++i) {
    const S entry = by_columns ? from.raw(i, j) : from.raw(j, i);
    if constexpr (NumberTraits<S>::kComplex) {
      sum += static_cast<double>(entry.re) * entry.re + static_cast<double>(entry.im) * entry.im;
    } else {
      sum += static_cast<double>(entry) * entry;
    }
  }
  return sum;
}

// The largest over the block, the same in all threads; nan if one is.
template <class T>
__device__ T largest_of_block(T value, T* shared) {
  __syncthreads();
  shared[threadIdx.x] = value;
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) shared[threadIdx.x] = larger(shared[threadIdx.x], shared[threadIdx.x + half]);
  }
  __syncthreads();
  return shared[0];
}

// Called by a whole block: the limits, and whether values are near.
template <class T>
__device__ Judgement<T> limits_and_near(const T* s, int64_t step, int64_t k, const SpectrumOptions& options,
                                        T* shared) {
  T largest = 0;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) largest = larger(largest, absolute(s[i * step]));
  const Limits<T> limits = limits_of(largest_of_block(largest, shared), options);
  bool near = false, ascending = true, descending = true;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
    const T value = s[i * step], next = s[(i + 1 < k ? i + 1 : i) * step];
    near |= absolute(value) <= limits.window || (i + 1 < k && absolute(next - value) <= limits.window);
    ascending &= value <= next;
    descending &= value >= next;
  }
  const bool sorted = __syncthreads_and(ascending) || __syncthreads_and(descending);
  return {limits, T(0), (__syncthreads_or(near) || !sorted) && !limits.broad};
}

// Of the columns, and after them of the rows.
template <class S>
__device__ double square_norm(const Matrix<S>& at, int64_t i) {
  return i < at.k ? square_norm(at.columns, at.columns_length, i, true)
                  : square_norm(at.rows, at.rows_length, i - at.k, false);
}

// The part of an entry in the size of a matrix with near values. x and y must be computed already.
template <class D, class S>
__device__ RealOf<S> size_at(const Matrix<S>& at, int64_t e, const Limits<RealOf<S>>& limits) {
  const int64_t i = e / at.k, j = e - i * at.k;
  if (j < i) return modulus_of(plain<D>(at.entries(i, j), at.value(i), at.value(j), limits).difference);
  return j == i && at.g != nullptr ? absolute(at.g[i * at.g_step]) : RealOf<S>(0);
}

// The data of the rules, by one block.
template <class D, class S>
__device__ void judge(const Matrix<S>& at, const SpectrumOptions& options, RealOf<S>* shared) {
  using T = RealOf<S>;
  Judgement<T> found = limits_and_near(at.s, at.s_step, at.k, options, shared);
  if (found.near || NumberTraits<S>::kComplex) {
    for (int64_t i = threadIdx.x; i < 2 * at.k; i += blockDim.x) at.squares[i] = square_norm(at, i);
  }
  if (found.near) {  // the same in all threads
    for (int64_t e = threadIdx.x; e < at.k * at.k; e += blockDim.x) {
      found.size = larger(found.size, size_at<D>(at, e, found.limits));
    }
    found.size = largest_of_block(found.size, shared);
  }
  if (threadIdx.x == 0) *at.judgement = found;
  __syncthreads();
}

// q_ij, or g_ii on the diagonal, and r_ij.
template <class D, class S>
__device__ Two<S> quotients(const Matrix<S>& at, int64_t i, int64_t j, bool* gauge_dependent) {
  using T = RealOf<S>;
  const Judgement<T> known = *at.judgement;
  if (at.x == nullptr && at.y == nullptr) return {i == j ? from_real<S>(at.g[i * at.g_step]) : S{}, S{}};
  auto rules = rules_of<S>(known.limits, [&] { return known.size; });
  const Entries<S> entries = at.entries(i, j);
  const T s[2] = {at.value(i), at.value(j)};
  Two<S> result{};
  if (i == j) {
    const T noise = known.near || NumberTraits<S>::kComplex ? at.noise(i) : T(0);
    result.sum = rules.template diagonal<D>(entries, s[0], noise);
    if (at.g != nullptr) result.difference = from_real<S>(at.g[i * at.g_step]);
  } else if (known.near && absolute(s[1] - s[0]) <= known.limits.window) {
    const auto diagonal = [&](int64_t d) {
      const Entries<S> there = at.entries(d, d);
      return spectral_diagonal<D>(there.x, there.y);
    };
    const T h_i = diagonal(i), h_j = diagonal(j), noise = at.noise(i) + at.noise(j);
    if (at.g == nullptr) {
      result = rules.template pair<D>(entries, 0, 1, s, static_cast<const T*>(nullptr), h_i, h_j, noise);
    } else {
      const T g[2] = {at.g[i * at.g_step], at.g[j * at.g_step]};
      result = rules.template pair<D>(entries, 0, 1, s, g, h_i, h_j, noise);
    }
  } else {
    result = plain<D>(entries, s[0], s[1], known.limits);
  }
  if (rules.gauge_dependent) *gauge_dependent = true;
  return result;
}

// (left - projected)_ij / s, with s_j for columns, s_i for rows.
template <class S>
__device__ S complement(const Matrix<S>& at, const S& projected, int64_t i, int64_t j, bool by_columns,
                        bool* gauge_dependent) {
  using T = RealOf<S>;
  const Judgement<T> known = *at.judgement;
  const int64_t of = by_columns ? j : i;
  const S rest = (by_columns ? at.columns : at.rows).raw(i, j) - projected;
  const T s = at.value(of);
  if (known.limits.broad) return rest * broadened(s, known.limits);
  if (!(absolute(s) <= known.limits.window)) return over(rest, s);
  auto rules = rules_of<S>(known.limits, [&] { return known.size; });
  const T noise = noise_of<T>(square_root(at.squares[by_columns ? of : at.k + of]),
                              by_columns ? at.columns_length : at.rows_length);
  const S result = rules.resolve(rest, s, noise);
  if (rules.gauge_dependent) *gauge_dependent = true;
  return result;
}

// --- large matrices -------------------------------------------------------------------------------------------------

// The data of the rules takes three kernels: the limits by one block for each matrix, then norms and sizes by many.
template <class S>
__global__ void __launch_bounds__(kSpectrumThreads)
    limits_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements) {
  __shared__ RealOf<S> shared[kSpectrumThreads];
  for (int64_t b = blockIdx.x; b < all.count; b += gridDim.x) {
    const Matrix<S> at = matrix(all, b, squares, judgements);
    const Judgement<RealOf<S>> found = limits_and_near(at.s, at.s_step, at.k, all.options, shared);
    if (threadIdx.x == 0) *at.judgement = found;
  }
}

template <class S>
__global__ void __launch_bounds__(kSpectrumThreads)
    squares_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < all.count * 2 * all.k; e += step) {
    const Matrix<S> at = matrix(all, e / (2 * all.k), squares, judgements);
    const int64_t i = e % (2 * all.k);
    if (at.judgement->near || NumberTraits<S>::kComplex) at.squares[i] = square_norm(at, i);
  }
}

// *at becomes the larger of the two, which are not negative: as integers, their bits have the order of the numbers, and
// nan is the largest.
template <class T>
__device__ void raise_to(T* at, T value) {
  using Bits = std::conditional_t<sizeof(T) == 4, unsigned, unsigned long long>;
  value = absolute(value);  // also the sign of nan
  Bits bits;
  memcpy(&bits, &value, sizeof(T));
  atomicMax(reinterpret_cast<Bits*>(at), bits);
}

// `parts` blocks for each matrix.
template <class D, class S>
__global__ void __launch_bounds__(kSpectrumThreads)
    size_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements, int64_t parts) {
  using T = RealOf<S>;
  __shared__ T shared[kSpectrumThreads];
  for (int64_t block = blockIdx.x; block < all.count * parts; block += gridDim.x) {
    const Matrix<S> at = matrix(all, block / parts, squares, judgements);
    if (!at.judgement->near) continue;  // the same in all threads
    const Limits<T> limits = at.judgement->limits;
    T size = 0;
    for (int64_t e = block % parts * blockDim.x + threadIdx.x; e < all.k * all.k; e += parts * blockDim.x) {
      size = larger(size, size_at<D>(at, e, limits));
    }
    size = largest_of_block(size, shared);
    if (threadIdx.x == 0) raise_to(&at.judgement->size, size);
  }
}

template <class D, class S>
__global__ void __launch_bounds__(kSpectrumThreads)
    quotients_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements, S* out, S* out2,
                     bool* gauge_dependent) {
  const int64_t size = all.k * all.k, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < all.count * size; e += step) {
    const int64_t b = e / size, i = (e - b * size) / all.k, j = (e - b * size) % all.k;
    const Two<S> t = quotients<D>(matrix(all, b, squares, judgements), i, j, gauge_dependent);
    out[e] = t.sum + t.difference;
    if (out2 != nullptr) out2[e] = t.sum - t.difference;
  }
}

template <class S>
__global__ void __launch_bounds__(kSpectrumThreads)
    complement_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements, const S* projected,
                      bool by_columns, S* out, bool* gauge_dependent) {
  const int64_t rows = by_columns ? all.columns_length : all.k, columns = by_columns ? all.k : all.rows_length;
  const int64_t size = rows * columns, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < all.count * size; e += step) {
    const int64_t b = e / size, i = (e - b * size) / columns, j = (e - b * size) % columns;
    out[e] = out[e] + complement(matrix(all, b, squares, judgements), projected[e], i, j, by_columns, gauge_dependent);
  }
}

}  // namespace
}  // namespace manualgrad
