// The derivative of QR on CUDA; the contract is in qr.h.
#include "qr.h"

#include "run_on_cuda.h"

MANUALGRAD_REGISTER_CUDA(manualgrad::QrOperators<manualgrad::Cuda>)
