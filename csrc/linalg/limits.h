// Sizes of matrices: the largest that each kernel takes, and those at which another way becomes faster. This is their
// only definition: `python -m tools.limits` copies them into torch_manualgrad/core/limits.py, from which Python reads
// them, and a test compares the two.
//
// The comment after a measured size names the benchmark that times both ways (a file in benchmarks/) and the day on
// which the size entered the project. To measure it again, change it and compare the columns "stock" and "ours".
#pragma once

#include <cstdint>

namespace manualgrad {

// --- the sizes that kernels take; they refuse larger ones -----------------------------------------------------------

// Derivatives of LU, Cholesky, QR, determinants, inverses and solves: both dims, on either device. One matrix per lane
// on the CPU, one per thread, warp or part of a warp on CUDA.
constexpr int64_t kLaneOrder = 32;
// QR of complex128 on CUDA: its matrices fit into 64 kB of shared memory.
constexpr int64_t kSharedQr = 24;
// The same for one real square matrix at a time, on the CPU. LU and QR use the kernel up to this order.
constexpr int64_t kCachedOrder = 256;  // linalg.py --operators lu qr, 2026-11-22
// Derivatives of the SVD and of eigh: matrices with a larger dim go through products of whole batches. The second is
// the largest order that the CPU computes with one matrix per lane.
constexpr int64_t kSpectrumOrder = 32;
constexpr int64_t kLaneSpectrum = 16;  // linalg.py --operators svd eigh, 2026-11-22
// Decompositions of small matrices: Jacobi's methods take min(m, n) and max(m, n) up to the first two, lu_small takes
// both dims up to the third.
constexpr int64_t kJacobiRank = 16;
constexpr int64_t kJacobiOrder = 32;
constexpr int64_t kLuSmallOrder = 8;
// Eigendecompositions of real symmetric matrices by QL, one at a time, on the CPU.
constexpr int64_t kTridiagonalOrder = 128;  // linalg.py --operators eigh, 2026-11-23
// Linear systems with real matrices, one at a time, on the CPU; and the largest that are solved one per lane.
constexpr int64_t kEliminationOrder = 512;  // against_jax.py --operators solve, 2026-11-29
constexpr int64_t kEliminationLanes = 12;   // against_jax.py --operators solve, 2026-11-29
// Cholesky factors of real matrices, one at a time, on the CPU; and the largest that are computed one per lane.
constexpr int64_t kCholeskyOrder = 256;  // linalg.py --operators cholesky, 2026-11-30
constexpr int64_t kCholeskyLanes = 12;   // linalg.py --operators cholesky, 2026-11-30

// --- where a kernel is called: BLAS or LAPACK is faster for larger matrices ------------------------------------------

// One real square matrix at a time, on the CPU.
constexpr int64_t kCachedCholesky = 200;  // linalg.py --operators cholesky, 2026-11-22
constexpr int64_t kCachedDet = 100;       // linalg.py --operators det, 2026-11-22
constexpr int64_t kCachedSolve = 64;      // linalg.py --operators solve, 2026-11-22
constexpr int64_t kCachedInverse = 48;    // linalg.py --operators inv, 2026-11-22
// Inverses of complex matrices, and of all matrices on CUDA. For orders above kInverseSmall, the kernel is called only
// for batches of fewer than kInverseBatch matrices.
constexpr int64_t kInverseSmall = 8;   // linalg.py --operators inv, 2026-11-22
constexpr int64_t kInverseBatch = 16;  // linalg.py --operators inv, 2026-11-22
// Inverses on the CPU: a plain override() leaves batches with fewer entries to PyTorch.
constexpr int64_t kInverseEntries = 4096;  // linalg.py --operators inv, 2026-11-23
// Tangents of inverses and of solves.
constexpr int64_t kInverseTangent = 8;  // linalg.py --operators inv, 2026-11-22
constexpr int64_t kSolveTangent = 16;   // linalg.py --operators solve, 2026-11-22
// Linear systems: larger float64 matrices, and batches with fewer entries, are left to PyTorch.
constexpr int64_t kEliminationDouble = 256;    // against_jax.py --operators solve, 2026-11-30
constexpr int64_t kEliminationEntries = 4096;  // against_jax.py --operators solve, 2026-11-29
// Cholesky factors: batches with fewer entries are left to PyTorch.
constexpr int64_t kCholeskyEntries = 65536;  // linalg.py --operators cholesky, 2026-11-30
// Solves with given factors: the fewest right-hand sides.
constexpr int64_t kEliminationColumns = 32;  // against_jax.py --operators solve, 2026-11-29
// Replacement primals: real eigenvalues, and complex eigenvalues, singular values and vectors.
constexpr int64_t kEighReal = 12;    // linalg.py --operators eigh, 2026-11-22
constexpr int64_t kEighComplex = 8;  // linalg.py --operators eigh, 2026-11-22
constexpr int64_t kSvdComplex = 8;   // linalg.py --operators svd, 2026-11-22

// --- between two ways without a kernel of ours, for large matrices --------------------------------------------------

// The number of columns from which the CPU computes the cotangents of triangular factors by blocks, and the least and
// the largest number of columns in a block, which is otherwise an eighth of all.
constexpr int64_t kLuBlocks = 128;        // linalg.py --operators lu, 2026-11-22
constexpr int64_t kCholeskyBlocks = 400;  // linalg.py --operators cholesky, 2026-11-22
constexpr int64_t kLeastBlock = 64;       // linalg.py --operators lu cholesky, 2026-11-22
constexpr int64_t kMostBlock = 256;       // linalg.py --operators lu cholesky, 2026-11-22
// The same for products with the triangular factor of a QR decomposition.
constexpr int64_t kQrBlock = 128;  // linalg.py --operators qr, 2026-11-23
// Rows are permuted by a product with the permutation matrix if that takes at most this many multiplications.
constexpr int64_t kPermutingProduct = 262144;  // linalg.py --operators lu, 2026-11-22

}  // namespace manualgrad
