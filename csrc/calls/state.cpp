// The record behind state.h: layers, states that may be deleted, the history of scopes, and forks.
#include "state.h"

#include "guarded.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <pthread.h>

#include <algorithm>
#include <new>
#include <set>

namespace manualgrad {
namespace {

// ---- all of it, never destroyed: threads may outlive static objects -------------------------------------------------

// From the node with this number on, a thread has built its graph under this scope.
struct Record {
  uint64_t from;
  std::shared_ptr<Scope> scope;
};

constexpr size_t kMostRecords = 1 << 18;

struct Everything {
  // guarded by `changes`
  std::map<int64_t, std::shared_ptr<const Layer>> layers;  // that Python holds
  std::map<int64_t, std::weak_ptr<const Table>> tables;
  std::vector<std::shared_ptr<const Table>> held;  // for the next layer
  std::set<Thread*> threads;
  std::map<std::vector<const Layer*>, std::shared_ptr<Scope>> scopes;
  std::vector<const State*> retired;
  Layers process;
  std::atomic<uint64_t> version{1};
  int64_t numbers = 0;
  bool follows = false;  // whether nodes follow their scopes

  std::mutex records_mutex;  // taken last
  std::map<uint64_t, std::vector<Record>> records;
  size_t count = 0;

  std::mutex ended_mutex;
  std::vector<int64_t> ended;  // numbers of tables, and of layers as -1 - number, that nothing uses any more
};

Everything& all() {
  static auto* const everything = new Everything;
  return *everything;
}

void end(int64_t number) {
  const std::lock_guard<std::mutex> lock(all().ended_mutex);
  all().ended.push_back(number);
}

// ---- states ---------------------------------------------------------------------------------------------------------

std::unique_ptr<State> merged(const Layers& process, const Layers& thread) {
  auto state = std::make_unique<State>();
  state->layers = process;
  state->layers.insert(state->layers.end(), thread.begin(), thread.end());
  const auto put = [&](const Layer::Tables& tables) {
    for (const auto& [slot, table] : tables) {
      if (slot >= state->tables.size()) state->tables.resize(slot + 1);
      state->tables[slot] = table.get();
    }
  };
  for (const auto& layer : state->layers) put(layer->forward_modes);
  for (const auto& layer : state->layers) {
    put(layer->rules);
    state->nested = state->nested || layer->nested;
  }
  return state;
}

// Deletes the states that were replaced, unless a call may still read one.
void delete_retired() {
  for (const Thread* thread : all().threads) {
    if (thread->reading.load(std::memory_order_seq_cst) != 0) return;
  }
  for (const State* state : std::exchange(all().retired, {})) delete state;
}

// ---- scopes ---------------------------------------------------------------------------------------------------------

// Forgets the scopes that no thread has and no record names. Only while no call reads a state.
void delete_scopes() {
  for (const Thread* thread : all().threads) {
    if (thread->reading.load(std::memory_order_seq_cst) != 0 || thread->nodes.load() != 0) return;
  }
  const std::lock_guard<std::mutex> lock(all().records_mutex);
  for (auto it = all().scopes.begin(); it != all().scopes.end();) {
    Scope* const scope = it->second.get();
    const bool used = it->second.use_count() > 1 ||
                      std::any_of(all().threads.begin(), all().threads.end(),
                                  [&](const Thread* t) { return t->own.load(std::memory_order_acquire) == scope; });
    if (used) {
      ++it;
      continue;
    }
    delete scope->made.load(std::memory_order_acquire);
    it = all().scopes.erase(it);
  }
}

std::shared_ptr<Scope> scope_of(const Layers& layers) {
  if (layers.empty()) return nullptr;
  std::vector<const Layer*> key;
  for (const auto& layer : layers) key.push_back(layer.get());
  auto& scope = all().scopes[key];
  if (!scope) {
    scope = std::make_shared<Scope>();
    scope->layers = layers;
    scope->number = ++all().numbers;
  }
  return scope;
}

// Forgets the older half of each thread's records.
void forget_records() {
  for (auto it = all().records.begin(); it != all().records.end();) {
    auto& records = it->second;
    records.erase(records.begin(), records.begin() + (records.size() + 1) / 2);
    it = records.empty() ? all().records.erase(it) : std::next(it);
  }
  all().count = 0;
  for (const auto& [id, records] : all().records) all().count += records.size();
}

// Notes that this thread, from now on, builds its graph under the scope.
void note(uint64_t id, std::shared_ptr<Scope> scope) {
  const uint64_t from = at::sequence_number::peek();
  const std::lock_guard<std::mutex> lock(all().records_mutex);
  auto& records = all().records[id];
  const bool none = scope == nullptr;
  if (!records.empty() && records.back().from == from) {
    records.back().scope = std::move(scope);
  } else if (records.empty() ? !none : records.back().scope != scope) {
    records.push_back({from, std::move(scope)});
    if (++all().count > kMostRecords) forget_records();
  }
}

std::shared_ptr<Scope> built_under(uint64_t id, uint64_t number) {
  const std::lock_guard<std::mutex> lock(all().records_mutex);
  const auto found = all().records.find(id);
  if (found == all().records.end()) return nullptr;
  const auto& records = found->second;
  const auto after = std::upper_bound(records.begin(), records.end(), number,
                                      [](uint64_t n, const Record& record) { return n < record.from; });
  return after == records.begin() ? nullptr : std::prev(after)->scope;
}

// ---- threads --------------------------------------------------------------------------------------------------------

// The record of this thread.
Thread& enlisted() {
  struct Leaver {
    ~Leaver() {
      Thread* const thread = std::exchange(this_thread, nullptr);
      const std::lock_guard lock(changes);
      if (all().threads.erase(thread) > 0) delete thread;
    }
  };
  if (this_thread == nullptr) {
    auto made = std::make_unique<Thread>();
    made->id = at::RecordFunction::currentThreadId();
    const std::lock_guard lock(changes);
    all().threads.insert(made.get());
    this_thread = made.release();
    static thread_local const Leaver leaver;
    (void)leaver;
  }
  return *this_thread;
}

// ---- while a node runs ----------------------------------------------------------------------------------------------

struct Before : public at::ObserverContext {
  explicit Before(InNode n) : node(std::move(n)) {}
  InNode node;
};

size_t own_layers(const Thread& thread) {
  const Scope* const own = thread.own.load(std::memory_order_acquire);
  return own == nullptr ? 0 : own->layers.size();
}

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& function) {
  if (function.seqNr() < 0) return nullptr;  // the node of no call, such as one that accumulates a gradient
  auto scope = built_under(function.forwardThreadId(), static_cast<uint64_t>(function.seqNr()));
  if (scope.get() == (this_thread != nullptr ? this_thread->scope() : nullptr)) return nullptr;
  Thread& thread = enlisted();
  thread.nodes.fetch_add(1);
  auto before =
      std::make_unique<Before>(std::exchange(thread.node, InNode{true, scope.get(), scope, own_layers(thread)}));
  note(thread.id, std::move(scope));
  return before;
}

void node_ends(const at::RecordFunction&, at::ObserverContext* context) {
  auto* const before = dynamic_cast<Before*>(context);
  if (before == nullptr) return;
  Thread& thread = enlisted();
  std::shared_ptr<Scope> scope;
  thread.node = std::move(before->node);
  if (const Scope* const now = thread.scope()) {
    const std::lock_guard lock(changes);
    scope = scope_of(now->layers);
  }
  note(thread.id, std::move(scope));
  thread.nodes.fetch_sub(1);
}

// ---- forks ----------------------------------------------------------------------------------------------------------

// A child has one thread, the one that forked. The locks are held over the fork, so that no other thread is inside.
void before_fork() {
  changes.lock();
  all().records_mutex.lock();
  all().ended_mutex.lock();
  recordings_mutex.lock();
}

void in_parent() {
  recordings_mutex.unlock();
  all().ended_mutex.unlock();
  all().records_mutex.unlock();
  changes.unlock();
}

// The thread has another id in the child, and could not unlock a recursive mutex.
template <class Mutex>
void renew(Mutex& mutex) {
  new (&mutex) Mutex;
}

void in_child() {
  renew(recordings_mutex);
  renew(all().ended_mutex);
  renew(all().records_mutex);
  renew(changes);
  for (Thread* thread : std::exchange(all().threads, {})) {
    if (thread == this_thread) all().threads.insert(thread);
  }
}

[[maybe_unused]] const int forks = pthread_atfork(before_fork, in_parent, in_child);

}  // namespace

// ---- what state.h and table.h declare -------------------------------------------------------------------------------

std::shared_ptr<const Table> table_of(int64_t number) {
  const auto found = all().tables.find(number);
  auto table = found == all().tables.end() ? nullptr : found->second.lock();
  TORCH_CHECK(table, "torch_manualgrad: there is no table ", number);
  return table;
}

Table::~Table() { end(rule); }

Layer::~Layer() { end(-1 - number); }

Thread* enlisted_thread() { return &enlisted(); }

const State* Scope::state() {
  const uint64_t now = all().version.load(std::memory_order_acquire);
  if (version.load(std::memory_order_acquire) == now) return made.load(std::memory_order_seq_cst);
  const std::lock_guard lock(changes);
  auto next = merged(all().process, layers);
  if (const State* before = made.exchange(next.get(), std::memory_order_seq_cst)) all().retired.push_back(before);
  version.store(all().version.load(std::memory_order_acquire), std::memory_order_release);
  return next.release();
}

std::shared_ptr<const Layer> layer_of(int64_t number) {
  const auto found = all().layers.find(number);
  TORCH_CHECK(found != all().layers.end(), "torch_manualgrad: there is no layer ", number);
  return found->second;
}

bool is_running(uint64_t thread) {
  const std::lock_guard lock(changes);
  return std::any_of(all().threads.begin(), all().threads.end(), [&](const Thread* t) { return t->id == thread; });
}

bool activate(const std::vector<Entry>& entries, const std::function<bool()>& publish) {
  Thread& here = enlisted();
  const std::lock_guard lock(changes);
  Layers process;
  std::map<uint64_t, Layers> by_thread;
  for (const Entry& entry : entries) {
    (entry.thread == 0 ? process : by_thread[entry.thread]).push_back(entry.layer);
  }
  auto state = process.empty() ? nullptr : merged(process, {});
  std::vector<std::pair<Thread*, std::shared_ptr<Scope>>> threads;
  std::shared_ptr<Scope> followed;  // by this thread
  for (Thread* thread : all().threads) {
    const auto found = by_thread.find(thread->id);
    const Layers own = found == by_thread.end() ? Layers() : found->second;
    auto scope = scope_of(own);
    if (thread == &here) {
      followed = scope;
      if (here.node.yes) {  // entered and left inside of a backward
        Layers layers = here.node.begun ? here.node.begun->layers : Layers();
        const size_t before = std::min(here.node.before, own.size());
        layers.insert(layers.end(), own.begin() + before, own.end());
        followed = scope_of(layers);
      }
    }
    if (scope.get() != thread->own.load(std::memory_order_acquire)) threads.emplace_back(thread, std::move(scope));
  }
  if (!threads.empty() && !all().follows) {  // from the first scope on
    at::addGlobalCallback(
        at::RecordFunctionCallback(node_begins, node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
    all().follows = true;
  }
  all().retired.reserve(all().retired.size() + 1);
  if (!publish()) return false;

  if (process != all().process) {
    all().process = std::move(process);
    if (const State* before = current.exchange(state.release(), std::memory_order_seq_cst)) {
      all().retired.push_back(before);
    }
    all().version.fetch_add(1, std::memory_order_seq_cst);
  }
  for (const auto& [thread, scope] : threads) thread->own.store(scope.get(), std::memory_order_seq_cst);
  if (here.node.yes) here.node.scope = followed.get();
  // the history of another thread goes on where that thread itself changes next
  if (all().follows) note(here.id, std::move(followed));
  delete_retired();
  if (all().scopes.size() > 64) delete_scopes();
  return true;
}

}  // namespace manualgrad

using namespace manualgrad;

// Makes the table of a rule, and keeps it for the next layer.
MANUALGRAD_API int64_t manualgrad_calls_define_rule(const layout::Rule* rule) {
  return guarded([&]() -> int64_t {
    all().held.push_back(read_table(*rule));
    all().tables.insert_or_assign(rule->number, all().held.back());
    return rule->number;
  });
}

// Keeps a table for the next layer. Returns whether it still exists.
MANUALGRAD_API int64_t manualgrad_calls_hold(int64_t number) {
  return guarded([&]() -> int64_t {
    const auto found = all().tables.find(number);
    auto table = found == all().tables.end() ? nullptr : found->second.lock();
    if (!table) {
      all().tables.erase(number);
      return 0;
    }
    all().held.push_back(std::move(table));
    return 1;
  });
}

// Makes a layer, and returns its number.
MANUALGRAD_API int64_t manualgrad_calls_define_layer(const layout::Layer* sent) {
  return guarded([&]() -> int64_t {
    check_layout(*sent);
    auto layer = std::make_shared<Layer>();
    const auto read = [](const layout::Span<layout::Served>& from, Layer::Tables& to) {
      for (const layout::Served& one : from) to.emplace_back(static_cast<size_t>(one.slot), table_of(one.table));
    };
    read(sent->rules, layer->rules);
    read(sent->forward_modes, layer->forward_modes);
    all().held.clear();
    layer->nested = sent->nested;
    layer->number = ++all().numbers;
    all().layers.emplace(layer->number, layer);
    return layer->number;
  });
}

// Python no longer needs the layer.
MANUALGRAD_API int64_t manualgrad_calls_drop_layer(int64_t number) {
  std::shared_ptr<const Layer> dropped;  // deleted after the lock is free
  return guarded([&]() -> int64_t {
    const auto found = all().layers.find(number);
    if (found == all().layers.end()) return 0;
    dropped = std::move(found->second);
    all().layers.erase(found);
    return 1;
  });
}

// Makes these layers the active ones of the process, if `enter` and `leave` are written in Python.
MANUALGRAD_API int64_t manualgrad_calls_activate(const int64_t* numbers, int64_t size) {
  return guarded([&]() -> int64_t {
    std::vector<Entry> entries;
    for (int64_t i = 0; i < size; ++i) entries.push_back({layer_of(numbers[i]), 0});
    return activate(entries, [] { return true; });
  });
}

// The numbers of tables, and -1 - number of layers, that nothing uses any more: at most `size` of them. Returns how
// many.
MANUALGRAD_API int64_t manualgrad_calls_ended(int64_t* found, int64_t size) {
  const std::lock_guard changing(changes);
  const std::lock_guard<std::mutex> lock(all().ended_mutex);
  auto& ended = all().ended;
  const auto n = std::min(size, static_cast<int64_t>(ended.size()));
  std::copy(ended.end() - n, ended.end(), found);
  ended.resize(ended.size() - n);
  for (int64_t i = 0; i < n; ++i) all().tables.erase(found[i]);
  return n;
}

// The id of this thread in entries.
MANUALGRAD_API int64_t manualgrad_calls_thread() { return static_cast<int64_t>(at::RecordFunction::currentThreadId()); }

// The number of the scope that this thread follows; 0: only the process.
MANUALGRAD_API int64_t manualgrad_calls_scope() {
  const Thread* const thread = this_thread;
  const Scope* const scope = thread == nullptr ? nullptr : thread->scope();
  return scope == nullptr ? 0 : scope->number;
}

// The numbers of the layers of that scope, at most `size`. Returns how many there are.
MANUALGRAD_API int64_t manualgrad_calls_scope_layers(int64_t* found, int64_t size) {
  const Thread* const thread = this_thread;
  const Scope* const scope = thread == nullptr ? nullptr : thread->scope();
  if (scope == nullptr) return 0;
  const auto n = static_cast<int64_t>(scope->layers.size());
  for (int64_t i = 0; i < std::min(n, size); ++i) found[i] = scope->layers[i]->number;
  return n;
}

// Leaves all calls, on all threads, to the general kernel.
MANUALGRAD_API void manualgrad_calls_in_python(int64_t yes) { in_python = yes != 0; }

// How many states and records are kept: for tests.
MANUALGRAD_API void manualgrad_calls_kept(int64_t* found) {
  const std::lock_guard lock(changes);
  const std::lock_guard<std::mutex> records(all().records_mutex);
  found[0] = static_cast<int64_t>(all().retired.size());
  found[1] = static_cast<int64_t>(all().layers.size());
  found[2] = static_cast<int64_t>(all().scopes.size());
  found[3] = static_cast<int64_t>(all().count);
  found[4] = static_cast<int64_t>(all().tables.size());
}
