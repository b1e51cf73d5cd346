// The derivative of QR on the CPU; the contract is in qr.h.
#include "qr.h"

#include "run_on_cpu.h"

#include <vector>

namespace manualgrad {
namespace {

// One real square matrix, in rows that are `pitch` apart.
template <class T, int Bytes>
struct OneQr {
  using Matrix = CachedMatrix<T, Bytes>;
  int n, pitch;

  // Whether the rank is full, given L = R^T, as QrRank judges it.
  bool is_regular(const T* L) const {
    const T rounding = static_cast<T>(n) * std::numeric_limits<T>::epsilon();
    for (int j = 0; j < determining<T>(n, n); ++j) {
      T column{};
#pragma omp simd reduction(+ : column)
      for (int i = 0; i <= j; ++i) column += absolute(L[j * pitch + i]) * rounding;
      if (absolute(L[j * pitch + j]) <= column) return false;
    }
    return true;
  }

  static void settle(T* x, int count) {
    for (int i = 0; i < count; ++i) x[i] = x[i] == 0 ? x[i] : std::numeric_limits<T>::quiet_NaN();
  }

  // c := S L for an upper triangle S and a lower one.
  void multiply_triangles(const T* S, const T* L, T* c) const {
    constexpr int kBlock = Matrix::kBlock;
    for (int i = 0; i < n; i += kBlock) {
      const int rows = std::min(kBlock, n - i), start = i * pitch;
      if (i > 0)
        Matrix::add({S + start + i, pitch, 1}, {L + start, pitch}, rows, n - i, i, {c + start, pitch}, false, true);
      Matrix::add({S + start + i, pitch, 1}, {L + start + i, pitch}, rows, n - i, pitch - i, {c + start + i, pitch},
                  true, true);
    }
  }

  // Y := L^-T Y for strict upper triangles Y.
  void solve(const T* L, T* Y, T* inverse) const {
    constexpr int kBlock = 2 * kRowStep<T>;
    for (int j = 0; j < pitch; j += kBlock) {
      const int width = std::min(kBlock, pitch - j);
      Matrix{std::min(n, j + width), pitch}.solve_lower_adjoint({L, pitch, 1}, inverse, width, {Y + j, pitch});
    }
  }
};

// A matrix without full rank, and what decides on its cotangent.
template <class T>
class Deficient {
 public:
  Deficient(const QrArguments<T>& at, int64_t b, int n) : n_(n), loader_{{}, b}, memory_(3 * n * n) {
    T *R = memory_.data(), *G = R + n * n, *S = nullptr;
    read_upper(loader_, at.R, n, R);
    if (at.given_Q.data != nullptr) loader_.read(at.given_Q, n, n, G);
    if (at.given_R.data != nullptr) read_upper(loader_, at.given_R, n, S = G + n * n);
    const QrRank<T> rank(loader_.threads, R, n, n, n);
    first_ = rank.first();
    left_by_rounding_ = rank.left_by_rounding(loader_.threads, G, S);
    explained_ = rank.explained(loader_.threads, G, S);
  }

  int first() const { return first_; }
  bool left_by_rounding() const { return left_by_rounding_; }
  bool is_moderate(const MatrixBatch<T>& found) {
    T *R = memory_.data(), *G = R + n_ * n_;
    loader_.read({found.data, found.batch_stride, found.row_stride, found.column_stride}, n_, n_, G);
    return QrRank<T>(loader_.threads, R, n_, n_, n_).is_moderate(loader_.threads, G, explained_);
  }

 private:
  int n_, first_;
  MatrixLoader<SingleThread> loader_;
  std::vector<T> memory_;
  bool left_by_rounding_;
  T explained_;
};

struct CachedQr {
  template <class T, int Bytes>
  static void vjp(const QrArguments<T>& at, int64_t b, int, int n, CachedScratch<T>& scratch) {
    const int pitch = row_pitch<T>(n);
    T* const L = scratch.matrix(0);
    const auto load = [&] { load_lower(at.R.transposed(), b, n, L, pitch, true); };
    load();
    if (OneQr<T, Bytes>{n, pitch}.is_regular(L)) return vjp_from<T, Bytes>(at, b, n, n, scratch);
    Deficient<T> deficient(at, b, n);
    if (deficient.left_by_rounding()) {
      vjp_from<T, Bytes>(at, b, n, n, scratch);
      if (deficient.is_moderate(at.out)) return;
      load();
    }
    vjp_from<T, Bytes>(at, b, n, deficient.first(), scratch);
  }

 private:
  // With L = R^T in the first matrix. From column `first` on, cotangents that are not zero are nan.
  template <class T, int Bytes>
  static void vjp_from(const QrArguments<T>& at, int64_t b, int n, int first, CachedScratch<T>& scratch) {
    using Matrix = CachedMatrix<T, Bytes>;
    const int pitch = row_pitch<T>(n);
    const OneQr<T, Bytes> one{n, pitch};
    T *L = scratch.matrix(0), *S = scratch.matrix(1), *M = scratch.matrix(2), *X = scratch.matrix(3);
    if (at.given_R.data != nullptr) {
      load_upper(at.given_R, b, n, S, pitch);
      for (int j = first; j < n; ++j) one.settle(S + j * pitch, n);
      one.multiply_triangles(S, L, M);
    } else {
      scratch.clear(1);
      scratch.clear(2);
    }
    if (at.given_Q.data != nullptr) {
      Rows<const T> G{X, pitch};
      if (first == n && n == pitch) {
        G = rows_of(at.given_Q, b, n, n, X, pitch);
      } else {
        load_rows(at.given_Q, b, n, n, X, pitch);
        for (int i = 0; i < n && first < n; ++i) one.settle(X + i * pitch + first, n - first);
      }
      Matrix::subtract(matrix_of(at.Q.transposed(), b), G, n, n, pitch, {M, pitch});
    }
    // W^T = M - M^T above the diagonal, inner^T = R^-1 W^T
    transpose(M, pitch, n, n, X, pitch);
    for (int i = 0; i < n; ++i) {
      std::fill(M + i * pitch, M + i * pitch + i + 1, T(0));
      for (int j = i + 1; j < n; ++j) M[i * pitch + j] -= X[i * pitch + j];
    }
    for (int j = std::min(first, n - 1); j < n; ++j) L[j * pitch + j] = 1;  // these divide only zeros
    one.solve(L, M, scratch.matrix(4));
    transpose(S, pitch, n, n, X, pitch);
    for (int i = 0; i < n; ++i) std::copy(X + i * pitch, X + i * pitch + i + 1, M + i * pitch);
    // transposed: the result is column-major
    const bool direct = fills_vectors<T>(n);
    const Rows<const T> Q = rows_of(at.Q.transposed(), b, n, n, L, pitch);
    const Rows<T> out = direct ? Rows<T>{&at.out.at(b, 0, 0), n} : Rows<T>{X, pitch};
    Matrix::add({M, pitch, 1}, Q, n, n, direct ? n : pitch, out, false, true);
    if (!direct) store_rows(out.data, pitch, n, n, at.out.transposed(), b, nullptr);
  }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::QrOperators<manualgrad::Cpu<manualgrad::CachedQr>>)
