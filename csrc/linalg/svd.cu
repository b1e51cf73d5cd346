// The SVD on CUDA; the contract is in svd.h.
#include "svd.h"

#include "spectrum/decomposition_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::SvdOperators<manualgrad::CudaDecompositions>)
