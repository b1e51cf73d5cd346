// Calls that functorch sees first, with a Python number in place of a tensor.
//
// The number is converted to a tensor before functorch wraps it (core/override/kernels.py says why); under a mode,
// Python does this. Under functionalize nothing is wrapped, and a graph that is traced there must keep its numbers.
// Such a call never enters Python, which could not pass the number on.
#pragma once

#include "guarded.h"
#include "levels.h"
#include "python.h"

#include <map>

namespace manualgrad {

struct NumbersKernel : public c10::OperatorKernel {
  NumbersKernel(c10::SafeKernelFunction stock_kernel, c10::SafeKernelFunction python_kernel)
      : stock(std::move(stock_kernel)), python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const size_t n = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, n);
    if (!has_number(arguments) || functionalizes()) return stock.callBoxed(op, keys, stack);
    if (!only_transforms()) return python.callBoxed(op, keys, stack);
    std::vector<int64_t> places;
    for (size_t i = 0; i < n; ++i) {
      if (arguments[i].isTensor() && !is_absent(arguments[i])) places.push_back(static_cast<int64_t>(i));
    }
    std::vector<IValue> values = arguments.vec();
    numbers_as_tensors(places, values);
    std::move(values.begin(), values.end(), stack->end() - static_cast<std::ptrdiff_t>(n));
    stock.callBoxed(op, keys, stack);
  }

 private:
  // Whether the innermost transform is functionalize; torch's headers for that do not compile without others.
  static bool functionalizes() {
    static const PythonOp functionalizing("manualgrad_calls::functionalizing");
    return functionalizing({}).toBool();
  }

  static bool has_number(c10::ArrayRef<IValue> arguments) {
    for (const IValue& value : arguments) {
      if (is_number(value)) return true;
    }
    return false;
  }

  const c10::SafeKernelFunction stock, python;
};

inline std::map<std::string, c10::SafeKernelFunction> numbers_stock;
inline std::map<std::string, c10::RegistrationHandleRAII> numbers_registrations;

}  // namespace manualgrad

// Covers the kernel that Python has registered for the operator before functorch. Called with python = 0 before that
// registration.
MANUALGRAD_API int64_t manualgrad_calls_numbers_attach(const char* name, const char* overload, int64_t python) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    constexpr auto kKey = DispatchKey::FuncTorchDynamicLayerFrontMode;
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const std::string full = std::string(name) + "." + overload;
    auto now = op.getComputedKernelForDispatchKey(kKey);
    if (!python) {
      numbers_stock.insert_or_assign(full, std::move(now));
      return 0;
    }
    auto kernel = std::make_unique<NumbersKernel>(numbers_stock.at(full), std::move(now));
    numbers_registrations.emplace(full, covered(op, kKey, std::move(kernel)));
    return 0;
  });
}

// Unregisters all of these kernels.
MANUALGRAD_API int64_t manualgrad_calls_numbers_detach() {
  return manualgrad::guarded([]() -> int64_t {
    manualgrad::numbers_registrations.clear();
    return 0;
  });
}
