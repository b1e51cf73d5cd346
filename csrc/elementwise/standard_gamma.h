// The derivative of samples of the gamma distribution in their shapes.
//
//   manualgrad::standard_gamma_grad.kernel(Tensor a, Tensor x) -> Tensor
//
// Contiguous tensors of one shape, float or double; so is the result. 0 where x = 0, and nan where x is not a sample.
//
// Called by the formula of this name in torch_manualgrad/derivatives/elementwise/incomplete_gamma.py.
#pragma once

#include "../base/abi.h"
#include "../math/gamma_sample.h"

namespace manualgrad {

#define STANDARD_GAMMA_GRAD "manualgrad::standard_gamma_grad: "

// Device::run<T>(count, a, x, out) fills the tensor out.
template <class Device>
struct StandardGammaOperators {
  static Tensor standard_gamma_grad(const Tensor& a, const Tensor& x) {
    const Geometry at = geometry(x), of_a = geometry(a);
    MANUALGRAD_CHECK(of_a.dim == at.dim && std::equal(at.sizes, at.sizes + at.dim, of_a.sizes),
                     STANDARD_GAMMA_GRAD "a: expected the shape of x, ", shape_of(x), ", got ", shape_of(a));
    MANUALGRAD_CHECK(same_device(a, x), STANDARD_GAMMA_GRAD "a: not on the device of x");
    MANUALGRAD_CHECK(a.is_contiguous() && x.is_contiguous(), STANDARD_GAMMA_GRAD "a, x: not contiguous");
    const ScalarType type = x.scalar_type();
    MANUALGRAD_CHECK(type == a.scalar_type() && (type == ScalarType::Float || type == ScalarType::Double),
                     STANDARD_GAMMA_GRAD "a, x: expected two tensors of float32, or of float64");
    const Tensor out = allocate({at.sizes, at.sizes + at.dim}, x);
    const auto run = [&](auto zero) {
      using T = decltype(zero);
      Device::template run<T>(x.numel(), static_cast<const T*>(a.const_data_ptr()),
                              static_cast<const T*>(x.const_data_ptr()), out);
    };
    type == ScalarType::Float ? run(0.0f) : run(0.0);
    return out;
  }

  static void add_to(Library& library) { library.impl("standard_gamma_grad.kernel", TORCH_BOX(&standard_gamma_grad)); }
};

}  // namespace manualgrad
