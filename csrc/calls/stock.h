// PyTorch's own derivative of one call, for rules with strong zeros: 0 times a finite number is 0 in any case, so its
// gradients can be used if all of them are finite.
#pragma once

#include "table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/sum.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <cmath>
#include <utility>

namespace manualgrad {

using torch::autograd::edge_list;

// ---- what is finite -------------------------------------------------------------------------------------------------

// Several sums that do not wait for each other.
template <class T>
bool finite(const T* x, int64_t n) {
  constexpr int64_t kSums = 64 / sizeof(T);
  T sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j];
  }
  for (; i < n; ++i) sums[0] += x[i];
  T total = 0;
  for (const T sum : sums) total += sum;
  return std::isfinite(total);
}

// Whether no element is infinite or nan, judged by their sum, which may overflow even if all are finite.
inline bool finite(const at::Tensor& x) {
  constexpr int64_t kSmall = 1 << 15;  // more are summed by PyTorch, on all threads
  if (x.layout() != at::kStrided || x._is_zerotensor()) return true;
  if (x.numel() <= kSmall && x.is_non_overlapping_and_dense() && !x.is_neg()) {
    if (x.scalar_type() == at::kFloat) return finite(x.const_data_ptr<float>(), x.numel());
    if (x.scalar_type() == at::kDouble) return finite(x.const_data_ptr<double>(), x.numel());
  }
  const auto dtype = x.scalar_type();
  const bool narrow = dtype == at::kHalf || dtype == at::kBFloat16;
  const at::Scalar total = at::sum(x, narrow ? at::kFloat : dtype).item();
  if (!total.isComplex()) return std::isfinite(total.toDouble());
  const auto z = total.toComplexDouble();
  return std::isfinite(z.real()) && std::isfinite(z.imag());
}

// ---- the node -------------------------------------------------------------------------------------------------------

// Releases a node. If this is its last reference, the nodes that it owns are released in turn: in a loop, as a graph
// may be deeper than the stack.
inline void let_go(NodePointer node) {
  static thread_local std::vector<NodePointer>* waiting = nullptr;
  if (!node) return;
  if (waiting != nullptr) {
    waiting->push_back(std::move(node));
    return;
  }
  std::vector<NodePointer> nodes;
  waiting = &nodes;
  for (nodes.push_back(std::move(node)); !nodes.empty();) {
    const NodePointer last = std::move(nodes.back());
    nodes.pop_back();
  }
  waiting = nullptr;
}

// The node that PyTorch has made for a call, taken out of the graph: another node replaces it there, and calls this
// one.
struct StockVjp {
  StockVjp() = default;
  StockVjp(StockVjp&&) = default;
  StockVjp& operator=(StockVjp&&) = default;
  ~StockVjp() { let_go(std::move(node)); }

  // From the edges that the results had, and those of the tensor arguments. Without a node, unless these show that one
  // node computes all gradients.
  static StockVjp from(const edge_list& results, const edge_list& arguments) {
    StockVjp found;
    for (size_t i = 0; i < results.size(); ++i) {
      const auto& [node, number] = results[i];
      if (!node) continue;
      if (found.node && found.node != node) return {};
      found.node = node;
      found.outputs.resize(node->num_inputs(), -1);
      found.outputs[number] = static_cast<int64_t>(i);
    }
    if (!found.node) return {};
    const edge_list& edges = found.node->next_edges();
    found.inputs.resize(edges.size(), -1);
    size_t at = 0;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!arguments[i].is_valid()) continue;
      while (at < edges.size() && !(edges[at] == arguments[i])) ++at;
      if (at == edges.size()) return {};
      found.inputs[at++] = static_cast<int64_t>(i);
    }
    return found;
  }

  explicit operator bool() const { return static_cast<bool>(node); }

  // The gradients of `count` tensor arguments; nothing if one is not finite, or if PyTorch raises.
  std::optional<variable_list> gradients(const variable_list& grads, size_t count) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    variable_list found(outputs.size()), result(count);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i] >= 0) found[i] = grads[outputs[i]];
    }
    try {
      found = (*node)(std::move(found));
    } catch (const c10::Error&) {
      return std::nullopt;
    }
    for (size_t i = 0; i < found.size(); ++i) {
      if (inputs[i] < 0 || !found[i].defined()) continue;
      if (!finite(found[i])) return std::nullopt;
      result[inputs[i]] = std::move(found[i]);
    }
    return result;
  }

  NodePointer node;
  c10::SmallVector<int64_t, 4> outputs;  // of each input of the node, which output of the operator it belongs to, or -1
  c10::SmallVector<int64_t, 4> inputs;   // of each gradient of the node, which tensor argument
};

}  // namespace manualgrad
