// The tangent of attention: arguments checked, heads of queries matched with those of keys.
//
//   manualgrad::attention_jvp(Tensor query, Tensor? query_t, Tensor key, Tensor? key_t, Tensor value, Tensor? value_t,
//                             Tensor? attn_mask, Tensor? attn_mask_t, bool is_causal, float? scale) -> Tensor
//
// query is (N, H, L, d), key and value are (n, h, S, d), where h divides H and n is N or 1; a tangent has the shape and
// dtype of its primal, and None is zero. The mask, of any real floating point dtype, is broadcast to (N, H, L, S).
//
//   P = softmax(s q k^T + M),   T = s (dq k^T + q dk^T) + dM,   dP = P (T - <P T>),   the result is dP v + P dv.
//
// If a mask makes every score of a query -inf, its result is 0. With is_causal, query i attends to the keys 0 to i
// only. The result has the shape and dtype of query and is contiguous. Any strides, any size, 0 included. Half and
// bfloat16 are computed in float32. Deterministic: a row of the result is computed by one thread, in an order that
// depends on the shapes alone. Memory besides the result: copies of a few heads of keys and values, and for each thread
// the scores of a few queries.
//
// Called by the formula of this name in torch_manualgrad/derivatives/nn/attention.py.
#pragma once

#include "../base/abi.h"
#include "../base/dispatch.h"

#include <cmath>

namespace manualgrad {

#define ATTENTION_JVP "manualgrad::attention_jvp: "

// A tensor of at most 4 dims, seen as (N, H, rows, columns): the strides of dims that repeat are 0.
struct HeadRows {
  const char* data = nullptr;  // null where there is none
  ScalarType type = ScalarType::Float;
  int64_t bytes = 0;
  int64_t strides[4] = {};
};

struct AttentionPlan {
  int64_t batch, heads, shared;  // N, H and H / h
  int64_t queries, keys, width;  // L, S, d
  bool causal;
  double scale;
  HeadRows query, query_t, key, key_t, value, value_t, mask, mask_t;

  // Whether scores have tangents.
  bool of_scores() const { return query_t.data != nullptr || key_t.data != nullptr || mask_t.data != nullptr; }
};

namespace detail {

// Broadcast to `sizes`: (N, H, rows, columns).
inline HeadRows head_rows(const char* name, const Tensor& tensor, const int64_t (&sizes)[4]) {
  const Geometry of = geometry(tensor);
  bool fits = of.dim <= 4;
  HeadRows rows;
  rows.data = static_cast<const char*>(tensor.const_data_ptr());
  rows.type = tensor.scalar_type();
  rows.bytes = tensor.element_size();
  for (int64_t d = 4 - of.dim, i = 0; fits && d < 4; ++d, ++i) {
    fits = of.sizes[i] == sizes[d] || of.sizes[i] == 1;
    rows.strides[d] = of.sizes[i] == 1 ? 0 : of.strides[i];
  }
  MANUALGRAD_CHECK(fits, ATTENTION_JVP, name, ": expected shape ", list(sizes, 4),
                   " or one that is broadcast to it, got ", shape_of(tensor));
  return rows;
}

// Checks that a tensor has the dtype and device of the query, and the shape of `like`.
inline void check_attention_argument(const char* name, const Tensor& tensor, const Tensor& query, const char* like_name,
                                     const Tensor& like) {
  const Geometry a = geometry(tensor), b = geometry(like);
  MANUALGRAD_CHECK(tensor.scalar_type() == query.scalar_type(), ATTENTION_JVP, name, ": expected ",
                   dtype_name(query.scalar_type()), ", the dtype of query, got ", dtype_name(tensor.scalar_type()));
  MANUALGRAD_CHECK(same_device(tensor, query), ATTENTION_JVP, name, ": not on the device of query");
  MANUALGRAD_CHECK(a.dim == b.dim && std::equal(a.sizes, a.sizes + a.dim, b.sizes), ATTENTION_JVP, name,
                   ": expected shape ", shape_of(like), ", that of ", like_name, ", got ", shape_of(tensor));
}

inline void check_attention_dtype(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
    case ScalarType::Double:
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return;
    default:
      raise(ATTENTION_JVP, name, ": expected a real floating point dtype, got ", dtype_name(tensor.scalar_type()));
  }
}

}  // namespace detail

// Raises a RuntimeError that names the argument and its value where the arguments do not fit each other.
inline AttentionPlan plan_attention_jvp(const Tensor& query, const OptionalTensor& query_t, const Tensor& key,
                                        const OptionalTensor& key_t, const Tensor& value, const OptionalTensor& value_t,
                                        const OptionalTensor& mask, const OptionalTensor& mask_t, bool is_causal,
                                        std::optional<double> scale) {
  detail::check_attention_dtype("query", query);
  const Geometry q = geometry(query), k = geometry(key);
  MANUALGRAD_CHECK(q.dim == 4, ATTENTION_JVP, "query: expected 4 dims, got shape ", shape_of(query));
  MANUALGRAD_CHECK(k.dim == 4 && k.sizes[3] == q.sizes[3] && (k.sizes[0] == q.sizes[0] || k.sizes[0] == 1) &&
                       (k.sizes[1] == q.sizes[1] || (k.sizes[1] > 0 && q.sizes[1] % k.sizes[1] == 0)),
                   ATTENTION_JVP,
                   "key: expected the batch and width of query, and heads that divide its own, got shape ",
                   shape_of(key), " for query of shape ", shape_of(query));
  detail::check_attention_argument("key", key, query, "key", key);
  detail::check_attention_argument("value", value, query, "key", key);
  AttentionPlan plan;
  plan.batch = q.sizes[0];
  plan.heads = q.sizes[1];
  plan.shared = k.sizes[1] == 0 ? 1 : q.sizes[1] / k.sizes[1];
  plan.queries = q.sizes[2];
  plan.keys = k.sizes[2];
  plan.width = q.sizes[3];
  plan.causal = is_causal;
  plan.scale = scale.has_value() ? *scale : 1 / std::sqrt(static_cast<double>(plan.width));
  const int64_t of_query[4] = {plan.batch, plan.heads, plan.queries, plan.width};
  const int64_t of_key[4] = {plan.batch, k.sizes[1], plan.keys, plan.width};
  const int64_t of_mask[4] = {plan.batch, plan.heads, plan.queries, plan.keys};
  const auto tangent = [&](const char* name, const OptionalTensor& given, const char* like_name, const Tensor& like,
                           const int64_t (&sizes)[4]) {
    if (!given.has_value()) return HeadRows{};
    detail::check_attention_argument(name, *given, query, like_name, like);
    return detail::head_rows(name, *given, sizes);
  };
  const auto added = [&](const char* name, const OptionalTensor& given) {
    if (!given.has_value()) return HeadRows{};
    detail::check_attention_dtype(name, *given);
    MANUALGRAD_CHECK(same_device(*given, query), ATTENTION_JVP, name, ": not on the device of query");
    return detail::head_rows(name, *given, of_mask);
  };
  plan.query = detail::head_rows("query", query, of_query);
  plan.query_t = tangent("query_t", query_t, "query", query, of_query);
  plan.key = detail::head_rows("key", key, of_key);
  plan.key_t = tangent("key_t", key_t, "key", key, of_key);
  plan.value = detail::head_rows("value", value, of_key);
  plan.value_t = tangent("value_t", value_t, "value", value, of_key);
  plan.mask = added("attn_mask", mask);
  plan.mask_t = added("attn_mask_t", mask_t);
  return plan;
}

template <class Device>
struct AttentionOperators {
  static Tensor jvp(const Tensor& query, const OptionalTensor& query_t, const Tensor& key, const OptionalTensor& key_t,
                    const Tensor& value, const OptionalTensor& value_t, const OptionalTensor& mask,
                    const OptionalTensor& mask_t, bool is_causal, std::optional<double> scale) {
    const AttentionPlan plan =
        plan_attention_jvp(query, query_t, key, key_t, value, value_t, mask, mask_t, is_causal, scale);
    const Geometry of = geometry(query);
    Tensor out = allocate({of.sizes, of.sizes + of.dim}, query);
    if (out.numel() == 0) return out;
    if (plan.keys == 0 || !(plan.of_scores() || plan.value_t.data != nullptr)) {
      torch::stable::zero_(out);
    } else if (query.scalar_type() == ScalarType::Double) {
      Device::template jvp<double>(plan, out);
    } else {
      Device::template jvp<float>(plan, out);
    }
    return out;
  }

  static void add_to(Library& library) { library.impl("attention_jvp", TORCH_BOX(&jvp)); }
};

}  // namespace manualgrad
