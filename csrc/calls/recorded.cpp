// How vjps are recorded, proven and played; declared in recorded.h.
#include "recorded.h"

#include "guarded.h"
#include "levels.h"
#include "python.h"
#include "state.h"
#include "stock.h"
#include "table.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/core/enum_tag.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/isclose.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <tuple>

namespace manualgrad {
namespace {

constexpr size_t kMostKeys = 256;     // of one rule; then all are forgotten
constexpr int64_t kMostRefused = 16;  // a rule with this many refused keys, and no recorded one, is no longer recorded
constexpr size_t kMostSteps = 4096;

std::atomic<int64_t> generation{0};
thread_local std::string refusal;
std::atomic<int64_t> calls_before{1};  // of a key, before one is recorded; -1: none ever is

// Guarded by `recordings_mutex`.
std::set<c10::OperatorName, bool (*)(const c10::OperatorName&, const c10::OperatorName&)> python_ops(
    [](const c10::OperatorName& a, const c10::OperatorName& b) {
      return std::tie(a.name, a.overload_name) < std::tie(b.name, b.overload_name);
    });

// Whether autograd may track what is called here.
bool is_tracking() {
  return c10::GradMode::is_enabled() &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autograd_dispatch_keyset);
}

bool is_forward_mode_on() { return c10::AutogradState::get_tls_state().get_fw_grad_mode(); }

// Whether this is an operator of ours whose kernel calls other operators, from Python.
bool is_in_python(const c10::OperatorName& name) {
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  return python_ops.count(name) > 0;
}

// Operators that only call other operators, which depend on the sizes, strides, dtypes and bits of the arguments.
// Operators for which a rule has a kernel are excluded.
bool is_composite(const c10::OperatorName& name) {
  static const std::set<std::string> names{
      "aten::__and__",     "aten::__or__",     "aten::adjoint",     "aten::broadcast_tensors",
      "aten::chunk",       "aten::contiguous", "aten::diff",        "aten::expand_as",
      "aten::flatten",     "aten::imag",       "aten::linear",      "aten::mH",
      "aten::mT",          "aten::matmul",     "aten::movedim",     "aten::narrow",
      "aten::outer",       "aten::real",       "aten::reshape",     "aten::resolve_conj",
      "aten::resolve_neg", "aten::square",     "aten::sum_to_size", "aten::to",
      "aten::type_as",     "aten::unflatten",  "aten::view_as",     "aten::where"};
  if (names.count(name.name) == 0) return false;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || !op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) return false;
  return !op->hasKernelForDispatchKey(DispatchKey::AutogradCPU) &&
         !op->hasKernelForDispatchKey(DispatchKey::AutogradCUDA);
}

// Operators whose results are determined by the key of a recording.
bool is_of_metadata(const std::string& name) {
  static const std::set<std::string> names{"aten::promote_types", "aten::result_type", "aten::can_cast",
                                           "aten::is_same_size"};
  return names.count(name) > 0;
}

// ---- keys -----------------------------------------------------------------------------------------------------------

// All that a formula may depend on, as numbers. Functions return false for what cannot be expressed as numbers.
class Key {
 public:
  bool add(const variable_list& tensors) {
    numbers.push_back(static_cast<int64_t>(tensors.size()));
    for (const at::Tensor& x : tensors) {
      if (!x.defined()) {
        numbers.push_back(-1);
        continue;
      }
      if (!(transformed ? plain_but_for_transforms(x) : plain(x)) || x.layout() != at::kStrided ||
          x.unsafeGetTensorImpl()->is_wrapped_number()) {
        return false;
      }
      if (transformed) add_wrappers(x);
      int64_t same = 0;
      while (same < static_cast<int64_t>(seen_.size()) && seen_[same] != x.unsafeGetTensorImpl()) ++same;
      seen_.push_back(x.unsafeGetTensorImpl());
      numbers.push_back(x.dim() | static_cast<int64_t>(x.scalar_type()) << 8 |
                        static_cast<int64_t>(x.device().type()) << 16 |
                        static_cast<int64_t>(static_cast<uint8_t>(x.device().index())) << 24 |
                        static_cast<int64_t>(x.requires_grad()) << 32 | same << 33);
      for (const int64_t n : x.sizes()) numbers.push_back(n);
      for (const int64_t n : x.strides()) numbers.push_back(n);
    }
    return true;
  }

  bool add(const IValue& value) {
    if (value.isNone()) {
      numbers.push_back(0);
    } else if (value.isBool()) {
      numbers.insert(numbers.end(), {1, value.toBool()});
    } else if (value.isInt()) {
      numbers.insert(numbers.end(), {2, value.toInt()});
    } else if (value.isDouble()) {
      numbers.push_back(3);
      add(value.toDouble());
    } else if (value.isComplexDouble()) {
      const auto z = value.toComplexDouble();
      numbers.push_back(4);
      add(z.real());
      add(z.imag());
    } else if (value.isString()) {
      const std::string& text = value.toStringRef();
      numbers.insert(numbers.end(), {5, static_cast<int64_t>(text.size())});
      for (const char c : text) numbers.push_back(c);
    } else if (value.isList()) {
      const auto elements = value.toListRef();
      numbers.insert(numbers.end(), {6, static_cast<int64_t>(elements.size())});
      for (const IValue& x : elements) {
        if (!add(x)) return false;
      }
    } else {
      return false;
    }
    return true;
  }

  std::vector<int64_t> numbers;
  bool transformed = false;  // transforms of torch.func are active

 private:
  // A formula may ask what follows a whole batch outside (`is_followed_outside`).
  void add_wrappers(const at::Tensor& x) {
    const at::Tensor* inside = &x;
    while (at::functorch::isBatchedTensor(*inside)) {
      numbers.push_back(-2);
      inside = &at::functorch::unsafeGetBatchedImpl(*inside)->value();
    }
    numbers.push_back(static_cast<int64_t>(inside->unsafeGetTensorImpl()->key_set().raw_repr()));
    const at::Tensor& tangent = inside->_fw_grad(/*level=*/0);
    numbers.push_back(inside->requires_grad() | tangent.defined() << 1);
    if (!tangent.defined()) return;
    numbers.push_back(static_cast<int64_t>(tangent.unsafeGetTensorImpl()->key_set().raw_repr()));
    numbers.push_back(tangent.requires_grad());
    for (const int64_t n : tangent.strides()) numbers.push_back(n);
  }

  void add(double x) {
    int64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    numbers.push_back(bits);
  }

  std::vector<const c10::TensorImpl*> seen_;
};

// ---- recording ------------------------------------------------------------------------------------------------------

// Records the operators that are called on this thread while it exists.
class Recorder {
 public:
  Recorder(const variable_list& tensors, const variable_list& grads) : before_(current) {
    for (const variable_list* list : {&tensors, &grads}) {
      for (const at::Tensor& x : *list) {
        if (x.defined()) {
          know(x);
          if (x.has_storage()) given_.insert(x.storage().unsafeGetStorageImpl());
        }
        ++made.values;
      }
    }
    current = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~Recorder() {
    at::removeCallback(handle_);
    current = before_;
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // Whether the recorded calls compute these results from the formula's arguments.
  bool finish(const variable_list& results) {
    for (const at::Tensor& x : results) {
      const int64_t n = x.defined() ? number(x) : -1;
      if (x.defined() && (n < 0 || empty_.count(n) > 0)) refuse("a result that no operator made");
      made.results.push_back(n);
    }
    if (!refusal.empty()) return false;
    // values are released once nothing reads them any more
    std::vector<int64_t> reader(made.values, -1);
    for (size_t i = 0; i < made.steps.size(); ++i) {
      for (const Operand& operand : made.steps[i].operands) {
        for (const int64_t n : operand.numbers) {
          if (n >= 0) reader[n] = static_cast<int64_t>(i);
        }
      }
      for (const auto& result : made.steps[i].results) {
        for (const int64_t n : result.second) {
          if (n >= 0 && reader[n] < 0) reader[n] = static_cast<int64_t>(i);
        }
      }
    }
    for (const int64_t n : made.results) {
      if (n >= 0) reader[n] = -1;
    }
    made.last.resize(made.steps.size());
    for (int64_t n = 0; n < made.values; ++n) {
      if (reader[n] >= 0) made.last[reader[n]].push_back(n);
    }
    return true;
  }

  Recording made;
  std::string refusal;  // why this is no recording; empty if it may be one

  void refuse(std::string why) {
    if (refusal.empty()) refusal = std::move(why);
  }

  static void refuse_current(const char* why) {
    if (current != nullptr) current->refuse(why);
  }

 private:
  struct LookedThrough : public at::ObserverContext {};

  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& function) {
    if (current == nullptr) return nullptr;
    // for our operators in Python, composite ones and autograd's engine, the operators that they call are recorded
    // instead
    const auto name = function.operator_name();
    // not under a transform: there the operators are called in the middle of a call, and cannot be called there again
    const bool through =
        !name || (!current->transformed_ && ((!is_tracking() && is_in_python(*name)) || is_composite(*name)));
    if (current->depth_ == 0 && through) return std::make_unique<LookedThrough>();
    if (current->depth_++ == 0) current->begin(function);
    return nullptr;
  }

  static void ends(const at::RecordFunction& function, at::ObserverContext* looked_through) {
    if (current != nullptr && looked_through == nullptr && --current->depth_ == 0) current->end(function);
  }

  void begin(const at::RecordFunction& function) {
    operands_.clear();
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    const auto name = function.operator_name();
    const auto op = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
    const auto inputs = function.inputs();
    if (!op || inputs.size() != op->schema().arguments().size()) return refuse("no schema", function);
    if (made.steps.size() == kMostSteps) return refuse("too many calls", function);
    if (keys.included_ != keys_before_.included_ || (transformed_ && in_transformed_call() != in_call_)) {
      return refuse("a transform or mode", function);
    }
    keys_ = keys;
    called_ = function.name();
    if (op->hasTag(at::Tag::nondeterministic_seeded)) return refuse("random numbers", function);
    const auto& arguments = op->schema().arguments();
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      operands_.push_back(operand(inputs[i], alias != nullptr && alias->isWrite()));
    }
  }

  void end(const at::RecordFunction& function) {
    if (!refusal.empty()) return;
    const auto op = c10::Dispatcher::singleton().findSchema(*function.operator_name());
    const auto& outputs = function.outputs();
    if (!op || outputs.size() != op->schema().returns().size()) return refuse("an error", function);
    std::vector<std::pair<bool, std::vector<int64_t>>> results;
    for (const IValue& output : outputs) {
      if (output.isTensorList()) {
        results.emplace_back(true, std::vector<int64_t>());
        for (const IValue& x : output.toListRef()) results.back().second.push_back(result(x.toTensor()));
      } else if (output.isTensor()) {
        results.emplace_back(false, std::vector<int64_t>{result(output.toTensor())});
      } else if (is_of_metadata(op->schema().name())) {
        return;
      } else {
        return refuse("a value is read", function);
      }
    }
    const std::string& called = op->schema().name();
    const bool unfilled = called.find("empty") != std::string::npos || called.find("resize") != std::string::npos;
    for (size_t i = 0; unfilled && i < outputs.size(); ++i) {
      if (!results[i].first && outputs[i].toTensor().numel() > 0) empty_.insert(results[i].second[0]);
    }
    made.steps.push_back(
        {*op, c10::GradMode::is_enabled(), is_forward_mode_on(), keys_, std::move(operands_), std::move(results)});
    operands_.clear();
  }

  void refuse(const char* why, const at::RecordFunction& function) {
    refuse(why + std::string(": ") + function.name());
  }

  Operand operand(const IValue& value, bool written) {
    if (value.isTensor()) return {Operand::kValue, {argument(value.toTensor(), written)}, IValue()};
    if (value.isTensorList() || value.isOptionalTensorList()) {
      Operand list{value.isTensorList() ? Operand::kValues : Operand::kOptionalValues, {}, IValue()};
      for (const IValue& x : value.toListRef()) {
        list.numbers.push_back(x.isTensor() ? argument(x.toTensor(), written) : -1);
      }
      return list;
    }
    if (value.isGenerator() || value.isObject() || value.isPyObject() || value.isTuple() || value.isGenericDict()) {
      refuse("an argument that is no plain value");
    }
    return {Operand::kLiteral, {}, value};
  }

  int64_t argument(const at::Tensor& x, bool written) {
    if (!x.defined()) return -1;
    if (written && (transformed_ || (x.has_storage() && given_.count(x.storage().unsafeGetStorageImpl()) > 0))) {
      refuse("a write to what the formula was given: " + called_);
    }
    int64_t known = number(x);
    if (known < 0) known = saved_number(x);
    if (known >= 0) {
      // torch.tensor allocates memory, and fills it without an operator
      if (empty_.erase(known) > 0 && !written) refuse("a tensor that no operator has filled: " + called_);
      return known;
    }
    // a Python number in a tensor is a constant; any other tensor was made without an operator
    if (written || x.dim() > 0 || !x.unsafeGetTensorImpl()->is_wrapped_number()) {
      refuse("a tensor that no operator made: " + called_);
      return -1;
    }
    made.constants.emplace_back(made.values, x);
    know(x);
    return made.values++;
  }

  int64_t result(const at::Tensor& x) {
    if (!x.defined()) return -1;
    const int64_t known = number(x);
    if (known >= 0) return known;
    know(x);
    return made.values++;
  }

  int64_t number(const at::Tensor& x) const {
    const auto found = numbers_.find(x.unsafeGetTensorImpl());
    return found == numbers_.end() ? -1 : found->second;
  }

  // A node of autograd that saves a tensor returns another tensor with the same memory.
  int64_t saved_number(const at::Tensor& x) const {
    if (!x.has_storage()) return -1;
    int64_t found = -1;
    for (const Known& known : known_) {
      if (known.memory != x.storage().unsafeGetStorageImpl() || known.offset != x.storage_offset() ||
          known.dtype != x.scalar_type() || known.tracked != x.requires_grad() || x.sizes() != known.sizes ||
          x.strides() != known.strides) {
        continue;
      }
      if (known.node == x.grad_fn().get()) return known.number;
      if (!c10::GradMode::is_enabled()) found = known.number;
    }
    return found;
  }

  // Weak references: the data may be freed, but the addresses are not reused.
  struct Known {
    int64_t number;
    const c10::StorageImpl* memory;
    int64_t offset;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
    const Node* node;
    bool tracked;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
  };

  void know(const at::Tensor& x) {
    if (!numbers_.emplace(x.unsafeGetTensorImpl(), made.values).second) return;
    Known known{made.values,
                nullptr,
                0,
                x.scalar_type(),
                {},
                {},
                x.grad_fn().get(),
                x.requires_grad(),
                c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(x.getIntrusivePtr()),
                {}};
    if (x.has_storage() && x.layout() == at::kStrided) {
      known.memory = x.storage().unsafeGetStorageImpl();
      known.offset = x.storage_offset();
      known.sizes = x.sizes().vec();
      known.strides = x.strides().vec();
      known.storage.emplace(x.storage().getWeakStorageImpl());
    }
    known_.push_back(std::move(known));
  }

  static thread_local Recorder* current;

  Recorder* const before_;
  at::CallbackHandle handle_ = 0;
  int64_t depth_ = 0;
  const c10::impl::LocalDispatchKeySet keys_before_ = c10::impl::tls_local_dispatch_key_set();
  const bool transformed_ = !plain_thread(), in_call_ = in_transformed_call();
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();  // when the call began
  std::vector<Operand> operands_;
  std::string called_;
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers_;
  std::vector<Known> known_;
  std::set<int64_t> empty_;  // values that have not been written to yet
  std::set<const c10::StorageImpl*> given_;
};

thread_local Recorder* Recorder::current = nullptr;

// ---- proof ----------------------------------------------------------------------------------------------------------

bool same_values(const at::Tensor& x, const at::Tensor& y) {
  if (x.sizes() != y.sizes() || x.strides() != y.strides() || x.dtype() != y.dtype() || x.device() != y.device() ||
      x.requires_grad() != y.requires_grad() || !plain(x) != !plain(y)) {
    return false;
  }
  if (!plain(x)) {
    const at::Tensor &one = x._fw_grad(/*level=*/0), &other = y._fw_grad(/*level=*/0);
    return x.unsafeGetTensorImpl()->key_set() == y.unsafeGetTensorImpl()->key_set() && same_in_python(x, y) &&
           one.defined() == other.defined() && (!one.defined() || same_values(one, other));
  }
  // sums on a device may differ from run to run, and reading them would synchronize
  if (!x.is_cpu() || x.layout() != at::kStrided) return true;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::isclose(x, y, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true).all().item<bool>();
}

// Whether the graphs behind two tensors are the same, as far as both are new.
bool same_graph(const at::Tensor& x, const at::Tensor& y) {
  std::set<std::pair<const Node*, const Node*>> seen;
  std::vector<std::pair<torch::autograd::Edge, torch::autograd::Edge>> waiting;
  waiting.emplace_back(torch::autograd::impl::gradient_edge(x), torch::autograd::impl::gradient_edge(y));
  while (!waiting.empty()) {
    const auto [one, other] = std::move(waiting.back());
    waiting.pop_back();
    if (one.is_valid() != other.is_valid() || one.input_nr != other.input_nr) return false;
    if (one.function == other.function || !seen.emplace(one.function.get(), other.function.get()).second) continue;
    if (one.function->name() != other.function->name()) return false;
    const auto& next = one.function->next_edges();
    const auto& others = other.function->next_edges();
    if (next.size() != others.size()) return false;
    for (size_t i = 0; i < next.size(); ++i) waiting.emplace_back(next[i], others[i]);
  }
  return true;
}

bool proven(const Recording& recording, const variable_list& tensors, const variable_list& grads,
            const variable_list& results) {
  try {
    const variable_list played = recording.play(tensors, grads);
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined() != played[i].defined()) return false;
      if (results[i].defined() && !(same_values(results[i], played[i]) && same_graph(results[i], played[i]))) {
        return false;
      }
    }
  } catch (const c10::Error&) {  // but no error of Python's, such as an interrupt
    return false;
  }
  return true;
}

// On a device, Python decides: values cannot be read while a graph is captured.
bool all_finite(const variable_list& results) {
  bool on_device = false;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (const at::Tensor& x : results) {
      if (x.defined() && x.is_cpu() && !finite(x)) return false;
      on_device |= x.defined() && !x.is_cpu();
    }
  }
  return !on_device || finite_in_python(results);
}

}  // namespace

// ---- playing --------------------------------------------------------------------------------------------------------

thread_local int64_t Recording::playing = 0;
thread_local int64_t Recording::in_python = 0;

variable_list Recording::play(const variable_list& tensors, const variable_list& grads) const {
  struct Playing {
    Playing() { ++playing; }
    ~Playing() { --playing; }
  } const here;
  const c10::impl::ForceDispatchKeyGuard keys_after;
  const c10::AutoGradMode grad_mode_after(c10::GradMode::is_enabled());
  const c10::AutoFwGradMode forward_mode_after(is_forward_mode_on());
  variable_list known(values);
  std::copy(grads.begin(), grads.end(), std::copy(tensors.begin(), tensors.end(), known.begin()));
  for (const auto& [n, x] : constants) known[n] = x;
  const auto value = [&](int64_t n) { return n < 0 ? at::Tensor() : known[n]; };
  Stack stack;
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    for (const Operand& operand : step.operands) {
      switch (operand.kind) {
        case Operand::kValue:
          stack.emplace_back(value(operand.numbers[0]));
          break;
        case Operand::kValues: {
          c10::List<at::Tensor> list;
          for (const int64_t n : operand.numbers) list.push_back(value(n));
          stack.emplace_back(std::move(list));
          break;
        }
        case Operand::kOptionalValues: {
          c10::List<std::optional<at::Tensor>> list;
          for (const int64_t n : operand.numbers) list.push_back(n < 0 ? std::nullopt : std::optional(known[n]));
          stack.emplace_back(std::move(list));
          break;
        }
        case Operand::kLiteral:
          stack.push_back(operand.literal);
      }
    }
    c10::impl::_force_tls_local_dispatch_key_set(step.keys);
    c10::GradMode::set_enabled(step.grad_mode);
    c10::AutogradState::get_tls_state().set_fw_grad_mode(step.forward_mode);
    step.op.callBoxed(&stack);
    for (size_t k = 0; k < step.results.size(); ++k) {
      const auto& [is_list, numbers] = step.results[k];
      if (!is_list) {
        if (numbers[0] >= 0) known[numbers[0]] = std::move(stack[k]).toTensor();
        continue;
      }
      const auto elements = stack[k].toListRef();
      for (size_t j = 0; j < numbers.size(); ++j) {
        if (numbers[j] >= 0) known[numbers[j]] = elements[j].toTensor();
      }
    }
    stack.clear();
    for (const int64_t n : last[i]) known[n].reset();
  }
  variable_list found;
  found.reserve(results.size());
  for (const int64_t n : results) found.push_back(value(n));
  return found;
}

// ---- recordings -----------------------------------------------------------------------------------------------------

size_t KeyHash::operator()(const std::vector<int64_t>& key) const {
  uint64_t found = 0xcbf29ce484222325;
  for (const int64_t n : key) found = (found ^ static_cast<uint64_t>(n)) * 0x9e3779b97f4a7c15, found ^= found >> 32;
  return static_cast<size_t>(found);
}

bool Answers::of(c10::ArrayRef<IValue> arguments, const std::function<bool()>& function) {
  Key key;
  for (const IValue& value : arguments) {
    const bool is_tensor = value.isTensor() && value.toTensor().defined();
    if (!(is_tensor ? key.add(variable_list{value.toTensor()}) : key.add(is_absent(value) ? IValue() : value))) {
      return function();
    }
  }
  {
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    const auto found = known_.find(key.numbers);
    if (found != known_.end()) return found->second;
  }
  const bool answer = function();
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  if (known_.size() >= kMostKeys) known_.clear();
  known_.emplace(std::move(key.numbers), answer);
  return answer;
}

std::optional<variable_list> Recordings::pull_back(const std::vector<bool>& mask, const variable_list& tensors,
                                                   const std::vector<IValue>& constants, const variable_list& grads,
                                                   bool only_finite, const Formula& formula, bool in_call) {
  const int64_t before = calls_before.load(std::memory_order_relaxed);
  if (before < 0 || !no_autocast() || at::impl::torch_function_mode_enabled()) return std::nullopt;
  Key key;
  key.transformed = !plain_thread();
  if (key.transformed && (only_finite || !only_transforms() || in_call != in_transformed_call())) return std::nullopt;
  key.numbers.reserve(64);
  key.numbers.push_back(c10::GradMode::is_enabled() | is_forward_mode_on() << 1);
  if (key.transformed) {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    key.numbers.push_back(static_cast<int64_t>(keys.included_.raw_repr()));
    key.numbers.push_back(static_cast<int64_t>(keys.excluded_.raw_repr()));
  }
  for (const bool yes : mask) key.numbers.push_back(yes);
  {
    const Reading active;  // its rules apply where a formula differentiates something itself
    for (const auto& layer : active.layers()) key.numbers.push_back(layer->number);
    key.numbers.push_back(-1);
  }
  if (!key.add(tensors) || !key.add(grads)) return std::nullopt;
  for (const IValue& constant : constants) {
    if (!key.add(constant)) return std::nullopt;
  }
  std::shared_ptr<const Recording> recording;
  {
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    const int64_t now = generation.load(std::memory_order_relaxed);
    if (generation_ != now) entries_.clear(), generation_ = now, recorded_ = refused_ = 0;
    if (recorded_ == 0 && refused_ >= kMostRefused) return std::nullopt;
    if (entries_.size() >= kMostKeys && entries_.count(key.numbers) == 0) entries_.clear();
    Entry& entry = entries_[key.numbers];
    recording = entry.recording;
    // hooks on saved tensors, such as those of a checkpoint, must be called only once: not for the proof
    const bool hooked = !at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
    if (!recording && (hooked || entry.refused || entry.calls++ < before)) return std::nullopt;
  }
  variable_list results;
  if (recording) {
    ++counts.played;
    results = recording->play(tensors, grads);
  } else {
    std::shared_ptr<Recording> made;
    {
      Recorder recorder(tensors, grads);
      results = formula();
      if (recorder.finish(results)) made = std::make_shared<Recording>(std::move(recorder.made));
      refusal = std::move(recorder.refusal);
    }
    if (made && !proven(*made, tensors, grads, results)) {
      made = nullptr;
      refusal = "played, it gives something else";
    }
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    if (generation_ == generation.load(std::memory_order_relaxed)) {
      Entry& entry = entries_[key.numbers];
      ++(made ? recorded_ : refused_);
      entry.refused = made == nullptr;
      entry.recording = std::move(made);
    }
  }
  if (only_finite && !all_finite(results)) return std::nullopt;
  return results;
}

}  // namespace manualgrad

using namespace manualgrad;

// An operator of ours whose kernel, below autograd, is in Python.
MANUALGRAD_API void manualgrad_calls_in_python_op(const char* name, const char* overload) {
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  python_ops.emplace(name, overload);
}

// Why the last formula that was to be recorded on this thread was not; empty if it was.
MANUALGRAD_API const char* manualgrad_calls_refusal() { return refusal.c_str(); }

// Refuses the recording in progress on this thread, if there is one.
MANUALGRAD_API void manualgrad_calls_refuse(const char* why) { Recorder::refuse_current(why); }

// How many backwards this thread has played.
MANUALGRAD_API int64_t manualgrad_calls_played() { return counts.played; }

// Notes with 1 that Python starts to transpose a backward on this thread, with -1 that it is done. Python serves the
// formulas in between.
MANUALGRAD_API void manualgrad_calls_transpose(int64_t by) { Recording::in_python += by; }

// Whether this thread plays a recording.
MANUALGRAD_API int64_t manualgrad_calls_playing() { return Recording::playing; }

// Forgets all recordings: what a formula calls may have changed.
MANUALGRAD_API void manualgrad_calls_forget() { generation.fetch_add(1); }

// Sets how many calls of a key come before the one that is recorded; -1: none is. Returns the previous number.
MANUALGRAD_API int64_t manualgrad_calls_record_after(int64_t calls) { return calls_before.exchange(calls); }
