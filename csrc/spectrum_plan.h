// The derivatives of the SVD and of the Hermitian eigendecomposition: arguments checked, and the route through products
// of whole batches, which large matrices take on every device. The mathematics is in
// torch_manualgrad/derivatives/linalg.
//
//   manualgrad::svd_pullback(Tensor? gU, Tensor? gS, Tensor? gVh, Tensor U, Tensor S, Tensor Vh, <options>)
//       -> (Tensor gA, Tensor doubts)
//   manualgrad::svd_pushforward(Tensor dA, Tensor U, Tensor S, Tensor Vh, <options>)
//       -> (Tensor dU, Tensor dS, Tensor dVh, Tensor doubts)
//   manualgrad::eigh_pullback(Tensor? gL, Tensor? gV, Tensor L, Tensor V, <options>) -> (Tensor gA, Tensor doubts)
//   manualgrad::eigh_pushforward(Tensor dA, Tensor L, Tensor V, <options>) -> (Tensor dV, Tensor dL, Tensor doubts)
//   <options>: float? rtol, float atol, float broadening
//
// U is (*, m, k), S (*, k), Vh (*, k, n) with k = min(m, n); float32, float64 and their complex dtypes; any strides.
// Results are contiguous. doubts is a 0-dim bool: whether rule 4 applied anywhere.
#pragma once

#include "math/spectrum.h"
#include "one_matrix.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace manualgrad {

using OptionalTensor = std::optional<Tensor>;

// --- operators of torch ---------------------------------------------------------------------------------------------

inline bool is_complex(const Tensor& tensor) { return real_dtype(tensor.scalar_type()) != tensor.scalar_type(); }

template <class... Arguments>
Tensor call_torch(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline Tensor adjoint(const Tensor& tensor) {
  return is_complex(tensor) ? call_torch("aten::mH", "", tensor) : torch::stable::transpose(tensor, -2, -1);
}

// --- the operators' common form -------------------------------------------------------------------------------------

// A = U diag(s) Vh: the SVD, or the eigendecomposition, which has no vh: it is U^H.
struct Decomposition {
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
  int64_t batch() const {
    const Geometry at = geometry(u);
    int64_t count = 1;
    for (int64_t d = 0; d < at.dim - 2; ++d) count *= at.sizes[d];
    return count;
  }
};

namespace detail {

inline void check_spectrum_shape(const char* where, const char* name, const Tensor& tensor,
                                 const std::vector<int64_t>& expected, ScalarType type, const Tensor& like) {
  const Geometry at = geometry(tensor);
  MANUALGRAD_CHECK(
      at.dim == static_cast<int64_t>(expected.size()) && std::equal(expected.begin(), expected.end(), at.sizes), where,
      name, ": expected shape ", list(expected.data(), static_cast<int64_t>(expected.size())), ", got ",
      list(at.sizes, at.dim));
  MANUALGRAD_CHECK(tensor.scalar_type() == type, where, name, ": expected ", dtype_name(type), ", got ",
                   dtype_name(tensor.scalar_type()));
  MANUALGRAD_CHECK(same_device(tensor, like), where, name, ": not on the device of the decomposition");
}

}  // namespace detail

inline Decomposition decomposition(const char* where, const Tensor& u, const Tensor& s, const OptionalTensor& vh,
                                   std::optional<double> rtol, double atol, double broadening) {
  MANUALGRAD_CHECK(u.dim() >= 2 && (!vh || vh->dim() >= 2), where, "expected matrices");
  Decomposition d{
      u, s, vh, u.size(-2), vh ? vh->size(-1) : u.size(-2), u.size(-1), {rtol.value_or(-1), atol, broadening, 0}};
  d.options.size = std::max(d.m, d.n);
  MANUALGRAD_CHECK(d.k == std::min(d.m, d.n), where, "expected thin factors, got U with ", d.k,
                   " columns for a matrix of ", d.m, " by ", d.n);
  if (vh) detail::check_spectrum_shape(where, "Vh", *vh, d.shape(d.k, d.n), u.scalar_type(), u);
  detail::check_spectrum_shape(where, "S", s, d.values_shape(), real_dtype(u.scalar_type()), u);
  return d;
}

struct Cotangents {
  OptionalTensor u, s, vh;
};

inline void check_cotangents(const char* where, const Cotangents& g, const Decomposition& at) {
  const auto check = [&](const char* name, const OptionalTensor& given, const Tensor& value) {
    if (!given) return;
    const Geometry like = geometry(value);
    detail::check_spectrum_shape(where, name, *given, {like.sizes, like.sizes + like.dim}, value.scalar_type(), at.u);
  };
  check("cotangent of the left vectors", g.u, at.u);
  check("cotangent of the values", g.s, at.s);
  if (at.vh) check("cotangent of the right vectors", g.vh, *at.vh);
}

// --- what a device works on -----------------------------------------------------------------------------------------

// A batch of spectra with all that their rules may look at. x and y, or x = P and nothing, by rows and without gaps;
// `columns` (*, k) and `rows` (k, *): what the numerators are inner products of. Absent ones are null.
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

inline OptionalTensor with_single_batch(const OptionalTensor& tensor, int64_t matrix_dims) {
  return tensor ? OptionalTensor(with_single_batch(*tensor, matrix_dims)) : std::nullopt;
}

// --- the route through products of whole batches --------------------------------------------------------------------
//
// Device::quotients<D>(tensors, at, out, out2, doubts)  out = q + r + diag g; forward, out2 = r - q
// Device::complement<D>(tensors, at, product, by_columns, out, doubts)
//     out += what is left of `columns`, or of `rows`, by its projection, over the values

template <class D, class Device>
Tensor pull_back(const Cotangents& g, const Decomposition& at, Tensor& doubts) {
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
  Device::template quotients<D>(tensors, at, inner, nullptr, doubts);
  if (g.vh && at.n > at.k) {
    Tensor right = matmul(inner, vh);
    Device::template complement<D>(tensors, at, matmul(adjoint(*tensors.y), vh), false, right, doubts);
    return matmul(at.u, right);
  }
  Tensor left = matmul(at.u, inner);
  if (g.u && at.m > at.k) {
    Device::template complement<D>(tensors, at, matmul(at.u, *tensors.x), true, left, doubts);
  }
  return matmul(left, vh);
}

struct Tangents {
  Tensor u, s;
  OptionalTensor vh;
};

template <class D, class Device>
Tangents push_forward(const Tensor& da, const Decomposition& at, Tensor& doubts) {
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
  Device::template quotients<D>(tensors, at, first, second ? &*second : nullptr, doubts);
  const Tensor diagonal = call_torch("aten::diagonal", "", *tensors.x, int64_t{0}, int64_t{-2}, int64_t{-1});
  Tangents t{matmul(at.u, first),
             torch::stable::clone(is_complex(at.u) ? call_torch("aten::real", "", diagonal) : diagonal), std::nullopt};
  if (D::kSvd) t.vh = matmul(*second, vh);
  if (at.m > at.k) Device::template complement<D>(tensors, at, matmul(at.u, *tensors.x), true, t.u, doubts);
  if (at.n > at.k) Device::template complement<D>(tensors, at, matmul(*tensors.x, vh), false, *t.vh, doubts);
  return t;
}

// --- the route of small matrices: all in one
// --------------------------------------------------------------------------

template <class S>
struct Operands {
  using Element = S;
  int64_t m, n, k;
  SpectrumOptions options;
  MatrixBatch<const S> u, vh;  // vh: null for the eigendecomposition
  MatrixBatch<const RealOf<S>> s;
};

template <class S>
struct PullOperands : Operands<S> {
  MatrixBatch<const S> gu, gvh;
  MatrixBatch<const RealOf<S>> gs;
  S* ga;
};
template <class S>
struct PushOperands : Operands<S> {
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
Tensor small_pull_back(const char* where, const Cotangents& g, const Decomposition& at, const Run& run) {
  Tensor out = allocate(at.shape(at.m, at.n), at.u);
  const Tensor u = with_single_batch(at.u), s = with_single_batch(at.s, 1);
  const OptionalTensor vh = with_single_batch(at.vh, 2), gu = with_single_batch(g.u, 2);
  const OptionalTensor gs = with_single_batch(g.s, 1), gvh = with_single_batch(g.vh, 2);
  dispatch_matrix(at.u.scalar_type(), where, "U", [&](auto tag) {
    using S = typename decltype(tag)::type;
    PullOperands<S> all{};
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
Tangents small_push_forward(const char* where, const Tensor& tangent, const Decomposition& at, const Run& run) {
  Tangents t{allocate(at.shape(at.m, at.k), at.u), allocate(at.values_shape(), at.s), std::nullopt};
  if (D::kSvd) t.vh = allocate(at.shape(at.k, at.n), at.u);
  const Tensor u = with_single_batch(at.u), s = with_single_batch(at.s, 1), da = with_single_batch(tangent);
  const OptionalTensor vh = with_single_batch(at.vh, 2);
  dispatch_matrix(at.u.scalar_type(), where, "U", [&](auto tag) {
    using S = typename decltype(tag)::type;
    PushOperands<S> all{};
    static_cast<Operands<S>&>(all) = operands<S>(at, u, s, vh);
    all.da = matrices<S>(da);
    all.du = static_cast<S*>(t.u.mutable_data_ptr());
    if (t.vh) all.dvh = static_cast<S*>(t.vh->mutable_data_ptr());
    all.ds = static_cast<RealOf<S>*>(t.s.mutable_data_ptr());
    run(all);
  });
  return t;
}

// --- the operators --------------------------------------------------------------------------------------------------
//
// Device::no_doubts(like): a new 0-dim bool, false.
// Device::pull_back<D>(cotangents, decomposition, doubts) and Device::push_forward<D> choose the route.

template <class Device>
struct SpectrumOperators {
  using SvdPull = Derivative<false, true>;
  using SvdPush = Derivative<true, true>;
  using EighPull = Derivative<false, false>;
  using EighPush = Derivative<true, false>;

  static std::tuple<Tensor, Tensor> svd_pullback(const OptionalTensor& gu, const OptionalTensor& gs,
                                                 const OptionalTensor& gvh, const Tensor& u, const Tensor& s,
                                                 const Tensor& vh, std::optional<double> rtol, double atol,
                                                 double broadening) {
    const char* where = "manualgrad::svd_pullback: ";
    return pull<SvdPull>(where, {gu, gs, gvh}, decomposition(where, u, s, vh, rtol, atol, broadening));
  }

  static std::tuple<Tensor, Tensor> eigh_pullback(const OptionalTensor& gl, const OptionalTensor& gv, const Tensor& l,
                                                  const Tensor& v, std::optional<double> rtol, double atol,
                                                  double broadening) {
    const char* where = "manualgrad::eigh_pullback: ";
    return pull<EighPull>(where, {gv, gl, std::nullopt},
                          decomposition(where, v, l, std::nullopt, rtol, atol, broadening));
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> svd_pushforward(const Tensor& da, const Tensor& u, const Tensor& s,
                                                                    const Tensor& vh, std::optional<double> rtol,
                                                                    double atol, double broadening) {
    const char* where = "manualgrad::svd_pushforward: ";
    Tensor doubts = Device::no_doubts(u);
    Tangents t = push<SvdPush>(where, da, decomposition(where, u, s, vh, rtol, atol, broadening), doubts);
    return {t.u, t.s, *t.vh, doubts};
  }

  static std::tuple<Tensor, Tensor, Tensor> eigh_pushforward(const Tensor& da, const Tensor& l, const Tensor& v,
                                                             std::optional<double> rtol, double atol,
                                                             double broadening) {
    const char* where = "manualgrad::eigh_pushforward: ";
    Tensor doubts = Device::no_doubts(v);
    Tangents t = push<EighPush>(where, da, decomposition(where, v, l, std::nullopt, rtol, atol, broadening), doubts);
    return {t.s, t.u, doubts};
  }

 private:
  template <class D>
  static std::tuple<Tensor, Tensor> pull(const char* where, const Cotangents& g, const Decomposition& at) {
    check_cotangents(where, g, at);
    Tensor doubts = Device::no_doubts(at.u);
    if (at.u.numel() == 0 || at.n == 0 || (!g.u && !g.s && !g.vh)) {
      return {torch::stable::new_zeros(at.u, at.shape(at.m, at.n)), doubts};
    }
    return {Device::template pull_back<D>(where, g, at, doubts), doubts};
  }

  template <class D>
  static Tangents push(const char* where, const Tensor& da, const Decomposition& at, Tensor& doubts) {
    detail::check_spectrum_shape(where, "dA", da, at.shape(at.m, at.n), at.u.scalar_type(), at.u);
    if (at.u.numel() == 0 || at.n == 0) {
      using torch::stable::new_zeros;
      return {new_zeros(at.u, at.shape(at.m, at.k)), new_zeros(at.s, at.values_shape()),
              new_zeros(at.u, at.shape(at.k, at.n))};
    }
    return Device::template push_forward<D>(where, da, at, doubts);
  }
};

}  // namespace manualgrad
