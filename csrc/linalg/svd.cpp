// The SVD on the CPU; the contract is in svd.h.
#include "svd.h"

#include "spectrum/decomposition_on_cpu.h"

MANUALGRAD_REGISTER_CPU(manualgrad::SvdOperators<manualgrad::CpuDecompositions>)
