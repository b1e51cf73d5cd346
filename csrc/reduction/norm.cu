// The cotangent of a vector norm on CUDA; the contract is in norm.h, the arithmetic in math/norm.h.
//
// One kernel computes each slice's coefficients (a block for a slice, which it reads only where the stored norm cannot
// be relied on), for p = +-inf another counts the ties, and one writes the result. All run on the current stream; none
// synchronizes. Deterministic: ties are counted in integers, and a slice is summed by one block in a
// fixed order.
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

template <class S>
__global__ void slice_kernel(SliceLoops loops, Power power, double p, Trust trust, int64_t slices, int64_t slice_size,
                             const S* self, const Real<S>* grad, const Real<S>* norm,
                             DeviceCoefficients<RealCompute<S>> out) {
  using T = RealCompute<S>;
  constexpr bool complex = !std::is_same_v<Compute<S>, T>;
  __shared__ double shared[kThreads];
  for (int64_t s = blockIdx.x; s < slices; s += gridDim.x) {
    int64_t offset[3];
    loops.kept.offsets(s, offset);
    const S* x = self + offset[0];
    T n = load(norm[offset[2]]);
    const bool match = complex && power == Power::kExtreme;
    const bool recompute = power != Power::kExtreme && power != Power::kOne && !trusted(n, trust);
    if (match || recompute) {  // the same for the whole block
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
    }
    if (threadIdx.x == 0) {
      const Slice<T> slice = norm_slice(power, static_cast<T>(load(grad[offset[1]])), n);
      out.a[s] = slice.a;
      out.b[s] = slice.b;
      out.n[s] = slice.n;
    }
  }
}

template <Power P, class S>
__global__ void finite_kernel(LoopNest<3> loops, int64_t numel, double exponent, const S* x, S* out,
                              DeviceCoefficients<RealCompute<S>> slices) {
  using T = RealCompute<S>;
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < numel; i += step) {
    int64_t offset[3];
    loops.offsets(i, offset);
    const int64_t s = offset[2];
    const Slice<T> slice{slices.a[s], slices.b[s], slices.n[s]};
    store(out[offset[1]], norm_backward_element<P>(load(x[offset[0]]), slice, exponent));
  }
}

// A thread keeps the count of the slice it is in and hands it over when it leaves the slice.
template <class S>
__global__ void tie_kernel(LoopNest<3> loops, int64_t numel, const S* x, const RealCompute<S>* norm,
                           unsigned long long* ties) {
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  unsigned long long found = 0;
  int64_t current = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < numel; i += step) {
    int64_t offset[3];
    loops.offsets(i, offset);
    if (offset[2] != current) {
      if (found > 0) atomicAdd(ties + current, found);
      found = 0;
      current = offset[2];
    }
    found += is_tie(modulus(load(x[offset[0]])), norm[current]) ? 1 : 0;
  }
  if (found > 0) atomicAdd(ties + current, found);
}

template <class S>
__global__ void extreme_kernel(LoopNest<3> loops, int64_t numel, const S* x, S* out,
                               DeviceCoefficients<RealCompute<S>> slices, const unsigned long long* ties) {
  using T = RealCompute<S>;
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < numel; i += step) {
    int64_t offset[3];
    loops.offsets(i, offset);
    const int64_t s = offset[2];
    const auto value = load(x[offset[0]]);
    const T size = modulus(value);
    const T share = slices.a[s] / static_cast<T>(ties[s]);
    store(out[offset[1]], scaled(tie_sign(value, size, is_tie(size, slices.n[s])), share));
  }
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
    stream.launch(slice_kernel<S>, blocks_for(plan.slices, 1), plan.slice_size <= 1024 ? 32 : kThreads, 0,
                  SliceLoops{plan.kept, plan.reduced}, plan.power, plan.p, trust_range<R>(plan.p, plan.slice_size),
                  plan.slices, plan.slice_size, x, static_cast<const R*>(grad.const_data_ptr()),
                  static_cast<const R*>(norm.const_data_ptr()), slices);

    const int64_t blocks = blocks_for(numel, 4 * kThreads);
    const auto finite = [&](auto kernel) {
      stream.launch(kernel, blocks, kThreads, 0, plan.elements, numel, plan.p - 1, x, to, slices);
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
    stream.launch(tie_kernel<S>, blocks, kThreads, 0, plan.elements, numel, x, slices.n, ties);
    stream.launch(extreme_kernel<S>, blocks, kThreads, 0, plan.elements, numel, x, to, slices, ties);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::NormOperators<manualgrad::CudaNorm>)
