"""The public functions, and valid calls of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import torch_manualgrad as mg
from torch_manualgrad.nested import Ragged

from .calls import Target
from .mutations import Recipe

__all__ = ["public_targets"]


def _x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape) + 1))


def public_targets() -> list[Target]:
    """Those of ``mg.nested``, ``mg.linalg``, ``mg.forward_ad``, ``mg.testing``, and what registers and overrides."""
    return [*_nested(), *_linalg(), *_forward_ad(), *_others()]


def _target(name: str, function: Callable[..., Any], *bases: Any) -> Target:
    calls = [b if isinstance(b, tuple) and len(b) == 2 and isinstance(b[1], dict) else (b, {}) for b in bases]
    names = [n for n in inspect.signature(function).parameters if n not in ("args", "kwargs")]
    if "names" in names:
        names += ["rule", "operator"]  # what their names are of
    if name == "mg.testing.trace_nan":
        names += ["input", "arguments"]  # of what it is given, whose errors are handed on
    if "reference" in names:
        names += ["function"]
    more = [n for args, _ in calls for a in args if isinstance(a, Recipe) for n in a.names]
    return Target(name, function, calls, [*names, *more])


def _nested() -> list[Target]:
    n = mg.nested
    offsets = torch.tensor([0, 2, 2, 5])
    one = Recipe(Ragged, _x(5, 4), offsets, [3, None, 4])
    other = Recipe(Ragged, _x(5, 4), offsets.int(), [3, None, 4])
    heads = Recipe(Ragged, _x(2, 5, 4), offsets, [3, 2, None, 4])
    two = Recipe(Ragged, _x(8), torch.tensor([0, 6, 8]), [2, None, None], torch.tensor([[2, 3], [1, 2]]))
    weight = _x(4)
    unary = ("celu", "elu", "gelu", "glu", "hardtanh", "leaky_relu", "mish", "relu", "selu", "silu", "softplus")
    reduced = ("amax", "amin", "logsumexp", "max", "mean", "min", "prod", "std", "sum", "var", "vector_norm")
    found = [
        _target("mg.nested.Ragged", Ragged, (_x(5, 4), offsets, [3, None, 4]), (_x(8), torch.tensor([0, 6, 8]), [2, None, None], torch.tensor([[2, 3], [1, 2]]))),
        *[_target(f"mg.nested.{k}", getattr(n, k), [one], [two]) for k in unary],
        *[_target(f"mg.nested.{k}", getattr(n, k), ([one], {"dim": d}), ([one], {"dim": d, "keepdim": True})) for k in reduced for d in (1, 2)],
        *[_target(f"mg.nested.{k}", getattr(n, k), [one, other], [one, 2.0], [one, _x(4)]) for k in ("add", "sub", "mul", "div", "maximum", "minimum", "pow")],
        *[_target(f"mg.nested.{k}", getattr(n, k), [one, 1], [one, -1]) for k in ("softmax", "log_softmax", "cumsum")],
        _target("mg.nested.chunk", n.chunk, [one, 2, 0], [one, 2, 2]),
        _target("mg.nested.dropout", n.dropout, [one, 0.0], [one, 0.5, False]),
        _target("mg.nested.layer_norm", n.layer_norm, [one, [4]], [one, 4, weight, weight, 1e-5]),
        _target("mg.nested.rms_norm", n.rms_norm, [one, [4]], [one, 4, weight, 1e-5]),
        _target("mg.nested.linear", n.linear, [one, _x(3, 4)], [one, _x(3, 4), _x(3)]),
        _target("mg.nested.matmul", n.matmul, [one, _x(4, 3)], [heads, _x(3, 2, 4, 5)], [Recipe(Ragged, _x(4, 5), offsets, [3, 4, None]), one]),
        _target("mg.nested.narrow", n.narrow, [one, 2, 1, 2], [one, 0, 1, 2]),
        _target("mg.nested.scaled_dot_product_attention", n.scaled_dot_product_attention, [heads, heads, heads], [heads, heads, heads, None, 0.0, True, 0.5]),
        _target("mg.nested.select", n.select, [one, 0, 1], [one, 2, -1], [one, 1, 0]),
        _target("mg.nested.slice", n.slice, [one, 2, 0, 3, 2], [one, 0, 0, 2]),
        _target("mg.nested.split", n.split, [one, 2, 2], [one, [1, 3], 2]),
        _target("mg.nested.split_with_sizes", n.split_with_sizes, [one, [1, 3], 2], [one, [1, 2], 0]),
        _target("mg.nested.threshold", n.threshold, [one, 0.1, 0.0]),
        _target("mg.nested.to_padded_tensor", n.to_padded_tensor, [one, 0.0], [one, 0.0, [3, 6, 4]], [two, 1.0]),
        _target("mg.nested.transpose", n.transpose, [one, 1, 2], [heads, 1, 2]),
        _target("mg.nested.unbind", n.unbind, [one], [one, 0]),
        _target("mg.nested backward", _nested_backward, [one, [4], weight], [other, [4], weight]),
        _target("mg.nested attention backward", _attention_backward, [heads, heads, heads, False], [heads, heads, heads, True]),
    ]  # fmt: skip
    return found


def _is(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}")
    return value


def _leaf(name: str, x: torch.Tensor) -> torch.Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{name}: expected numbers that have a derivative")
    return x.detach().requires_grad_()


def _nested_backward(x: Any, normalized_shape: Any, weight: Any) -> Any:
    x = _is("x", x, Ragged)
    values = _leaf("x", x.values)
    ragged = Ragged(values, x.offsets, x.shape)
    y = mg.nested.layer_norm(ragged, normalized_shape, weight)
    y = mg.nested.softmax(mg.nested.gelu(y), 1)
    total = y.values.pow(2).sum() + mg.nested.logsumexp(ragged, 1).sum() + mg.nested.amax(ragged, 1).sum()
    return torch.autograd.grad(total, values)


def _attention_backward(query: Any, key: Any, value: Any, is_causal: Any) -> Any:
    query = _is("query", query, Ragged)
    values = _leaf("query", query.values)
    ragged = Ragged(values, query.offsets, query.shape)
    y = mg.nested.scaled_dot_product_attention(ragged, key, value, is_causal=is_causal)
    return torch.autograd.grad(y.values.pow(2).sum(), values)


def _spd(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    A = _x(n, n, dtype=dtype)
    return A @ A.mH + torch.eye(n, dtype=dtype)


def _linalg() -> list[Target]:
    m = mg.linalg
    A, B, C = _x(4, 3), _spd(3), _spd(3, torch.complex128)
    batch = torch.stack([_spd(2), 2 * _spd(2)])
    points = _x(5, 3)
    functions = ("expm", "logm", "sqrtm", "rsqrtm")
    kinds = ({}, {"assume": "hermitian"})
    return [
        _target("mg.linalg.eigh", m.eigh, [B], ([C, "U"], {"gauge": "ignore"}), [batch]),
        _target("mg.linalg.eigh_generalized", m.eigh_generalized, [B, B], ([C, C], {"gauge": "ignore"}), [batch, batch]),
        _target("mg.linalg.expm_multiply", m.expm_multiply, [B, A[:3]], [C, C, 0.5], [batch, batch, torch.ones(2).double()]),
        _target("mg.linalg.schur", m.schur, [B], ([C], {"order": "real", "gauge": "ignore"}), ([batch], {"order": "modulus"})),
        _target("mg.linalg.solve_sylvester", m.solve_sylvester, [B, B, B], [C, C, C], [B, batch, points[:3, :2]]),
        _target("mg.linalg.solve_lyapunov", m.solve_lyapunov, [B, B], [C, C], [batch, batch]),
        _target("mg.linalg.solve_discrete_lyapunov", m.solve_discrete_lyapunov, [B, B], [C, C], [batch, batch]),
        _target("mg.linalg.svd", m.svd, [A], ([A, False], {"rank": 2}), ([B, True], {"gauge": "error"})),
        _target("mg.linalg.lu", m.lu, [A], ([B], {"pivot": False}), [batch]),
        *[_target(f"mg.linalg.{k}", getattr(m, k), *[([X], kind) for X in (B, C, batch) for kind in kinds]) for k in functions],
        _target("mg.linalg.powm", m.powm, [B, 0.5], ([B, -2], {"assume": "hermitian"}), [C, 3]),
        _target("mg.linalg.funm_hermitian", m.funm_hermitian, [B, torch.exp], [B, torch.sin, [torch.cos]]),
        _target("mg.linalg.kabsch", m.kabsch, [points, points.flip(0)], [points, points.flip(0), torch.rand(5).double()]),
        _target("mg.linalg.procrustes", m.procrustes, [A, A.flip(0)], [A, A.flip(0), True]),
        *[_target(f"mg.linalg.{k}", getattr(m, k), [A], [batch, True]) for k in ("nuclear_norm", "spectral_norm")],
        _target("mg.linalg.polar", m.polar, [A], [B, "left"]),
        _target("mg.linalg.Degeneracy", m.Degeneracy, [1e-9, 0.0, 0.0]),
        _target("mg.linalg.svd backward", _svd_backward, [A, 1e-9, 0.0], [B, None, 0.1]),
    ]  # fmt: skip


def _svd_backward(A: Any, rtol: Any, broadening: Any) -> Any:
    A = _leaf("A", _is("A", A, torch.Tensor))
    found = mg.linalg.svd(A, False, degeneracy=mg.Degeneracy(rtol=rtol, broadening=broadening))
    return torch.autograd.grad((found.U.pow(2) * found.S.unsqueeze(-2)).sum(), A)


def _square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3).sum()


def _forward_ad() -> list[Target]:
    f = mg.forward_ad
    x, v = _x(3), _x(3)
    return [
        _target("mg.forward_ad.directional", f.directional, [_square, x, v, 2], [torch.sin, x, v, 3]),
        _target(
            "mg.forward_ad.laplacian", _applied(f.laplacian), ([_square, x], {}), ([torch.sin, x], {"batch_dims": 0})
        ),
        _target("mg.forward_ad.biharmonic", _applied(f.biharmonic), ([_square, x], {})),
        _target("mg.forward_ad.hessian_diagonal", _applied(f.hessian_diagonal), ([_square, x], {})),
        _target("mg.forward_ad.weighted_laplacian", _weighted, [_square, torch.eye(3).double(), x]),
        _target("mg.forward_ad.hvp", f.hvp, [_square, x, v]),
        _target("mg.forward_ad.ggn_vp", f.ggn_vp, [torch.sin, _square, x, v]),
        _target("mg.forward_ad.jet", f.jet, [torch.sin, [x], [[v, v]]]),
        _target("mg.forward_ad.has_same_meta", f.has_same_meta, [x, v]),
        _target("mg.forward_ad.recompute_mean_var", f.recompute_mean_var, [_x(2, 3), _x(2, 1), [1], True]),
        _target("mg.forward_ad.make_dual", _dual, [x, v]),
        _target("mg.forward_ad.decompositions", _entered(f.decompositions), ["aten::trace"], []),
        _target("mg.forward_ad.enable", _entered(f.enable), ["aten::mv"], []),
    ]


def _applied(transform: Callable[..., Any]) -> Callable[..., Any]:
    def call(f: Any, x: Any, *, batch_dims: Any = 0) -> Any:
        return transform(f, batch_dims=batch_dims)(x)

    return call


def _weighted(f: Any, weight: Any, x: Any) -> Any:
    return mg.forward_ad.weighted_laplacian(f, weight)(x)


def _dual(primal: Any, tangent: Any) -> Any:
    with mg.forward_ad.dual_level():
        return mg.forward_ad.unpack_dual(mg.forward_ad.make_dual(primal, tangent).sin()).tangent


def _entered(context: Callable[..., Any]) -> Callable[..., Any]:
    def call(*names: Any, **kwargs: Any) -> None:
        with context(*names, **kwargs):
            pass

    return call


def _installed(*names: Any, forward: Any = False, strong_zero: Any = False) -> None:
    mg.install(*names, forward=forward, strong_zero=strong_zero).remove()


def _overridden(*names: Any, forward: Any = False, strong_zero: Any = False) -> None:
    with mg.override(*names, forward=forward, strong_zero=strong_zero):
        pass


def _defined(schema: Any, reference: Any, x: Any, backward: Any = None) -> Any:
    op = mg.custom_op(schema, redefine=True)(reference)
    try:
        if backward is not None:
            op.impl_backward(backward)
        return op(x)
    finally:
        op.undefine()


def _checked(fn: Any, samples: Any, modes: Any = ("rev",), seed: Any = 0) -> None:
    mg.testing.check(fn, samples, modes=modes, checks=(), seed=seed)


def _others() -> list[Target]:
    x = _x(3)
    wave = "hostile::wave(Tensor x) -> Tensor"
    names: Sequence[str] = ("aten::mv", "aten::linalg_svd", "*")
    sample = mg.Sample(x)
    return [
        _target("mg.override", _overridden, *[([n], {"forward": False}) for n in names], ([], {"strong_zero": True})),
        _target("mg.install", _installed, *[([n], {"forward": True}) for n in names], ([], {})),
        _target("mg.custom_op", _defined, [wave, torch.sin, x], [wave, torch.sin, x, lambda ctx, saved, grad: {"x": grad}]),
        _target("mg.testing.check", _checked, [torch.sin, [sample]], [torch.sin, [(x,)], ["rev", "fwd"]]),
        _target("mg.testing.trace_nan", mg.testing.trace_nan, [torch.sin, x]),
        _target("mg.Sample", mg.Sample, ([x], {"other": 1})),
        _target("mg.Degeneracy", mg.Degeneracy, [1e-9, 0.0, math.pi]),
    ]  # fmt: skip
