// A stand-in for CUDA's header: as much of it as the kernels use, on the host. See ../machine.h.
#pragma once

#include "../machine.h"

#include <cstring>

// From here on sources take the way of the device, and register their kernels for the CPU.
#define __CUDA_ARCH__ 800
#define CUDA CPU

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define CUDART_VERSION 13000

using dim3 = cuda_on_host::Dim3;
struct alignas(16) double2 {
  double x, y;
};

inline constexpr const dim3& threadIdx = cuda_on_host::position.thread;
inline constexpr const dim3& blockIdx = cuda_on_host::position.block;
inline constexpr const dim3& blockDim = cuda_on_host::position.block_size;
inline constexpr const dim3& gridDim = cuda_on_host::position.grid_size;

#define CUDA_ON_HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// --- waiting --------------------------------------------------------------------------------------------------------

inline void __syncthreads(CUDA_ON_HOST_SITE) {
  cuda_on_host::meet_block(cuda_on_host::Meeting::kBlock, 0, {file, line});
}
inline int __syncthreads_and(int vote, CUDA_ON_HOST_SITE) {
  return cuda_on_host::meet_block(cuda_on_host::Meeting::kBlockAnd, vote, {file, line});
}
inline int __syncthreads_or(int vote, CUDA_ON_HOST_SITE) {
  return cuda_on_host::meet_block(cuda_on_host::Meeting::kBlockOr, vote, {file, line});
}
inline int __syncthreads_count(int vote, CUDA_ON_HOST_SITE) {
  return cuda_on_host::meet_block(cuda_on_host::Meeting::kBlockCount, vote, {file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_ON_HOST_SITE) {
  cuda_on_host::meet_warp(cuda_on_host::Meeting::kWarp, mask, 0, {file, line});
}
inline int __all_sync(unsigned mask, int vote, CUDA_ON_HOST_SITE) {
  return static_cast<int>(cuda_on_host::meet_warp(cuda_on_host::Meeting::kWarpAll, mask, vote, {file, line}));
}
inline int __any_sync(unsigned mask, int vote, CUDA_ON_HOST_SITE) {
  return static_cast<int>(cuda_on_host::meet_warp(cuda_on_host::Meeting::kWarpAny, mask, vote, {file, line}));
}
inline unsigned __ballot_sync(unsigned mask, int vote, CUDA_ON_HOST_SITE) {
  return cuda_on_host::meet_warp(cuda_on_host::Meeting::kWarpBallot, mask, vote, {file, line});
}

#define CUDA_ON_HOST_SHUFFLE(name, meeting, type)                                                                      \
  template <class T>                                                                                                   \
  T name(unsigned mask, T value, type argument, int width = 32, CUDA_ON_HOST_SITE) {                                   \
    static_assert(std::is_arithmetic_v<T>, "CUDA shuffles numbers");                                                   \
    cuda_on_host::exchange(cuda_on_host::Meeting::meeting, mask, &value, sizeof(T), static_cast<int>(argument), width, \
                           {file, line});                                                                              \
    return value;                                                                                                      \
  }
CUDA_ON_HOST_SHUFFLE(__shfl_sync, kShuffle, int)
CUDA_ON_HOST_SHUFFLE(__shfl_up_sync, kShuffleUp, unsigned)
CUDA_ON_HOST_SHUFFLE(__shfl_down_sync, kShuffleDown, unsigned)
CUDA_ON_HOST_SHUFFLE(__shfl_xor_sync, kShuffleXor, int)
#undef CUDA_ON_HOST_SHUFFLE

// --- atomics: no other thread runs meanwhile, and they are no races
// ---------------------------------------------------

#define CUDA_ON_HOST_ATOMIC(name, result)                         \
  template <class T>                                              \
  __attribute__((no_sanitize("thread"))) T name(T* at, T value) { \
    const T old = *at;                                            \
    *at = result;                                                 \
    return old;                                                   \
  }
CUDA_ON_HOST_ATOMIC(atomicAdd, old + value)
CUDA_ON_HOST_ATOMIC(atomicExch, value)
CUDA_ON_HOST_ATOMIC(atomicMax, old < value ? value : old)
CUDA_ON_HOST_ATOMIC(atomicMin, value < old ? value : old)
CUDA_ON_HOST_ATOMIC(atomicOr, old | value)
#undef CUDA_ON_HOST_ATOMIC
template <class T>
__attribute__((no_sanitize("thread"))) T atomicCAS(T* at, T expected, T value) {
  const T old = *at;
  if (old == expected) *at = value;
  return old;
}

template <class T>
T __ldg(const T* at) {
  return *at;
}

// --- the runtime ----------------------------------------------------------------------------------------------------

using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int cooperative;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t) { return cuda_on_host::report(); }
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const bool of_shared = which == cudaDevAttrMaxSharedMemoryPerBlockOptin;
  *value = of_shared ? static_cast<int>(cuda_on_host::kSharedLargest) : cuda_on_host::kProcessors;
  return cudaSuccess;
}
// The static memory is known only once a block runs, which then refuses too much of both.
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, Kernel*) {
  of->sharedSizeBytes = 0;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel*, int, size_t) {
  *blocks = cuda_on_host::kBlocksOfProcessor;
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  const bool given = cuda_on_host::ask_for_shared(reinterpret_cast<const void*>(kernel), static_cast<size_t>(bytes));
  return given ? cudaSuccess : cudaErrorInvalidValue;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((size_t{0} + ... + sizeof(Parameters)) <= 4096, "the arguments of a launch");
  if (config->dynamicSmemBytes > cuda_on_host::shared_asked_for(reinterpret_cast<const void*>(kernel))) {
    cuda_on_host::refuse("more shared memory than was asked for");
    return cudaErrorInvalidValue;
  }
  const cuda_on_host::Call<Parameters...> call{kernel, {static_cast<Parameters>(arguments)...}};
  bool cooperative = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) cooperative |= config->attrs[i].val.cooperative != 0;
  const cuda_on_host::Launch launch{config->gridDim,
                                    config->blockDim,
                                    config->dynamicSmemBytes,
                                    cooperative,
                                    &call.run,
                                    &call,
                                    reinterpret_cast<const void*>(kernel),
                                    call.addresses(),
                                    {sizeof(Parameters)...}};
  return cuda_on_host::run(launch) ? cudaSuccess : cudaErrorLaunchFailure;
}
