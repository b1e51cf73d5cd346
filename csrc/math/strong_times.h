// The product in which zero is strong: 0 times anything, infinite or nan, is 0.
#pragma once

#include "element.h"

namespace manualgrad {

template <class T>
HOST_DEVICE bool is_zero(const T& x) {
  return x == T(0);
}
template <class T>
HOST_DEVICE bool is_zero(const Complex<T>& x) {
  return x.re == T(0) && x.im == T(0);
}

template <class T>
HOST_DEVICE T strong_product(const T& a, const T& b) {
  const T product = a * b;
  return is_zero(a) || is_zero(b) ? T(0) : product;
}
template <class T>
HOST_DEVICE Complex<T> strong_product(const Complex<T>& a, const Complex<T>& b) {
  const Complex<T> product{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
  const bool zero = is_zero(a) || is_zero(b);
  return {zero ? T(0) : product.re, zero ? T(0) : product.im};
}

}  // namespace manualgrad
