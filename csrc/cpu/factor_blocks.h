// The derivatives of factor_plan.h for one matrix too large for lanes: real, square, on the CPU.
#pragma once

#include "../factor_plan.h"

namespace manualgrad {

// The largest side, by measurement: above, BLAS is faster.
constexpr int kLargestBlocks = 256;

// Each over a batch of matrices of side n; `solve` with m right-hand sides.
template <class T>
void pull_blocks(const LuArguments<T>& at, int64_t batch, int m, int n);
template <class T>
void pull_blocks(const CholeskyArguments<T>& at, int64_t batch, int m, int n);
template <class T>
void pull_blocks(const DetArguments<T>& at, int64_t batch, int m, int n);
template <class T>
void pull_blocks(const InverseArguments<T>& at, int64_t batch, int m, int n);
template <class T>
void pull_blocks(const SolveArguments<T>& at, int64_t batch, int m, int n);

}  // namespace manualgrad
