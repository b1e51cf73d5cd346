// The derivatives of Cholesky on CUDA; the contract is in cholesky.h.
#include "cholesky.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::CholeskyOperators<manualgrad::Cuda>)
