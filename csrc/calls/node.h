// The node that a plain call leaves in autograd's graph: it calls the compiled formula, or the rule's vjp in Python.
#pragma once

#include "levels.h"
#include "python.h"
#include "stock.h"
#include "table.h"

#include <ATen/ops/all.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace manualgrad {

struct RuleNode : public Node {
  // Not inline: there are hundreds of classes derived from this one, see node_types.cpp.
  explicit RuleNode(const Table& t);
  ~RuleNode() override;

  std::string name() const override { return table.node; }

  // A node that saves nothing can run again, as PyTorch's can.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (saves) {
      released = true;
      saved.clear();
    }
    if (stock) stock.node->release_variables();
  }

  void save(const at::Tensor& x, bool is_output) {
    saves = true;
    saved.emplace_back(x, is_output);
  }

  // One saved tensor, which Python shows as an attribute.
  at::Tensor unpack(int64_t place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    return unpacked(place);
  }

  void register_hooks(int64_t place, std::unique_ptr<torch::autograd::SavedVariableHooks> hooks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, "Calling register_hooks on a saved tensor after it has been freed.");
    saved.at(place).register_hooks(std::move(hooks));
    stock = StockVjp();  // its saved tensors are older than the hooks
  }

  variable_list apply(variable_list&& grads) override {
    if (stock && serves(grads)) {
      if (auto found = stock.gradients(grads, num_outputs())) return *std::move(found);
    }
    // unpacking may run any user code, which must not run under a guard
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
      tensors.reserve(saved.size());
      for (size_t i = 0; i < saved.size(); ++i) tensors.push_back(alive(unpacked(i)));
    }
    for (at::Tensor& g : grads) g = alive(std::move(g));
    std::vector<bool> mask = needed();
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = mask[i] && task_should_compute_output(i);
    return pull_back(std::move(mask), std::move(tensors), std::move(grads));
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string("torch_manualgrad"));
    args.collect(static_cast<uint64_t>(table.rule));
    args.collect(released);
    args.collect(needed());
    args.collect(saved, /*is_output=*/true);
    for (const IValue& constant : constants) args.collect(constant, /*nested=*/true);
  }

  // Compiled autograd traces the vjp in Python.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    swap.before(saved);
    std::vector<IValue> tensors;
    for (size_t i = 0; i < saved.size(); ++i) tensors.emplace_back(unpacked(i));
    std::vector<at::TypePtr> types(tensors.size(), at::TensorType::get());
    auto outputs = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    // the graph may outlive this node: it holds copies of what it needs
    auto call = [rule = shared, mask = needed(), fixed = constants](const variable_list& inputs,
                                                                    const std::vector<IValue>& packed) {
      variable_list unpacked;
      for (const IValue& x : packed) unpacked.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
      return pull_back_in_python(*rule, mask, unpacked, fixed, inputs);
    };
    const auto& interface = compiled::getPyCompilerInterface();
    const auto bound = interface->bind_function(swap.get_py_compiler(), table.node, std::move(call), std::move(types),
                                                /*is_custom_function=*/true, /*is_traceable=*/true);
    auto found =
        interface->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, tensors, std::move(outputs));
    swap.after(saved);
    return found;
  }

  const std::shared_ptr<const Table> shared;
  const Table& table;
  std::vector<SavedVariable> saved;  // the elements of lists among them
  std::vector<bool> is_result;       // for each of them, where there are lists
  std::vector<IValue> constants;
  bool saves = false, released = false;
  StockVjp stock;  // if there is one, asked first

 private:
  // An output was computed by this node. An argument has its own history, and PyTorch refuses one that has lost it.
  at::Tensor unpacked(size_t place) {
    const bool of_result = table.lists ? is_result.at(place) : table.saved[place] >= table.arguments;
    return saved.at(place).unpack(of_result ? owner() : NodePointer());
  }

  // Whether the gradients of PyTorch's node are the rule's, except for zeros: not if they are differentiated again.
  bool serves(const variable_list& grads) {
    if (c10::GradMode::is_enabled() || !plain_thread() || !no_autocast()) return false;
    bool any = false;
    for (const at::Tensor& g : grads) {
      if (!g.defined()) continue;
      if (!plain(g)) return false;
      any = true;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return any && !released;
  }

  NodePointer owner() {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
      return NodePointer(getptr());
    } else {
      return getptr();
    }
  }

  // Which inputs require grad, whichever gradients this backward has to return.
  std::vector<bool> needed() const {
    std::vector<bool> found(num_outputs());
    for (size_t i = 0; i < found.size(); ++i) found[i] = next_edge(i).is_valid();
    return found;
  }

  variable_list pull_back(std::vector<bool> mask, variable_list tensors, variable_list grads) {
    bool any = false;
    for (const at::Tensor& g : grads) any |= g.defined();
    if (!any) return variable_list(mask.size());  // undefined, as PyTorch's are
    if (table.compiled) {
      Stack stack;
      if (served(*table.compiled, mask, tensors, grads, stack)) {
        compute(table, stack);
        ++counts.compiled;
        variable_list found(mask.size());
        for (size_t i = 0; i < table.compiled->inputs.size(); ++i) {
          const int64_t input = table.compiled->inputs[i];
          if (mask[input]) found[input] = std::move(stack[i]).toTensor();
        }
        return found;
      }
    }
    const auto vjp = [&](bool finite) { return pull_back_in_python(table, mask, tensors, constants, grads, finite); };
    if (table.records == Table::kNothing) return vjp(false);
    const bool checked = table.records == Table::kWhereFinite;
    auto found = table.recordings.pull_back(mask, tensors, constants, grads, checked, [&] { return vjp(checked); });
    return found ? *std::move(found) : vjp(false);
  }

  // Replaces the arguments by the results.
  static void compute(const Table& table, Stack& stack) {
    const CompiledVjp& vjp = *table.compiled;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      vjp.op.callBoxed(&stack);
    }
    if (vjp.reports && stack.back().toTensor().item<bool>()) report_in_python(table);
  }

  // Whether the gradient may be differentiated again. The function that torch.func.vjp returns runs in grad mode with
  // untracked tensors: its gradients are not.
  static bool is_tracked(const variable_list& tensors) {
    return c10::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& x) {
             return x.defined() && x.requires_grad();
           });
  }

  // Whether x, matrices or vectors, has the batch dims of the matrices A.
  static bool in_batch(const at::Tensor& A, const at::Tensor& x) {
    if (!A.defined() || !x.defined() || A.dim() < 2) return false;
    const auto batch = A.sizes().slice(0, A.dim() - 2);
    return x.dim() > A.dim() - 2 && x.dim() <= A.dim() && x.sizes().slice(0, batch.size()) == batch;
  }

  // Whether the compiled formula serves this call; fills in its arguments.
  bool served(const CompiledVjp& vjp, const std::vector<bool>& mask, const variable_list& tensors,
              const variable_list& grads, Stack& stack) const {
    if (!plain_thread() || !no_autocast() || is_tracked(tensors) || is_tracked(grads)) return false;
    bool any = false;
    for (const int64_t input : vjp.inputs) any |= mask[input];
    if (!any) return false;
    for (const auto& [constant, value] : vjp.only) {
      if (constants[constant] != value) return false;
    }
    for (const int64_t i : vjp.contiguous) {
      if (!tensors[i].defined() || !tensors[i].is_contiguous()) return false;
    }
    for (const int64_t i : vjp.nonzero) {
      if (!tensors[i].defined() || !tensors[i].is_cpu() || !tensors[i].all().item<bool>()) return false;
    }
    for (const int64_t i : vjp.square) {
      const at::Tensor& x = tensors[i];
      if (!x.defined() || x.dim() < 2 || x.size(-1) != x.size(-2)) return false;
    }
    for (const int64_t i : vjp.one_batch) {
      if (!in_batch(tensors[vjp.one_batch.front()], tensors[i])) return false;
    }
    std::optional<at::ScalarType> common;
    int64_t dims = 0, order = 0;  // of the matrices, which have the most dims
    const auto fits = [&](const at::Tensor& x) {
      if (!plain(x) || !(vjp.devices & (x.is_cpu() ? 1 : 2))) return false;
      const auto dtype = x.scalar_type();
      if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) return vjp.largest >= 0;  // pivots
      const auto real = c10::toRealValueType(dtype);
      if ((common && *common != real) || (vjp.real && dtype != real)) return false;
      common = real;
      if (vjp.largest < 0) return true;
      if (real != at::kFloat && real != at::kDouble) return false;
      if (x.dim() > dims) dims = x.dim(), order = 0;
      if (x.dim() == dims && dims >= 2) order = std::max({order, x.size(-1), x.size(-2)});
      return true;
    };
    stack.reserve(vjp.arguments.size());
    for (const Source& source : vjp.arguments) {
      if (source.kind == Source::kSaved || source.kind == Source::kGrad) {
        const at::Tensor& x = source.kind == Source::kSaved ? tensors[source.index] : grads[source.index];
        if (x.defined()) {
          if (!fits(x)) return false;
          stack.emplace_back(x);
        } else {
          if (!source.optional) return false;
          stack.emplace_back();
        }
        continue;
      }
      if (source.kind == Source::kNeeded) {
        stack.emplace_back(static_cast<bool>(mask[source.index]));
        continue;
      }
      const IValue* value = &source.literal;
      if (source.kind == Source::kConstant && !constants[source.index].isNone()) value = &constants[source.index];
      if (!source.float_wanted || value->isDouble() || value->isNone()) {
        stack.push_back(*value);
      } else if (value->isInt()) {
        stack.emplace_back(static_cast<double>(value->toInt()));
      } else {
        return false;
      }
    }
    return vjp.largest < 0 || order <= vjp.largest;
  }
};

// The pointer type is a parameter, so that functions that this release of torch lacks (deleteNode, make_intrusive of a
// node) are not looked up.
template <class Pointer, class Made, class... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<Made>(new Made(std::forward<Arguments>(arguments)...), [](Made* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>(std::forward<Arguments>(arguments)...);
  }
}

// ---- types of nodes -------------------------------------------------------------------------------------------------

// PyTorch finds the Python class of a node by its C++ type. There is a type for each class that core/engine/node.py
// makes; those of number 0 have no class of their own.
struct NodeType {
  const std::type_info* type;
  RuleNode* (*make)(const Table&);
};

constexpr size_t kNodeTypes = 768;

extern const std::array<NodeType, kNodeTypes> node_types;

// A new node of this type.
template <class Pointer = NodePointer>
auto make_rule_node(size_t type, const Table& table) {
  RuleNode* const made = node_types[type].make(table);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<RuleNode>(made, [](auto* node) { deleteNode(node); });
  } else {
    return c10::intrusive_ptr<RuleNode>::unsafe_steal_from_new(made);
  }
}

}  // namespace manualgrad
