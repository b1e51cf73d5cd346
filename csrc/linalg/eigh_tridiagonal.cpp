// Symmetric eigendecompositions on the CPU, one matrix at a time.
//
//   manualgrad::eigh_tridiagonal(Tensor A, bool lower) -> (Tensor L, Tensor V)    n up to kTridiagonalOrder
//
// A (*, n, n) is float32 or float64, at any strides; one triangle is read. L is (*, n), V (*, n, n), both contiguous.
// The results of a matrix are bitwise identical at any position in the batch; an inf or a nan makes all of them nan.
#include "spectrum/tridiagonal.h"

#include "../base/parallel.h"
#include "small_matrices.h"

#include <tuple>

namespace manualgrad {
namespace {

struct EighTridiagonal {
  template <class T>
  static void decompose(const MatrixBatch<const T>& A, int64_t batch, int n, bool lower, T* L, T* V) {
    const int64_t work = int64_t{10} * n * n * n;
    parallel_for(batch, std::max<int64_t>(1, kGrain / work), [&](int64_t begin, int64_t end) {
      SymmetricMatrix<T> matrix(n);
      with_native([&](auto bytes) {
        constexpr int kBytes = decltype(bytes)::value;
        for (int64_t b = begin; b < end; ++b) {
          matrix.read(A, b, lower);
          run_native<kBytes, Tridiagonalize<T, kBytes>>(&matrix);
          matrix.turn();
          run_native<kBytes, DiagonalizeTridiagonal<T, kBytes>>(&matrix);
          matrix.write(L + b * n, V + b * n * n);
        }
      });
    });
  }

  static std::tuple<Tensor, Tensor> eigh_tridiagonal(const Tensor& A, bool lower) {
    constexpr const char* where = "manualgrad::eigh_tridiagonal: ";
    const MatrixShape shape = decomposed_shape(where, A, kTridiagonalOrder, kTridiagonalOrder);
    const int64_t n = A.size(-1);
    MANUALGRAD_CHECK(A.size(-2) == n, where, "A: expected square matrices, got ", A.size(-2), " by ", n);
    MANUALGRAD_CHECK(real_dtype(A.scalar_type()) == A.scalar_type(), where, "A: expected float32 or float64, got ",
                     dtype_name(A.scalar_type()));
    Tensor V = allocate(shape.with({n, n}), A), L = allocate(shape.with({n}), A);
    dispatch_matrix(A.scalar_type(), where, "A", [&](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (!NumberTraits<T>::kComplex) {
        const int64_t batch = shape.batch();
        if (batch == 0 || n == 0) return;
        KeptMatrices kept;
        decompose<T>(kept.matrices<T>(A), batch, static_cast<int>(n), lower, static_cast<T*>(L.mutable_data_ptr()),
                     static_cast<T*>(V.mutable_data_ptr()));
      }
    });
    return {L, V};
  }

  static void add_to(Library& library) { library.impl("eigh_tridiagonal", TORCH_BOX(&eigh_tridiagonal)); }
};

}  // namespace
}  // namespace manualgrad

MANUALGRAD_REGISTER_CPU(manualgrad::EighTridiagonal)
