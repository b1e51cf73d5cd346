// The derivatives of determinants on CUDA; the contract is in det.h.
#include "det.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::DetOperators<manualgrad::Cuda>)
