// Contract: factor_blocks.h.
#include "factor_blocks.h"

#include "blocks.h"

#include <memory>
#include <numeric>
#include <vector>

namespace manualgrad {
namespace {

// Memory for four matrices of (n, pitch) and one block of rows.
template <class T>
class Memory {
 public:
  Memory(int n, int pitch)
      : size_(static_cast<size_t>(n) * pitch),
        data_(new T[4 * size_ + Blocks<T, 16>::kBlock * static_cast<size_t>(pitch)]) {}

  T* matrix(int i) const { return data_.get() + i * size_; }
  void clear(int i) const { std::fill(matrix(i), matrix(i) + size_, T(0)); }

  // Row i of L U, which has n, is row order[i] of the matrix.
  const int* order(const Pivots& pivots, int64_t b, int n) {
    order_.resize(static_cast<size_t>(n));
    std::iota(order_.begin(), order_.end(), 0);
    if (pivots.data != nullptr) order_of_pivots(pivots, b, n, n, order_.data(), 1);
    return order_.data();
  }
  // The same of a permutation matrix; null if it is none.
  const int* order(const MatrixBatch<const T>& P, int64_t b, int n) {
    order_.resize(static_cast<size_t>(n));
    std::vector<T> places(order_.size()), seen(order_.size());
    for (int r = 1; r < n; ++r) {
      for (int c = 0; c < n; ++c) places[c] += P.at(b, r, c) * static_cast<T>(r);
    }
    for (int c = 0; c < n; ++c) {
      order_[c] = row_of_one(places[c], n);
      seen[order_[c]] = 1;
    }
    return std::accumulate(seen.begin(), seen.end(), T(0)) == static_cast<T>(n) ? order_.data() : nullptr;
  }

 private:
  size_t size_;
  std::unique_ptr<T[]> data_;
  std::vector<int> order_;
};

// Row i to row order[i].
template <class T>
void store_rows(const T* from, int64_t pitch, int m, int n, const MatrixBatch<T>& to, int64_t b, const int* order) {
  for (int i = 0; i < m; ++i) std::memcpy(&to.at(b, order[i], 0), from + i * pitch, n * sizeof(T));
}

template <class T, int Bytes>
void pull(const LuArguments<T>& at, int64_t b, int, int n, Memory<T>& memory) {
  const Blocks<T, Bytes> blocks{n, row_pitch<T>(n)};
  const int pitch = blocks.pitch;
  T *L = memory.matrix(0), *U = memory.matrix(1), *G = memory.matrix(2), *W = memory.matrix(3);
  const bool lower = at.given.lower.data != nullptr;
  load_lower(at.factors.lower, b, n, L, pitch, false);
  for (int i = 0; i < n; ++i) L[i * (pitch + 1)] = 1;
  load_upper(at.factors.upper, b, n, U, pitch);
  memory.clear(3);
  if (at.given.upper.data != nullptr) {
    load_upper(at.given.upper, b, n, G, pitch);
    transpose(G, pitch, n, n, W, pitch);
  }
  if (lower) load_lower(at.given.lower, b, n, G, pitch, false);
  blocks.couple(lower ? G : nullptr, L, {U, pitch, 1}, true, W, memory.matrix(4));
  transpose(W, pitch, n, n, G, pitch);
  blocks.solve_adjoint(L, true, true, G, pitch);
  const int* order = at.P.data != nullptr ? memory.order(at.P, b, n) : memory.order(at.pivots, b, n);
  if (order == nullptr) {
    std::fill(G, W, not_a_number<T>());
    order = memory.order(Pivots{}, b, n);
  }
  store_rows(G, pitch, n, n, at.out, b, order);
}

template <class T, int Bytes>
void pull(const CholeskyArguments<T>& at, int64_t b, int, int n, Memory<T>& memory) {
  const Blocks<T, Bytes> blocks{n, row_pitch<T>(n)};
  const int pitch = blocks.pitch;
  T *L = memory.matrix(0), *G = memory.matrix(1), *W = memory.matrix(2);
  load_lower(at.factor.transposed(), b, n, L, pitch, true);
  load_lower(at.given.transposed(), b, n, G, pitch, true);
  memory.clear(2);
  blocks.couple(G, L, {L, 1, pitch}, false, W, memory.matrix(4));
  transpose(W, pitch, n, n, G, pitch);
  blocks.solve_adjoint(L, true, false, G, pitch);
  transpose(G, pitch, n, n, W, pitch);
  for (int i = 0; i < n; ++i) {
    T* to = &at.out.at(b, i, 0);
    for (int j = 0; j < n; ++j) to[j] = (G[i * pitch + j] + W[i * pitch + j]) / 2;
  }
}

template <class T, int Bytes>
void pull(const DetArguments<T>& at, int64_t b, int, int n, Memory<T>& memory) {
  for (int i = 0; i < n; ++i) {
    if (at.factors.at(b, i, i) == 0) {
      DetPull<T, 0> family{};
      static_cast<DetArguments<T>&>(family) = at;
      static_cast<Sides<0>&>(family) = {1, n, n};
      std::vector<T> numbers(static_cast<size_t>(family.numbers()));
      return family.run(OneMatrix<Alone>{{}, b}, numbers.data());
    }
  }
  const Blocks<T, Bytes> blocks{n, row_pitch<T>(n)};
  const int pitch = blocks.pitch;
  T *L = memory.matrix(0), *U = memory.matrix(1), *Y = memory.matrix(2);
  load_lower(at.factors, b, n, L, pitch, false);
  load_upper(at.factors, b, n, U, pitch);
  memory.clear(2);
  const T scale = at.g.at(b, 0, 0) * (at.det.data != nullptr ? at.det.at(b, 0, 0) : T(1));
  for (int i = 0; i < n; ++i) Y[i * (pitch + 1)] = scale;
  blocks.solve_adjoint(U, false, false, Y, pitch, true);
  blocks.solve_adjoint(L, true, true, Y, pitch);
  // that is the transpose of what is asked for
  store_rows(Y, pitch, n, n, MatrixBatch<T>{U, 0, pitch, 1}, 0, memory.order(at.pivots, b, n));
  transpose(U, pitch, n, n, &at.out.at(b, 0, 0), at.out.row_stride);
}

template <class T, int Bytes>
void pull(const InverseArguments<T>& at, int64_t b, int, int n, Memory<T>& memory) {
  using Block = Blocks<T, Bytes>;
  const int pitch = row_pitch<T>(n);
  T *X = memory.matrix(0), *G = memory.matrix(1), *product = memory.matrix(2);
  load_rows(at.pull ? at.inverse.transposed() : at.inverse, b, n, n, X, pitch);
  load_rows(at.given, b, n, n, G, pitch);
  memory.clear(2);
  Block::add({G, pitch, 1}, X, n, n, pitch, product, pitch, pitch);
  memory.clear(1);
  Block::subtract({X, pitch, 1}, product, n, n, pitch, G, pitch, pitch);
  store_rows(G, pitch, n, n, at.out, b, memory.order(Pivots{}, b, n));
}

template <class T, int Bytes>
void pull(const SolveArguments<T>& at, int64_t b, int m, int n, Memory<T>& memory) {
  const Blocks<T, Bytes> blocks{n, row_pitch<T>(n)};
  const int pitch = blocks.pitch, columns = row_pitch<T>(m);
  T *L = memory.matrix(0), *U = memory.matrix(1), *G = memory.matrix(2), *X = memory.matrix(3);
  load_lower(at.factors, b, n, L, pitch, false);
  load_upper(at.factors, b, n, U, pitch);
  load_rows(at.given, b, n, m, G, columns);
  blocks.solve_adjoint(U, false, false, G, columns);
  blocks.solve_adjoint(L, true, true, G, columns);
  const int* order = memory.order(at.pivots, b, n);
  store_rows(G, columns, n, m, at.out_right, b, order);
  load_rows(at.solution.transposed(), b, m, n, X, pitch);
  memory.clear(0);
  blocks.subtract({G, columns, 1}, X, n, m, pitch, L, pitch, pitch);
  store_rows(L, pitch, n, n, at.out, b, order);
}

}  // namespace

template <class Arguments>
void pull_blocks(const Arguments& at, int64_t batch, int m, int n) {
  using T = typename Arguments::Scalar;
  const int side = std::max(m, n);
  parallel_for(batch, 1, [&](int64_t begin, int64_t end) {
    Memory<T> memory(side, row_pitch<T>(side));
    with_native([&](auto bytes) {
      for (int64_t b = begin; b < end; ++b) pull<T, decltype(bytes)::value>(at, b, m, n, memory);
    });
  });
}

#define MANUALGRAD_BLOCKS(Arguments)                                     \
  template void pull_blocks(const Arguments<float>&, int64_t, int, int); \
  template void pull_blocks(const Arguments<double>&, int64_t, int, int);
MANUALGRAD_BLOCKS(LuArguments)
MANUALGRAD_BLOCKS(CholeskyArguments)
MANUALGRAD_BLOCKS(DetArguments)
MANUALGRAD_BLOCKS(InverseArguments)
MANUALGRAD_BLOCKS(SolveArguments)
#undef MANUALGRAD_BLOCKS

}  // namespace manualgrad
