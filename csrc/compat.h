// Everything the kernels need from outside the standard library, in one place: torch's stable ABI, argument checks,
// element types, dispatch over dtypes and over instruction sets. No other file names torch.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define HOST_DEVICE inline __attribute__((always_inline))
#else
#define HOST_DEVICE inline
#endif

namespace manualgrad {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Half = torch::headeronly::Half;
using BFloat16 = torch::headeronly::BFloat16;
using Dims = std::optional<std::vector<int64_t>>;

// --- errors ---------------------------------------------------------------------------------------------------------

template <class... Parts>
[[noreturn]] inline void raise(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// The message is built only when the check fails.
#define MANUALGRAD_CHECK(condition, ...) \
  do {                                   \
    if (!(condition)) {                  \
      ::manualgrad::raise(__VA_ARGS__);  \
    }                                    \
  } while (0)

inline std::string dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::ComplexHalf:
      return "torch.complex32";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string list(const int64_t* values, int64_t count) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < count; ++i) {
    text << (i ? ", " : "") << values[i];
  }
  text << ']';
  return text.str();
}

// --- tensors --------------------------------------------------------------------------------------------------------

// A tensor's geometry, borrowed: valid as long as the tensor is, and not resized.
struct Geometry {
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dim;
};

inline Geometry geometry(const Tensor& tensor) {
  return {tensor.sizes().data(), tensor.strides().data(), tensor.dim()};
}

// torch.empty_like; for contiguous tensors without the detour through the dispatcher, which costs a small call the
// most.
inline Tensor allocate_like(const Tensor& self) {
  if (!self.is_contiguous()) return torch::stable::empty_like(self);
  const Geometry like = geometry(self);
  int32_t dtype = 0, device = 0;
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(self.get(), &dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(self.get(), &device));
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(like.dim, like.sizes, like.strides, dtype, device, self.get_device_index(), &made));
  return Tensor(made);
}

inline bool same_device(const Tensor& left, const Tensor& right) {
  return left.is_cpu() == right.is_cpu() && left.is_cuda() == right.is_cuda() &&
         left.get_device_index() == right.get_device_index();
}

// --- element types: S is what memory holds, Compute<S> what arithmetic uses -----------------------------------------

template <class T>
struct Complex {
  T re, im;
};

template <class S>
struct ElementTraits {
  using compute = S;
  using real = S;
};
template <>
struct ElementTraits<Half> {
  using compute = float;
  using real = Half;
};
template <>
struct ElementTraits<BFloat16> {
  using compute = float;
  using real = BFloat16;
};
template <class T>
struct ElementTraits<Complex<T>> {
  using compute = Complex<typename ElementTraits<T>::compute>;
  using real = T;
};

template <class S>
using Compute = typename ElementTraits<S>::compute;
// The real dtype that belongs to S, as stored (norms and their cotangents), and as computed with.
template <class S>
using Real = typename ElementTraits<S>::real;
template <class S>
using RealCompute = Compute<Real<S>>;

template <class S>
HOST_DEVICE Compute<S> load(const S& value) {
  return static_cast<Compute<S>>(value);
}
template <class T>
HOST_DEVICE Complex<Compute<T>> load(const Complex<T>& value) {
  return {load(value.re), load(value.im)};
}
template <class S>
HOST_DEVICE void store(S& target, Compute<S> value) {
  target = static_cast<S>(value);
}
template <class T>
HOST_DEVICE void store(Complex<T>& target, Complex<Compute<T>> value) {
  store(target.re, value.re);
  store(target.im, value.im);
}

template <class S>
struct Tag {
  using type = S;
};

// The dtype of the norm of a tensor of this dtype.
inline ScalarType real_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::ComplexHalf:
      return ScalarType::Half;
    case ScalarType::ComplexFloat:
      return ScalarType::Float;
    case ScalarType::ComplexDouble:
      return ScalarType::Double;
    default:
      return type;
  }
}

// Calls f(Tag<S>{}) with the storage type of the dtype; `where` opens the message of the error.
template <class F>
inline void dispatch_inexact(ScalarType type, const char* where, const F& f) {
  switch (type) {
    case ScalarType::Float:
      return f(Tag<float>{});
    case ScalarType::Double:
      return f(Tag<double>{});
    case ScalarType::Half:
      return f(Tag<Half>{});
    case ScalarType::BFloat16:
      return f(Tag<BFloat16>{});
    case ScalarType::ComplexHalf:
      return f(Tag<Complex<Half>>{});
    case ScalarType::ComplexFloat:
      return f(Tag<Complex<float>>{});
    case ScalarType::ComplexDouble:
      return f(Tag<Complex<double>>{});
    default:
      raise(where, "expected a floating point or complex dtype, got ", dtype_name(type));
  }
}

// --- threads and instruction sets (host code) -----------------------------------------------------------------------

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kGrain = 32768;

// f(begin, end) over [0, count), in the calling thread when there is no more than a grain of work.
template <class F>
inline void parallel_for(int64_t count, int64_t grain, const F& f) {
  if (count <= grain) {
    f(int64_t{0}, count);
  } else {
    torch::stable::parallel_for(0, count, grain, f);
  }
}

// Multiversion<Body>::call(args...) runs Body::run(args...) compiled for the best instruction set of the processor at
// hand. Body::run, and all it calls, must be HOST_DEVICE (always inlined), or it keeps the baseline's instructions.
// Sanitizers want one copy of the code; other architectures have their vectors (NEON) in the baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__) && !defined(MANUALGRAD_SANITIZE)
inline int instruction_set() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    return 0;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (const char* wanted = std::getenv("ATEN_CPU_CAPABILITY")) {
    if (std::string_view(wanted) == "default") return 0;
    if (std::string_view(wanted) == "avx2") return 1;
  }
  return avx512 ? 2 : 1;
}
inline const int kInstructionSet = instruction_set();

template <class Body>
struct Multiversion {
  template <class... Args>
  __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))) static void avx512(const Args&... args) {
    Body::run(args...);
  }
  template <class... Args>
  __attribute__((target("avx2,fma"))) static void avx2(const Args&... args) {
    Body::run(args...);
  }
  template <class... Args>
  static void baseline(const Args&... args) {
    Body::run(args...);
  }
  template <class... Args>
  static void call(const Args&... args) {
    switch (kInstructionSet) {
      case 2:
        return avx512(args...);
      case 1:
        return avx2(args...);
      default:
        return baseline(args...);
    }
  }
};

// f(std::integral_constant<int, B>{}) with the bytes B of the widest vectors of the processor at hand; what f runs by
// run_native<B> is compiled for those.
template <class F>
void with_native(const F& f) {
  switch (kInstructionSet) {
    case 2:
      return f(std::integral_constant<int, 64>{});
    case 1:
      return f(std::integral_constant<int, 32>{});
    default:
      return f(std::integral_constant<int, 16>{});
  }
}
template <int Bytes, class Body, class... Args>
void run_native(const Args&... args) {
  if constexpr (Bytes == 64) {
    Multiversion<Body>::avx512(args...);
  } else if constexpr (Bytes == 32) {
    Multiversion<Body>::avx2(args...);
  } else {
    Multiversion<Body>::baseline(args...);
  }
}
#else
template <class Body>
struct Multiversion {
  template <class... Args>
  static void call(const Args&... args) {
    Body::run(args...);
  }
};

template <class F>
void with_native(const F& f) {
  f(std::integral_constant<int, 16>{});
}
template <int Bytes, class Body, class... Args>
void run_native(const Args&... args) {
  Multiversion<Body>::call(args...);
}
#endif

}  // namespace manualgrad
