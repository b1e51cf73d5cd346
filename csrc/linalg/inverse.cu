// The derivatives of the inverse on CUDA; the contract is in inverse.h.
#include "inverse.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::InverseOperators<manualgrad::Cuda>)
