// Functions for Python return -1 if they fail; Python then reads the message of the error.
#pragma once

#include "table.h"

#include <c10/util/Exception.h>

#define MANUALGRAD_API extern "C" __attribute__((visibility("default")))

namespace manualgrad {

inline thread_local std::string message;

template <class F>
int64_t guarded(F&& f) {
  try {
    const std::lock_guard lock(changes);
    return f();
  } catch (const std::exception& error) {
    message = error.what();
    return -1;
  }
}

struct Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Registers a kernel over the one that Python has registered.
template <class Kernel>
c10::RegistrationHandleRAII covered(const c10::OperatorHandle& op, DispatchKey key, std::unique_ptr<Kernel> kernel) {
  Silent silent;  // PyTorch warns once per process that a kernel is overridden, which is intended here
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  return c10::Dispatcher::singleton().registerImpl(op.operator_name(), key,
                                                   c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
                                                   std::nullopt, nullptr, "torch_manualgrad calls");
}

}  // namespace manualgrad
