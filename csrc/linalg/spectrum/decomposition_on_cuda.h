// The derivatives of the SVD and of the Hermitian eigendecomposition on CUDA. Small matrices: one block per matrix, all
// steps in shared memory. Large ones: torch's products of whole batches, and between them the kernels of
// quotients_on_cuda.h. All on the current stream; does not synchronize.
#pragma once

#include "../../math/product.h"
#include "../run_on_cuda.h"
#include "products.h"
#include "quotients_on_cuda.h"
#include "small.h"

namespace manualgrad {

namespace {

// --- small matrices -------------------------------------------------------------------------------------------------

// All threads of a block. On the host, where it never runs, it is one thread.
struct Block {
#if defined(__CUDA_ARCH__)
  HOST_DEVICE int rank() const { return static_cast<int>(threadIdx.x); }
  HOST_DEVICE int size() const { return static_cast<int>(blockDim.x); }
  HOST_DEVICE void sync() const { __syncthreads(); }
#else
  HOST_DEVICE int rank() const { return 0; }
  HOST_DEVICE int size() const { return 1; }
  HOST_DEVICE void sync() const {}
#endif
};

// A block's shared memory: matrices that fit the larger dim, and the data of the rules.
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
__global__ void vjp_kernel(VjpOperands<S> all, int64_t count, bool* gauge_dependent) {
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
    if (with_x) product<Sum::kReplace>(Block{}, u.adjoint(), gu, k, m, k, x);
    if (with_y) product<Sum::kReplace>(Block{}, vh, gvh.adjoint(), k, n, k, y);
    Matrix<S> at = matrix(all, b, with_x ? x : nullptr, with_y ? y : nullptr, gu, gvh, memory);
    if (all.gs.data != nullptr) {
      at.g = all.gs.data + b * all.gs.batch_stride;
      at.g_step = all.gs.column_stride;
    }
    judge<D>(at, all.options, memory.threads);
    for (int64_t e = threadIdx.x; e < k * k; e += blockDim.x) {
      const Two<S> t = quotients<D>(at, e / k, e % k, gauge_dependent);
      inner[e] = t.sum + t.difference;
    }
    __syncthreads();
    product<Sum::kReplace>(Block{}, View<S>{inner, k, 1}, vh, k, k, n, right);
    if (n > k && with_y) {
      product<Sum::kReplace>(Block{}, View<S>{y, k, 1}.adjoint(), vh, k, k, n, projected);
      for (int64_t e = threadIdx.x; e < k * n; e += blockDim.x) {
        right[e] = right[e] + complement(at, projected[e], e / n, e % n, false, gauge_dependent);
      }
      __syncthreads();
    }
    product<Sum::kReplace>(Block{}, u, View<S>{right, n, 1}, m, k, n, ga);
    if (m > k && with_x) {
      product<Sum::kReplace>(Block{}, u, View<S>{x, k, 1}, m, k, k, projected);
      for (int64_t e = threadIdx.x; e < m * k; e += blockDim.x) {
        projected[e] = complement(at, projected[e], e / k, e % k, true, gauge_dependent);
      }
      __syncthreads();
      product<Sum::kAdd>(Block{}, View<S>{projected, k, 1}, vh, m, k, n, ga);
    }
    __syncthreads();
  }
}

template <class D, class S>
__global__ void jvp_kernel(JvpOperands<S> all, int64_t count, bool* gauge_dependent) {
  extern __shared__ double bytes[];
  const int64_t m = all.m, n = all.n, k = all.k;
  const Shared<S> memory(bytes, m > n ? m : n);
  S *p = memory.part[0], *outer = memory.part[1], *first = memory.part[2], *second = memory.part[3];
  S* projected = memory.part[4];
  for (int64_t b = blockIdx.x; b < count; b += gridDim.x) {
    const View<S> u = view(all.u, b), vh = D::kSvd ? view(all.vh, b) : u.adjoint(), da = view(all.da, b);
    if (n > k) {
      product<Sum::kReplace>(Block{}, u.adjoint(), da, k, m, n, outer);
      product<Sum::kReplace>(Block{}, View<S>{outer, n, 1}, vh.adjoint(), k, n, k, p);
    } else {
      product<Sum::kReplace>(Block{}, da, vh.adjoint(), m, n, k, outer);
      product<Sum::kReplace>(Block{}, u.adjoint(), View<S>{outer, k, 1}, k, m, k, p);
    }
    const View<S> columns{m > k ? outer : p, k, 1};
    const View<S> rows{!D::kSvd ? nullptr : n > k ? outer : p, n, 1};
    const Matrix<S> at = matrix(all, b, p, static_cast<const S*>(nullptr), columns, rows, memory);
    judge<D>(at, all.options, memory.threads);
    for (int64_t e = threadIdx.x; e < k * k; e += blockDim.x) {
      const Two<S> t = quotients<D>(at, e / k, e % k, gauge_dependent);
      first[e] = t.sum + t.difference;
      second[e] = t.sum - t.difference;
    }
    for (int64_t i = threadIdx.x; i < k; i += blockDim.x) all.ds[b * k + i] = real_part(p[i * (k + 1)]);
    __syncthreads();
    S* du = all.du + b * m * k;
    product<Sum::kReplace>(Block{}, u, View<S>{first, k, 1}, m, k, k, du);
    if (m > k) {
      product<Sum::kReplace>(Block{}, u, View<S>{p, k, 1}, m, k, k, projected);
      for (int64_t e = threadIdx.x; e < m * k; e += blockDim.x) {
        du[e] = du[e] + complement(at, projected[e], e / k, e % k, true, gauge_dependent);
      }
    }
    if constexpr (D::kSvd) {
      S* dvh = all.dvh + b * k * n;
      product<Sum::kReplace>(Block{}, View<S>{second, k, 1}, vh, k, k, n, dvh);
      if (n > k) {
        product<Sum::kReplace>(Block{}, View<S>{p, k, 1}, vh, k, k, n, projected);
        for (int64_t e = threadIdx.x; e < k * n; e += blockDim.x) {
          dvh[e] = dvh[e] + complement(at, projected[e], e / n, e % n, false, gauge_dependent);
        }
      }
    }
    __syncthreads();
  }
}

// --- launches -------------------------------------------------------------------------------------------------------

constexpr const char* kDecompositions = "manualgrad: decompositions: ";

int64_t blocks(int64_t count) { return std::min<int64_t>(std::max<int64_t>(count, 1), 1 << 20); }

// How many blocks have a thread for each of `count` items.
int64_t in_threads(int64_t count) { return blocks((count + kSpectrumThreads - 1) / kSpectrumThreads); }
constexpr int64_t kMostParts = 256;  // blocks for the size of a matrix

bool* flag(Tensor& gauge_dependent) { return static_cast<bool*>(gauge_dependent.mutable_data_ptr()); }

struct CudaDecompositions : Cuda {
  static Tensor new_flag(const Tensor& like) { return torch::stable::new_zeros(like, {}, ScalarType::Bool); }

  // The data of the rules for each matrix, in memory that lives as long as this object.
  template <class D, class S>
  struct Judged {
    Judged(const Spectra<S>& all, const Tensor& like, const Stream& stream)
        : memory(torch::stable::new_empty(
              like, {static_cast<int64_t>(all.count * (2 * all.k * sizeof(double) + sizeof(Judgement<RealOf<S>>)))},
              ScalarType::Byte)),
          squares(static_cast<double*>(memory.mutable_data_ptr())),
          judgements(reinterpret_cast<Judgement<RealOf<S>>*>(squares + all.count * 2 * all.k)) {
      stream.launch(limits_kernel<S>, blocks(all.count), kSpectrumThreads, 0, all, squares, judgements);
      stream.launch(squares_kernel<S>, in_threads(all.count * 2 * all.k), kSpectrumThreads, 0, all, squares,
                    judgements);
      const int64_t parts = std::min<int64_t>(in_threads(all.k * all.k), kMostParts);
      stream.launch(size_kernel<D, S>, blocks(all.count * parts), kSpectrumThreads, 0, all, squares, judgements, parts);
    }
    Tensor memory;
    double* squares;
    Judgement<RealOf<S>>* judgements;
  };

  template <class D>
  static void quotients(const SpectraTensors& tensors, const Decomposition& at, Tensor& out, Tensor* out2,
                        Tensor& gauge_dependent) {
    dispatch_matrix(at.u.scalar_type(), at.where, "U", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Stream stream(kDecompositions, at.u);
      const Spectra<S> all = tensors.view<S>(at);
      const Judged<D, S> judged(all, at.u, stream);
      stream.launch(quotients_kernel<D, S>, in_threads(all.count * all.k * all.k), kSpectrumThreads, 0, all,
                    judged.squares, judged.judgements, static_cast<S*>(out.mutable_data_ptr()),
                    out2 == nullptr ? nullptr : static_cast<S*>(out2->mutable_data_ptr()), flag(gauge_dependent));
    });
  }

  template <class D>
  static void complement(const SpectraTensors& tensors, const Decomposition& at, const Tensor& projected,
                         bool by_columns, Tensor& out, Tensor& gauge_dependent) {
    dispatch_matrix(at.u.scalar_type(), at.where, "U", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Stream stream(kDecompositions, at.u);
      const Spectra<S> all = tensors.view<S>(at);
      const Judged<D, S> judged(all, at.u, stream);
      const Tensor kept = torch::stable::contiguous(projected);
      stream.launch(complement_kernel<S>, in_threads(out.numel()), kSpectrumThreads, 0, all, judged.squares,
                    judged.judgements, static_cast<const S*>(kept.const_data_ptr()), by_columns,
                    static_cast<S*>(out.mutable_data_ptr()), flag(gauge_dependent));
    });
  }

  template <class S, class Kernel, class All>
  static void launch_small(const Kernel& kernel, const Decomposition& at, const All& all, Tensor& gauge_dependent) {
    const int64_t size = std::max(at.m, at.n), count = at.batch();
    int threads = 32;
    while (threads < kSpectrumThreads && threads < size * size) threads *= 2;
    const size_t shared = Shared<S>::bytes(size, threads);
    Stream(kDecompositions, at.u).launch(kernel, blocks(count), threads, shared, all, count, flag(gauge_dependent));
  }

  template <class D>
  static Tensor vjp(const char* where, const Cotangents& g, const Decomposition& at, Tensor& gauge_dependent) {
    if (std::max(at.m, at.n) > kSpectrumOrder) return manualgrad::vjp<D, CudaDecompositions>(g, at, gauge_dependent);
    return small_vjp<D>(where, g, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      launch_small<S>(vjp_kernel<D, S>, at, all, gauge_dependent);
    });
  }

  template <class D>
  static Tangents jvp(const char* where, const Tensor& da, const Decomposition& at, Tensor& gauge_dependent) {
    if (std::max(at.m, at.n) > kSpectrumOrder) return manualgrad::jvp<D, CudaDecompositions>(da, at, gauge_dependent);
    return small_jvp<D>(where, da, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      launch_small<S>(jvp_kernel<D, S>, at, all, gauge_dependent);
    });
  }
};

}  // namespace
}  // namespace manualgrad
