// Errors that name the argument and its value.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace manualgrad {

using torch::headeronly::ScalarType;

template <class... Parts>
[[noreturn]] inline void raise(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// The message is built only when the check fails.
#define MANUALGRAD_CHECK(condition, ...) \
  do {                                   \
    if (!(condition)) {                  \
      ::manualgrad::raise(__VA_ARGS__);  \
    }                                    \
  } while (0)

inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string list(const int64_t* values, int64_t count) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < count; ++i) {
    text << (i ? ", " : "") << values[i];
  }
  text << ']';
  return text.str();
}

}  // namespace manualgrad
