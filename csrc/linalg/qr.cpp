// The derivative of QR on the CPU; the contract is in qr.h.
#include "qr.h"

#include "run_on_cpu.h"

MANUALGRAD_REGISTER_CPU(manualgrad::QrOperators<manualgrad::Cpu<>>)
