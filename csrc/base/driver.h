// Whether the installed driver can run this library, which carries its own CUDA runtime.
#pragma once

namespace manualgrad {

// Null if it can; otherwise why not. Kernels are registered only where it can, and the Python formulas act elsewhere.
const char* cuda_obstacle();

}  // namespace manualgrad
