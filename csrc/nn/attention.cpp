// The tangent of attention on the CPU; the contract is in attention.h.
//
// A thread takes a tile of queries with all keys. It holds their scores and the tangents of the scores, so that the
// softmax needs one pass of products instead of two. Keys are packed in panels as wide as the block of scores in
// registers, values in rows of whole vectors, a few heads at a time.
#include "attention.h"

#include <memory>
#include <new>

#include "../base/parallel.h"
#include "attention_tile.h"

namespace manualgrad {
namespace {

constexpr int64_t kTileRows = 8 * kRowsAtOnce;
// Keys whose values are multiplied at a time, so that they stay in the first cache.
constexpr int64_t kKeysAtOnce = 64;
// Bytes of the packed heads.
constexpr int64_t kPackedBytes = int64_t{4} << 20;

// Aligned like vectors: a vector that lies across two cache lines takes twice as long.
struct AlignedDelete {
  void operator()(void* data) const { ::operator delete(data, std::align_val_t{kLaneBytes}); }
};
template <class T>
using Buffer = std::unique_ptr<T[], AlignedDelete>;
template <class T>
Buffer<T> make_buffer(int64_t count) {
  return Buffer<T>(
      static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), std::align_val_t{kLaneBytes})));
}

HOST_INLINE int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// --- rows of tensors, of any dtype and strides ----------------------------------------------------------------------

template <class F>
void with_element(ScalarType type, const F& f) {
  switch (type) {
    case ScalarType::Double:
      return f(Tag<double>{});
    case ScalarType::Half:
      return f(Tag<Half>{});
    case ScalarType::BFloat16:
      return f(Tag<BFloat16>{});
    default:
      return f(Tag<float>{});
  }
}

template <class T>
MANUALGRAD_NOT_INLINED void load_row(const HeadRows& x, int64_t n, int64_t h, int64_t row, int64_t count, T* to) {
  with_element(x.type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    const S* from = reinterpret_cast<const S*>(x.data) + n * x.strides[0] + h * x.strides[1] + row * x.strides[2];
    const int64_t step = x.strides[3];
    if (step == 1) {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(load(from[i]));
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(load(from[i * step]));
    }
  });
}

template <class T>
MANUALGRAD_NOT_INLINED void store_row(ScalarType type, const T* from, int64_t count, void* data, int64_t at) {
  with_element(type, [&](auto tag) {
    using S = typename decltype(tag)::type;
    S* to = static_cast<S*>(data) + at;
    for (int64_t i = 0; i < count; ++i) store(to[i], static_cast<Compute<S>>(from[i]));
  });
}

// --- a tile ---------------------------------------------------------------------------------------------------------

template <class T>
struct Packed {
  const T* k;  // panels (panel, d, kStep) of keys; null where there is none, as the others
  const T* k_t;
  const T* v;  // (S, columns)
  const T* v_t;
};

template <class T, int Bytes>
struct TileBody {
  using Row = ScoresRow<T, Bytes>;
  using Product = ProductOperands<T>;
  static constexpr int64_t kStep = Row::kStep;

  HOST_INLINE static int64_t columns(const AttentionPlan& plan) { return rounded_up(plan.width, kLanes<T, Bytes>); }
  // The stride of rows of scores: a power of two would map all rows to the same few sets of the cache.
  HOST_INLINE static int64_t stride(int64_t size) { return size + kLanes<T>; }
  // Elements that a thread needs: q, dq, the tile of the result, scores and their tangents, and a row of a mask.
  static int64_t scratch(const AttentionPlan& plan) {
    const int64_t line = stride(rounded_up(plan.keys, kStep));
    return kTileRows * (3 * columns(plan) + 2 * line) + line;
  }

  // Queries from `row` on, of head h, with the head of keys that is packed here.
  HOST_INLINE static void run(const AttentionPlan& plan, const Packed<T>& packed, int64_t n, int64_t h, int64_t row,
                              T* scratch, ScalarType type, void* out) {
    const int64_t rows = std::min(kTileRows, plan.queries - row), wide = columns(plan);
    const int64_t keys = plan.causal ? std::min(plan.keys, row + rows) : plan.keys, size = rounded_up(keys, kStep);
    const int64_t line = stride(size);
    const bool of_scores = plan.of_scores();
    T *q = scratch, *q_t = q + kTileRows * wide, *o = q_t + kTileRows * wide, *s = o + kTileRows * wide;
    T *t = s + kTileRows * line, *mask = t + kTileRows * line;

    load_queries(plan, plan.query, n, h, row, rows, q);
    if (plan.query_t.data != nullptr) load_queries(plan, plan.query_t, n, h, row, rows, q_t);
    const int64_t filled = rounded_up(rows, kRowsAtOnce);
    for (int64_t j = 0; j < size; j += kStep) {
      const int64_t panel = j * plan.width, used = std::min(kStep, rounded_up(keys - j, kLanes<T, Bytes>));
      Product scores{{}, {}, 0, false, s + j, wide, kStep, line, filled, used, plan.width};
      Product tangents = scores;
      scores.term(q, packed.k + panel);
      run_native<Bytes, ProductBody<T, Bytes>>(scores);
      if (!of_scores) continue;
      tangents.c = t + j;
      if (plan.query_t.data != nullptr) tangents.term(q_t, packed.k + panel);
      if (packed.k_t != nullptr) tangents.term(q, packed.k_t + panel);
      run_native<Bytes, ProductBody<T, Bytes>>(tangents);
    }

    for (int64_t r = 0; r < rows; ++r) {
      T *s_row = s + r * line, *t_row = t + r * line;
      const int64_t count = plan.causal ? std::min(keys, row + r + 1) : keys;
      if (plan.mask.data != nullptr) add_mask(plan.mask, n, h, row + r, count, mask, s_row);
      if (plan.mask_t.data != nullptr) add_mask(plan.mask_t, n, h, row + r, count, mask, t_row);
      std::fill(s_row + count, s_row + size, -std::numeric_limits<T>::infinity());
      if (of_scores) std::fill(t_row + count, t_row + size, T(0));
      const T maximum = Row::largest(s_row, size);
      if (plan.mask.data != nullptr && maximum == -std::numeric_limits<T>::infinity() && !has_nan(s_row, count)) {
        std::fill(s_row, s_row + size, T(0));
        if (of_scores) std::fill(t_row, t_row + size, T(0));
      } else if (of_scores) {
        Row::template change<true>(s_row, t_row, maximum, size);
      } else {
        Row::template change<false>(s_row, t_row, maximum, size);
      }
    }

    for (int64_t j = 0; j < keys; j += kKeysAtOnce) {
      Product result{{}, {}, 0, j > 0, o, line, wide, wide, filled, wide, std::min(kKeysAtOnce, keys - j)};
      if (of_scores) result.term(t + j, packed.v + j * wide);
      if (packed.v_t != nullptr) result.term(s + j, packed.v_t + j * wide);
      run_native<Bytes, ProductBody<T, Bytes>>(result);
    }
    for (int64_t r = 0; r < rows; ++r) {
      store_row(type, o + r * wide, plan.width, out, ((n * plan.heads + h) * plan.queries + row + r) * plan.width);
    }
  }

  // Loads queries times the scale; the rows that pad a block are 0.
  HOST_INLINE static void load_queries(const AttentionPlan& plan, const HeadRows& from, int64_t n, int64_t h,
                                       int64_t row, int64_t rows, T* to) {
    const int64_t wide = columns(plan);
    const T scale = static_cast<T>(plan.scale);
    for (int64_t r = 0; r < rows; ++r) {
      load_row(from, n, h, row + r, plan.width, to + r * wide);
      for (int64_t c = 0; c < plan.width; ++c) to[r * wide + c] *= scale;
    }
    std::fill(to + rows * wide, to + rounded_up(rows, kRowsAtOnce) * wide, T(0));
  }

  HOST_INLINE static void add_mask(const HeadRows& from, int64_t n, int64_t h, int64_t row, int64_t count, T* scratch,
                                   T* to) {
    load_row(from, n, h, row, count, scratch);
    for (int64_t j = 0; j < count; ++j) to[j] += scratch[j];
  }

  HOST_INLINE static bool has_nan(const T* s, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      if (s[j] != s[j]) return true;
    }
    return false;
  }
};

// --- the operator ---------------------------------------------------------------------------------------------------

struct CpuAttention {
  template <class T>
  static void jvp(const AttentionPlan& plan, Tensor& out) {
    with_native(
        [&](auto bytes) { run_in<T, decltype(bytes)::value>(plan, out.scalar_type(), out.mutable_data_ptr()); });
  }

  // Keys of one head, `step` of them in a panel, and all their entries of one column side by side there.
  template <class T>
  static void pack_panel(const HeadRows& from, int64_t n, int64_t h, int64_t key, int64_t keys, int64_t width,
                         int64_t step, T* row, T* to) {
    std::fill(to, to + width * step, T(0));
    for (int64_t j = 0; j < std::min(step, keys - key); ++j) {
      load_row(from, n, h, key + j, width, row);
      for (int64_t c = 0; c < width; ++c) to[c * step + j] = row[c];
    }
  }

  template <class T, int Bytes>
  static void run_in(const AttentionPlan& plan, ScalarType type, void* out) {
    using Tile = TileBody<T, Bytes>;
    constexpr int64_t kStep = Tile::kStep;
    const int64_t panels = (plan.keys + kStep - 1) / kStep, tiles = (plan.queries + kTileRows - 1) / kTileRows;
    const int64_t wide = Tile::columns(plan), k_size = panels * kStep * plan.width, v_size = plan.keys * wide;
    const HeadRows* inputs[4] = {&plan.key, &plan.key_t, &plan.value, &plan.value_t};
    int64_t at[5] = {};
    for (int i = 0; i < 4; ++i) at[i + 1] = at[i] + (inputs[i]->data == nullptr ? 0 : i < 2 ? k_size : v_size);
    const int64_t each = at[4], heads = plan.heads / plan.shared, all = plan.batch * heads;
    const int64_t group = std::clamp<int64_t>(kPackedBytes / (each * int64_t{sizeof(T)}), 1, all);
    const Buffer<T> packed = make_buffer<T>(group * each);

    const int64_t work = plan.keys * plan.width / 8;  // of a row, as a number of elements that take the same time
    for (int64_t first = 0; first < all; first += group) {
      const int64_t count = std::min(group, all - first);
      parallel_for(count * panels, grain_of(kStep * plan.width), [&](int64_t begin, int64_t end) {
        const Buffer<T> row = make_buffer<T>(plan.width);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t head = i / panels, n = (first + head) / heads, h = (first + head) % heads;
          const int64_t key = i % panels * kStep;
          T* to = packed.get() + head * each;
          for (int m = 0; m < 2; ++m) {
            if (inputs[m]->data == nullptr) continue;
            pack_panel(*inputs[m], n, h, key, plan.keys, plan.width, kStep, row.get(), to + at[m] + key * plan.width);
          }
          for (int m = 2; m < 4; ++m) {
            for (int64_t j = key; inputs[m]->data != nullptr && j < std::min(key + kStep, plan.keys); ++j) {
              T* line = to + at[m] + j * wide;
              load_row(*inputs[m], n, h, j, plan.width, line);
              std::fill(line + plan.width, line + wide, T(0));
            }
          }
        }
      });
      parallel_for(count * plan.shared * tiles, grain_of(kTileRows * work), [&](int64_t begin, int64_t end) {
        const Buffer<T> scratch = make_buffer<T>(Tile::scratch(plan));
        for (int64_t i = begin; i < end; ++i) {
          const int64_t head = i / tiles / plan.shared, n = (first + head) / heads, h = (first + head) % heads;
          const T* of = packed.get() + head * each;
          const T* parts[4];
          for (int m = 0; m < 4; ++m) parts[m] = inputs[m]->data == nullptr ? nullptr : of + at[m];
          run_native<Bytes, Tile>(plan, Packed<T>{parts[0], parts[1], parts[2], parts[3]}, n,
                                  h * plan.shared + i / tiles % plan.shared, i % tiles * kTileRows, scratch.get(), type,
                                  out);
        }
      });
    }
  }

  // Units of so many elements each.
  static int64_t grain_of(int64_t elements) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(elements, 1)); }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::AttentionOperators<manualgrad::CpuAttention>)
