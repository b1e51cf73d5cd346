// The Cholesky factor on the CPU.
//
//   manualgrad::cholesky_factor(Tensor A, bool upper) -> (Tensor L, Tensor info)
//
// A = L L^H, and only the lower triangle of A is read; or A = U^H U, only the upper triangle is read, and U is
// returned. A (*, n, n) has any strides. n is at most kCholeskyOrder for float32 and float64, and kLaneOrder for their
// complex dtypes. The matrices of the result (*, n, n) are column-major, as LAPACK's, and bitwise identical at any
// position in the batch.
//
// int32 info (*): 0 if all is well. A positive number is the order of the first leading minor that is not positive. -1:
// all are positive, but an entry of L is not finite.
#include "../math/cholesky.h"
#include "run_on_cpu.h"

#include <cmath>
#include <tuple>

namespace manualgrad {
namespace {

// `a`: its upper triangle is read. A = R^H R.
template <class S>
struct FactorArguments {
  using Scalar = S;
  MatrixBatch<const S> a;
  MatrixBatch<S> r;
};

template <class S, int F>
struct CholeskyFactor : FactorArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  int scratch_size() const { return this->n() * this->n(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* R) const {
    const int n = this->n(), pitch = loader.pitch(n);
    loader.read(this->a, n, n, R, pitch, loader.template whole<S>(n * n) ? Part::kAll : Part::kUpper);
    cholesky(loader.threads, R, n, pitch);
    loader.write(R, n, n, this->r);
  }
};

// The first k rows and columns of a block of kStep columns, in place; its rows are `pitch` apart.
template <class T, int Bytes>
struct FactorBlock {
  using Tile = RegisterTile<T, Bytes>;
  static constexpr int kVectors = kRowStep<T> / Tile::kCount;

  HOST_INLINE static void run(T* block, int pitch, int k) {
    for (int j = 0; j < k; ++j) {
      T* row = block + j * pitch;
      const T root = std::sqrt(row[j]), inverse = 1 / root;
      typename Tile::values held[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        held[v] = Tile::load(row + v * Tile::kCount) * inverse;
        Tile::store(row + v * Tile::kCount, held[v]);
      }
      row[j] = root;
      for (int i = j + 1; i < k; ++i) {
        T* other = block + i * pitch;
        const T factor = row[i];
        for (int v = 0; v < kVectors; ++v) {
          Tile::store(other + v * Tile::kCount, Tile::load(other + v * Tile::kCount) - held[v] * factor);
        }
      }
    }
  }
};

// One real matrix of order n in the cache. What is below the diagonal is never read.
template <class T, int Bytes>
struct CachedFactor {
  using Matrix = CachedMatrix<T, Bytes>;
  static constexpr int kStep = kRowStep<T>, kStrip = 2 * kStep;

  int n, width, pitch;
  std::unique_ptr<T[]> memory;

  explicit CachedFactor(int size)
      : n(size),
        width(row_pitch<T>(n)),
        pitch(spread_pitch<T>(n)),
        memory(new T[static_cast<size_t>(n) * (pitch + 1)]) {}

  void factor(const FactorArguments<T>& at, int64_t b) {
    load_rows(at.a, b, n, n, row(0), pitch, width);
    factor(0, n, width);
    for (int i = 0; i < n; ++i) std::fill(row(i), row(i) + i, T(0));
    T* to = &at.r.at(b, 0, 0);
    if (at.r.column_stride == 1) {
      for (int i = 0; i < n; ++i) copy_row(row(i), n, to + i * at.r.row_stride);
    } else {
      transpose(row(0), pitch, n, n, to, at.r.column_stride);
    }
  }

  // The rows [begin, begin + rows), and as many of their columns from `begin` on: the upper half; then the lower half,
  // after subtracting the upper.
  void factor(int begin, int rows, int columns) {
    if (rows <= kStep) return run_native<Bytes, FactorBlock<T, Bytes>>(row(begin) + begin, pitch, rows);
    const int half = (columns / kStep + 1) / 2 * kStep, next = begin + half, left = columns - half;
    factor(begin, half, half);
    T* const top = row(begin) + next;
    Matrix{half, pitch}.solve_upper_adjoint({row(begin) + begin, pitch, 1}, row(n), left, {top, pitch});
    for (int i = 0; i < rows - half; i += kStrip) {
      Matrix::subtract({top + i, 1, pitch}, {top + i, pitch}, std::min(kStrip, rows - half - i), half, left - i,
                       {row(next + i) + next + i, pitch});
    }
    factor(next, rows - half, left);
  }

  T* row(int i) const { return memory.get() + i * pitch; }
};

struct CholeskyFactors {
  static std::tuple<Tensor, Tensor> cholesky_factor(const Tensor& A, bool upper) {
    constexpr const char* where = "manualgrad::cholesky_factor: ";
    const MatrixShape shape = square_shape(where, "A", A, kCholeskyOrder);
    const int64_t n = A.size(-1);
    Tensor L = allocate(shape.with({n, n}), A), info = allocate(shape.with({}), A, aoti_torch_dtype_int32());
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using S = typename decltype(tag)::type;
      const int64_t batch = shape.batch();
      auto* found = static_cast<int32_t*>(info.mutable_data_ptr());
      if (n == 0) std::fill(found, found + batch, 0);
      if (batch == 0 || n == 0) return;
      KeptMatrices kept;
      const MatrixBatch<const S> a = kept.matrices<S>(A);
      const MatrixBatch<S> columns = new_matrices<S>(L);  // of L, which is transposed below
      // The transpose of a Hermitian matrix is its conjugate, whose factor R is the transpose of L.
      factor<S>({upper ? a : a.transposed(), upper ? columns.transposed() : columns}, batch, static_cast<int>(n));
      report(columns.data, batch, n, found);
    });
    return {torch::stable::transpose(L, -2, -1), info};
  }

  template <class S>
  static void factor(const FactorArguments<S>& all, int64_t batch, int n) {
    if constexpr (!NumberTraits<S>::kComplex) {
      if (n > kCholeskyLanes) {
        const int64_t work = int64_t{n} * n * n / 3;
        return parallel_for(batch, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
          with_native([&](auto bytes) {
            CachedFactor<S, decltype(bytes)::value> matrix(n);
            for (int64_t b = begin; b < end; ++b) matrix.factor(all, b);
          });
        });
      }
    }
    with_order<CholeskyFactor, false>(all, batch, n, n, [](const auto& kernel) { run_in_lanes(kernel, kernel); });
  }

  template <class S>
  static void report(const S* factors, int64_t batch, int64_t n, int32_t* info) {
    parallel_for(batch, std::max<int64_t>(1, kGrain / (n * n)), [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const S* L = factors + b * n * n;
        int minor = 0;
        for (int64_t j = n - 1; j >= 0; --j) {
          if (!(real_part(L[j * n + j]) > 0)) minor = static_cast<int>(j) + 1;
        }
        info[b] = minor > 0 ? minor : (all_finite(L, n * n) ? 0 : -1);
      }
    });
  }

  static void add_to(Library& library) { library.impl("cholesky_factor", TORCH_BOX(&cholesky_factor)); }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::CholeskyFactors)
