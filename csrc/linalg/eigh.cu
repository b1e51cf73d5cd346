// The Hermitian eigendecomposition on CUDA; the contract is in eigh.h.
#include "eigh.h"

#include "spectrum/decomposition_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::EighOperators<manualgrad::CudaDecompositions>)
