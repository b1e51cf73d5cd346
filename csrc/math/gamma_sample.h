// The derivative of a sample x of the gamma distribution in its shape a, in double precision; the mathematics is in
// derivatives/elementwise/incomplete_gamma.py, of which this is the same arithmetic for one number.
#pragma once

#include "element.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__CUDACC__)
#define MANUALGRAD_UNROLL_POLYNOMIAL _Pragma("unroll")
#else
#define MANUALGRAD_UNROLL_POLYNOMIAL _Pragma("GCC unroll 16")  // else the loop around it is not vectorized
#endif

namespace manualgrad {

// Gauss and Legendre's rule on (0, 1).
template <int N>
struct GaussLegendre {
  double nodes[N], weights[N];

  GaussLegendre() {
    constexpr double kPi = 3.141592653589793238;
    for (int i = 0; i < N; ++i) {
      double x = std::cos(kPi * (i + 0.75) / (N + 0.5)), slope = 0;
      for (int step = 0; step < 6; ++step) {
        double before = 1, value = x;
        for (int k = 2; k <= N; ++k) {
          const double next = ((2 * k - 1) * x * value - (k - 1) * before) / k;
          before = value;
          value = next;
        }
        slope = N * (x * value - before) / (x * x - 1);
        x -= value / slope;
      }
      nodes[i] = (1 + x) / 2;
      weights[i] = 1 / ((1 - x * x) * slope * slope);
    }
  }
};

// The numbers of terms and nodes, and the upper end of the integral: the remainder is below the rounding error.
template <class T>
struct GammaTerms;
template <>
struct GammaTerms<double> {
  static constexpr int kSeries = 20, kNodes = 36;
  static constexpr double kCut = 44;
};
template <>
struct GammaTerms<float> {
  static constexpr int kSeries = 11, kNodes = 20;
  static constexpr double kCut = 20;
};

// log x - psi(a + 1), by Stirling's series; for small a at a + 10.
HOST_DEVICE double log_less_digamma(double a, double x) {
  constexpr double kFar = 10;
  constexpr double kDigamma[] = {-1. / 12,  1. / 120,     -1. / 252, 1. / 240,
                                 -1. / 132, 691. / 32760, -1. / 12,  3617. / 8160};
  const double z = a >= kFar ? a : a + kFar, square = 1 / (z * z);
  double series = 0;
  for (int k = 7; k >= 0; --k) series = series * square + kDigamma[k];
  const double digamma = series * square - 1 / (2 * z);  // psi(z) - log z
  if (a >= kFar) {
    const double offset = (x - a) / a;
    return (std::abs(offset) < 0.5 ? std::log1p(offset) : std::log(x / a)) - digamma - 1 / a;
  }
  double sum = 0;
  for (int k = 1; k < kFar; ++k) sum += 1 / (a + k);
  return std::log(x) - std::log(z) - digamma + sum;
}

// -dP/da in multiples of x^a exp(-x) / Gamma(a + 1), for x < 1.
template <class T>
HOST_DEVICE double gamma_slope_by_series(double a, double x, double logs) {
  double term = 1, total = logs;
  for (int n = 1; n < GammaTerms<T>::kSeries; ++n) {
    term *= x / (a + n);
    logs -= 1 / (a + n);
    total += term * logs;
  }
  return -total;
}

// exp(x), 0 below -700, by operations that vectors have: 2^k times a polynomial on (-log(2) / 2, log(2) / 2).
HOST_DEVICE double exp_of_lane(double x) {
  constexpr double kLog2 = 1.4426950408889634, kHigh = 0x1.62e42fefa38p-1, kLow = 0x1.ef35793c7673p-45;
  constexpr double kShift = 0x1.8p52;  // whose sum with k has the integer k as its last bits
  constexpr double kTaylor[] = {
      1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
      1. / 720,        1. / 120,       1. / 24,       1. / 6,       1. / 2,      1.,         1.};
  const double in_range = x < -700 ? -700 : x, shifted = in_range * kLog2 + kShift, k = shifted - kShift;
  const double r = (in_range - k * kHigh) - k * kLow;
  double power = 0;
  MANUALGRAD_UNROLL_POLYNOMIAL
  for (const double coefficient : kTaylor) power = power * r + coefficient;
  int64_t bits, exponent;
  std::memcpy(&bits, &power, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits = static_cast<int64_t>(static_cast<uint64_t>(bits) + (static_cast<uint64_t>(exponent) << 52));
  std::memcpy(&power, &bits, sizeof power);
  return x < -700 ? 0 : power;
}

// exp(s) - 1 - s
HOST_DEVICE double bend_of_exp(double s) {
  constexpr double kFlat = 0.7;
  constexpr double kTaylor[] = {1. / 355687428096000,
                                1. / 20922789888000,
                                1. / 1307674368000,
                                1. / 87178291200,
                                1. / 6227020800,
                                1. / 479001600,
                                1. / 39916800,
                                1. / 3628800,
                                1. / 362880,
                                1. / 40320,
                                1. / 5040,
                                1. / 720,
                                1. / 120,
                                1. / 24,
                                1. / 6,
                                1. / 2};
  double series = 0;
  MANUALGRAD_UNROLL_POLYNOMIAL
  for (const double coefficient : kTaylor) series = series * s + coefficient;
  return (s < 0 ? -s : s) < kFlat ? series * s * s : exp_of_lane(s) - 1 - s;
}

// The same for x >= 1.
template <class T>
HOST_DEVICE double gamma_slope_by_quadrature(double a, double x, double logs,
                                             const GaussLegendre<GammaTerms<T>::kNodes>& rule) {
  constexpr double kCut = GammaTerms<T>::kCut;
  const bool above = x > a - 0.5;
  const double linear = above ? x - a : a - x - kCut / 2;
  double bound = 2 * kCut / (linear + std::hypot(linear, std::sqrt(2 * kCut * (above ? x : a))));
  bound = above ? std::fmin(bound, std::log1p((kCut + a * bound) / x)) : -bound;
  const auto term = [&](int i) MANUALGRAD_INLINED {
    const double s = bound * rule.nodes[i];
    return rule.weights[i] * (a * (logs + s) + 1) * exp_of_lane((a - x) * s - x * bend_of_exp(s));
  };
  double total = 0;  // in one order, whatever the vectors are
#if defined(__CUDACC__)
  for (int i = 0; i < GammaTerms<T>::kNodes; ++i) total += term(i);
#else
  double terms[GammaTerms<T>::kNodes];
#pragma omp simd
  for (int i = 0; i < GammaTerms<T>::kNodes; ++i) terms[i] = term(i);
  for (const double one : terms) total += one;
#endif
  return bound * total;
}

// dx/da; 0 at x = 0, and nan where x is not a sample. The quadrature rule is an argument, as a static variable has a
// lock.
template <class T>
HOST_DEVICE T gamma_sample_slope(T shape, T sample, const GaussLegendre<GammaTerms<T>::kNodes>& rule) {
  const double a = shape, x = sample;
  if (!(a > 0 && x > 0 && std::isfinite(a) && std::isfinite(x))) {
    return x == 0 ? T{0} : std::numeric_limits<T>::quiet_NaN();
  }
  const double logs = log_less_digamma(a, x);
  const double slope = x < 1 ? gamma_slope_by_series<T>(a, x, logs) : gamma_slope_by_quadrature<T>(a, x, logs, rule);
  return static_cast<T>(x / a * slope);
}

}  // namespace manualgrad
