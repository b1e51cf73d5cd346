// Fibers, what they wait for, and who may touch which memory when. See machine.h.
//
// The order in which threads run is forward, reverse or random (CUDA_ON_HOST_ORDER; by default each launch takes
// another one), and a thread runs until it waits: where a barrier is missing, some order shows it in the results.
// Built with -fsanitize=thread, whose calls for each access come here instead of to that sanitizer, it is shown in any
// order: of two accesses by two threads with no barrier between them neither may be a write. Then accesses beyond the
// end of shared memory are found too. With -fsanitize=address it is that sanitizer that finds them.
//
// The same calls count what accesses cost (`Traffic`): those that the lanes of a warp make at one place of the program,
// the same number of times since they last met, are one request.
#include "machine.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_host {
namespace {

constexpr unsigned kWarpSize = 32, kMostThreads = 1024;
constexpr size_t kStack = 256 * 1024, kPage = 4096;
constexpr size_t kMostFibers = size_t{kProcessors} * kBlocksOfProcessor * kMostThreads;
// Between arrays in shared memory, and of all that a block has.
constexpr size_t kGap = 256, kSlab = 128 * 1024;
constexpr unsigned char kPoison = 0xff;  // nan of every floating point type

// --- a switch of stacks ---------------------------------------------------------------------------------------------

#if defined(__x86_64__)
using Context = void*;  // the stack pointer; the rest is on the stack
extern "C" void cuda_on_host_switch(Context* from, Context to);
asm(R"(
.text
.type cuda_on_host_switch, @function
cuda_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_host_switch, .-cuda_on_host_switch
)");
void switch_context(Context& from, Context& to) { cuda_on_host_switch(&from, to); }
void make_context(Context& made, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStack) - 1;
  *top = nullptr;  // what entry would return to
  *--top = reinterpret_cast<void*>(entry);
  made = top - 6;
}
#else
using Context = ucontext_t;
void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
void make_context(Context& made, char* stack, void (*entry)()) {
  getcontext(&made);
  made.uc_stack.ss_sp = stack;
  made.uc_stack.ss_size = kStack;
  makecontext(&made, entry, 0);
}
#endif

// --- state ----------------------------------------------------------------------------------------------------------

struct SharedArray {
  const char* name;
  size_t start, bytes;
};

// When something happened: how often its grid, block and warp had met.
struct Time {
  uint32_t grid = 0, block = 0, warp = 0;
};

// An access of the lanes of a warp at one place of the program.
struct Request {
  bool shared = false;
  std::vector<std::pair<uintptr_t, size_t>> ranges;  // of one lane each
};
struct PlaceAndTime {
  void* place;
  uint32_t time;  // how often the lane has been there since the lanes met
  bool operator==(const PlaceAndTime& other) const { return place == other.place && time == other.time; }
};
struct PlaceAndTimeHash {
  size_t operator()(const PlaceAndTime& of) const {
    return (reinterpret_cast<uintptr_t>(of.place) * 0x9e3779b97f4a7c15u) ^ (of.time * 0xff51afd7ed558ccdu);
  }
};

struct Warp {
  unsigned here = 0;  // lanes that wait
  uint32_t met = 0;
  // since the lanes met, which was then
  Time since;
  std::unordered_map<PlaceAndTime, Request, PlaceAndTimeHash> requests;
  std::unordered_map<PlaceAndTime, uint32_t, PlaceAndTimeHash> visits;  // of a place by a lane (in place of the time)
};

// What the accesses of all launches since the last question cost, and would cost at best.
struct Traffic {
  uint64_t wavefronts = 0;  // of shared memory: a bank has one word in each
  uint64_t best_wavefronts = 0;
  uint64_t sectors = 0;  // of 32 bytes, of global memory
  uint64_t best_sectors = 0;
};

struct Fiber;
struct Block {
  Dim3 index;
  uint32_t number = 0;
  Fiber* first = nullptr;
  unsigned waiting = 0;
  uint32_t met = 0;
  char* slab = nullptr;
  std::vector<SharedArray> arrays;
  std::vector<Warp> warps;
};

struct Fiber {
  Context context;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // of the address sanitizer
  Block* block = nullptr;
  unsigned thread = 0, lane = 0;
  enum { kReady, kWaiting, kDone } state = kReady;
  // what it waits for, and what it gets
  Meeting meeting{};
  Site site{};
  unsigned mask = 0;
  int vote = 0, argument = 0, width = 32;
  alignas(16) unsigned char value[16];
  size_t bytes = 0;
  unsigned answer = 0;

  Warp& warp() const { return block->warps[thread / kWarpSize]; }
};

// An access: by which thread of the grid, and when.
struct Access {
  uint32_t thread = 0;  // counted from 1; 0: none
  Time time;
};
struct Cell {
  uintptr_t key = 0;
  Access write, reads[2];
};

struct Machine {
  std::mutex mutex;
  Launch launch{};
  std::deque<Block> blocks;
  std::vector<Fiber> fibers;
  char *stacks = nullptr, *slabs = nullptr;
  Fiber* current = nullptr;
  Context host;
  void* host_fake_stack = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_size = 0;
  uint32_t met = 0;  // of the grid
  unsigned waiting_grid = 0, done = 0;
  std::string error;
  // order
  std::string order;
  uint64_t launches = 0;
  std::mt19937_64 random;
  int way = 0;  // 0 forward, 1 reverse, 2 random
  std::priority_queue<std::pair<uint64_t, uint32_t>, std::vector<std::pair<uint64_t, uint32_t>>, std::greater<>> ready;
  // memory
  bool watches_global = true, counts = false;
  Traffic traffic;
  std::vector<Cell> shared_cells, cells;
  std::vector<uint32_t> used;

  // Of the launches of all of the host's threads.
  std::mutex asking;
  std::map<const void*, size_t> asked;

  unsigned threads() const { return launch.block.x; }
};
Machine machine;

// --- errors ---------------------------------------------------------------------------------------------------------

std::string place(const Site& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name == nullptr ? site.file : name + 1) + ":" + std::to_string(site.line);
}

// Function and line of an address in this library, if the tool is there.
std::string place(void* address) {
  Dl_info info;
  if (dladdr(address, &info) == 0) return "?";
  char command[4096], text[4096] = "";
  const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  std::snprintf(command, sizeof command, "addr2line -Csi -e '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
  std::string all;
  if (FILE* pipe = popen(command, "r")) {
    while (std::fgets(text, sizeof text, pipe) != nullptr) {
      const std::string line(text, std::strcspn(text, "\n"));
      if (line.find("machine.") != std::string::npos || line.find("cuda_runtime.h") != std::string::npos) continue;
      all += (all.empty() ? "" : " < ") + line;
    }
    pclose(pipe);
  }
  return all;
}

std::string name(const Fiber& fiber) {
  return "thread " + std::to_string(fiber.thread) + " of block " + std::to_string(fiber.block->number);
}
std::string name(uint32_t thread) {
  return "thread " + std::to_string((thread - 1) % machine.threads()) + " of block " +
         std::to_string((thread - 1) / machine.threads());
}

const char* text(Meeting meeting) {
  static const char* const kTexts[] = {"__syncthreads",  "__syncthreads_and", "__syncthreads_or", "__syncthreads_count",
                                       "grid.sync",      "__syncwarp",        "__all_sync",       "__any_sync",
                                       "__ballot_sync",  "__shfl_sync",       "__shfl_up_sync",   "__shfl_down_sync",
                                       "__shfl_xor_sync"};
  return kTexts[static_cast<int>(meeting)];
}
std::string waits(const Fiber& fiber) {
  if (fiber.state == Fiber::kDone) return name(fiber) + " has left the kernel";
  std::string all = name(fiber) + " waits at " + text(fiber.meeting);
  if (fiber.meeting >= Meeting::kWarp) {
    char mask[16];
    std::snprintf(mask, sizeof mask, "(0x%08x)", fiber.mask);
    all += mask;
  }
  return all + ", " + place(fiber.site);
}

void switch_to_host(bool last);

// The first error counts. In a fiber, does not return.
void fail(const std::string& why) {
  if (machine.error.empty()) machine.error = why;
  if (machine.current != nullptr) switch_to_host(false);
}

// --- fibers ---------------------------------------------------------------------------------------------------------

void switch_to_host(bool last) {
  Fiber& fiber = *machine.current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &fiber.fake_stack, machine.host_stack, machine.host_stack_size);
#endif
  (void)last;
  switch_context(fiber.context, machine.host);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &machine.host_stack, &machine.host_stack_size);
#endif
}

void switch_to(Fiber& fiber) {
  machine.current = &fiber;
  position = {{fiber.thread}, fiber.block->index, machine.launch.block, machine.launch.grid};
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&machine.host_fake_stack, fiber.stack, kStack);
#endif
  switch_context(machine.host, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(machine.host_fake_stack, nullptr, nullptr);
#endif
  machine.current = nullptr;
}

void entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &machine.host_stack, &machine.host_stack_size);
#endif
  machine.launch.call(machine.launch.of);
  machine.current->state = Fiber::kDone;
  ++machine.done;
  switch_to_host(true);
}

void make_ready(Fiber& fiber) {
  fiber.state = Fiber::kReady;
  const uint32_t at = static_cast<uint32_t>(&fiber - machine.fibers.data());
  machine.ready.push({machine.way == 0 ? at : machine.way == 1 ? ~uint64_t{at} : machine.random(), at});
}

void wait(Meeting meeting, Site site) {
  Fiber& fiber = *machine.current;
  fiber.state = Fiber::kWaiting;
  fiber.meeting = meeting;
  fiber.site = site;
}

// --- meetings -------------------------------------------------------------------------------------------------------

void release_block(Block& block) {
  const Fiber& first = *block.first;
  unsigned votes = 0;
  for (unsigned t = 0; t < machine.threads(); ++t) {
    const Fiber& fiber = (&first)[t];
    if (fiber.meeting != first.meeting || fiber.site.line != first.site.line ||
        std::strcmp(fiber.site.file, first.site.file) != 0) {
      return fail("not all threads meet at one barrier: " + waits(first) + "; " + waits(fiber));
    }
    votes += fiber.vote != 0;
  }
  block.waiting = 0;
  ++block.met;
  for (unsigned t = 0; t < machine.threads(); ++t) {
    Fiber& fiber = block.first[t];
    fiber.answer = fiber.meeting == Meeting::kBlockAnd  ? votes == machine.threads()
                   : fiber.meeting == Meeting::kBlockOr ? votes > 0
                                                        : votes;
    make_ready(fiber);
  }
}

// The lane whose value a lane gets.
int source_lane(const Fiber& fiber) {
  const int lane = static_cast<int>(fiber.lane), start = lane / fiber.width * fiber.width, end = start + fiber.width;
  switch (fiber.meeting) {
    case Meeting::kShuffle:
      return start + (fiber.argument & (fiber.width - 1));
    case Meeting::kShuffleUp:
      return lane - fiber.argument < start ? lane : lane - fiber.argument;
    case Meeting::kShuffleDown:
      return lane + fiber.argument >= end ? lane : lane + fiber.argument;
    default:
      return (lane ^ fiber.argument) >= end ? lane : lane ^ fiber.argument;
  }
}

// All lanes that `last` names are here.
void release_warp(Fiber& last) {
  Fiber* lanes = &last - last.lane;
  Warp& warp = last.warp();
  const unsigned mask = last.mask, count = std::min(kWarpSize, machine.threads() - lanes->thread);
  unsigned votes = 0;
  for (unsigned l = 0; l < count; ++l) {
    if (((mask >> l) & 1) == 0) continue;
    const Fiber& fiber = lanes[l];
    if (fiber.meeting != last.meeting || fiber.mask != mask || fiber.bytes != last.bytes) {
      return fail("lanes ask for different things: " + waits(last) + "; " + waits(fiber));
    }
    votes |= static_cast<unsigned>(fiber.vote != 0) << l;
  }
  if (last.meeting >= Meeting::kShuffle) {
    unsigned char given[kWarpSize][16];
    for (unsigned l = 0; l < count; ++l) std::memcpy(given[l], lanes[l].value, sizeof given[l]);
    for (unsigned l = 0; l < count; ++l) {
      if (((mask >> l) & 1) == 0) continue;
      const int source = source_lane(lanes[l]);
      if (((mask >> source) & 1) == 0) {
        return fail("lane " + std::to_string(source) +
                    ", from which a value is wanted, takes no part: " + waits(lanes[l]));
      }
      std::memcpy(lanes[l].value, given[source], sizeof given[source]);
    }
  }
  warp.here &= ~mask;
  // Only this orders accesses to memory, and it is known to all lanes only where all meet.
  const unsigned all = 0xffffffffu >> (kWarpSize - count);
  if (last.meeting == Meeting::kWarp && mask == all) ++warp.met;
  for (unsigned l = 0; l < count; ++l) {
    if (((mask >> l) & 1) == 0) continue;
    lanes[l].answer = last.meeting == Meeting::kWarpAll   ? votes == mask
                      : last.meeting == Meeting::kWarpAny ? votes != 0
                                                          : votes;
    make_ready(lanes[l]);
  }
}

void wait_for_warp(unsigned mask) {
  Fiber& fiber = *machine.current;
  fiber.mask = mask;
  if (((mask >> fiber.lane) & 1) == 0) fail("a lane is not in its own mask: " + waits(fiber));
  Warp& warp = fiber.warp();
  warp.here |= 1u << fiber.lane;
  if ((warp.here & mask) == mask) release_warp(fiber);
  switch_to_host(false);
}

// --- shared memory --------------------------------------------------------------------------------------------------

void* add_array(Block& block, const char* name, size_t bytes) {
  size_t start = kGap;
  if (!block.arrays.empty())
    start = (block.arrays.back().start + block.arrays.back().bytes + 2 * kGap - 1) / kGap * kGap;
  if (start + bytes + kGap > kSlab) fail("more shared memory than there is");
  block.arrays.push_back({name, start, bytes});
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(block.slab + start, bytes);
#endif
  return block.slab + start;
}

void start_block(Block& block, unsigned slot, const Dim3& index, uint32_t number) {
  block.index = index;
  block.number = number;
  block.first = machine.fibers.data() + size_t{slot} * machine.threads();
  block.waiting = block.met = 0;
  block.warps.assign((machine.threads() + kWarpSize - 1) / kWarpSize, {});
  block.slab = machine.slabs + slot * kSlab;
  size_t end = kGap;
  if (!block.arrays.empty()) end = block.arrays.back().start + block.arrays.back().bytes + kGap;
  block.arrays.clear();
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(block.slab, kSlab);
#endif
  if (machine.launch.shared + kGap > end) end = std::min(kSlab, machine.launch.shared + 2 * kGap);
  std::memset(block.slab, kPoison, kSlab);
  Cell* cells = machine.shared_cells.data() + slot * kSlab / 4;
  for (size_t c = 0; c < end / 4; ++c) cells[c] = {};
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(block.slab, kSlab);
#endif
  add_array(block, "the dynamic shared memory", machine.launch.shared);
  for (unsigned t = 0; t < machine.threads(); ++t) {
    Fiber& fiber = block.first[t];
    fiber.block = &block;
    fiber.thread = t;
    fiber.lane = t % kWarpSize;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, kStack);
#endif
    make_context(fiber.context, fiber.stack, entry);
    make_ready(fiber);
  }
}

// --- races ----------------------------------------------------------------------------------------------------------

// Whether an earlier access is ordered before what the running thread does now.
bool ordered(const Access& access, uint32_t thread, const Fiber& now) {
  if (access.thread == 0 || access.thread == thread || access.time.grid < machine.met) return true;
  const uint32_t threads = machine.threads();
  if ((access.thread - 1) / threads != now.block->number) return false;
  if (access.time.block < now.block->met) return true;
  return (access.thread - 1) % threads / kWarpSize == now.thread / kWarpSize && access.time.warp < now.warp().met;
}

// The cell of an address in global memory; null if there are too many.
Cell* global_cell(uintptr_t key) {
  constexpr size_t kMost = size_t{1} << 22;
  if (machine.cells.empty()) machine.cells.resize(1 << 16);
  if (machine.used.size() * 2 > machine.cells.size() && machine.cells.size() < kMost) {
    std::vector<Cell> old(machine.cells.size() * 4);
    old.swap(machine.cells);
    const std::vector<uint32_t> used = std::move(machine.used);
    machine.used.clear();
    for (const uint32_t at : used) *global_cell(old[at].key) = old[at];
  }
  const size_t size = machine.cells.size();
  if (machine.used.size() * 4 > size * 3) return nullptr;
  size_t at = (key * 0x9e3779b97f4a7c15u >> 20) & (size - 1);
  while (machine.cells[at].key != key) {
    if (machine.cells[at].key == 0) {
      machine.cells[at].key = key;
      machine.used.push_back(static_cast<uint32_t>(at));
      break;
    }
    at = (at + 1) & (size - 1);
  }
  return &machine.cells[at];
}

void clear_cells() {
  for (const uint32_t at : machine.used) machine.cells[at] = {};
  machine.used.clear();
}

void check_cell(Cell& cell, bool write, const char* what, void* where) {
  const Fiber& fiber = *machine.current;
  const uint32_t thread = fiber.block->number * machine.threads() + fiber.thread + 1;
  const auto race = [&](const Access& access, const char* did, const char* does) {
    fail("a race in " + std::string(what) + ": " + name(fiber) + " " + does + " at " + place(where) + " what " +
         name(access.thread) + " " + did + ", with no barrier between");
  };
  const Access now{thread, {machine.met, fiber.block->met, fiber.warp().met}};
  if (!ordered(cell.write, thread, fiber)) race(cell.write, "wrote", write ? "writes" : "reads");
  if (write) {
    for (const Access& read : cell.reads) {
      if (!ordered(read, thread, fiber)) race(read, "read", "writes");
    }
    cell.write = now;
    return;
  }
  // Two readers are enough: one of them is another thread than any that writes later.
  if (cell.reads[0].thread == thread || ordered(cell.reads[0], thread, fiber)) {
    cell.reads[0] = now;
  } else {
    cell.reads[1] = now;
  }
}

// --- traffic --------------------------------------------------------------------------------------------------------

void count(const Request& request) {
  constexpr uintptr_t kWord = 4, kBanks = 32, kSector = 32;
  std::set<uintptr_t> units;
  const uintptr_t unit = request.shared ? kWord : kSector;
  size_t bytes = 0;
  std::set<uintptr_t> starts;
  for (const auto& [at, size] : request.ranges) {
    if (starts.insert(at).second) bytes += size;
    for (uintptr_t u = at / unit; u <= (at + size - 1) / unit; ++u) units.insert(u);
  }
  if (!request.shared) {
    machine.traffic.sectors += units.size();
    machine.traffic.best_sectors += (bytes + kSector - 1) / kSector;
    return;
  }
  uint64_t of_bank[kBanks] = {}, most = 0;
  for (const uintptr_t word : units) most = std::max(most, ++of_bank[word % kBanks]);
  machine.traffic.wavefronts += most;
  machine.traffic.best_wavefronts += (units.size() + kBanks - 1) / kBanks;
}

void count_all(Warp& warp) {
  for (const auto& [_, request] : warp.requests) count(request);
  warp.requests.clear();
  warp.visits.clear();
}

void count_traffic(Block& block) {
  for (Warp& warp : block.warps) count_all(warp);
}

void note_access(uintptr_t at, size_t bytes, bool shared, void* where) {
  const Fiber& fiber = *machine.current;
  Warp& warp = fiber.warp();
  const Time now{machine.met, fiber.block->met, warp.met};
  if (now.grid != warp.since.grid || now.block != warp.since.block || now.warp != warp.since.warp) {
    count_all(warp);
    warp.since = now;
  }
  const uint32_t visit = warp.visits[{where, fiber.lane}]++;
  Request& request = warp.requests[{where, visit}];
  request.shared = shared;
  request.ranges.emplace_back(at, bytes);
}

// Of the host's thread that the device runs in: code of the host in other threads is instrumented, too.
thread_local bool runs_device = false;

[[maybe_unused]] void check_access(const void* at, size_t bytes, bool write, void* where) {
  if (!runs_device || machine.current == nullptr) return;
  const char* address = static_cast<const char*>(at);
  if (at >= &position && at < &position + 1) return;
  if (address >= machine.stacks && address < machine.stacks + kMostFibers * (kStack + kPage)) return;
  if (address >= machine.slabs && address < machine.slabs + size_t{kProcessors} * kBlocksOfProcessor * kSlab) {
    const Block& block = *machine.current->block;
    for (const SharedArray& array : block.arrays) {
      const char* start = block.slab + array.start;
      if (address < start || address + bytes > start + array.bytes) continue;
      const size_t first = static_cast<size_t>(address - machine.slabs) / 4;
      for (size_t c = first; c < first + (bytes + 3) / 4; ++c) {
        check_cell(machine.shared_cells[c], write, array.name, where);
      }
      if (machine.counts) note_access(static_cast<uintptr_t>(address - machine.slabs), bytes, true, where);
      return;
    }
    fail(name(*machine.current) + (write ? " writes" : " reads") + " shared memory that is in no array, at " +
         place(where));
  }
  if (machine.counts) note_access(reinterpret_cast<uintptr_t>(address), bytes, false, where);
  if (bytes == 1 || !machine.watches_global) return;  // a flag, which many may set
  for (size_t b = 0; b < bytes; b += 4) {
    if (Cell* cell = global_cell(reinterpret_cast<uintptr_t>(address + b))) {
      check_cell(*cell, write, "global memory", where);
    }
  }
}

// --- a launch -------------------------------------------------------------------------------------------------------

void choose_order() {
  if (machine.order.empty()) {
    const char* wanted = std::getenv("CUDA_ON_HOST_ORDER");
    machine.order = wanted != nullptr && *wanted != 0 ? wanted : "mixed";
  }
  const uint64_t launch = machine.launches++;
  machine.way = machine.order == "forward" ? 0 : machine.order == "reverse" ? 1 : 2;
  if (machine.order == "mixed") machine.way = static_cast<int>(launch % 3);
  machine.random.seed(std::strtoull(machine.order.c_str(), nullptr, 10) + launch);
}

void prepare() {
  const unsigned slots = machine.launch.cooperative ? machine.launch.grid.x : 1;
  const size_t count = size_t{slots} * machine.threads();
  if (machine.stacks == nullptr) {
    const auto map = [](size_t bytes, int protection) {
      return static_cast<char*>(mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    };
    machine.stacks = map(kMostFibers * (kStack + kPage), PROT_NONE);
    machine.slabs = map(size_t{kProcessors} * kBlocksOfProcessor * kSlab, PROT_READ | PROT_WRITE);
    machine.fibers.reserve(kMostFibers);  // they never move
  }
  while (machine.fibers.size() < count) {  // a page without access below each stack
    Fiber fiber;
    fiber.stack = machine.stacks + machine.fibers.size() * (kStack + kPage) + kPage;
    mprotect(fiber.stack, kStack, PROT_READ | PROT_WRITE);
    machine.fibers.push_back(fiber);
  }
  while (machine.blocks.size() < slots) machine.blocks.emplace_back();
  if (machine.shared_cells.size() < slots * kSlab / 4) machine.shared_cells.resize(slots * kSlab / 4);
}

// The blocks that were started, to their end.
void run_started(unsigned slots) {
  const unsigned all = slots * machine.threads();
  machine.done = 0;
  while (!machine.ready.empty() && machine.error.empty()) {
    const uint32_t next = machine.ready.top().second;
    machine.ready.pop();
    switch_to(machine.fibers[next]);
  }
  if (machine.error.empty() && machine.done < all) {
    // One that waits, and one that keeps it waiting: it has left, or waits for something else.
    const Fiber *waiting = nullptr, *other = nullptr;
    for (unsigned f = 0; f < all; ++f) {
      const Fiber& fiber = machine.fibers[f];
      if (fiber.state == Fiber::kWaiting && waiting == nullptr) waiting = &fiber;
      if (fiber.state == Fiber::kDone && other == nullptr) other = &fiber;
    }
    for (unsigned f = 0; f < all && other == nullptr; ++f) {
      if (machine.fibers[f].meeting != waiting->meeting) other = &machine.fibers[f];
    }
    fail("threads wait for ever: " + waits(*waiting) + (other == nullptr ? "" : "; " + waits(*other)));
  }
  while (!machine.ready.empty()) machine.ready.pop();
  for (unsigned b = 0; b < slots; ++b) count_traffic(machine.blocks[b]);
}

}  // namespace

Position position;

int meet_block(Meeting meeting, int vote, Site site) {
  Fiber& fiber = *machine.current;
  wait(meeting, site);
  fiber.vote = vote;
  if (++fiber.block->waiting == machine.threads()) release_block(*fiber.block);
  switch_to_host(false);
  return static_cast<int>(fiber.answer);
}

void meet_grid(Site site) {
  if (!machine.launch.cooperative) fail("grid.sync in a launch that is not cooperative, " + place(site));
  wait(Meeting::kGrid, site);
  if (++machine.waiting_grid == machine.launch.grid.x * machine.threads()) {
    machine.waiting_grid = 0;
    ++machine.met;
    for (unsigned f = 0; f < machine.launch.grid.x * machine.threads(); ++f) make_ready(machine.fibers[f]);
  }
  switch_to_host(false);
}

unsigned meet_warp(Meeting meeting, unsigned mask, int vote, Site site) {
  Fiber& fiber = *machine.current;
  wait(meeting, site);
  fiber.vote = vote;
  fiber.bytes = 0;
  wait_for_warp(mask);
  return fiber.answer;
}

void exchange(Meeting meeting, unsigned mask, void* value, size_t bytes, int argument, int width, Site site) {
  Fiber& fiber = *machine.current;
  wait(meeting, site);
  std::memcpy(fiber.value, value, bytes);
  fiber.bytes = bytes;
  fiber.argument = argument;
  fiber.width = width;
  wait_for_warp(mask);
  std::memcpy(value, fiber.value, bytes);
}

void* static_shared(const char* name, size_t bytes) {
  Block& block = *machine.current->block;
  size_t all = bytes;
  for (const SharedArray& array : block.arrays) {
    if (array.name == name) return block.slab + array.start;
    if (&array != &block.arrays.front()) all += array.bytes;
  }
  if (all > kSharedGiven) fail("more static shared memory than there is");
  return add_array(block, name, bytes);
}
void* dynamic_shared() { return machine.current->block->slab + machine.current->block->arrays.front().start; }

Watcher watcher = nullptr;

void watch(bool after, const Launch& of) {
  if (watcher == nullptr) return;
  watcher(after, of.kernel, of.grid.x, of.block.x, of.shared, of.arguments.size(), of.arguments.data(),
          of.sizes.data());
}

bool run(const Launch& launch) {
  watch(false, launch);
  const std::lock_guard<std::mutex> lock(machine.mutex);
  machine.error.clear();
  if (launch.grid.x == 0 || launch.block.x == 0 || launch.block.x > kMostThreads) {
    machine.error = "an invalid size of the grid or of a block";
  } else if (launch.shared > kSharedLargest) {
    machine.error = "more shared memory than there is";
  } else if (launch.cooperative && launch.grid.x > kProcessors * kBlocksOfProcessor) {
    machine.error = "more blocks than can run at once";
  }
  if (!machine.error.empty()) return false;
  runs_device = true;
  machine.launch = launch;
  machine.met = machine.waiting_grid = 0;
  choose_order();
  prepare();
  if (launch.cooperative) {
    for (unsigned b = 0; b < launch.grid.x; ++b) start_block(machine.blocks[b], b, {b}, b);
    run_started(launch.grid.x);
  } else {
    std::vector<uint32_t> order;
    for (uint32_t b = 0; b < launch.grid.x; ++b) order.push_back(machine.way == 1 ? launch.grid.x - 1 - b : b);
    if (machine.way == 2) {
      for (size_t b = order.size(); b-- > 1;) std::swap(order[b], order[machine.random() % (b + 1)]);
    }
    for (size_t b = 0; b < order.size() && machine.error.empty(); ++b) {
      start_block(machine.blocks[0], 0, {order[b]}, order[b]);
      run_started(1);
    }
  }
  clear_cells();
  runs_device = false;
  watch(true, launch);
  return machine.error.empty();
}

bool ask_for_shared(const void* kernel, size_t bytes) {
  const std::lock_guard<std::mutex> lock(machine.asking);
  size_t& asked = machine.asked.try_emplace(kernel, kSharedGiven).first->second;
  if (bytes > kSharedLargest) {
    refuse("more shared memory than there is");
  } else if (bytes < asked) {
    refuse("less shared memory than before, which another thread may be about to use");
  } else {
    asked = bytes;
    return true;
  }
  return false;
}
size_t shared_asked_for(const void* kernel) {
  const std::lock_guard<std::mutex> lock(machine.asking);
  return machine.asked.try_emplace(kernel, kSharedGiven).first->second;
}

const char* report() { return machine.error.c_str(); }
void refuse(const char* why) { machine.error = why; }

}  // namespace cuda_on_host

// "forward", "reverse", "mixed" (the default: these and random ones in turn), or the seed of random orders.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_order(const char* order) {
  cuda_on_host::machine.order = order;
  cuda_on_host::machine.launches = 0;
}

// Whether races in global memory are errors.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_watch_global(int watch) {
  cuda_on_host::machine.watches_global = watch != 0;
}

// nullptr: no longer.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_watch_launches(cuda_on_host::Watcher watcher) {
  cuda_on_host::watcher = watcher;
}

// Starts or stops counting what accesses cost. `found`: the wavefronts so far and the fewest possible for these bytes,
// then the sectors and the fewest possible.
extern "C" __attribute__((visibility("default"))) void cuda_on_host_count(int counts, uint64_t* found) {
  using namespace cuda_on_host;
  const Traffic& now = machine.traffic;
  found[0] = now.wavefronts, found[1] = now.best_wavefronts, found[2] = now.sectors, found[3] = now.best_sectors;
  machine.traffic = {};
  machine.counts = counts != 0;
}

// --- what -fsanitize=thread calls -----------------------------------------------------------------------------------

#if defined(CUDA_ON_HOST_RACES)
#define ACCESS(name, bytes, write) \
  extern "C" void name(void* at) { cuda_on_host::check_access(at, bytes, write, __builtin_return_address(0)); }
#define ACCESSES(bytes)                              \
  ACCESS(__tsan_read##bytes, bytes, false)           \
  ACCESS(__tsan_write##bytes, bytes, true)           \
  ACCESS(__tsan_unaligned_read##bytes, bytes, false) \
  ACCESS(__tsan_unaligned_write##bytes, bytes, true) \
  ACCESS(__tsan_volatile_read##bytes, bytes, false)  \
  ACCESS(__tsan_volatile_write##bytes, bytes, true)
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) {
  cuda_on_host::check_access(at, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
  cuda_on_host::check_access(at, bytes, true, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" void __tsan_vptr_update(void**, void*) {}
// host code alone has these: reference counts
extern "C" int __tsan_atomic32_load(const volatile int* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
extern "C" int __tsan_atomic32_fetch_add(volatile int* at, int value, int) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
extern "C" int __tsan_atomic32_fetch_sub(volatile int* at, int value, int) {
  return __atomic_fetch_sub(at, value, __ATOMIC_SEQ_CST);
}
extern "C" char __tsan_atomic8_load(const volatile char* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
extern "C" long __tsan_atomic64_load(const volatile long* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
#endif
