"""renorm, which scales every slice $x$ along ``dim`` with $n = ||x||_p > maxnorm$ by $f = maxnorm / (n + eps)$.

It leaves the other slices unchanged. With $w$ the gradient of the norm, see `norm`, and $<a, b> = sum Re(conj(a) b)$:

    $d(f x) = f (t - x <w, t> / (n + eps))$,        vjp: $f (g - w <x, g> / (n + eps))$.

Args:
    p: the order, positive; inf is allowed.
    dim: the dim along which the slices are counted.
    maxnorm: the bound, not negative.

Note:
    Where not differentiable: at $n = maxnorm$, which counts as not scaled, as in the forward; else as `norm_backward`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula, rule

from .norm import inner, norm_direction, widened, wrap_dims

_RENORM_EPS = 1e-7


def _renorm_parts(
    x: Tensor, self: Tensor, p: float, dim: int, maxnorm: float
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """(reduced dims, which slices the forward scaled, $w$, $n + eps$)."""
    (dim,) = wrap_dims(self, (dim,))
    if self.dim() < 2:
        raise RuntimeError(f"self: expected at least two dims, got shape {list(self.shape)}")
    if not p > 0:
        raise RuntimeError(f"p: expected a number above 0, got {p}")
    if not maxnorm >= 0:
        raise RuntimeError(f"maxnorm: expected a number that is not negative, got {maxnorm}")
    dims = tuple(d for d in range(self.dim()) if d != dim)
    # the forward's own norm decides, so that both are on the same side of a tie; the differentiable one is scale-safe
    scaled = torch.linalg.vector_norm(x.detach(), p, dims, keepdim=True) > maxnorm
    w = norm_direction(x, p, dims)
    return dims, scaled, w, inner(w, x).sum(dims, keepdim=True) + _RENORM_EPS


@formula
def renorm_backward(grad: Tensor, self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Cotangent of $x$, given that of the result: $f (g - w <x, g> / (n + 1e-7))$ with $n > maxnorm$, else $g$.

    Args:
        grad: cotangent of the result, the shape of ``self``.
        self: $x$, real or complex, at least two dims.

    Returns:
        The shape and dtype of ``self``. $f = maxnorm / (n + 1e-7)$; half precision is computed in float32.

    Raises:
        IndexError: ``dim`` out of range.
        RuntimeError: fewer than two dims, an invalid $p$ or ``maxnorm``, or another shape of ``grad``.
    """
    x = widened(self)
    dims, scaled, w, n = _renorm_parts(x, self, p, dim, maxnorm)
    if grad.shape != self.shape:
        raise RuntimeError(f"grad: expected shape {list(self.shape)}, got {list(grad.shape)}")
    along = inner(x / n, grad).sum(dims, keepdim=True)
    return torch.where(scaled, (grad - w * along) * (maxnorm / n), grad).to(self.dtype)


@formula
def renorm_jvp(self_p: Tensor, self_t: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Tangent of the result: $f (t - x <w, t> / (n + 1e-7))$ on slices along ``dim`` with $n > maxnorm$, else $t$.

    Args:
        self_p: $x$, real or complex, at least two dims.
        self_t: its tangent, same shape.

    Returns:
        The shape and dtype of ``self_p``.

    Raises:
        IndexError, RuntimeError: as `renorm_backward`.
    """
    x = widened(self_p)
    dims, scaled, w, n = _renorm_parts(x, self_p, p, dim, maxnorm)
    along = inner(w, self_t).sum(dims, keepdim=True)
    return torch.where(scaled, (self_t - x / n * along) * (maxnorm / n), self_t).to(self_p.dtype)


rule(
    "aten::renorm",
    vjp={"self": renorm_backward},
    jvp={"result": renorm_jvp},
    source="ATen renorm_backward, renorm_jvp",
    improves="values",
)
