// Operations within segments on CUDA; the contract is in segments.h.
//
// One cooperative launch per call, on the current stream; it does not synchronize. One thread per column takes a short
// segment. A long segment is cut at fixed rows into pieces, each with one thread per column. After a grid barrier, one
// thread per column merges the parts in order, and after another barrier the results of the pieces are written. So each
// thread has only a limited number of rows or parts to go over, and results do not depend on the number of threads.
//
// The host does not know the offsets, and a device cannot raise. So offsets are clamped to the existing rows, and
// nothing else is read or written. If offsets are wrong, the whole result becomes nan: it is written after a barrier,
// over what two threads may have written where segments overlap.
#include "segments.h"

#include <cooperative_groups.h>

#include "../base/cuda.h"

namespace manualgrad {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kRun = 64;  // rows that are added up before they are added to the others

struct SegmentShape {
  int64_t outer, length, inner, segments;
  int64_t rows;  // of a tile; a longer segment is cut
  int64_t tiles;
};

struct Range {
  int64_t begin, end;
  __device__ int64_t size() const { return end - begin; }
};

__device__ Range rows_of(const SegmentShape& shape, const int64_t* offsets, int64_t segment) {
  const int64_t begin = std::min(std::max<int64_t>(offsets[segment], 0), shape.length);
  return {begin, std::max(begin, std::min(offsets[segment + 1], shape.length))};
}

__device__ bool offsets_are_wrong(const SegmentShape& shape, const int64_t* offsets, int64_t at) {
  if (at == 0 && offsets[0] != 0) return true;
  return at == shape.segments ? offsets[at] != shape.length : offsets[at] > offsets[at + 1];
}

// The segment that a row belongs to: the first one that ends after it.
__device__ int64_t segment_of(const SegmentShape& shape, const int64_t* offsets, int64_t row) {
  int64_t low = 0, high = shape.segments - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle + 1] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// --- one column of a segment or of a piece --------------------------------------------------------------------------

template <class T>
struct Operands {
  const T* x;
  const T* y;
  T* out;
  T* parts;  // (outer, tiles, 2, 4, inner): a and b of a piece, and merged where the segment begins
};

template <class Op, class T>
struct Column {
  const T* x;
  const T* y;
  T* out;
  int64_t stride;

  __device__ T second_operand(int64_t row) const { return Op::kInputs > 1 ? y[row * stride] : T(0); }

  __device__ Gathered<T> gather(const Range& rows) const {
    using First = typename Op::First;
    Gathered<T> of{First::template none<T>(), T(0)};
    for (int64_t start = rows.begin; start < rows.end; start += kRun) {
      const int64_t stop = std::min(start + kRun, rows.end);
      T run = First::template none<T>();
      for (int64_t r = start; r < stop; ++r) run = First::both(run, Op::first(x[r * stride], second_operand(r)));
      of.a = First::both(of.a, run);
    }
    if constexpr (Op::kPasses == 2) {
      const T shift = Op::shift(of.a);
      for (int64_t start = rows.begin; start < rows.end; start += kRun) {
        const int64_t stop = std::min(start + kRun, rows.end);
        T run = 0;
        for (int64_t r = start; r < stop; ++r) run += Op::second(x[r * stride], shift);
        of.b += run;
      }
    }
    return of;
  }

  // a is what was gathered of these rows.
  __device__ void apply(const Range& rows, const Gathered<T>& of, T a) const {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      T value = x[r * stride];
      if constexpr (Op::kKeeps) value = Op::second(value, Op::shift(a));
      out[r * stride] = Op::apply(value, second_operand(r), of);
    }
  }
};

template <class Op, class T>
__device__ Column<Op, T> column_of(const SegmentShape& shape, const Operands<T>& at, int64_t outer, int64_t column) {
  const int64_t start = outer * shape.length * shape.inner + column;
  return {at.x + start, Op::kInputs > 1 ? at.y + start : nullptr, at.out + start, shape.inner};
}

// The part of a tile that belongs to a segment that is cut. There are at most two such in a tile: the one of its first
// row and the one of its last.
struct PieceOfTile {
  Range all;   // rows of the segment
  Range here;  // of these, in the tile
  int64_t segment;
  bool cut;

  __device__ PieceOfTile(const SegmentShape& shape, const int64_t* offsets, int64_t tile, int which) {
    const int64_t begin = tile * shape.rows, end = std::min(begin + shape.rows, shape.length);
    segment = segment_of(shape, offsets, which == 0 ? begin : end - 1);
    all = rows_of(shape, offsets, segment);
    here = {std::max(all.begin, begin), std::min(all.end, end)};
    cut = all.size() > shape.rows && here.size() > 0;
    if (which == 1 && cut) cut = segment != segment_of(shape, offsets, begin);
  }
};

template <class T>
__device__ T* part_of(const SegmentShape& shape, const Operands<T>& at, int64_t outer, int64_t tile, int64_t which,
                      int64_t column) {
  return at.parts + (((outer * shape.tiles + tile) * 2 + which) * 4) * shape.inner + column;
}

// The place of the merged part of the segment that begins at this row.
template <class T>
__device__ T* merged_part(const SegmentShape& shape, const Operands<T>& at, int64_t outer, int64_t begin,
                          int64_t column) {
  const int64_t tile = begin / shape.rows;
  return part_of(shape, at, outer, tile, begin > tile * shape.rows ? 1 : 0, column) + 2 * shape.inner;
}

// f(outer, k, column) for all k < count, divided among the threads of the grid.
template <class F>
__device__ void for_columns(const SegmentShape& shape, int64_t count, const F& f) {
  const int64_t units = shape.outer * count * shape.inner, step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < units; i += step) {
    const int64_t k = i / shape.inner;
    f(k / count, k % count, i - k * shape.inner);
  }
}

__device__ void check_offsets(const SegmentShape& shape, const int64_t* offsets, int* wrong) {
  const int64_t step = int64_t{blockDim.x} * gridDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i <= shape.segments; i += step) {
    if (offsets_are_wrong(shape, offsets, i)) atomicExch(wrong, 1);
  }
}

// Whether the offsets are wrong, which all threads know after a barrier; the result is nan then.
template <class S>
__device__ bool refuse(const SegmentShape& shape, const int* wrong, S* out, int64_t rows) {
  if (*static_cast<const volatile int*>(wrong) == 0) return false;
  for_columns(shape, rows, [&](int64_t outer, int64_t row, int64_t column) {
    store(out[(outer * rows + row) * shape.inner + column], std::numeric_limits<Compute<S>>::quiet_NaN());
  });
  return true;
}

template <class Op, class T>
__global__ void segment_kernel(SegmentShape shape, const int64_t* offsets, Operands<T> at, int* wrong) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  check_offsets(shape, offsets, wrong);
  for_columns(shape, shape.segments, [&](int64_t outer, int64_t segment, int64_t c) {
    const Range rows = rows_of(shape, offsets, segment);
    if (rows.size() > shape.rows) return;
    const Column<Op, T> column = column_of<Op>(shape, at, outer, c);
    const Gathered<T> of = column.gather(rows), finished = Op::finish(of);
    if constexpr (Op::kRows) {
      column.apply(rows, finished, of.a);
    } else {
      at.out[(outer * shape.segments + segment) * shape.inner + c] = finished.a;
    }
  });
  for_columns(shape, shape.tiles * 2, [&](int64_t outer, int64_t k, int64_t c) {
    const PieceOfTile piece(shape, offsets, k / 2, static_cast<int>(k % 2));
    if (!piece.cut) return;
    const Gathered<T> of = column_of<Op>(shape, at, outer, c).gather(piece.here);
    T* part = part_of(shape, at, outer, k / 2, k % 2, c);
    part[0] = of.a;
    part[shape.inner] = of.b;
  });
  grid.sync();
  if (refuse(shape, wrong, at.out, Op::kRows ? shape.length : shape.segments)) return;
  for_columns(shape, shape.tiles * 2, [&](int64_t outer, int64_t k, int64_t c) {
    const PieceOfTile piece(shape, offsets, k / 2, static_cast<int>(k % 2));
    if (!piece.cut || piece.here.begin != piece.all.begin) return;
    const T* part = part_of(shape, at, outer, k / 2, k % 2, c);
    Gathered<T> of{part[0], part[shape.inner]};
    // In the tiles that follow, the segment is that of the first row.
    for (int64_t tile = k / 2 + 1; tile * shape.rows < piece.all.end; ++tile) {
      const T* next = part_of(shape, at, outer, tile, 0, c);
      of = Op::merge(of, Gathered<T>{next[0], next[shape.inner]});
    }
    of = Op::finish(of);
    if constexpr (Op::kRows) {
      T* merged = merged_part(shape, at, outer, piece.all.begin, c);
      merged[0] = of.a;
      merged[shape.inner] = of.b;
    } else {
      at.out[(outer * shape.segments + piece.segment) * shape.inner + c] = of.a;
    }
  });
  if constexpr (Op::kRows) {
    grid.sync();
    for_columns(shape, shape.tiles * 2, [&](int64_t outer, int64_t k, int64_t c) {
      const PieceOfTile piece(shape, offsets, k / 2, static_cast<int>(k % 2));
      if (!piece.cut) return;
      const T* merged = merged_part(shape, at, outer, piece.all.begin, c);
      const T a = part_of(shape, at, outer, k / 2, k % 2, c)[0];
      const Gathered<T> of = Op::of_part(Gathered<T>{merged[0], merged[shape.inner]}, a);
      column_of<Op>(shape, at, outer, c).apply(piece.here, of, a);
    });
  }
}

template <class S>
__global__ void repeat_kernel(SegmentShape shape, const int64_t* offsets, const S* from, S* out, int* wrong) {
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  check_offsets(shape, offsets, wrong);
  for_columns(shape, shape.tiles, [&](int64_t outer, int64_t tile, int64_t column) {
    const int64_t begin = tile * shape.rows, end = std::min(begin + shape.rows, shape.length);
    int64_t s = segment_of(shape, offsets, begin);
    for (int64_t r = begin; r < end; ++r) {
      while (s + 1 < shape.segments && offsets[s + 1] <= r) ++s;
      out[(outer * shape.length + r) * shape.inner + column] =
          from[(outer * shape.segments + s) * shape.inner + column];
    }
  });
  grid.sync();
  refuse(shape, wrong, out, shape.length);
}

// --- launches -------------------------------------------------------------------------------------------------------

struct CudaSegments {
  static SegmentShape shape_of(const SegmentPlan& plan, int64_t rows) {
    return {plan.outer, plan.length, plan.inner, plan.segments, rows, (plan.length + rows - 1) / rows};
  }

  // About as many rows in a tile as there are tiles, so that neither going over rows nor over parts takes long.
  static int64_t tile_rows(int64_t length) {
    int64_t rows = 64;
    while (rows < 1024 && rows * rows < length) rows *= 2;
    return rows;
  }

  static Tensor scratch(const Tensor& like, int64_t count, ScalarType type) {
    const int64_t size[] = {count};
    return torch::stable::empty({size, 1}, type, std::nullopt, like.device());
  }

  // The kernel's last argument is a flag, cleared.
  template <class Kernel, class... Args>
  static void launch(const Stream& stream, const Tensor& like, int64_t units, Kernel kernel, const Args&... args) {
    const Tensor flag = scratch(like, 1, ScalarType::Int);
    int* wrong = static_cast<int*>(flag.mutable_data_ptr());
    stream.clear(wrong, sizeof(*wrong));
    const int64_t blocks = std::max<int64_t>(1, (units + kThreads - 1) / kThreads);
    stream.launch_cooperative(kernel, blocks, kThreads, args..., wrong);
  }

  // Whether there is something to do. If there is not, the host can check all that may be wrong.
  static bool needed(const SegmentPlan& plan, bool rows) {
    MANUALGRAD_CHECK(plan.segments > 0 || plan.length == 0, plan.where, "offsets: expected to end at ", plan.length,
                     ", the size in dim ", plan.dim, ", got no segments");
    return plan.outer * plan.inner * (rows ? plan.length : plan.segments) > 0;
  }

  template <class Op, class T>
  static void run(const SegmentPlan& plan, const Tensor& like, const T* x, const T* y, T* out) {
    if (!needed(plan, Op::kRows)) return;
    const Stream stream(plan.where, like);
    const SegmentShape shape = shape_of(plan, tile_rows(plan.length));
    const Tensor parts = scratch(like, plan.outer * shape.tiles * 8 * plan.inner, like.scalar_type());
    const Operands<T> at{x, y, out, static_cast<T*>(parts.mutable_data_ptr())};
    launch(stream, like, plan.outer * plan.inner * std::max(plan.segments, shape.tiles * 2), segment_kernel<Op, T>,
           shape, static_cast<const int64_t*>(plan.offsets.const_data_ptr()), at);
  }

  static void repeat(SegmentPlan plan, const Tensor& like, const void* from, void* to, int64_t) {
    if (!needed(plan, true)) return;
    const Stream stream(plan.where, like);
    if (real_dtype(like.scalar_type()) != like.scalar_type()) plan.inner *= 2;  // complex
    const SegmentShape shape = shape_of(plan, 16);
    const auto with = [&](auto tag) {
      using S = typename decltype(tag)::type;
      launch(stream, like, plan.outer * plan.inner * shape.tiles, repeat_kernel<S>, shape,
             static_cast<const int64_t*>(plan.offsets.const_data_ptr()), static_cast<const S*>(from),
             static_cast<S*>(to));
    };
    switch (real_dtype(like.scalar_type())) {
      case ScalarType::Double:
        return with(Tag<double>{});
      case ScalarType::Half:
        return with(Tag<Half>{});
      case ScalarType::BFloat16:
        return with(Tag<BFloat16>{});
      default:
        return with(Tag<float>{});
    }
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CUDA(manualgrad::SegmentOperators<manualgrad::CudaSegments>)
