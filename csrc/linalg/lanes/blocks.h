// Vectors as blocks of 16 bytes, which every instruction set can shuffle, and the transposes of such blocks. Host code.
#pragma once

#include <cstring>
#include <utility>

#include "lanes.h"

namespace manualgrad {

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MANUALGRAD_LANE_GROUPS
#endif
#endif
// Blocks of 16 bytes, side by side in one vector. Without __builtin_shufflevector (GCC before 12) there is only one
// block.
template <class T, int Bytes>
struct Blocks {
  static constexpr int kCount = Bytes / static_cast<int>(sizeof(T)), kBlock = 16 / static_cast<int>(sizeof(T));
  typedef T values __attribute__((vector_size(Bytes)));
  values v;

  // In each block, entry Places[i] of the concatenated entries of a and b.
  template <int... Places>
  HOST_INLINE static Blocks shuffle(const Blocks& a, const Blocks& b) {
    return in_blocks<Places...>(a, b, std::make_integer_sequence<int, kCount>{});
  }
  // In each pair of neighbouring groups of `Half` numbers, the first groups of a and b, or the second ones.
  template <int Half, bool Second>
  HOST_INLINE static Blocks exchange(const Blocks& a, const Blocks& b) {
    return exchanged<Half, Second>(a, b, std::make_integer_sequence<int, kCount>{});
  }
  // Numbers Step * w + First of the concatenated a and b, or a, b and c.
  template <int Step, int First>
  HOST_INLINE static Blocks every(const Blocks& a, const Blocks& b) {
    return every_of<Step, First>(a, b, std::make_integer_sequence<int, kCount>{});
  }
  template <int Step, int First>
  HOST_INLINE static Blocks every(const Blocks& a, const Blocks& b, const Blocks& c) {
    return every_of<Step, First>(a, b, c, std::make_integer_sequence<int, kCount>{});
  }

  HOST_INLINE static Blocks load(const T* from) {
    Blocks blocks;
    std::memcpy(&blocks.v, from, Bytes);
    return blocks;
  }
  HOST_INLINE void store(T* to) const { std::memcpy(to, &v, Bytes); }
  // Block i from `from` + i * apart.
  HOST_INLINE static Blocks collect(const T* from, int64_t apart) {
    if constexpr (Bytes == 16) {
      return load(from);
    } else {
      using Half = Blocks<T, Bytes / 2>;
      return join(Half::collect(from, apart), Half::collect(from + Bytes / 32 * apart, apart),
                  std::make_integer_sequence<int, kCount>{});
    }
  }
  HOST_INLINE void distribute(T* to, int64_t apart) const {
    if constexpr (Bytes == 16) {
      store(to);
    } else {
      using Places = std::make_integer_sequence<int, kCount / 2>;
      half<0>(Places{}).distribute(to, apart);
      half<kCount / 2>(Places{}).distribute(to + Bytes / 32 * apart, apart);
    }
  }

 private:
  template <int... Places>
  static constexpr int place(int i) {
    constexpr int kPlaces[] = {Places...};
    const int from = kPlaces[i % kBlock];
    return i / kBlock * kBlock + from % kBlock + from / kBlock * kCount;
  }
  template <int... Places, int... I>
  HOST_INLINE static Blocks in_blocks(const Blocks& a, const Blocks& b, std::integer_sequence<int, I...>) {
#if defined(MANUALGRAD_LANE_GROUPS)
    return {__builtin_shufflevector(a.v, b.v, place<Places...>(I)...)};
#else
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> numbers __attribute__((vector_size(Bytes)));
    return {__builtin_shuffle(a.v, b.v, numbers{place<Places...>(I)...})};
#endif
  }
  template <int Half, bool Second, int... I>
  HOST_INLINE static Blocks exchanged(const Blocks& a, const Blocks& b, std::integer_sequence<int, I...>) {
    constexpr int kFirst = Second ? Half : 0;
    return {__builtin_shufflevector(a.v, b.v, ((I & Half) ? I - Half + kFirst + kCount : I + kFirst)...)};
  }
  template <int Step, int First, int... I>
  HOST_INLINE static Blocks every_of(const Blocks& a, const Blocks& b, std::integer_sequence<int, I...>) {
    return {__builtin_shufflevector(a.v, b.v, (Step * I + First)...)};
  }
  template <int Step, int First, int... I>
  HOST_INLINE static Blocks every_of(const Blocks& a, const Blocks& b, const Blocks& c,
                                     std::integer_sequence<int, I...>) {
    const auto some = __builtin_shufflevector(a.v, b.v, ((Step * I + First) % (2 * kCount))...);
    return {__builtin_shufflevector(some, c.v, (Step * I + First < 2 * kCount ? I : Step * I + First - kCount)...)};
  }
  template <int... I>
  HOST_INLINE static Blocks join(const Blocks<T, Bytes / 2>& a, const Blocks<T, Bytes / 2>& b,
                                 std::integer_sequence<int, I...>) {
    return {__builtin_shufflevector(a.v, b.v, I...)};
  }
  template <int First, int... I>
  HOST_INLINE Blocks<T, Bytes / 2> half(std::integer_sequence<int, I...>) const {
    return {__builtin_shufflevector(v, v, First + I...)};
  }
};

// The transposes of square blocks.
template <class T, int Bytes>
HOST_INLINE void transpose_blocks(Blocks<T, Bytes>* q) {
  using Q = Blocks<T, Bytes>;
  if constexpr (Q::kBlock == 4) {
    const Q a = Q::template shuffle<0, 4, 1, 5>(q[0], q[1]), b = Q::template shuffle<2, 6, 3, 7>(q[0], q[1]);
    const Q c = Q::template shuffle<0, 4, 1, 5>(q[2], q[3]), d = Q::template shuffle<2, 6, 3, 7>(q[2], q[3]);
    q[0] = Q::template shuffle<0, 1, 4, 5>(a, c);
    q[1] = Q::template shuffle<2, 3, 6, 7>(a, c);
    q[2] = Q::template shuffle<0, 1, 4, 5>(b, d);
    q[3] = Q::template shuffle<2, 3, 6, 7>(b, d);
  } else {
    const Q a = q[0];
    q[0] = Q::template shuffle<0, 2>(a, q[1]);
    q[1] = Q::template shuffle<1, 3>(a, q[1]);
  }
}

// The transpose of as many vectors as each has numbers.
template <int Half, class T, int Bytes>
HOST_INLINE void transpose_halves(Blocks<T, Bytes>* q) {
  using Q = Blocks<T, Bytes>;
  for (int i = 0; i < Q::kCount; ++i) {
    if (i & Half) continue;
    const Q a = q[i], b = q[i + Half];
    q[i] = Q::template exchange<Half, false>(a, b);
    q[i + Half] = Q::template exchange<Half, true>(a, b);
  }
  if constexpr (Half > 1) transpose_halves<Half / 2>(q);
}

}  // namespace manualgrad
