// Operations within segments on the CPU; the contract is in segments_plan.h.
//
// Consecutive short segments make one task, and a long one is cut into pieces of equal size, whose parts are merged in
// order: so work is divided by elements, and where it is divided depends on offsets and shapes alone, which makes
// results the same for any number of threads. A segment that is not cut stays in cache from its first pass to its last.
// Vectors run across columns; where there are fewer columns than a vector has lanes, they run along the memory of a
// segment, and a lane's column repeats with a period.
#include "../lanes.h"
#include "../segments_plan.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace manualgrad {
namespace {

// A lambda would keep the baseline's instructions where it is not inlined.
#define MANUALGRAD_INLINED __attribute__((always_inline))

// In elements: a task of short segments, or a piece; and a segment that is cut.
constexpr int64_t kTask = 16384, kLong = 65536;
// Columns of one task, at least; rows that are added up before they are added to the others.
constexpr int64_t kTileColumns = 2048, kRun = 64;

// --- who does what --------------------------------------------------------------------------------------------------

struct Range {
  int64_t begin, end;
};

// Pieces are numbered through all segments that are cut.
struct Piece {
  int64_t segment, begin, end;  // rows
};
struct Cut {
  int64_t segment, first_piece, pieces;
};

struct Schedule {
  const int64_t* offsets;
  std::vector<Range> whole;  // segments
  std::vector<Piece> pieces;
  std::vector<Cut> cuts;

  int64_t tasks() const { return static_cast<int64_t>(whole.size() + pieces.size()); }
  // Tasks are ranges of whole segments first, then pieces. f(piece, its number or -1) for all of one task.
  template <class F>
  HOST_DEVICE void each(int64_t task, const F& f) const {
    const int64_t ranges = static_cast<int64_t>(whole.size());
    if (task >= ranges) return f(pieces[static_cast<size_t>(task - ranges)], task - ranges);
    const Range range = whole[static_cast<size_t>(task)];
    for (int64_t s = range.begin; s < range.end; ++s) f(Piece{s, offsets[s], offsets[s + 1]}, int64_t{-1});
  }
};

// Goes over the offsets once: raises where they are no offsets. `width` is the elements of a row.
Schedule make_schedule(const SegmentPlan& plan, int64_t width) {
  const int64_t* offsets = static_cast<const int64_t*>(plan.offsets.const_data_ptr());
  MANUALGRAD_CHECK(offsets[0] == 0, plan.where, "offsets: expected to start at 0, got ", offsets[0]);
  Schedule schedule{offsets, {}, {}, {}};
  const int64_t rows = std::max<int64_t>(1, kTask / std::max<int64_t>(1, width));
  int64_t first = 0, work = 0;
  const auto close = [&](int64_t last) {
    if (last > first) schedule.whole.push_back({first, last});
    first = last;
    work = 0;
  };
  for (int64_t s = 0; s < plan.segments; ++s) {
    const int64_t begin = offsets[s], end = offsets[s + 1];
    MANUALGRAD_CHECK(begin <= end, plan.where, "offsets: they decrease from ", begin, " to ", end, " at segment ", s);
    MANUALGRAD_CHECK(end <= plan.length, plan.where, "offsets: expected to end at ", plan.length, ", the size in dim ",
                     plan.dim, ", got ", end, " at segment ", s);
    if (end - begin > rows && (end - begin) * width > kLong) {
      close(s);
      first = s + 1;
      const int64_t count = (end - begin + rows - 1) / rows;
      schedule.cuts.push_back({s, static_cast<int64_t>(schedule.pieces.size()), count});
      for (int64_t r = begin; r < end; r += rows) schedule.pieces.push_back({s, r, std::min(r + rows, end)});
    } else if ((work += (end - begin + 1) * width) >= kTask) {
      close(s + 1);
    }
  }
  close(plan.segments);
  MANUALGRAD_CHECK(offsets[plan.segments] == plan.length, plan.where, "offsets: expected to end at ", plan.length,
                   ", the size in dim ", plan.dim, ", got ", offsets[plan.segments]);
  return schedule;
}

// f(begin, end) over `count` tasks of together `elements` elements.
template <class F>
void run_tasks(int64_t count, int64_t elements, const F& f) {
  if (count > 0) parallel_for(count, std::max<int64_t>(1, count * kGrain / std::max<int64_t>(1, elements)), f);
}

// --- one segment, or a piece of one ---------------------------------------------------------------------------------

template <class N>
HOST_DEVICE N load_lanes(const BaseOf<N>* from) {
  N value;
  std::memcpy(&value.v, from, sizeof(value.v));
  return value;
}

template <class N>
HOST_DEVICE void store_lanes(BaseOf<N>* to, const N& value) {
  std::memcpy(to, &value.v, sizeof(value.v));
}

// The first `count` lanes; the others are 0.
template <class N>
HOST_DEVICE N load_lanes(const BaseOf<N>* from, int64_t count) {
  if (count == kLanesIn<N>) return load_lanes<N>(from);
  N part = real_number<N>(0);
  std::memcpy(&part.v, from, static_cast<size_t>(count) * sizeof(BaseOf<N>));
  return part;
}

template <class N>
HOST_DEVICE void store_lanes(BaseOf<N>* to, const N& value, int64_t count) {
  if (count == kLanesIn<N>) return store_lanes(to, value);
  std::memcpy(to, &value.v, static_cast<size_t>(count) * sizeof(BaseOf<N>));
}

template <class N>
HOST_DEVICE MaskOf<N> first_lanes(int64_t count) {
  MaskOf<N> mask;
  for (int w = 0; w < kLanesIn<N>; ++w) mask.v[w] = w < count ? -1 : 0;
  return mask;
}

// Rows of all operands, from their first column on.
template <class T>
struct Rows {
  const T* x;
  const T* y;
  T* out;
  int64_t count, stride;
};

// What was gathered of a piece: two arrays, one entry a column, padded to whole vectors.
template <class T>
struct Parts {
  T* a;
  T* b;
};

// A segment that is not cut; a piece, which is gathered into its parts; a piece's result, from the parts merged.
enum class Step { kWhole, kPiece, kResult };

// K vectors side by side.
template <class Op, class T, int Bytes, int K>
struct Columns {
  using N = Lanes<T, Bytes>;
  using First = typename Op::First;
  static constexpr int kW = kLanesIn<N>;

  N a[K], b[K];

  HOST_DEVICE static N load_y(const Rows<T>& rows, int64_t at) {
    return Op::kInputs > 1 ? load_lanes<N>(rows.y + at) : real_number<N>(T(0));
  }

  HOST_DEVICE void gather(const Rows<T>& rows) {
    for (int k = 0; k < K; ++k) a[k] = First::template none<N>();
    for (int64_t start = 0; start < rows.count; start += kRun) {
      const int64_t stop = std::min(start + kRun, rows.count);
      N run[K];
      for (int k = 0; k < K; ++k) run[k] = First::template none<N>();
      for (int64_t r = start; r < stop; ++r) {
        for (int k = 0; k < K; ++k) {
          const int64_t at = r * rows.stride + k * kW;
          run[k] = First::both(run[k], Op::first(load_lanes<N>(rows.x + at), load_y(rows, at)));
        }
      }
      for (int k = 0; k < K; ++k) a[k] = First::both(a[k], run[k]);
    }
    for (int k = 0; k < K; ++k) b[k] = real_number<N>(T(0));
  }

  // The second pass; leaves its terms in `out` where the operation keeps them.
  HOST_DEVICE void gather_again(const Rows<T>& rows) {
    N shift[K];
    for (int k = 0; k < K; ++k) shift[k] = Op::shift(a[k]);
    for (int64_t start = 0; start < rows.count; start += kRun) {
      const int64_t stop = std::min(start + kRun, rows.count);
      N run[K];
      for (int k = 0; k < K; ++k) run[k] = real_number<N>(T(0));
      for (int64_t r = start; r < stop; ++r) {
        for (int k = 0; k < K; ++k) {
          const int64_t at = r * rows.stride + k * kW;
          const N value = Op::second(load_lanes<N>(rows.x + at), shift[k]);
          if constexpr (Op::kKeeps) store_lanes(rows.out + at, value);
          run[k] += value;
        }
      }
      for (int k = 0; k < K; ++k) b[k] += run[k];
    }
  }

  HOST_DEVICE void apply(const Rows<T>& rows) const {
    for (int64_t r = 0; r < rows.count; ++r) {
      for (int k = 0; k < K; ++k) {
        const int64_t at = r * rows.stride + k * kW;
        const N x = load_lanes<N>((Op::kKeeps ? rows.out : rows.x) + at);
        store_lanes(rows.out + at, Op::apply(x, load_y(rows, at), Gathered<N>{a[k], b[k]}));
      }
    }
  }

  // Of the first column, `repeated` lanes have been done before: there, what is kept must not be scaled again.
  HOST_DEVICE void run(Step step, const Rows<T>& rows, const Parts<T>& parts, int64_t repeated) {
    if (step == Step::kResult) {
      for (int k = 0; k < K; ++k) {
        a[k] = load_lanes<N>(parts.a + k * kW);
        b[k] = load_lanes<N>(parts.b + k * kW);
      }
      if (Op::kKeeps && repeated > 0) b[0] = select(first_lanes<N>(repeated), real_number<N>(T(1)), b[0]);
    } else {
      gather(rows);
      if constexpr (Op::kPasses == 2) gather_again(rows);
    }
    if (step == Step::kPiece) {
      for (int k = 0; k < K; ++k) {
        store_lanes(parts.a + k * kW, a[k]);
        store_lanes(parts.b + k * kW, b[k]);
      }
      return;
    }
    for (int k = 0; k < K && step == Step::kWhole; ++k) {
      const Gathered<N> of = Op::finish(Gathered<N>{a[k], b[k]});
      a[k] = of.a;
      b[k] = of.b;
    }
    if constexpr (Op::kRows) {
      apply(rows);
    } else {
      for (int k = 0; k < K; ++k) store_lanes(rows.out + k * kW, a[k]);
    }
  }

  // From that column on.
  HOST_DEVICE static void run(Step step, const Rows<T>& all, const Parts<T>& parts, int64_t column, int64_t repeated) {
    const Rows<T> rows{all.x + column, Op::kInputs > 1 ? all.y + column : nullptr, all.out + column, all.count,
                       all.stride};
    Columns().run(step, rows, Parts<T>{parts.a + column, parts.b + column}, repeated);
  }
};

// Fewer columns than a vector has lanes: a segment's rows are one stretch of memory, whose vectors have the same
// columns in their lanes as those `period` before.
struct Period {
  int columns, period, used;  // as many vectors are gathered apart as hide the latency of an addition

  HOST_DEVICE Period(int64_t inner, int lanes) : columns(static_cast<int>(inner)) {
    int common = lanes;
    while (columns % common != 0) common /= 2;
    period = used = columns / common;
    while (used < 4) used += period;
  }
};

// Of any Period of fewer columns than lanes: three columns use six.
template <class N>
constexpr int kMostVectors = kLanesIn<N> > 6 ? kLanesIn<N> : 6;

// Puts into every lane of a column what that column has.
template <class N>
MANUALGRAD_NOT_INLINED void spread(const Period& by, const BaseOf<N>* of_columns, N* vectors) {
  BaseOf<N> lane[kMostVectors<N> * kLanesIn<N>];
  for (int i = 0, c = 0; i < by.period * kLanesIn<N>; ++i, c = c + 1 == by.columns ? 0 : c + 1) lane[i] = of_columns[c];
  std::memcpy(vectors, lane, sizeof(N) * static_cast<size_t>(by.period));
  for (int j = by.period; j < by.used; ++j) std::memcpy(vectors + j, vectors + j - by.period, sizeof(N));
}

// Brings the lanes of a column together, and spreads the result. `count` elements were gathered.
template <class How, class N>
MANUALGRAD_NOT_INLINED void fold(const Period& by, int64_t count, N* vectors) {
  using T = BaseOf<N>;
  constexpr int kW = kLanesIn<N>;
  T lane[kMostVectors<N> * kW];
  const int lanes = static_cast<int>(std::min<int64_t>(count, int64_t{by.used} * kW)), once = by.period * kW;
  std::memcpy(lane, vectors, sizeof(N) * static_cast<size_t>(by.used));
  for (int i = once; i < lanes; i += kW) {
    T* to = lane + i % once;
    for (int w = 0; w < kW; ++w) to[w] = How::both(to[w], lane[i + w]);
  }
  if (by.period == 1) {  // columns are a power of two
    for (int half = kW / 2; half >= by.columns; half /= 2) {
      for (int w = 0; w < half; ++w) lane[w] = How::both(lane[w], lane[w + half]);
    }
  } else {
    for (int i = by.columns, c = 0; i < std::min(lanes, once); ++i, c = c + 1 == by.columns ? 0 : c + 1) {
      lane[c] = How::both(lane[c], lane[i]);
    }
  }
  spread<N>(by, lane, vectors);
}

template <class Op, class T, int Bytes>
struct Stretch {
  using N = Lanes<T, Bytes>;
  using First = typename Op::First;
  static constexpr int kW = kLanesIn<N>;

  N a[kMostVectors<N>], b[kMostVectors<N>];

  HOST_DEVICE static N load_y(const Rows<T>& rows, int64_t at, int64_t count) {
    return Op::kInputs > 1 ? load_lanes<N>(rows.y + at, count) : real_number<N>(T(0));
  }

  HOST_DEVICE void gather(const Period& by, const Rows<T>& rows, int64_t count) {
    for (int j = 0; j < by.used; ++j) {
      a[j] = First::template none<N>();
      b[j] = real_number<N>(T(0));
    }
    for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
      const int64_t lanes = std::min<int64_t>(kW, count - i);
      const N value = Op::first(load_lanes<N>(rows.x + i, lanes), load_y(rows, i, lanes));
      a[j] = First::both(a[j], lanes == kW ? value : select(first_lanes<N>(lanes), value, First::template none<N>()));
    }
    fold<First>(by, count, a);
    if constexpr (Op::kPasses == 2) {
      for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
        const int64_t lanes = std::min<int64_t>(kW, count - i);
        const N value = Op::second(load_lanes<N>(rows.x + i, lanes), Op::shift(a[j]));
        if constexpr (Op::kKeeps) store_lanes(rows.out + i, value, lanes);
        b[j] += lanes == kW ? value : select(first_lanes<N>(lanes), value, real_number<N>(T(0)));
      }
      fold<Added>(by, count, b);
    }
  }

  HOST_DEVICE void apply(const Period& by, const Rows<T>& rows, int64_t count) const {
    for (int64_t i = 0, j = 0; i < count; i += kW, j = j + 1 == by.used ? 0 : j + 1) {
      const int64_t lanes = std::min<int64_t>(kW, count - i);
      const N x = load_lanes<N>((Op::kKeeps ? rows.out : rows.x) + i, lanes);
      store_lanes(rows.out + i, Op::apply(x, load_y(rows, i, lanes), Gathered<N>{a[j], b[j]}), lanes);
    }
  }

  HOST_DEVICE void run(Step step, const Rows<T>& rows, const Parts<T>& parts) {
    const Period by(rows.stride, kW);
    const int64_t count = rows.count * by.columns;
    if (step == Step::kResult) {
      spread<N>(by, parts.a, a);
      spread<N>(by, parts.b, b);
    } else {
      gather(by, rows, count);
    }
    if (step == Step::kPiece) {
      store_lanes(parts.a, a[0]);
      store_lanes(parts.b, b[0]);
      return;
    }
    for (int j = 0; j < by.used && step == Step::kWhole; ++j) {
      const Gathered<N> of = Op::finish(Gathered<N>{a[j], b[j]});
      a[j] = of.a;
      b[j] = of.b;
    }
    if constexpr (Op::kRows) {
      apply(by, rows, count);
    } else {
      store_lanes(rows.out, a[0], by.columns);
    }
  }
};

// --- tasks ----------------------------------------------------------------------------------------------------------

template <class T>
struct Operands {
  const T* x;
  const T* y;
  T* out;
  T* parts;  // (outer, pieces, 2, padded)
  int64_t length, inner, segments, padded, tiles;
};

template <class T>
HOST_DEVICE Parts<T> parts_of(const Operands<T>& at, const Schedule& schedule, int64_t outer, int64_t piece) {
  T* parts = at.parts + (outer * static_cast<int64_t>(schedule.pieces.size()) + piece) * 2 * at.padded;
  return {parts, parts + at.padded};
}

template <class Op, class T, int Bytes>
struct TasksBody {
  HOST_DEVICE static void rows(Step step, const Operands<T>& at, int64_t outer, int64_t tile, const Piece& piece,
                               const Parts<T>& of) {
    constexpr int kW = kLanes<T, Bytes>;
    const int64_t row = outer * at.length + piece.begin, column = tile * kTileColumns;
    const int64_t out = Op::kRows ? row : outer * at.segments + piece.segment;
    const Rows<T> rows{at.x + row * at.inner, Op::kInputs > 1 ? at.y + row * at.inner : nullptr,
                       at.out + out * at.inner, piece.end - piece.begin, at.inner};
    if (at.inner < kW) return Stretch<Op, T, Bytes>().run(step, rows, of);
    const int64_t end = tile + 1 == at.tiles ? at.inner : column + kTileColumns;
    int64_t c = column;
    for (; c + 4 * kW <= end; c += 4 * kW) Columns<Op, T, Bytes, 4>::run(step, rows, of, c, 0);
    for (; c + 2 * kW <= end; c += 2 * kW) Columns<Op, T, Bytes, 2>::run(step, rows, of, c, 0);
    // The last vector overlaps the one before where they do not come out even.
    for (; c < end; c += kW)
      Columns<Op, T, Bytes, 1>::run(step, rows, of, std::min(c, end - kW), c - std::min(c, end - kW));
  }

  // Tasks [begin, end) of every (outer, tile), the first of which are left out.
  HOST_DEVICE static void run(const Operands<T>& at, const Schedule& schedule, int64_t first, Step of_pieces,
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

// Merges the parts of segments that were cut: [begin, end) of every (outer, cut). Leaves in each part what its rows
// need, or writes the result.
template <class Op, class T, int Bytes>
struct MergeBody {
  using N = Lanes<T, Bytes>;

  HOST_DEVICE static void run(const Operands<T>& at, const Schedule& schedule, int64_t begin, int64_t end) {
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

// Rows of `bytes` bytes, each as often as its segment is long.
template <int Bytes>
struct RepeatBody {
  HOST_DEVICE static void copies(const char* from, char* to, int64_t count, int64_t bytes) {
    if (bytes >= Bytes) {
      // The last vector overlaps the one before where they do not come out even.
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
  HOST_DEVICE static void run(const SegmentPlan& plan, const Schedule& schedule, const char* from, char* to,
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

struct Cpu {
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

STABLE_TORCH_LIBRARY_IMPL(manualgrad, CPU, m) { manualgrad::SegmentOperators<manualgrad::Cpu>::add_to(m); }
