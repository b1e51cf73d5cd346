// Queries the installed driver through the CUDA runtime that this library carries.
#include "driver.h"

#include <cuda_runtime.h>

#include <string>

namespace manualgrad {

const char* cuda_obstacle() {
  static const std::string obstacle = []() -> std::string {
    int driver = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver";
    if (driver / 1000 >= CUDART_VERSION / 1000) return "";
    return "the driver supports CUDA " + std::to_string(driver / 1000) + ", the kernels need " +
           std::to_string(CUDART_VERSION / 1000);
  }();
  return obstacle.empty() ? nullptr : obstacle.c_str();
}

}  // namespace manualgrad

extern "C" __attribute__((visibility("default"))) const char* manualgrad_cuda_obstacle() {
  return manualgrad::cuda_obstacle();
}
