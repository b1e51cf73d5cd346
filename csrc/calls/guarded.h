// What Python calls returns -1 where it fails, and the message of the error is asked for then.
#pragma once

#include "table.h"

#define MANUALGRAD_API extern "C" __attribute__((visibility("default")))

namespace manualgrad {

inline thread_local std::string message;

template <class F>
int64_t guarded(F&& f) {
  try {
    const std::lock_guard<std::mutex> lock(changes);
    return f();
  } catch (const std::exception& error) {
    message = error.what();
    return -1;
  }
}

}  // namespace manualgrad
