// What the kernels ask of torch about the device, answered for the host; and new tensors are full of nan (0xff), so
// that an element that no kernel writes shows.
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <string_view>

namespace {

AOTITorchError fill(AtenTensorHandle tensor) {
  void* data = nullptr;
  int64_t bytes = 0;
  if (aoti_torch_get_data_ptr(tensor, &data) != 0 || aoti_torch_get_storage_size(tensor, &bytes) != 0) return 1;
  if (bytes > 0) std::memset(data, 0xff, static_cast<size_t>(bytes));
  return 0;
}

}  // namespace

extern "C" {

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return 0;
}
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }

// The linker gives these in place of the functions without a prefix, which become __real_.
AOTITorchError __real_aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                                               AtenTensorHandle*);
AOTITorchError __wrap_aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t* strides,
                                               int32_t dtype, int32_t device_type, int32_t device,
                                               AtenTensorHandle* made) {
  const AOTITorchError error = __real_aoti_torch_empty_strided(dims, sizes, strides, dtype, device_type, device, made);
  return error != 0 ? error : fill(*made);
}

AOTITorchError __real_torch_call_dispatcher(const char*, const char*, StableIValue*, uint64_t);
AOTITorchError __wrap_torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                            uint64_t version) {
  const AOTITorchError error = __real_torch_call_dispatcher(name, overload, stack, version);
  const std::string_view called(name);
  const bool is_new = called == "aten::empty" || called == "aten::empty_like" || called == "aten::new_empty";
  return error != 0 || !is_new ? error : fill(reinterpret_cast<AtenTensorHandle>(stack[0]));
}
}
