// Recorded formulas: the operators that a vjp or a jvp in Python has called, called again without Python.
//
// A rule's vjp is a Python function of tensors, as is its jvp. Which operators it calls depends on the sizes, strides,
// dtypes and devices of its arguments, on constants and on switches, and not on values: a formula that reads a value
// calls an operator that returns a number, and such a formula is not recorded. So the second backward with the same key
// is recorded, operator by operator as Python calls them, and later ones play the recording. Operators are called
// through the dispatcher as before: gradients of gradients follow the rules that are active then.
//
// A recording is used only if playing it gives the results that Python returned, and the same graph behind them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace manualgrad {

using c10::IValue;
using torch::autograd::variable_list;

// The argument of a recorded call: a value by its number, a list of values, or a literal.
struct Operand {
  enum Kind { kValue, kValues, kOptionalValues, kLiteral } kind;
  std::vector<int64_t> numbers;  // -1: no tensor
  IValue literal;
};

// A recorded call.
struct Step {
  c10::OperatorHandle op;
  bool grad_mode, forward_mode;
  c10::impl::LocalDispatchKeySet keys;  // of the thread; without autograd's, where the call was below it
  std::vector<Operand> operands;
  std::vector<std::pair<bool, std::vector<int64_t>>> results;  // (whether it is a list, the numbers of the values)
};

// The calls of one formula. Values are numbered: the saved tensors, the cotangents, then results in their order.
struct Recording {
  variable_list play(const variable_list& tensors, const variable_list& grads) const;

  static thread_local int64_t playing;  // how many recordings are, on this thread

  // While Python serves a call at a level of torch.func: the operators that this calls are not steps of a recording.
  struct InPython {
    explicit InPython(bool at_level) : by(at_level ? 1 : 0) { in_python += by; }
    ~InPython() { in_python -= by; }
    InPython(const InPython&) = delete;
    InPython& operator=(const InPython&) = delete;
    const int64_t by;
  };

  static thread_local int64_t in_python;  // how many such calls this thread is in, or that transpose a backward

  std::vector<Step> steps;
  std::vector<std::vector<int64_t>> last;                 // of each step, the values that nothing after it reads
  std::vector<int64_t> results;                           // the gradients; -1: none
  std::vector<std::pair<int64_t, at::Tensor>> constants;  // Python's numbers, with the indices of their values
  int64_t values = 0;
};

struct KeyHash {
  size_t operator()(const std::vector<int64_t>& key) const;
};

// Cached answers of Python functions that read only what the key of a recording holds. Any thread may use them.
class Answers {
 public:
  bool of(c10::ArrayRef<IValue> arguments, const std::function<bool()>& function);

 private:
  std::unordered_map<std::vector<int64_t>, bool, KeyHash> known_;  // guarded by `recordings_mutex`
};

using Formula = std::function<variable_list()>;

inline std::mutex recordings_mutex;  // of all of them, so that a fork can hold it

// The recordings of one rule. Any thread may use them.
class Recordings {
 public:
  // The gradients, or other results of the formula: from a recording for this key, or from the formula, which is then
  // recorded. Nothing if the call must not be recorded, or if a result has to be finite and is not.
  // `in_call`: torch.func is in the middle of a call, as it is throughout the kernels that it calls.
  std::optional<variable_list> pull_back(const std::vector<bool>& mask, const variable_list& tensors,
                                         const std::vector<IValue>& constants, const variable_list& grads,
                                         bool only_finite, const Formula& formula, bool in_call = false);

 private:
  struct Entry {
    int64_t calls = 0;
    std::shared_ptr<const Recording> recording;
    bool refused = false;
  };
  // guarded by `recordings_mutex`
  int64_t generation_ = 0, recorded_ = 0, refused_ = 0;
  std::unordered_map<std::vector<int64_t>, Entry, KeyHash> entries_;
};

}  // namespace manualgrad
