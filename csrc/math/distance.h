// The derivative of D_ij = ||a_i - b_j||_p, one pair of points at a time, on host and device: that of norm.h for
// x = a_i - b_j. Differences are formed where they are used, never stored.
#pragma once

#include "norm.h"

namespace manualgrad {

// The norm of a difference whose stored norm cannot be relied on, or that stored norm where no better one exists.
template <class T>
HOST_DEVICE T pair_norm(const T* left, const T* right, int64_t count, T stored, double p) {
  T extreme = 0;
  bool usable = true;
  for (int64_t k = 0; k < count; ++k) {
    const T size = modulus(left[k] - right[k]);
    usable &= size <= std::numeric_limits<T>::max();
    extreme = size > extreme ? size : extreme;
  }
  if (!usable) return stored;
  if (extreme == T(0)) return T(0);
  double sum = 0;
  for (int64_t k = 0; k < count; ++k) sum += scaled_term(modulus(left[k] - right[k]), extreme, p);
  return norm_from_scaled_sum(extreme, sum, p);
}

// What the elements of a difference need from its g and stored norm, for finite p other than 0.
template <class T>
HOST_DEVICE Slice<T> pair_slice(Power power, const T* left, const T* right, int64_t count, T g, T stored, double p,
                                const Trust& trust) {
  if (power == Power::kOne) return {g, T(1), T(1)};
  return norm_slice(power, g, trusted(stored, trust) ? stored : pair_norm(left, right, count, stored, p));
}

// p = inf: a stored norm that no element attains is not the norm of this difference; the largest modulus replaces it.
template <class T>
HOST_DEVICE Slice<T> extreme_slice(const T* left, const T* right, int64_t count, T g, T stored) {
  T extreme = 0;
  int64_t ties = 0;
  for (int64_t k = 0; k < count; ++k) ties += is_tie(modulus(left[k] - right[k]), stored) ? 1 : 0;
  if (ties > 0) return {g / static_cast<T>(ties), T(1), stored};
  for (int64_t k = 0; k < count; ++k) {
    const T size = modulus(left[k] - right[k]);
    extreme = size > extreme ? size : extreme;
  }
  for (int64_t k = 0; k < count; ++k) ties += modulus(left[k] - right[k]) == extreme ? 1 : 0;
  return {g / static_cast<T>(ties), T(1), extreme};
}

// The element's share of the cotangent of a_i.
template <Power P, class T>
HOST_DEVICE T distance_element(T difference, const Slice<T>& slice, double exponent) {
  if constexpr (P == Power::kExtreme) {
    const T size = modulus(difference);
    return scaled(tie_sign(difference, size, is_tie(size, slice.n)), slice.a);
  } else {
    return norm_backward_element<P>(difference, slice, exponent);
  }
}

}  // namespace manualgrad
