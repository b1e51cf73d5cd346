// Derivatives of large decompositions, on any device: through torch's products of whole batches.
#pragma once

#include "decomposition.h"

namespace manualgrad {

inline bool is_complex(const Tensor& tensor) { return real_dtype(tensor.scalar_type()) != tensor.scalar_type(); }

inline Tensor adjoint(const Tensor& tensor) {
  return is_complex(tensor) ? call_torch("aten::mH", "", tensor) : torch::stable::transpose(tensor, -2, -1);
}

// Device::quotients<D>(tensors, at, out, out2, gauge_dependent)  out = q + r + diag g; jvp, out2 = r - q
// Device::complement<D>(tensors, at, product, by_columns, out, gauge_dependent)
//     out += (`columns`, or `rows`, minus their projection) / values

template <class D, class Device>
Tensor vjp(const Cotangents& g, const Decomposition& at, Tensor& gauge_dependent) {
  using torch::stable::matmul;
  const Tensor vh = at.vh ? *at.vh : adjoint(at.u);
  if (!g.u && !g.vh) {
    return matmul(call_torch("aten::mul", "Tensor", at.u, call_torch("aten::unsqueeze", "", *g.s, int64_t{-2})), vh);
  }
  SpectraTensors tensors;
  tensors.s = with_single_batch(at.s, 1);
  tensors.g = with_single_batch(g.s, 1);
  tensors.columns = with_single_batch(g.u, 2);
  tensors.rows = with_single_batch(g.vh, 2);
  if (g.u) tensors.x = torch::stable::contiguous(matmul(adjoint(at.u), *g.u));
  if (g.vh) tensors.y = torch::stable::contiguous(matmul(vh, adjoint(*g.vh)));
  Tensor inner = allocate(at.shape(at.k, at.k), at.u);
  Device::template quotients<D>(tensors, at, inner, nullptr, gauge_dependent);
  if (g.vh && at.n > at.k) {
    Tensor right = matmul(inner, vh);
    Device::template complement<D>(tensors, at, matmul(adjoint(*tensors.y), vh), false, right, gauge_dependent);
    return matmul(at.u, right);
  }
  Tensor left = matmul(at.u, inner);
  if (g.u && at.m > at.k) {
    Device::template complement<D>(tensors, at, matmul(at.u, *tensors.x), true, left, gauge_dependent);
  }
  return matmul(left, vh);
}

template <class D, class Device>
Tangents jvp(const Tensor& da, const Decomposition& at, Tensor& gauge_dependent) {
  using torch::stable::contiguous;
  using torch::stable::matmul;
  const Tensor vh = at.vh ? *at.vh : adjoint(at.u);
  SpectraTensors tensors;
  tensors.s = with_single_batch(at.s, 1);
  if (at.n > at.k) {
    tensors.rows = contiguous(matmul(adjoint(at.u), da));
    tensors.x = tensors.columns = contiguous(matmul(*tensors.rows, adjoint(vh)));
  } else {
    const Tensor right = contiguous(matmul(da, adjoint(vh)));
    tensors.x = contiguous(matmul(adjoint(at.u), right));
    tensors.columns = at.m > at.k ? right : *tensors.x;
    if (D::kSvd) tensors.rows = tensors.x;
  }
  Tensor first = allocate(at.shape(at.k, at.k), at.u);
  OptionalTensor second;
  if (D::kSvd) second = allocate(at.shape(at.k, at.k), at.u);
  Device::template quotients<D>(tensors, at, first, second ? &*second : nullptr, gauge_dependent);
  const Tensor diagonal = call_torch("aten::diagonal", "", *tensors.x, int64_t{0}, int64_t{-2}, int64_t{-1});
  Tangents t{matmul(at.u, first),
             torch::stable::clone(is_complex(at.u) ? call_torch("aten::real", "", diagonal) : diagonal), std::nullopt};
  if (D::kSvd) t.vh = matmul(*second, vh);
  if (at.m > at.k) Device::template complement<D>(tensors, at, matmul(at.u, *tensors.x), true, t.u, gauge_dependent);
  if (at.n > at.k) Device::template complement<D>(tensors, at, matmul(*tensors.x, vh), false, *t.vh, gauge_dependent);
  return t;
}

}  // namespace manualgrad
