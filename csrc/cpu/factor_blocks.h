// The derivatives of factor_plan.h for one matrix too large for lanes: real, square, on the CPU.
#pragma once

#include "../factor_plan.h"

namespace manualgrad {

// The largest side, by measurement: above, BLAS is faster.
constexpr int kLargestBlocks = 256;

// Over a batch of matrices of side n; those of a solve with m right-hand sides.
template <class Arguments>
void pull_blocks(const Arguments& at, int64_t batch, int m, int n);

}  // namespace manualgrad
