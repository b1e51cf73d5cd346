// What is active: layers of rules, entered for the process or for one thread.
//
// Calls read a `State`, one table per operator. A change builds the next states first and then stores pointers to them,
// so that it happens as a whole or not at all. States that are no longer current are deleted once no call can be
// reading them.
//
// A layer may be entered for one thread only. What is active on such a thread is its `Scope`. The graph remembers it:
// each node of autograd's graph carries the thread that built it and a number that grows with every node on that
// thread, so the history of a thread's scopes tells the scope of each of its nodes. While a node runs, its thread
// follows that scope.
#pragma once

#include "table.h"

#include <functional>
#include <map>
#include <utility>

namespace manualgrad {

// What one override or install adds.
struct Layer {
  using Tables = std::vector<std::pair<size_t, std::shared_ptr<const Table>>>;  // by the operator's slot

  ~Layer();

  int64_t number = 0;
  Tables rules;
  Tables forward_modes;  // they act where no layer has a rule
  bool nested = false;   // with the replacements for nested tensors
};
using Layers = std::vector<std::shared_ptr<const Layer>>;

// Several layers as one. Immutable.
struct State {
  const Table* table(size_t slot) const { return slot < tables.size() ? tables[slot] : nullptr; }

  Layers layers;  // own the tables
  std::vector<const Table*> tables;
  bool nested = false;
};

// The layers entered for one thread, on top of those of the process.
struct Scope {
  // The combined state. Only for a thread that is `Reading`.
  const State* state();

  int64_t number = 0;
  Layers layers;
  std::atomic<const State*> made{nullptr};
  std::atomic<uint64_t> version{0};  // of the layers of the process that `made` is for
};

// While a node with a scope other than its thread's runs.
struct InNode {
  bool yes = false;
  Scope* scope = nullptr;        // the node's, and what was entered since it began
  std::shared_ptr<Scope> begun;  // the node's
  size_t before = 0;             // how many layers the thread had of its own when it began
};

struct Thread {
  Scope* scope() const { return node.yes ? node.scope : own.load(std::memory_order_acquire); }

  uint64_t id = 0;                   // as nodes have it
  std::atomic<int64_t> reading{0};   // how many calls on this thread use a state
  std::atomic<Scope*> own{nullptr};  // what was entered for it
  InNode node;
  std::atomic<int64_t> nodes{0};  // how many nodes of another scope run
};

inline std::atomic<const State*> current{nullptr};  // of the process; null: nothing is active
inline std::atomic<bool> in_python{false};          // all calls go to the general kernel
inline thread_local Thread* this_thread = nullptr;

// The record of this thread, made if there is none.
Thread* enlisted_thread();

// The state that a call on this thread follows. It stays alive for as long as this object.
class Reading {
 public:
  Reading() {
    Thread* thread = this_thread;
    if (current.load(std::memory_order_acquire) == nullptr && (thread == nullptr || thread->scope() == nullptr)) return;
    if (thread == nullptr) thread = enlisted_thread();
    // before the state is loaded, in one order with the deletion of states, which sees this or has stored the next
    // state
    thread->reading.store(thread->reading.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    Scope* const scope = thread->scope();
    state_ = scope != nullptr ? scope->state() : current.load(std::memory_order_seq_cst);
    thread_ = thread;
  }
  ~Reading() {
    if (thread_ == nullptr) return;
    thread_->reading.store(thread_->reading.load(std::memory_order_relaxed) - 1, std::memory_order_release);
  }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  const Table* table(size_t slot) const { return state_ != nullptr ? state_->table(slot) : nullptr; }
  bool nested() const { return state_ != nullptr && state_->nested; }
  c10::ArrayRef<std::shared_ptr<const Layer>> layers() const {
    return state_ != nullptr ? state_->layers : c10::ArrayRef<std::shared_ptr<const Layer>>();
  }

 private:
  Thread* thread_ = nullptr;
  const State* state_ = nullptr;
};

struct Entry {
  std::shared_ptr<const Layer> layer;
  uint64_t thread;  // 0: the process
};

// Makes these entries the active ones, except those of threads that have ended. `publish` runs after everything that
// may fail and before everything that cannot. If it returns false, nothing changes.
bool activate(const std::vector<Entry>& entries, const std::function<bool()>& publish);

// The table of that number; raises where there is none.
std::shared_ptr<const Table> table_of(int64_t number);

// The layer of that number; raises where there is none.
std::shared_ptr<const Layer> layer_of(int64_t number);

// Whether an entry may be for this thread: not if the thread has ended.
bool is_running(uint64_t thread);

}  // namespace manualgrad
