// manualgrad::kernel_limit(str name) -> int: one of kLimits by its name, 0 for any other.
#include "limits.h"

#include "../base/abi.h"

namespace manualgrad {
namespace {

int64_t kernel_limit(std::string name) {
  for (const Limit& limit : kLimits) {
    if (limit.name == name) return limit.order;
  }
  return 0;
}

}  // namespace
}  // namespace manualgrad

STABLE_TORCH_LIBRARY_FRAGMENT(manualgrad, library) { library.def("kernel_limit(str name) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(manualgrad, CompositeExplicitAutograd, library) {
  library.impl("kernel_limit", TORCH_BOX(&manualgrad::kernel_limit));
}
