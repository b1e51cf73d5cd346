// Compares the arithmetic of small matrices in lanes of 16 bytes, which are NEON's on aarch64, with that of single
// numbers: the same bits where no iteration is stopped by another lane, and the decompositions' products in any case.
// Without torch, so that it runs under qemu.
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/simd.h"
#include "linalg/lanes/lanes.h"
#include "math/cholesky.h"
#include "math/eigh.h"
#include "math/elimination.h"
#include "math/lu.h"
#include "math/qr.h"
#include "math/svd.h"
#include "math/triangular.h"

using namespace manualgrad;

namespace {

int compared = 0, wrong = 0;

double next_random() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(state >> 11) / 9007199254740992.0 - 0.5;
}

template <class S>
S random_number() {
  if constexpr (NumberTraits<S>::kComplex) {
    return {static_cast<BaseOf<S>>(next_random()), static_cast<BaseOf<S>>(next_random())};
  } else {
    return static_cast<S>(next_random());
  }
}

template <class S>
double distance(const S& a, const S& b) {
  return std::sqrt(static_cast<double>(square_modulus(a - b)));
}

// A batch of as many matrices as there are lanes, in lanes and one by one.
template <class S>
struct Batch {
  using N = typename LanesOf<S, 16>::type;
  static constexpr int kCount = kLanesIn<N>;
  int count;
  std::vector<N> lanes;
  std::vector<S> single[kCount];

  explicit Batch(int numbers) : count(numbers), lanes(numbers) {
    for (auto& values : single) values.resize(numbers);
  }
  // Random, with a dominant diagonal in the first n columns of rows of this length.
  static Batch random(int rows, int columns) {
    Batch made(rows * columns);
    for (int w = 0; w < kCount; ++w) {
      for (int i = 0; i < rows * columns; ++i) {
        S value = random_number<S>();
        if (i / columns == i % columns) value = value + from_real<S>(BaseOf<S>(3));
        made.single[w][i] = value;
        set_lane(made.lanes[i], w, value);
      }
    }
    return made;
  }
  void compare(const char* what, int n, double tolerance = 0) const {
    for (int w = 0; w < kCount; ++w) {
      for (int i = 0; i < count; ++i) {
        ++compared;
        const double off = distance(get_lane(lanes[i], w), single[w][i]);
        if (off <= tolerance) continue;
        if (++wrong <= 20) std::printf("%s, n = %d, lane %d, number %d: off by %g\n", what, n, w, i, off);
      }
    }
  }
};

// f(matrices of one kind of number...), for lanes and for each single one; by a function compiled as kernels are.
struct Call {
  template <class F, class... N>
  HOST_DEVICE static void run(const F& f, N* const&... of) {
    f(of...);
  }
};
template <class F, class S, class... Rest>
void both(const F& f, Batch<S>& first, Rest&... rest) {
  Multiversion<Call>::call(f, first.lanes.data(), rest.lanes.data()...);
  for (int w = 0; w < Batch<S>::kCount; ++w) Multiversion<Call>::call(f, first.single[w].data(), rest.single[w].data()...);
}

// The largest entry of A - P Q, where P (m, n) is scaled in its columns by s and Q = rows (n, columns).
template <class S>
double residual(const std::vector<S>& A, const std::vector<S>& P, const std::vector<BaseOf<S>>& s,
                const std::vector<S>& Q, int m, int n, int columns) {
  double worst = 0;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < columns; ++j) {
      S sum{};
      for (int k = 0; k < n; ++k) sum += P[i * n + k] * s[k] * Q[k * columns + j];
      worst = std::fmax(worst, distance(sum, A[i * columns + j]));
    }
  }
  return worst;
}
void expect(bool right, const char* what, int n, double off) {
  ++compared;
  if (!right && ++wrong <= 20) std::printf("%s, n = %d: off by %g\n", what, n, off);
}

template <class S>
void derivatives(int n) {
  const SingleThread one;
  const auto F = Batch<S>::random(n, n);
  Batch<S> inverse(n), factors = F;
  auto G = Batch<S>::random(n, n), H = G, K = G, L = G, U = G, X = Batch<S>::random(n, n), Y = X, M = Batch<S>(n * n);
  both([&](auto* f, auto* g, auto* i) { lu_vjp(one, f, g, i, n, n, true); }, factors, G, inverse);
  G.compare("lu_vjp", n);
  both([&](auto* f, auto* b, auto* u, auto* i) { lu_jvp(one, f, b, u, i, n, n); }, factors, H, U, inverse);
  H.compare("lu_jvp, L", n);
  U.compare("lu_jvp, U", n);
  both([&](auto* f, auto* g, auto* i) { cholesky_vjp(one, f, g, i, n); }, factors, K, inverse);
  K.compare("cholesky_vjp", n);
  both([&](auto* f, auto* a, auto* i) { cholesky_jvp(one, f, a, i, n); }, factors, L, inverse);
  L.compare("cholesky_jvp", n);
  both([&](auto* f, auto* y, auto* i) { lu_solve_adjoint(one, f, y, i, n, n); }, factors, X, inverse);
  X.compare("lu_solve_adjoint", n);
  auto Q = Batch<S>::random(n + 2, n), of_q = Batch<S>::random(n + 2, n), S_ = Batch<S>::random(n, n);
  both([&](auto* q, auto* r, auto* g, auto* s, auto* m, auto* i) { tall_qr_vjp(one, q, r, g, s, m, i, n + 2, n); }, Q,
       factors, of_q, S_, M, inverse);
  of_q.compare("tall_qr_vjp", n);
}

template <class S>
void decompositions(int n) {
  using T = BaseOf<S>;
  const SingleThread one;
  const int m = n + 1;
  const double tolerance = 40.0 * n * std::numeric_limits<T>::epsilon();
  auto A = Batch<S>::random(m, n);
  Batch<T> order(m);
  auto factors = A;
  both([&](auto* a, auto* o) { lu(a, o, m, n); }, factors, order);
  factors.compare("lu", n);
  order.compare("lu, order", n);

  auto B = A;
  Batch<S> V(n * n), W(n * m), phases(n);
  Batch<T> s(n), tau(n), columns(n);
  both(
      [&](auto* b, auto* x, auto* y, auto* p, auto* s, auto* t, auto* o) {
        svd(one, b, SvdMemory<std::decay_t<decltype(*b)>>{x, y, p, s, t, o}, m, n, false);
      },
      B, V, W, phases, s, tau, columns);
  s.compare("svd, S", n, tolerance);

  auto C = Batch<S>::random(n, n);
  Batch<S> E(n * n);
  Batch<T> values(n);
  const auto hermitian = C;
  both([&](auto* a, auto* y, auto* l) { eigh(one, a, y, l, n, true); }, C, E, values);
  values.compare("eigh, L", n, tolerance);

  for (int w = 0; w < Batch<S>::kCount; ++w) {
    const auto from = [w](const auto& batch) {
      std::decay_t<decltype(batch.single[0])> found(batch.count);
      for (int i = 0; i < batch.count; ++i) found[i] = get_lane(batch.lanes[i], w);
      return found;
    };
    const auto v = from(V), uh = from(W), e = from(E);
    std::vector<S> u(m * n), q(n * n), lower = hermitian.single[w];
    for (int i = 0; i < n; ++i) {
      for (int k = 0; k < m; ++k) u[k * n + i] = conjugate(uh[i * m + k]);
      for (int k = 0; k < n; ++k) q[k * n + i] = conjugate(e[i * n + k]);
      for (int k = 0; k < i; ++k) lower[k * n + i] = conjugate(lower[i * n + k]);
      lower[i * n + i] = from_real<S>(real_part(lower[i * n + i]));
    }
    double off = residual<S>(A.single[w], u, from(s), v, m, n, n);
    expect(off <= tolerance, "svd, U S V^H", n, off);
    off = residual<S>(lower, q, from(values), e, n, n, n);
    expect(off <= tolerance, "eigh, Q L Q^H", n, off);
  }
}

template <class S>
void all_orders() {
  for (int n = 1; n <= 8; ++n) {
    derivatives<S>(n);
    decompositions<S>(n);
  }
}

}  // namespace

int main() {
  all_orders<float>();
  all_orders<double>();
  all_orders<Complex<float>>();
  all_orders<Complex<double>>();
#if defined(__aarch64__)
  const char* const machine = "aarch64";
#else
  const char* const machine = "this machine";
#endif
  std::printf("%s: %d numbers compared, %d wrong\n", machine, compared, wrong);
  return wrong != 0;
}
