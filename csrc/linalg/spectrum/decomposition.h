// Shared by the derivatives of the SVD and of the Hermitian eigendecomposition: checks of the arguments, and the
// structures that kernels receive. The mathematics is in torch_manualgrad/derivatives/linalg/degeneracy.py.
#pragma once

#include "../../base/dispatch.h"
#include "../../base/matrices.h"
#include "../../math/degeneracy.h"
#include "../limits.h"

#include <algorithm>
#include <tuple>

namespace manualgrad {

// A = U diag(s) Vh: the SVD, or the eigendecomposition, which has no vh: it is U^H.
struct Decomposition {
  const char* where;  // the prefix of error messages
  Tensor u, s;
  OptionalTensor vh;
  int64_t m, n, k;
  SpectrumOptions options;

  std::vector<int64_t> shape(int64_t rows, int64_t columns) const {
    const Geometry at = geometry(u);
    std::vector<int64_t> sizes(at.sizes, at.sizes + at.dim);
    sizes[at.dim - 2] = rows;
    sizes[at.dim - 1] = columns;
    return sizes;
  }
  std::vector<int64_t> values_shape() const {
    std::vector<int64_t> sizes = shape(k, k);
    sizes.pop_back();
    return sizes;
  }
  int64_t batch() const { return batch_of(u); }
};

inline void check_shape(const char* where, const char* name, const Tensor& tensor, const std::vector<int64_t>& expected,
                        ScalarType type, const Tensor& like) {
  const Geometry at = geometry(tensor);
  MANUALGRAD_CHECK(
      at.dim == static_cast<int64_t>(expected.size()) && std::equal(expected.begin(), expected.end(), at.sizes), where,
      name, ": expected shape ", list(expected.data(), static_cast<int64_t>(expected.size())), ", got ",
      list(at.sizes, at.dim));
  MANUALGRAD_CHECK(tensor.scalar_type() == type, where, name, ": expected ", dtype_name(type), ", got ",
                   dtype_name(tensor.scalar_type()));
  MANUALGRAD_CHECK(same_device(tensor, like), where, name, ": not on the device of the decomposition");
}

inline Decomposition decomposition(const char* where, const Tensor& u, const Tensor& s, const OptionalTensor& vh,
                                   std::optional<double> rtol, double atol, double broadening) {
  MANUALGRAD_CHECK(u.dim() >= 2 && (!vh || vh->dim() >= 2), where, "expected matrices");
  const int64_t m = u.size(-2), n = vh ? vh->size(-1) : m;
  Decomposition d{where, u, s, vh, m, n, u.size(-1), {rtol.value_or(-1), atol, broadening, 0}};
  d.options.size = std::max(d.m, d.n);
  MANUALGRAD_CHECK(d.k == std::min(d.m, d.n), where, "expected thin factors, got U with ", d.k,
                   " columns for a matrix of ", d.m, " by ", d.n);
  if (vh) check_shape(where, "Vh", *vh, d.shape(d.k, d.n), u.scalar_type(), u);
  check_shape(where, "S", s, d.values_shape(), real_dtype(u.scalar_type()), u);
  return d;
}

struct Cotangents {
  OptionalTensor u, s, vh;
};

inline void check_cotangents(const char* where, const Cotangents& g, const Decomposition& at) {
  const auto check = [&](const char* name, const OptionalTensor& given, const Tensor& value) {
    if (!given) return;
    const Geometry like = geometry(value);
    check_shape(where, name, *given, {like.sizes, like.sizes + like.dim}, value.scalar_type(), at.u);
  };
  check("cotangent of the left vectors", g.u, at.u);
  check("cotangent of the values", g.s, at.s);
  if (at.vh) check("cotangent of the right vectors", g.vh, *at.vh);
}

// --- what a device works on -----------------------------------------------------------------------------------------

// A batch of spectra with everything that their rules may read. x and y, or only x = P, are row-major and without gaps.
// The numerators are inner products of `columns` (*, k) and `rows` (k, *). Absent ones are null.
template <class S>
struct Spectra {
  using T = RealOf<S>;
  int64_t count, k;
  MatrixBatch<const T> s, g;
  const S* x;
  const S* y;
  MatrixBatch<const S> columns, rows;
  int64_t columns_length, rows_length;
  SpectrumOptions options;
};

// Keeps alive what the Spectra point to.
struct SpectraTensors {
  OptionalTensor x, y, s, g, columns, rows;

  template <class S>
  Spectra<S> view(const Decomposition& at) const {
    Spectra<S> spectra{at.batch(), at.k, {}, {}, nullptr, nullptr, {}, {}, 0, 0, at.options};
    spectra.s = matrices<RealOf<S>>(*s, 1);
    if (g) spectra.g = matrices<RealOf<S>>(*g, 1);
    if (x) spectra.x = static_cast<const S*>(x->const_data_ptr());
    if (y) spectra.y = static_cast<const S*>(y->const_data_ptr());
    if (columns) {
      spectra.columns = matrices<S>(*columns);
      spectra.columns_length = columns->size(-2);
    }
    if (rows) {
      spectra.rows = matrices<S>(*rows);
      spectra.rows_length = rows->size(-1);
    }
    return spectra;
  }
};

struct Tangents {
  Tensor u, s;
  OptionalTensor vh;
};

// --- the operators' common form, on any device ----------------------------------------------------------------------
//
// Device::new_flag(like): a new 0-dim bool, false.
// Device::vjp<D>(where, cotangents, decomposition, flag) and Device::jvp<D> choose the route.

template <class D, class Device>
std::tuple<Tensor, Tensor> decomposition_vjp(const char* where, const Cotangents& g, const Decomposition& at) {
  check_cotangents(where, g, at);
  Tensor gauge_dependent = Device::new_flag(at.u);
  if (at.u.numel() == 0 || at.n == 0 || (!g.u && !g.s && !g.vh)) {
    return {torch::stable::new_zeros(at.u, at.shape(at.m, at.n)), gauge_dependent};
  }
  return {Device::template vjp<D>(where, g, at, gauge_dependent), gauge_dependent};
}

template <class D, class Device>
Tangents decomposition_jvp(const char* where, const Tensor& da, const Decomposition& at, Tensor& gauge_dependent) {
  check_shape(where, "dA", da, at.shape(at.m, at.n), at.u.scalar_type(), at.u);
  if (at.u.numel() == 0 || at.n == 0) {
    using torch::stable::new_zeros;
    return {new_zeros(at.u, at.shape(at.m, at.k)), new_zeros(at.s, at.values_shape()),
            new_zeros(at.u, at.shape(at.k, at.n))};
  }
  return Device::template jvp<D>(where, da, at, gauge_dependent);
}

}  // namespace manualgrad
