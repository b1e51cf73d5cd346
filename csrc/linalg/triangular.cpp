// The derivative of triangular solves on the CPU; the contract is in triangular.h.
#include "triangular.h"

#include "run_on_cpu.h"

MANUALGRAD_REGISTER_CPU(manualgrad::TriangularOperators<manualgrad::Cpu<>>)
