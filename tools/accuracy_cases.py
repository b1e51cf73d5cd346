"""Functions of one number whose derivatives tools/accuracy.py measures, each in PyTorch and, to any precision, in mpmath."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import torch
import torch.nn.functional as F
from mpmath import mp, mpf
from torch import Tensor

__all__ = ["CASES", "Case"]

inf = float("inf")


@dataclass(frozen=True)
class Case:
    """One function.

    Attributes:
        operator: the operator that has its rule.
        name: what the table calls it.
        function: of a tensor, element by element.
        exact: the same function of an `mpf`, or an `mpc`.
        domain: the interval on which the two are compared.
        singular: whether it has a singularity at 0, so that it changes on the scale of x there and not on that of 1.
        bits: the precision in which `exact` is computed.
        holomorphic: whether it is compared off the real line, too.
    """

    operator: str
    name: str
    function: Callable[[Tensor], Tensor]
    exact: Callable[[Any], Any]
    domain: tuple[float, float] = (-inf, inf)
    singular: bool = False
    bits: int = 1600
    holomorphic: bool = False


def _like(x: Tensor, value: float) -> Tensor:
    return torch.full_like(x.detach(), value)


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of the pairs (x, 1 / 2)."""
    return lambda x: function(torch.stack([x, _like(x, 0.5)], -1))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def _softplus(x: Any) -> Any:
    return mp.log1p(mp.exp(x))


def _tanh_gelu(x: Any) -> Any:
    return x * _sigmoid(2 * mp.sqrt(2 / mp.pi) * (x + mpf(0.044715) * x**3))


def _ndtr(x: Any) -> Any:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def _log_ndtr(x: Any) -> Any:
    return mp.log(_ndtr(x)) if x < 0 else mp.log1p(-_ndtr(-x))


_T = mpf(0.25)


def _cross_entropy(x: Any, positive: Any = 1) -> Any:
    return positive * _T * _softplus(-x) + (1 - _T) * _softplus(x)


# fmt: off
CASES = [
    # -- saturating
    Case("aten::sigmoid", "sigmoid", torch.sigmoid, _sigmoid, holomorphic=True),
    Case("aten::tanh", "tanh", torch.tanh, mp.tanh, holomorphic=True),
    Case("aten::softplus", "softplus, beta = 2, threshold = 1000", lambda x: F.softplus(x, 2.0, 1000.0), lambda x: _softplus(2 * x) / 2),
    Case("aten::log_sigmoid_forward", "logsigmoid", F.logsigmoid, lambda x: -_softplus(-x)),
    Case("aten::silu", "silu", F.silu, lambda x: x * _sigmoid(x), holomorphic=True),
    Case("aten::mish", "mish", F.mish, lambda x: x * mp.tanh(_softplus(x))),
    Case("aten::gelu", "gelu", F.gelu, lambda x: x * _ndtr(x), domain=(-60, 60)),
    Case("aten::gelu", "gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), _tanh_gelu, domain=(-60, 60)),
    Case("aten::logaddexp", "logaddexp(x, 0)", lambda x: torch.logaddexp(x, _like(x, 0.0)), _softplus),
    Case("aten::logaddexp", "logaddexp(1, x)", lambda x: torch.logaddexp(_like(x, 1.0), x), lambda x: 1 + _softplus(x - 1)),
    Case("aten::logaddexp2", "logaddexp2(x, 0)", lambda x: torch.logaddexp2(x, _like(x, 0.0)), lambda x: mp.log1p(mpf(2) ** x) / mp.log(2)),
    Case("aten::special_log_ndtr", "log_ndtr", torch.special.log_ndtr, _log_ndtr, domain=(-1e3, 60)),
    Case("aten::erf", "erf", torch.erf, mp.erf, domain=(-40, 40)),
    Case("aten::erfc", "erfc", torch.erfc, mp.erfc, domain=(-40, 40)),
    Case("aten::special_erfcx", "erfcx", torch.special.erfcx, lambda x: mp.exp(x * x) * mp.erfc(x), domain=(-9, 40)),
    Case("aten::soft_margin_loss", "soft_margin_loss(x, 1)", lambda x: F.soft_margin_loss(x, _like(x, 1.0), reduction="none"), lambda x: _softplus(-x)),
    Case("aten::soft_margin_loss", "soft_margin_loss(x, -1)", lambda x: F.soft_margin_loss(x, _like(x, -1.0), reduction="none"), _softplus),
    Case("aten::binary_cross_entropy_with_logits", "binary_cross_entropy_with_logits(x, 1/4)", lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 0.25), reduction="none"), _cross_entropy),
    Case("aten::binary_cross_entropy_with_logits", "binary_cross_entropy_with_logits(x, 1/4), pos_weight = 3", lambda x: F.binary_cross_entropy_with_logits(x, _like(x, 0.25), pos_weight=_like(x, 3.0), reduction="none"), functools.partial(_cross_entropy, positive=3)),
    # -- exponentials, trigonometric and hyperbolic functions
    Case("aten::exp", "exp", torch.exp, mp.exp, holomorphic=True),
    Case("aten::exp2", "exp2", torch.exp2, lambda x: mpf(2) ** x, holomorphic=True),
    Case("aten::expm1", "expm1", torch.expm1, mp.expm1, holomorphic=True),
    Case("aten::sin", "sin", torch.sin, mp.sin, domain=(-1e6, 1e6), holomorphic=True),
    Case("aten::cos", "cos", torch.cos, mp.cos, domain=(-1e6, 1e6), holomorphic=True),
    Case("aten::tan", "tan", torch.tan, mp.tan, domain=(-1.5, 1.5), holomorphic=True),
    Case("aten::sinc", "sinc", torch.sinc, lambda x: mp.sinc(mp.pi * x), domain=(-1e4, 1e4), holomorphic=True),
    Case("aten::sinh", "sinh", torch.sinh, mp.sinh, holomorphic=True),
    Case("aten::cosh", "cosh", torch.cosh, mp.cosh, holomorphic=True),
    Case("aten::asin", "asin", torch.asin, mp.asin, domain=(-0.999, 0.999), holomorphic=True),
    Case("aten::acos", "acos", torch.acos, mp.acos, domain=(-0.999, 0.999), holomorphic=True),
    Case("aten::atan", "atan", torch.atan, mp.atan, holomorphic=True),
    Case("aten::asinh", "asinh", torch.asinh, mp.asinh, holomorphic=True),
    Case("aten::acosh", "acosh", torch.acosh, mp.acosh, domain=(1.001, inf), holomorphic=True),
    Case("aten::atanh", "atanh", torch.atanh, mp.atanh, domain=(-0.999, 0.999), holomorphic=True),
    # -- powers and logarithms
    Case("aten::log", "log", torch.log, mp.log, domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::log2", "log2", torch.log2, lambda x: mp.log(x) / mp.log(2), domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::log10", "log10", torch.log10, lambda x: mp.log(x) / mp.log(10), domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::log1p", "log1p", torch.log1p, mp.log1p, domain=(-0.999, inf), holomorphic=True),
    Case("aten::sqrt", "sqrt", torch.sqrt, mp.sqrt, domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::rsqrt", "rsqrt", torch.rsqrt, lambda x: 1 / mp.sqrt(x), domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::reciprocal", "reciprocal", torch.reciprocal, lambda x: 1 / x, singular=True, holomorphic=True),
    Case("aten::pow.Tensor_Scalar", "x ** 2.5", lambda x: x**2.5, lambda x: x ** mpf(2.5), domain=(0, inf), singular=True, holomorphic=True),
    Case("aten::pow.Tensor_Scalar", "x ** 3", lambda x: x**3, lambda x: x**3, singular=True, holomorphic=True),
    Case("aten::pow.Tensor_Tensor", "pow(x, 2.5)", lambda x: torch.pow(x, _like(x, 2.5)), lambda x: x ** mpf(2.5), domain=(0, inf), singular=True),
    Case("aten::pow.Tensor_Tensor", "pow(3, x)", lambda x: torch.pow(_like(x, 3.0), x), lambda x: mpf(3) ** x),
    Case("aten::pow.Scalar", "3 ** x", lambda x: torch.pow(3.0, x), lambda x: mpf(3) ** x),
    Case("aten::xlogy.Tensor", "xlogy(2, x)", lambda x: torch.xlogy(_like(x, 2.0), x), lambda x: 2 * mp.log(x), domain=(0, inf), singular=True),
    Case("aten::special_xlog1py", "xlog1py(2, x)", lambda x: torch.special.xlog1py(_like(x, 2.0), x), lambda x: 2 * mp.log1p(x), domain=(-0.999, inf)),
    Case("aten::special_entr", "entr", torch.special.entr, lambda x: -x * mp.log(x), domain=(0, inf), singular=True),
    Case("aten::logit", "logit", torch.logit, lambda x: mp.log(x / (1 - x)), domain=(0, 1), singular=True),
    Case("aten::hypot", "hypot(x, 3)", lambda x: torch.hypot(x, _like(x, 3.0)), lambda x: mp.sqrt(x * x + 9)),
    Case("aten::atan2", "atan2(x, 3)", lambda x: torch.atan2(x, _like(x, 3.0)), lambda x: mp.atan(x / 3)),
    Case("aten::atan2", "atan2(3, x)", lambda x: torch.atan2(_like(x, 3.0), x), lambda x: mp.pi / 2 - mp.atan(x / 3)),
    Case("aten::div.Tensor", "3 / x", lambda x: _like(x, 3.0) / x, lambda x: 3 / x, singular=True),
    Case("aten::addcdiv", "addcdiv(1, 3, x)", lambda x: torch.addcdiv(_like(x, 1.0), _like(x, 3.0), x), lambda x: 1 + 3 / x, singular=True),
    # -- special functions
    Case("aten::lgamma", "lgamma", torch.lgamma, mp.loggamma, domain=(0, 1e4), singular=True, bits=320),
    Case("aten::digamma", "digamma", torch.digamma, mp.digamma, domain=(0, 1e4), singular=True, bits=320),
    Case("aten::i0", "i0", torch.i0, lambda x: mp.besseli(0, x), domain=(-80, 80), bits=400),
    Case("aten::special_i0e", "i0e", torch.special.i0e, lambda x: mp.exp(-abs(x)) * mp.besseli(0, x), domain=(0.01, 80), bits=400),
    Case("aten::special_i1", "i1", torch.special.i1, lambda x: mp.besseli(1, x), domain=(-80, 80), bits=400),
    Case("aten::special_i1e", "i1e", torch.special.i1e, lambda x: mp.exp(-abs(x)) * mp.besseli(1, x), domain=(0.01, 80), bits=400),
    # -- activations in pieces
    Case("aten::elu", "elu", lambda x: F.elu(x, 1.5), lambda x: x if x > 0 else mpf(1.5) * mp.expm1(x), singular=True),
    Case("aten::celu", "celu, alpha = 3", lambda x: F.celu(x, 3.0), lambda x: x if x > 0 else 3 * mp.expm1(x / 3), singular=True),
    Case("aten::softsign", "softsign", F.softsign, lambda x: x / (1 + abs(x)), singular=True),
    Case("aten::hardswish", "hardswish", F.hardswish, lambda x: x * (x + 3) / 6, domain=(-2.99, 2.99)),
    # -- reductions and losses
    Case("aten::logsumexp", "logsumexp(x, 1/2)", _each(lambda x: x.logsumexp(-1)), lambda x: mpf(0.5) + _softplus(x - mpf(0.5))),
    Case("aten::_softmax", "softmax(x, 1/2)", _each(lambda x: x.softmax(-1)[..., 0]), lambda x: _sigmoid(x - mpf(0.5))),
    Case("aten::_log_softmax", "log_softmax(x, 1/2)", _each(lambda x: x.log_softmax(-1)[..., 0]), lambda x: -_softplus(mpf(0.5) - x)),
    Case("aten::_log_softmax", "cross_entropy(x, 1/2)", _each(lambda x: F.cross_entropy(x, torch.ones(len(x), dtype=torch.long), reduction="none")), lambda x: _softplus(x - mpf(0.5))),
    Case("aten::logcumsumexp", "logcumsumexp(x, 1/2)", _each(lambda x: x.logcumsumexp(-1)[..., 1]), lambda x: mpf(0.5) + _softplus(x - mpf(0.5))),
    Case("aten::linalg_vector_norm", "vector_norm(x, 1/2)", _each(lambda x: torch.linalg.vector_norm(x, dim=-1)), lambda x: mp.sqrt(x * x + mpf(0.25))),
    Case("aten::linalg_vector_norm", "vector_norm(x, 1/2), p = 3", _each(lambda x: torch.linalg.vector_norm(x, 3, dim=-1)), lambda x: mp.cbrt(abs(x) ** 3 + mpf(0.125)), singular=True),
    Case("aten::prod.dim_int", "prod(x, 1/2, x)", lambda x: torch.stack([x, _like(x, 0.5), x], -1).prod(-1), lambda x: x * x / 2, singular=True),
    Case("aten::var.correction", "var(x, 1/2)", _each(lambda x: x.var(-1)), lambda x: (x - mpf(0.5)) ** 2 / 2),
    Case("aten::std.correction", "std(x, 1/2)", _each(lambda x: x.std(-1)), lambda x: abs(x - mpf(0.5)) / mp.sqrt(2), domain=(0.75, inf)),
    Case("aten::binary_cross_entropy", "binary_cross_entropy(x, 1/4)", lambda x: F.binary_cross_entropy(x, _like(x, 0.25), reduction="none"), lambda x: -_T * mp.log(x) - (1 - _T) * mp.log1p(-x), domain=(1e-11, 0.999), singular=True),
    Case("aten::mse_loss", "mse_loss(x, 1/4)", lambda x: F.mse_loss(x, _like(x, 0.25), reduction="none"), lambda x: (x - _T) ** 2),
    Case("aten::huber_loss", "huber_loss(x, 1/4)", lambda x: F.huber_loss(x, _like(x, 0.25), reduction="none"), lambda x: (x - _T) ** 2 / 2, domain=(-0.7, 1.2)),
    Case("aten::smooth_l1_loss", "smooth_l1_loss(x, 1/4)", lambda x: F.smooth_l1_loss(x, _like(x, 0.25), reduction="none"), lambda x: (x - _T) ** 2 / 2, domain=(-0.7, 1.2)),
    Case("aten::xlogy.Tensor", "kl_div(1, x)", lambda x: F.kl_div(_like(x, 1.0), x, reduction="none"), lambda x: x * mp.log(x) - x, domain=(0, inf), singular=True),
    Case("aten::log", "poisson_nll_loss(x, 2), log_input=False", lambda x: F.poisson_nll_loss(x, _like(x, 2.0), log_input=False, eps=0.0, reduction="none"), lambda x: x - 2 * mp.log(x), domain=(0, inf), singular=True),
]
# fmt: on
assert mpmath
