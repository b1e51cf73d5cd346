// Moves batches of small matrices from memory into lanes and back. Host code.
//
// Lanes have the same entry of many matrices next to each other, memory has the entries of one matrix next to each
// other, so this is a transposition. It is compiled once, in transpose.cpp, for the types that are listed there.
#pragma once

#include "../../base/simd.h"
#include "lanes.h"

namespace manualgrad {

// Whether kernels run in such lanes at all, or only products of single matrices.
template <class N>
constexpr bool kHasGroups = sizeof(RealOf<N>) > 16 || kBaselineHasLanes;

// The most reals in a contiguous line that is moved as a whole.
constexpr int kLineReals = 128;

// Loads matrices [first, first + count) into lanes, row-major, rows `pitch` apart. Lanes without a matrix repeat
// others.
template <class S, class N>
MANUALGRAD_NOT_INLINED void gather(const MatrixBatch<const S>& from, int64_t first, int64_t count, int rows,
                                   int columns, N* to, int pitch, Part part = Part::kAll);
template <class S, class N>
void gather(const MatrixBatch<const S>& from, int64_t first, int64_t count, int rows, int columns, N* to) {
  gather(from, first, count, rows, columns, to, columns);
}

// Stores row r of matrix w to row places[r * kCount + w], if there are places.
template <class N, class S>
MANUALGRAD_NOT_INLINED void scatter(const N* from, int64_t first, int64_t count, int rows, int columns,
                                    const MatrixBatch<S>& to, const int* places = nullptr);

}  // namespace manualgrad
