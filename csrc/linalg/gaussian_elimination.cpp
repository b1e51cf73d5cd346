// Linear systems on the CPU, by Gaussian elimination with partial pivoting.
//
//   manualgrad::gaussian_elimination(Tensor A, Tensor B) -> (Tensor X, Tensor LU, Tensor pivots, Tensor info)
//   manualgrad::solve_eliminated(Tensor LU, Tensor pivots, Tensor B, bool adjoint) -> Tensor X
//
// The first solves A X = B and returns the factors of A; the second solves A X = B, or A^T X = B, by those of a real A.
//
// A (*, n, n) and B (*, n, r), at any strides, of the same batch: n up to kEliminationOrder for float32 and float64,
// and up to kLaneOrder for their complex dtypes; r up to the larger of n and kLaneOrder. X (*, n, r), the int32 pivots
// (*, n), counted from one as LAPACK does, and int32 info (*) are contiguous; the matrices of LU (*, n, n) are
// column-major, for LAPACK. The results of a matrix are bitwise identical at any position in the batch.
//
// info: 0 if all is well. A positive number is that of the first zero pivot; X is then not finite. -1: no pivot is
// zero, but a result is not finite, or the inverse of a pivot is not a normal number. X is multiplied by these
// inverses.
#include "../math/elimination.h"
#include "../math/triangular.h"
#include "run_on_cpu.h"

#include <cmath>
#include <limits>
#include <tuple>

namespace manualgrad {
namespace {

// n: the order of the matrix; m: the number of right-hand sides. pivots: one row for each matrix, in its dtype, counted
// from zero.
template <class S>
struct EliminationArguments {
  using Scalar = S;
  MatrixBatch<const S> a, b;
  MatrixBatch<S> x, lu, pivots;
};

// In lanes. B is appended to A as extra columns, so elimination turns it into L^-1 P B.
template <class S, int F>
struct Elimination : EliminationArguments<S>, Order<F> {
  int scratch_size() const { return this->n() * (this->n() + this->m() + 2); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    using R = RealOf<N>;
    const int n = this->n(), r = this->m(), pitch = n + r;
    N *A = memory, *pivots = A + n * pitch, *inverse = pivots + n;
    R* order = reinterpret_cast<R*>(inverse);
    loader.read(this->a, n, n, A, pitch);
    loader.read(this->b, n, r, A + n, pitch);
    lu(loader.threads, A, order, n, pitch, [&](int j, const R& at) { pivots[j] = from_real<N>(at); });
    solve_upper(loader.threads, StridedMatrix<const N>{A, pitch, 1}, StridedMatrix<N>{A + n, pitch, 1}, inverse, n, r);
    loader.write(pivots, 1, n, this->pivots);
    const MatrixBatch<S>& x = this->x;
    for (int i = 0; i < n; ++i) {
      loader.write(A + i * pitch + n, 1, r, MatrixBatch<S>{x.data + i * x.row_stride, x.batch_stride, 0, 1});
      for (int j = 0; j < n; ++j) A[i * n + j] = A[i * pitch + j];  // behind what is still to be read
    }
    loader.write(A, n, n, this->lu);
  }
};

// The columns of one block of a real matrix: rows of kStep entries, without gaps. k of them have a pivot.
template <class T, int Bytes>
struct EliminateBlock {
  using Tile = RegisterTile<T, Bytes>;
  static constexpr int kStep = kRowStep<T>, kVectors = kStep / Tile::kCount;

  HOST_INLINE static void run(T* block, int k, int rows, int* pivots) {
    int at = 0;
    T best = std::abs(block[0]);
    const auto consider = [&](int row, T entry) {
      const T size = std::abs(entry);
      if (size > best) {
        best = size;
        at = row;
      }
    };
    for (int i = 1; i < rows; ++i) consider(i, block[i * kStep]);
    for (int j = 0; j < k; ++j) {
      pivots[j] = at;
      T* row = block + j * kStep;
      if (at != j) std::swap_ranges(row, row + kStep, block + at * kStep);
      const T pivot = row[j], inverse = 1 / pivot;
      const bool inverts = std::isfinite(inverse);
      // what is subtracted from other rows
      alignas(kLaneBytes) T part[kStep];
      for (int c = 0; c < kStep; ++c) part[c] = c > j ? row[c] : T(0);
      typename Tile::values held[kVectors];
      for (int v = 0; v < kVectors; ++v) held[v] = Tile::load(part + v * Tile::kCount);
      best = -1;
      const int next = j + 1 < k ? j + 1 : j;
      for (int i = j + 1; i < rows; ++i) {
        T* other = block + i * kStep;
        if (pivot != 0) {  // else the column is zero
          const T factor = inverts ? other[j] * inverse : other[j] / pivot;
          for (int v = 0; v < kVectors; ++v) {
            T* place = other + v * Tile::kCount;
            Tile::store(place, Tile::load(place) - held[v] * factor);
          }
          other[j] = factor;
        }
        if (i == next) at = next;
        consider(i, other[next]);
      }
    }
  }
};

// One real matrix of order n in the cache, and some columns of B at a time.
template <class T, int Bytes>
struct CachedElimination {
  using Matrix = CachedMatrix<T, Bytes>;
  static constexpr int kStep = kRowStep<T>, kColumns = 2 * kStep;

  int n, width, pitch;
  std::unique_ptr<T[]> memory;
  std::vector<int> order;

  explicit CachedElimination(int size)
      : n(size),
        width(row_pitch<T>(n)),
        pitch(spread_pitch<T>(n)),
        memory(new T[static_cast<size_t>(n) * (pitch + 2 * kColumns + 1)]),
        order(static_cast<size_t>(n)) {}

  void factor(const EliminationArguments<T>& at, int64_t b) {
    load_rows(at.a, b, n, n, row(0), pitch, width);
    std::iota(order.begin(), order.end(), 0);
    eliminate(0, width, at.pivots.data + b * n);
    transpose(row(0), pitch, n, n, &at.lu.at(b, 0, 0), at.lu.column_stride);
  }
  void load(const MatrixBatch<const T>& LU, const Pivots& pivots, int64_t b) {
    load_rows(LU, b, n, n, row(0), pitch, width);
    order_of_pivots(pivots, b, n, n, order.data(), 1);
  }

  // x (n, r) := A^-1 b, or A^-T b, by the factors.
  void solve(const MatrixBatch<const T>& right, const MatrixBatch<T>& x, int64_t b, int r, bool adjoint) {
    T *B = row(n), *Y = B + n * kColumns, *inverse = Y + n * kColumns;
    const Matrix matrix{n, pitch};
    const StridedMatrix<const T> factors{row(0), pitch, 1};
    for (int done = 0; done < r; done += kColumns) {
      const int count = std::min(kColumns, r - done), columns = row_pitch<T>(count);
      const auto from = [&](auto batch) { return batch.data += done * batch.column_stride, batch; };
      load_rows(from(right), b, n, count, B, columns);
      if (adjoint) {
        matrix.solve_upper_adjoint(factors, inverse, columns, {B, columns});
        matrix.solve_lower_adjoint(factors, nullptr, columns, {B, columns});
        store_rows(B, columns, n, count, from(x), b, order.data());
      } else {
        for (int i = 0; i < n; ++i) copy_row(B + order[i] * columns, columns, Y + i * columns);
        matrix.solve_lower(factors, columns, {Y, columns});
        matrix.solve_upper(factors, inverse, columns, {Y, columns});
        store_rows(Y, columns, n, count, from(x), b, nullptr);
      }
    }
  }

  // Eliminates the columns [begin, begin + count): the left half, then the right half after subtracting the left.
  void eliminate(int begin, int count, T* pivots) {
    if (count <= kStep) return eliminate_block(begin, pivots);
    const int half = (count / kStep + 1) / 2 * kStep, next = begin + half, left = count - half;
    eliminate(begin, half, pivots);
    const Rows<T> top{row(begin) + next, pitch};
    Matrix{half, pitch}.solve_lower({row(begin) + begin, pitch, 1}, left, top);
    Matrix::subtract({row(next) + begin, pitch, 1}, {top.data, pitch}, n - next, half, left, {row(next) + next, pitch});
    eliminate(next, left, pivots);
  }

  void eliminate_block(int begin, T* pivots) {
    const int rows = n - begin, count = std::min(kStep, rows);
    T* block = row(n);
    int places[kStep], *found = places;  // run_native() would pass the array itself as constant
    for (int i = 0; i < rows; ++i) copy_row(row(begin + i) + begin, kStep, block + i * kStep);
    run_native<Bytes, EliminateBlock<T, Bytes>>(block, count, rows, found);
    for (int j = 0; j < count; ++j) {
      pivots[begin + j] = static_cast<T>(begin + places[j]);
      if (places[j] == j) continue;
      std::swap_ranges(row(begin + j), row(begin + j) + width, row(begin + places[j]));
      std::swap(order[begin + j], order[begin + places[j]]);
    }
    for (int i = 0; i < rows; ++i) copy_row(block + i * kStep, kStep, row(begin + i) + begin);
  }

  T* row(int i) const { return memory.get() + i * pitch; }
};

struct GaussianElimination {
  static std::tuple<Tensor, Tensor, Tensor, Tensor> gaussian_elimination(const Tensor& A, const Tensor& B) {
    constexpr const char* where = "manualgrad::gaussian_elimination: ";
    const MatrixShape shape = square_shape(where, "A", A, kEliminationOrder);
    const int64_t n = A.size(-1), r = right_hand_sides(where, "B", B, A);
    shape.check("B", B, {n, r});
    Tensor X = allocate(shape.with({n, r}), A), LU = allocate(shape.with({n, n}), A);  // LU is transposed below
    Tensor places = allocate(shape.with({1, n}), A);
    const int32_t integers = aoti_torch_dtype_int32();
    Tensor pivots = allocate(shape.with({n}), A, integers), info = allocate(shape.with({}), A, integers);
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const int64_t batch = shape.batch();
      auto* found = static_cast<int32_t*>(info.mutable_data_ptr());
      if (n == 0) std::fill(found, found + batch, 0);
      if (batch == 0 || n == 0) return;
      KeptMatrices kept;
      const EliminationArguments<S> all{kept.matrices<S>(A), kept.matrices<S>(B), new_matrices<S>(X),
                                        new_matrices<S>(LU).transposed(), new_matrices<S>(places)};
      eliminate(all, batch, static_cast<int>(r), static_cast<int>(n));
      report(all, batch, r, n, static_cast<int32_t*>(pivots.mutable_data_ptr()), found);
    });
    return {X, torch::stable::transpose(LU, -2, -1), pivots, info};
  }

  template <class S>
  static void eliminate(const EliminationArguments<S>& all, int64_t batch, int r, int n) {
    if constexpr (!NumberTraits<S>::kComplex) {
      if (n > kEliminationLanes) {
        return for_each_in_cache<S>(batch, r, n, [&](auto& matrix, int64_t b) {
          matrix.factor(all, b);
          matrix.solve(all.b, all.x, b, r, false);
        });
      }
    }
    with_order<Elimination, false>(all, batch, r, n, [](const auto& kernel) { run_in_lanes(kernel, kernel); });
  }

  // f(matrix, b) for each matrix of the batch; `matrix` is a CachedElimination.
  template <class T, class F>
  static void for_each_in_cache(int64_t batch, int r, int n, const F& f) {
    const int64_t work = int64_t{n} * n * (n + 2 * r);
    parallel_for(batch, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
      with_native([&](auto bytes) {
        CachedElimination<T, decltype(bytes)::value> matrix(n);
        for (int64_t b = begin; b < end; ++b) f(matrix, b);
      });
    });
  }

  // The pivots as integers, and info.
  template <class S>
  static void report(const EliminationArguments<S>& all, int64_t batch, int64_t r, int64_t n, int32_t* pivots,
                     int32_t* info) {
    parallel_for(batch, std::max<int64_t>(1, kGrain / (n * (n + r))), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const S *LU = all.lu.data + b * n * n, *X = all.x.data + b * n * r, *places = all.pivots.data + b * n;
        int zero = 0;
        BaseOf<S> largest = 0;
        for (int64_t j = n - 1; j >= 0; --j) {
          pivots[b * n + j] = static_cast<int32_t>(real_part(places[j])) + 1;
          const auto size = pivot_size(LU[j * n + j]);
          if (size == 0) zero = static_cast<int>(j) + 1;
          largest = std::max(largest, size);
        }
        const bool exact = 1 / largest >= std::numeric_limits<BaseOf<S>>::min();
        info[b] = zero > 0 ? zero : (exact && all_finite(LU, n * n) && all_finite(X, n * r) ? 0 : -1);
      }
    });
  }

  static Tensor solve_eliminated(const Tensor& LU, const Tensor& pivots, const Tensor& B, bool adjoint) {
    constexpr const char* where = "manualgrad::solve_eliminated: ";
    const MatrixShape shape = square_shape(where, "LU", LU, kEliminationOrder);
    MANUALGRAD_CHECK(real_dtype(LU.scalar_type()) == LU.scalar_type(), where, "LU: expected float32 or float64, got ",
                     dtype_name(LU.scalar_type()));
    const int64_t n = LU.size(-1), r = right_hand_sides(where, "B", B, LU);
    shape.check("B", B, {n, r});
    shape.check("pivots", pivots, {n}, ScalarType::Int);
    Tensor X = allocate(shape.with({n, r}), LU);
    dispatch_filled(X, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      if constexpr (!NumberTraits<S>::kComplex) {
        KeptMatrices kept;
        const auto factors = kept.matrices<S>(LU), right = kept.matrices<S>(B);
        const Pivots interchanges = kept.matrices<int32_t>(pivots, 1);
        const MatrixBatch<S> x = new_matrices<S>(X);
        for_each_in_cache<S>(shape.batch(), static_cast<int>(r), static_cast<int>(n), [&](auto& matrix, int64_t b) {
          matrix.load(factors, interchanges, b);
          matrix.solve(right, x, b, static_cast<int>(r), adjoint);
        });
      }
    });
    return X;
  }

  static void add_to(Library& library) {
    library.impl("gaussian_elimination", TORCH_BOX(&gaussian_elimination));
    library.impl("solve_eliminated", TORCH_BOX(&solve_eliminated));
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::GaussianElimination)
