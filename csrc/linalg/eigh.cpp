// The Hermitian eigendecomposition on the CPU; the contract is in eigh.h.
#include "eigh.h"

#include "spectrum/decomposition_on_cpu.h"

MANUALGRAD_REGISTER_CPU(manualgrad::EighOperators<manualgrad::CpuDecompositions>)
