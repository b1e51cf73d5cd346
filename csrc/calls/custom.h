// Calls of custom ops without Python: those that autograd does not track, and those of formulas in a recording.
#pragma once

#include "differentiate.h"
#include "guarded.h"
#include "state.h"
#include "table.h"
#include "tangents.h"

#include <c10/core/GradMode.h>

#include <map>

namespace manualgrad {

struct CustomKernel : public c10::OperatorKernel {
  explicit CustomKernel(c10::SafeKernelFunction python_kernel) : python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const bool here = acts.load(std::memory_order_acquire) && !in_python.load(std::memory_order_acquire) &&
                      (!only_recorded || Recording::playing > 0);
    bool tracked = false, dual = false;
    const bool at_level = !plain_thread();
    // a formula's derivative runs its body under torch.func, perhaps in the middle of another op's call
    if (!here || (at_level && !(only_recorded && only_transforms() && Recording::in_python == 0)) ||
        !are_plain(torch::jit::last(*stack, op.schema().arguments().size()), at_level, tracked, dual) ||
        (dual && tracked)) {
      const Recording::InPython served(at_level);
      python.callBoxed(op, keys, stack);
      return;
    }
    const Table* const rule = table.load(std::memory_order_acquire);
    if (rule != nullptr && is_constant(*rule)) tracked = false;
    if (dual) {
      with_tangents(rule, op, keys, stack);
    } else if (!tracked) {
      ++counts.untracked;
      at_level ? below(op, keys, stack) : below(op, keys, stack, kernel());
    } else if (rule != nullptr && !rule->in_python) {
      differentiate(*rule, op, keys, stack, /*numbers=*/false, nullptr, at_level ? nullptr : kernel(), at_level);
    } else {
      const Recording::InPython served(at_level);
      python.callBoxed(op, keys, stack);
    }
  }

  // Without a table, Python serves tracked calls. A running call may read a replaced table, so all tables are kept.
  void track(std::shared_ptr<const Table> rule) {
    table.store(rule.get(), std::memory_order_release);
    if (rule) tables_.push_back(std::move(rule));
  }

  std::atomic<bool> acts{false};  // else Python has an error for all calls, or a whole autograd kernel
  bool only_recorded = false;     // Python checks the arguments of other calls
  bool only_tensors = false;      // all results are tensors
  std::atomic<const Table*> table{nullptr};

 private:
  // The kernel of a formula that is called in a recording is recorded, too.
  Recordings* kernel() { return only_recorded && only_tensors ? &recordings_ : nullptr; }

  static bool is_constant(const Table& rule) {
    return std::none_of(rule.differentiable.begin(), rule.differentiable.end(), [](bool yes) { return yes; });
  }

  // Serves a call at a level with a tangent on an argument, by the jvp or by the operators that the formula's body
  // calls.
  void with_tangents(const Table* rule, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (rule != nullptr && rule->pushes) return push_forward(*rule, op, keys, stack, /*numbers=*/false);
    const auto call = [&](Stack* values) {
      const Recording::InPython served(/*at_level=*/true);
      python.callBoxed(op, keys, values);
    };
    only_tensors ? call_recorded(op, stack, recordings_of_duals_, /*in_call=*/true, call) : call(stack);
  }

  static bool are_plain(c10::ArrayRef<IValue> arguments, bool at_level, bool& tracked, bool& dual) {
    for (const IValue& value : arguments) {
      if (is_absent(value) || !value.isTensor()) continue;
      const at::Tensor& x = value.toTensor();
      if (!(at_level ? plain_at_level(x) : plain(x)) || is_number(value)) return false;
      tracked = tracked || (c10::GradMode::is_enabled() && x.requires_grad());
      dual = dual || (at_level && has_tangent(x));
    }
    return true;
  }

  const c10::SafeKernelFunction python;
  std::vector<std::shared_ptr<const Table>> tables_;
  Recordings recordings_, recordings_of_duals_;
};

// A formula under vmap: Python runs its body on batched tensors, and the operators that it calls are recorded.
struct BatchedKernel : public c10::OperatorKernel {
  explicit BatchedKernel(c10::SafeKernelFunction python_kernel) : python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const auto call = [&](Stack* values) { python.callBoxed(op, keys, values); };
    if (!acts.load(std::memory_order_acquire) || in_python.load(std::memory_order_acquire) || !only_transforms()) {
      call(stack);
    } else {
      call_recorded(op, stack, recordings_, /*in_call=*/true, call);
    }
  }

  std::atomic<bool> acts{false};  // else there is a rule for batches, or Python has an error for all calls

 private:
  const c10::SafeKernelFunction python;
  Recordings recordings_;
};

struct CoveredOp {
  CustomKernel* kernel;
  c10::RegistrationHandleRAII registration;  // which owns the kernel
  BatchedKernel* batched = nullptr;
  std::optional<c10::RegistrationHandleRAII> batched_registration;
};

inline std::map<int64_t, CoveredOp> covered_ops;

}  // namespace manualgrad

// Covers the kernel at Autograd that Python has registered for a custom op without lists of tensors. Returns a number
// for it. At first the kernel passes on all calls. `only_recorded`: it serves only calls in recordings.
MANUALGRAD_API int64_t manualgrad_calls_custom_attach(const char* name, const char* overload, int64_t only_recorded) {
  using namespace manualgrad;
  static int64_t count = 0;
  return guarded([&]() -> int64_t {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    auto kernel = std::make_unique<CustomKernel>(op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU));
    CustomKernel* const made = kernel.get();
    made->only_recorded = only_recorded != 0;
    const auto& returns = op.schema().returns();
    made->only_tensors = std::all_of(returns.begin(), returns.end(),
                                     [](const auto& r) { return r.type()->kind() == c10::TypeKind::TensorType; });
    CoveredOp one{made, covered(op, DispatchKey::Autograd, std::move(kernel)), nullptr, std::nullopt};
    if (made->only_recorded && made->only_tensors) {
      constexpr auto kBatched = DispatchKey::FuncTorchBatched;
      auto batched = std::make_unique<BatchedKernel>(op.getComputedKernelForDispatchKey(kBatched));
      one.batched = batched.get();
      one.batched_registration.emplace(covered(op, kBatched, std::move(batched)));
    }
    covered_ops.emplace(count, std::move(one));
    return count++;
  });
}

// Sets whether the kernel serves the calls that it can. Python serves tracked calls until the kernel gets a table.
// `batched`: whether it also serves calls under vmap.
MANUALGRAD_API int64_t manualgrad_calls_custom_act(int64_t op, int64_t yes, int64_t batched) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    const CoveredOp& one = covered_ops.at(op);
    one.kernel->track(nullptr);
    one.kernel->acts.store(yes != 0, std::memory_order_release);
    if (one.batched != nullptr) one.batched->acts.store(batched != 0, std::memory_order_release);
    return 0;
  });
}

// Sets the rule that tracked calls follow.
MANUALGRAD_API int64_t manualgrad_calls_custom_track(int64_t op, int64_t table) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    covered_ops.at(op).kernel->track(table_of(table));
    return 0;
  });
}

// Unregisters the kernel. A thread inside of it would crash.
MANUALGRAD_API int64_t manualgrad_calls_custom_detach(int64_t op) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t { return static_cast<int64_t>(covered_ops.erase(op)); });
}

// How many calls these kernels have served on this thread.
MANUALGRAD_API int64_t manualgrad_calls_custom_count() { return manualgrad::counts.untracked; }
