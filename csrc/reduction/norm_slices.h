// The values of a slice that its elements need, and norms computed again if the stored one cannot be relied on. Host
// code.
#pragma once

#include "../base/parallel.h"
#include "../base/simd.h"
#include "norm_elements.h"

#include <memory>

namespace manualgrad {

// The largest (p > 0) or smallest modulus of a part of a slice; nan if there is one. Non-negative floats are ordered
// as their bits are, nan above all, and integer extremes vectorise.
template <class S>
struct ExtremeBody {
  using T = RealCompute<S>;
  using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

  HOST_INLINE static void stretch(const S* from, int64_t step, int64_t count, Bits& low, Bits& high) {
    Bits least = low, most = high;
    for (int64_t i = 0; i < count; ++i) {
      const Bits bits = bits_as<Bits>(modulus(load(from[i * step]))) & std::numeric_limits<Bits>::max();
      least = bits < least ? bits : least;
      most = bits > most ? bits : most;
    }
    low = least;
    high = most;
  }

  HOST_INLINE static void run(const S* x, const LoopNest<1>& loops, bool largest, int64_t begin, int64_t end,
                              T* result) {
    const int64_t inner = loops.inner(), step = loops.inner_stride(0);
    Bits low = std::numeric_limits<Bits>::max(), high = 0;
    while (begin < end) {
      int64_t offset[1];
      loops.offsets(begin, offset);
      const int64_t count = std::min(inner - begin % inner, end - begin);
      if (step == 1) {
        stretch(x + offset[0], 1, count, low, high);
      } else {
        stretch(x + offset[0], step, count, low, high);
      }
      begin += count;
    }
    const T most = bits_as<T>(high);
    *result = largest || most != most ? most : bits_as<T>(low);
  }
};

template <class S>
double scaled_sum_of(const S* x, const LoopNest<1>& loops, RealCompute<S> extreme, double p, int64_t begin,
                     int64_t end) {
  const int64_t inner = loops.inner(), step = loops.inner_stride(0);
  double sum = 0;
  while (begin < end) {
    int64_t offset[1];
    loops.offsets(begin, offset);
    const int64_t count = std::min(inner - begin % inner, end - begin);
    for (int64_t i = 0; i < count; ++i) sum += scaled_term(modulus(load(x[offset[0] + i * step])), extreme, p);
    begin += count;
  }
  return sum;
}

// Reduces one slice in fixed blocks: combine(part(begin, end), ...) in order.
template <class V, class Part, class Combine>
V reduce_slice(int64_t count, const Part& part, const Combine& combine) {
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  if (blocks <= 1) return part(int64_t{0}, count);
  std::unique_ptr<V[]> parts(new V[blocks]);
  parallel_for(blocks, kGrain / kBlock, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) parts[i] = part(i * kBlock, std::min((i + 1) * kBlock, count));
  });
  V result = parts[0];
  for (int64_t i = 1; i < blocks; ++i) result = combine(result, parts[i]);
  return result;
}

template <class S>
RealCompute<S> slice_extreme(const S* x, const NormPlan& plan) {
  using T = RealCompute<S>;
  const bool largest = plan.p > 0;
  return reduce_slice<T>(
      plan.slice_size,
      [&](int64_t begin, int64_t end) {
        T extreme;
        Multiversion<ExtremeBody<S>>::call(x, plan.reduced, largest, begin, end, &extreme);
        return extreme;
      },
      [&](T left, T right) {
        if (left != left || right != right) return left + right;
        return largest ? std::max(left, right) : std::min(left, right);
      });
}

// The norm of a slice whose stored norm cannot be relied on, or that stored norm where no better one exists.
template <class S>
RealCompute<S> recomputed_norm(const S* x, RealCompute<S> stored, const NormPlan& plan) {
  using T = RealCompute<S>;
  const T extreme = slice_extreme(x, plan);
  if (!(extreme > T(0) && extreme <= std::numeric_limits<T>::max())) return stored;
  const double sum = reduce_slice<double>(
      plan.slice_size, [&](int64_t b, int64_t e) { return scaled_sum_of(x, plan.reduced, extreme, plan.p, b, e); },
      [](double left, double right) { return left + right; });
  return norm_from_scaled_sum(extreme, sum, plan.p);
}

// A complex modulus is rounded, and not in the same way everywhere: a norm that is the extreme modulus up to that
// rounding is replaced by the extreme modulus as is_tie computes it.
template <class S>
RealCompute<S> matched_extreme(const S* x, RealCompute<S> stored, const NormPlan& plan) {
  using T = RealCompute<S>;
  if constexpr (std::is_same_v<Compute<S>, T>) {
    return stored;
  } else {
    const T extreme = slice_extreme(x, plan);
    const T eps = std::is_same_v<Real<S>, Half> ? T(0.0009765625) : std::numeric_limits<T>::epsilon();
    return std::fabs(extreme - stored) <= 8 * eps * extreme ? extreme : stored;
  }
}

template <class S>
Slice<RealCompute<S>> make_slice(const NormPlan& plan, const Trust& trust, const S* x, Real<S> g, Real<S> stored) {
  auto n = load(stored);
  if (plan.power == Power::kExtreme) {
    n = matched_extreme(x, n, plan);
  } else if (plan.power != Power::kOne && !trusted(n, trust)) {
    n = recomputed_norm(x, n, plan);
  }
  return norm_slice(plan.power, load(g), n);
}

}  // namespace manualgrad
