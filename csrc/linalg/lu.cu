// The derivatives of LU, and the factors of small matrices, on CUDA; the contract is in lu.h.
#include "lu.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::LuOperators<manualgrad::Cuda>)
