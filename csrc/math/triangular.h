// Derivatives of triangular factors, of small matrices. N is a number of number.h; matrices by rows, without gaps. The
// mathematics is in torch_manualgrad/derivatives/linalg; only the triangles that matter are computed.
//
// Everything is made of one step, on a part of a row or a column. Its entries are shared among the threads of a team.
#pragma once

#include "part.h"
#include "team.h"

namespace manualgrad {

// Entries `step` apart.
template <class N>
struct Line {
  N* data;
  int step;
  HOST_DEVICE N& operator[](int i) const { return data[i * step]; }
};
template <class N>
struct Grid {
  N* data;
  int row, column;
  HOST_DEVICE N& at(int i, int j) const { return data[i * row + j * column]; }
};

struct Unscaled {};
template <class N>
HOST_DEVICE N scaled(const N& a, Unscaled) {
  return a;
}
template <class N>
HOST_DEVICE N scaled(const N& a, const N& by) {
  return a * by;
}

enum class Sum { kAdd, kSubtract, kReplace, kReplaceNegative };
enum class Factor { kPlain, kConjugate };

template <Sum How, Factor Of, int Width, class N, class Scale>
HOST_DEVICE void step_some(const Line<N>& c, const Line<const N>& a, const Grid<const N>& b, int depth, int first,
                           const Scale& scale) {
  N sum[Width];
  for (int q = 0; q < Width; ++q) sum[q] = How == Sum::kAdd || How == Sum::kSubtract ? c[first + q] : N{};
  for (int k = 0; k < depth; ++k) {
    const N factor = Of == Factor::kConjugate ? conjugate(a[k]) : a[k];
    for (int q = 0; q < Width; ++q) {
      if constexpr (How == Sum::kAdd || How == Sum::kReplace) {
        sum[q] += factor * b.at(k, first + q);
      } else {
        sum[q] -= factor * b.at(k, first + q);
      }
    }
  }
  for (int q = 0; q < Width; ++q) c[first + q] = scaled(sum[q], scale);
}

// c(j) := (c(j) -+ sum over k < depth of a(k) b(k, j)) scale for j < count, in order of k; a conjugated if it says so.
template <Sum How, Factor Of, class Team, class N, class Scale = Unscaled>
HOST_DEVICE void step(const Team& team, const Line<N>& c, const Line<const N>& a, const Grid<const N>& b, int depth,
                      int count, const Scale& scale = {}) {
  if constexpr (std::is_same_v<Team, Alone>) {
    constexpr int kWidth = 4;
    int j = 0;
    for (; j + kWidth <= count; j += kWidth) step_some<How, Of, kWidth>(c, a, b, depth, j, scale);
    for (; j < count; ++j) step_some<How, Of, 1>(c, a, b, depth, j, scale);
  } else {
    for (int j = team.rank(); j < count; j += team.size()) step_some<How, Of, 1>(c, a, b, depth, j, scale);
    team.sync();
  }
}

// inverse[j] := 1 / F(j, j), or its conjugate.
template <Factor Of, class Team, class N>
HOST_DEVICE void invert_diagonal(const Team& team, const N* F, int n, int count, N* inverse) {
  for (int j = team.rank(); j < count; j += team.size()) {
    const N one = reciprocal(F[j * n + j]);
    inverse[j] = Of == Factor::kConjugate ? conjugate(one) : one;
  }
  team.sync();
}

// F (m, n): L below the diagonal and U from it on. G: the cotangents of both likewise; becomes that of L U.
// inverse: memory for k = min(m, n). `lower`: whether L has a cotangent.
template <class Team, class N>
HOST_DEVICE void lu_pull_back(const Team& team, const N* F, N* G, N* inverse, int m, int n, bool lower) {
  constexpr Sum kAdd = Sum::kAdd, kSubtract = Sum::kSubtract;
  constexpr Factor kConjugate = Factor::kConjugate;
  const int k = m < n ? m : n;
  invert_diagonal<kConjugate>(team, F, n, k, inverse);
  if (m > n && lower) {  // the last rows R, and what they take from the cotangent of U
    N* R = G + k * n;
    for (int j = n - 1; j >= 0; --j) {
      step<kSubtract, kConjugate>(team, Line<N>{R + j, n}, {F + j * n + j + 1, 1}, {R + j + 1, 1, n}, n - 1 - j, m - k,
                                  inverse[j]);
    }
    for (int i = 0; i < k; ++i) {
      step<kSubtract, kConjugate>(team, Line<N>{G + i * n + i, 1}, {F + k * n + i, n}, {R + i, n, 1}, m - k, n - i);
    }
  }
  if (lower) {  // L^H gL below the diagonal
    for (int i = 1; i < k; ++i) {
      step<kAdd, kConjugate>(team, Line<N>{G + i * n, 1}, {F + (i + 1) * n + i, n}, {G + (i + 1) * n, n, 1}, k - 1 - i,
                             i);
    }
  }
  for (int j = k - 2; j >= 0; --j) {  // T U'^-H
    N* column = G + (j + 1) * n + j;
    step<kSubtract, kConjugate>(team, Line<N>{column, n}, {F + j * n + j + 1, 1}, {column + 1, 1, n}, n - 1 - j,
                                k - 1 - j, inverse[j]);
  }
  for (int i = k - 2; i >= 0; --i) {  // L^-H
    step<kSubtract, kConjugate>(team, Line<N>{G + i * n, 1}, {F + (i + 1) * n + i, n}, {G + (i + 1) * n, n, 1},
                                k - 1 - i, n);
  }
}

// Below the diagonal of a (m, n), or on it and above, of which nothing is left.
template <class Team, class N>
HOST_DEVICE void clear(const Team& team, Part part, N* a, int m, int n) {
  for (int i = 0; i < m; ++i) {
    for (int j = team.rank(); j < n; j += team.size()) {
      if (belongs(part, i, j)) a[i * n + j] = N{};
    }
  }
  team.sync();
}

// B (m, n): the tangent of L U; becomes that of L below the diagonal and zero from it on. dU (k, n): takes that of U on
// the diagonal and above.
template <class Team, class N>
HOST_DEVICE void lu_push_forward(const Team& team, const N* F, N* B, N* dU, N* inverse, int m, int n) {
  constexpr Sum kAdd = Sum::kAdd, kSubtract = Sum::kSubtract;
  constexpr Factor kPlain = Factor::kPlain;
  const int k = m < n ? m : n;
  invert_diagonal<kPlain>(team, F, n, k, inverse);
  for (int i = 1; i < k; ++i) {  // Y
    step<kSubtract, kPlain>(team, Line<N>{B + i * n, 1}, {F + i * n, 1}, {B, n, 1}, i, n);
  }
  for (int j = 0; j + 1 < k; ++j) {  // S
    N* row = B + (j + 1) * n;
    step<kSubtract, kPlain>(team, Line<N>{row + j, n}, {F + j, n}, {row, 1, n}, j, k - 1 - j, inverse[j]);
  }
  for (int i = 0; i < k; ++i) {
    for (int j = i + team.rank(); j < n; j += team.size()) dU[i * n + j] = B[i * n + j];
    team.sync();
    step<kSubtract, kPlain>(team, Line<N>{dU + i * n + i, 1}, {B + i * n, 1}, {F + i, n, 1}, i, n - i);
  }
  clear(team, Part::kUpper, B, k, n);
  for (int i = k - 1; i > 1; --i) {  // L S
    step<kAdd, kPlain>(team, Line<N>{B + i * n, 1}, {F + i * n + 1, 1}, {B + n, n, 1}, i - 1, i - 1);
  }
  if (m == k) return;
  N* rest = B + k * n;  // (B - L dU) U^-1 of the last rows
  for (int j = 0; j < n; ++j) {
    step<kSubtract, kPlain>(team, Line<N>{rest + j, n}, {dU + j, n}, {F + k * n, 1, n}, j + 1, m - k);
  }
  for (int j = 0; j < n; ++j) {
    step<kSubtract, kPlain>(team, Line<N>{rest + j, n}, {F + j, n}, {rest, 1, n}, j, m - k, inverse[j]);
  }
}

// a := (a + a^H) / 2, or the transpose of this.
template <bool Transposed, class Team, class N>
HOST_DEVICE void hermitian_part(const Team& team, N* a, int n) {
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  for (int i = 0; i < n; ++i) {
    for (int j = team.rank(); j <= i; j += team.size()) {
      const N x = a[i * n + j], y = a[j * n + i];
      const N below = (Transposed ? y + conjugate(x) : x + conjugate(y)) * half;
      a[i * n + j] = below;
      a[j * n + i] = conjugate(below);
    }
  }
  team.sync();
}

// R, G (n, n): the transposes of L and of its cotangent, upper triangles. G becomes the cotangent of L L^H.
template <class Team, class N>
HOST_DEVICE void cholesky_pull_back(const Team& team, const N* R, N* G, N* inverse, int n) {
  constexpr Factor kConjugate = Factor::kConjugate;
  constexpr Sum kSubtract = Sum::kSubtract;
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  invert_diagonal<Factor::kPlain>(team, R, n, n, inverse);
  clear(team, Part::kLower, G, n, n);
  for (int i = 0; i < n; ++i) {  // K(i, j) at G[j, i]
    step<Sum::kReplace, kConjugate>(team, Line<N>{G + i, n}, {R + i * n + i, 1}, {G + i, 1, n}, n - i, i);
    step<Sum::kReplace, kConjugate>(team, Line<N>{G + i * n + i, n}, {R + i * n + i, 1}, {G + i * n + i, 1, n}, n - i,
                                    1, half);
  }
  for (int j = n - 1; j >= 0; --j) {  // K L^-1
    step<kSubtract, Factor::kPlain>(team, Line<N>{G + j * n + j, 1}, {R + j * n + j + 1, 1},
                                    {G + (j + 1) * n + j, n, 1}, n - 1 - j, n - j, inverse[j]);
  }
  for (int i = n - 1; i >= 0; --i) {  // L^-H
    step<kSubtract, kConjugate>(team, Line<N>{G + i, n}, {R + i * n + i + 1, 1}, {G + i + 1, 1, n}, n - 1 - i, n,
                                conjugate(inverse[i]));
  }
  hermitian_part<true>(team, G, n);
}

// R (n, n): the transpose of L, an upper triangle. A: the tangent of L L^H, of which the Hermitian part is taken;
// becomes that of L.
template <class Team, class N>
HOST_DEVICE void cholesky_push_forward(const Team& team, const N* R, N* A, N* inverse, int n) {
  constexpr Sum kSubtract = Sum::kSubtract;
  const N half = from_real<N>(real_number<RealOf<N>>(0.5f));
  invert_diagonal<Factor::kPlain>(team, R, n, n, inverse);
  hermitian_part<false>(team, A, n);
  for (int i = 0; i < n; ++i) {  // L^-1 A
    step<kSubtract, Factor::kPlain>(team, Line<N>{A + i * n, 1}, {R + i, n}, {A, n, 1}, i, n, inverse[i]);
  }
  for (int j = 0; j < n; ++j) {  // the lower triangle of that times L^-H
    step<kSubtract, Factor::kConjugate>(team, Line<N>{A + j * n + j, n}, {R + j, n}, {A + j * n, 1, n}, j, n - j,
                                        conjugate(inverse[j]));
  }
  for (int i = 0; i < n; ++i) {  // phi
    for (int j = i + team.rank(); j < n; j += team.size()) A[i * n + j] = j == i ? A[i * n + i] * half : N{};
  }
  team.sync();
  for (int i = n - 1; i >= 0; --i) {  // L K
    step<Sum::kReplace, Factor::kPlain>(team, Line<N>{A + i * n, 1}, {R + i, n}, {A, n, 1}, i + 1, i + 1);
  }
}

// F (n, n): L below the diagonal and U from it on. Y (n, r) := L^-1 Y.
template <class Team, class N>
HOST_DEVICE void solve_lower(const Team& team, const N* F, N* Y, int n, int r) {
  for (int i = 1; i < n; ++i) {
    step<Sum::kSubtract, Factor::kPlain>(team, Line<N>{Y + i * r, 1}, {F + i * n, 1}, {Y, r, 1}, i, r);
  }
}

// Y := U^-1 Y.
template <class Team, class N>
HOST_DEVICE void solve_upper(const Team& team, const N* F, N* Y, N* inverse, int n, int r) {
  invert_diagonal<Factor::kPlain>(team, F, n, n, inverse);
  for (int i = n - 1; i >= 0; --i) {
    step<Sum::kSubtract, Factor::kPlain>(team, Line<N>{Y + i * r, 1}, {F + i * n + i + 1, 1}, {Y + (i + 1) * r, r, 1},
                                         n - 1 - i, r, inverse[i]);
  }
}

// The inverse of a diagonal that counts as ones.
struct Ones {
  HOST_DEVICE Unscaled operator[](int) const { return {}; }
};

// Y (n, r) := U^-H Y for an upper triangle U. inverse: the conjugate of that of its diagonal.
template <class Team, class N, class Diagonal>
HOST_DEVICE void solve_upper_adjoint(const Team& team, const Grid<const N>& U, const Grid<N>& Y,
                                     const Diagonal& inverse, int n, int r) {
  for (int i = 0; i < n; ++i) {
    step<Sum::kSubtract, Factor::kConjugate>(team, Line<N>{Y.data + i * Y.row, Y.column},
                                             {U.data + i * U.column, U.row}, {Y.data, Y.row, Y.column}, i, r,
                                             inverse[i]);
  }
}

// Y := L^-H Y for a lower triangle L.
template <class Team, class N, class Diagonal>
HOST_DEVICE void solve_lower_adjoint(const Team& team, const Grid<const N>& L, const Grid<N>& Y,
                                     const Diagonal& inverse, int n, int r) {
  for (int i = n - 1; i >= 0; --i) {
    step<Sum::kSubtract, Factor::kConjugate>(team, Line<N>{Y.data + i * Y.row, Y.column},
                                             {L.data + (i + 1) * L.row + i * L.column, L.row},
                                             {Y.data + (i + 1) * Y.row, Y.row, Y.column}, n - 1 - i, r, inverse[i]);
  }
}

// Y := L^-H U^-H Y.
template <class Team, class N>
HOST_DEVICE void lu_solve_adjoint(const Team& team, const N* F, N* Y, N* inverse, int n, int r) {
  invert_diagonal<Factor::kConjugate>(team, F, n, n, inverse);
  solve_upper_adjoint(team, Grid<const N>{F, n, 1}, Grid<N>{Y, r, 1}, inverse, n, r);
  solve_lower_adjoint(team, Grid<const N>{F, n, 1}, Grid<N>{Y, r, 1}, Ones{}, n, r);
}

// T (n, n): an upper triangle, or the transpose of a lower one; becomes its cotangent, zero elsewhere. G (n, r): the
// cotangent of the solution; becomes that of the right-hand sides. X: the conjugate of the solution.
template <class Team, class N, class Diagonal>
HOST_DEVICE void triangular_pull_back(const Team& team, N* T, N* G, const N* X, const Diagonal& inverse, bool upper,
                                      bool unitriangular, int n, int r) {
  if (upper) {
    solve_upper_adjoint(team, Grid<const N>{T, n, 1}, Grid<N>{G, r, 1}, inverse, n, r);
  } else {
    solve_lower_adjoint(team, Grid<const N>{T, 1, n}, Grid<N>{G, r, 1}, inverse, n, r);
  }
  const int first = unitriangular ? 1 : 0;
  const N *rows = upper ? G : X, *columns = upper ? X : G;
  for (int i = 0; i < n; ++i) {
    for (int j = team.rank(); j < i + first; j += team.size()) T[i * n + j] = N{};
    step<Sum::kReplaceNegative, Factor::kPlain>(team, Line<N>{T + i * n + i + first, 1}, {rows + i * r, 1},
                                                {columns + (i + first) * r, 1, r}, r, n - i - first);
  }
}

// c (m, n, by rows) := a (m, k) b (k, n), or its negative, or that with c added.
template <Sum How, class Team, class N>
HOST_DEVICE void multiply(const Team& team, const Grid<const N>& a, const Grid<const N>& b, int m, int k, int n, N* c) {
  for (int i = 0; i < m; ++i) {
    step<How, Factor::kPlain>(team, Line<N>{c + i * n, 1}, {a.data + i * a.row, a.column}, b, k, n);
  }
}

// The upper triangle of c (n, n) += A^H B, or -= it, for A and B (m, n).
template <Sum How, class Team, class N>
HOST_DEVICE void add_upper_of_inner(const Team& team, const N* A, const N* B, int m, int n, N* c) {
  for (int i = 0; i < n; ++i) {
    step<How, Factor::kConjugate>(team, Line<N>{c + i * n + i, 1}, {A + i, n}, {B + i, n, 1}, m, n - i);
  }
}

// The upper triangle of c += A B^H, or -= it, for upper triangles A and B.
template <Sum How, class Team, class N>
HOST_DEVICE void add_upper_of_outer(const Team& team, const N* A, const N* B, int n, N* c) {
  for (int j = 0; j < n; ++j) {
    step<How, Factor::kConjugate>(team, Line<N>{c + j, n}, {B + j * n + j, 1}, {A + j, 1, n}, n - j, j + 1);
  }
}

// Q (m, n) with m > n, R (n, n). G and S: their cotangents, S null for zero, else an upper triangle. G becomes that of
// Q R. M: memory for (n, n).
template <class Team, class N>
HOST_DEVICE void tall_qr_pull_back(const Team& team, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse, int m,
                                   int n) {
  clear(team, Part::kAll, M, n, n);
  add_upper_of_inner<Sum::kAdd>(team, Q, G, m, n, M);
  if (S != nullptr) add_upper_of_outer<Sum::kSubtract>(team, S, R, n, M);
  for (int i = 0; i < n; ++i) {  // the Hermitian matrix of this upper triangle
    for (int j = i + team.rank(); j < n; j += team.size()) {
      if (j == i) M[i * n + i] = from_real<N>(real_part(M[i * n + i]));
      M[j * n + i] = conjugate(M[i * n + j]);
    }
  }
  team.sync();
  multiply<Sum::kSubtract>(team, Grid<const N>{Q, n, 1}, Grid<const N>{M, n, 1}, m, n, n, G);
  invert_diagonal<Factor::kConjugate>(team, R, n, n, inverse);
  solve_lower_adjoint(team, Grid<const N>{R, 1, n}, Grid<N>{G, 1, n}, inverse, n, m);  // transposed: G R^-H
}

// The same for a square Q, with W^H = R^H inner^H in place of W = inner R^-H: upper triangles, as all others.
template <class Team, class N>
HOST_DEVICE void square_qr_pull_back(const Team& team, const N* Q, const N* R, N* G, const N* S, N* M, N* inverse,
                                     int n) {
  constexpr bool kComplex = NumberTraits<N>::kComplex;
  clear(team, Part::kAll, M, n, n);
  add_upper_of_inner<Sum::kAdd>(team, G, Q, n, n, M);
  add_upper_of_inner<Sum::kSubtract>(team, Q, G, n, n, M);
  if (S != nullptr) {
    add_upper_of_outer<Sum::kAdd>(team, S, R, n, M);
    add_upper_of_outer<Sum::kSubtract>(team, R, S, n, M);
  }
  for (int i = team.rank(); i < n; i += team.size()) {  // what is left of the diagonal has no real part
    if constexpr (kComplex) {
      M[i * n + i] = {RealOf<N>{}, M[i * n + i].im * real_number<RealOf<N>>(0.5f)};
    } else {
      M[i * n + i] = N{};
    }
  }
  team.sync();
  invert_diagonal<Factor::kPlain>(team, R, n, n, inverse);
  for (int i = n - 1; i >= 0; --i) {  // R^-1; of a real matrix nothing is divided by the last pivot
    const int first = kComplex ? i : i + 1;
    step<Sum::kSubtract, Factor::kPlain>(team, Line<N>{M + i * n + first, 1}, {R + i * n + i + 1, 1},
                                         {M + (i + 1) * n + first, n, 1}, n - 1 - i, n - first, inverse[i]);
  }
  for (int i = 0; i < n; ++i) {  // the adjoint, and S
    for (int j = i + team.rank(); j < n; j += team.size()) {
      const N below = conjugate(M[i * n + j]), above = S == nullptr ? N{} : S[i * n + j];
      M[i * n + j] = above;
      M[j * n + i] = j == i ? below + above : below;
    }
  }
  team.sync();
  multiply<Sum::kReplace>(team, Grid<const N>{Q, n, 1}, Grid<const N>{M, n, 1}, n, n, n, G);
}

// adj(L U) = det U D U^-1 E L^-1 where some pivots are zero: replaces these by ones, in U without the entries that fall
// out, and gives the product of the others. See _adjugate_from_lu in torch_manualgrad/derivatives/linalg/det.py.
// zeros[i]: how many of the pivots up to i were zero.
template <class N>
HOST_DEVICE N without_zeros(N* F, RealOf<N>* zeros, int n) {
  using R = RealOf<N>;
  const N one = from_real<N>(real_number<R>(1));
  R count{};
  N product = one;
  for (int i = 0; i < n; ++i) {
    const auto zero = is_zero(F[i * (n + 1)]);
    count += select(zero, real_number<R>(1), R{});
    zeros[i] = count;
    F[i * (n + 1)] = select(zero, one, F[i * (n + 1)]);
    product = product * F[i * (n + 1)];
    for (int c = 0; c < i; ++c) {
      F[c * n + i] = select(zeros[i - 1] <= zeros[c], F[c * n + i], N{});
    }
  }
  return product;
}

// Clears the rows that have no part in the adjugate: those with a zero pivot after them, or one before.
template <bool After, class Team, class N>
HOST_DEVICE void clear_rows(const Team& team, const RealOf<N>* zeros, N* Y, int n) {
  for (int i = 0; i < n; ++i) {
    const auto kept = After ? zeros[i] == zeros[n - 1] : (i > 0 ? zeros[i - 1] : RealOf<N>{}) == RealOf<N>{};
    for (int j = team.rank(); j < n; j += team.size()) Y[i * n + j] = select(kept, Y[i * n + j], N{});
  }
  team.sync();
}

template <class N>
HOST_DEVICE RealOf<N> zero_pivots(const N* F, int n) {
  RealOf<N> count{};
  for (int i = 0; i < n; ++i) {
    count += select(is_zero(F[i * (n + 1)]), real_number<RealOf<N>>(1), RealOf<N>{});
  }
  return count;
}

}  // namespace manualgrad
