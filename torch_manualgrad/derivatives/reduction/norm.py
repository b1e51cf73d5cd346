"""Vector norms: linalg_vector_norm, norm, dist.

Every derivative here is made of one field, the gradient of the norm $n = ||x||_p$ along ``dims``:

    $w(x)_i = sgn(x_i) (|x_i| / n)^(p-1)$,        vjp: $g w$,        jvp: $sum_i Re(conj(w_i) t_i)$,

and of Euler's identity $n = sum_i Re(conj(w_i) x_i)$, as $n$ is homogeneous of degree one. $w$ itself has degree zero:
it is computed from $x / m$, with $m$ the largest $|x_i|$ of the slice (the smallest for $p < 0$), so that it is right
also where $n$ overflows or underflows. $m$ is a constant to every derivative, since $w$ does not depend on it. The norm
that the forward saved does not enter: $w$ is a function of $x$ alone and may be differentiated to any order in any
mode.

Args:
    grad: cotangent of the norm, real; the shape that ``dim`` and ``keepdim`` give.
    self: $x$, real or complex, any shape.
    p: the order, any real, inf or $-inf$.
    dim: the reduced dims; None or empty for all.
    keepdim: whether ``grad`` has the reduced dims; if all dims are reduced, 0-dim tensors are taken too.
    self_p: $x$, real or complex, any shape.
    self_t: its tangent, same shape.
    result: the norm that the forward returned.

Note:
    Where not differentiable: for $p = 0$, $w = 0$. For $p = 1$, $w = sgn(x)$. For $p = +-inf$, $w$ is $sgn(x)$, shared equally
    among the entries that attain $n$. Otherwise $w$ and all its derivatives are 0 on a slice with $n = 0$, and at zero
    entries of the other slices unless $p$ is a positive even integer, for which $w$ is a polynomial in $x$ over a power
    of $n$. A nan makes its slice nan; for $p = 1$ and $+-inf$ it makes only its own entry nan, and for $p = 0$ all entries
    are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import CompiledVjp, formula, is_sharded, rule


def widened(x: Tensor, *others: Tensor) -> Tensor:
    """$x$ in the dtype to compute in: the common one, and never below float32."""
    if not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"a norm's derivative is for floating point or complex tensors, not {x.dtype}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return x.to(dtype)


def cast_sum_to(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient in the shape and dtype of the input that was broadcast and promoted; real for a real input."""
    if gradient.is_complex() and not x.is_complex():
        gradient = gradient.real
    return gradient.sum_to_size(x.shape).to(x.dtype)


def wrap_dims(x: Tensor, dim: Sequence[int] | None) -> tuple[int, ...]:
    ndim = x.dim()
    for d in dim or ():
        if not -max(ndim, 1) <= d < max(ndim, 1):
            raise IndexError(f"dim: {d} is out of range for a tensor of {ndim} dimensions")
    return tuple(sorted(d % ndim for d in dim)) if dim and ndim else tuple(range(ndim))


def _sgn(x: Tensor) -> Tensor:
    if not x.is_complex():
        x = (
            x.detach()
        )  # a constant; the zeros that are PyTorch's gradient of sgn have no storage for subclasses to share
        return torch.where(x.isnan(), x, x.sgn())  # torch's sgn of a nan is 0
    zero = x == 0  # the derivative of x / |x| is singular there
    return torch.where(zero, 0, torch.where(zero, 1, x).sgn())


def norm_direction(x: Tensor, p: float, dims: Sequence[int]) -> Tensor:
    """The field $w$ of the module's docstring, in the dtype of $x$ (not half)."""
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        return _sgn(x)
    if x.numel() == 0:
        return x  # amax has no value on an empty slice

    # w does not depend on m, so m may be a constant. But where one entry is much larger than the others, w is close to 1 there,
    # and its derivative (t - w <w, t>) / norm would be only rounding error; with a differentiated m, x / m is the constant 1.
    # Distributed tensors would have to communicate for that.
    sizes = x.detach().abs() if x.is_complex() or is_sharded(x) else torch.where(x < 0, -x, x)
    m = sizes.amin(dims, keepdim=True) if p < 0 else sizes.amax(dims, keepdim=True)
    if math.isinf(p):
        attained = ((sizes == m) | sizes.isnan()).to(sizes.dtype)
        return _sgn(x) * (attained / attained.sum(dims, keepdim=True))

    largest = torch.finfo(m.dtype).max
    m = m.clamp(max=largest)  # first: for distributed tensors, this reduces the ranks' shards, once
    # next to finite entries, infinite ones contribute nothing to a norm of p < 0, in every order
    absent = x.isinf() & (m < largest) if p < 0 else False
    vanishing = m == 0
    m = torch.where(vanishing, 1, m)
    if p > 0 and p % 2 == 0:
        y = x / m * ~vanishing
        square = (y.conj() * y).real if y.is_complex() else y.square()
        w = y if p == 2 else y * square.pow(p / 2 - 1)
        total = (square if p == 2 else square.pow(p / 2)).sum(dims, keepdim=True)
        return w * torch.where(vanishing, 1, total).pow(1 / p - 1)

    # The powers are singular at 0: they are taken at 1 there and masked after. For 0 < p < 2, |x_i| / m may underflow
    # where its power does not; the quotient of the square roots cannot. For p < 0 every power is negative: it is taken
    # as that of the inverse quotient, whose derivatives do not underflow before those of w do.
    zero = ((x == 0) & ~m.isnan()) | vanishing | absent
    x = torch.where(zero, 1, x)
    half, ratio = (2, x.abs().sqrt() / m.sqrt()) if 0 < p < 2 else (1, x.abs() / m) if p > 0 else (-1, m / x.abs())
    total = torch.where(zero, 0, ratio.pow(half * p)).sum(dims, keepdim=True)
    scale = torch.where(vanishing, 1, total).pow(1 / p - 1)
    return torch.where(zero, 0, _sgn(x) * ratio.pow(half * (p - 1)) * scale)


def inner(w: Tensor, t: Tensor) -> Tensor:
    """$Re(conj(w) t)$, entry by entry."""
    return (w.conj() * t).real if w.is_complex() else w * t


@formula(kernel=("cpu", "cuda"))
def norm_backward(
    grad: Tensor, self: Tensor, p: float, norm: Tensor, dim: Sequence[int] | None = None, keepdim: bool = True
) -> Tensor:
    """Cotangent of $x$, given that of its $p$-norm: $grad * w(x)$, scale-safe, differentiable to any order.

    Args:
        norm: the norm that the forward returned. A kernel may start from its value, but no gradient flows through it:
            $w(x)$ is differentiated instead.

    Returns:
        The shape and dtype of ``self``. Half precision is computed in float32.

    Raises:
        IndexError: a dim out of range.
        TypeError: an integer ``self``.
        RuntimeError: another shape of ``grad``.
    """
    dims = wrap_dims(self, dim)
    keepdim = keepdim and not (not dim and grad.dim() == 0)
    kept = [1 if d in dims else size for d, size in enumerate(self.shape)]
    expected = kept if keepdim else [size for d, size in enumerate(self.shape) if d not in dims]
    if list(grad.shape) != expected:
        given = f"self of shape {list(self.shape)} and {keepdim=}"
        raise RuntimeError(f"grad: expected shape {expected} for {given}, got {list(grad.shape)}")
    w = norm_direction(widened(self, grad), p, dims)
    return (w * grad.reshape(kept)).to(self.dtype)


@formula
def norm_jvp(
    self_p: Tensor, self_t: Tensor, p: float, norm: Tensor, dim: Sequence[int] | None = None, keepdim: bool = True
) -> Tensor:
    """Tangent of the $p$-norm: sum over ``dim`` of $Re(conj(w(x)) t)$, differentiable to any order.

    Args:
        norm: the norm that the forward returned; only its dtype is used.
        keepdim: whether the reduced dims stay.

    Returns:
        The shape that ``dim`` and ``keepdim`` give, in the dtype of ``norm``.

    Raises:
        IndexError: a dim out of range.
        TypeError: an integer ``self_p``.

    References:
        ATen norm_jvp, both overloads.
    """
    dims = wrap_dims(self_p, dim)
    w = norm_direction(widened(self_p, norm), p, dims)
    return inner(w, self_t).sum(dims, keepdim=keepdim).to(norm.dtype)


@formula
def linalg_vector_norm_backward(
    grad: Tensor, self: Tensor, ord: float, result: Tensor, dim: Sequence[int] | None, keepdim: bool
) -> Tensor:
    """Cotangent of $x$, given that of linalg.vector_norm: norm_backward(grad, x, ord, result, dim, keepdim).

    The forward's ``dtype`` needs no argument: ``self`` is first converted to it, which is its common dtype with ``grad``.

    Args:
        ord: the order, $p$ in `norm_backward`.

    Returns:
        The shape and dtype of ``self``.

    Raises:
        IndexError, TypeError, RuntimeError: as `norm_backward`.
    """
    if self.dtype == grad.dtype:
        return norm_backward(grad, self, ord, result, dim, keepdim)
    converted = self.to(torch.promote_types(self.dtype, grad.dtype))
    return norm_backward(grad, converted, ord, result, dim, keepdim).to(self.dtype)


@formula
def linalg_vector_norm_jvp(
    self_p: Tensor, self_t: Tensor, ord: float, result: Tensor, dim: Sequence[int] | None, keepdim: bool
) -> Tensor:
    """Tangent of linalg.vector_norm: norm_jvp(x, t, ord, result, dim, keepdim), in the dtype of ``result``.

    Args:
        ord: the order, $p$ in `norm_jvp`.
        keepdim: as in `norm_jvp`.

    Returns:
        As `norm_jvp`.

    Raises:
        IndexError, TypeError: as `norm_jvp`.
    """
    return norm_jvp(self_p, self_t, ord, result, dim, keepdim)


# dist(a, b) = ||a - b||_p over all dims, with broadcasting: the norm's derivatives, summed to each input's shape.


def _dist_vjp(grad: Tensor, self: Tensor, other: Tensor, p: float, result: Tensor) -> tuple[Tensor, Tensor]:
    gradient = norm_backward(grad, self - other, p, result, keepdim=False)
    return cast_sum_to(gradient, self), cast_sum_to(-gradient, other)


def _dist_jvp(
    self_p: Tensor, self_t: Tensor | None, other_p: Tensor, other_t: Tensor | None, p: float, result: Tensor
) -> Tensor:
    difference = self_p - other_p
    tangent = self_t if other_t is None else -other_t if self_t is None else self_t - other_t
    assert tangent is not None  # the jvp is called only if some input has a tangent
    return norm_jvp(difference, tangent.expand(difference.shape), p, result, keepdim=False)


# over all dims and over some; p may be missing
_whole = CompiledVjp("self", norm_backward, {"norm": "result", "p": ("p", 2.0), "dim": None, "keepdim": False})
_reduced = CompiledVjp("self", norm_backward, {"norm": "result", "p": ("p", 2.0)})
_norm: dict[str, Any] = {"source": "ATen norm_backward, norm_jvp", "improves": ("values", "speed")}


def _order(p: float | None) -> float:
    return 2.0 if p is None else float(p)


rule(
    "aten::linalg_vector_norm",
    vjp={"self": linalg_vector_norm_backward},
    jvp={"result": linalg_vector_norm_jvp},
    source="ATen linalg_vector_norm_backward, linalg_vector_norm_jvp",
    improves=("values", "speed"),
    compiled_vjp=CompiledVjp("self", norm_backward, {"norm": "result", "p": "ord"}),
)
rule(
    "aten::norm.Scalar",
    vjp={"self": lambda grad, self, p, result: norm_backward(grad, self, float(p), result, keepdim=False)},
    jvp={"result": lambda self_p, self_t, p, result: norm_jvp(self_p, self_t, float(p), result, keepdim=False)},
    compiled_vjp=_whole,
    **_norm,
)
rule(
    "aten::norm.ScalarOpt_dim",
    vjp={
        "self": lambda grad, self, p, result, dim, keepdim: norm_backward(grad, self, _order(p), result, dim, keepdim)
    },
    jvp={
        "result": lambda self_p, self_t, p, result, dim, keepdim: norm_jvp(
            self_p, self_t, _order(p), result, dim, keepdim
        )
    },
    compiled_vjp=_reduced,
    **_norm,
)
rule(
    "aten::norm.ScalarOpt_dtype",
    vjp={"self": lambda grad, self, p, result: linalg_vector_norm_backward(grad, self, _order(p), result, None, False)},
    jvp={"result": lambda self_p, self_t, p, result: norm_jvp(self_p, self_t, _order(p), result, keepdim=False)},
    compiled_vjp=_whole,
    **_norm,
)
rule(
    "aten::norm.ScalarOpt_dim_dtype",
    vjp={
        "self": lambda grad, self, p, result, dim, keepdim: linalg_vector_norm_backward(
            grad, self, _order(p), result, dim, keepdim
        )
    },
    jvp={
        "result": lambda self_p, self_t, p, result, dim, keepdim: norm_jvp(
            self_p, self_t, _order(p), result, dim, keepdim
        )
    },
    compiled_vjp=_reduced,
    **_norm,
)
rule("aten::dist", vjp={("self", "other"): _dist_vjp}, jvp={"result": _dist_jvp}, **_norm)
