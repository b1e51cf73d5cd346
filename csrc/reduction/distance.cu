// The cotangents of pairwise distances on CUDA; the contract is in distance.h.
//
// A block takes a row of x1 and goes through the rows of x2 a tile at a time: first the pairs' coefficients (one thread
// per pair, or several if its elements have to be read), then the elements, with the threads spread over both the pairs
// and the coordinates. Runs on the current stream; does not synchronize. Deterministic: sums have a fixed order.
#include "distance.h"

#include "../base/cuda.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 256, kWarp = 32;
// Coordinates that a thread sums in one pass over x2.
constexpr int kSums = 4;

template <class T>
struct Pointers {
  const T* x1;
  const T* x2;
  const T* grad;
  const T* distances;
  T* out;
};
static_assert(sizeof(DistancePlan) < 3900, "kernel arguments");

// p = inf, by `width` neighbouring lanes of a warp: as extreme_slice.
template <class T>
__device__ Slice<T> shared_extreme_slice(const T* left, const T* right, int64_t count, int width, T g, T stored) {
  const int in_warp = static_cast<int>(threadIdx.x) % kWarp, lane = in_warp % width;
  const unsigned together = (0xffffffffu >> (kWarp - width)) << (in_warp - lane);
  const auto ties_with = [&](T norm) {
    unsigned found = 0;
    for (int64_t k = lane; k < count; k += width) found += is_tie(modulus(left[k] - right[k]), norm) ? 1 : 0;
    for (int step = width / 2; step > 0; step /= 2) found += __shfl_xor_sync(together, found, step);
    return found;
  };
  unsigned ties = ties_with(stored);
  if (ties == 0) {  // the same in all of these lanes
    T extreme = 0;
    for (int64_t k = lane; k < count; k += width) {
      const T size = modulus(left[k] - right[k]);
      extreme = size > extreme ? size : extreme;
    }
    for (int step = width / 2; step > 0; step /= 2) {
      const T other = __shfl_xor_sync(together, extreme, step);
      extreme = other > extreme ? other : extreme;
    }
    stored = extreme;
    ties = ties_with(stored);
  }
  return {g / static_cast<T>(ties), T(1), stored};
}

template <Power P, class T>
__global__ void __launch_bounds__(kThreads, 2) row_kernel(DistancePlan plan, Trust trust, int lanes, Pointers<T> at) {
  __shared__ T a[kThreads], b[kThreads], n[kThreads], partial[kThreads];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % lanes, group = thread / lanes;
  const int groups = kThreads / lanes;
  // loads overlap where the arithmetic is short
  constexpr int kUnroll = P == Power::kGeneral || P == Power::kThreeHalves ? 1 : 4;
  const int64_t piece = int64_t{lanes} * kSums, pieces = (plan.columns + piece - 1) / piece;
  for (int64_t unit = blockIdx.x; unit < plan.batch * plan.rows * pieces; unit += gridDim.x) {
    const int64_t all_row = unit / pieces, start = (unit - all_row * pieces) * piece;
    const int64_t batch = all_row / plan.rows, row = all_row - batch * plan.rows;
    const T* x1 = at.x1 + all_row * plan.columns;
    int64_t kept[3];
    plan.kept.offsets(batch, kept);
    T sum[kSums] = {};
    for (int64_t s = 0; s < plan.sums; ++s) {
      int64_t summed[3];
      plan.summed.offsets(s, summed);
      const T* x2 = at.x2 + kept[0] + summed[0];
      const T* grad = at.grad + kept[1] + summed[1];
      const T* distances = at.distances + kept[2] + summed[2];
      for (int64_t first = 0; first < plan.others; first += kThreads) {
        const int count = static_cast<int>(std::min<int64_t>(kThreads, plan.others - first));
        __syncthreads();  // the coefficients of the previous tile are no longer needed
        const int width = P == Power::kExtreme ? (lanes < kWarp ? lanes : kWarp) : 1;
        for (int i = thread / width; i < count; i += kThreads / width) {
          const int64_t j = first + i;
          if (plan.triangle && j == row) continue;
          const int64_t pair = plan.triangle ? (row < j ? plan.at_pair(row, j) : plan.at_pair(j, row)) : 0;
          const T g = grad[plan.triangle ? pair * plan.grad.column : row * plan.grad.row + j * plan.grad.column];
          const T stored = distances[plan.triangle ? pair * plan.distances.column
                                                   : row * plan.distances.row + j * plan.distances.column];
          const T* other = x2 + j * plan.columns;
          Slice<T> slice;
          if constexpr (P == Power::kExtreme) {
            slice = shared_extreme_slice(x1, other, plan.columns, width, g, stored);
          } else {
            slice = pair_slice(P, x1, other, plan.columns, g, stored, plan.p, trust);
          }
          if (thread % width == 0) {
            a[i] = slice.a;
            b[i] = slice.b;
            n[i] = slice.n;
          }
        }
        __syncthreads();
#pragma unroll kUnroll
        for (int i = group; i < count; i += groups) {
          const int64_t j = first + i;
          if (plan.triangle && j == row) continue;
          const Slice<T> slice{a[i], b[i], n[i]};
          for (int c = 0; c < kSums; ++c) {
            const int64_t k = start + c * lanes + lane;
            if (k < plan.columns) {
              sum[c] += distance_element<P>(x1[k] - x2[j * plan.columns + k], slice, plan.p - 1);
            }
          }
        }
      }
    }
    for (int c = 0; c < kSums; ++c) {
      __syncthreads();
      partial[thread] = sum[c];
      for (int half = groups / 2; half > 0; half /= 2) {
        __syncthreads();
        if (group < half) partial[thread] += partial[thread + half * lanes];
      }
      const int64_t k = start + c * lanes + lane;
      if (group == 0 && k < plan.columns) at.out[all_row * plan.columns + k] = partial[thread];
    }
  }
}

struct CudaDistance {
  template <Power P, class T>
  static void power(const DistancePlan& plan, const Pointers<T>& at, const Stream& stream) {
    // p = inf reads the pairs' elements for each piece of the columns: the fewer, the better
    constexpr int kMost = P == Power::kExtreme ? kThreads : kWarp;
    int lanes = 1;
    while (lanes * kSums < plan.columns && lanes < kMost) lanes *= 2;
    const int64_t units = plan.batch * plan.rows * ((plan.columns - 1) / (int64_t{lanes} * kSums) + 1);
    stream.launch(row_kernel<P, T>, std::min<int64_t>(units, 1 << 20), kThreads, 0, plan,
                  trust_range<T>(plan.p, plan.columns), lanes, at);
  }

  template <class T>
  static void run(const DistancePlan& plan, const Tensor& grad, const Tensor& x1, const Tensor& x2,
                  const Tensor& distances, Tensor& out) {
    const Stream stream("manualgrad: distances: ", x1);
    const Pointers<T> at{static_cast<const T*>(x1.const_data_ptr()), static_cast<const T*>(x2.const_data_ptr()),
                         static_cast<const T*>(grad.const_data_ptr()),
                         static_cast<const T*>(distances.const_data_ptr()), static_cast<T*>(out.mutable_data_ptr())};
    switch (plan.power) {
      case Power::kOne:
        return power<Power::kOne>(plan, at, stream);
      case Power::kTwo:
        return power<Power::kTwo>(plan, at, stream);
      case Power::kThree:
        return power<Power::kThree>(plan, at, stream);
      case Power::kFour:
        return power<Power::kFour>(plan, at, stream);
      case Power::kThreeHalves:
        return power<Power::kThreeHalves>(plan, at, stream);
      case Power::kGeneral:
        return power<Power::kGeneral>(plan, at, stream);
      case Power::kExtreme:
        return power<Power::kExtreme>(plan, at, stream);
    }
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::DistanceOperators<manualgrad::CudaDistance>)
