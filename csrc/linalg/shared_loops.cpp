// Contract: shared_loops.h.
#include "shared_loops.h"

namespace manualgrad {

MANUALGRAD_SHARED_LOOPS()

}  // namespace manualgrad
