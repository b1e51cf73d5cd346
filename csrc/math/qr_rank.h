// Where the derivative of a QR decomposition is undefined, and where rounding errors determine it.
#pragma once

#include "number.h"

#include <limits>

namespace manualgrad {

// How many columns of a square or tall matrix determine Q.
template <class N>
HOST_DEVICE int determining(int m, int n) {
  return m == n && !NumberTraits<N>::kComplex ? n - 1 : n;
}

// Without overflow.
template <class N>
HOST_DEVICE RealOf<N> modulus(const N& a) {
  if constexpr (NumberTraits<N>::kComplex) {
    using R = RealOf<N>;
    const R re = absolute(a.re), im = absolute(a.im), one = real_number<R>(1);
    const auto wide = re >= im;
    const R big = select(wide, re, im), ratio = select(wide, im, re) / select(big > R{}, big, one);
    return big * square_root(one + ratio * ratio);
  } else {
    return absolute(a);
  }
}

// The factor R (n, n) of a matrix (m, n), or of one in each lane. From the first pivot on that is zero up to rounding,
// relative to the sum of its column's moduli, its rows and the columns of Q are undefined. The decisions are those of
// _vanishing(), _left_by_rounding(), _is_needed() and _is_moderate() in torch_manualgrad/derivatives/linalg/qr.py;
// change both, and is_regular() in linalg/qr.cpp. gQ and gR: the cotangents of Q and R, gR null for zero. The rows of
// all are `pitch` apart. Each thread takes columns of its own.
template <class N>
class QrRank {
  using T = RealOf<N>;
  using Mask = MaskOf<N>;

 public:
  template <class Threads>
  HOST_DEVICE QrRank(const Threads& threads, const N* R, int m, int n, int pitch)
      : R_(R), m_(m), n_(n), pitch_(pitch), first_(number(n)) {
    const T rounding = number(m * kEpsilon);
    for (int j = threads.rank(); j < determining<N>(m, n); j += threads.size()) {
      T column{};
      for (int i = 0; i <= j; ++i) column += modulus(R[i * pitch + j]) * rounding;
      const T pivot = modulus(R[j * pitch + j]), here = number(j);
      first_ = select((pivot > column) | (pivot != pivot) | (here > first_), first_, here);  // GCC 12.2 crashes at <=
    }
    first_ = -threads.largest(-first_);
  }

  // The first undefined row; n: none.
  HOST_DEVICE T first() const { return first_; }
  HOST_DEVICE Mask is_deficient() const { return number(n_) > first_; }

  // Whether from there on R has nothing but rounding errors, and a cotangent is not zero.
  template <class Threads>
  HOST_DEVICE Mask left_by_rounding(const Threads& threads, const N* gQ, const N* gR) const {
    const T noise = number(kNoise * m_ * kEpsilon), half_digits = square_root(number(kEpsilon)), one = number(1);
    T ruled_out{}, needed{};
    for (int j = threads.rank(); j < n_; j += threads.size()) {
      T column{};
      for (int i = 0; i <= j; ++i) column += modulus(R_[i * pitch_ + j]);
      const T bound = column * noise;
      for (int i = 0; i <= j; ++i) {
        const Mask undefined = is_undefined(i);
        ruled_out = select(undefined & !(bound >= modulus(R_[i * pitch_ + j])), one, ruled_out);
        if (gR != nullptr) needed = select(undefined & !is_zero(gR[i * pitch_ + j]), one, needed);
      }
      if (j < determining<N>(m_, n_)) {  // is the pivot precise?
        T row{};
        for (int k = j; k < n_; ++k) row = larger(row, modulus(R_[j * pitch_ + k]));
        const T pivot = modulus(R_[j * pitch_ + j]);
        const Mask precise = (pivot > T{}) & (pivot >= row * half_digits);
        ruled_out = select(is_undefined(j) & (!precise), one, ruled_out);
      }
      for (int i = 0; i < m_; ++i) needed = select(is_undefined(j) & !is_zero(gQ[i * pitch_ + j]), one, needed);
    }
    return is_deficient() & (threads.largest(ruled_out) == T{}) & (threads.largest(needed) == one);
  }

  // The size of the matrix's cotangent that the cotangents of Q and R account for; nan if one of these is.
  template <class Threads>
  HOST_DEVICE T explained(const Threads& threads, const N* gQ, const N* gR) const {
    T of_Q{}, of_R{};
    for (int j = threads.rank(); j < n_; j += threads.size()) {
      const T pivot = modulus(R_[j * pitch_ + j]);
      T largest{};
      for (int i = 0; i < m_; ++i) largest = larger(largest, modulus(gQ[i * pitch_ + j]));
      of_Q = select(is_undefined(j), of_Q, larger(of_Q, largest / pivot));
      for (int i = 0; gR != nullptr && i <= j; ++i) of_R = larger(of_R, modulus(gR[i * pitch_ + j]));
    }
    const T one = number(1), is_nan = threads.largest(select((of_Q != of_Q) | (of_R != of_R), one, T{}));
    const T sum = threads.largest(of_R) + threads.largest(of_Q);
    return select(is_nan > T{}, number(std::numeric_limits<Base>::quiet_NaN()), sum);
  }

  // Whether the matrix's cotangent gA (m, n) is of that size in the undefined columns, too.
  template <class Threads>
  HOST_DEVICE Mask is_moderate(const Threads& threads, const N* gA, const T& explained) const {
    const T bound = explained * number(kModerate), one = number(1);
    T beyond{};
    for (int j = threads.rank(); j < n_; j += threads.size()) {
      for (int i = 0; i < m_; ++i) {
        beyond = select(is_undefined(j) & !(bound >= modulus(gA[i * pitch_ + j])), one, beyond);
      }
    }
    return threads.largest(beyond) == T{};
  }

  // Makes undefined entries of the cotangents nan if they are not zero. The pivots become ones there, as only zeros are
  // divided by them.
  template <class Threads>
  HOST_DEVICE void nan_unless_zero(const Threads& threads, N* gQ, N* gR, N* pivots) const {
    const N one = from_real<N>(number(1)), nan = from_real<N>(number(std::numeric_limits<Base>::quiet_NaN()));
    for (int j = threads.rank(); j < n_; j += threads.size()) {
      const Mask undefined = is_undefined(j);
      const auto settled = [&](const N& x) { return select(undefined & !is_zero(x), nan, x); };
      pivots[j] = select(undefined, one, R_[j * pitch_ + j]);
      for (int i = 0; i < m_; ++i) gQ[i * pitch_ + j] = settled(gQ[i * pitch_ + j]);
      for (int i = j; gR != nullptr && i < n_; ++i) gR[j * pitch_ + i] = settled(gR[j * pitch_ + i]);
    }
    threads.sync();
  }

 private:
  using Base = BaseOf<N>;
  static constexpr Base kEpsilon = std::numeric_limits<Base>::epsilon();
  static constexpr Base kNoise = 16, kModerate = 1e3;  // _NOISE and _MODERATE in qr.py

  HOST_DEVICE static T number(Base value) { return real_number<T>(value); }
  HOST_DEVICE static T larger(const T& a, const T& b) { return select((a > b) | (a != a), a, b); }
  HOST_DEVICE Mask is_undefined(int j) const { return number(static_cast<Base>(j)) >= first_; }

  const N* R_;
  int m_, n_, pitch_;
  T first_;
};

}  // namespace manualgrad
