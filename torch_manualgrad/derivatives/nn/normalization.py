"""The derivatives that all normalizations share: of $x -> x^ = (x - m) r$, $r = (var + eps)^(-1/2)$, along some dims.

With $<v>$ the mean of $v$ along these dims, the derivative of $x^$ is the self-adjoint map

    P v = r (v - <v> - x^ <v x^>),        dx^ = P dx,        dr = -r^2 <x^ dx>.

An affine map follows: $y = x^ w + b$. For the cotangent $g$ of $y$, with $h = g w$,

    gx = P h,        gw = sum g x^,        gb = sum g.

Each is differentiated again with $x^$, $m$ and $r$ as functions of $x$. With $a = <h x^>$, $b = <v x^>$,
$c = <h v> - <h> <v>$,

    cotangent of $x$, given $v$, that of $P h$:    $P(-r (a v + b h)) - r^2 (c - a b) x^$,
    tangent of $P h$ along $dx = t$:             $-r (a P t + x^ <h P t> + <t x^> P h)$.

Saved statistics are constants to autograd. A formula that treats them as constants, as PyTorch's do, has right values
but wrong derivatives.

RMS normalization is the same with $m = 0$, without $<v>$ in $P$ and without $<h> <v>$ in $c$. With given statistics (batch
normalization in evaluation), $P v = r v$, and the last two expressions are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

__all__ = [
    "Standardized",
    "constant",
    "gradient_format",
    "last_dims",
    "norm_backward",
    "norm_backward_jvp",
    "norm_double_backward",
    "norm_jvp",
    "other_dims",
    "standardized",
    "standardized_by",
    "wide",
    "widened",
]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Standardized:
    """$x^$ and $r$, and the derivatives of $x^$.

    Attributes:
        values: $x^$, in the shape of $x$.
        rstd: $r$, of size 1 along ``dims``.
        dims: the dims that the statistics were taken along; None if they were given.
        centered: whether $m$ was subtracted.
    """

    values: Tensor
    rstd: Tensor
    dims: Sequence[int] | None
    centered: bool = True

    def mean(self, v: Tensor) -> Tensor:
        """$<v>$."""
        return v.mean(self.dims, keepdim=True)

    def pull(self, v: Tensor) -> Tensor:
        """$P v$."""
        if self.dims is None:
            return self.rstd * v
        rest = v - self.mean(v) if self.centered else v
        return (rest - self.values * self.mean(v * self.values)) * self.rstd

    def pull_vjp(self, h: Tensor, v: Tensor) -> Tensor:
        """Cotangent of $x$, given $v$, that of $P h$."""
        if self.dims is None:
            return torch.zeros_like(self.values)
        x, r = self.values, self.rstd
        a, b, c = self.mean(h * x), self.mean(v * x), self.mean(h * v)
        if self.centered:
            c = c - self.mean(h) * self.mean(v)
        return self.pull(-r * (a * v + b * h)) - r.square() * (c - a * b) * x

    def pull_jvp(self, h: Tensor, t: Tensor) -> Tensor:
        """Tangent of $P h$ along $t$."""
        if self.dims is None:
            return torch.zeros_like(self.values)
        x, along = self.values, self.pull(t)
        terms = self.mean(h * x) * along + x * self.mean(h * along) + self.mean(t * x) * self.pull(h)
        return -self.rstd * terms


def last_dims(normalized_shape: Sequence[int]) -> list[int]:
    """The dims that are normalized, if these are the sizes of the last ones."""
    return list(range(-len(normalized_shape), 0))


def other_dims(input: Tensor, normalized_shape: Sequence[int]) -> list[int]:
    """The other dims, over which gradients of the parameters are summed."""
    return list(range(input.dim() - len(normalized_shape)))


def gradient_format(input: Tensor) -> torch.memory_format:
    """The memory format of the gradient: channels last if the strides grow from the channels on, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if input.dim() not in formats:
        return torch.contiguous_format
    order = [1, *range(input.dim() - 1, 1, -1), 0]
    ends = [input.stride(d) * input.shape[d] for d in order]
    grow = all(input.stride(d) >= end for d, end in zip(order[1:], ends))
    return formats[input.dim()] if grow and ends[0] else torch.contiguous_format


def wide(x: Tensor) -> Tensor:
    """$x$ in the precision that PyTorch uses to normalize it: at least float32."""
    return x.float() if x.dtype in _HALF else x


def widened(*tensors: Tensor | None) -> list[Any]:
    """`wide` of each tensor."""
    return [None if x is None else wide(x) for x in tensors]


@formula(kernel=("default",))
def constant(x: Tensor) -> Tensor:
    """$x$ as a constant to every derivative; `detach` keeps tangents.

    Args:
        x: (*).

    Returns:
        The shape of $x$.

    References:
        The saved statistics of ATen native_layer_norm, which are not differentiable.
    """
    return x.clone()


constant.impl_save_for_backward(lambda inputs, output: ())
constant.impl_backward(lambda ctx, saved, grad: {"x": None}, output_differentiability=[False])


@constant.impl_jvp
def _(inputs: Any, output: Any, tangents: Any) -> Any:
    return None


@constant.impl_vmap
def _(info: Any, in_dims: Any, x: Tensor) -> Any:
    return constant.op(x), in_dims[0]


def _rest(x: Tensor, dims: Sequence[int], centered: bool) -> Tensor:
    """$x - m$; $x$ if not centered."""
    x = wide(x)
    return x - x.mean(dims, keepdim=True) if centered else x


def standardized(x: Tensor, dims: Sequence[int], eps: float, centered: bool = True) -> Standardized:
    """$x^$ and $r$ as functions of $x$."""
    rest = _rest(x, dims, centered)
    rstd = (rest.square().mean(dims, keepdim=True) + eps).rsqrt()
    return Standardized(rest * rstd, rstd, dims, centered)


def standardized_by(x: Tensor, dims: Sequence[int], rstd: Tensor, centered: bool = True) -> Standardized:
    """`standardized` with a known $r$, of any shape with as many entries, instead of $eps$.

    With $r0$ the known value, $q = r0^2 var$ and $q0$ the value of $q$, $r$ is $r0 (1 + q - q0)^(-1/2)$, in which nothing
    overflows.
    """
    rest = _rest(x, dims, centered)
    given = constant(wide(rstd)).reshape([1 if d in [k % x.dim() for k in dims] else n for d, n in enumerate(x.shape)])
    q = (rest * given).square().mean(dims, keepdim=True)
    rstd = given * (1 + (q - constant(q))).rsqrt()
    return Standardized(rest * rstd, rstd, dims, centered)


# Below, the weight and its cotangents and tangents have size 1, or no dim, along the dims that are summed.


def norm_backward(
    s: Standardized, g: Tensor, weight: Tensor | None, *, summed: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, the weight and the bias."""
    h = g if weight is None else g * weight
    return s.pull(h), _sum(g * s.values, summed), _sum(g, summed)


def norm_backward_jvp(
    s: Standardized,
    g: Tensor,
    weight: Tensor | None,
    g_t: Tensor | None,
    x_t: Tensor | None,
    weight_t: Tensor | None,
    *,
    summed: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tangents of the results of `norm_backward`."""
    h = g if weight is None else g * weight
    of_x = of_weight = of_bias = torch.zeros_like(s.values)
    if g_t is not None:
        of_x = s.pull(g_t if weight is None else g_t * weight)
        of_weight, of_bias = g_t * s.values, g_t
    if weight_t is not None:
        of_x = of_x + s.pull(g * weight_t)
    if x_t is not None:
        of_x = of_x + s.pull_jvp(h, x_t)
        of_weight = of_weight + g * s.pull(x_t)
    return of_x, _sum(of_weight, summed), _sum(of_bias, summed)


def norm_double_backward(
    s: Standardized,
    g: Tensor,
    weight: Tensor | None,
    ggI: Tensor | None,
    ggG: Tensor | None,
    ggB: Tensor | None,
    *,
    summed: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, the weight and $g$, given those of the results of `norm_backward`."""
    h = g if weight is None else g * weight
    of_x = of_g = torch.zeros_like(s.values)
    of_weight = _sum(of_x, summed)
    if ggI is not None:
        along = s.pull(ggI)
        of_x = s.pull_vjp(h, ggI)
        of_weight = _sum(g * along, summed)
        of_g = along if weight is None else along * weight
    if ggG is not None:
        of_x = of_x + s.pull(g * ggG)
        of_g = of_g + ggG * s.values
    if ggB is not None:
        of_g = of_g + ggB
    return of_x, of_weight, of_g


def norm_jvp(
    s: Standardized, x_t: Tensor | None, weight: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None
) -> Tensor:
    """Tangent of $x^ w + b$."""
    found = torch.zeros_like(s.values) if x_t is None else s.pull(x_t)
    if weight is not None:
        found = found * weight
    if weight_t is not None:
        found = found + s.values * weight_t
    return found if bias_t is None else found + bias_t


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.sum(dims) if dims else x
