// Derivatives of small decompositions, on any device: all that one kernel needs.
#pragma once

#include "decomposition.h"

namespace manualgrad {

template <class S>
struct Operands {
  using Element = S;
  int64_t m, n, k;
  SpectrumOptions options;
  MatrixBatch<const S> u, vh;  // vh: null for the eigendecomposition
  MatrixBatch<const RealOf<S>> s;
};

template <class S>
struct VjpOperands : Operands<S> {
  MatrixBatch<const S> gu, gvh;
  MatrixBatch<const RealOf<S>> gs;
  S* ga;
};
template <class S>
struct JvpOperands : Operands<S> {
  MatrixBatch<const S> da;
  S *du, *dvh;
  RealOf<S>* ds;
};

template <class S>
Operands<S> operands(const Decomposition& at, const Tensor& u, const Tensor& s, const OptionalTensor& vh) {
  Operands<S> result{at.m, at.n, at.k, at.options, matrices<S>(u), {}, matrices<RealOf<S>>(s, 1)};
  if (vh) result.vh = matrices<S>(*vh);
  return result;
}

// run(operands) fills the result.
template <class D, class Run>
Tensor small_vjp(const char* where, const Cotangents& g, const Decomposition& at, const Run& run) {
  Tensor out = allocate(at.shape(at.m, at.n), at.u);
  const Tensor u = with_single_batch(at.u), s = with_single_batch(at.s, 1);
  const OptionalTensor vh = with_single_batch(at.vh, 2), gu = with_single_batch(g.u, 2);
  const OptionalTensor gs = with_single_batch(g.s, 1), gvh = with_single_batch(g.vh, 2);
  dispatch_matrix(at.u.scalar_type(), where, "U", [&](auto tag) {
    using S = typename decltype(tag)::type;
    VjpOperands<S> all{};
    static_cast<Operands<S>&>(all) = operands<S>(at, u, s, vh);
    if (gu) all.gu = matrices<S>(*gu);
    if (gs) all.gs = matrices<RealOf<S>>(*gs, 1);
    if (gvh) all.gvh = matrices<S>(*gvh);
    all.ga = static_cast<S*>(out.mutable_data_ptr());
    run(all);
  });
  return out;
}

template <class D, class Run>
Tangents small_jvp(const char* where, const Tensor& tangent, const Decomposition& at, const Run& run) {
  Tangents t{allocate(at.shape(at.m, at.k), at.u), allocate(at.values_shape(), at.s), std::nullopt};
  if (D::kSvd) t.vh = allocate(at.shape(at.k, at.n), at.u);
  const Tensor u = with_single_batch(at.u), s = with_single_batch(at.s, 1), da = with_single_batch(tangent);
  const OptionalTensor vh = with_single_batch(at.vh, 2);
  dispatch_matrix(at.u.scalar_type(), where, "U", [&](auto tag) {
    using S = typename decltype(tag)::type;
    JvpOperands<S> all{};
    static_cast<Operands<S>&>(all) = operands<S>(at, u, s, vh);
    all.da = matrices<S>(da);
    all.du = static_cast<S*>(t.u.mutable_data_ptr());
    if (t.vh) all.dvh = static_cast<S*>(t.vh->mutable_data_ptr());
    all.ds = static_cast<RealOf<S>*>(t.s.mutable_data_ptr());
    run(all);
  });
  return t;
}

}  // namespace manualgrad
