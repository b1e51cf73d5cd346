// LU: the derivatives of its factors, and the factors of small matrices.
//
//   manualgrad::linalg_lu_backward.kernel(
//       Tensor? grad_L, Tensor? grad_U, Tensor P, Tensor L, Tensor U, bool pivot) -> Tensor
//   manualgrad::linalg_lu_jvp.kernel(Tensor A_t, Tensor P, Tensor L, Tensor U, bool pivot)
//       -> (Tensor dL, Tensor dU)
//   manualgrad::lu_factor_ex_backward.kernel(Tensor grad_LU, Tensor LU, Tensor pivots, bool pivot) -> Tensor
//   manualgrad::lu_factor_ex_jvp.kernel(Tensor A_t, Tensor LU, Tensor pivots, bool pivot) -> Tensor
//   manualgrad::lu_small(Tensor A) -> (Tensor P, Tensor L, Tensor U)            both dims up to kLuSmallOrder
//
// Both dims up to kLaneOrder, for cotangents of real square matrices on the CPU up to kCachedOrder; float32, float64
// and their complex dtypes, int32 pivots; any strides, the same batch for all. Results are contiguous. The result of a
// matrix is bitwise identical at any position in the batch.
//
// Called by the formulas of these names in torch_manualgrad/derivatives/linalg/lu.py, which state the mathematics, and,
// in plain backwards, by csrc/calls; lu_small by torch_manualgrad/primal/lu.py.
#pragma once

#include "../math/elimination.h"
#include "../math/lu.h"
#include "matrix_loader.h"
#include "small_matrices.h"

#include <tuple>

namespace manualgrad {

// --- kernels for one matrix, or for as many as there are lanes ------------------------------------------------------

// The entries below the diagonal from one matrix, the others from another; zero if that matrix is absent.
template <class S>
struct Packed {
  MatrixBatch<const S> lower, upper;
  bool one;  // both are parts of one matrix

  // `scratch`: memory for a matrix.
  template <class Loader, class N>
  HOST_DEVICE void read(const Loader& loader, int m, int n, N* to, N* scratch) const {
    if (one) return loader.read(upper, m, n, to);
    const int k = m < n ? m : n, pitch = loader.pitch(n);
    read_part(loader, lower, Part::kLower, m, k, pitch, to, scratch);
    read_part(loader, upper, Part::kUpper, k, n, pitch, to, scratch);
    // also the entries that are in neither: above the diagonal, in the last columns
    if (upper.data == nullptr) clear(loader.threads, Part::kUpper, to, m, n, pitch);
    if (lower.data == nullptr) clear(loader.threads, Part::kLower, to, m, n, pitch);
  }

 private:
  // Reading a small matrix as a whole is faster.
  template <class Loader, class N>
  HOST_DEVICE static void read_part(const Loader& loader, const MatrixBatch<const S>& from, Part part, int rows,
                                    int columns, int pitch, N* to, N* scratch) {
    if (from.data == nullptr) return;
    if (!loader.template whole<S>(rows * columns)) return loader.read(from, rows, columns, to, pitch, part);
    loader.read(from, rows, columns, scratch);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) {
        if (belongs(part, i, j)) to[i * pitch + j] = scratch[i * columns + j];
      }
    }
  }
};

template <class S>
struct LuArguments {
  using Scalar = S;
  Packed<S> factors, given;  // cotangents, or the tangent
  MatrixBatch<const S> P;
  Pivots pivots;
  MatrixBatch<S> out, out_upper;  // out_upper: null if all goes into one matrix

  template <class Loader, class N>
  HOST_DEVICE const int* row_order(const Loader& loader, int m, int n, N* scratch, int* found, N* nan_target) const {
    if (P.data != nullptr) return loader.order(P, m, scratch, found, nan_target, m * loader.pitch(n));
    return loader.order(pivots, m, m < n ? m : n, found, scratch);
  }
};

// The memory of one, as numbers: three matrices, one of them m by m, then the inverse pivots and the order.
inline int factor_numbers(int m, int n) { return 2 * m * n + std::max(m, n) * std::max(m, n) + 2 * std::max(m, n); }

template <class S, int F>
struct LuVjp : LuArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  static constexpr Unroll kUnroll = Unroll::kAlways;
  static constexpr bool kCached = true;
  static bool cacheable(int64_t m, int64_t n) { return m == n; }
  int scratch_size() const { return factor_numbers(this->m(), this->n()); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int m = this->m(), n = this->n(), larger = m > n ? m : n, pitch = loader.pitch(n);
    N *factors = memory, *G = factors + m * pitch, *scratch = G + m * pitch, *inverse = scratch + larger * larger;
    this->factors.read(loader, m, n, factors, scratch);
    this->given.read(loader, m, n, G, scratch);
    const int* order = this->row_order(loader, m, n, scratch, reinterpret_cast<int*>(inverse + larger), G);
    lu_vjp(loader.threads, factors, G, inverse, m, n, pitch, this->given.lower.data != nullptr);
    loader.write(G, m, n, this->out, order);
  }
};

template <class S, int F>
struct LuJvp : LuArguments<S>, Order<F> {
  static constexpr bool kPadded = true;
  int scratch_size() const { return factor_numbers(this->m(), this->n()); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    const int m = this->m(), n = this->n(), k = m < n ? m : n, larger = m > n ? m : n;
    const int pitch = loader.pitch(n), k_pitch = loader.pitch(k);
    N *factors = memory, *B = factors + m * pitch, *dU = B + m * pitch, *inverse = dU + larger * loader.pitch(larger);
    loader.read(this->given.upper, m, n, factors);
    const int* order = this->row_order(loader, m, n, dU, reinterpret_cast<int*>(inverse + larger), factors);
    loader.reorder(factors, m, n, order, B);
    this->factors.read(loader, m, n, factors, dU);
    lu_jvp(loader.threads, factors, B, dU, inverse, m, n, pitch);
    if (this->out_upper.data == nullptr) {
      for (int i = 0; i < k; ++i) {
        for (int j = i + loader.threads.rank(); j < n; j += loader.threads.size()) B[i * pitch + j] = dU[i * pitch + j];
      }
      loader.threads.sync();
      loader.write(B, m, n, this->out);
    } else {
      clear(loader.threads, Part::kLower, dU, k, n, pitch);
      loader.write(dU, k, n, this->out_upper);
      for (int i = 0; i < m; ++i) {
        for (int j = loader.threads.rank(); j < k; j += loader.threads.size())
          factors[i * k_pitch + j] = B[i * pitch + j];
      }
      loader.threads.sync();
      loader.write(factors, m, k, this->out);
    }
  }
};

// The factors themselves.
template <class S>
struct LuSmallArguments {
  using Scalar = S;
  MatrixBatch<const S> a;
  MatrixBatch<S> p, l, u;
};

template <class S, int F>
struct LuSmall : LuSmallArguments<S>, Order<F> {
  static constexpr Unroll kUnroll = Unroll::kNever;

  int scratch_size() const {
    const int m = this->m(), n = this->n();
    return m * n + m * std::max(m, n) + m;
  }
  int64_t work() const { return 16 * scratch_size(); }

  template <class N, class Loader>
  HOST_DEVICE void run(const Loader& loader, N* memory) const {
    using R = RealOf<N>;
    const R one = real_number<R>(1);
    const int m = this->m(), n = this->n(), k = m < n ? m : n;
    N *A = memory, *other = A + m * n;
    R* order = reinterpret_cast<R*>(other + m * (m > n ? m : n));
    loader.read(this->a, m, n, A);
    const int first = loader.threads.rank(), step = loader.threads.size();
    lu(loader.threads, A, order, m, n, [](int, const R&) {});
    for (int i = 0; i < m; ++i) {
      for (int j = first; j < k; j += step) other[i * k + j] = j < i ? A[i * n + j] : from_real<N>(i == j ? one : R{});
    }
    loader.threads.sync();
    loader.write(other, m, k, this->l);
    loader.threads.sync();
    for (int i = 0; i < k; ++i) {
      for (int j = first; j < n; j += step) other[i * n + j] = j < i ? N{} : A[i * n + j];
    }
    loader.threads.sync();
    loader.write(other, k, n, this->u);
    loader.threads.sync();
    for (int i = 0; i < m; ++i) {
      const R row = real_number<R>(static_cast<BaseOf<R>>(i));
      for (int j = first; j < m; j += step) other[i * m + j] = from_real<N>(select(order[j] == row, one, R{}));
    }
    loader.threads.sync();
    loader.write(other, m, m, this->p);
  }
};

// --- the operators --------------------------------------------------------------------------------------------------

template <class Device>
struct LuOperators {
  static Tensor linalg_lu_backward(const OptionalTensor& grad_L, const OptionalTensor& grad_U, const Tensor& P,
                                   const Tensor& L, const Tensor& U, bool pivot) {
    constexpr const char* where = "manualgrad::linalg_lu_backward: ";
    const MatrixShape shape = lu_shape<LuVjp>(where, P, L, U, pivot);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    shape.check("grad_L", grad_L, {m, k});
    shape.check("grad_U", grad_U, {k, n});
    Tensor out = allocate(shape.with({m, n}), L);
    dispatch_filled(out, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      LuArguments<S> all{};
      all.factors = {kept.matrices<S>(L), kept.matrices<S>(U), false};
      all.given = {kept.matrices<S>(grad_L), kept.matrices<S>(grad_U), false};
      if (pivot) all.P = kept.matrices<S>(P);
      all.out = new_matrices<S>(out);
      Device::template run<LuVjp>(L, all, shape.batch(), m, n);
    });
    return out;
  }

  static std::tuple<Tensor, Tensor> linalg_lu_jvp(const Tensor& A_t, const Tensor& P, const Tensor& L, const Tensor& U,
                                                  bool pivot) {
    constexpr const char* where = "manualgrad::linalg_lu_jvp: ";
    const MatrixShape shape = lu_shape<LuJvp>(where, P, L, U, pivot);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    shape.check("A_t", A_t, {m, n});
    Tensor dL = allocate(shape.with({m, k}), L), dU = allocate(shape.with({k, n}), L);
    dispatch_filled(A_t, where, "L", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      LuArguments<S> all{};
      all.factors = {kept.matrices<S>(L), kept.matrices<S>(U), false};
      all.given.upper = kept.matrices<S>(A_t);
      if (pivot) all.P = kept.matrices<S>(P);
      all.out = new_matrices<S>(dL);
      all.out_upper = new_matrices<S>(dU);
      Device::template run<LuJvp>(L, all, shape.batch(), m, n);
    });
    return {dL, dU};
  }

  static Tensor lu_factor_ex_backward(const Tensor& grad_LU, const Tensor& LU, const Tensor& pivots, bool pivot) {
    return lu_factor<LuVjp>("manualgrad::lu_factor_ex_backward: ", "grad_LU", grad_LU, LU, pivots, pivot);
  }
  static Tensor lu_factor_ex_jvp(const Tensor& A_t, const Tensor& LU, const Tensor& pivots, bool pivot) {
    return lu_factor<LuJvp>("manualgrad::lu_factor_ex_jvp: ", "A_t", A_t, LU, pivots, pivot);
  }
  static std::tuple<Tensor, Tensor, Tensor> lu_small(const Tensor& A) {
    constexpr const char* where = "manualgrad::lu_small: ";
    const MatrixShape shape = decomposed_shape(where, A, kLuSmallOrder, kLuSmallOrder);
    const int64_t m = A.size(-2), n = A.size(-1), k = std::min(m, n);
    Tensor P = allocate(shape.with({m, m}), A);
    Tensor L = allocate(shape.with({m, k}), A), U = allocate(shape.with({k, n}), A);
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      const int64_t batch = shape.batch();
      if (batch == 0 || m == 0) return;
      KeptMatrices kept;
      const LuSmallArguments<T> all{kept.matrices<T>(A), new_matrices<T>(P), new_matrices<T>(L), new_matrices<T>(U)};
      Device::template run<LuSmall>(A, all, batch, m, n);
    });
    return {P, L, U};
  }

  static void add_to(Library& library) {
    library.impl("linalg_lu_backward.kernel", TORCH_BOX(&linalg_lu_backward));
    library.impl("linalg_lu_jvp.kernel", TORCH_BOX(&linalg_lu_jvp));
    library.impl("lu_factor_ex_backward.kernel", TORCH_BOX(&lu_factor_ex_backward));
    library.impl("lu_factor_ex_jvp.kernel", TORCH_BOX(&lu_factor_ex_jvp));
    library.impl("lu_small", TORCH_BOX(&lu_small));
  }

 private:
  template <template <class, int> class Kernel>
  static MatrixShape lu_shape(const char* where, const Tensor& P, const Tensor& L, const Tensor& U, bool pivot) {
    constexpr int64_t kLargest = (Kernel<float, 0>::kCached ? Device::kVjpOrder : kLaneOrder);
    const MatrixShape shape = matrix_shape(where, "L", L, kLargest);
    matrix_shape(where, "U", U, kLargest);
    const int64_t m = L.size(-2), k = L.size(-1), n = U.size(-1);
    MANUALGRAD_CHECK(k == std::min(m, n), where, "L: expected ", std::min(m, n), " columns for a matrix of ", m, " by ",
                     n, ", got ", k);
    shape.check("U", U, {k, n});
    if (pivot) shape.check("P", P, {m, m});
    return shape;
  }

  template <template <class, int> class Kernel>
  static Tensor lu_factor(const char* where, const char* name, const Tensor& given, const Tensor& LU,
                          const Tensor& pivots, bool pivot) {
    const MatrixShape shape =
        matrix_shape(where, "LU", LU, (Kernel<float, 0>::kCached ? Device::kVjpOrder : kLaneOrder));
    const int64_t m = LU.size(-2), n = LU.size(-1);
    shape.check(name, given, {m, n});
    if (pivot) shape.check("pivots", pivots, {std::min(m, n)}, ScalarType::Int);
    Tensor out = allocate(shape.with({m, n}), LU);
    dispatch_filled(out, where, "LU", [&](auto tag) {
      using S = typename decltype(tag)::type;
      KeptMatrices kept;
      const MatrixBatch<const S> factors = kept.matrices<S>(LU), g = kept.matrices<S>(given);
      LuArguments<S> all{};
      all.factors = {factors, factors, true};
      all.given = {g, g, true};
      if (pivot) all.pivots = kept.matrices<int32_t>(pivots, 1);
      all.out = new_matrices<S>(out);
      Device::template run<Kernel>(LU, all, shape.batch(), m, n);
    });
    return out;
  }
};

}  // namespace manualgrad
