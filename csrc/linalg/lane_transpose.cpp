// Contract: lane_transpose.h.
#include "lane_transpose.h"

namespace manualgrad {

MANUALGRAD_LANE_TRANSPOSES(, 16)
MANUALGRAD_LANE_TRANSPOSES(, 32)
MANUALGRAD_LANE_TRANSPOSES(, 64)

}  // namespace manualgrad
