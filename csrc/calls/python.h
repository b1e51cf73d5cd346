// Calls into Python: the kernels of manualgrad_calls, which are in core/override/compiled_calls.py.
#pragma once

#include "table.h"

namespace manualgrad {

// An operator called without the dispatcher, which sees no tensors in a tuple. Autograd and transforms see the
// operators that the kernel calls.
struct PythonOp {
  explicit PythonOp(const char* name)
      : op(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")),
        kernel(op.getComputedKernelForDispatchKey(DispatchKey::CPU)) {}

  IValue operator()(Stack stack) const {
    kernel.callBoxed(op, DispatchKeySet(DispatchKey::CPU), &stack);
    return std::move(stack.back());
  }

  c10::OperatorHandle op;
  c10::SafeKernelFunction kernel;
};

// A tuple, with None for what is undefined.
inline IValue tuple_of(const variable_list& list) {
  std::vector<IValue> found;
  found.reserve(list.size());
  for (const at::Tensor& x : list) found.push_back(x.defined() ? IValue(x) : IValue());
  return c10::ivalue::Tuple::create(std::move(found));
}

// The rule's vjp. `finite`: in plain arithmetic, whose results are used only if they are finite.
inline variable_list pull_back_in_python(const Table& table, const std::vector<bool>& needed,
                                         const variable_list& tensors, const std::vector<IValue>& constants,
                                         const variable_list& grads, bool finite = false) {
  static const PythonOp pull_back("manualgrad_calls::pull_back");
  std::vector<IValue> mask(needed.begin(), needed.end());
  ++counts.python;
  const IValue found = pull_back({table.rule, finite, c10::ivalue::Tuple::create(std::move(mask)), tuple_of(tensors),
                                  c10::ivalue::Tuple::create(constants), tuple_of(grads)});
  variable_list result;
  result.reserve(needed.size());
  for (const IValue& x : found.toListRef()) result.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
  return result;
}

// The jvp: of the tensor arguments without their tangents, then the results. Returns the tangents of the results.
inline variable_list push_forward_in_python(const Table& table, const variable_list& tensors,
                                            const std::vector<IValue>& constants, const variable_list& tangents) {
  static const PythonOp push_forward("manualgrad_calls::push_forward");
  ++counts.python;
  const IValue found =
      push_forward({table.rule, tuple_of(tensors), c10::ivalue::Tuple::create(constants), tuple_of(tangents)});
  variable_list result;
  for (const IValue& x : found.toListRef()) result.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
  return result;
}

// Lets the rule report what its compiled formula found.
inline void report_in_python(const Table& table) {
  static const PythonOp report("manualgrad_calls::report");
  report({table.rule});
}

// Whether these are known to be finite.
inline bool finite_in_python(const variable_list& tensors) {
  static const PythonOp are_finite("manualgrad_calls::are_finite");
  return are_finite({tuple_of(tensors)}).toBool();
}

// Whether the tensors inside of the wrappers of torch.func are the same.
inline bool same_in_python(const at::Tensor& x, const at::Tensor& y) {
  static const PythonOp are_same("manualgrad_calls::are_same");
  return are_same({tuple_of({x, y})}).toBool();
}

// Whether the rule leaves the call to stock.
inline bool deferred_in_python(const Table& table, c10::ArrayRef<IValue> arguments) {
  static const PythonOp defers("manualgrad_calls::defers");
  std::vector<IValue> values = arguments.vec();
  for (IValue& value : values) {
    if (is_absent(value)) value = IValue();
  }
  return defers({table.rule, c10::ivalue::Tuple::create(std::move(values))}).toBool();
}

}  // namespace manualgrad
