// One body of code, compiled for the vectors of several instruction sets and chosen when it runs. Host code.
#pragma once

#include <cstdlib>
#include <string_view>
#include <type_traits>

#include "../math/element.h"

namespace manualgrad {

// Body::run(args...) in a function of its own, compiled for an instruction set. Body::run and all functions that it
// calls must always be inlined (HOST_DEVICE, HOST_INLINE), or they keep the baseline's instructions.
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED void run_baseline(const Args&... args) {
  Body::run(args...);
}
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED void shared_baseline(const Args&... args);

// Multiversion<Body>::call(args...) runs Body::run(args...) compiled for the best instruction set of the current
// processor, or Baseline::run(args...) on x86 without AVX2.
// There is only one copy of the code with sanitizers, and on other architectures, whose vectors (NEON) belong to the
// baseline.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__) && !defined(MANUALGRAD_SANITIZE)
#define MANUALGRAD_MULTIVERSION

#define MANUALGRAD_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define MANUALGRAD_AVX2 __attribute__((target("avx2,fma")))
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_AVX512 void run_avx512(const Args&... args) {
  Body::run(args...);
}
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_AVX2 void run_avx2(const Args&... args) {
  Body::run(args...);
}

// x86 without AVX2 is rare, so this is optimized for size, without vectors.
#ifdef __clang__
#define MANUALGRAD_SMALL
#else
#define MANUALGRAD_SMALL __attribute__((optimize("Os")))
#endif
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_SMALL void run_small(const Args&... args) {
  Body::run(args...);
}

// The same functions for bodies that many kernels share: not defined here, but compiled once, in
// linalg/blas/shared_loops.cpp.
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_AVX512 void shared_avx512(const Args&... args);
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_AVX2 void shared_avx2(const Args&... args);
template <class Body, class... Args>
MANUALGRAD_NOT_INLINED MANUALGRAD_SMALL void shared_small(const Args&... args);

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

// Without AVX2 kernels take one matrix at a time.
inline constexpr bool kBaselineHasLanes = false;

template <class Body, class Baseline = Body>
struct Multiversion {
  template <class... Args>
  static void call(const Args&... args) {
    switch (kInstructionSet) {
      case 2:
        return run_avx512<Body>(args...);
      case 1:
        return run_avx2<Body>(args...);
      default:
        return run_small<Baseline>(args...);
    }
  }
};

// Calls f(std::integral_constant<int, B>{}), where B is the size in bytes of the widest vectors of the current
// processor; what f runs by run_native<B> is compiled for that size.
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
// Body::run(args...) with vectors of this many bytes, in a function of its own; fewer than 16 means scalars.
template <int Bytes, class Body, class... Args>
void run_native(const Args&... args) {
  if constexpr (Bytes == 64) {
    run_avx512<Body>(args...);
  } else if constexpr (Bytes == 32) {
    run_avx2<Body>(args...);
  } else if constexpr (Bytes == 16) {
    run_small<Body>(args...);
  } else {
    run_baseline<Body>(args...);
  }
}
template <int Bytes, class Body, class... Args>
void run_shared_native(const Args&... args) {
  if constexpr (Bytes == 64) {
    shared_avx512<Body>(args...);
  } else if constexpr (Bytes == 32) {
    shared_avx2<Body>(args...);
  } else if constexpr (Bytes == 16) {
    shared_small<Body>(args...);
  } else {
    shared_baseline<Body>(args...);
  }
}
#else
inline constexpr bool kBaselineHasLanes = true;

template <class Body, class Baseline = Body>
struct Multiversion {
  template <class... Args>
  static void call(const Args&... args) {
    run_baseline<Body>(args...);
  }
};

template <class F>
void with_native(const F& f) {
  f(std::integral_constant<int, 16>{});
}
template <int Bytes, class Body, class... Args>
void run_native(const Args&... args) {
  run_baseline<Body>(args...);
}
template <int Bytes, class Body, class... Args>
void run_shared_native(const Args&... args) {
  shared_baseline<Body>(args...);
}
#endif

}  // namespace manualgrad
