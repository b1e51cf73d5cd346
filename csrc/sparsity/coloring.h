// Colorings of sparsity patterns.
//
//   manualgrad_sparsity::degree_order(
//       Tensor vertex_ptr, Tensor nets, Tensor net_ptr, Tensor vertices, int kind) -> Tensor
//   manualgrad_sparsity::distance2(
//       Tensor vertex_ptr, Tensor nets, Tensor net_ptr, Tensor vertices, Tensor order) -> Tensor
//   manualgrad_sparsity::star(Tensor crow, Tensor col, Tensor order) -> Tensor
//   manualgrad_sparsity::acyclic(Tensor crow, Tensor col, Tensor order) -> Tensor
//   manualgrad_sparsity::elimination(Tensor crow, Tensor col, Tensor colors) -> Tensor
//
// All tensors are contiguous, int64, with one dim. A bipartite graph is given twice: the nets of each vertex and the
// vertices of each net, as compressed rows. A graph for `star` and the two after it is a pattern in compressed rows
// that is symmetric and sorted; its diagonal is ignored. Colors begin at 0. The same results, entry for entry, as the
// functions in torch_manualgrad/sparsity/greedy.py, which define the algorithms.
#pragma once

#include "../base/abi.h"
#include "../base/check.h"

namespace manualgrad {

// The entries of a contiguous tensor of int64 with one dim.
struct Integers {
  const int64_t* data;
  int64_t size;
  int64_t operator[](int64_t i) const { return data[i]; }
};

inline Integers integers(const Tensor& x, const char* name) {
  MANUALGRAD_CHECK(x.scalar_type() == ScalarType::Long && x.dim() == 1 && x.is_contiguous(),
                   "manualgrad_sparsity: ", name, ": expected a contiguous tensor of int64 with one dim, got shape ",
                   shape_of(x));
  return {static_cast<const int64_t*>(x.const_data_ptr()), x.numel()};
}

// Compressed rows whose entries are below `bound`.
struct Rows {
  Integers begin, entry;
  int64_t count() const { return begin.size - 1; }
};

inline Rows rows(const Tensor& begin, const Tensor& entry, int64_t bound, const char* name) {
  const Rows found{integers(begin, name), integers(entry, name)};
  MANUALGRAD_CHECK(found.begin.size > 0 && found.begin[0] == 0 && found.begin[found.count()] == found.entry.size,
                   "manualgrad_sparsity: ", name, ": not compressed rows");
  for (int64_t i = 0; i < found.count(); ++i)
    MANUALGRAD_CHECK(found.begin[i] <= found.begin[i + 1], "manualgrad_sparsity: ", name, ": row ", i,
                     " ends before it begins");
  for (int64_t p = 0; p < found.entry.size; ++p)
    MANUALGRAD_CHECK(found.entry[p] >= 0 && found.entry[p] < bound, "manualgrad_sparsity: ", name, ": entry ",
                     found.entry[p], " is out of range");
  return found;
}

}  // namespace manualgrad
