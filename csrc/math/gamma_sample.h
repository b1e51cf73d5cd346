// The derivative of a sample x of the gamma distribution in its shape a, in double precision; the mathematics is in
// derivatives/elementwise/incomplete_gamma.py, of which this is the same arithmetic for one number.
#pragma once

#include "element.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// How many terms and nodes are taken, and up to where the integrand is: what is cut off is below the rounding error.
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
  // The sum of 1 / (a + k), k = 1 to 9: with a + 5 in the middle, those at the same distance from it in pairs.
  const double q = a * (a + kFar), middle = a + kFar / 2;
  const double pairs = (2 * q + 25) / ((q + 9) * (q + 16)) + (2 * q + 45) / ((q + 21) * (q + 24));
  const double sum = 2 * middle * pairs + 1 / middle;
  const double log_quotient = x > 1e-290 ? std::log(x / z) : std::log(x) - std::log(z);
  return log_quotient - digamma + sum;
}

// -dP/da in multiples of x^a exp(-x) / Gamma(a + 1), for x < 1.
template <class T>
HOST_DEVICE double gamma_slope_by_series(double a, double x, double logs) {
  double term = 1, total = logs;
  for (int n = 1; n < GammaTerms<T>::kSeries; ++n) {
    const double inverse = 1 / (a + n);
    term *= x * inverse;
    logs -= inverse;
    total += term * logs;
  }
  return -total;
}

// a b + c, rounded once if Fused, which is slow where the processor has no such instruction.
template <bool Fused>
HOST_DEVICE double product_and(double a, double b, double c) {
  if constexpr (Fused) return std::fma(a, b, c);
  return a * b + c;
}

// exp(x), 0 below -700, by operations that vectors have: 2^k times a polynomial on (-log(2) / 2, log(2) / 2). For float
// the first terms are left out: the rest is right to 1e-11, and the result still has no error but its rounding.
template <class T, bool Fused>
HOST_DEVICE double exp_of_lane(double x) {
  constexpr double kLog2 = 1.4426950408889634, kHigh = 0x1.62e42fefa38p-1, kLow = 0x1.ef35793c7673p-45;
  constexpr double kShift = 0x1.8p52;  // whose sum with k has the integer k as its last bits
  constexpr double kTaylor[] = {
      1. / 6227020800, 1. / 479001600, 1. / 39916800, 1. / 3628800, 1. / 362880, 1. / 40320, 1. / 5040,
      1. / 720,        1. / 120,       1. / 24,       1. / 6,       1. / 2,      1.,         1.};
  const double in_range = x < -700 ? -700 : x, shifted = product_and<Fused>(in_range, kLog2, kShift),
               k = shifted - kShift;
  const double r = product_and<Fused>(-k, kLow, product_and<Fused>(-k, kHigh, in_range));
  double power = 0;
#pragma GCC unroll 16
  for (int i = sizeof(T) == 4 ? 4 : 0; i < 14; ++i) power = product_and<Fused>(power, r, kTaylor[i]);
  int64_t bits, exponent;
  std::memcpy(&bits, &power, sizeof bits);
  std::memcpy(&exponent, &shifted, sizeof exponent);
  bits = static_cast<int64_t>(static_cast<uint64_t>(bits) + (static_cast<uint64_t>(exponent) << 52));
  std::memcpy(&power, &bits, sizeof power);
  return x < -700 ? 0 : power;
}

// exp(s) - 1 - s
template <class T, bool Fused>
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
#pragma GCC unroll 16
  for (int i = sizeof(T) == 4 ? 5 : 0; i < 16; ++i) series = product_and<Fused>(series, s, kTaylor[i]);
  return (s < 0 ? -s : s) < kFlat ? series * (s * s) : exp_of_lane<T, Fused>(s) - 1 - s;
}

// The same for x >= 1.
template <class T, bool Fused>
HOST_DEVICE double gamma_slope_by_quadrature(double a, double x, double logs,
                                             const GaussLegendre<GammaTerms<T>::kNodes>& rule) {
  constexpr double kCut = GammaTerms<T>::kCut;
  const bool above = x > a - 0.5;
  const double linear = above ? x - a : a - x - kCut / 2;
  const double square = 2 * kCut * (above ? x : a);
  const double root = std::abs(linear) < 1e150 ? std::sqrt(linear * linear + square) : std::abs(linear);
  double bound = 2 * kCut / (linear + root);
  if (above) {  // few digits are enough: the integrand has no mass there
    const double closer = std::log1p(static_cast<float>((kCut + a * bound) / x));
    bound = closer < bound ? closer : bound;
  } else {
    bound = -bound;
  }
  double terms[GammaTerms<T>::kNodes], sums[4] = {};
#pragma omp simd
  for (int i = 0; i < GammaTerms<T>::kNodes; ++i) {
    const double s = bound * rule.nodes[i];
    terms[i] = rule.weights[i] * product_and<Fused>(a, logs + s, 1) *
               exp_of_lane<T, Fused>(product_and<Fused>(-x, bend_of_exp<T, Fused>(s), (a - x) * s));
  }
  static_assert(GammaTerms<T>::kNodes % 4 == 0);
  for (int i = 0; i < GammaTerms<T>::kNodes; i += 4) {  // in one order, whatever the vectors are
    for (int k = 0; k < 4; ++k) sums[k] += terms[i + k];
  }
  return bound * ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// dx/da; 0 at x = 0, and nan where there is no such sample. Takes the rule, as a static variable has a lock.
template <class T, bool Fused>
HOST_DEVICE T gamma_sample_slope(T shape, T sample, const GaussLegendre<GammaTerms<T>::kNodes>& rule) {
  const double a = shape, x = sample;
  if (!(a > 0 && x > 0 && std::isfinite(a) && std::isfinite(x))) {
    return x == 0 ? T{0} : std::numeric_limits<T>::quiet_NaN();
  }
  const double logs = log_less_digamma(a, x);
  const double slope =
      x < 1 ? gamma_slope_by_series<T>(a, x, logs) : gamma_slope_by_quadrature<T, Fused>(a, x, logs, rule);
  return static_cast<T>(x / a * slope);
}

}  // namespace manualgrad
