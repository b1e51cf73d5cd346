// The cotangent of a vector norm on CUDA; the contract is in norm.h, the arithmetic in math/norm.h.
//
// One kernel computes each slice's coefficients (a slice is read only where the stored norm cannot be relied on, and
// then by a whole block), for p = +-inf another counts the ties, and one writes the result. All run on the current
// stream; none synchronizes. Deterministic: ties are counted in integers, and a slice is summed by one block in a fixed
// order.
#include "norm.h"

#include "../base/cuda.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 256;

// The loops by value, in the 4 KiB of a launch's arguments.
struct SliceLoops {
  LoopNest<3> kept;
  LoopNest<1> reduced;
};
static_assert(sizeof(SliceLoops) < 3900, "kernel arguments");

template <class T>
struct DeviceCoefficients {
  T* a;
  T* b;
  T* n;
};

// Reduces `value` over the block; every thread gets the result. combine is applied in a fixed order.
template <class V, class Combine>
__device__ V reduce_block(V value, V* shared, const Combine& combine) {
  __syncthreads();
  shared[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] = combine(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  return shared[0];
}

template <class S>
__device__ RealCompute<S> block_extreme(const S* x, const LoopNest<1>& reduced, int64_t count, bool largest,
                                        double* shared) {
  using T = RealCompute<S>;
  T extreme = largest ? T(0) : std::numeric_limits<T>::infinity();
  const auto combine = [largest](T left, T right) {
    if (left != left || right != right) return left + right;
    return (left < right) == largest ? right : left;
  };
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    int64_t offset[1];
    reduced.offsets(i, offset);
    extreme = combine(extreme, modulus(load(x[offset[0]])));
  }
  return reduce_block(extreme, reinterpret_cast<T*>(shared), combine);
}

// A block computes the coefficients of `each` slices, one thread per slice. If elements of slices have to be read, the
// block then takes these slices one by one, with all threads.
template <class S>
__global__ void slice_kernel(SliceLoops loops, Power power, double p, Trust trust, int64_t slices, int each,
                             int64_t slice_size, const S* self, const Real<S>* grad, const Real<S>* norm,
                             DeviceCoefficients<RealCompute<S>> out) {
  using T = RealCompute<S>;
  constexpr bool complex = !std::is_same_v<Compute<S>, T>;
  __shared__ double shared[kThreads];
  __shared__ int reads[kThreads];
  const bool match = complex && power == Power::kExtreme;
  const auto write = [&](int64_t s, T g, T n) {
    const Slice<T> slice = norm_slice(power, g, n);
    out.a[s] = slice.a;
    out.b[s] = slice.b;
    out.n[s] = slice.n;
  };
  for (int64_t start = int64_t{blockIdx.x} * each; start < slices; start += int64_t{gridDim.x} * each) {
    const int count = static_cast<int>(std::min<int64_t>(each, slices - start));
    bool any = false;
    for (int k = static_cast<int>(threadIdx.x); k < count; k += static_cast<int>(blockDim.x)) {
      int64_t offset[3];
      loops.kept.offsets(start + k, offset);
      const T n = load(norm[offset[2]]);
      reads[k] = match || (power != Power::kExtreme && power != Power::kOne && !trusted(n, trust));
      any |= reads[k];
      if (!reads[k]) write(start + k, static_cast<T>(load(grad[offset[1]])), n);
    }
    if (!__syncthreads_or(any)) continue;
    for (int k = 0; k < count; ++k) {
      if (!reads[k]) continue;  // the same for the whole block
      int64_t offset[3];
      loops.kept.offsets(start + k, offset);
      const S* x = self + offset[0];
      T n = load(norm[offset[2]]);
      const T extreme = block_extreme(x, loops.reduced, slice_size, p > 0, shared);
      if (match) {
        const T eps = std::is_same_v<Real<S>, Half> ? T(0.0009765625) : std::numeric_limits<T>::epsilon();
        if (std::fabs(extreme - n) <= 8 * eps * extreme) n = extreme;
      } else if (extreme > T(0) && extreme <= std::numeric_limits<T>::max()) {
        double sum = 0;
        for (int64_t i = threadIdx.x; i < slice_size; i += blockDim.x) {
          int64_t at[1];
          loops.reduced.offsets(i, at);
          sum += scaled_term(modulus(load(x[at[0]])), extreme, p);
        }
        sum = reduce_block(sum, shared, [](double left, double right) { return left + right; });
        n = norm_from_scaled_sum(extreme, sum, p);
      }
      if (threadIdx.x == 0) write(start + k, static_cast<T>(load(grad[offset[1]])), n);
    }
    __syncthreads();
  }
}

// How the elements are spread over blocks: if the innermost loop is long, a block takes pieces of one row each.
struct Pieces {
  int64_t rows, each;  // each: pieces of a row; 0: elements are taken one by one, by their linear index
};
constexpr int kElements = 4;  // of a piece, for a thread

// body(offset in self, offset in the result, slice) for every element that is this thread's.
template <class Body>
__device__ void each_element(const LoopNest<3>& loops, int64_t numel, const Pieces& pieces, const Body& body) {
  int64_t offset[3];
  if (pieces.each == 0) {
    const int64_t step = int64_t{blockDim.x} * gridDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < numel; i += step) {
      loops.offsets(i, offset);
      body(offset[0], offset[1], offset[2]);
    }
    return;
  }
  const int last = loops.dims - 1;
  for (int64_t unit = blockIdx.x; unit < pieces.rows * pieces.each; unit += gridDim.x) {
    const int64_t row = pieces.each == 1 ? unit : unit / pieces.each;
    const int64_t start = (unit - row * pieces.each) * kThreads * kElements + threadIdx.x;
    loops.offsets(row, last, offset);
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const int64_t i = start + k * kThreads;
      if (i < loops.size[last]) {
        body(offset[0] + i * loops.stride[0][last], offset[1] + i * loops.stride[1][last],
             offset[2] + i * loops.stride[2][last]);
      }
    }
  }
}

template <Power P, class S>
__global__ void finite_kernel(LoopNest<3> loops, int64_t numel, Pieces pieces, double exponent, const S* __restrict__ x,
                              S* __restrict__ out, DeviceCoefficients<RealCompute<S>> slices) {
  using T = RealCompute<S>;
  each_element(loops, numel, pieces, [&](int64_t from, int64_t to, int64_t s) {
    const Slice<T> slice{slices.a[s], slices.b[s], slices.n[s]};
    store(out[to], norm_backward_element<P>(load(x[from]), slice, exponent));
  });
}

// A thread keeps the count of its current slice, and adds it to the total when it leaves the slice.
template <class S>
__global__ void tie_kernel(LoopNest<3> loops, int64_t numel, Pieces pieces, const S* __restrict__ x,
                           const RealCompute<S>* __restrict__ norm, unsigned long long* ties) {
  unsigned long long found = 0;
  int64_t current = 0;
  each_element(loops, numel, pieces, [&](int64_t from, int64_t, int64_t s) {
    if (s != current) {
      if (found > 0) atomicAdd(ties + current, found);
      found = 0;
      current = s;
    }
    found += is_tie(modulus(load(x[from])), norm[s]) ? 1 : 0;
  });
  if (found > 0) atomicAdd(ties + current, found);
}

template <class S>
__global__ void extreme_kernel(LoopNest<3> loops, int64_t numel, Pieces pieces, const S* __restrict__ x,
                               S* __restrict__ out, DeviceCoefficients<RealCompute<S>> slices,
                               const unsigned long long* __restrict__ ties) {
  using T = RealCompute<S>;
  each_element(loops, numel, pieces, [&](int64_t from, int64_t to, int64_t s) {
    const auto value = load(x[from]);
    const T size = modulus(value);
    const T share = slices.a[s] / static_cast<T>(ties[s]);
    store(out[to], scaled(tie_sign(value, size, is_tie(size, slices.n[s])), share));
  });
}

// Enough blocks to fill any device several times over; the kernels stride over the rest.
int64_t blocks_for(int64_t count, int64_t per_block) {
  return std::min<int64_t>((count + per_block - 1) / per_block, 16384);
}

Tensor scratch(const Tensor& like, int64_t count, ScalarType type) {
  const int64_t size[] = {count};
  return torch::stable::empty({size, 1}, type, std::nullopt, like.device());
}

template <class T>
constexpr ScalarType scalar_type_of() {
  return std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;
}

struct CudaNorm {
  template <class S>
  static void run(const NormPlan& plan, const Tensor& grad, const Tensor& self, const Tensor& norm, const Tensor& out) {
    using R = Real<S>;
    using T = RealCompute<S>;
    const Stream stream(NORM_BACKWARD, self);
    const S* x = static_cast<const S*>(self.const_data_ptr());
    S* to = static_cast<S*>(out.mutable_data_ptr());
    const int64_t numel = plan.numel();

    const Tensor memory = scratch(self, 3 * plan.slices, scalar_type_of<T>());
    T* base = static_cast<T*>(memory.mutable_data_ptr());
    const DeviceCoefficients<T> slices{base, base + plan.slices, base + 2 * plan.slices};
    const bool reads = plan.power == Power::kExtreme && !std::is_same_v<Compute<S>, T>;  // all slices, and not a few
    const int each = reads ? 1 : static_cast<int>(std::clamp<int64_t>(plan.slices / 1024, 1, kThreads));
    stream.launch(slice_kernel<S>, blocks_for(plan.slices, each), plan.slice_size <= 1024 && each == 1 ? 32 : kThreads,
                  0, SliceLoops{plan.kept, plan.reduced}, plan.power, plan.p, trust_range<R>(plan.p, plan.slice_size),
                  plan.slices, each, plan.slice_size, x, static_cast<const R*>(grad.const_data_ptr()),
                  static_cast<const R*>(norm.const_data_ptr()), slices);

    constexpr int64_t kPiece = int64_t{kThreads} * kElements;
    const int64_t inner = plan.elements.inner(), rows = numel / inner;
    const Pieces pieces{rows, inner >= kThreads ? (inner + kPiece - 1) / kPiece : 0};
    const int64_t blocks = pieces.each ? blocks_for(rows * pieces.each, 1) : blocks_for(numel, 4 * kThreads);
    const auto finite = [&](auto kernel) {
      stream.launch(kernel, blocks, kThreads, 0, plan.elements, numel, pieces, plan.p - 1, x, to, slices);
    };
    switch (plan.power) {
      case Power::kOne:
        return finite(finite_kernel<Power::kOne, S>);
      case Power::kTwo:
        return finite(finite_kernel<Power::kTwo, S>);
      case Power::kThree:
        return finite(finite_kernel<Power::kThree, S>);
      case Power::kFour:
        return finite(finite_kernel<Power::kFour, S>);
      case Power::kThreeHalves:
        return finite(finite_kernel<Power::kThreeHalves, S>);
      case Power::kGeneral:
        return finite(finite_kernel<Power::kGeneral, S>);
      case Power::kExtreme:
        break;
    }
    const Tensor counts = scratch(self, plan.slices, ScalarType::Long);
    auto* ties = static_cast<unsigned long long*>(counts.mutable_data_ptr());
    stream.clear(ties, static_cast<size_t>(plan.slices) * sizeof(*ties));
    stream.launch(tie_kernel<S>, blocks, kThreads, 0, plan.elements, numel, pieces, x, slices.n, ties);
    stream.launch(extreme_kernel<S>, blocks, kThreads, 0, plan.elements, numel, pieces, x, to, slices, ties);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::NormOperators<manualgrad::CudaNorm>)
