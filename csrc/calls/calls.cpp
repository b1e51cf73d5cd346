// Calls of operators that have a rule, without Python if nothing but autograd is active.
//
// A kernel at the dispatch key Autograd decides, per call, between three ways:
//   stock    no rule is active: PyTorch's own kernel, as if nothing were registered.
//   plain    dense tensors on which nothing else acts: the forward, the residuals and the node of the graph are made
//            here, by the rule's `Table` (table.h). The backward calls the compiled formula that the table names, or
//            the rule's vjp in Python (node.h). If zeros are strong, PyTorch's own node may be tried before these
//            (stock.h).
//   Python   everything else (dual tensors, modes, subclasses): the general kernel, which Python registered earlier
//            at the same key, and which this one covers.
// At a level of torch.func a call also takes the plain way if possible (levels.h), even with tangents (tangents.h).
//
// This library is built against one release of torch, with its own headers;
// torch_manualgrad/core/override/compiled_calls.py loads and drives it.
#include "attributes.h"
#include "custom.h"
#include "differentiate.h"
#include "functionalized.h"
#include "graphs.h"
#include "guarded.h"
#include "levels.h"
#include "state.h"
#include "table.h"
#include "tangents.h"

#include <ATen/SavedTensorHooks.h>

#include <algorithm>
#include <map>

namespace manualgrad {
namespace {

// ---- the kernel -----------------------------------------------------------------------------------------------------

struct Kernel : public c10::OperatorKernel {
  Kernel(size_t s, c10::SafeKernelFunction stock_kernel, c10::SafeKernelFunction python_kernel)
      : slot(s), stock(std::move(stock_kernel)), python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const Reading active;
    const Table* const table = active.table(slot);
    if (table == nullptr || suspended > 0) {
      stock.callBoxed(op, keys, stack);
      return;
    }
    if (table->in_python || in_python.load(std::memory_order_relaxed) || replaced(*table, op, *stack)) {
      python.callBoxed(op, keys, stack);
      return;
    }
    if (!plain_thread()) {
      if (!at_level(*table, op, keys, stack)) {
        const Recording::InPython served(/*at_level=*/true);
        python.callBoxed(op, keys, stack);
      }
      return;
    }
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    if (table->defers == Table::kUnlessPlain || table->defers == Table::kUnlessTracked) {
      const bool untracked = table->defers == Table::kUnlessTracked;
      const bool is_plain = std::all_of(table->tensors.begin(), table->tensors.end(),
                                        [&](int64_t place) { return plain_argument(arguments[place], untracked); });
      (is_plain ? stock : python).callBoxed(op, keys, stack);
      return;
    }
    bool grad = false, numbers = false, on_cpu = true;
    for (const int64_t place : table->tensors) {
      const IValue& value = arguments[place];
      const bool is_list = is_tensors(value);
      bool is_plain = true;
      for_each(value, [&](const IValue& x) {
        if (is_absent(x)) return;
        is_plain = is_plain && x.isTensor() && plain(x.toTensor()) && !(is_list && is_number(x));
        if (!is_plain) return;
        grad = grad || x.toTensor().requires_grad();
        numbers = numbers || is_number(x);
        on_cpu = on_cpu && x.toTensor().is_cpu();
      });
      if (!is_plain) {
        const bool nested = value.isTensor() && value.toTensor().is_nested();  // there are no rules for these
        (nested ? stock : python).callBoxed(op, keys, stack);
        return;
      }
    }
    if (table->in_place) {
      if (!grad || !c10::GradMode::is_enabled()) {
        stock.callBoxed(op, keys, stack);
      } else if (!differentiate_in_place(*table, op, keys, stack, numbers)) {
        python.callBoxed(op, keys, stack);
      }
    } else if (!grad || !c10::GradMode::is_enabled()) {
      below(op, keys, stack);
    } else if (!deferred(*table, arguments)) {
      differentiate(*table, op, keys, stack, numbers, nullptr);
    } else if (!table->check_stock) {
      stock.callBoxed(op, keys, stack);
    } else {
      // hooks must get saved tensors only once; values on a device cannot be read while a graph is captured
      const bool twice = on_cpu && at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
      differentiate(*table, op, keys, stack, numbers, twice ? &stock : nullptr);
    }
  }

 private:
  // A call at a level of torch.func. Returns false and does nothing if Python has to serve the call. No call is left to
  // stock, because an outer level may differentiate again.
  static bool at_level(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (table.defers == Table::kUnlessPlain || table.defers == Table::kUnlessTracked || table.in_place ||
        table.strong_zero || !only_transforms()) {
      return false;
    }
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    bool plain = true, tracked = false, dual = false, numbers = false;
    for (const int64_t place : table.tensors) {
      for_each(arguments[place], [&](const IValue& x) {
        if (is_absent(x)) return;
        if (is_number(x) && arguments[place].isTensor()) {
          numbers = true;  // from one of PyTorch's own formulas: other numbers are tensors by now (functionalized.h)
          plain = plain && manualgrad::plain(x.toTensor());
          return;
        }
        plain = plain && x.isTensor() && plain_at_level(x.toTensor());
        tracked = tracked || (plain && x.toTensor().requires_grad());
        dual = dual || (plain && has_tangent(x.toTensor()));
      });
    }
    tracked = tracked && c10::GradMode::is_enabled();
    if (!plain || (dual && (tracked || !table.pushes))) return false;
    if (dual) {
      push_forward(table, op, keys, stack, numbers);
    } else if (tracked) {
      differentiate(table, op, keys, stack, numbers, nullptr, nullptr, /*at_level=*/true);
    } else {
      below(op, keys, stack);
    }
    return true;
  }

  static bool plain_argument(const IValue& value, bool untracked) {
    if (is_absent(value)) return true;
    const bool tracked = c10::GradMode::is_enabled();
    if (value.isTensor()) {
      const at::Tensor& x = value.toTensor();
      return x.is_nested() || (plain(x) && !(untracked && tracked && x.requires_grad()));
    }
    if (!value.isTensorList() && !value.isOptionalTensorList()) return false;
    for (const IValue& element : value.toListRef()) {
      if (is_absent(element)) continue;
      const at::Tensor& x = element.toTensor();
      if (!plain(x) || (tracked && x.requires_grad())) return false;
    }
    return true;
  }

  // Whether the rule leaves the call to stock, as core/rule/definition.py defines it.
  static bool deferred(const Table& table, c10::ArrayRef<IValue> arguments) {
    if (table.defers == Table::kNever || table.defers == Table::kAlways) return table.defers == Table::kAlways;
    if (table.defers == Table::kPythonDecides) return deferred_in_python(table, arguments);
    if (table.defers == Table::kMetadataDecides) {
      return table.deferrals.of(arguments, [&] { return deferred_in_python(table, arguments); });
    }
    const at::Tensor& A = arguments[0].toTensor();
    return table.defers == Table::kReal ? !A.is_complex() : !many_small(table, A);
  }
  static bool many_small(const Table& table, const at::Tensor& A) {
    if (A.dim() < 2) return false;
    const int64_t largest = A.is_complex() ? table.complex_order : table.order;
    return !A.is_cpu() || (A.size(-1) <= largest && A.numel() >= table.entries);
  }

  // Whether the forward of the call is replaced. The size may be open if the compiler traces the call.
  static bool replaced(const Table& table, const c10::OperatorHandle& op, const Stack& stack) {
    if (!table.replaces_forward) return false;
    const IValue& first = torch::jit::last(stack, op.schema().arguments().size())[0];
    return !first.isTensor() || first.toTensor().unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
           many_small(table, first.toTensor());
  }

  const size_t slot;
  const c10::SafeKernelFunction stock, python;
};

// ---- what Python calls ----------------------------------------------------------------------------------------------

std::map<size_t, c10::RegistrationHandleRAII> registrations;  // by slot

// Each operator has one slot for the life of the process, as layers outlive registrations.
size_t slot_of(const std::string& name) {
  static std::map<std::string, size_t> slots;
  return slots.emplace(name, slots.size()).first->second;
}

}  // namespace
}  // namespace manualgrad

using namespace manualgrad;

// The message of the last call that returned -1.
MANUALGRAD_API const char* manualgrad_calls_error() { return message.c_str(); }

// Covers the kernel at Autograd that Python has registered for the operator. Returns the operator's slot.
// The stock kernel can be looked up only before both are registered, so this is called twice, first with python = 0.
MANUALGRAD_API int64_t manualgrad_calls_attach(const char* name, const char* overload, int64_t python) {
  static std::map<size_t, c10::SafeKernelFunction> stock;
  return guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto op = dispatcher.findSchemaOrThrow(name, overload);
    const size_t slot = slot_of(std::string(name) + "." + overload);
    auto now = op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU);
    if (!python) {
      stock.insert_or_assign(slot, std::move(now));
      return 0;
    }
    auto kernel = std::make_unique<Kernel>(slot, stock.at(slot), std::move(now));
    stock.erase(slot);
    registrations.insert_or_assign(slot, covered(op, DispatchKey::Autograd, std::move(kernel)));
    return static_cast<int64_t>(slot);
  });
}

// Unregisters the kernel, if there is one. A thread inside of it would crash.
MANUALGRAD_API int64_t manualgrad_calls_detach(const char* name, const char* overload) {
  return guarded([&]() -> int64_t {
    return static_cast<int64_t>(registrations.erase(slot_of(std::string(name) + "." + overload)));
  });
}

// While positive, eager calls of this thread are PyTorch's own.
MANUALGRAD_API void manualgrad_calls_suspend(int64_t by) { suspended += by; }

// On this thread: plain calls, backwards by a compiled formula, backwards in Python.
MANUALGRAD_API void manualgrad_calls_counts(int64_t* found) {
  found[0] = counts.plain;
  found[1] = counts.compiled;
  found[2] = counts.python;
}
