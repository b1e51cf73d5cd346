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
        bits: the precision of `exact`.
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


def _between(p: float) -> Callable[[Tensor], Tensor]:
    """The distance of (x, 1) and (0, 3) by cdist."""
    return lambda x: torch.cdist(
        torch.stack([x, _like(x, 1.0)], -1).unsqueeze(1), _like(x, 0.0).new_tensor([[0.0, 3.0]]), p
    ).flatten()


def _pdist(p: float) -> Callable[[Tensor], Tensor]:
    """The same by pdist, which takes no batch."""
    other = torch.tensor([0.0, 3.0])

    def function(x: Tensor) -> Tensor:
        pairs = torch.stack([torch.stack([x, _like(x, 1.0)], -1), other.to(x.dtype).expand(len(x), 2)], 1)
        return torch.cat([F.pdist(pair, p) for pair in pairs.unbind()])

    return function


def _p_norm(p: float, y: float) -> Callable[[Any], Any]:
    return lambda x: (abs(x) ** mpf(p) + mpf(y) ** mpf(p)) ** (1 / mpf(p))


def _standardized(x: Any) -> Any:
    """The first of (x, 1/2, -1) less their mean, over the root of their variance and 1e-5."""
    mean = (x - mpf(0.5)) / 3
    variance = (x * x + mpf(1.25)) / 3 - mean * mean
    return (x - mean) / mp.sqrt(variance + mpf(1e-5))


def _layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(torch.stack([x, _like(x, 0.5), _like(x, -1.0)], -1), (3,))[..., 0]


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


def _ctc(x: Tensor) -> Tensor:
    """The loss of one label in two frames, both with the log-odds (x, 0, 1 / 2) of blank, the label and another."""
    frame = torch.stack([x, _like(x, 0.0), _like(x, 0.5)], -1).log_softmax(-1)
    n, ones = len(x), torch.ones(len(x), 1, dtype=torch.long)
    return F.ctc_loss(torch.stack([frame, frame]), ones, torch.full((n,), 2), torch.full((n,), 1), reduction="none")


def _exact_ctc(x: Any) -> Any:
    blank, total = mp.exp(x), mp.exp(x) + 1 + mp.exp(mpf(0.5))
    return -mp.log((1 + 2 * blank) / (total * total))


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
    Case("aten::abs", "abs(x + 2i)", lambda x: torch.complex(x, _like(x, 2.0)).abs(), lambda x: mp.sqrt(x * x + 4)),
    Case("aten::abs", "abs(1 + x i)", lambda x: torch.complex(_like(x, 1.0), x).abs(), lambda x: mp.sqrt(x * x + 1)),
    Case("aten::sgn", "re sgn(x + 2i)", lambda x: torch.complex(x, _like(x, 2.0)).sgn().real, lambda x: x / mp.sqrt(x * x + 4)),
    Case("aten::angle", "angle(x + 2i)", lambda x: torch.complex(x, _like(x, 2.0)).angle(), lambda x: mp.atan2(2, x)),
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
    Case("aten::igamma", "igamma(2.5, x)", lambda x: torch.special.gammainc(_like(x, 2.5), x), lambda x: mp.gammainc(mpf(2.5), 0, x, regularized=True), domain=(0, 500), singular=True, bits=400),
    Case("aten::igammac", "igammac(2.5, x)", lambda x: torch.special.gammaincc(_like(x, 2.5), x), lambda x: mp.gammainc(mpf(2.5), x, regularized=True), domain=(0, 500), singular=True, bits=400),
    Case("aten::special_zeta", "zeta(3, x)", lambda x: torch.special.zeta(_like(x, 3.0), x), lambda x: mp.zeta(3, x), domain=(0.01, 1e3), singular=True, bits=320),
    Case("aten::polygamma", "polygamma(1, x)", lambda x: torch.polygamma(1, x), lambda x: mp.polygamma(1, x), domain=(0.01, 1e4), singular=True, bits=320),
    Case("aten::polygamma", "polygamma(2, x)", lambda x: torch.polygamma(2, x), lambda x: mp.polygamma(2, x), domain=(0.01, 1e4), singular=True, bits=320),
    Case("aten::mvlgamma", "mvlgamma, p = 2", lambda x: torch.mvlgamma(x, 2), lambda x: mp.loggamma(x) + mp.loggamma(x - mpf(0.5)), domain=(0.6, 1e4), singular=True, bits=320),
    Case("aten::erfinv", "erfinv", torch.erfinv, mp.erfinv, domain=(-0.999, 0.999), bits=320),
    Case("aten::special_ndtri", "ndtri", torch.special.ndtri, lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1), domain=(1e-3, 0.999), singular=True, bits=320),
    Case("aten::erfc", "ndtr", torch.special.ndtr, _ndtr, domain=(-36, 36)),
    # -- activations in pieces
    Case("aten::elu", "elu", lambda x: F.elu(x, 1.5), lambda x: x if x > 0 else mpf(1.5) * mp.expm1(x), singular=True),
    Case("aten::celu", "celu, alpha = 3", lambda x: F.celu(x, 3.0), lambda x: x if x > 0 else 3 * mp.expm1(x / 3), singular=True),
    Case("aten::softsign", "softsign", F.softsign, lambda x: x / (1 + abs(x)), singular=True),
    Case("aten::hardswish", "hardswish", F.hardswish, lambda x: x * (x + 3) / 6, domain=(-2.99, 2.99)),
    Case("aten::elu", "selu", F.selu, lambda x: mpf(1.0507009873554804934193349852946) * (x if x > 0 else mpf(1.6732632423543772848170429916717) * mp.expm1(x)), singular=True),
    Case("aten::glu", "glu(x, 1/2)", _each(lambda x: F.glu(x, -1)[..., 0]), lambda x: x * _sigmoid(mpf(0.5))),
    Case("aten::glu", "glu(1/2, x)", lambda x: F.glu(torch.stack([_like(x, 0.5), x], -1), -1)[..., 0], lambda x: _sigmoid(x) / 2),
    # -- reductions and losses
    Case("aten::_cdist_forward", "cdist, p = 2", _between(2.0), _p_norm(2, 2)),
    Case("aten::_cdist_forward", "cdist, p = 3", _between(3.0), _p_norm(3, 2), singular=True),
    Case("aten::_pdist_forward", "pdist, p = 2", _pdist(2.0), _p_norm(2, 2)),
    Case("aten::_pdist_forward", "pdist, p = 3", _pdist(3.0), _p_norm(3, 2), singular=True),
    Case("aten::linalg_vector_norm", "vector_norm(x, 1/2), p = 1.5", _each(lambda x: torch.linalg.vector_norm(x, 1.5, dim=-1)), _p_norm(1.5, 0.5), singular=True),
    Case("aten::native_layer_norm", "layer_norm(x, 1/2, -1)", _layer_norm, _standardized, domain=(-1e4, 1e4)),
    Case("aten::cumprod", "cumprod(x, 1/2, x)", lambda x: torch.stack([x, _like(x, 0.5), x], -1).cumprod(-1)[..., 2], lambda x: x * x / 2, singular=True),
    Case("aten::addcmul", "addcmul(1, x, x)", lambda x: torch.addcmul(_like(x, 1.0), x, x), lambda x: 1 + x * x, singular=True),
    Case("aten::multi_margin_loss", "multi_margin_loss(x, 1/2), p = 2", _each(lambda x: F.multi_margin_loss(x, torch.ones(len(x), dtype=torch.long), p=2, reduction="none")), lambda x: (x + mpf(0.5)) ** 2 / 2, domain=(-0.4, inf)),
    Case("aten::logsumexp", "logsumexp(x, 1/2)", _each(lambda x: x.logsumexp(-1)), lambda x: mpf(0.5) + _softplus(x - mpf(0.5))),
    Case("aten::_softmax", "softmax(x, 1/2)", _each(lambda x: x.softmax(-1)[..., 0]), lambda x: _sigmoid(x - mpf(0.5))),
    Case("aten::_log_softmax", "log_softmax(x, 1/2)", _each(lambda x: x.log_softmax(-1)[..., 0]), lambda x: -_softplus(mpf(0.5) - x)),
    Case("aten::_log_softmax", "cross_entropy(x, 1/2)", _each(lambda x: F.cross_entropy(x, torch.ones(len(x), dtype=torch.long), reduction="none")), lambda x: _softplus(x - mpf(0.5))),
    Case("aten::logcumsumexp", "logcumsumexp(x, 1/2)", _each(lambda x: x.logcumsumexp(-1)[..., 1]), lambda x: mpf(0.5) + _softplus(x - mpf(0.5))),
    Case("aten::_ctc_loss", "ctc_loss", _ctc, _exact_ctc),
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
