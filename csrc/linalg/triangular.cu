// The derivative of triangular solves on CUDA; the contract is in triangular.h.
#include "triangular.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::TriangularOperators<manualgrad::Cuda>)
