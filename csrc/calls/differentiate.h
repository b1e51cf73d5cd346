// A plain call with its derivative: the forward, the residuals and the node of the graph.
#pragma once

#include "levels.h"
#include "node.h"
#include "table.h"

#include <algorithm>
#include <numeric>

namespace manualgrad {

inline IValue fact(const IValue& value, int64_t what) {
  if (is_tensors(value)) {
    c10::impl::GenericList found(c10::AnyType::get());
    for (const IValue& x : value.toListRef()) found.push_back(fact(x, what));
    return found;
  }
  if (is_absent(value) || !value.isTensor()) return IValue();
  const at::Tensor& x = value.toTensor();
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

// Saves in the node what the rule needs. `kept` are the arguments, `made` those of them that were made from numbers.
template <class Made>
void save(const Table& table, Made& node, const std::vector<IValue>& kept, c10::ArrayRef<IValue> results,
          const std::vector<bool>& wanted, const std::vector<const c10::TensorImpl*>& made) {
  const size_t n = kept.size(), outputs = results.size();
  const auto known = [&](int64_t place) -> const IValue& {
    return static_cast<size_t>(place) < n ? kept[place] : results[place - n];
  };
  node->constants.reserve(table.constants.size() + table.facts.size());
  for (const int64_t place : table.constants) node->constants.push_back(known(place));
  for (const auto& [place, what] : table.facts) node->constants.push_back(fact(known(place), what));
  if (table.lists) {  // Python splits the flat sequence again
    const auto lengths = [&](const std::vector<int64_t>& places) {
      std::vector<int64_t> found;
      for (const int64_t place : places) {
        found.push_back(is_tensors(known(place)) ? static_cast<int64_t>(known(place).toListRef().size()) : -1);
      }
      return IValue(std::move(found));
    };
    std::vector<int64_t> all(outputs);
    std::iota(all.begin(), all.end(), static_cast<int64_t>(n));
    for (const auto& places : {table.tensors, table.saved, all}) node->constants.push_back(lengths(places));
  }
  node->saved.reserve(table.saved.size());
  for (size_t i = 0; i < table.saved.size(); ++i) {
    const bool is_result = static_cast<size_t>(table.saved[i]) >= n;
    for_each(known(table.saved[i]), [&](const IValue& value) {
      if (table.lists) node->is_result.push_back(is_result);
      if (!value.isTensor() || !value.toTensor().defined() || (table.selective && !used(table, i, wanted))) {
        node->saved.emplace_back();
        return;
      }
      const at::Tensor& x = value.toTensor();
      c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
      // PyTorch does not pass tensors that are marked as numbers to hooks on saved tensors
      const bool number = std::find(made.begin(), made.end(), impl) != made.end();
      if (number) impl->set_wrapped_number(true);
      node->save(x, is_result && x.grad_fn().get() == node.get());
      if (number) impl->set_wrapped_number(false);
    });
  }
}

// Calls a kernel of an operator without lists of tensors: plays its recording, or `call`s it.
inline void call_recorded(const c10::OperatorHandle& op, Stack* stack, Recordings& recordings, bool in_call,
                          const std::function<void(Stack*)>& call) {
  const size_t n = op.schema().arguments().size();
  Stack arguments = torch::jit::last(*stack, n).vec();
  variable_list tensors;
  std::vector<IValue> constants;
  for (const IValue& value : arguments) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    constants.push_back(value.isTensor() ? IValue(true) : value);
  }
  const auto formula = [&] {
    call(&arguments);
    variable_list results;
    for (const IValue& x : arguments) results.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
    return results;
  };
  const auto found = recordings.pull_back({}, tensors, constants, {}, /*only_finite=*/false, formula, in_call);
  if (!found) return call(stack);
  stack->resize(stack->size() - n);
  for (const at::Tensor& x : *found) stack->emplace_back(x);
}

// The operator below autograd: by a recording of its kernel, where there are recordings.
inline void below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack, Recordings* recordings) {
  if (recordings == nullptr) return below(op, keys, stack);
  call_recorded(op, stack, *recordings, /*in_call=*/false, [&](Stack* values) { below(op, keys, values); });
}

// A level's wrapper hides a lazy conjugation, such as that of cuSOLVER's Vh, from views.
inline void resolve_conjugates(Stack* stack, size_t outputs) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto resolved = [](const at::Tensor& y) { return y.defined() && y.is_conj() ? y.resolve_conj() : y; };
  for (size_t i = stack->size() - outputs; i < stack->size(); ++i) {
    IValue& result = (*stack)[i];
    if (result.isTensor()) {
      result = resolved(result.toTensor());
    } else if (result.isTensorList()) {
      auto elements = result.toTensorList();
      for (size_t k = 0; k < elements.size(); ++k) elements.set(k, resolved(elements.get(k)));
    }
  }
}

// With `stock`, its node is tried for the gradients before the rule. `recordings` are those of the operator's kernel.
// `at_level`: at a level of torch.func.
inline void differentiate(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                          bool numbers, const c10::SafeKernelFunction* stock, Recordings* recordings = nullptr,
                          bool at_level = false) {
  ++counts.plain;
  const size_t n = op.schema().arguments().size(), outputs = table.differentiable.size();
  // the call takes the arguments off the stack, so those that are kept are copied before
  std::vector<IValue> kept = torch::jit::last(*stack, n).vec();
  edge_list edges;
  edges.reserve(table.tensors.size());
  std::vector<bool> wanted(n);
  for (const int64_t place : table.tensors) {
    IValue& value = kept[place];
    if (is_absent(value)) value = IValue();
    for_each(value, [&](const IValue& x) {
      const bool present = x.isTensor() && !is_absent(x);
      edges.push_back(present ? torch::autograd::impl::gradient_edge(x.toTensor()) : torch::autograd::Edge());
      wanted[place] = wanted[place] || (present && x.toTensor().requires_grad());
    });
  }
  auto node = make_rule_node<>(table.type, table);
  node->set_next_edges(std::move(edges));
  // stock may lack a derivative with respect to one of these arguments, which the rule has
  if (stock == nullptr || !taken(*stock, op, keys, stack, kept)) below(op, keys, stack, recordings);
  if (at_level) resolve_conjugates(stack, outputs);
  std::vector<const c10::TensorImpl*> made;  // from numbers
  if (numbers) made = numbers_as_tensors(table.tensors, kept);

  edge_list of_stock;
  auto results = torch::jit::last(*stack, outputs);
  const auto attach = [&](const at::Tensor& y, bool differentiable) {
    of_stock.emplace_back();
    if (!y.defined()) {
      node->add_input_metadata(Node::undefined_input());
      return;
    }
    if (y.grad_fn()) {
      of_stock.back() = torch::autograd::impl::gradient_edge(y);
      torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge());
    }
    if (differentiable && torch::autograd::isDifferentiableType(y.scalar_type())) {
      const auto place = node->add_input_metadata(y);
      torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge(node, place));
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  };
  // a kernel that has nothing to do may return its argument
  const auto is_argument = [&](const at::Tensor& y) {
    bool found = false;
    for (const int64_t place : table.tensors) {
      for_each(kept[place], [&](const IValue& x) { found = found || (x.isTensor() && x.toTensor().is_same(y)); });
    }
    return found;
  };
  const auto detached = [](const at::Tensor& y) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return y.detach();
  };
  for (size_t i = 0; i < outputs; ++i) {
    IValue& result = (*stack)[stack->size() - outputs + i];
    if (result.isTensorList()) {
      auto elements = result.toTensorList();
      for (size_t k = 0; k < elements.size(); ++k) {
        if (is_argument(elements.get(k))) elements.set(k, detached(elements.get(k)));
        attach(elements.get(k), table.differentiable[i]);
      }
      continue;
    }
    const at::Tensor y = result.isTensor() ? result.toTensor() : at::Tensor();
    if (y.defined() && is_argument(y)) result = detached(y);
    attach(y.defined() ? result.toTensor() : y, table.differentiable[i]);
  }
  node->stock = StockVjp::from(of_stock, node->next_edges());
  save(table, node, kept, results, wanted, made);
}

// A plain, tracked call of the operator's in-place form. Returns false and does nothing if Python has to serve the
// call: if the derivative saves what is overwritten, if more than this tensor's history changes, or if PyTorch raises.
inline bool differentiate_in_place(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                                   bool numbers) {
  const size_t n = op.schema().arguments().size();
  std::vector<IValue> kept = torch::jit::last(*stack, n).vec();
  const at::Tensor target = kept[0].toTensor();
  const auto dtype = target.scalar_type();
  if (!table.differentiable[0] || is_number(kept[0]) || target.is_view() ||
      (target.is_leaf() && target.requires_grad()) || target.is_inference() || target.layout() != at::kStrided ||
      !torch::autograd::isDifferentiableType(dtype)) {
    return false;
  }
  edge_list edges;
  std::vector<bool> wanted(n);
  for (const int64_t place : table.tensors) {
    IValue& value = kept[place];
    if (is_absent(value)) value = IValue();
    if (!value.isTensor()) {
      if (!value.isNone()) return false;
      edges.emplace_back();
      continue;
    }
    const at::Tensor& x = value.toTensor();
    if (place > 0 && (x.layout() != at::kStrided || x.is_alias_of(target))) return false;
    if (is_number(value) ? rank(x) > rank(target)
                         : torch::autograd::isDifferentiableType(x.scalar_type()) && x.scalar_type() != dtype) {
      return false;
    }
    edges.push_back(torch::autograd::impl::gradient_edge(x));
    wanted[place] = x.requires_grad();
  }
  for (size_t i = 0; i < table.saved.size(); ++i) {
    if (table.saved[i] == 0 && (!table.selective || used(table, static_cast<int64_t>(i), wanted))) return false;
  }
  auto node = make_rule_node<>(table.type, table);
  node->set_next_edges(std::move(edges));
  {
    const at::AutoDispatchBelowAutograd guard;  // but not below the kernel that increments its version
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  std::vector<const c10::TensorImpl*> made;
  if (numbers) made = numbers_as_tensors(table.tensors, kept);
  const auto place = node->add_input_metadata(target);
  torch::autograd::impl::rebase_history(target, torch::autograd::Edge(node, place));
  save(table, node, kept, torch::jit::last(*stack, 1), wanted, made);
  return true;
}

}  // namespace manualgrad
