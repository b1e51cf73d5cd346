// The derivatives of small decompositions on the CPU, one matrix at a time, all in the cache.
#pragma once

#include "quotients.h"
#include "small.h"

#include <memory>

namespace manualgrad {

// Memory for matrices of the largest size, for one thread.
template <class S>
class Scratch {
 public:
  Scratch(int64_t m, int64_t n)
      : size_(static_cast<size_t>(std::max(m, n) * std::max(m, n))), memory_(new S[kParts * size_]) {}
  S* operator[](size_t part) { return memory_.get() + part * size_; }

 private:
  static constexpr size_t kParts = 5;
  size_t size_;
  std::unique_ptr<S[]> memory_;
};

template <class D, class S>
bool matrix_vjp(const VjpOperands<S>& at, int64_t b, Scratch<S>& memory) {
  const int64_t m = at.m, n = at.n, k = at.k;
  const View<S> u = view(at.u, b), vh = D::kSvd ? view(at.vh, b) : u.adjoint();
  const View<S> gu = view(at.gu, b), gvh = view(at.gvh, b);
  S *x = memory[0], *y = memory[1], *inner = memory[2], *right = memory[3], *projected = memory[4];
  S* ga = at.ga + b * m * n;
  if (gu.data != nullptr) vector_product(u.adjoint(), gu, k, m, k, x);
  if (gvh.data != nullptr) vector_product(vh, gvh.adjoint(), k, n, k, y);
  const auto one = [&](auto batch) {
    if (batch.data != nullptr) batch.data += b * batch.batch_stride;
    return batch;
  };
  Spectrum<D, S> spectrum(
      {1, k, one(at.s), one(at.gs), gu.data != nullptr ? x : nullptr, gvh.data != nullptr ? y : nullptr, one(at.gu),
       one(at.gvh), gu.data != nullptr ? m : 0, gvh.data != nullptr ? n : 0, at.options},
      0);
  bool gauge_dependent = spectrum.quotients(inner, nullptr);
  vector_product({inner, k, 1}, vh, k, k, n, right);
  if (n > k && gvh.data != nullptr) {
    vector_product(View<S>{y, k, 1}.adjoint(), vh, k, k, n, projected);
    gauge_dependent |= spectrum.complement(projected, false, right);
  }
  vector_product(u, {right, n, 1}, m, k, n, ga);
  if (m > k && gu.data != nullptr) {
    vector_product(u, {x, k, 1}, m, k, k, projected);
    std::fill(right, right + m * k, S{});
    gauge_dependent |= spectrum.complement(projected, true, right);
    vector_product({right, k, 1}, vh, m, k, n, ga, true);
  }
  return gauge_dependent;
}

template <class D, class S>
bool matrix_jvp(const JvpOperands<S>& at, int64_t b, Scratch<S>& memory) {
  const int64_t m = at.m, n = at.n, k = at.k;
  const View<S> u = view(at.u, b), vh = D::kSvd ? view(at.vh, b) : u.adjoint(), da = view(at.da, b);
  S *p = memory[0], *outer = memory[1], *first = memory[2], *second = memory[3], *projected = memory[4];
  S *du = at.du + b * m * k, *dvh = D::kSvd ? at.dvh + b * k * n : nullptr;
  if (n > k) {
    vector_product(u.adjoint(), da, k, m, n, outer);
    vector_product({outer, n, 1}, vh.adjoint(), k, n, k, p);
  } else {
    vector_product(da, vh.adjoint(), m, n, k, outer);
    vector_product(u.adjoint(), {outer, k, 1}, k, m, k, p);
  }
  const S *columns = m > k ? outer : p, *rows = !D::kSvd ? nullptr : n > k ? outer : p;
  MatrixBatch<const RealOf<S>> s = at.s;
  s.data += b * s.batch_stride;
  Spectrum<D, S> spectrum(
      {1, k, s, {}, p, nullptr, {columns, 0, k, 1}, {rows, 0, n, 1}, m, rows != nullptr ? n : 0, at.options}, 0);
  bool gauge_dependent = spectrum.quotients(first, second);
  for (int64_t i = 0; i < k; ++i) at.ds[b * k + i] = real_part(p[i * (k + 1)]);
  vector_product(u, {first, k, 1}, m, k, k, du);
  if constexpr (D::kSvd) {
    vector_product({second, k, 1}, vh, k, k, n, dvh);
    if (m > k) {
      vector_product(u, {p, k, 1}, m, k, k, projected);
      gauge_dependent |= spectrum.complement(projected, true, du);
    }
    if (n > k) {
      vector_product({p, k, 1}, vh, k, k, n, projected);
      gauge_dependent |= spectrum.complement(projected, false, dvh);
    }
  }
  return gauge_dependent;
}

}  // namespace manualgrad
