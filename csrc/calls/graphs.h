// Calls of compiled functions: the node, its saved tensors, and the choice of the graph that its backward runs. Python
// compiles the graphs and derives the rules (torch_manualgrad/compiling). It also runs those whose code is in Python.
#pragma once

#include "guarded.h"
#include "levels.h"
#include "python.h"
#include "recorded.h"
#include "stock.h"
#include "table.h"

#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/PyInterpreterHooks.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/inductor/aoti_torch/tensor_converter.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <unordered_map>
#include <utility>

// Python's, without its headers.
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
}

namespace manualgrad {

// Inductor's code. It takes ownership of the arguments, and gives that of the results. It must be called with Python's
// lock, and runs without it.
using Code = void (*)(AtenTensorHandle* arguments, AtenTensorHandle* results);

struct Graph {
  Graph(int64_t n, std::vector<std::vector<int64_t>> s, std::vector<c10::ScalarType> d, std::vector<bool> v)
      : number(n), strides(std::move(s)), dtypes(std::move(d)), views(std::move(v)) {}

  const int64_t number;
  const std::vector<std::vector<int64_t>> strides;  // of its arguments
  const std::vector<c10::ScalarType> dtypes;        // of them
  const std::vector<bool> views;                    // results that may share memory with an argument
  mutable std::atomic<Code> code{nullptr};          // null: Python runs the graph
};
using GraphPointer = std::shared_ptr<const Graph>;

// How calls of a graph are differentiated if certain arguments require grad.
struct GraphRule {
  // The backward of a function and of its residuals up to some order.
  struct Level {
    int64_t outputs;                      // how many results it has cotangents for
    std::vector<int64_t> smooth, wanted;  // the results that have cotangents, the arguments that have gradients
    std::vector<int64_t> saved;           // which of the saved tensors it reads
  };
  struct Backward {
    GraphPointer graph;           // null: left to Python
    std::vector<int64_t> places;  // the arguments whose gradients it returns
  };

  // The backward for the cotangents and the gradients that these bits select.
  Backward backward(size_t level, const std::vector<bool>& given, const std::vector<bool>& wanted) const;

  int64_t number = 0;
  PyObject* owner = nullptr;  // of this rule, in Python. Nodes keep it alive, and it keeps the graphs alive.
  std::string node;           // the name of nodes
  int64_t own = 0;            // how many results of the forward are the function's; residuals follow
  GraphPointer forward;
  std::vector<bool> differentiable;  // its results
  std::vector<int64_t> of_inputs, of_outputs;
  std::vector<Level> levels;

 private:
  mutable std::unordered_map<std::vector<int64_t>, Backward, KeyHash> backwards_;  // guarded by `recordings_mutex`
};
using GraphRulePointer = std::shared_ptr<const GraphRule>;

inline std::map<int64_t, GraphPointer> graphs;           // guarded by `recordings_mutex`
inline std::map<int64_t, GraphRulePointer> graph_rules;  // guarded by `recordings_mutex`

template <class Pointer>
Pointer found_in(const std::map<int64_t, Pointer>& all, int64_t number) {
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  const auto found = all.find(number);
  return found == all.end() ? Pointer() : found->second;
}

inline IValue bits_of(const std::vector<bool>& bits) {
  c10::List<bool> found;
  found.reserve(bits.size());
  for (const bool bit : bits) found.push_back(bit);
  return found;
}

inline GraphRule::Backward GraphRule::backward(size_t level, const std::vector<bool>& given,
                                               const std::vector<bool>& wanted) const {
  std::vector<int64_t> key{static_cast<int64_t>(level)};
  key.insert(key.end(), given.begin(), given.end());
  key.insert(key.end(), wanted.begin(), wanted.end());
  {
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    const auto found = backwards_.find(key);
    if (found != backwards_.end()) return found->second;
  }
  static const PythonOp backward_of("manualgrad_calls::graph_backward");
  auto places = backward_of({number, static_cast<int64_t>(level), bits_of(given), bits_of(wanted)}).toIntVector();
  Backward made{found_in(graphs, places.at(0)), {places.begin() + 1, places.end()}};
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  return backwards_.emplace(std::move(key), std::move(made)).first->second;
}

variable_list call_graph(const GraphPointer& graph, variable_list values);

// If a result shares memory with an argument or an earlier result, writes to either count for both.
inline void share_versions(const at::Tensor& y, at::TensorList others, size_t count) {
  if (!y.has_storage() || y.is_inference()) return;
  const auto* const memory = y.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& x = others[i];
    if (!x.has_storage() || x.is_inference() || x.storage().unsafeGetStorageImpl() != memory || x.is_same(y)) continue;
    y.unsafeGetTensorImpl()->set_version_counter(x.unsafeGetTensorImpl()->version_counter());
    return;
  }
}

inline void share_all_versions(at::TensorList results, at::TensorList values) {
  for (size_t i = 0; i < results.size(); ++i) {
    share_versions(results[i], results, i);
    share_versions(results[i], values, values.size());
  }
}

// Frees an argument after its last use, if the caller has no other reference to it.
inline variable_list run_code(Code code, variable_list arguments, size_t results) {
  const struct Lock {
    int state = PyGILState_Ensure();
    ~Lock() { PyGILState_Release(state); }
  } lock;
  auto given = torch::aot_inductor::unsafe_alloc_new_handles_from_tensors(arguments);
  arguments.clear();
  std::vector<AtenTensorHandle> found(results);
  code(given.data(), found.data());
  return torch::aot_inductor::alloc_tensors_by_stealing_from_handles(found.data(), found.size());
}

// The arguments of the graphs that Python runs, the innermost last; another may run before Python takes those of one,
// in a signal handler. `run_graph` would keep them alive until it returns if they were its own.
inline thread_local std::vector<variable_list> handed_over;

// Runs a graph in Python, which takes the arguments by their place.
inline variable_list run_in_python(int64_t number, variable_list arguments) {
  static const PythonOp run("manualgrad_calls::run_graph");
  const struct Place {
    const size_t place = handed_over.size();
    ~Place() { handed_over.resize(place); }
  } here;
  handed_over.push_back(std::move(arguments));
  return run({number, static_cast<int64_t>(here.place)}).toTensorVector();
}

// Runs a graph without tracking.
inline variable_list run_graph(const Graph& graph, variable_list values) {
  TORCH_CHECK(values.size() == graph.strides.size(), "torch_manualgrad: a compiled graph has ", graph.strides.size(),
              " arguments, got ", values.size());
  const at::AutoDispatchBelowADInplaceOrView guard;
  const bool may_share = std::find(graph.views.begin(), graph.views.end(), true) != graph.views.end();
  const variable_list shared = may_share ? values : variable_list();
  for (size_t i = 0; i < values.size(); ++i) {
    at::Tensor& x = values[i];
    const at::IntArrayRef strides = graph.strides[i];
    const auto dtype = graph.dtypes[i];  // a hook on saved tensors, or a caller of a node, may pass another one
    if (x.strides() == strides && x.scalar_type() == dtype) continue;
    x = at::empty_strided(x.sizes(), strides, x.options().dtype(dtype)).copy_(x);
  }
  variable_list results;
  if (const Code code = graph.code.load(std::memory_order_acquire)) {
    results = run_code(code, std::move(values), graph.views.size());
  } else {
    results = run_in_python(graph.number, std::move(values));
  }
  share_all_versions(results, shared);
  return results;
}

// The same in Python, with tracking.
inline variable_list call_graph_in_python(const Graph& graph, const variable_list& values) {
  static const PythonOp call("manualgrad_calls::call_graph");
  return call({graph.number, c10::List<at::Tensor>(values)}).toTensorVector();
}

// An argument of a call, with its history at that time. A later in-place write may make this call's node the history of
// the variable itself, and then node and variable would keep each other alive.
struct Input {
  explicit Input(const at::Tensor& x) : version(x.is_inference() ? 0 : static_cast<int64_t>(x._version())) {
    if (x.is_inference() || (x.is_leaf() && x.requires_grad())) {
      value = x;  // a tracked write to it would raise
      return;
    }
    const c10::TensorImpl* const impl = x.unsafeGetTensorImpl();
    value = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
    if (x.requires_grad()) edge = torch::autograd::impl::gradient_edge(x);
  }

  at::Tensor variable() const {
    if (!edge.is_valid()) return value;
    const c10::TensorImpl* const impl = value.unsafeGetTensorImpl();
    at::Tensor x(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
    torch::autograd::impl::set_gradient_edge(x, edge);
    return x;
  }

  at::Tensor value;
  torch::autograd::Edge edge;
  int64_t version;
};

struct GraphNode : public Node {
  explicit GraphNode(GraphRulePointer r) : rule(std::move(r)), owner_(borrowed(rule->owner)) {}

  std::string name() const override { return rule->node; }

  // A node that saves nothing can run again, as PyTorch's can.
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    released = released || !saved.empty();
    saved.clear();
    inputs.clear();
  }

  variable_list apply(variable_list&& grads) override {
    std::vector<bool> needed(num_outputs());
    if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); })) {
      return variable_list(needed.size());  // undefined, as PyTorch's are
    }
    for (size_t i = 0; i < needed.size(); ++i) needed[i] = task_should_compute_output(i);
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
      for (size_t i = 0; i < saved.size(); ++i) tensors.push_back(alive(unpacked(i)));
    }
    for (at::Tensor& g : grads) g = alive(std::move(g));
    if (auto found = served(needed, tensors, grads)) return *std::move(found);
    variable_list arguments(needed.size());  // undefined if freed: only residuals that were not kept need them
    std::vector<int64_t> versions;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!inputs.empty() || level_of(grads) < rule->levels.size(), torch::autograd::ERR_BACKWARD_TWICE);
      for (size_t i = 0; i < inputs.size(); ++i) {
        arguments[i] = inputs[i].variable();
        versions.push_back(inputs[i].version);
      }
    }
    return pull_back(*rule, needed, tensors, arguments, versions, grads);
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(std::string("torch_manualgrad graph"));
    args.collect(static_cast<uint64_t>(rule->number));
    args.collect(released);
    args.collect(followed());
    args.collect(saved, /*is_output=*/true);
    for (const Input& input : inputs) args.collect(input.value);
  }

  // Compiled autograd runs the graphs as they are.
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    namespace compiled = torch::dynamo::autograd;
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    swap.before(saved);
    variable_list arguments(num_outputs());
    for (size_t i = 0; i < inputs.size(); ++i) {
      arguments[i] = inputs[i].value;
      swap.before(arguments[i]);
    }
    std::vector<IValue> tensors;
    for (size_t i = 0; i < saved.size(); ++i) tensors.emplace_back(unpacked(i));
    for (const at::Tensor& x : arguments) tensors.emplace_back(x);
    std::vector<at::TypePtr> types(tensors.size(), at::TensorType::get());
    auto outputs = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    // the graph may outlive this node: it holds copies of what it needs
    auto call = [rule = rule, owner = owner_, needed = followed(), count = saved.size()](
                    const variable_list& cotangents, const std::vector<IValue>& packed) {
      variable_list all;
      std::vector<int64_t> none;
      for (const IValue& x : packed) all.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
      return pull_back(*rule, needed, {all.begin(), all.begin() + count}, {all.begin() + count, all.end()}, none,
                       cotangents);
    };
    const auto& interface = compiled::getPyCompilerInterface();
    const auto bound = interface->bind_function(swap.get_py_compiler(), rule->node, std::move(call), std::move(types),
                                                /*is_custom_function=*/true, /*is_traceable=*/false);
    auto found =
        interface->call_function(swap.get_py_compiler(), "apply_functional", bound, grads, tensors, std::move(outputs));
    swap.after(saved);
    for (size_t i = 0; i < inputs.size(); ++i) swap.after(arguments[i]);
    return found;
  }

  const GraphRulePointer rule;
  std::vector<SavedVariable> saved;
  std::vector<bool> is_result;  // of them
  std::vector<Input> inputs;    // further residuals are computed from these, if a cotangent of one arrives
  bool released = false;

 private:
  static c10::SafePyObject borrowed(PyObject* object) {
    c10::SafePyObject mine(object, c10::impl::getGlobalPyInterpreter());
    c10::SafePyObject copy(mine);
    mine.release();
    return copy;
  }

  at::Tensor unpacked(size_t place) { return saved.at(place).unpack(is_result.at(place) ? owner() : NodePointer()); }

  NodePointer owner() {
    if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
      return NodePointer(getptr());
    } else {
      return getptr();
    }
  }

  // Which inputs require grad, whichever gradients this backward has to return.
  std::vector<bool> followed() const {
    std::vector<bool> found(num_outputs());
    for (size_t i = 0; i < found.size(); ++i) found[i] = next_edge(i).is_valid();
    return found;
  }

  // The first level whose results include all results with cotangents. At least one result has a cotangent.
  size_t level_of(const variable_list& grads) const {
    int64_t last = static_cast<int64_t>(grads.size()) - 1;
    while (!grads[last].defined()) --last;
    const auto& levels = rule->levels;
    return std::find_if(levels.begin(), levels.end(), [&](const auto& l) { return last < l.outputs; }) - levels.begin();
  }

  // The gradients from a graph; nothing if Python has to compute them.
  std::optional<variable_list> served(const std::vector<bool>& needed, variable_list& tensors, variable_list& grads) {
    const auto is_plain = [](const at::Tensor& x) { return !x.defined() || plain(x); };
    if (!plain_thread() || !no_autocast() || !std::all_of(grads.begin(), grads.end(), is_plain) ||
        !std::all_of(tensors.begin(), tensors.end(), is_plain)) {
      return std::nullopt;
    }
    const size_t place = level_of(grads);
    if (place == rule->levels.size()) return std::nullopt;
    const GraphRule::Level* const level = &rule->levels[place];
    std::vector<bool> given, wanted;
    variable_list arguments;
    for (const int64_t place : level->saved) {
      if (!tensors[place].defined()) return std::nullopt;
      arguments.push_back(tensors[place]);
    }
    for (const int64_t place : level->smooth) {
      given.push_back(grads[place].defined());
      if (given.back()) arguments.push_back(grads[place]);
    }
    for (const int64_t place : level->wanted) wanted.push_back(needed[place]);
    variable_list found(needed.size());
    if (std::find(given.begin(), given.end(), true) == given.end()) return found;
    const auto backward = rule->backward(place, given, wanted);
    if (!backward.graph) return std::nullopt;
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      release_variables();  // now, so that the graph frees each residual after its last use
      tensors.clear();
      grads.clear();
    }
    auto results = call_graph(backward.graph, std::move(arguments));
    for (size_t i = 0; i < backward.places.size(); ++i) found[backward.places[i]] = std::move(results[i]);
    return found;
  }

  // The gradients from Python.
  static variable_list pull_back(const GraphRule& rule, const std::vector<bool>& needed, const variable_list& tensors,
                                 const variable_list& inputs, const std::vector<int64_t>& versions,
                                 const variable_list& grads) {
    static const PythonOp vjp("manualgrad_calls::graph_vjp");
    ++counts.python;
    const IValue found =
        vjp({rule.number, bits_of(needed), tuple_of(tensors), tuple_of(inputs), versions, tuple_of(grads)});
    variable_list result;
    for (const IValue& x : found.toListRef()) result.push_back(x.isTensor() ? x.toTensor() : at::Tensor());
    return result;
  }

  const c10::SafePyObject owner_;
};

// A tracked call.
inline variable_list differentiate_graph(const GraphRulePointer& shared, const variable_list& values) {
  const GraphRule& rule = *shared;
  ++counts.plain;
  edge_list edges;
  edges.reserve(values.size());
  for (const at::Tensor& x : values) edges.push_back(torch::autograd::impl::gradient_edge(x));
  auto node = make_node<NodePointer, GraphNode>(shared);
  node->set_next_edges(std::move(edges));
  auto results = run_graph(*rule.forward, values);
  std::vector<bool> tracked(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    at::Tensor& y = results[i];
    const auto same = [&](const at::Tensor& x) { return x.is_same(y); };
    if (rule.forward->views[i] || std::any_of(values.begin(), values.end(), same) ||
        std::any_of(results.begin(), results.begin() + i, same)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const at::Tensor shared = y;
      y = at::alias(shared);
      share_versions(y, {shared}, 1);
    }
    tracked[i] = rule.differentiable[i] && torch::autograd::isDifferentiableType(y.scalar_type());
    if (tracked[i]) {
      const auto place = node->add_input_metadata(y);
      torch::autograd::impl::set_gradient_edge(y, torch::autograd::Edge(node, place));
    } else {
      node->add_input_metadata(Node::undefined_input());
    }
  }
  node->saved.reserve(rule.of_inputs.size() + rule.of_outputs.size());
  for (const int64_t place : rule.of_inputs) node->saved.emplace_back(values[place], /*is_output=*/false);
  node->is_result.assign(rule.of_inputs.size(), false);
  for (const int64_t place : rule.of_outputs) {
    node->saved.emplace_back(results[place], tracked[place]);
    node->is_result.push_back(tracked[place]);
  }
  node->inputs.reserve(values.size());
  for (const at::Tensor& x : values) node->inputs.emplace_back(x);
  results.resize(rule.own);
  return results;
}

// The results of a call, tracked by autograd.
inline variable_list call_graph(const GraphPointer& graph, variable_list values) {
  if (!plain_thread() || !no_autocast() ||
      !std::all_of(values.begin(), values.end(), [](const at::Tensor& x) { return plain(x); })) {
    return call_graph_in_python(*graph, values);
  }
  std::vector<bool> needs;
  for (const at::Tensor& x : values) needs.push_back(x.requires_grad());
  if (!c10::GradMode::is_enabled() || std::find(needs.begin(), needs.end(), true) == needs.end()) {
    return run_graph(*graph, std::move(values));
  }
  static const PythonOp rule_of("manualgrad_calls::graph_rule");
  auto rule = found_in(graph_rules, rule_of({graph->number, bits_of(needs)}).toInt());
  return rule ? differentiate_graph(rule, values) : call_graph_in_python(*graph, values);
}

inline variable_list call_graph_of(int64_t number, at::TensorList values) {
  const auto graph = found_in(graphs, number);
  TORCH_CHECK(graph, "torch_manualgrad: there is no compiled graph ", number);
  return call_graph(graph, values.vec());
}

TORCH_LIBRARY_FRAGMENT(manualgrad_calls, library) {
  library.def("graph(int number, Tensor[] values) -> Tensor[]", &call_graph_of);
  library.def("handed_over(int place) -> Tensor[]",
              [](int64_t place) { return std::exchange(handed_over.at(place), {}); });
  library.def("share_versions(Tensor[] results, Tensor[] values) -> ()", &share_all_versions);
  library.def("dtype(Tensor x) -> int", [](const at::Tensor& x) { return static_cast<int64_t>(x.scalar_type()); });
}

// Numbers from Python; each list is preceded by its length.
struct Numbers {
  int64_t one() { return *next++; }
  std::vector<int64_t> list() {
    const int64_t n = one();
    std::vector<int64_t> found(next, next + n);
    next += n;
    return found;
  }
  std::vector<bool> bits() {
    const auto found = list();
    return {found.begin(), found.end()};
  }

  const int64_t* next;
};

}  // namespace manualgrad

// A graph: how many arguments it has, the strides and the dtype of each, and for each result whether it may be a view.
MANUALGRAD_API int64_t manualgrad_calls_graph_define(int64_t number, const int64_t* numbers) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    Numbers given{numbers};
    std::vector<std::vector<int64_t>> strides(given.one());
    std::vector<c10::ScalarType> dtypes;
    for (auto& one : strides) {
      one = given.list();
      dtypes.push_back(static_cast<c10::ScalarType>(given.one()));
    }
    const auto made = std::make_shared<const Graph>(number, std::move(strides), std::move(dtypes), given.bits());
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    graphs[number] = made;
    return 0;
  });
}

// Lets a graph run by this code from now on.
MANUALGRAD_API int64_t manualgrad_calls_graph_code(int64_t number, void* code) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    const auto graph = found_in(graphs, number);
    TORCH_CHECK(graph, "there is no compiled graph ", number);
    graph->code.store(reinterpret_cast<Code>(code), std::memory_order_release);
    return 0;
  });
}

// A rule: its forward, the function's results, which results are differentiable, what is saved, and the levels.
MANUALGRAD_API int64_t manualgrad_calls_graph_define_rule(int64_t number, void* owner, const char* node,
                                                          const int64_t* numbers) {
  using namespace manualgrad;
  return guarded([&]() -> int64_t {
    Numbers given{numbers};
    auto made = std::make_shared<GraphRule>();
    made->number = number;
    made->owner = static_cast<PyObject*>(owner);
    made->node = node;
    made->forward = found_in(graphs, given.one());
    TORCH_CHECK(made->forward, "the forward of a rule is no graph");
    made->own = given.one();
    made->differentiable = given.bits();
    made->of_inputs = given.list();
    made->of_outputs = given.list();
    made->levels.resize(given.one());
    for (auto& level : made->levels) {
      level.outputs = given.one();
      level.smooth = given.list();
      level.wanted = given.list();
      level.saved = given.list();
    }
    const std::lock_guard<std::mutex> lock(recordings_mutex);
    graph_rules[number] = std::move(made);
    return 0;
  });
}

// Forgets a graph or a rule. Nodes keep theirs.
MANUALGRAD_API int64_t manualgrad_calls_graph_drop(int64_t number) {
  using namespace manualgrad;
  const std::lock_guard<std::mutex> lock(recordings_mutex);
  return static_cast<int64_t>(graphs.erase(number) + graph_rules.erase(number));
}
