// The loops that most matrix kernels share: compiled once, in shared_loops.cpp. Host code.
#pragma once

#include "../../math/product.h"
#include "cached_matrix.h"
#include "vector_product.h"

namespace manualgrad {

// The kind of sum and its factors; see shared_loops.cpp.
template <Factor Of>
inline constexpr bool kIsShared<Step<Sum::kSubtract, Of>> = true;
template <Sum How>
inline constexpr bool kIsShared<Product<How, Factor::kPlain, Factor::kPlain>> = true;
template <>
inline constexpr bool kIsShared<Product<Sum::kReplace, Factor::kConjugate, Factor::kPlain>> = true;
template <>
inline constexpr bool kIsShared<Product<Sum::kReplace, Factor::kPlain, Factor::kConjugate>> = true;

}  // namespace manualgrad
