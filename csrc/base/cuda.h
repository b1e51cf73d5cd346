// The one place where kernels are launched: on the current stream of a tensor's device, without synchronizing.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "abi.h"
#include "driver.h"

namespace manualgrad {
namespace {

// More shared memory than this has to be requested.
constexpr size_t kGivenShared = 48 * 1024;

// Makes the device of `like` the current one while this object lives. `where` is the prefix of error messages.
class Stream {
 public:
  Stream(const char* where, const Tensor& like)
      : where_(where), device_(like.get_device_index()), guard_(like.get_device_index()) {
    void* found = nullptr;
    MANUALGRAD_CHECK(aoti_torch_get_current_cuda_stream(device_, &found) == 0, where_, "no current stream on device ",
                     device_);
    stream_ = static_cast<cudaStream_t>(found);
  }

  // Launches kernel(arguments...) with `blocks` blocks of `threads` threads, each block with `shared` bytes of dynamic
  // shared memory.
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared,
              const Arguments&... arguments) const {
    start(kernel, blocks, threads, shared, 0, arguments...);
  }

  // The same with up to `blocks` blocks, which all run at once and can wait for each other.
  template <class... Parameters, class... Arguments>
  void launch_cooperative(void (*kernel)(Parameters...), int64_t blocks, int threads,
                          const Arguments&... arguments) const {
    int processors = 0, resident = 0;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device_), "the device");
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0), "the occupancy");
    start(kernel, std::min<int64_t>(blocks, int64_t{processors} * resident), threads, 0, 1, arguments...);
  }

  void clear(void* memory, size_t bytes) const { check(cudaMemsetAsync(memory, 0, bytes, stream_), "clearing memory"); }

 private:
  void check(cudaError_t error, const char* what) const {
    MANUALGRAD_CHECK(error == cudaSuccess, where_, what, ": ", cudaGetErrorString(error));
  }

  template <class... Parameters, class... Arguments>
  void start(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, int cooperative,
             const Arguments&... arguments) const {
    if (shared > kGivenShared) {
      // always the maximum: a smaller request could come between another thread's request and its launch
      int most = 0;
      cudaFuncAttributes of_kernel{};
      check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_), "the device");
      check(cudaFuncGetAttributes(&of_kernel, kernel), "the kernel");
      most -= static_cast<int>(of_kernel.sharedSizeBytes);
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most), "shared memory");
    }
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = cooperative;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, arguments...), "the launch");
  }

  const char* where_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Registers nothing if the driver is too old.
#define MANUALGRAD_REGISTER_CUDA(...)                                         \
  STABLE_TORCH_LIBRARY_IMPL(manualgrad, CUDA, library) {                      \
    if (manualgrad::cuda_obstacle() == nullptr) __VA_ARGS__::add_to(library); \
  }

}  // namespace
}  // namespace manualgrad
