// From a tensor's dtype to the type of its elements.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../math/element.h"
#include "check.h"

namespace manualgrad {

using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;

template <>
struct ElementTraits<Half> {
  using compute = float;
  using real = Half;
};
template <>
struct ElementTraits<BFloat16> {
  using compute = float;
  using real = BFloat16;
};
template <>
inline constexpr double kSmallestNormal<Half> = 6.103515625e-05;

template <class S>
struct Tag {
  using type = S;
};

// The dtype of the norm of a tensor of this dtype.
inline ScalarType real_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::ComplexHalf:
      return ScalarType::Half;
    case ScalarType::ComplexFloat:
      return ScalarType::Float;
    case ScalarType::ComplexDouble:
      return ScalarType::Double;
    default:
      return type;
  }
}

// Calls f(Tag<S>{}) with the storage type of the dtype; `where` opens the message of the error.
template <class F>
inline void dispatch_inexact(ScalarType type, const char* where, const F& f) {
  switch (type) {
    case ScalarType::Float:
      return f(Tag<float>{});
    case ScalarType::Double:
      return f(Tag<double>{});
    case ScalarType::Half:
      return f(Tag<Half>{});
    case ScalarType::BFloat16:
      return f(Tag<BFloat16>{});
    case ScalarType::ComplexHalf:
      return f(Tag<Complex<Half>>{});
    case ScalarType::ComplexFloat:
      return f(Tag<Complex<float>>{});
    case ScalarType::ComplexDouble:
      return f(Tag<Complex<double>>{});
    default:
      raise(where, "expected a floating point or complex dtype, got ", dtype_name(type));
  }
}

// Calls f(Tag<S>{}) for the dtypes that have decompositions.
template <class F>
inline void dispatch_matrix(ScalarType type, const char* where, const char* name, const F& f) {
  switch (type) {
    case ScalarType::Float:
      return f(Tag<float>{});
    case ScalarType::Double:
      return f(Tag<double>{});
    case ScalarType::ComplexFloat:
      return f(Tag<Complex<float>>{});
    case ScalarType::ComplexDouble:
      return f(Tag<Complex<double>>{});
    default:
      raise(where, name, ": expected float32, float64, complex64 or complex128, got ", dtype_name(type));
  }
}

}  // namespace manualgrad
