// The derivatives of the SVD and of the Hermitian eigendecomposition on CUDA; the contract is in spectrum_plan.h.
//
// Small matrices: a block a matrix, all steps in shared memory. Large ones: torch's products of whole batches; between
// them one kernel finds what the rules need to know of each matrix (a block a matrix), and another computes the
// quotients (a thread a pair). All run on the current stream; nothing waits for the device. Deterministic: what is
// summed is summed by one thread in a fixed order.
#include "../spectrum_plan.h"
#include "driver.h"
#include "launch.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 256;
// Up to this size (of the larger side) a matrix is taken by one block.
constexpr int64_t kSmall = 32;

// What the rules know of a matrix. Of one whose values are apart, the size is not known.
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

// By a whole block. x and y, by which the size is found, must be there already.
template <class D, class S>
__device__ void judge(const Matrix<S>& at, const SpectrumOptions& options, RealOf<S>* shared) {
  using T = RealOf<S>;
  const int64_t k = at.k;
  T largest = 0;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) largest = larger(largest, absolute(at.value(i)));
  const Limits<T> limits = limits_of(largest_of_block(largest, shared), options);
  bool near = false, ascending = true, descending = true;
  for (int64_t i = threadIdx.x; i < k; i += blockDim.x) {
    const T s = at.value(i), next = at.value(i + 1 < k ? i + 1 : i);
    near |= absolute(s) <= limits.window || (i + 1 < k && absolute(next - s) <= limits.window);
    ascending &= s <= next;
    descending &= s >= next;
  }
  const bool sorted = __syncthreads_and(ascending) || __syncthreads_and(descending);
  near = (__syncthreads_or(near) || !sorted) && !limits.broad;
  if (near || NumberTraits<S>::kComplex) {
    for (int64_t i = threadIdx.x; i < 2 * k; i += blockDim.x) {
      const bool first = i < k;
      at.squares[i] = first ? square_norm(at.columns, at.columns_length, i, true)
                            : square_norm(at.rows, at.rows_length, i - k, false);
    }
  }
  T size = 0;
  if (near) {  // the same in all threads
    for (int64_t e = threadIdx.x; e < k * k; e += blockDim.x) {
      const int64_t i = e / k, j = e - i * k;
      if (j < i) {
        size = larger(size, modulus_of(plain<D>(at.entries(i, j), at.value(i), at.value(j), limits).difference));
      } else if (j == i && at.g != nullptr) {
        size = larger(size, absolute(at.g[i * at.g_step]));
      }
    }
    size = largest_of_block(size, shared);
  }
  if (threadIdx.x == 0) *at.judgement = {limits, size, near};
  __syncthreads();
}

// q_ij, or g_ii on the diagonal, and r_ij.
template <class D, class S>
__device__ Two<S> quotients(const Matrix<S>& at, int64_t i, int64_t j, bool* doubts) {
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
    const T g[2] = {at.g == nullptr ? T(0) : at.g[i * at.g_step], at.g == nullptr ? T(0) : at.g[j * at.g_step]};
    result = rules.template pair<D>(entries, 0, 1, s, at.g == nullptr ? nullptr : g, diagonal(i), diagonal(j),
                                    at.noise(i) + at.noise(j));
  } else {
    result = plain<D>(entries, s[0], s[1], known.limits);
  }
  if (rules.doubt) *doubts = true;
  return result;
}

// (left - projected)_ij / s, with s_j by columns, s_i by rows.
template <class S>
__device__ S complement(const Matrix<S>& at, const S& projected, int64_t i, int64_t j, bool by_columns, bool* doubts) {
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
  if (rules.doubt) *doubts = true;
  return result;
}

// --- large matrices -------------------------------------------------------------------------------------------------

template <class D, class S>
__global__ void __launch_bounds__(kThreads)
    judge_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements) {
  __shared__ RealOf<S> shared[kThreads];
  for (int64_t b = blockIdx.x; b < all.count; b += gridDim.x) {
    judge<D>(matrix(all, b, squares, judgements), all.options, shared);
  }
}

template <class D, class S>
__global__ void __launch_bounds__(kThreads)
    quotients_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements, S* out, S* out2, bool* doubts) {
  const int64_t size = all.k * all.k, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < all.count * size; e += step) {
    const int64_t b = e / size, i = (e - b * size) / all.k, j = (e - b * size) % all.k;
    const Two<S> t = quotients<D>(matrix(all, b, squares, judgements), i, j, doubts);
    out[e] = t.sum + t.difference;
    if (out2 != nullptr) out2[e] = t.sum - t.difference;
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads)
    complement_kernel(Spectra<S> all, double* squares, Judgement<RealOf<S>>* judgements, const S* projected,
                      bool by_columns, S* out, bool* doubts) {
  const int64_t rows = by_columns ? all.columns_length : all.k, columns = by_columns ? all.k : all.rows_length;
  const int64_t size = rows * columns, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t e = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; e < all.count * size; e += step) {
    const int64_t b = e / size, i = (e - b * size) / columns, j = (e - b * size) % columns;
    out[e] = out[e] + complement(matrix(all, b, squares, judgements), projected[e], i, j, by_columns, doubts);
  }
}

// --- small matrices -------------------------------------------------------------------------------------------------

// c (m, n, by rows) = a (m, k) b (k, n), or c += a b, by a whole block.
template <class S>
__device__ void product(const View<S>& a, const View<S>& b, int64_t m, int64_t k, int64_t n, S* c, bool add = false) {
  for (int64_t e = threadIdx.x; e < m * n; e += blockDim.x) {
    const int64_t i = e / n, j = e - i * n;
    S sum = add ? c[e] : S{};
    for (int64_t r = 0; r < k; ++r) sum += a.at(i, r) * b.at(r, j);
    c[e] = sum;
  }
  __syncthreads();
}

// A block's shared memory: matrices that fit the larger side, and what the rules know.
template <class S>
struct Shared {
  static constexpr int kParts = 5;
  S* part[kParts];
  double* squares;
  RealOf<S>* threads;
  Judgement<RealOf<S>>* judgement;

  static size_t bytes(int64_t size, int threads) {
    return sizeof(Judgement<RealOf<S>>) + 16 + static_cast<size_t>(2 * size) * sizeof(double) +
           static_cast<size_t>(kParts * size * size) * sizeof(S) + static_cast<size_t>(threads) * sizeof(RealOf<S>);
  }
  __device__ Shared(double* memory, int64_t size) {
    squares = memory;
    judgement = reinterpret_cast<Judgement<RealOf<S>>*>(memory + 2 * size);
    S* matrices = reinterpret_cast<S*>(judgement + 1);
    for (int p = 0; p < kParts; ++p) part[p] = matrices + p * size * size;
    threads = reinterpret_cast<RealOf<S>*>(part[kParts - 1] + size * size);
  }
};

template <class S>
__device__ Matrix<S> matrix(const Operands<S>& all, int64_t b, const S* x, const S* y, const View<S>& columns,
                            const View<S>& rows, const Shared<S>& memory) {
  return {all.k,
          x,
          y,
          all.s.data + b * all.s.batch_stride,
          nullptr,
          all.s.column_stride,
          0,
          columns,
          rows,
          columns.data == nullptr ? 0 : all.m,
          rows.data == nullptr ? 0 : all.n,
          memory.squares,
          memory.judgement};
}

template <class D, class S>
__global__ void pull_kernel(PullOperands<S> all, int64_t count, bool* doubts) {
  extern __shared__ double bytes[];
  const int64_t m = all.m, n = all.n, k = all.k;
  const Shared<S> memory(bytes, m > n ? m : n);
  S *x = memory.part[0], *y = memory.part[1], *inner = memory.part[2], *right = memory.part[3];
  S* projected = memory.part[4];
  for (int64_t b = blockIdx.x; b < count; b += gridDim.x) {
    const View<S> u = view(all.u, b), vh = D::kSvd ? view(all.vh, b) : u.adjoint();
    const View<S> gu = view(all.gu, b), gvh = view(all.gvh, b);
    const bool with_x = gu.data != nullptr, with_y = gvh.data != nullptr;
    S* ga = all.ga + b * m * n;
    if (with_x) product(u.adjoint(), gu, k, m, k, x);
    if (with_y) product(vh, gvh.adjoint(), k, n, k, y);
    Matrix<S> at = matrix(all, b, with_x ? x : nullptr, with_y ? y : nullptr, gu, gvh, memory);
    if (all.gs.data != nullptr) {
      at.g = all.gs.data + b * all.gs.batch_stride;
      at.g_step = all.gs.column_stride;
    }
    judge<D>(at, all.options, memory.threads);
    for (int64_t e = threadIdx.x; e < k * k; e += blockDim.x) {
      const Two<S> t = quotients<D>(at, e / k, e % k, doubts);
      inner[e] = t.sum + t.difference;
    }
    __syncthreads();
    product({inner, k, 1}, vh, k, k, n, right);
    if (n > k && with_y) {
      product(View<S>{y, k, 1}.adjoint(), vh, k, k, n, projected);
      for (int64_t e = threadIdx.x; e < k * n; e += blockDim.x) {
        right[e] = right[e] + complement(at, projected[e], e / n, e % n, false, doubts);
      }
      __syncthreads();
    }
    product(u, {right, n, 1}, m, k, n, ga);
    if (m > k && with_x) {
      product(u, {x, k, 1}, m, k, k, projected);
      for (int64_t e = threadIdx.x; e < m * k; e += blockDim.x) {
        projected[e] = complement(at, projected[e], e / k, e % k, true, doubts);
      }
      __syncthreads();
      product({projected, k, 1}, vh, m, k, n, ga, true);
    }
    __syncthreads();
  }
}

template <class D, class S>
__global__ void push_kernel(PushOperands<S> all, int64_t count, bool* doubts) {
  extern __shared__ double bytes[];
  const int64_t m = all.m, n = all.n, k = all.k;
  const Shared<S> memory(bytes, m > n ? m : n);
  S *p = memory.part[0], *outer = memory.part[1], *first = memory.part[2], *second = memory.part[3];
  S* projected = memory.part[4];
  for (int64_t b = blockIdx.x; b < count; b += gridDim.x) {
    const View<S> u = view(all.u, b), vh = D::kSvd ? view(all.vh, b) : u.adjoint(), da = view(all.da, b);
    if (n > k) {
      product(u.adjoint(), da, k, m, n, outer);
      product({outer, n, 1}, vh.adjoint(), k, n, k, p);
    } else {
      product(da, vh.adjoint(), m, n, k, outer);
      product(u.adjoint(), {outer, k, 1}, k, m, k, p);
    }
    const View<S> columns{m > k ? outer : p, k, 1};
    const View<S> rows{!D::kSvd ? nullptr : n > k ? outer : p, n, 1};
    const Matrix<S> at = matrix(all, b, p, static_cast<const S*>(nullptr), columns, rows, memory);
    judge<D>(at, all.options, memory.threads);
    for (int64_t e = threadIdx.x; e < k * k; e += blockDim.x) {
      const Two<S> t = quotients<D>(at, e / k, e % k, doubts);
      first[e] = t.sum + t.difference;
      second[e] = t.sum - t.difference;
    }
    for (int64_t i = threadIdx.x; i < k; i += blockDim.x) all.ds[b * k + i] = real_part(p[i * (k + 1)]);
    __syncthreads();
    S* du = all.du + b * m * k;
    product(u, {first, k, 1}, m, k, k, du);
    if (m > k) {
      product(u, {p, k, 1}, m, k, k, projected);
      for (int64_t e = threadIdx.x; e < m * k; e += blockDim.x) {
        du[e] = du[e] + complement(at, projected[e], e / k, e % k, true, doubts);
      }
    }
    if constexpr (D::kSvd) {
      S* dvh = all.dvh + b * k * n;
      product({second, k, 1}, vh, k, k, n, dvh);
      if (n > k) {
        product({p, k, 1}, vh, k, k, n, projected);
        for (int64_t e = threadIdx.x; e < k * n; e += blockDim.x) {
          dvh[e] = dvh[e] + complement(at, projected[e], e / n, e % n, false, doubts);
        }
      }
    }
    __syncthreads();
  }
}

// --- launches -------------------------------------------------------------------------------------------------------

constexpr const char* kDecompositions = "manualgrad: decompositions: ";

int64_t blocks(int64_t count) { return std::min<int64_t>(std::max<int64_t>(count, 1), 1 << 20); }

bool* flag(Tensor& doubts) { return static_cast<bool*>(doubts.mutable_data_ptr()); }

struct Cuda {
  static Tensor no_doubts(const Tensor& like) { return torch::stable::new_zeros(like, {}, ScalarType::Bool); }

  // What the rules need to know of each matrix, in memory that lives as long as this.
  template <class D, class S>
  struct Judged {
    Judged(const Spectra<S>& all, const Tensor& like, const Stream& stream)
        : memory(torch::stable::new_empty(
              like, {static_cast<int64_t>(all.count * (2 * all.k * sizeof(double) + sizeof(Judgement<RealOf<S>>)))},
              ScalarType::Byte)),
          squares(static_cast<double*>(memory.mutable_data_ptr())),
          judgements(reinterpret_cast<Judgement<RealOf<S>>*>(squares + all.count * 2 * all.k)) {
      stream.launch(judge_kernel<D, S>, blocks(all.count), kThreads, 0, all, squares, judgements);
    }
    Tensor memory;
    double* squares;
    Judgement<RealOf<S>>* judgements;
  };

  template <class D>
  static void quotients(const SpectraTensors& tensors, const Decomposition& at, Tensor& out, Tensor* out2,
                        Tensor& doubts) {
    dispatch_matrix(at.u.scalar_type(), "", "", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Stream stream(kDecompositions, at.u);
      const Spectra<S> all = tensors.view<S>(at);
      const Judged<D, S> judged(all, at.u, stream);
      stream.launch(quotients_kernel<D, S>, blocks((all.count * all.k * all.k + kThreads - 1) / kThreads), kThreads, 0,
                    all, judged.squares, judged.judgements, static_cast<S*>(out.mutable_data_ptr()),
                    out2 == nullptr ? nullptr : static_cast<S*>(out2->mutable_data_ptr()), flag(doubts));
    });
  }

  template <class D>
  static void complement(const SpectraTensors& tensors, const Decomposition& at, const Tensor& projected,
                         bool by_columns, Tensor& out, Tensor& doubts) {
    dispatch_matrix(at.u.scalar_type(), "", "", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Stream stream(kDecompositions, at.u);
      const Spectra<S> all = tensors.view<S>(at);
      const Judged<D, S> judged(all, at.u, stream);
      const Tensor kept = torch::stable::contiguous(projected);
      stream.launch(complement_kernel<S>, blocks((out.numel() + kThreads - 1) / kThreads), kThreads, 0, all,
                    judged.squares, judged.judgements, static_cast<const S*>(kept.const_data_ptr()), by_columns,
                    static_cast<S*>(out.mutable_data_ptr()), flag(doubts));
    });
  }

  template <class S, class Kernel, class All>
  static void launch_small(const Kernel& kernel, const Decomposition& at, const All& all, Tensor& doubts) {
    const int64_t size = std::max(at.m, at.n), count = at.batch();
    int threads = 32;
    while (threads < kThreads && threads < size * size) threads *= 2;
    const size_t shared = Shared<S>::bytes(size, threads);
    Stream(kDecompositions, at.u).launch(kernel, blocks(count), threads, shared, all, count, flag(doubts));
  }

  template <class D>
  static Tensor pull_back(const char* where, const Cotangents& g, const Decomposition& at, Tensor& doubts) {
    if (std::max(at.m, at.n) > kSmall) return manualgrad::pull_back<D, Cuda>(g, at, doubts);
    return small_pull_back<D>(where, g, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      launch_small<S>(pull_kernel<D, S>, at, all, doubts);
    });
  }

  template <class D>
  static Tangents push_forward(const char* where, const Tensor& da, const Decomposition& at, Tensor& doubts) {
    if (std::max(at.m, at.n) > kSmall) return manualgrad::push_forward<D, Cuda>(da, at, doubts);
    return small_push_forward<D>(where, da, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      launch_small<S>(push_kernel<D, S>, at, all, doubts);
    });
  }
};

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, m) {
  if (manualgrad::cuda_obstacle() != nullptr) return;
  using Operators = manualgrad::SpectrumOperators<manualgrad::Cuda>;
  m.impl("svd_pullback", TORCH_BOX(&Operators::svd_pullback));
  m.impl("svd_pushforward", TORCH_BOX(&Operators::svd_pushforward));
  m.impl("eigh_pullback", TORCH_BOX(&Operators::eigh_pullback));
  m.impl("eigh_pushforward", TORCH_BOX(&Operators::eigh_pushforward));
}
