// The derivatives of the SVD and of the Hermitian eigendecomposition on the CPU. There are three routes, by size. Small
// matrices in lanes, several at once; those whose values are near each other are computed again by the second route.
// Larger matrices one at a time, all in the cache. Large matrices through torch's products of whole batches.
#pragma once

#include "../run_on_cpu.h"
#include "lanes.h"
#include "matrix.h"
#include "products.h"

namespace manualgrad {

// Matrices of this order fill whole vectors one at a time, and need no lanes.
template <class S>
constexpr int64_t kFull = sizeof(RealOf<S>) == 4 ? 16 : 0;

struct CpuDecompositions : Cpu<> {
  static Tensor new_flag(const Tensor& like) { return new_flag_on_cpu(like); }

  template <class D>
  static void quotients(const SpectraTensors& tensors, const Decomposition& at, Tensor& out, Tensor* out2,
                        Tensor& gauge_dependent) {
    dispatch_matrix(at.u.scalar_type(), at.where, "U", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Spectra<S> spectra = tensors.view<S>(at);
      S* to = static_cast<S*>(out.mutable_data_ptr());
      S* to2 = out2 == nullptr ? nullptr : static_cast<S*>(out2->mutable_data_ptr());
      const int64_t size = at.k * at.k;
      GaugeFlag found(gauge_dependent);
      parallel_for(spectra.count, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          found |= Spectrum<D, S>(spectra, b).quotients(to + b * size, to2 == nullptr ? nullptr : to2 + b * size);
        }
      });
    });
  }

  template <class D>
  static void complement(const SpectraTensors& tensors, const Decomposition& at, const Tensor& projected,
                         bool by_columns, Tensor& out, Tensor& gauge_dependent) {
    dispatch_matrix(at.u.scalar_type(), at.where, "U", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const Spectra<S> spectra = tensors.view<S>(at);
      const Tensor kept = torch::stable::contiguous(projected);
      const S* from = static_cast<const S*>(kept.const_data_ptr());
      S* to = static_cast<S*>(out.mutable_data_ptr());
      const int64_t size = at.k * (by_columns ? at.m : at.n);
      GaugeFlag found(gauge_dependent);
      parallel_for(spectra.count, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          found |= Spectrum<D, S>(spectra, b).complement(from + b * size, by_columns, to + b * size);
        }
      });
    });
  }

  // One of the first two routes over a batch; one(b, scratch) computes a matrix by the second route, and returns
  // whether rule 4 applied.
  template <int Bytes, class Lanes, class S, class All, class One>
  static void run_small(const Decomposition& at, const All& all, Tensor& gauge_dependent, const One& one) {
    using Group = typename Lanes::Group;
    const int64_t size = std::max(at.m, at.n), work = 2 * (at.m + at.n) * at.k * at.k + 1, count = at.batch();
    // by groups of lanes also where threads share the work, so that no result depends on their number
    constexpr bool kInLanes = Bytes > 16 || kBaselineHasLanes;
    const int64_t group = kInLanes && size <= kLaneSpectrum && at.k != kFull<S> ? Group::kCount : 1,
                  groups = (count + group - 1) / group;
    GaugeFlag found(gauge_dependent);
    parallel_for(groups, std::max<int64_t>(1, 4 * kGrain / (work * group)), [&](int64_t begin, int64_t end) {
      Scratch<S> memory(at.m, at.n);
      if (group == 1) {
        for (int64_t b = begin; b < end; ++b) found |= one(b, memory);
        return;
      }
      if constexpr (kInLanes) {
        using N = typename Group::N;
        const std::unique_ptr<N[]> lanes(new N[Group::kParts * size * size + 2 * size]);
        for (int64_t first = begin * group; first < std::min(count, end * group); first += group) {
          bool redo[Group::kCount];
          const int64_t here = std::min(group, count - first);
          if (2 * here < group) {  // the results are the same
            for (int64_t w = 0; w < here; ++w) found |= one(first + w, memory);
            continue;
          }
          run_native<Bytes, Lanes>(all, first, here, lanes.get(), static_cast<bool*>(redo));
          for (int64_t w = 0; w < here; ++w) {
            if (redo[w]) found |= one(first + w, memory);
          }
        }
      }
    });
  }

  template <class D>
  static Tensor vjp(const char* where, const Cotangents& g, const Decomposition& at, Tensor& gauge_dependent) {
    if (std::max(at.m, at.n) > kSpectrumOrder) return manualgrad::vjp<D, CpuDecompositions>(g, at, gauge_dependent);
    return small_vjp<D>(where, g, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        run_small<kBytes, LaneVjp<D, S, kBytes>, S>(
            at, all, gauge_dependent, [&](int64_t b, Scratch<S>& memory) { return matrix_vjp<D>(all, b, memory); });
      });
    });
  }

  template <class D>
  static Tangents jvp(const char* where, const Tensor& da, const Decomposition& at, Tensor& gauge_dependent) {
    if (std::max(at.m, at.n) > kSpectrumOrder) return manualgrad::jvp<D, CpuDecompositions>(da, at, gauge_dependent);
    return small_jvp<D>(where, da, at, [&](const auto& all) {
      using S = typename std::decay_t<decltype(all)>::Element;
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        run_small<kBytes, LaneJvp<D, S, kBytes>, S>(
            at, all, gauge_dependent, [&](int64_t b, Scratch<S>& memory) { return matrix_jvp<D>(all, b, memory); });
      });
    });
  }
};

}  // namespace manualgrad
