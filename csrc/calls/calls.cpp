// Calls of operators that have a rule, without Python where nothing but autograd is near.
//
// A kernel at the dispatch key Autograd decides, per call, between three ways:
//   stock        no rule is active: PyTorch's own kernel, as if nothing were registered.
//   plain call   dense tensors on which nothing else acts: the forward, the residuals and the node of the graph are
//   made here, by the
//                rule's `Table`. The backward calls the compiled formula that the table names, or the rule's vjp in
//                Python.
//   Python       everything else (functorch, dual tensors, modes, subclasses, numbers): the general kernel, which
//   Python has
//                registered at the same key before, and which this one covers.
//
// This library is built against one release of torch, with its own headers; torch_manualgrad/core/calls.py loads and
// drives it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/all.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#define MANUALGRAD_API extern "C" __attribute__((visibility("default")))

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;
// a shared_ptr in some releases, an intrusive_ptr in others
using NodePointer = decltype(torch::autograd::Edge::function);

// ---- what the rules say ---------------------------------------------------------------------------------------------

// Where an argument of the compiled formula comes from.
struct Source {
  enum Kind : int64_t { kSaved, kConstant, kGrad, kLiteral, kNeeded };
  Kind kind;
  int64_t index;
  IValue literal;     // kLiteral: the value; kConstant: what stands for None
  bool float_wanted;  // the schema says float, and a Scalar may hold an integer
  bool optional;
};

// A compiled formula that is the whole vjp, and the calls that it serves.
struct Direct {
  c10::OperatorHandle op;
  std::vector<int64_t> inputs;  // the places, among the tensor arguments, whose gradients are its results
  int64_t devices;              // 1: CPU, 2: CUDA
  int64_t largest;              // of a matrix, rows or columns; -1: any shape
  bool declines;                // its last result is a bool: true where it leaves the call to the vjp
  bool real;                    // no complex numbers
  std::vector<std::pair<int64_t, IValue>> only;  // (constant, the value that it must have)
  std::vector<int64_t> contiguous;               // saved tensors that must be so
  std::vector<int64_t> one_batch;                // saved tensors with the batch dims of the first of these
  std::vector<int64_t> square;                   // saved matrices that must be so
  std::vector<int64_t> nonzero;                  // saved tensors, on the CPU, in which there must be no zero
  std::vector<Source> arguments;
};

struct Use {  // one formula of the rule: what it reads, and whose gradients it gives
  std::vector<int64_t> saved, inputs;
};

// A rule, by places in the operator's arguments followed by its outputs. Immutable, and kept: nodes of graphs point to
// it.
struct Table {
  int64_t rule = 0;  // Python's number for it
  std::string node;
  bool in_python = true;  // every call of an active rule goes to the general kernel
  // Which calls with a gradient go to stock: 0 none, 1 is asked in Python, 2 on the CPU all but many small matrices.
  int64_t defers = 0, order = 0, matrices = 0;
  bool selective = false;
  std::vector<int64_t> tensors, saved, constants;
  std::vector<std::pair<int64_t, int64_t>> facts;  // (place, what): 0 sizes, 1 strides, 2 dtype
  std::vector<bool> differentiable;
  std::vector<Use> uses;
  std::optional<Direct> direct;
};

// Which table each registered operator goes by; null where no rule is active. Replaced as a whole.
using State = std::vector<const Table*>;

std::mutex changes;
std::atomic<const State*> current{nullptr};
thread_local int64_t suspended = 0;

struct Counts {
  int64_t plain = 0, direct = 0, python = 0;
};
thread_local Counts counts;

// ---- what is plain --------------------------------------------------------------------------------------------------

constexpr DispatchKeySet kPlainKeys = DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                                      DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) |
                                      c10::autocast_dispatch_keyset;

// No transform, no mode and no tracer on this thread: each of them includes a key of its own.
bool plain_thread() { return c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set; }

bool no_autocast() { return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset); }

bool plain(const at::Tensor& x) {
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  return (impl->key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0 && !impl->is_wrapped_number() &&
         !x._fw_grad(/*level=*/0).defined();
}

// ---- the vjp in Python ----------------------------------------------------------------------------------------------

// manualgrad_calls::pull_back, whose kernel is in core/calls.py. Called past the dispatcher: it sees no tensors in a
// tuple, and what is recorded or transformed are the operators that the kernel calls.
variable_list pull_back_in_python(const Table& table, const std::vector<bool>& needed, const variable_list& tensors,
                                  const std::vector<IValue>& constants, const variable_list& grads) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("manualgrad_calls::pull_back", "");
  static const auto kernel = op.getComputedKernelForDispatchKey(DispatchKey::CPU);
  const auto tuple_of = [](const variable_list& list) {
    std::vector<IValue> found;
    found.reserve(list.size());
    for (const at::Tensor& x : list) found.push_back(x.defined() ? IValue(x) : IValue());
    return c10::ivalue::Tuple::create(std::move(found));
  };
  std::vector<IValue> mask(needed.begin(), needed.end());
  Stack stack;
  stack.reserve(5);
  stack.emplace_back(table.rule);
  stack.emplace_back(c10::ivalue::Tuple::create(std::move(mask)));
  stack.emplace_back(tuple_of(tensors));
  stack.emplace_back(c10::ivalue::Tuple::create(constants));
  stack.emplace_back(tuple_of(grads));
  ++counts.python;
  kernel.callBoxed(op, DispatchKeySet(DispatchKey::CPU), &stack);
  variable_list result;
  result.reserve(needed.size());
  for (const IValue& found : stack.back().toListRef()) {
    result.push_back(found.isTensor() ? found.toTensor() : at::Tensor());
  }
  return result;
}

// ---- the node in the graph ------------------------------------------------------------------------------------------

struct RuleNode : public Node {
  explicit RuleNode(const Table& t) : table(t) {}

  std::string name() const override { return table.node; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    released = true;
    saved.clear();
  }

  variable_list apply(variable_list&& grads) override {
    // to unpack may run any code of the user's, which no guard may reach
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
      tensors.reserve(saved.size());
      const auto self = owner();
      for (const SavedVariable& x : saved) tensors.push_back(x.unpack(self));
    }
    return pull_back(needed(), std::move(tensors), std::move(grads));
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string("torch_manualgrad"));
    args.collect(static_cast<uint64_t>(reinterpret_cast<uintptr_t>(&table)));
    args.collect(released);
    args.collect(needed());
    args.collect(saved, /*is_output=*/true);
    for (const IValue& constant : constants) args.collect(constant, /*nested=*/true);
  }

  // Compiled autograd traces the vjp in Python.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    swap.before(saved);
    std::vector<IValue> tensors;
    for (const SavedVariable& x : saved) tensors.emplace_back(x.unpack(owner()));
    std::vector<at::TypePtr> types(tensors.size(), at::TensorType::get());
    auto outputs = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    // the graph may outlive this node: it holds copies of what it needs
    auto call = [&rule = table, mask = needed(), fixed = constants](const variable_list& inputs,
                                                                    const std::vector<IValue>& packed) {
      variable_list unpacked;
      for (const IValue& x : packed) unpacked.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
      return pull_back_in_python(rule, mask, unpacked, fixed, inputs);
    };
    const auto& interface = compiled::getPyCompilerInterface();
    const auto bound = interface->bind_function(swap.get_py_compiler(), table.node, std::move(call), std::move(types),
                                                /*is_custom_function=*/true, /*is_traceable=*/true);
    auto found =
        interface->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, tensors, std::move(outputs));
    swap.after(saved);
    return found;
  }

  const Table& table;
  std::vector<SavedVariable> saved;
  std::vector<IValue> constants;
  bool released = false;

 private:
  NodePointer owner() {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
      return NodePointer(getptr());
    } else {
      return getptr();
    }
  }

  // As ctx.needs_input_grad has it: which inputs require grad, whatever this backward is asked for.
  std::vector<bool> needed() const {
    std::vector<bool> found(table.tensors.size());
    for (size_t i = 0; i < found.size(); ++i) found[i] = next_edge(i).is_valid();
    return found;
  }

  variable_list pull_back(std::vector<bool> mask, variable_list tensors, variable_list grads) {
    bool any = false;
    for (const at::Tensor& g : grads) any |= g.defined();
    if (!any && grads.size() == 1) {  // as torch.autograd.Function does it: one output's missing cotangent is zeros
      grads[0] = input_metadata(0).zeros_like();
    } else if (!any) {
      return variable_list(mask.size());
    }
    if (table.direct) {
      Stack stack;
      if (served(*table.direct, mask, tensors, grads, stack) && computed(*table.direct, stack)) {
        ++counts.direct;
        variable_list found(mask.size());
        for (size_t i = 0; i < table.direct->inputs.size(); ++i) {
          const int64_t input = table.direct->inputs[i];
          if (mask[input]) found[input] = std::move(stack[i]).toTensor();
        }
        return found;
      }
    }
    return pull_back_in_python(table, mask, tensors, constants, grads);
  }

  // Replaces the arguments by the results; false if the formula leaves the call to the vjp.
  static bool computed(const Direct& direct, Stack& stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    direct.op.callBoxed(&stack);
    return !direct.declines || !stack.back().toTensor().item<bool>();
  }

  // Whether x, matrices or vectors, has the batch dims of the matrices A.
  static bool in_batch(const at::Tensor& A, const at::Tensor& x) {
    if (!A.defined() || !x.defined() || A.dim() < 2) return false;
    const auto batch = A.sizes().slice(0, A.dim() - 2);
    return x.dim() > A.dim() - 2 && x.dim() <= A.dim() && x.sizes().slice(0, batch.size()) == batch;
  }

  // Whether the compiled formula serves this call; fills in its arguments.
  bool served(const Direct& direct, const std::vector<bool>& mask, const variable_list& tensors,
              const variable_list& grads, Stack& stack) const {
    if (c10::GradMode::is_enabled() || !plain_thread() || !no_autocast()) return false;
    bool any = false;
    for (const int64_t input : direct.inputs) any |= mask[input];
    if (!any) return false;
    for (const auto& [constant, value] : direct.only) {
      if (constants[constant] != value) return false;
    }
    for (const int64_t i : direct.contiguous) {
      if (!tensors[i].defined() || !tensors[i].is_contiguous()) return false;
    }
    for (const int64_t i : direct.nonzero) {
      if (!tensors[i].defined() || !tensors[i].is_cpu() || !tensors[i].all().item<bool>()) return false;
    }
    for (const int64_t i : direct.square) {
      const at::Tensor& x = tensors[i];
      if (!x.defined() || x.dim() < 2 || x.size(-1) != x.size(-2)) return false;
    }
    for (const int64_t i : direct.one_batch) {
      if (!in_batch(tensors[direct.one_batch.front()], tensors[i])) return false;
    }
    std::optional<at::ScalarType> common;
    int64_t dims = 0, order = 0;  // of the matrices, which have the most dims
    const auto fits = [&](const at::Tensor& x) {
      if (!plain(x) || !(direct.devices & (x.is_cpu() ? 1 : 2))) return false;
      const auto dtype = x.scalar_type();
      if (!at::isFloatingType(dtype) && !at::isComplexType(dtype)) return direct.largest >= 0;  // pivots
      const auto real = c10::toRealValueType(dtype);
      if ((common && *common != real) || (direct.real && dtype != real)) return false;
      common = real;
      if (direct.largest < 0) return true;
      if (real != at::kFloat && real != at::kDouble) return false;
      if (x.dim() > dims) dims = x.dim(), order = 0;
      if (x.dim() == dims && dims >= 2) order = std::max({order, x.size(-1), x.size(-2)});
      return true;
    };
    stack.reserve(direct.arguments.size());
    for (const Source& source : direct.arguments) {
      if (source.kind == Source::kSaved || source.kind == Source::kGrad) {
        const at::Tensor& x = source.kind == Source::kSaved ? tensors[source.index] : grads[source.index];
        if (x.defined()) {
          if (!fits(x)) return false;
          stack.emplace_back(x);
        } else {
          if (!source.optional) return false;
          stack.emplace_back();
        }
        continue;
      }
      if (source.kind == Source::kNeeded) {
        stack.emplace_back(static_cast<bool>(mask[source.index]));
        continue;
      }
      const IValue* value = &source.literal;
      if (source.kind == Source::kConstant && !constants[source.index].isNone()) value = &constants[source.index];
      if (!source.float_wanted || value->isDouble() || value->isNone()) {
        stack.push_back(*value);
      } else if (value->isInt()) {
        stack.emplace_back(static_cast<double>(value->toInt()));
      } else {
        return false;
      }
    }
    return direct.largest < 0 || order <= direct.largest;
  }
};

// The pointer type is a parameter, so that what the release at hand lacks (deleteNode, make_intrusive of a node) is not
// looked up.
template <class Pointer, class Made>
auto make_node(const Table& table) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<Made>(new Made(table), [](Made* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>(table);
  }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

IValue fact(const at::Tensor& x, int64_t what) {
  if (what == 0) return IValue(x.sizes().vec());
  if (what == 1) return IValue(x.strides().vec());
  return IValue(static_cast<int64_t>(x.scalar_type()));
}

struct Kernel : public c10::OperatorKernel {
  Kernel(size_t s, c10::SafeKernelFunction stock_kernel, c10::SafeKernelFunction python_kernel)
      : slot(s), stock(std::move(stock_kernel)), python(std::move(python_kernel)) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const State* state = current.load(std::memory_order_acquire);
    const Table* table = state != nullptr && slot < state->size() ? (*state)[slot] : nullptr;
    if (table == nullptr || suspended > 0) {
      stock.callBoxed(op, keys, stack);
      return;
    }
    if (table->in_python || !plain_thread()) {
      python.callBoxed(op, keys, stack);
      return;
    }
    bool grad = false;
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    for (const int64_t place : table->tensors) {
      const IValue& value = arguments[place];
      if (value.isNone()) continue;
      if (!value.isTensor() || !value.toTensor().defined() || !plain(value.toTensor())) {
        python.callBoxed(op, keys, stack);
        return;
      }
      grad = grad || value.toTensor().requires_grad();
    }
    if (!grad || !c10::GradMode::is_enabled()) {
      below(op, keys, stack);
    } else if (table->defers == 2 && deferred(*table, arguments[0].toTensor())) {
      stock.callBoxed(op, keys, stack);
    } else if (table->defers == 1) {
      python.callBoxed(op, keys, stack);
    } else {
      differentiate(*table, op, keys, stack);
    }
  }

 private:
  // ButManySmall in core/compiled_vjp.py
  static bool deferred(const Table& table, const at::Tensor& A) {
    if (A.dim() < 2) return true;
    const int64_t n = A.size(-1);
    return A.is_cpu() && (n > table.order || A.numel() < table.matrices * n * n);
  }

  static void below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }

  static void differentiate(const Table& table, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    ++counts.plain;
    const size_t n = op.schema().arguments().size(), outputs = table.differentiable.size();
    // the call takes the arguments off the stack: what is kept of them is copied before
    std::vector<IValue> kept;
    torch::autograd::edge_list edges;
    edges.reserve(table.tensors.size());
    std::vector<bool> wanted(n);
    {
      const auto arguments = torch::jit::last(*stack, n);
      for (const int64_t place : table.tensors) {
        const IValue& value = arguments[place];
        edges.push_back(value.isTensor() ? torch::autograd::impl::gradient_edge(value.toTensor())
                                         : torch::autograd::Edge());
        wanted[place] = value.isTensor() && value.toTensor().requires_grad();
      }
      kept.assign(arguments.begin(), arguments.end());
    }
    auto node = make_node<NodePointer, RuleNode>(table);
    node->set_next_edges(std::move(edges));
    below(op, keys, stack);

    auto results = torch::jit::last(*stack, outputs);
    for (size_t i = 0; i < outputs; ++i) {
      IValue& result = (*stack)[stack->size() - outputs + i];
      if (!result.isTensor() || !result.toTensor().defined()) {
        node->add_input_metadata(Node::undefined_input());
        continue;
      }
      for (const int64_t place : table.tensors) {  // a kernel that has nothing to do may return its argument
        if (kept[place].isTensor() && kept[place].toTensor().is_same(result.toTensor())) {
          const at::AutoDispatchBelowADInplaceOrView guard;
          result = result.toTensor().detach();
          break;
        }
      }
      const at::Tensor& y = result.toTensor();
      if (table.differentiable[i] && torch::autograd::isDifferentiableType(y.scalar_type())) {
        const auto place = node->add_input_metadata(y);
        torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge(node, place));
      } else {
        node->add_input_metadata(Node::undefined_input());
      }
    }
    const auto known = [&](int64_t place) -> const IValue& {
      return static_cast<size_t>(place) < n ? kept[place] : results[place - n];
    };
    node->constants.reserve(table.constants.size() + table.facts.size());
    for (const int64_t place : table.constants) node->constants.push_back(known(place));
    for (const auto& [place, what] : table.facts) {
      const IValue& value = known(place);
      node->constants.push_back(value.isTensor() ? fact(value.toTensor(), what) : IValue());
    }
    node->saved.reserve(table.saved.size());
    for (size_t i = 0; i < table.saved.size(); ++i) {
      const IValue& value = known(table.saved[i]);
      if (!value.isTensor() || !value.toTensor().defined() || (table.selective && !used(table, i, wanted))) {
        node->saved.emplace_back();
        continue;
      }
      const at::Tensor& x = value.toTensor();
      node->saved.emplace_back(
          x, /*is_output=*/static_cast<size_t>(table.saved[i]) >= n && x.grad_fn().get() == node.get());
    }
  }

  static bool used(const Table& table, int64_t tensor, const std::vector<bool>& wanted) {
    for (const Use& use : table.uses) {
      for (const int64_t read : use.saved) {
        if (read != tensor) continue;
        for (const int64_t input : use.inputs) {
          if (wanted[input]) return true;
        }
      }
    }
    return false;
  }

  const size_t slot;
  const c10::SafeKernelFunction stock, python;
};

// ---- what Python calls ----------------------------------------------------------------------------------------------

std::map<size_t, c10::RegistrationHandleRAII> registrations;
std::vector<std::unique_ptr<Table>> tables;
std::vector<std::unique_ptr<State>> states;
size_t slots = 0;
thread_local std::string message;

template <class F>
int64_t guarded(F&& f) {
  try {
    const std::lock_guard<std::mutex> lock(changes);
    return f();
  } catch (const std::exception& error) {
    message = error.what();
    return -1;
  }
}

// The numbers that Python sends, read from the front. A list begins with its length.
struct Reader {
  const int64_t* at;
  const int64_t* end;

  int64_t number() {
    TORCH_CHECK(at < end, "torch_manualgrad: the table of a rule ends too early");
    return *at++;
  }

  std::vector<int64_t> list() {
    std::vector<int64_t> found(number());
    for (int64_t& x : found) x = number();
    return found;
  }

  IValue literal() {
    const int64_t kind = number(), bits = number();
    double value = 0;
    std::memcpy(&value, &bits, sizeof value);
    if (kind == 4) {  // up to 8 characters
      char text[sizeof bits + 1] = {};
      std::memcpy(text, &bits, sizeof bits);
      return IValue(std::string(text));
    }
    return kind == 0 ? IValue() : kind == 1 ? IValue(bits != 0) : kind == 2 ? IValue(bits) : IValue(value);
  }
};

Direct read_direct(Reader& in, const char* name) {
  const std::string full = name;
  const size_t dot = full.find('.');
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  auto inputs = in.list();
  const int64_t devices = in.number(), largest = in.number();
  Direct direct{op, std::move(inputs), devices, largest, in.number() != 0, in.number() != 0, {}, {}, {}, {}, {}, {}};
  for (int64_t i = in.number(); i > 0; --i) {
    const int64_t constant = in.number();
    direct.only.emplace_back(constant, in.literal());
  }
  direct.contiguous = in.list();
  direct.one_batch = in.list();
  direct.square = in.list();
  direct.nonzero = in.list();
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto kind = static_cast<Source::Kind>(in.number());
    const int64_t index = in.number();
    IValue literal = in.literal();
    const auto optional = argument.type()->cast<c10::OptionalType>();
    const auto type = optional ? optional->getElementType() : argument.type();
    direct.arguments.push_back(
        {kind, index, std::move(literal), type->kind() == c10::TypeKind::FloatType, bool(optional)});
  }
  return direct;
}

}  // namespace

// Why the last call that returned -1 did so.
MANUALGRAD_API const char* manualgrad_calls_error() { return message.c_str(); }

// Covers the kernel at Autograd that Python has registered for the operator. Returns the operator's slot.
// `stock`: an operator's kernel as it was before both is found only before; so this is called twice, first with python
// = 0.
MANUALGRAD_API int64_t manualgrad_calls_attach(const char* name, const char* overload, int64_t python) {
  static std::map<std::string, c10::SafeKernelFunction> stock;
  return guarded([&]() -> int64_t {
    auto& dispatcher = c10::Dispatcher::singleton();
    const auto op = dispatcher.findSchemaOrThrow(name, overload);
    const std::string full = std::string(name) + "." + overload;
    auto now = op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU);
    if (!python) {
      stock.insert_or_assign(full, std::move(now));
      return 0;
    }
    auto kernel = std::make_unique<Kernel>(slots, stock.at(full), std::move(now));
    stock.erase(full);
    registrations.emplace(slots, dispatcher.registerImpl(op.operator_name(), DispatchKey::Autograd,
                                                         c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
                                                         std::nullopt, nullptr, "torch_manualgrad calls"));
    return static_cast<int64_t>(slots++);
  });
}

// Takes the kernel away. A thread that is inside of it crashes.
MANUALGRAD_API int64_t manualgrad_calls_detach(int64_t slot) {
  return guarded([&]() -> int64_t { return static_cast<int64_t>(registrations.erase(slot)); });
}

// Makes a table, and returns its number; `formula` is the compiled formula that is the whole vjp, or null.
MANUALGRAD_API int64_t manualgrad_calls_table(int64_t rule, const char* node, const char* formula,
                                              const int64_t* numbers, int64_t size) {
  return guarded([&]() -> int64_t {
    Reader in{numbers, numbers + size};
    auto table = std::make_unique<Table>();
    table->rule = rule;
    table->node = node;
    table->in_python = in.number() != 0;
    table->defers = in.number();
    table->order = in.number();
    table->matrices = in.number();
    table->selective = in.number() != 0;
    table->tensors = in.list();
    table->saved = in.list();
    table->constants = in.list();
    for (int64_t i = in.number(); i > 0; --i) {
      const int64_t place = in.number();
      table->facts.emplace_back(place, in.number());
    }
    for (const int64_t yes : in.list()) table->differentiable.push_back(yes != 0);
    for (int64_t i = in.number(); i > 0; --i) {
      auto read = in.list();
      table->uses.push_back({std::move(read), in.list()});
    }
    if (formula != nullptr) table->direct.emplace(read_direct(in, formula));
    tables.push_back(std::move(table));
    return static_cast<int64_t>(tables.size()) - 1;
  });
}

// Makes a state of one table per slot, -1 for none, and returns its number.
MANUALGRAD_API int64_t manualgrad_calls_state(const int64_t* table_of_slot, int64_t size) {
  return guarded([&]() -> int64_t {
    auto state = std::make_unique<State>();
    for (int64_t i = 0; i < size; ++i) {
      state->push_back(table_of_slot[i] < 0 ? nullptr : tables.at(table_of_slot[i]).get());
    }
    states.push_back(std::move(state));
    return static_cast<int64_t>(states.size()) - 1;
  });
}

// What calls go by from now on.
MANUALGRAD_API int64_t manualgrad_calls_activate(int64_t state) {
  return guarded([&]() -> int64_t {
    current.store(state < 0 ? nullptr : states.at(state).get(), std::memory_order_release);
    return 0;
  });
}

// While positive, eager calls of this thread are PyTorch's own.
MANUALGRAD_API void manualgrad_calls_suspend(int64_t by) { suspended += by; }

// On this thread: plain calls, backwards by a compiled formula, backwards in Python.
MANUALGRAD_API void manualgrad_calls_counts(int64_t* found) {
  found[0] = counts.plain;
  found[1] = counts.direct;
  found[2] = counts.python;
}
