// The derivatives of solves on CUDA; the contract is in solve.h.
#include "solve.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::SolveOperators<manualgrad::Cuda>)
