"""Elementwise operators, and softmax."""

import math

import torch
from torch.func import grad, jvp

from claims import F64, derivatives, own, point, scalar

aten = torch.ops.aten
MASKED = torch.tensor([-math.inf, -math.inf], dtype=F64)
HALF = 1 / math.sqrt(math.pi)


def norm_of_one(x):
    return aten._foreach_norm.Scalar([x])[0]


def far(op):
    """op at 1e8 x, of a size of about one."""
    return lambda x: 1e4 * op(1e8 * x)


def slope_of_a_sample():
    """The derivative of a sample in its shape, over -(dP/da) / (dP/dx) by finite differences."""
    a, step = scalar(5.0).requires_grad_(), 1e-4
    x = torch._standard_gamma(a, generator=torch.Generator().manual_seed(0))
    (slope,) = torch.autograd.grad(x, a)
    a, x = a.detach(), x.detach()
    in_a = aten.igamma(a + step, x) - aten.igamma(a - step, x)
    return -slope * (aten.igamma(a, x + step) - aten.igamma(a, x - step)) / in_a


def of_complex(f):
    """The first three derivatives at 0 along a line through it."""
    return derivatives(lambda x: f(torch.complex(x, 2 * x)), 0.0, 0.0, 0.0, 0.0)


def at_a_tie(f):
    """Forward mode less reverse mode, of the first of two equal numbers and of the second; versions share a tie in two ways."""
    one, zero = scalar(1.0), scalar(0.0)

    def difference(i):
        tangents = (zero, one) if i else (one, zero)
        return jvp(f, (one, one), tangents)[1] - grad(f, argnums=i)(one, one)

    return [point(lambda i=i: difference(i), 0.0) for i in (0, 1)]


def beside_its_zero(x):
    """x, whose tangent PyTorch's ``aten::zero`` overwrites."""
    zero = aten.zero(x)
    return x * 1.0 + zero


def after_a_write(op):
    """The tangent of a square, after a write to what the operator makes of the same number."""

    def square(x):
        op(x).mul_(3)
        return x * x

    return [point(lambda: jvp(square, (scalar(2.5),), (scalar(1.0),))[1], 5.0)]


PROOFS = {
    "aten::abs": {"values": of_complex(torch.abs)},
    "aten::sgn": {"values": of_complex(lambda z: z.sgn().real)},
    "aten::angle": {"values": of_complex(torch.angle)},
    "aten::frac": {"values": after_a_write(torch.frac)},
    "aten::sub.Scalar": {"values": after_a_write(lambda x: aten.sub.Scalar(x, 1.0))},
    "aten::fmax": {"values": at_a_tie(torch.fmax)},
    "aten::zero": {"values": [point(lambda: jvp(beside_its_zero, (scalar(2.0),), (scalar(1.0),))[1], 1.0)]},
    "aten::clamp.Tensor": {"values": derivatives(lambda y: torch.clamp(scalar(0.0), y, y), 1.0, 1.0)},
    "aten::hypot": {"values": derivatives(lambda x: torch.hypot(x, 2 * x), 0.0, 0.0, 0.0)},
    "aten::atan2": {
        "values": [
            *derivatives(lambda x: torch.atan2(x, scalar(1e-200)), 0.0, 1e200),
            point(lambda: jvp(lambda x: torch.atan2(x, x), (scalar(0.0),), (scalar(1.0),))[1], 0.0),
        ]
    },
    "aten::pow.Tensor_Tensor": {"values": derivatives(lambda y: torch.pow(scalar(0.0), y), 2.0, 0.0, 0.0)},
    "aten::pow.Scalar": {"values": derivatives(lambda y: torch.pow(0.0, y), 2.0, 0.0, 0.0)},
    "aten::xlogy.Tensor": {"values": derivatives(lambda y: torch.xlogy(scalar(0.0), y), 0.0, 0.0, 0.0)},
    "aten::xlogy.Scalar_Self": {"values": derivatives(lambda y: torch.xlogy(0.0, y), 0.0, 0.0, 0.0)},
    "aten::special_xlog1py": {"values": derivatives(lambda y: aten.special_xlog1py(scalar(0.0), y), -1.0, 0.0, 0.0)},
    "aten::special_xlog1py.self_scalar": {
        "values": derivatives(lambda y: aten.special_xlog1py(0.0, y), -1.0, 0.0, 0.0)
    },
    "aten::logaddexp": {"values": derivatives(lambda x: torch.logaddexp(x, scalar(-math.inf)), -math.inf, 0.5, 0.0)},
    "aten::logaddexp2": {"values": derivatives(lambda x: torch.logaddexp2(x, scalar(math.inf)), math.inf, 0.5)},
    "aten::log_sigmoid_backward": {  # PyTorch's derivative is s (s - 1), with s the sigmoid, which is 1
        "values": derivatives(
            lambda x: 1e17 * aten.log_sigmoid_backward(scalar(1.0), x, (-x.detach().abs()).exp()),
            40.0,
            -1e17 * math.exp(-40),
            1e17 * math.exp(-40),
        )
    },
    "aten::logit": {"values": derivatives(lambda x: torch.logit(x, 0.1), 1.0, 0.0, 0.0)},
    "aten::special_erfcx": {"values": derivatives(lambda x: 1e15 * torch.special.erfcx(x), 1e5, -1e5 * HALF, 2 * HALF)},
    "aten::special_log_ndtr": {"values": derivatives(torch.special.log_ndtr, -1e6, 1e6, -1.0)},
    "aten::igamma": {
        "values": derivatives(lambda x: aten.igamma(scalar(1.0), x), 0.0, 1.0),
        "missing": [own("rev"), own("fwd")],
    },
    "aten::igammac": {
        "values": derivatives(lambda x: aten.igammac(scalar(1.0), x), 0.0, -1.0),
        "missing": [own("rev"), own("fwd")],
    },
    "aten::_standard_gamma": {
        "values": [point(slope_of_a_sample, 1.0)],
        "missing": [own("fwd"), own("rev-rev")],
    },
    "aten::_sample_dirichlet": {"missing": [own("rev"), own("fwd")]},
    "aten::special_zeta": {"missing": [own("fwd")]},
    "aten::special_zeta.other_scalar": {"missing": [own("rev")]},
    "aten::special_zeta.self_scalar": {"missing": [own("fwd")]},
    "aten::nextafter": {
        "values": [point(lambda: grad(lambda x: torch.nextafter(x, x))(scalar(2.0)), 1.0)],
        "missing": [own("rev"), own("fwd")],
    },
    "aten::copysign.Tensor": {"values": derivatives(lambda x: torch.copysign(x, -scalar(1.0)), math.inf, -1.0)},
    "aten::copysign.Scalar": {"values": derivatives(lambda x: torch.copysign(x, -1.0), math.inf, -1.0)},
    "aten::ldexp.Tensor": {"values": derivatives(lambda x: torch.ldexp(x, torch.tensor(-2)), 0.5, 0.25)},
    "aten::polar": {"values": derivatives(lambda r: torch.polar(r, scalar(1.0)).real, -2.0, math.cos(1))},
    "aten::mish": {"values": derivatives(torch.nn.functional.mish, 1000.0, 1.0, 0.0, 0.0)},
    "aten::hardsigmoid": {
        "values": [point(lambda: 1e8 * (grad(torch.nn.functional.hardsigmoid)(scalar(0.0)) - 1 / 6), 0.0)],
        "missing": [own("rev-rev"), own("fwd-rev")],
    },
    "aten::glu": {"missing": [own("fwd-fwd")]},
    "aten::glu_backward": {"missing": [own("fwd-fwd")]},
    "aten::_log_softmax": {"missing": [own("rev-fwd")]},
    "aten::_softmax": {"missing": [own("rev-fwd")]},
    "aten::silu": {"missing": [own("rev-fwd")]},
    "aten::_safe_softmax": {
        "values": [
            point(
                lambda: grad(
                    lambda x: jvp(lambda x: aten._safe_softmax(x, 0), (x,), (torch.ones_like(x),))[1].sin().sum()
                )(MASKED),
                [0.0, 0.0],
            )
        ]
    },
    "aten::sinc": {"values": derivatives(torch.sinc, 0.0, 0.0, -(math.pi**2) / 3, 0.0, math.pi**4 / 5)},
    **{
        f"aten::_fake_quantize_learnable_per_{what}_affine": {"missing": [own("fwd"), own("rev-rev")]}
        for what in ("tensor", "channel")
    },
    "aten::frexp.Tensor": {"values": derivatives(lambda x: torch.frexp(2.0**200 * x)[0], 0.75, 1.0)},
    **{
        f"aten::_foreach_{name}.{overload}": {"values": [own("fwd")]}
        for name in ("maximum", "minimum")
        for overload in ("Scalar", "ScalarList")
    },
    "aten::_foreach_pow.List": {
        "values": derivatives(lambda y: aten._foreach_pow.List([scalar(0.0)], [y])[0], 2.0, 0.0, 0.0)
    },
    "aten::_foreach_pow.ScalarAndTensor": {"missing": [own("fwd")]},
    "aten::_foreach_norm.Scalar": {
        "values": [point(lambda: grad(lambda x: grad(norm_of_one)(x).sum())(torch.zeros(3, dtype=F64)), [0.0] * 3)]
    },
    "aten::_foreach_mm": {"missing": [own("fwd")]},
    "aten::fake_quantize_per_tensor_affine_cachemask": {"missing": [own("fwd")]},
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": {"missing": [own("fwd")]},
    "aten::fake_quantize_per_channel_affine_cachemask": {"missing": [own("fwd")]},
    "aten::special_i1": {"values": derivatives(torch.special.i1, 0.0, 0.5, 0.0, 0.375)},
    "aten::special_i0e": {
        "values": derivatives(far(torch.special.i0e), 1.0, -0.19947114094873312, 0.29920671217111647)
    },
    "aten::special_i1e": {"values": derivatives(torch.special.i1e, 1e-10, 0.5, -1.0, 1.875)},
}
_CHEBYSHEV = [f"chebyshev_polynomial_{kind}" for kind in "tuvw"]
_POLYNOMIALS = [
    *_CHEBYSHEV,
    *(f"shifted_{name}" for name in _CHEBYSHEV),
    "hermite_polynomial_h",
    "hermite_polynomial_he",
]
_POLYNOMIALS += ["laguerre_polynomial_l", "legendre_polynomial_p"]
_OTHERS = "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1"
_OTHERS += " scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"
for _name in (*_OTHERS.split(), *_POLYNOMIALS, *(f"{name}.n_scalar" for name in _POLYNOMIALS)):
    PROOFS[f"aten::special_{_name}"] = {"values": [own("rev")]}
for _name, *_at_zero in (
    ("bessel_j0", 0.0, -0.5, 0.0, 0.375),
    ("bessel_j1", 0.5, 0.0, -0.375),
    ("modified_bessel_i0", 0.0, 0.5, 0.0, 0.375),
    ("modified_bessel_i1", 0.5, 0.0, 0.375),
):
    PROOFS[f"aten::special_{_name}"]["values"] += derivatives(getattr(torch.special, _name), 0.0, *_at_zero)
