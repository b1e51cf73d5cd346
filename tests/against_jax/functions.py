"""Functions that PyTorch and JAX both have: how each calls it, and where it is evaluated.

JAX's side is a string, so that this table can be read where JAX is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
import torch.nn.functional as F

special, linalg, fft = torch.special, torch.linalg, torch.fft

Interval = tuple[float, float]


@dataclass(frozen=True)
class Function:
    """A function in both libraries.

    Attributes:
        name: what the tests and the document call it.
        torch: PyTorch's.
        jax: JAX's, an expression of ``jax``, ``jnp``, ``lax``, ``nn``, ``jsp`` (jax.scipy) and ``np``.
        inputs: the shapes of its inputs; of an elementwise function, the number of inputs, as ``[()] * 2``.
        domains: the interval of each input.
        elementwise: it is evaluated at random points of its domain and at `edges`.
        edges: points of every input, of which those within the domain are taken, its ends included.
        is_complex: it takes complex inputs too.
        is_real: it takes real inputs.
        prepare: makes the inputs that it needs, such as positive definite matrices, of random ones.
    """

    name: str
    torch: Callable[..., torch.Tensor]
    jax: str
    inputs: Sequence[tuple[int, ...]] = ((),)
    domains: Sequence[Interval] = ()
    elementwise: bool = False
    edges: Sequence[float] = ()
    is_complex: bool = True
    is_real: bool = True
    prepare: Callable[..., Sequence[torch.Tensor]] | None = field(default=None)


FUNCTIONS: list[Function] = []

_EDGES = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.0, -3.0, 6.0, 1e-12, -1e-12, 1e-200, 20.0, -20.0, 40.0, -40.0, 1e4, -1e4)


def _add(name: str, torch_function: Any, jax: str, **about: Any) -> None:
    assert name not in [f.name for f in FUNCTIONS], name
    FUNCTIONS.append(Function(name, torch_function, jax, **about))


def one(name: str, torch_function: Any, jax: str, domain: Interval = (-inf, inf), **about: Any) -> None:
    """An elementwise function of one input."""
    about = {"edges": _EDGES, "is_complex": False} | about
    _add(name, torch_function, jax, domains=[domain], elementwise=True, **about)


def two(name: str, torch_function: Any, jax: str, *domains: Interval, **about: Any) -> None:
    """An elementwise function of two inputs."""
    about = {"edges": (0.0, 1.0, -1.0, 0.5, 3.0, -3.0, 1e-12, 40.0, -40.0), "is_complex": False} | about
    domains = domains or ((-inf, inf), (-inf, inf))
    _add(name, torch_function, jax, inputs=((), ()), domains=domains, elementwise=True, **about)


def many(name: str, torch_function: Any, jax: str, *shapes: tuple[int, ...], **about: Any) -> None:
    """Any function of tensors."""
    _add(name, torch_function, jax, inputs=shapes, **about)


POSITIVE: Interval = (0.0, inf)
UNIT: Interval = (-1.0, 1.0)

# -- elementwise, of one input ----------------------------------------------------------------------------------------

one("sin", torch.sin, "jnp.sin", is_complex=True)
one("cos", torch.cos, "jnp.cos", is_complex=True)
one("tan", torch.tan, "jnp.tan", (-1.3, 1.3), is_complex=True)
one("asin", torch.asin, "jnp.arcsin", UNIT, is_complex=True)
one("acos", torch.acos, "jnp.arccos", UNIT, is_complex=True)
one("atan", torch.atan, "jnp.arctan", is_complex=True)
one("sinh", torch.sinh, "jnp.sinh", (-50.0, 50.0), is_complex=True)
one("cosh", torch.cosh, "jnp.cosh", (-50.0, 50.0), is_complex=True)
one("tanh", torch.tanh, "jnp.tanh", is_complex=True)
one("asinh", torch.asinh, "jnp.arcsinh", is_complex=True)
one("acosh", torch.acosh, "jnp.arccosh", (1.0, inf), is_complex=True)
one("atanh", torch.atanh, "jnp.arctanh", UNIT, is_complex=True)
one("exp", torch.exp, "jnp.exp", (-60.0, 60.0), is_complex=True)
one("exp2", torch.exp2, "jnp.exp2", (-60.0, 60.0))
one("expm1", torch.expm1, "jnp.expm1", (-60.0, 60.0), is_complex=True)
one("log", torch.log, "jnp.log", POSITIVE, is_complex=True)
one("log2", torch.log2, "jnp.log2", POSITIVE)
one("log10", torch.log10, "jnp.log10", POSITIVE)
one("log1p", torch.log1p, "jnp.log1p", (-1.0, inf), is_complex=True)
one("sqrt", torch.sqrt, "jnp.sqrt", POSITIVE, is_complex=True)
one("rsqrt", torch.rsqrt, "lax.rsqrt", POSITIVE, is_complex=True)
one("reciprocal", torch.reciprocal, "jnp.reciprocal", is_complex=True)
one("square", torch.square, "jnp.square", is_complex=True)
one("abs", torch.abs, "jnp.abs", is_complex=True)
one("neg", torch.neg, "jnp.negative", is_complex=True)
one("sign", torch.sign, "jnp.sign")
one("sgn", torch.sgn, "jnp.sign", is_complex=True, is_real=False)
one("angle", torch.angle, "jnp.angle", is_complex=True)
one("conj", torch.conj, "jnp.conj", is_complex=True)
one("real", torch.real, "jnp.real", is_complex=True)
one("imag", torch.imag, "jnp.imag", is_complex=True, is_real=False)
one("ceil", torch.ceil, "jnp.ceil")
one("floor", torch.floor, "jnp.floor")
one("trunc", torch.trunc, "jnp.trunc")
one("deg2rad", torch.deg2rad, "jnp.deg2rad")
one("rad2deg", torch.rad2deg, "jnp.rad2deg")
one("nan_to_num", torch.nan_to_num, "jnp.nan_to_num")
one("sinc", torch.sinc, "jnp.sinc", is_complex=True)
one("pow(x, 3)", lambda x: x**3, "lambda x: x**3", is_complex=True)
one("pow(x, 2.5)", lambda x: x**2.5, "lambda x: x**2.5", POSITIVE, is_complex=True)
one("pow(x, -2)", lambda x: x**-2, "lambda x: x**-2", is_complex=True)
one("pow(2, x)", lambda x: 2.0**x, "lambda x: 2.0**x", (-60.0, 60.0), is_complex=True)
one("clamp", lambda x: x.clamp(-1.0, 2.0), "lambda x: jnp.clip(x, -1.0, 2.0)")
one("i0", special.i0, "jsp.special.i0", (-50.0, 50.0))
one("i0e", special.i0e, "jsp.special.i0e")
one("i1", special.i1, "jsp.special.i1", (-50.0, 50.0))
one("i1e", special.i1e, "jsp.special.i1e")
one("erf", torch.erf, "jsp.special.erf")
one("erfc", torch.erfc, "jsp.special.erfc")
one("erfinv", torch.erfinv, "jsp.special.erfinv", UNIT)
one("lgamma", torch.lgamma, "jsp.special.gammaln", POSITIVE)
one("digamma", torch.digamma, "jsp.special.digamma", POSITIVE)
one("polygamma(1, x)", lambda x: torch.polygamma(1, x), "lambda x: jsp.special.polygamma(1, x)", POSITIVE)
one("polygamma(2, x)", lambda x: torch.polygamma(2, x), "lambda x: jsp.special.polygamma(2, x)", POSITIVE)
one("multigammaln", lambda x: special.multigammaln(x, 3), "lambda x: jsp.special.multigammaln(x, 3)", (1.5, inf))
one("ndtr", special.ndtr, "jsp.special.ndtr")
one("ndtri", special.ndtri, "jsp.special.ndtri", (0.0, 1.0))
one("log_ndtr", special.log_ndtr, "jsp.special.log_ndtr")
one("logit", torch.logit, "jsp.special.logit", (0.0, 1.0))
one("entr", special.entr, "jsp.special.entr", POSITIVE)
one("zeta(x, 2)", lambda x: special.zeta(x, torch.full_like(x, 2.0)), "lambda x: jsp.special.zeta(x, 2.0)", (1.0, 30.0))
one("sigmoid", torch.sigmoid, "nn.sigmoid", is_complex=True)
one("logsigmoid", F.logsigmoid, "nn.log_sigmoid")
one("softplus", F.softplus, "nn.softplus")
one("relu", F.relu, "nn.relu")
one("relu6", F.relu6, "nn.relu6")
one("silu", F.silu, "nn.silu")
one("gelu", F.gelu, "lambda x: nn.gelu(x, approximate=False)")
one("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), "lambda x: nn.gelu(x, approximate=True)")
one("elu", F.elu, "nn.elu")
one("celu", F.celu, "nn.celu")
one("selu", F.selu, "nn.selu")
one("leaky_relu", F.leaky_relu, "nn.leaky_relu")
one("hardtanh", F.hardtanh, "nn.hard_tanh")
one("hardsigmoid", F.hardsigmoid, "nn.hard_sigmoid")
one("hardswish", F.hardswish, "nn.hard_swish")
one("mish", F.mish, "nn.mish")
one("softsign", F.softsign, "nn.soft_sign")
one("tanhshrink", F.tanhshrink, "lambda x: x - jnp.tanh(x)")

# -- elementwise, of two inputs ---------------------------------------------------------------------------------------

two("add", torch.add, "jnp.add", is_complex=True)
two("sub", torch.sub, "jnp.subtract", is_complex=True)
two("mul", torch.mul, "jnp.multiply", is_complex=True)
two("div", torch.div, "jnp.divide", is_complex=True)
two("pow", torch.pow, "jnp.power", POSITIVE, (-8.0, 8.0), is_complex=True)
two("maximum", torch.maximum, "jnp.maximum")
two("minimum", torch.minimum, "jnp.minimum")
two("fmax", torch.fmax, "jnp.fmax")
two("fmin", torch.fmin, "jnp.fmin")
two("fmod", torch.fmod, "jnp.fmod", (-20.0, 20.0), (0.3, 5.0), edges=())
two("remainder", torch.remainder, "jnp.remainder", (-20.0, 20.0), (0.3, 5.0), edges=())
two("copysign", torch.copysign, "jnp.copysign", edges=(1.0, -1.0, 0.5, 3.0, -3.0))
two("hypot", torch.hypot, "jnp.hypot")
two("atan2", torch.atan2, "jnp.arctan2")
two("logaddexp", torch.logaddexp, "jnp.logaddexp")
two("logaddexp2", torch.logaddexp2, "jnp.logaddexp2")
two("xlogy", torch.xlogy, "jsp.special.xlogy", POSITIVE, POSITIVE)
two("xlog1py", special.xlog1py, "jsp.special.xlog1py", (-inf, inf), (-1.0, inf))
one("gammainc(2.5, x)", lambda x: special.gammainc(torch.full_like(x, 2.5), x),
    "lambda x: jsp.special.gammainc(2.5, x)", POSITIVE)  # fmt: skip
one("gammaincc(2.5, x)", lambda x: special.gammaincc(torch.full_like(x, 2.5), x),
    "lambda x: jsp.special.gammaincc(2.5, x)", POSITIVE)  # fmt: skip
two("where", lambda x, y: torch.where(x > y, x.exp(), y.sin()), "lambda x, y: jnp.where(x > y, jnp.exp(x), jnp.sin(y))",
    (-20.0, 20.0), (-20.0, 20.0))  # fmt: skip
two("mse", lambda x, y: F.mse_loss(x, y, reduction="none"), "lambda x, y: (x - y) ** 2")

# -- reductions and cumulative functions ------------------------------------------------------------------------------

X = (3, 4)
many("sum", lambda x: x.sum(1), "lambda x: x.sum(1)", X)
many("mean", lambda x: x.mean(1), "lambda x: x.mean(1)", X)
many("prod", lambda x: x.prod(1), "lambda x: x.prod(1)", X)
many("var", lambda x: x.var(1), "lambda x: x.var(1, ddof=1)", X)
many("std", lambda x: x.std(1), "lambda x: x.std(1, ddof=1)", X)
many("amax", lambda x: x.amax(1), "lambda x: x.max(1)", X, is_complex=False)
many("amin", lambda x: x.amin(1), "lambda x: x.min(1)", X, is_complex=False)
many("logsumexp", lambda x: x.logsumexp(1), "lambda x: jsp.special.logsumexp(x, 1)", X)
many("softmax", lambda x: x.softmax(1), "lambda x: nn.softmax(x, 1)", X, is_complex=False)
many("log_softmax", lambda x: x.log_softmax(1), "lambda x: nn.log_softmax(x, 1)", X, is_complex=False)
many("nansum", lambda x: x.nansum(1), "lambda x: jnp.nansum(x, 1)", X, is_complex=False)
many("nanmean", lambda x: x.nanmean(1), "lambda x: jnp.nanmean(x, 1)", X, is_complex=False)
many("nanmedian", lambda x: x.nanmedian(1)[0], "lambda x: jnp.nanmedian(x, 1)", (3, 5), is_complex=False)
many("median", lambda x: x.median(1)[0], "lambda x: jnp.median(x, 1)", (3, 5), is_complex=False)
many("quantile", lambda x: x.quantile(0.3, 1), "lambda x: jnp.quantile(x, 0.3, 1)", X, is_complex=False)
many("cumsum", lambda x: x.cumsum(1), "lambda x: jnp.cumsum(x, 1)", X)
many("cumprod", lambda x: x.cumprod(1), "lambda x: jnp.cumprod(x, 1)", X)
many("cummax", lambda x: x.cummax(1)[0], "lambda x: lax.cummax(x, 1)", X, is_complex=False)
many("cummin", lambda x: x.cummin(1)[0], "lambda x: lax.cummin(x, 1)", X, is_complex=False)
many("logcumsumexp", lambda x: x.logcumsumexp(1), "lambda x: lax.cumlogsumexp(x, 1)", X, is_complex=False)
many("vector_norm", lambda x: linalg.vector_norm(x, dim=1), "lambda x: jnp.linalg.norm(x, axis=1)", X)
many("vector_norm, p = 1", lambda x: linalg.vector_norm(x, 1, 1), "lambda x: jnp.linalg.norm(x, 1, 1)", X)
many("vector_norm, p = 3", lambda x: linalg.vector_norm(x, 3, 1), "lambda x: jnp.linalg.norm(x, 3, 1)", X)
many("vector_norm, p = inf", lambda x: linalg.vector_norm(x, inf, 1), "lambda x: jnp.linalg.norm(x, np.inf, 1)", X)
many("vector_norm of zeros", lambda x: linalg.vector_norm(x, dim=1), "lambda x: jnp.linalg.norm(x, axis=1)", X,
     prepare=lambda x: [x * 0])  # fmt: skip
many("prod with zeros", lambda x: x.prod(1), "lambda x: x.prod(1)", X, prepare=lambda x: [_with_zeros(x)])
many("cumprod with zeros", lambda x: x.cumprod(1), "lambda x: jnp.cumprod(x, 1)", X, prepare=lambda x: [_with_zeros(x)])
many("std of equal numbers", lambda x: x.std(1), "lambda x: x.std(1, ddof=1)", X, prepare=lambda x: [x * 0 + 1.5],
     is_complex=False)  # fmt: skip
many("trapezoid", lambda x: torch.trapezoid(x), "jnp.trapezoid", X)
many("diff", lambda x: x.diff(), "jnp.diff", X)
many("sort", lambda x: x.sort(1)[0], "lambda x: jnp.sort(x, 1)", X, is_complex=False)
many("topk", lambda x: x.topk(2)[0], "lambda x: lax.top_k(x, 2)[0]", X, is_complex=False)
many("cov", torch.cov, "jnp.cov", X)
many("corrcoef", torch.corrcoef, "jnp.corrcoef", X, is_complex=False)
many("layer_norm", lambda x: F.layer_norm(x, (4,), eps=1e-5), "lambda x: nn.standardize(x, axis=1, epsilon=1e-5)", X,
     is_complex=False)  # fmt: skip
many("glu", lambda x: F.glu(x, 1), "lambda x: nn.glu(x, 1)", X, is_complex=False)
many("index_add", lambda x, y: x.index_add(0, torch.tensor([0, 2, 0]), y),
     "lambda x, y: x.at[jnp.array([0, 2, 0])].add(y)", X, X)  # fmt: skip
many("scatter_amax", lambda x: x.new_zeros(2, 4).index_reduce(0, torch.tensor([0, 1, 0]), x, "amax", include_self=False),
     "lambda x: jax.ops.segment_max(x, jnp.array([0, 1, 0]), 2)", X, is_complex=False)  # fmt: skip

# -- shapes and products ----------------------------------------------------------------------------------------------

many("matmul", torch.matmul, "jnp.matmul", (2, 3), (3, 4))
many("dot", torch.dot, "jnp.dot", (4,), (4,))
many("vdot", torch.vdot, "jnp.vdot", (4,), (4,))
many("outer", torch.outer, "jnp.outer", (3,), (4,))
many("kron", torch.kron, "jnp.kron", (2, 2), (2, 3))
many("cross", linalg.cross, "jnp.cross", X[:1] + (3,), X[:1] + (3,))
many("einsum", lambda x, y: torch.einsum("bij,bjk->ik", x, y), "lambda x, y: jnp.einsum('bij,bjk->ik', x, y)",
     (2, 3, 2), (2, 2, 3))  # fmt: skip
many("tensordot", lambda x, y: torch.tensordot(x, y, 1), "lambda x, y: jnp.tensordot(x, y, 1)", (2, 3), (3, 2))
many("trace", torch.trace, "jnp.trace", (3, 3))
many("diag", torch.diag, "jnp.diag", (3,))
many("tril", torch.tril, "jnp.tril", (3, 3))
many("triu", torch.triu, "jnp.triu", (3, 3))
many("flip", lambda x: x.flip(1), "lambda x: jnp.flip(x, 1)", X)
many("roll", lambda x: x.roll(2, 1), "lambda x: jnp.roll(x, 2, 1)", X)
many("tile", lambda x: x.tile(2, 2), "lambda x: jnp.tile(x, (2, 2))", X)
many("take_along_dim", lambda x: x.take_along_dim(torch.tensor([[0, 2], [1, 1], [3, 0]]), 1),
     "lambda x: jnp.take_along_axis(x, jnp.array([[0, 2], [1, 1], [3, 0]]), 1)", X)  # fmt: skip
many("index", lambda x: x[torch.tensor([0, 2, 0]), :, None], "lambda x: x[jnp.array([0, 2, 0]), :, None]", X)
many("cat", lambda x, y: torch.cat([x, y, x]), "lambda x, y: jnp.concatenate([x, y, x])", X, X)
many("stack", lambda x, y: torch.stack([x, y], 1), "lambda x, y: jnp.stack([x, y], 1)", X, X)
many("block_diag", torch.block_diag, "jsp.linalg.block_diag", (2, 2), (2, 3))
many("pad, reflect", lambda x: F.pad(x, (2, 1), mode="reflect"), "lambda x: jnp.pad(x, ((0, 0), (2, 1)), 'reflect')", X)
many(
    "pad, replicate", lambda x: F.pad(x, (2, 1), mode="replicate"), "lambda x: jnp.pad(x, ((0, 0), (2, 1)), 'edge')", X
)
many("conv1d", F.conv1d, "lambda x, w: lax.conv_general_dilated(x, w, (1,), [(0, 0)])", (2, 3, 6), (2, 3, 2))
many("conv2d", lambda x, w: F.conv2d(x, w, stride=2, padding=1),
     "lambda x, w: lax.conv_general_dilated(x, w, (2, 2), [(1, 1), (1, 1)])", (1, 2, 5, 5), (2, 2, 3, 3))  # fmt: skip
many("max_pool1d", lambda x: F.max_pool1d(x, 2),
     "lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), 'VALID')", (1, 2, 6), is_complex=False)  # fmt: skip
many("avg_pool1d", lambda x: F.avg_pool1d(x, 2),
     "lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 2), (1, 1, 2), 'VALID') / 2", (1, 2, 6), is_complex=False)  # fmt: skip
many("attention", F.scaled_dot_product_attention,
     "lambda q, k, v: nn.softmax(q @ k.swapaxes(2, 3) / 2) @ v",
     (2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4), is_complex=False)  # fmt: skip
many("cosine_similarity", F.cosine_similarity,
     "lambda x, y: (x * y).sum(1) / (jnp.linalg.norm(x, axis=1) * jnp.linalg.norm(y, axis=1))", X, X, is_complex=False)  # fmt: skip
many("cross_entropy", lambda x: F.cross_entropy(x, torch.tensor([0, 3, 1]), reduction="none"),
     "lambda x: -nn.log_softmax(x)[jnp.arange(3), jnp.array([0, 3, 1])]", X, is_complex=False)  # fmt: skip

# -- Fourier transforms -----------------------------------------------------------------------------------------------

many("fft", fft.fft, "jnp.fft.fft", X)
many("ifft", fft.ifft, "jnp.fft.ifft", X)
many("fft2", fft.fft2, "jnp.fft.fft2", X)
many("fft, padded", lambda x: fft.fft(x, 6), "lambda x: jnp.fft.fft(x, 6)", X)
many("rfft", fft.rfft, "jnp.fft.rfft", X, is_complex=False)
many("irfft", lambda x: fft.irfft(x, 6), "lambda x: jnp.fft.irfft(x, 6)", X)
many("irfft, odd", lambda x: fft.irfft(x, 7), "lambda x: jnp.fft.irfft(x, 7)", X)
many("hfft", lambda x: fft.hfft(x, 6), "lambda x: jnp.fft.hfft(x, 6)", X)
many("rfft, absolute", lambda x: fft.rfft(x).abs(), "lambda x: jnp.abs(jnp.fft.rfft(x))", (2, 5), is_complex=False)
many("fftshift", fft.fftshift, "jnp.fft.fftshift", X)

# -- linear algebra ---------------------------------------------------------------------------------------------------


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    zeros = torch.ones(x.shape, dtype=torch.bool)
    zeros[0, 1] = zeros[1, 0] = zeros[1, 2] = False
    return x * zeros


def _regular(x: torch.Tensor) -> torch.Tensor:
    return x + 3 * torch.eye(*x.shape[-2:], dtype=x.dtype)


def _definite(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + torch.diag_embed(torch.arange(1.0, x.shape[-1] + 1)).to(x.dtype)


def _hermitian(x: torch.Tensor) -> torch.Tensor:
    return (x + x.mH) / 2


A, REGULAR = (2, 3, 3), {"prepare": lambda x, *rest: [_regular(x), *rest]}
many("inv", linalg.inv, "jnp.linalg.inv", A, **REGULAR)
many("det", linalg.det, "jnp.linalg.det", A)
many("det, singular", linalg.det, "jnp.linalg.det", A, prepare=lambda x: [_singular(x, 1)])
many("det, rank n - 2", linalg.det, "jnp.linalg.det", A, prepare=lambda x: [_singular(x, 2)])
many("slogdet", lambda x: linalg.slogdet(x)[1], "lambda x: jnp.linalg.slogdet(x)[1]", A, **REGULAR)
many("solve", linalg.solve, "jnp.linalg.solve", A, (2, 3, 2), **REGULAR)
many("solve_triangular", lambda x, b: linalg.solve_triangular(x.triu(), b, upper=True),
     "lambda x, b: jsp.linalg.solve_triangular(jnp.triu(x), b)", A, (2, 3, 2), **REGULAR)  # fmt: skip
many("cholesky", lambda x: linalg.cholesky(_hermitian(x)),
     "lambda x: jnp.linalg.cholesky((x + x.conj().swapaxes(-1, -2)) / 2)", A, prepare=lambda x: [_definite(x)])  # fmt: skip
many("cholesky_solve", lambda b, x: torch.cholesky_solve(b, x.tril()),
     "lambda b, x: jsp.linalg.cho_solve((jnp.tril(x), True), b)", (3, 2), (3, 3),
     prepare=lambda b, x: [b, _regular(x)])  # fmt: skip
many("qr", lambda x: linalg.qr(x)[1].abs(), "lambda x: jnp.abs(jnp.linalg.qr(x)[1])", (4, 3), is_complex=False)
many("svdvals", linalg.svdvals, "lambda x: jnp.linalg.svd(x, compute_uv=False)", (4, 3))
many("svd, projector", lambda x: _svd_projector(linalg.svd(x, full_matrices=False)),
     "lambda x: (lambda u, s, v: u[:, :2] @ u[:, :2].conj().T)(*jnp.linalg.svd(x, full_matrices=False))", (4, 3))  # fmt: skip
many("eigvalsh", lambda x: linalg.eigvalsh(_hermitian(x)),
     "lambda x: jnp.linalg.eigvalsh((x + x.conj().swapaxes(-1, -2)) / 2)", A)  # fmt: skip
many("eigh, function", lambda x: _eigh_exp(*linalg.eigh(_hermitian(x))),
     "lambda x: (lambda w, v: (v * jnp.exp(w)[..., None, :]) @ v.conj().swapaxes(-1, -2))"
     "(*jnp.linalg.eigh((x + x.conj().swapaxes(-1, -2)) / 2))", A)  # fmt: skip
many("pinv", linalg.pinv, "jnp.linalg.pinv", (4, 3))
many("matrix_power", lambda x: linalg.matrix_power(x, 3), "lambda x: jnp.linalg.matrix_power(x, 3)", A)
many("matrix_exp", linalg.matrix_exp, "jsp.linalg.expm", A)
many("matrix_norm, fro", linalg.matrix_norm, "lambda x: jnp.linalg.norm(x, axis=(-2, -1))", A)
many("matrix_norm, nuc", lambda x: linalg.matrix_norm(x, "nuc"), "lambda x: jnp.linalg.norm(x, 'nuc', (-2, -1))", A)
many("matrix_norm, 2", lambda x: linalg.matrix_norm(x, 2), "lambda x: jnp.linalg.norm(x, 2, (-2, -1))", A)
many("multi_dot", lambda *x: linalg.multi_dot(x), "lambda *x: jnp.linalg.multi_dot(x)", (2, 3), (3, 4), (4, 2))
many("lstsq", lambda x, b: linalg.lstsq(x, b)[0], "lambda x, b: jnp.linalg.lstsq(x, b)[0]", (4, 3), (4, 2))
many("lu", lambda x: linalg.lu(x)[2], "lambda x: jsp.linalg.lu(x)[2]", (3, 3), **REGULAR)
many(
    "lu_factor", lambda x: torch.lu_unpack(*linalg.lu_factor(x))[1], "lambda x: jsp.linalg.lu(x)[1]", (3, 3), **REGULAR
)


def _singular(x: torch.Tensor, missing: int) -> torch.Tensor:
    n = x.shape[-1] - missing
    return x[..., :, :n] @ x.mT[..., :n, :].conj()


def _svd_projector(found: Any) -> torch.Tensor:
    return found.U[:, :2] @ found.U[:, :2].mH


def _eigh_exp(w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (v * w.exp().unsqueeze(-2)) @ v.mH
