// Calls on PyTorch's strided nested tensors that stay with PyTorch, without Python.
//
// PyTorch's nodes for some calls are right in first order if a cotangent has the memory layout that PyTorch expects,
// and they call backward operators that have derivatives of ours. Such a call stays with PyTorch. Its node gets a hook,
// which puts cotangents in order and marks the node: the operators that a marked node calls are replaced whenever its
// backward runs. torch_manualgrad/nested/strided.py lists these calls.
//
// A kernel at the dispatch key AutogradNestedTensor decides between
//   stock    nothing is active, nothing is differentiated, or the call stays with PyTorch.
//   Python   everything else, and what PyTorch refuses: the kernel that Python registered at the same key before.
#include "guarded.h"
#include "nested_views.h"
#include "state.h"
#include "strided.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>
#include <map>

namespace manualgrad {
namespace {

// tangents: whether a jagged tensor has ever carried one, which only Python can tell
std::atomic<bool> tangents{false};
thread_local int64_t left_to_stock = 0,
                     on_buffers = 0;  // tracked calls, and those that took the whole buffer: for tests

// ---- marked nodes ---------------------------------------------------------------------------------------------------

struct InOrder : public torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& grads) override {
    variable_list found = grads;
    for (at::Tensor& grad : found) {
      if (!grad.defined() || !grad.is_nested() || grad.key_set().has(DispatchKey::Python)) continue;
      if (numbers_in_order(grad) < 0) grad = grad.contiguous();
    }
    return found;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
};

// If autograd tracks the backward, PyTorch's node of silu calls operators that strided tensors do not have, instead of
// silu_backward. So tracking is off while the node runs, and our silu_backward tracks what it does.
thread_local bool silu_tracked = false;

struct StopTracking : public InOrder {
  variable_list operator()(const variable_list& grads) override {
    variable_list found = InOrder::operator()(grads);
    silu_tracked = c10::GradMode::is_enabled();
    if (silu_tracked) c10::GradMode::set_enabled(false);
    return found;
  }
};

struct TrackAgain : public torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& gradients, const variable_list&) override {
    if (silu_tracked) c10::GradMode::set_enabled(true);
    silu_tracked = false;
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}
};

bool is_marked(const Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    if (dynamic_cast<const InOrder*>(hook.get()) != nullptr) return true;
  }
  return false;
}

// Whether this call is part of the backward of a marked node.
bool continues() {
  const auto node = torch::autograd::get_current_node();
  return node && is_marked(*node);
}

// Which tracked calls of an operator stay with PyTorch, as core/override/compiled_nested.py defines them: whether
// jagged ones too, and those with gradients of dense arguments.
enum Way : int64_t { kNone = 0, kStays = 1, kJagged = 2, kParameters = 4, kSilu = 8, kSiluBackward = 16 };

bool mark_node(const NodePointer& node) {
  if (!node || is_marked(*node)) return false;
  node->add_pre_hook(std::make_unique<InOrder>());
  return true;
}

void mark(const at::Tensor& result, int64_t way) {
  const auto& node = result.grad_fn();
  if (way & kSilu) {
    if (!node || is_marked(*node)) return;
    node->add_pre_hook(std::make_unique<StopTracking>());
    node->add_post_hook(std::make_unique<TrackAgain>());
  } else {
    if (!mark_node(node)) return;
  }
  ++left_to_stock;
}

bool acts() { return suspended == 0 && (Reading().nested() || continues()); }

// ---- calls ----------------------------------------------------------------------------------------------------------

constexpr DispatchKeySet kNestedKeys =
    kPlainKeys |
    DispatchKeySet({DispatchKey::NestedTensorCPU, DispatchKey::NestedTensorCUDA, DispatchKey::AutogradNestedTensor});

constexpr DispatchKeySet kJaggedKeys =
    kNestedKeys | DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});

bool is_jagged(const at::Tensor& x) { return x.is_nested() && x.key_set().has(DispatchKey::Python); }

bool is_tensor(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

struct NestedKernel : public c10::OperatorKernel {
  NestedKernel(int64_t w, c10::SafeKernelFunction stock_kernel, c10::SafeKernelFunction python_kernel)
      : way(w), stock(std::move(stock_kernel)), python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const size_t n = op.schema().arguments().size();
    if (way == kSiluBackward && silu_tracked && continues()) {
      const c10::AutoGradMode tracking(true);
      python.callBoxed(op, keys, stack);
      return;
    }
    if (in_python) {
      python.callBoxed(op, keys, stack);
      return;
    }
    if (!acts()) {
      stock.callBoxed(op, keys, stack);
      return;
    }
    const auto arguments = torch::jit::last(*stack, n).vec();
    const bool plain = plain_thread() && std::all_of(arguments.begin(), arguments.end(), is_plain);
    const bool tracked = c10::GradMode::is_enabled() && std::any_of(arguments.begin(), arguments.end(), requires_grad);
    if (!plain || !taken_if_jagged(arguments) || (tracked && !stays(arguments))) {
      python.callBoxed(op, keys, stack);
      return;
    }
    if (!taken(stock, op, keys, stack, arguments)) {
      python.callBoxed(op, keys, stack);
      return;
    }
    if (tracked) mark(stack->back().toTensor(), way);
  }

 private:
  static bool is_plain(const IValue& value) {
    if (!is_tensor(value)) return true;
    const at::Tensor& x = value.toTensor();
    const auto keys = is_jagged(x) && !tangents ? kJaggedKeys : kNestedKeys;
    return (x.key_set().raw_repr() & ~keys.raw_repr()) == 0 && !has_tangent(x);
  }

  // PyTorch refuses calls on jagged tensors in Python, where the error must be caught. It takes the calls of its own
  // graph, and these operators on one jagged tensor and numbers.
  bool taken_if_jagged(Arguments arguments) const {
    const at::Tensor* first = nullptr;
    bool numbers = true;
    for (const IValue& value : arguments) {
      if (!is_tensor(value)) continue;
      const at::Tensor& x = value.toTensor();
      if (is_jagged(x) && first == nullptr) {
        first = &x;
      } else {
        numbers = numbers && (x.is_nested() ? first != nullptr && x.is_same(*first) : x.dim() == 0);
      }
    }
    return first == nullptr || (numbers && (way & kJagged)) || (!c10::GradMode::is_enabled() && continues());
  }

  static bool requires_grad(const IValue& value) { return is_tensor(value) && value.toTensor().requires_grad(); }

  bool stays(Arguments arguments) const {
    // hooks may raise errors that must not be caught, or may not take nested tensors
    if (!(way & kStays) || !at::SavedTensorDefaultHooks::get_tls_state().stack.empty()) return false;
    const at::Tensor* first = nullptr;
    for (const IValue& value : arguments) {
      if (!is_tensor(value)) continue;
      const at::Tensor& x = value.toTensor();
      if (!x.is_nested()) {
        if (!(way & kParameters) && (x.requires_grad() || x.dim() > 0)) return false;
      } else if (is_jagged(x)) {
        if (!x.is_floating_point() || !no_autocast()) return false;
        first = &x;
      } else if (first == nullptr || !x.is_same(*first)) {
        const auto dtype = (first == nullptr ? x : *first).scalar_type();
        if (!x.is_floating_point() || x.scalar_type() != dtype || numbers_in_order(x) <= 0) return false;
        first = &x;
      }
    }
    return true;
  }

  const int64_t way;
  const c10::SafeKernelFunction stock, python;
};

// At NestedTensorCPU, which calls of PyTorch's graphs reach too.
struct BufferKernel : public c10::OperatorKernel {
  using Function = at::Tensor (*)(Arguments);

  BufferKernel(Function f, c10::SafeKernelFunction stock_kernel) : function(f), stock(std::move(stock_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const size_t n = op.schema().arguments().size();
    at::Tensor found = !in_python && acts() ? function(torch::jit::last(*stack, n)) : at::Tensor();
    if (!found.defined()) {
      stock.callBoxed(op, keys, stack);
      return;
    }
    ++on_buffers;
    torch::jit::drop(*stack, n);
    stack->emplace_back(std::move(found));
  }

  const Function function;
  const c10::SafeKernelFunction stock;
};

// PyTorch's view of a buffer. Its node assumes that the components of a cotangent are in order in the buffer; the node
// of values() calls it too.
struct ViewKernel : public c10::OperatorKernel {
  explicit ViewKernel(c10::SafeKernelFunction stock_kernel) : stock(std::move(stock_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    stock.callBoxed(op, keys, stack);
    if (!in_python && acts()) mark_node(stack->back().toTensor().grad_fn());
  }

  const c10::SafeKernelFunction stock;
};

struct OnBuffer {
  const char *name, *overload;
  BufferKernel::Function function;
};

constexpr OnBuffer kOnBuffers[] = {{"aten::_softmax", "", softmax},
                                   {"aten::_softmax_backward_data", "", softmax_backward},
                                   {"aten::sum", "dim_IntList", sum},
                                   {"aten::_nested_sum_backward", "", sum_backward}};

// ---- what Python calls ----------------------------------------------------------------------------------------------

std::map<std::string, c10::SafeKernelFunction> stock_kernels;
std::vector<c10::RegistrationHandleRAII> registrations;

template <class Kernel, class... Arguments>
void cover(const c10::OperatorHandle& op, DispatchKey key, Arguments&&... arguments) {
  registrations.push_back(covered(op, key, std::make_unique<Kernel>(arguments...)));
}

}  // namespace
}  // namespace manualgrad

using namespace manualgrad;

// Calls that Python leaves to PyTorch, and views of strided tensors.
TORCH_LIBRARY_FRAGMENT(manualgrad_calls, library) {
  library.def("mark_nested(Tensor result, int way) -> ()");
  library.impl("mark_nested", DispatchKey::AutogradNestedTensor, mark);
  library.impl("mark_nested", DispatchKey::Autograd, mark);
  library.def("nested_pieces(Tensor x, Tensor[] views, int dim, int[] starts, int[] lengths) -> Tensor[]");
  library.impl("nested_pieces", DispatchKey::AutogradNestedTensor, nested_pieces);
}

// Called before Python registers its kernel at AutogradNestedTensor for the operator: stock calls go to the kernel that
// is there now.
MANUALGRAD_API int64_t manualgrad_calls_nested_before(const char* name, const char* overload) {
  return guarded([&]() -> int64_t {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    stock_kernels.insert_or_assign(c10::toString(op.operator_name()),
                                   op.getComputedKernelForDispatchKey(DispatchKey::AutogradNestedTensor));
    return 0;
  });
}

// Called after that: covers the kernel. `way`: which tracked calls stay with PyTorch.
MANUALGRAD_API int64_t manualgrad_calls_nested_attach(const char* name, const char* overload, int64_t way) {
  return guarded([&]() -> int64_t {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    cover<NestedKernel>(op, DispatchKey::AutogradNestedTensor, way, stock_kernels.at(c10::toString(op.operator_name())),
                        op.getComputedKernelForDispatchKey(DispatchKey::AutogradNestedTensor));
    return 0;
  });
}

// Registers the kernels that compute on the whole buffer, and that of a view of a buffer.
MANUALGRAD_API int64_t manualgrad_calls_nested_attach_buffers() {
  return guarded([&]() -> int64_t {
    for (const OnBuffer& one : kOnBuffers) {
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(one.name, one.overload);
      cover<BufferKernel>(op, DispatchKey::NestedTensorCPU, one.function,
                          op.getComputedKernelForDispatchKey(DispatchKey::NestedTensorCPU));
    }
    const auto view = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_nested_view_from_buffer", "");
    cover<ViewKernel>(view, DispatchKey::Autograd, view.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU));
    return 0;
  });
}

// Unregisters all of these kernels, if there are any. A thread inside of one would crash.
MANUALGRAD_API int64_t manualgrad_calls_nested_detach() {
  return guarded([&]() -> int64_t {
    registrations.clear();
    return 0;
  });
}

// Must be called before a jagged tensor carries a tangent.
MANUALGRAD_API void manualgrad_calls_nested_tangents() { tangents = true; }

// Whether this thread is in the backward of a call that stayed with PyTorch.
MANUALGRAD_API int64_t manualgrad_calls_nested_continues() { return continues(); }

// On this thread: tracked calls that stayed with PyTorch, calls on the whole buffer.
MANUALGRAD_API void manualgrad_calls_nested_counts(int64_t* found) {
  found[0] = left_to_stock;
  found[1] = on_buffers;
}
