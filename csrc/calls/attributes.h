// The contents of a node for Python: core/engine/node.py shows them as attributes, like those of PyTorch's nodes.
#pragma once

#include "guarded.h"
#include "node.h"

#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/library.h>

namespace manualgrad {

// Hooks that Python has registered on one saved tensor; Python keeps the functions and the packed values.
struct PythonHooks : public torch::autograd::SavedVariableHooks {
  explicit PythonHooks(int64_t n) : number(n) {}

  ~PythonHooks() override {
    try {
      static const PythonOp drop("manualgrad_calls::drop_hooks");
      drop({number});
    } catch (...) {  // at the end of the process
    }
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    static const PythonOp pack("manualgrad_calls::pack");
    pack({number, tensor});
  }

  at::Tensor call_unpack_hook() override {
    static const PythonOp unpack("manualgrad_calls::unpack");
    return unpack({number}).toTensor();
  }

  const int64_t number;
};

inline RuleNode& node_at(int64_t address) { return *dynamic_cast<RuleNode*>(reinterpret_cast<Node*>(address)); }

inline at::Tensor saved_at(int64_t node, int64_t place) { return node_at(node).unpack(place); }

inline IValue constant_at(int64_t node, int64_t place) { return node_at(node).constants.at(place); }

inline void register_hooks(int64_t node, int64_t place, int64_t hooks) {
  node_at(node).register_hooks(place, std::make_unique<PythonHooks>(hooks));
}

TORCH_LIBRARY_FRAGMENT(manualgrad_calls, library) {
  library.def("saved(int node, int place) -> Tensor", &saved_at);
  library.def("constant(int node, int place) -> Any", &constant_at);
  library.def("register_hooks(int node, int place, int hooks) -> ()", &register_hooks);
  // an active transform of torch.func would wrap again what a node of its own level has saved
  constexpr auto kFirst = DispatchKey::FuncTorchDynamicLayerFrontMode;
  library.impl("saved", torch::dispatch(kFirst, &saved_at));
  library.impl("constant", torch::dispatch(kFirst, &constant_at));
  library.impl("register_hooks", torch::dispatch(kFirst, &register_hooks));
}

}  // namespace manualgrad

// How many types of nodes there are.
MANUALGRAD_API int64_t manualgrad_calls_node_types() { return manualgrad::kNodeTypes; }

// The std::type_info of a type of nodes.
MANUALGRAD_API const void* manualgrad_calls_node_type(int64_t number) {
  return manualgrad::node_types.at(static_cast<size_t>(number)).type;
}
