// Parts of a matrix.
#pragma once

#include "../compat.h"

namespace manualgrad {

// All of a matrix, what is below the diagonal, or what is on it and above.
enum class Part { kAll, kLower, kUpper };

HOST_DEVICE bool belongs(Part part, int i, int j) { return part == Part::kAll || (part == Part::kLower) == (j < i); }

}  // namespace manualgrad
