// Small kernels, right and wrong ones, that test the host's device itself: what it computes and what it finds.
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

namespace {

constexpr int kThreads = 64, kBlocks = 3;
constexpr unsigned kAll = 0xffffffffu;
double out[1024];

template <class... Arguments>
bool launch(void (*kernel)(Arguments...), int blocks, int threads, size_t shared, bool cooperative,
            Arguments... given) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (double& value : out) value = -1;
  return cudaLaunchKernelEx(&config, kernel, given...) == cudaSuccess;
}

int thread() { return static_cast<int>(threadIdx.x); }
int block() { return static_cast<int>(blockIdx.x); }

// --- right ones -----------------------------------------------------------------------------------------------------

__global__ void reduction() {
  __shared__ double sums[kThreads];
  for (int round = 0; round < 2; ++round) {
    __syncthreads();
    sums[thread()] = thread() + round + block();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (thread() < half) sums[thread()] += sums[thread() + half];
    }
    __syncthreads();
    if (thread() == round) out[2 * block() + round] = sums[0];
  }
}

// A warp writes and reads numbers `step` apart.
__global__ void strided(int step) {
  extern __shared__ float numbers[];
  numbers[thread() * step] = static_cast<float>(thread());
  __syncwarp();
  out[thread()] = numbers[thread() * step];
}

__global__ void votes() {
  const int t = thread(), lane = t % 32;
  if (__syncthreads_count(t < 5) != 5 || __syncthreads_or(t == 9) == 0 || __syncthreads_and(t != 9) != 0) return;
  const unsigned ballot = __ballot_sync(kAll, lane % 2), half = lane < 16 ? 0xffffu : 0xffff0000u;
  const bool right = ballot == 0xaaaaaaaau && __any_sync(kAll, lane == 3) && !__all_sync(kAll, lane == 3) &&
                     __ballot_sync(half, 1) == half && __shfl_sync(kAll, lane, 7) == 7 &&
                     __shfl_sync(kAll, lane, 7, 16) == (lane < 16 ? 7 : 23) &&
                     __shfl_up_sync(kAll, lane, 3) == (lane < 3 ? lane : lane - 3) &&
                     __shfl_down_sync(kAll, lane, 3, 8) == (lane % 8 > 4 ? lane : lane + 3) &&
                     __shfl_xor_sync(kAll, double(lane), 5) == (lane ^ 5) &&
                     __shfl_xor_sync(half, lane, 8) == (lane ^ 8);
  out[t] = right;
}

__global__ void grid(double* parts, unsigned long long* count) {
  __shared__ double first[1];
  if (thread() == 0) parts[block()] = block() + 1, first[0] = block();
  atomicAdd(count, 1ull);
  cooperative_groups::this_grid().sync();
  if (thread() == 1) out[block()] = parts[(block() + 1) % kBlocks] + first[0];
}

__global__ void dynamic(int count) {
  extern __shared__ double2 memory[];
  double* values = reinterpret_cast<double*>(memory);
  for (int i = thread(); i < count; i += 32) values[i] = i;
  __syncwarp();
  for (int i = thread(); i < count; i += 32) out[i] = values[count - 1 - i];
}

__global__ void unwritten() {
  __shared__ float values[kThreads];
  if (thread() != 5) values[thread()] = 1;
  __syncthreads();
  out[thread()] = values[thread()];
}

// --- wrong ones -----------------------------------------------------------------------------------------------------

__global__ void missing_barrier() {
  __shared__ double values[kThreads];
  values[thread()] = thread();
  out[thread()] = values[kThreads - 1 - thread()];
}
__global__ void missing_barrier_before_writing() {
  __shared__ double values[kThreads];
  values[thread()] = thread();
  __syncthreads();
  const double read = values[kThreads - 1 - thread()];
  values[thread()] = read;
}
__global__ void missing_syncwarp() {
  __shared__ double values[32];
  values[thread()] = thread();
  const double other = __shfl_xor_sync(kAll, 1.0, 1);  // orders nothing
  out[thread()] = values[thread() ^ 1] + other;
}
__global__ void missing_barrier_between_warps() {
  __shared__ double values[kThreads];
  values[thread()] = thread();
  __syncwarp();
  out[thread()] = values[kThreads - 1 - thread()];
}
__global__ void barrier_of_some() {
  if (thread() < 40) __syncthreads();
}
__global__ void barrier_after_leaving() {
  if (thread() == 7) return;
  __syncthreads();
}
__global__ void two_barriers() {
  if (thread() < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void two_kinds_of_barrier() {
  if (thread() < 32) {
    __syncthreads_or(1);
  } else {
    __syncthreads();
  }
}
__global__ void shuffle_after_leaving() {
  if (thread() == 3) return;
  out[thread()] = __shfl_xor_sync(kAll, 1.0, 1);
}
__global__ void shuffle_from_outside_of_the_mask() {
  if (thread() < 16) out[thread()] = __shfl_sync(0xffffu, 1.0, 20);
}
__global__ void mask_without_oneself() { __syncwarp(0xffffu); }
__global__ void two_masks() { __syncwarp(thread() == 0 ? 3u : kAll); }
__global__ void two_kinds_of_meeting() {
  if (thread() < 16) {
    __syncwarp();
  } else {
    out[thread()] = __shfl_xor_sync(kAll, 1.0, 1);
  }
}
__global__ void beyond_the_end() {
  __shared__ double values[kThreads];
  values[thread() + 1] = 1;
}
__global__ void before_the_start() {
  __shared__ int values[kThreads];
  out[thread()] = values[thread() - 1];
}
__global__ void beyond_dynamic_memory(int count) {
  extern __shared__ double memory[];
  if (thread() == 9) memory[count] = 1;
}
__global__ void one_place_for_all_blocks() {
  if (thread() == 0) out[0] = block();
}
__global__ void one_place_for_two_threads() { out[thread() / 2] = thread(); }
__global__ void missing_grid_sync() {
  if (thread() == 0) out[block()] = block();
  __syncthreads();
  if (thread() == 1) out[10 + block()] = out[(block() + 1) % kBlocks];
}
__global__ void grid_sync() { cooperative_groups::this_grid().sync(); }
__global__ void grid_sync_of_some() {
  if (block() != 1) cooperative_groups::this_grid().sync();
}
__global__ void much_static_memory() {
  __shared__ double values[7000];
  values[thread()] = 1;
}

std::string check(const std::function<double(int)>& expected, int count) {
  for (int i = 0; i < count; ++i) {
    const double wanted = expected(i);
    if (!(out[i] == wanted || (wanted != wanted && out[i] != out[i]))) {
      return "out[" + std::to_string(i) + "] is " + std::to_string(out[i]);
    }
  }
  return "";
}

std::string run(const std::string& name) {
  const auto with = [](bool done, const std::function<double(int)>& expected, int count) {
    return done ? check(expected, count) : std::string(cuda_on_host::report());
  };
  const auto alone = [&](void (*kernel)(), int blocks = 1, int threads = kThreads, bool cooperative = false) {
    return launch(kernel, blocks, threads, 0, cooperative) ? std::string() : std::string(cuda_on_host::report());
  };
  if (name == "reduction") {
    return with(
        launch(reduction, kBlocks, kThreads, 0, false), [](int i) { return 2016.0 + 64 * (i / 2) + 64 * (i % 2); },
        2 * kBlocks);
  }
  if (name == "votes") return with(launch(votes, 1, kThreads, 0, false), [](int) { return 1.0; }, kThreads);
  if (name == "grid") {
    static double parts[kBlocks];
    static unsigned long long count;
    count = 0;
    const bool done = launch(grid, kBlocks, kThreads, 0, true, static_cast<double*>(parts), &count);
    if (done && count != kBlocks * kThreads) return "the count is " + std::to_string(count);
    return with(done, [](int i) { return (i + 1) % kBlocks + 1.0 + i; }, kBlocks);
  }
  if (name == "dynamic") {
    return with(launch(dynamic, 1, 32, 100 * sizeof(double), false, 100), [](int i) { return 99.0 - i; }, 100);
  }
  if (name == "unwritten") {
    return with(
        launch(unwritten, 1, kThreads, 0, false),
        [](int i) { return i == 5 ? std::numeric_limits<double>::quiet_NaN() : 1.0; }, kThreads);
  }
  if (name.rfind("strided ", 0) == 0) {
    const int step = std::stoi(name.substr(8));
    const size_t bytes = 32 * static_cast<size_t>(step) * sizeof(float);
    return with(launch(strided, 1, 32, bytes, false, step), [](int i) { return double(i); }, 32);
  }
#define ALONE(kernel, ...) \
  if (name == #kernel) return alone(kernel, ##__VA_ARGS__);
  ALONE(missing_barrier)
  ALONE(missing_barrier_before_writing)
  ALONE(missing_syncwarp, 1, 32)
  ALONE(missing_barrier_between_warps)
  ALONE(barrier_of_some)
  ALONE(barrier_after_leaving)
  ALONE(two_barriers)
  ALONE(two_kinds_of_barrier)
  ALONE(shuffle_after_leaving)
  ALONE(shuffle_from_outside_of_the_mask, 1, 32)
  ALONE(mask_without_oneself)
  ALONE(two_masks)
  ALONE(two_kinds_of_meeting)
  ALONE(beyond_the_end)
  ALONE(before_the_start)
  ALONE(one_place_for_all_blocks, kBlocks)
  ALONE(one_place_for_two_threads)
  ALONE(missing_grid_sync, kBlocks, kThreads, true)
  ALONE(grid_sync)
  ALONE(grid_sync_of_some, kBlocks, kThreads, true)
  ALONE(much_static_memory)
  if (name == "beyond_dynamic_memory") {
    return launch(beyond_dynamic_memory, 1, 32, 31 * sizeof(double), false, 31) ? "" : cuda_on_host::report();
  }
  if (name == "too_many_threads") return alone(reduction, 1, 2000);
  if (name == "memory_not_asked_for") {
    return launch(dynamic, 1, 32, 50 * 1024, false, 1) ? "" : cuda_on_host::report();
  }
  return "no such kernel";
}

}  // namespace

// What was found wrong with a kernel; nothing if it is right.
extern "C" __attribute__((visibility("default"))) const char* cuda_on_host_sample(const char* name) {
  static std::string result;
  result = run(name);
  return result.c_str();
}
