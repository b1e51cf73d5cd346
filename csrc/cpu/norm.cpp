// manualgrad::norm_backward(Tensor grad, Tensor self, float p, Tensor norm, int[]? dim=None, bool keepdim=True) ->
// Tensor
//
// The cotangent of self for norm = ||self||_p over dim (None or []: all dims); the formula and its edges are in
// math/norm.h. grad and norm are real and have self's shape with dim reduced (keepdim) or removed. The result has
// self's dtype and the strides of empty_like(self). Any strides, any size, 0 included.
// Deterministic: elements are independent, ties are counted in integers, and a norm that has to be computed again is
// summed in fixed blocks, so no bit depends on the number of threads.
#include "../norm_plan.h"

#include <algorithm>
#include <memory>

namespace manualgrad {
namespace {

// Elements of one unit of work that must not depend on the number of threads.
constexpr int64_t kBlock = 8192;

// The slices' coefficients, one array each, so that a loop across slices loads vectors.
template <class T>
struct Coefficients {
  const T* a;
  const T* b;
  const T* n;
};

// --- elementwise loops ----------------------------------------------------------------------------------------------

enum class Stride { kOneSlice, kAcrossSlices, kAny };

// Visits [begin, end) of the loops as stretches of the innermost one: visit(x, out, slice, count).
template <class Visit>
HOST_DEVICE void for_stretches(const Loops<3>& loops, int64_t begin, int64_t end, Visit&& visit) {
  const int64_t inner = loops.inner();
  int64_t skip = begin % inner;
  while (begin < end) {
    int64_t offset[3];
    loops.offsets(begin, offset);
    // The loop around the innermost one is stepped, not decoded: rows may be a few elements long.
    const int around = loops.dims - 2;
    int64_t rows = around >= 0 ? loops.size[around] - (begin / inner) % loops.size[around] : 1;
    for (; rows > 0 && begin < end; --rows) {
      const int64_t count = std::min(inner - skip, end - begin);
      visit(offset[0], offset[1], offset[2], count);
      begin += count;
      if (around >= 0) {
        for (int k = 0; k < 3; ++k) offset[k] += loops.stride[k][around] - skip * loops.stride[k][around + 1];
      }
      skip = 0;
    }
  }
}

template <Power P, Stride L, class S>
struct FiniteStretch {
  using T = RealCompute<S>;
  const S* x;
  S* out;
  Coefficients<T> slices;
  double exponent;
  int64_t x_step, out_step, slice_step;

  HOST_DEVICE void operator()(int64_t x_at, int64_t out_at, int64_t slice, int64_t count) const {
    const S* __restrict from = x + x_at;
    S* __restrict to = out + out_at;
    const T* __restrict a = slices.a + slice;
    const T* __restrict b = slices.b + slice;
    const T* __restrict n = slices.n + slice;
    const double e = exponent;
    if constexpr (L == Stride::kOneSlice) {
      const Slice<T> one{*a, *b, *n};
      for (int64_t i = 0; i < count; ++i) store(to[i], norm_backward_element<P>(load(from[i]), one, e));
    } else if constexpr (L == Stride::kAcrossSlices) {
      for (int64_t i = 0; i < count; ++i) {
        store(to[i], norm_backward_element<P>(load(from[i]), Slice<T>{a[i], b[i], n[i]}, e));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t j = i * slice_step;
        store(to[i * out_step], norm_backward_element<P>(load(from[i * x_step]), Slice<T>{a[j], b[j], n[j]}, e));
      }
    }
  }
};

template <Power P, Stride L, class S>
struct FiniteBody {
  HOST_DEVICE static void run(const Loops<3>& loops, const S* x, S* out, const Coefficients<RealCompute<S>>& slices,
                              double exponent, int64_t begin, int64_t end) {
    for_stretches(loops, begin, end,
                  FiniteStretch<P, L, S>{x, out, slices, exponent, loops.inner_stride(0), loops.inner_stride(1),
                                         loops.inner_stride(2)});
  }
};

// Ties are counted in the width of the elements, which lets the loops vectorise, and in stretches that cannot overflow.
template <class T>
using TieCount = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

// Out of a stretch: the sign of x where its modulus attains the norm, 0 elsewhere, and the number of ties.
template <Stride L, class S>
struct TieStretch {
  using T = RealCompute<S>;
  const S* x;
  S* out;
  const T* norm;
  int64_t* ties;  // by slice; other threads add to the same ones
  int64_t* found;
  int64_t x_step, out_step, slice_step;

  HOST_DEVICE void operator()(int64_t x_at, int64_t out_at, int64_t slice, int64_t count) const {
    const S* __restrict from = x + x_at;
    S* __restrict to = out + out_at;
    const T* __restrict n = norm + slice;
    const int64_t sx = L == Stride::kAny ? x_step : 1, so = L == Stride::kAny ? out_step : 1;
    const int64_t ss = L == Stride::kAny ? slice_step : (L == Stride::kOneSlice ? 0 : 1);
    const T first = *n;
    for (int64_t start = 0; start < count; start += kBlock) {
      const int64_t stop = std::min(start + kBlock, count);
      TieCount<T> here = 0;
      for (int64_t i = start; i < stop; ++i) {
        const auto value = load(from[i * sx]);
        const T size = modulus(value);
        const bool tie = is_tie(size, L == Stride::kOneSlice ? first : n[i * ss]);
        store(to[i * so], tie_sign(value, size, tie));
        here += tie ? 1 : 0;
      }
      if (here == 0) continue;
      *found += here;
      if (ss == 0) {
        __atomic_fetch_add(ties + slice, static_cast<int64_t>(here), __ATOMIC_RELAXED);
        continue;
      }
      for (int64_t i = start; i < stop; ++i) {
        if (is_tie(modulus(load(from[i * sx])), n[i * ss])) {
          __atomic_fetch_add(ties + slice + i * ss, int64_t{1}, __ATOMIC_RELAXED);
        }
      }
    }
  }
};

template <Stride L, class S>
struct TieBody {
  HOST_DEVICE static void run(const Loops<3>& loops, const S* x, S* out, const RealCompute<S>* norm, int64_t* ties,
                              uint8_t* block_has_ties, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int64_t found = 0;
      const int64_t first = block * kBlock, numel = block_end(loops);
      for_stretches(loops, first, std::min(first + kBlock, numel),
                    TieStretch<L, S>{x, out, norm, ties, &found, loops.inner_stride(0), loops.inner_stride(1),
                                     loops.inner_stride(2)});
      block_has_ties[block] = found > 0;
    }
  }

  HOST_DEVICE static int64_t block_end(const Loops<3>& loops) {
    int64_t numel = 1;
    for (int d = 0; d < loops.dims; ++d) numel *= loops.size[d];
    return numel;
  }
};

// out *= share of its slice. Values are signs and zeros: 0 times a nan or infinite share is nan, as it must be.
template <class S>
struct ShareStretch {
  using T = RealCompute<S>;
  S* out;
  const T* share;
  int64_t out_step, slice_step;

  HOST_DEVICE void operator()(int64_t, int64_t out_at, int64_t slice, int64_t count) const {
    S* __restrict to = out + out_at;
    const T* __restrict factor = share + slice;
    if (slice_step == 0 && out_step == 1) {
      const T one = *factor;
      for (int64_t i = 0; i < count; ++i) store(to[i], scaled(load(to[i]), one));
    } else {
      for (int64_t i = 0; i < count; ++i) {
        store(to[i * out_step], scaled(load(to[i * out_step]), factor[i * slice_step]));
      }
    }
  }
};

template <class S>
struct ShareBody {
  HOST_DEVICE static void run(const Loops<3>& loops, S* out, const RealCompute<S>* share, int64_t begin, int64_t end) {
    for_stretches(loops, begin, end, ShareStretch<S>{out, share, loops.inner_stride(1), loops.inner_stride(2)});
  }
};

// Slices that lie in one piece and in cache: count the ties, then write the final values; no count leaves the slice.
template <class S>
struct TieRowsBody {
  HOST_DEVICE static void run(const Loops<3>& loops, const S* x, S* out, const RealCompute<S>* grad,
                              const RealCompute<S>* norm, int64_t begin, int64_t end) {
    using T = RealCompute<S>;
    const int64_t length = loops.inner();
    for (int64_t row = begin; row < end; ++row) {
      int64_t offset[3];
      loops.offsets(row * length, offset);
      const S* __restrict from = x + offset[0];
      S* __restrict to = out + offset[1];
      const T n = norm[offset[2]];
      TieCount<T> ties = 0;
      for (int64_t i = 0; i < length; ++i) ties += is_tie(modulus(load(from[i])), n) ? 1 : 0;
      const T share = grad[offset[2]] / static_cast<T>(ties);
      for (int64_t i = 0; i < length; ++i) {
        const auto value = load(from[i]);
        const T size = modulus(value);
        store(to[i], scaled(tie_sign(value, size, is_tie(size, n)), share));
      }
    }
  }
};

// Slices side by side: the same for a tile of them at a time, narrow enough for its rows to stay in cache.
constexpr int64_t kTileBytes = 262144, kTileWidth = 2048, kTileMinWidth = 64;

template <class S>
struct TieTilesBody {
  HOST_DEVICE static void run(const Loops<3>& loops, const S* x, S* out, const RealCompute<S>* grad,
                              const RealCompute<S>* norm, int64_t width, int64_t begin, int64_t end) {
    using T = RealCompute<S>;
    const int around = loops.dims - 2;
    const int64_t inner = loops.inner(), rows = loops.size[around], tiles = (inner + width - 1) / width;
    TieCount<T> ties[kTileWidth];
    T share[kTileWidth];
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t outer = tile / tiles, column = (tile - outer * tiles) * width;
      const int64_t count = std::min(width, inner - column);
      int64_t offset[3];
      loops.offsets(outer * rows * inner + column, offset);
      const T* __restrict n = norm + offset[2];
      const T* __restrict a = grad + offset[2];
      for (int64_t i = 0; i < count; ++i) ties[i] = 0;
      for (int64_t row = 0; row < rows; ++row) {
        const S* __restrict from = x + offset[0] + row * loops.stride[0][around];
        for (int64_t i = 0; i < count; ++i) ties[i] += is_tie(modulus(load(from[i])), n[i]) ? 1 : 0;
      }
      for (int64_t i = 0; i < count; ++i) share[i] = a[i] / static_cast<T>(ties[i]);
      for (int64_t row = 0; row < rows; ++row) {
        const S* __restrict from = x + offset[0] + row * loops.stride[0][around];
        S* __restrict to = out + offset[1] + row * loops.stride[1][around];
        for (int64_t i = 0; i < count; ++i) {
          const auto value = load(from[i]);
          const T size = modulus(value);
          store(to[i], scaled(tie_sign(value, size, is_tie(size, n[i])), share[i]));
        }
      }
    }
  }

  // The width of a tile, or 0 where the slices are too long, or not laid out as rows of side-by-side slices.
  static int64_t width(const NormPlan& plan) {
    const Loops<3>& loops = plan.elements;
    const int around = loops.dims - 2;
    if (around < 0 || loops.stride[2][around] != 0 || loops.size[around] != plan.slice_size) return 0;
    const int64_t fits = kTileBytes / (plan.slice_size * static_cast<int64_t>(sizeof(S)));
    return fits < std::min(kTileMinWidth, loops.inner()) ? 0 : std::min(fits, kTileWidth);
  }
};

// --- slices ---------------------------------------------------------------------------------------------------------

// The largest (p > 0) or smallest modulus of a part of a slice; nan if there is one. Non-negative floats are ordered
// as their bits are, nan above all, and integer extremes vectorise.
template <class S>
struct ExtremeBody {
  using T = RealCompute<S>;
  using Bits = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

  HOST_DEVICE static void stretch(const S* from, int64_t step, int64_t count, Bits& low, Bits& high) {
    Bits least = low, most = high;
    for (int64_t i = 0; i < count; ++i) {
      const Bits bits = bits_as<Bits>(modulus(load(from[i * step]))) & std::numeric_limits<Bits>::max();
      least = bits < least ? bits : least;
      most = bits > most ? bits : most;
    }
    low = least;
    high = most;
  }

  HOST_DEVICE static void run(const S* x, const Loops<1>& loops, bool largest, int64_t begin, int64_t end, T* result) {
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
double scaled_sum_of(const S* x, const Loops<1>& loops, RealCompute<S> extreme, double p, int64_t begin, int64_t end) {
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

// A complex modulus is rounded, and not everywhere alike: a norm that is the extreme modulus up to that rounding is
// replaced by the extreme modulus computed as is_tie will see it.
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

// --- the operator ---------------------------------------------------------------------------------------------------

// Strided loops gain nothing from wider vectors: they are compiled once.
template <Stride L, class Body, class... Args>
void run_best(const Args&... args) {
  if constexpr (L == Stride::kAny) {
    Body::run(args...);
  } else {
    Multiversion<Body>::call(args...);
  }
}

template <Power P, Stride L, class S>
void run_finite(const NormPlan& plan, const S* x, S* out, const Coefficients<RealCompute<S>>& slices) {
  parallel_for(plan.numel(), kGrain, [&](int64_t begin, int64_t end) {
    run_best<L, FiniteBody<P, L, S>>(plan.elements, x, out, slices, plan.p - 1, begin, end);
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
    run_best<L, TieBody<L, S>>(plan.elements, x, out, slices.n, ties.data(), has_ties.data(), begin, end);
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

template <Stride L, class S>
void run_power(const NormPlan& plan, const S* x, S* out, const Coefficients<RealCompute<S>>& slices) {
  switch (plan.power) {
    case Power::kOne:
      return run_finite<Power::kOne, L>(plan, x, out, slices);
    case Power::kTwo:
      return run_finite<Power::kTwo, L>(plan, x, out, slices);
    case Power::kThree:
      return run_finite<Power::kThree, L>(plan, x, out, slices);
    case Power::kFour:
      return run_finite<Power::kFour, L>(plan, x, out, slices);
    case Power::kThreeHalves:
      return run_finite<Power::kThreeHalves, L>(plan, x, out, slices);
    case Power::kGeneral:
      return run_finite<Power::kGeneral, L>(plan, x, out, slices);
    case Power::kExtreme:
      return run_extreme<L>(plan, x, out, slices);
  }
}

template <class S>
void run(const NormPlan& plan, const Tensor& grad, const Tensor& self, const Tensor& norm, const Tensor& out) {
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
  // A slice may have to be read: work is counted in elements where slices are large.
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
  const bool unit =
      plan.elements.dims == 0 || (plan.elements.inner_stride(0) == 1 && plan.elements.inner_stride(1) == 1);
  if (unit && plan.elements.inner_stride(2) == 0) return run_power<Stride::kOneSlice>(plan, x, to, coefficients);
  if (unit && plan.elements.inner_stride(2) == 1) return run_power<Stride::kAcrossSlices>(plan, x, to, coefficients);
  run_power<Stride::kAny>(plan, x, to, coefficients);
}

Tensor norm_backward(const Tensor& grad, const Tensor& self, double p, const Tensor& norm, const Dims& dim,
                     bool keepdim) {
  return norm_backward_by(grad, self, p, norm, dim, keepdim, [&](auto tag, const NormPlan& plan, Tensor& out) {
    run<typename decltype(tag)::type>(plan, grad, self, norm, out);
  });
}

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) { m.impl("norm_backward", TORCH_BOX(&manualgrad::norm_backward)); }
