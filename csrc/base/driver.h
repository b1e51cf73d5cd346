// Whether the installed driver can run this library, which carries its own CUDA runtime.
#pragma once

namespace manualgrad {

// Null if it can; otherwise the reason. Kernels are registered only if it can; otherwise the Python formulas run.
const char* cuda_obstacle();

}  // namespace manualgrad
