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

// The argument of a recorded call: a value by its number, a list of values, or what the call was given.
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

  static thread_local int64_t playing;  // how many are, on this thread

  // While Python serves a call at a level of torch.func: what it calls in turn is no step of a recording.
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
  std::vector<std::pair<int64_t, at::Tensor>> constants;  // numbers of Python's, with the numbers of their values
  int64_t values = 0;
};

struct KeyHash {
  size_t operator()(const std::vector<int64_t>& key) const;
};

// Answers of functions in Python that look at nothing but what the key of a recording holds. Any thread may ask.
class Answers {
 public:
  bool of(c10::ArrayRef<IValue> arguments, const std::function<bool()>& function);

 private:
  std::unordered_map<std::vector<int64_t>, bool, KeyHash> known_;  // guarded by `recordings_mutex`
};

using Formula = std::function<variable_list()>;

inline std::mutex recordings_mutex;  // of all of them, so that a fork can hold it

// The recordings of one rule. Any thread may ask.
class Recordings {
 public:
  // The gradients, or what else the formula gives: by a recording for this key, or by the formula, which is recorded.
  // Nothing if this is no call to record, or a result is not finite and has to be.
  // `in_call`: this is the middle of a call of torch.func, as everything is that a kernel calls which it has called.
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
