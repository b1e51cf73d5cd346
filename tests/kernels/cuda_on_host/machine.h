// A device of the host: what the stand-ins for CUDA's headers (include/) are made of. Blocks run one after the other,
// or all at once where they wait for each other; each thread of a block is a fiber, which runs until it has to wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

namespace cuda_on_host {

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// --- for kernels ----------------------------------------------------------------------------------------------------

// Of the thread that runs.
struct Position {
  Dim3 thread, block, block_size, grid_size;
};
extern Position position;

// What threads wait for together. All that meet must ask for the same, and a block's also at the same line.
enum class Meeting {
  kBlock,
  kBlockAnd,
  kBlockOr,
  kBlockCount,
  kGrid,
  kWarp,
  kWarpAll,
  kWarpAny,
  kWarpBallot,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
};

struct Site {
  const char* file;
  int line;
};

int meet_block(Meeting meeting, int vote, Site site);
void meet_grid(Site site);
unsigned meet_warp(Meeting meeting, unsigned mask, int vote, Site site);
// value: in and out, `bytes` up to 16.
void exchange(Meeting meeting, unsigned mask, void* value, size_t bytes, int argument, int width, Site site);

// The same memory for all threads of a block, each byte 0xff when it starts. `name` tells arrays apart.
void* static_shared(const char* name, size_t bytes);
void* dynamic_shared();

template <class T, size_t Count>
using Array = T[Count];
template <class T, size_t Count>
Array<T, Count>& static_shared_array(const char* name) {
  return *static_cast<Array<T, Count>*>(static_shared(name, sizeof(T) * Count));
}

// --- for the host ---------------------------------------------------------------------------------------------------

constexpr int kProcessors = 2, kBlocksOfProcessor = 2;
// What a device with compute capability 8.6 has for a block: without asking, and at most.
constexpr size_t kSharedGiven = 48 * 1024, kSharedLargest = 99 * 1024;

struct Launch {
  Dim3 grid, block;
  size_t shared;
  bool cooperative;
  void (*call)(const void* of);
  const void* of;
  const void* kernel;
  std::vector<const void*> arguments;
  std::vector<size_t> sizes;  // of the arguments
};

// Called before and after each launch.
using Watcher = void (*)(int after, const void* kernel, unsigned blocks, unsigned threads, size_t shared, size_t count,
                         const void* const* arguments, const size_t* sizes);

// The dynamic shared memory of each kernel; asking for less than before is refused, as another thread may be about to
// use it.
bool ask_for_shared(const void* kernel, size_t bytes);
size_t shared_asked_for(const void* kernel);

// False if the kernel did what no kernel may do; report() then says what.
bool run(const Launch& launch);
const char* report();
void refuse(const char* why);

template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;
  static void run(const void* of) {
    const Call& call = *static_cast<const Call*>(of);
    std::apply(call.kernel, call.arguments);
  }
  std::vector<const void*> addresses() const {
    return std::apply([](const auto&... x) { return std::vector<const void*>{&x...}; }, arguments);
  }
};

}  // namespace cuda_on_host
