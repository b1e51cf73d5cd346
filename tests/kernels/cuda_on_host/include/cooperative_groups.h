// A stand-in for CUDA's header: as much of it as the kernels use, on the host. See ../machine.h.
#pragma once

#include "cuda_runtime.h"

namespace cooperative_groups {

struct grid_group {
  void sync(CUDA_ON_HOST_SITE) const { cuda_on_host::meet_grid({file, line}); }
};
inline grid_group this_grid() { return {}; }

}  // namespace cooperative_groups
