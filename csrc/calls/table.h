// A rule as data: the tensors to save, the inputs that get gradients, the compiled formula that is the whole vjp.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/result_type_native.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "layout.h"
#include "recorded.h"

namespace manualgrad {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;
// a shared_ptr in some releases, an intrusive_ptr in others
using NodePointer = decltype(torch::autograd::Edge::function);

// ---- rules ----------------------------------------------------------------------------------------------------------

// Where an argument of the compiled formula comes from.
struct Source {
  enum Kind : int64_t { kSaved, kConstant, kGrad, kLiteral, kNeeded };
  Kind kind;
  int64_t index;
  IValue literal;     // kLiteral: the value; kConstant: the value that replaces None
  bool float_wanted;  // the schema says float, and a Scalar may hold an integer
  bool optional;
};

// A compiled formula that is the whole vjp, and the calls that it serves.
struct CompiledVjp {
  c10::OperatorHandle op;
  std::vector<int64_t> inputs;  // the places, among the tensor arguments, whose gradients are its results
  int64_t devices;              // 1: CPU, 2: CUDA
  int64_t largest;              // of a matrix, rows or columns; -1: any shape
  bool reports;                 // whether its last result is a bool that is reported if it is true
  bool real;                    // no complex numbers
  std::vector<std::pair<int64_t, IValue>> only;  // (constant, the value that it must have)
  std::vector<int64_t> contiguous;               // saved tensors that must be contiguous
  std::vector<int64_t> one_batch;                // saved tensors with the batch dims of the first of these
  std::vector<int64_t> square;                   // saved matrices that must be square
  std::vector<int64_t> nonzero;                  // saved tensors, on the CPU, that must not contain a zero
  std::vector<Source> arguments;
};

struct Use {  // one formula of the rule: what it reads, and whose gradients it gives
  std::vector<int64_t> saved, inputs;
};

// A rule, by places in the operator's arguments followed by its outputs. Immutable; layers and nodes of graphs share
// it.
struct Table : public std::enable_shared_from_this<Table> {
  ~Table();

  int64_t rule = 0;  // Python's number for it, which no other table ever has
  size_t type = 0;   // of the node
  std::string node;
  bool in_python = true;  // every call of an active rule goes to the general kernel
  // So does every call but those that kButManySmall leaves to stock: the general kernel replaces their forward.
  bool replaces_forward = false;
  // Which tracked calls go to stock. kMetadataDecides: Python does, for all calls with one key. kButManySmall: on the
  // CPU, all but batches of small matrices. kReal: those whose first argument is real. For kUnlessPlain and
  // kUnlessTracked no rule is active: stock serves plain calls, tracked or not, and Python all others. A list of
  // tensors is plain if none of them requires grad. With kUnlessTracked, Python also serves every tracked call.
  enum Deferral : int64_t {
    kNever,
    kPythonDecides,
    kButManySmall,
    kAlways,
    kReal,
    kUnlessPlain,
    kUnlessTracked,
    kMetadataDecides
  };
  enum Fact : int64_t { kSizes, kStrides, kDtype };
  int64_t defers = kNever, order = 0, complex_order = 0, entries = 0;
  bool check_stock = false;  // stock's gradients are used only if they are finite
  bool strong_zero = false;  // its zeros are strong
  bool selective = false;
  bool lists = false;     // of tensors, among the arguments or the results
  bool in_place = false;  // the operator writes its result to its first argument, and returns that
  // Whether the operators that the vjp calls may be recorded. kWhereFinite: its zeros are strong, and the vjp is
  // recorded in plain arithmetic, which is used if its results are finite.
  enum Records : int64_t { kNothing, kVjp, kWhereFinite };
  int64_t records = kNothing;
  bool pushes = false;    // the operators that the jvp calls may be recorded
  int64_t arguments = 0;  // how many the operator has
  std::vector<int64_t> tensors, saved, constants;
  std::vector<int64_t> pushed;                     // the arguments other than tensors that the jvp reads
  std::vector<std::pair<int64_t, int64_t>> facts;  // (place, Fact)
  std::vector<bool> differentiable;
  std::vector<Use> uses;
  std::optional<CompiledVjp> compiled;
  mutable Recordings recordings, recordings_of_jvp;
  mutable Answers deferrals;
};

inline std::recursive_mutex changes;  // recursive: what is freed under it may run finalizers
inline thread_local int64_t suspended = 0;

struct Counts {
  int64_t plain = 0, compiled = 0, played = 0, python = 0, untracked = 0;
};
inline thread_local Counts counts;

// ---- what is plain --------------------------------------------------------------------------------------------------

constexpr DispatchKeySet kPlainKeys = DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                                      DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) |
                                      c10::autocast_dispatch_keyset;

constexpr DispatchKeySet kTransformKeys =
    DispatchKeySet({DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode});

inline bool has_tangent(const at::Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

// No transform, no mode and no tracer on this thread: each of them includes a key of its own.
inline bool plain_thread() { return c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set; }

// Whether a kernel takes the call. Where it raises, the arguments are on the stack again.
inline bool taken(const c10::SafeKernelFunction& kernel, const c10::OperatorHandle& op, DispatchKeySet keys,
                  Stack* stack, const std::vector<IValue>& arguments) {
  const size_t below = stack->size() - arguments.size();
  try {
    kernel.callBoxed(op, keys, stack);
    return true;
  } catch (const c10::Error&) {
    stack->resize(below);
    for (const IValue& argument : arguments) stack->push_back(argument);
    return false;
  }
}

// The operator below autograd.
inline void below(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

inline bool no_autocast() {
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
}

inline bool plain(const at::Tensor& x) {
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  return (impl->key_set().raw_repr() & ~kPlainKeys.raw_repr()) == 0 && !has_tangent(x);
}

// None; in C++ also a tensor that is not defined.
inline bool is_absent(const IValue& value) {
  return value.isNone() || (value.isTensor() && !value.toTensor().defined());
}

// Whether this is a list of tensors. Some of them may be absent.
inline bool is_tensors(const IValue& value) { return value.isTensorList() || value.isOptionalTensorList(); }

// function(x) of a value that is one, or of each element of a list of them.
template <class Function>
void for_each(const IValue& value, const Function& function) {
  if (!is_tensors(value)) return function(value);
  for (const IValue& x : value.toListRef()) function(x);
}

// ---- numbers in place of tensors, as in x * 2 -----------------------------------------------------------------------

inline bool is_number(const IValue& value) {
  return value.isTensor() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Kinds of dtype, in the order of promotion.
inline int64_t rank(const at::Tensor& x) {
  return x.is_complex() ? 3 : x.is_floating_point() ? 2 : x.scalar_type() == at::kBool ? 0 : 1;
}

// What the vjp gets for numbers: tensors that promote as the numbers do. `with_tensors` in core/schema.py says why.
// Returns the tensors that were made.
inline std::vector<const c10::TensorImpl*> numbers_as_tensors(const std::vector<int64_t>& places,
                                                              std::vector<IValue>& values) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_transforms(kTransformKeys);  // they would wrap the new tensors
  std::vector<const c10::TensorImpl*> found;
  for (const int64_t place : places) {
    if (!is_number(values[place])) continue;
    const at::Tensor number = values[place].toTensor();
    bool wide = false;
    std::optional<at::ScalarType> dtype;
    for (const int64_t other : places) {
      if (!values[other].isTensor() || is_number(values[other])) continue;
      const at::Tensor& x = values[other].toTensor();
      wide = wide || (x.dim() > 0 && rank(x) >= rank(number));
      const auto promoted = at::native::result_type(x, number);  // not by the dispatcher, which handles wrappers
      dtype = dtype ? c10::promoteTypes(*dtype, promoted) : promoted;
    }
    at::Tensor made = wide || !dtype ? number.detach() : number.to(*dtype, /*non_blocking=*/false, /*copy=*/true);
    made.unsafeGetTensorImpl()->set_wrapped_number(false);
    found.push_back(made.unsafeGetTensorImpl());
    values[place] = std::move(made);
  }
  return found;
}

// ---- from what Python sends -----------------------------------------------------------------------------------------

// `Sent` is a struct of layout.h.
template <class Sent>
void check_layout(const Sent& sent) {
  TORCH_CHECK(sent.version == kLayoutVersion && sent.bytes == sizeof(Sent),
              "torch_manualgrad: the library of calls was built for layout ", kLayoutVersion, " of ", sizeof(Sent),
              " bytes, and the package sends layout ", sent.version, " of ", sent.bytes,
              ": build the library again (make install, or pip install)");
}

inline std::vector<int64_t> list(const layout::Ints& ints) { return {ints.begin(), ints.end()}; }

inline IValue value_of(const layout::Literal& literal) {
  switch (literal.kind) {
    case layout::kNone:
      return IValue();
    case layout::kBool:
      return IValue(literal.integer != 0);
    case layout::kInt:
      return IValue(literal.integer);
    case layout::kFloat:
      return IValue(literal.real);
    case layout::kString:
      return IValue(std::string(literal.text));
    default:
      TORCH_CHECK(false, "torch_manualgrad: a literal of kind ", literal.kind);
  }
}

inline CompiledVjp read_compiled_vjp(const layout::Compiled& sent) {
  const std::string full = sent.formula;
  const size_t dot = full.find('.');
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  const auto& parameters = op.schema().arguments();
  TORCH_CHECK(static_cast<size_t>(sent.arguments.size) == parameters.size(), "torch_manualgrad: ", full, " has ",
              parameters.size(), " arguments, and its rule binds ", sent.arguments.size);
  CompiledVjp vjp{op, list(sent.inputs),     sent.devices,         sent.largest,      sent.reports,       sent.real,
                  {}, list(sent.contiguous), list(sent.one_batch), list(sent.square), list(sent.nonzero), {}};
  for (const layout::Condition& condition : sent.only) {
    vjp.only.emplace_back(condition.constant, value_of(condition.value));
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const layout::Argument& argument = sent.arguments.data[i];
    const auto optional = parameters[i].type()->cast<c10::OptionalType>();
    const auto type = optional ? optional->getElementType() : parameters[i].type();
    vjp.arguments.push_back({static_cast<Source::Kind>(argument.source), argument.index, value_of(argument.literal),
                             type->kind() == c10::TypeKind::FloatType, bool(optional)});
  }
  return vjp;
}

inline std::shared_ptr<const Table> read_table(const layout::Rule& sent) {
  check_layout(sent);
  auto table = std::make_shared<Table>();
  table->rule = sent.number;
  table->type = static_cast<size_t>(sent.node_type);
  table->node = sent.node;
  table->in_python = sent.in_python;
  table->replaces_forward = sent.replaces_forward;
  table->defers = sent.defers;
  table->order = sent.order;
  table->complex_order = sent.complex_order;
  table->entries = sent.entries;
  table->check_stock = sent.check_stock;
  table->strong_zero = sent.strong_zero;
  table->selective = sent.selective;
  table->lists = sent.lists;
  table->in_place = sent.in_place;
  table->pushes = sent.pushes;
  table->records = sent.records;
  table->arguments = sent.argument_count;
  table->tensors = list(sent.tensors);
  table->saved = list(sent.saved);
  table->constants = list(sent.constants);
  table->pushed = list(sent.pushed);
  for (const layout::Fact& fact : sent.facts) table->facts.emplace_back(fact.place, fact.what);
  for (const int64_t yes : sent.differentiable) table->differentiable.push_back(yes != 0);
  for (const layout::Use& use : sent.uses) table->uses.push_back({list(use.saved), list(use.inputs)});
  if (sent.compiled.formula != nullptr) table->compiled.emplace(read_compiled_vjp(sent.compiled));
  return table;
}

}  // namespace manualgrad
