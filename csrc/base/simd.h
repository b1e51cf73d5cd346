// One body of code, compiled for the vectors of several instruction sets and chosen when it runs. Host code.
#pragma once

#include <cstdlib>
#include <string_view>
#include <type_traits>

namespace manualgrad {

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

// A scalar baseline: there is hardly a processor without AVX2, so kernels in lanes take one matrix at a time there.
inline constexpr bool kBaselineHasLanes = false;

template <class Body>
struct Multiversion {
  template <class... Args>
  __attribute__((noinline, target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))) static void avx512(
      const Args&... args) {
    Body::run(args...);
  }
  template <class... Args>
  __attribute__((noinline, target("avx2,fma"))) static void avx2(const Args&... args) {
    Body::run(args...);
  }
  template <class... Args>
  __attribute__((noinline)) static void baseline(const Args&... args) {
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
// Body::run(args...) in vectors of so many bytes, by a function of its own.
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
inline constexpr bool kBaselineHasLanes = true;

template <class Body>
struct Multiversion {
  template <class... Args>
  __attribute__((noinline)) static void call(const Args&... args) {
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
