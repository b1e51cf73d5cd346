// A call with a tangent at a level of torch.func: the forward, and a jvp for the tangents of its results.
//
// PyTorch calls the kernel at Autograd in the middle of its own call. The jvp gets the arguments without their tangents
// at this level; levels outside differentiate what it calls. It is a formula like any other, and is recorded.
#pragma once

#include "differentiate.h"
#include "levels.h"
#include "python.h"
#include "table.h"

namespace manualgrad {

// A wrapper of the same tensor without history and tangent at this level.
inline at::Tensor primal(const at::Tensor& x) {
  const c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// The lengths of the lists among these values, -1 for the others.
inline std::vector<int64_t> lengths_of(c10::ArrayRef<IValue> values) {
  std::vector<int64_t> found;
  for (const IValue& value : values) {
    found.push_back(is_tensors(value) ? static_cast<int64_t>(value.toListRef().size()) : -1);
  }
  return found;
}

// `numbers`: some arguments are numbers in place of tensors.
inline void push_forward(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack,
                         bool numbers) {
  ++counts.plain;
  const size_t n = op.schema().arguments().size(), outputs = table.differentiable.size();
  variable_list tensors, tangents;
  std::vector<IValue> constants;
  std::vector<IValue> arguments = torch::jit::last(*stack, n).vec();
  if (numbers) numbers_as_tensors(table.tensors, arguments);
  for (const int64_t place : table.tensors) {
    for_each(arguments[place], [&](const IValue& value) {
      const at::Tensor x = is_absent(value) ? at::Tensor() : value.toTensor();
      tangents.push_back(x.defined() ? x._fw_grad(/*level=*/0) : at::Tensor());
      tensors.push_back(tangents.back().defined() ? primal(x) : x);
    });
  }
  for (const int64_t place : table.pushed) constants.push_back(arguments[place]);
  if (table.lists) constants.emplace_back(lengths_of(arguments));
  below(op, keys, stack);
  resolve_conjugates(stack, outputs);
  const auto results = torch::jit::last(*stack, outputs);
  variable_list made;
  for (const IValue& result : results) {
    for_each(result, [&](const IValue& y) { made.push_back(is_absent(y) ? at::Tensor() : y.toTensor()); });
  }
  for (const at::Tensor& y : made) tensors.push_back(y.defined() ? primal(y) : y);
  if (table.lists) constants.emplace_back(lengths_of(results));
  const auto jvp = [&] { return push_forward_in_python(table, tensors, constants, tangents); };
  auto found = table.recordings_of_jvp.pull_back({}, tensors, constants, tangents, /*only_finite=*/false, jvp,
                                                 /*in_call=*/true);
  const variable_list pushed = found ? *std::move(found) : jvp();
  for (size_t i = 0; i < pushed.size(); ++i) {
    if (!pushed[i].defined() || !made[i].defined()) continue;  // a result that was not asked for
    made[i]._set_fw_grad(pushed[i], /*level=*/0, /*is_inplace_op=*/false);
  }
}

}  // namespace manualgrad
