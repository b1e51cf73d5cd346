// Levels of torch.func: the tensors that a kernel at Autograd, a node and a recording get there.
//
// At a level of grad, vjp or jvp, PyTorch wraps every tensor and calls the kernel at Autograd, which tracks the
// wrappers and calls the operator below autograd; that call goes to the level outside. So the node is built as for
// plain tensors, if building it only calls operators. Calls with a tangent on an argument are in tangents.h. Python
// serves modes and strong zeros.
#pragma once

#include "table.h"

// Exported by libtorch. Their header includes what PyTorch does not ship.
namespace at::functorch {
Tensor unwrapIfDead(const Tensor& tensor);
bool isDeadTensorWrapper(const Tensor& tensor);
}  // namespace at::functorch

namespace manualgrad {

// Whether transforms are active on this thread, but no mode and no tracer.
inline bool only_transforms() {
  const auto included = c10::impl::tls_local_dispatch_key_set().included_;
  return included.remove(DispatchKey::FuncTorchVmapMode) == (c10::default_included_set | kTransformKeys);
}

// Whether a transform is in the middle of a call. Otherwise a call goes to the innermost transform first.
inline bool in_transformed_call() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

inline bool is_wrapped(const at::Tensor& x) {
  return x.unsafeGetTensorImpl()->key_set().has(DispatchKey::FuncTorchGradWrapper);
}

// Whether x is a dense tensor, wrapped by transforms or not. It may have a tangent.
inline bool plain_but_for_transforms(const at::Tensor& x) {
  constexpr auto kKeys =
      kPlainKeys | DispatchKeySet({DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched});
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  return (impl->key_set().raw_repr() & ~kKeys.raw_repr()) == 0 && !impl->has_symbolic_sizes_strides();
}

// Whether x is a dense tensor as the kernel at Autograd gets it at a level of grad, vjp or jvp.
inline bool plain_at_level(const at::Tensor& x) {
  return is_wrapped(x) && plain_but_for_transforms(x) &&
         !x.unsafeGetTensorImpl()->key_set().has(DispatchKey::FuncTorchBatched) &&
         !x.unsafeGetTensorImpl()->is_wrapped_number() && !at::functorch::isDeadTensorWrapper(x);
}

// x without the wrappers of levels that have ended.
inline at::Tensor alive(at::Tensor x) {
  while (x.defined() && is_wrapped(x) && at::functorch::isDeadTensorWrapper(x)) x = at::functorch::unwrapIfDead(x);
  return x;
}

}  // namespace manualgrad
