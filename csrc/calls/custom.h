// Calls of custom ops that autograd does not track, without Python.
#pragma once

#include "guarded.h"
#include "state.h"
#include "table.h"

#include <c10/core/GradMode.h>

#include <map>

namespace manualgrad {

struct CustomKernel : public c10::OperatorKernel {
  explicit CustomKernel(c10::SafeKernelFunction python_kernel) : python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const bool here = acts.load(std::memory_order_acquire) && !in_python.load(std::memory_order_acquire);
    if (!here || !plain_thread() || !untracked(torch::jit::last(*stack, op.schema().arguments().size()))) {
      python.callBoxed(op, keys, stack);
      return;
    }
    ++counts.untracked;
    below(op, keys, stack);
  }

  std::atomic<bool> acts{false};  // else Python has an error for all calls, or a whole autograd kernel

 private:
  static bool untracked(c10::ArrayRef<IValue> arguments) {
    for (const IValue& value : arguments) {
      if (is_absent(value) || !value.isTensor()) continue;
      if (!plain(value.toTensor()) || (c10::GradMode::is_enabled() && value.toTensor().requires_grad())) return false;
    }
    return true;
  }

  const c10::SafeKernelFunction python;
};

struct CoveredOp {
  CustomKernel* kernel;
  c10::RegistrationHandleRAII registration;  // which owns the kernel
};

inline std::map<int64_t, CoveredOp> covered_ops;

}  // namespace manualgrad

// Covers the kernel at Autograd that Python has registered for a custom op without lists of tensors. Returns a number
// for it; at first the kernel hands on all calls.
MANUALGRAD_API int64_t manualgrad_calls_custom_attach(const char* name, const char* overload) {
  using namespace manualgrad;
  static int64_t count = 0;
  return guarded([&]() -> int64_t {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    auto kernel = std::make_unique<CustomKernel>(op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU));
    CustomKernel* const made = kernel.get();
    covered_ops.emplace(count, CoveredOp{made, covered(op, DispatchKey::Autograd, std::move(kernel))});
    return count++;
  });
}

// Whether it serves the calls that it can.
MANUALGRAD_API int64_t manualgrad_calls_custom_act(int64_t op, int64_t yes) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    covered_ops.at(op).kernel->acts.store(yes != 0, std::memory_order_release);
    return 0;
  });
}

// Takes the kernel away. A thread that is inside of it crashes.
MANUALGRAD_API int64_t manualgrad_calls_custom_detach(int64_t op) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t { return static_cast<int64_t>(covered_ops.erase(op)); });
}

// How many calls these kernels have served on this thread.
MANUALGRAD_API int64_t manualgrad_calls_custom_count() { return manualgrad::counts.untracked; }
