// Operations within segments on the CPU; the contract is in segments.h.
//
// Consecutive short segments make one task, and a long one is cut into pieces of equal size, whose parts are merged in
// order: so work is divided by elements, and where it is divided depends on offsets and shapes alone, which makes
// results the same for any number of threads. A segment that is not cut stays in cache from its first pass to its last.
// Vectors run across columns; where there are fewer columns than a vector has lanes, they run along the memory of a
// segment, and a lane's column repeats with a period.
#include "segments.h"

#include <memory>

#include "../base/simd.h"
#include "segment_schedule.h"
#include "segment_stretch.h"

namespace manualgrad {
namespace {

template <class T>
struct Operands {
  const T* x;
  const T* y;
  T* out;
  T* parts;  // (outer, pieces, 2, padded)
  int64_t length, inner, segments, padded, tiles;
};

template <class T>
HOST_INLINE Parts<T> parts_of(const Operands<T>& at, const Schedule& schedule, int64_t outer, int64_t piece) {
  T* parts = at.parts + (outer * static_cast<int64_t>(schedule.pieces.size()) + piece) * 2 * at.padded;
  return {parts, parts + at.padded};
}

template <class Op, class T, int Bytes>
struct TasksBody {
  HOST_INLINE static void rows(Step step, const Operands<T>& at, int64_t outer, int64_t tile, const Piece& piece,
                               const Parts<T>& of) {
    constexpr int kW = kLanes<T, Bytes>;
    const int64_t row = outer * at.length + piece.begin, column = tile * kTileColumns;
    const int64_t out = Op::kRows ? row : outer * at.segments + piece.segment;
    const OperandRows<T> rows{at.x + row * at.inner, Op::kInputs > 1 ? at.y + row * at.inner : nullptr,
                              at.out + out * at.inner, piece.end - piece.begin, at.inner};
    if (at.inner < kW) return Stretch<Op, T, Bytes>().run(step, rows, of);
    const int64_t end = tile + 1 == at.tiles ? at.inner : column + kTileColumns;
    int64_t c = column;
    if constexpr (kHasGroups<Lanes<T, Bytes>>) {
      for (; c + 4 * kW <= end; c += 4 * kW) Columns<Op, T, Bytes, 4>::run(step, rows, of, c, 0);
      for (; c + 2 * kW <= end; c += 2 * kW) Columns<Op, T, Bytes, 2>::run(step, rows, of, c, 0);
    }
    // If the columns do not fill whole vectors, the last vector overlaps the one before.
    for (; c < end; c += kW)
      Columns<Op, T, Bytes, 1>::run(step, rows, of, std::min(c, end - kW), c - std::min(c, end - kW));
  }

  // Tasks [begin, end) of every (outer, tile), without the first `first` ones.
  HOST_INLINE static void run(const Operands<T>& at, const Schedule& schedule, int64_t first, Step of_pieces,
                              int64_t begin, int64_t end) {
    const int64_t tasks = schedule.tasks() - first;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t tile = i / tasks % at.tiles, outer = i / tasks / at.tiles;
      schedule.each(first + i % tasks, [&](const Piece& piece, int64_t number) MANUALGRAD_INLINED {
        const bool whole = number < 0;
        const Parts<T> parts = whole ? Parts<T>{} : parts_of(at, schedule, outer, number);
        rows(whole ? Step::kWhole : of_pieces, at, outer, tile, piece, parts);
      });
    }
  }
};

// Merges the parts of segments that were cut: [begin, end) of every (outer, cut). Leaves in each part the values that
// its rows need, or writes the result.
template <class Op, class T, int Bytes>
struct MergeBody {
  using N = Lanes<T, Bytes>;

  HOST_INLINE static void run(const Operands<T>& at, const Schedule& schedule, int64_t begin, int64_t end) {
    const int64_t cuts = static_cast<int64_t>(schedule.cuts.size());
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = i / cuts;
      const Cut cut = schedule.cuts[static_cast<size_t>(i % cuts)];
      const Parts<T> first = parts_of(at, schedule, outer, cut.first_piece);
      for (int64_t c = 0; c < at.inner; c += kLanesIn<N>) {
        Gathered<N> all{load_lanes<N>(first.a + c), load_lanes<N>(first.b + c)};
        for (int64_t p = 1; p < cut.pieces; ++p) {
          const int64_t next = p * 2 * at.padded + c;
          all = Op::merge(all, Gathered<N>{load_lanes<N>(first.a + next), load_lanes<N>(first.b + next)});
        }
        all = Op::finish(all);
        if constexpr (Op::kRows) {
          for (int64_t p = 0; p < cut.pieces; ++p) {
            const int64_t next = p * 2 * at.padded + c;
            const Gathered<N> of = Op::of_part(all, load_lanes<N>(first.a + next));
            store_lanes(first.a + next, of.a);
            store_lanes(first.b + next, of.b);
          }
        } else {
          T* out = at.out + (outer * at.segments + cut.segment) * at.inner + c;
          store_lanes(out, all.a, std::min<int64_t>(kLanesIn<N>, at.inner - c));
        }
      }
    }
  }
};

// Rows of `bytes` bytes, each repeated for the length of its segment.
template <int Bytes>
struct RepeatBody {
  HOST_INLINE static void copies(const char* from, char* to, int64_t count, int64_t bytes) {
    if (bytes >= Bytes) {
      // If the rows do not fill whole vectors, the last vector overlaps the one before.
      for (int64_t r = 0; r < count; ++r, to += bytes) {
        for (int64_t c = 0; c < bytes; c += Bytes) {
          const int64_t at = std::min<int64_t>(c, bytes - Bytes);
          std::memcpy(to + at, from + at, Bytes);
        }
      }
      return;
    }
    // What was copied is copied again, as long as it stays in the fastest cache.
    const int64_t total = count * bytes, most = 8192 / std::max<int64_t>(1, bytes) * bytes;
    if (total == 0) return;
    std::memcpy(to, from, static_cast<size_t>(bytes));
    for (int64_t done = bytes; done < total;) {
      const int64_t next = std::min(std::min(done, most), total - done);
      std::memcpy(to + done, to, static_cast<size_t>(next));
      done += next;
    }
  }

  // Tasks [begin, end) of every outer.
  HOST_INLINE static void run(const SegmentPlan& plan, const Schedule& schedule, const char* from, char* to,
                              int64_t bytes, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t outer = i / schedule.tasks();
      const char* of_segments = from + outer * plan.segments * bytes;
      char* of_rows = to + outer * plan.length * bytes;
      schedule.each(i % schedule.tasks(), [&](const Piece& piece, int64_t) MANUALGRAD_INLINED {
        copies(of_segments + piece.segment * bytes, of_rows + piece.begin * bytes, piece.end - piece.begin, bytes);
      });
    }
  }
};

struct CpuSegments {
  template <class Op, class T>
  static void run(const SegmentPlan& plan, const Tensor&, const T* x, const T* y, T* out) {
    with_native([&](auto bytes) { run_in<decltype(bytes)::value, Op>(plan, x, y, out); });
  }

  template <int kBytes, class Op, class T>
  static void run_in(const SegmentPlan& plan, const T* x, const T* y, T* out) {
    constexpr int kW = kLanes<T, kBytes>;
    const Schedule schedule = make_schedule(plan, std::min<int64_t>(plan.inner, kTileColumns));
    const int64_t rows = plan.outer * plan.inner, pieces = static_cast<int64_t>(schedule.pieces.size());
    if (rows == 0 || plan.segments == 0) return;
    Operands<T> at{x,
                   y,
                   out,
                   nullptr,
                   plan.length,
                   plan.inner,
                   plan.segments,
                   (plan.inner + kW - 1) / kW * kW,
                   std::max<int64_t>(1, plan.inner / kTileColumns)};
    std::unique_ptr<T[]> parts;
    if (pieces > 0) parts.reset(new T[static_cast<size_t>(plan.outer * pieces * 2 * at.padded)]());
    at.parts = parts.get();
    const auto tasks = [&](int64_t first, Step of_pieces) {
      run_tasks(plan.outer * at.tiles * (schedule.tasks() - first), rows * plan.length,
                [&](int64_t begin, int64_t end) {
                  run_native<kBytes, TasksBody<Op, T, kBytes>>(at, schedule, first, of_pieces, begin, end);
                });
    };
    tasks(0, Step::kPiece);
    if (pieces == 0) return;
    run_tasks(plan.outer * static_cast<int64_t>(schedule.cuts.size()), rows * pieces, [&](int64_t begin, int64_t end) {
      run_native<kBytes, MergeBody<Op, T, kBytes>>(at, schedule, begin, end);
    });
    if (Op::kRows) tasks(schedule.tasks() - pieces, Step::kResult);
  }

  static void repeat(const SegmentPlan& plan, const Tensor&, const void* from, void* to, int64_t bytes) {
    const Schedule schedule = make_schedule(plan, std::max<int64_t>(1, bytes / 4));
    run_tasks(plan.outer * schedule.tasks(), plan.outer * plan.length * bytes / 4, [&](int64_t begin, int64_t end) {
      with_native([&](auto vector_bytes) {
        constexpr int kBytes = decltype(vector_bytes)::value;
        run_native<kBytes, RepeatBody<kBytes>>(plan, schedule, static_cast<const char*>(from), static_cast<char*>(to),
                                               bytes, begin, end);
      });
    });
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::SegmentOperators<manualgrad::CpuSegments>)
