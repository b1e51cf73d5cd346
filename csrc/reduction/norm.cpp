// The cotangent of a vector norm on the CPU; the contract is in norm.h.
#include "norm.h"

#include <memory>

#include "norm_blocks.h"
#include "norm_slices.h"
#include "norm_ties.h"

namespace manualgrad {
namespace {

// Strided loops gain nothing from wider vectors: they are compiled once, and serve all strides without AVX2.
template <Stride L, class Body, class Any, class... Args>
void run_best(const Args&... args) {
  if constexpr (L == Stride::kAny) {
    run_baseline<Any>(args...);
  } else {
    Multiversion<Body, Any>::call(args...);
  }
}

// A part of a tensor, for finite p.
template <class S>
struct FinitePart {
  const LoopNest<3>& loops;
  const S* x;
  S* out;
  const Coefficients<RealCompute<S>>& slices;
  double exponent;
  int64_t begin, end;

  template <Stride L>
  void run(Power power) const {
    if constexpr (!kInBlocks<S>) {
      switch (power) {
        case Power::kOne:
          return run_as<Power::kOne, L>();
        case Power::kTwo:
          return run_as<Power::kTwo, L>();
        case Power::kThree:
          return run_as<Power::kThree, L>();
        case Power::kFour:
          return run_as<Power::kFour, L>();
        case Power::kThreeHalves:
          return run_as<Power::kThreeHalves, L>();
        default:
          break;
      }
    }
    run_as<Power::kGeneral, L>();
  }
  void run(Power power, Stride stride) const {
    if (stride == Stride::kOneSlice) return run<Stride::kOneSlice>(power);
    if (stride == Stride::kAcrossSlices) return run<Stride::kAcrossSlices>(power);
    run<Stride::kAny>(power);
  }

 private:
  template <Power P, Stride L>
  void run_as() const {
    run_best<L, FiniteBody<P, L, S>, FiniteBody<P, Stride::kAny, S>>(loops, x, out, slices, exponent, begin, end);
  }
};

// unit: whether neighbouring elements are contiguous in memory.
template <class S>
void run_finite(const NormPlan& plan, Stride stride, bool unit, const S* x, S* out,
                const Coefficients<RealCompute<S>>& slices) {
  using W = Compute<S>;
  const double exponent = plan.p - 1;
  parallel_for(plan.numel(), kGrain, [&](int64_t begin, int64_t end) {
    constexpr bool kComplex = !std::is_same_v<S, Real<S>>;
    if constexpr (kInBlocks<S>) {
      if (kComplex || plan.power != Power::kGeneral) {  // kGeneral is faster without blocks
        const auto part = [&](const LoopNest<3>& loops, const W* from, W* to, int64_t first, int64_t last) {
          FinitePart<W>{loops, from, to, slices, exponent, first, last}.run(plan.power, stride);
        };
        return in_wide_blocks(plan.elements, x, out, begin, end, part);
      }
    }
    if constexpr (!kInBlocks<S> || !kComplex) {
      FinitePart<S>{plan.elements, x, out, slices, exponent, begin, end}.run(plan.power, unit ? stride : Stride::kAny);
    }
  });
}

template <Stride L, class S>
void run_extreme(const NormPlan& plan, const S* x, S* out, const Coefficients<RealCompute<S>>& slices) {
  using T = RealCompute<S>;
  const int64_t inner = plan.elements.inner();
  if (L == Stride::kOneSlice && inner == plan.slice_size && inner <= kGrain) {
    parallel_for(plan.slices, std::max<int64_t>(1, kGrain / inner), [&](int64_t begin, int64_t end) {
      Multiversion<TieRowsBody<S>>::call(plan.elements, x, out, slices.a, slices.n, begin, end);
    });
    return;
  }
  if (const int64_t width = L == Stride::kAcrossSlices ? TieTilesBody<S>::width(plan) : 0) {
    const int64_t tiles = plan.numel() / (plan.slice_size * inner) * ((inner + width - 1) / width);
    parallel_for(tiles, std::max<int64_t>(1, kGrain / (plan.slice_size * width)), [&](int64_t begin, int64_t end) {
      Multiversion<TieTilesBody<S>>::call(plan.elements, x, out, slices.a, slices.n, width, begin, end);
    });
    return;
  }
  const int64_t blocks = (plan.numel() + kBlock - 1) / kBlock;
  std::vector<int64_t> ties(static_cast<size_t>(plan.slices));
  std::vector<uint8_t> has_ties(static_cast<size_t>(blocks));
  parallel_for(blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    run_best<L, TieBody<L, S>, TieBody<Stride::kAny, S>>(plan.elements, x, out, slices.n, ties.data(), has_ties.data(),
                                                         begin, end);
  });
  std::vector<T> share(static_cast<size_t>(plan.slices));
  bool finite = true;
  for (int64_t s = 0; s < plan.slices; ++s) {
    share[s] = slices.a[s] / static_cast<T>(ties[s]);
    finite = finite && std::isfinite(share[s]);
  }
  parallel_for(blocks, kGrain / kBlock, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      if (finite && !has_ties[block]) continue;
      Multiversion<ShareBody<S>>::call(plan.elements, out, share.data(), block * kBlock,
                                       std::min((block + 1) * kBlock, plan.numel()));
    }
  });
}

struct CpuNorm {
  template <class S>
  static void run(const NormPlan& plan, const Tensor& grad, const Tensor& self, const Tensor& norm, const Tensor& out) {
    using R = Real<S>;
    using T = RealCompute<S>;
    const S* x = static_cast<const S*>(self.const_data_ptr());
    const R* g = static_cast<const R*>(grad.const_data_ptr());
    const R* n = static_cast<const R*>(norm.const_data_ptr());

    // One slice, the common case, needs no memory of its own.
    T single[3];
    std::unique_ptr<T[]> many;
    T* memory = single;
    if (plan.slices > 1) {
      many.reset(new T[3 * plan.slices]);
      memory = many.get();
    }
    const int64_t slices = plan.slices;
    const Trust trust = trust_range<R>(plan.p, plan.slice_size);
    // A slice may have to be read: if slices are large, work is counted in elements.
    const int64_t grain = slices > 1 ? std::max<int64_t>(16, kGrain / 16 / plan.slice_size) : 1;
    parallel_for(slices, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        int64_t offset[3];
        plan.kept.offsets(s, offset);
        const Slice<T> slice = make_slice(plan, trust, x + offset[0], g[offset[1]], n[offset[2]]);
        memory[s] = slice.a;
        memory[slices + s] = slice.b;
        memory[2 * slices + s] = slice.n;
      }
    });

    const Coefficients<T> coefficients{memory, memory + slices, memory + 2 * slices};
    S* to = static_cast<S*>(out.mutable_data_ptr());
    const LoopNest<3>& loops = plan.elements;
    const bool unit = loops.dims == 0 || (loops.inner_stride(0) == 1 && loops.inner_stride(1) == 1);
    const int64_t step = loops.inner_stride(2);
    const Stride stride = step == 0 ? Stride::kOneSlice : (step == 1 ? Stride::kAcrossSlices : Stride::kAny);
    if (plan.power != Power::kExtreme) {
      return run_finite(plan, stride, unit, x, to, coefficients);
    }
    if constexpr (!std::is_same_v<S, Complex<Half>>) {  // torch itself has hardly any operations on these
      if (unit && stride == Stride::kOneSlice) return run_extreme<Stride::kOneSlice>(plan, x, to, coefficients);
      if (unit && stride == Stride::kAcrossSlices) return run_extreme<Stride::kAcrossSlices>(plan, x, to, coefficients);
    }
    run_extreme<Stride::kAny>(plan, x, to, coefficients);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::NormOperators<manualgrad::CpuNorm>)
