// Which rows make one task on the CPU. Host code.
#pragma once

#include "../base/parallel.h"
#include "segments.h"

#include <algorithm>
#include <vector>

namespace manualgrad {

// Sizes in elements: of a task of short segments or a piece; and of the shortest segment that is cut.
constexpr int64_t kTask = 16384, kLong = 65536;
// The least number of columns in one task.
constexpr int64_t kTileColumns = 2048;

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
  HOST_INLINE void each(int64_t task, const F& f) const {
    const int64_t ranges = static_cast<int64_t>(whole.size());
    if (task >= ranges) return f(pieces[static_cast<size_t>(task - ranges)], task - ranges);
    const Range range = whole[static_cast<size_t>(task)];
    for (int64_t s = range.begin; s < range.end; ++s) f(Piece{s, offsets[s], offsets[s + 1]}, int64_t{-1});
  }
};

// Reads the offsets once, and raises if they are not valid. `width` is the number of elements of a row.
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

// f(begin, end) over `count` tasks with `elements` elements in total.
template <class F>
void run_tasks(int64_t count, int64_t elements, const F& f) {
  if (count > 0) parallel_for(count, std::max<int64_t>(1, count * kGrain / std::max<int64_t>(1, elements)), f);
}

}  // namespace manualgrad
