// What a rule says, as data: which tensors are kept, whose gradients there are, which compiled formula is the whole
// vjp.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <ATen/ops/result_type.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

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
struct CompiledVjp {
  c10::OperatorHandle op;
  std::vector<int64_t> inputs;  // the places, among the tensor arguments, whose gradients are its results
  int64_t devices;              // 1: CPU, 2: CUDA
  int64_t largest;              // of a matrix, rows or columns; -1: any shape
  int64_t declines;             // 1, 2: its last result is a bool, true where it leaves the call to the vjp, or reports
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

// A rule, by places in the operator's arguments followed by its outputs. Immutable; layers and nodes of graphs share
// it.
struct Table : public std::enable_shared_from_this<Table> {
  ~Table();

  int64_t rule = 0;  // Python's number for it, which no other table ever has
  size_t type = 0;   // of the node
  std::string node;
  bool in_python = true;  // every call of an active rule goes to the general kernel
  // Which calls with a gradient go to stock: none; it is asked in Python; on the CPU all but many small matrices; all.
  // kUnlessPlain: no rule is active; stock has plain calls, with a gradient or without, and Python all others. Lists of
  // tensors are plain where none of them requires grad. kUnlessTracked: the same, but Python has every call with a
  // gradient. kReal: those whose first argument is real.
  enum Deferral : int64_t { kNever, kAsked, kButManySmall, kAlways, kUnlessPlain, kReal, kUnlessTracked };
  int64_t defers = kNever, order = 0, complex_order = 0, entries = 0;
  bool checked = false;  // the gradients of what goes to stock are checked: are they finite?
  bool selective = false;
  int64_t arguments = 0;  // how many the operator has
  std::vector<int64_t> tensors, saved, constants;
  std::vector<std::pair<int64_t, int64_t>> facts;  // (place, what): 0 sizes, 1 strides, 2 dtype
  std::vector<bool> differentiable;
  std::vector<Use> uses;
  std::optional<CompiledVjp> compiled;
};

inline std::recursive_mutex changes;  // recursive: what is freed under it may run finalizers
inline thread_local int64_t suspended = 0;

struct Counts {
  int64_t plain = 0, compiled = 0, python = 0, untracked = 0;
};
inline thread_local Counts counts;

// ---- what is plain --------------------------------------------------------------------------------------------------

constexpr DispatchKeySet kPlainKeys = DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView,
                                                      DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA}) |
                                      c10::autocast_dispatch_keyset;

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

// ---- numbers in the place of tensors, as in x * 2 -------------------------------------------------------------------

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
      const auto promoted = at::result_type(x, number);
      dtype = dtype ? c10::promoteTypes(*dtype, promoted) : promoted;
    }
    at::Tensor made = wide || !dtype ? number.detach() : number.to(*dtype, /*non_blocking=*/false, /*copy=*/true);
    made.unsafeGetTensorImpl()->set_wrapped_number(false);
    found.push_back(made.unsafeGetTensorImpl());
    values[place] = std::move(made);
  }
  return found;
}

// ---- the numbers that Python sends ----------------------------------------------------------------------------------

// Read from the front. A list begins with its length.
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

inline CompiledVjp read_compiled_vjp(Reader& in, const char* name) {
  const std::string full = name;
  const size_t dot = full.find('.');
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
      full.substr(0, dot).c_str(), dot == std::string::npos ? "" : full.substr(dot + 1).c_str());
  auto inputs = in.list();
  const int64_t devices = in.number(), largest = in.number();
  const int64_t declines = in.number();
  CompiledVjp vjp{op, std::move(inputs), devices, largest, declines, in.number() != 0, {}, {}, {}, {}, {}, {}};
  for (int64_t i = in.number(); i > 0; --i) {
    const int64_t constant = in.number();
    vjp.only.emplace_back(constant, in.literal());
  }
  vjp.contiguous = in.list();
  vjp.one_batch = in.list();
  vjp.square = in.list();
  vjp.nonzero = in.list();
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto kind = static_cast<Source::Kind>(in.number());
    const int64_t index = in.number();
    IValue literal = in.literal();
    const auto optional = argument.type()->cast<c10::OptionalType>();
    const auto type = optional ? optional->getElementType() : argument.type();
    vjp.arguments.push_back(
        {kind, index, std::move(literal), type->kind() == c10::TypeKind::FloatType, bool(optional)});
  }
  return vjp;
}

// A rule's table from what Python sends; `formula` is the compiled formula that is the whole vjp, or null.
inline std::shared_ptr<const Table> read_table(Reader in, int64_t rule, const char* node, const char* formula) {
  auto table = std::make_shared<Table>();
  table->rule = rule;
  table->node = node;
  table->in_python = in.number() != 0;
  table->type = static_cast<size_t>(in.number());
  table->defers = in.number();
  table->order = in.number();
  table->complex_order = in.number();
  table->entries = in.number();
  table->checked = in.number() != 0;
  table->selective = in.number() != 0;
  table->arguments = in.number();
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
  if (formula != nullptr) table->compiled.emplace(read_compiled_vjp(in, formula));
  return table;
}

}  // namespace manualgrad
