// Questions about the backward that runs on this thread.
#include "guarded.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

// Whether the engine needs the gradient of each input of the node that runs, in order. Writes at most `size` answers,
// and returns the number of inputs; -1 if no node runs.
MANUALGRAD_API int64_t manualgrad_calls_followed(uint8_t* answers, int64_t size) {
  const auto node = torch::autograd::get_current_node();
  if (!node) return -1;
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  const auto& edges = node->next_edges();
  for (int64_t i = 0; i < std::min<int64_t>(size, edges.size()); ++i) {
    const auto* next = edges[i].function.get();
    answers[i] = next != nullptr;
    if (next == nullptr || asked == nullptr || asked->empty()) continue;
    const auto found = asked->find(edges[i].function.get());
    answers[i] = found != asked->end() && found->second.should_execute();
  }
  return static_cast<int64_t>(edges.size());
}
