// A plain call with its derivative: the forward, the residuals and the node of the graph.
#pragma once

#include "node.h"
#include "table.h"

#include <algorithm>

namespace manualgrad {

inline IValue fact(const at::Tensor& x, int64_t what) {
  if (what == Table::kSizes) return IValue(x.sizes().vec());
  if (what == Table::kStrides) return IValue(x.strides().vec());
  return IValue(static_cast<int64_t>(x.scalar_type()));
}

inline bool used(const Table& table, int64_t tensor, const std::vector<bool>& wanted) {
  for (const Use& use : table.uses) {
    for (const int64_t read : use.saved) {
      if (read != tensor) continue;
      for (const int64_t input : use.inputs) {
        if (wanted[input]) return true;
      }
    }
  }
  return false;
}

// With `stock`: its node is asked for the gradients before the rule is.
inline void differentiate(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                          bool numbers, const c10::SafeKernelFunction* stock) {
  ++counts.plain;
  const size_t n = op.schema().arguments().size(), outputs = table.differentiable.size();
  // the call takes the arguments off the stack: what is kept of them is copied before
  std::vector<IValue> kept = torch::jit::last(*stack, n).vec();
  edge_list edges;
  edges.reserve(table.tensors.size());
  std::vector<bool> wanted(n);
  for (const int64_t place : table.tensors) {
    IValue& value = kept[place];
    if (is_absent(value)) value = IValue();
    edges.push_back(value.isTensor() ? torch::autograd::impl::gradient_edge(value.toTensor())
                                     : torch::autograd::Edge());
    wanted[place] = value.isTensor() && value.toTensor().requires_grad();
  }
  auto node = make_rule_node<>(table.type, table);
  node->set_next_edges(std::move(edges));
  // stock may have no derivative in one of these arguments, where the rule has
  if (stock == nullptr || !taken(*stock, op, keys, stack, kept)) below(op, keys, stack);
  std::vector<const c10::TensorImpl*> made;  // of numbers
  if (numbers) made = numbers_as_tensors(table.tensors, kept);

  edge_list of_stock(outputs);
  auto results = torch::jit::last(*stack, outputs);
  for (size_t i = 0; i < outputs; ++i) {
    IValue& result = (*stack)[stack->size() - outputs + i];
    if (!result.isTensor() || !result.toTensor().defined()) {
      node->add_input_metadata(Node::undefined_input());
      continue;
    }
    for (const int64_t place : table.tensors) {  // a kernel that has nothing to do may return its argument
      if (kept[place].isTensor() && kept[place].toTensor().is_same(result.toTensor())) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        result = result.toTensor().detach();
        break;
      }
    }
    const at::Tensor& y = result.toTensor();
    if (y.grad_fn()) {
      of_stock[i] = torch::autograd::impl::gradient_edge(y);
      torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge());
    }
    if (table.differentiable[i] && torch::autograd::isDifferentiableType(y.scalar_type())) {
      const auto place = node->add_input_metadata(y);
      torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge(node, place));
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  node->stock = StockVjp::from(of_stock, node->next_edges());
  const auto known = [&](int64_t place) -> const IValue& {
    return static_cast<size_t>(place) < n ? kept[place] : results[place - n];
  };
  node->constants.reserve(table.constants.size() + table.facts.size());
  for (const int64_t place : table.constants) node->constants.push_back(known(place));
  for (const auto& [place, what] : table.facts) {
    const IValue& value = known(place);
    node->constants.push_back(value.isTensor() ? fact(value.toTensor(), what) : IValue());
  }
  node->saved.reserve(table.saved.size());
  for (size_t i = 0; i < table.saved.size(); ++i) {
    const IValue& value = known(table.saved[i]);
    if (!value.isTensor() || !value.toTensor().defined() || (table.selective && !used(table, i, wanted))) {
      node->saved.emplace_back();
      continue;
    }
    const at::Tensor& x = value.toTensor();
    const bool is_output = static_cast<size_t>(table.saved[i]) >= n && x.grad_fn().get() == node.get();
    c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
    // by the mark of a number PyTorch tells what it does not give to hooks on saved tensors
    const bool number = std::find(made.begin(), made.end(), impl) != made.end();
    if (number) impl->set_wrapped_number(true);
    node->save(x, is_output);
    if (number) impl->set_wrapped_number(false);
  }
}

}  // namespace manualgrad
