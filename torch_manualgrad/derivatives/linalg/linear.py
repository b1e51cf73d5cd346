"""linear: its first derivatives, and the derivatives of these.

For $y = x W^T + bias$ with a cotangent $G$: $gx = G conj(W)$, $gW = sum G^T conj(x)$ and $gbias = sum G$, over all
outer dims. linear itself is composite: no rule uses these formulas.

Args:
    self: $x$, (*, in).
    grad_output: $G$, (*, out).
    weight: $W$, (out, in).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import formula

from ..terms import total


def _weight_like(g: Tensor, x: Tensor) -> Tensor:
    """sum over all outer dims of $g^T conj(x)$: (out, in) for $g$ (*, out) and $x$ (*, in)."""
    return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1]).conj()


@formula
def linear_backward(self: Tensor, grad_output: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, $W$ and the bias, given that of $x W^T + bias$: $G conj(W)$, $sum G^T conj(x)$, $sum G$.

    Returns:
        (*, in), (out, in), (out,).

    References:
        The operator aten::linear_backward, which has no kernel for dense tensors on the CPU.
    """
    return (
        grad_output @ weight.conj(),
        _weight_like(grad_output, self),
        grad_output.reshape(-1, grad_output.shape[-1]).sum(0),
    )


@formula
def linear_double_backward(
    grad_grad_input: Tensor | None,
    grad_grad_weight: Tensor | None,
    grad_grad_bias: Tensor | None,
    self: Tensor,
    grad_output: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of $x$, $G$ and $W$, given those $(h, H, c)$ of the results of `linear_backward`.

    For $x$: $G conj(H)$. For $G$: $h W^T + x H^T + c$. For $W$: $sum G^T conj(h)$.

    Args:
        grad_grad_input: $h$, (*, in). None for zero.
        grad_grad_weight: $H$, (out, in). None for zero.
        grad_grad_bias: $c$, (out,). None for zero.

    Returns:
        The shapes of $x$, $G$ and $W$.

    References:
        ATen linear_double_backward, which is for real tensors.
    """
    h, H, c = grad_grad_input, grad_grad_weight, grad_grad_bias
    g_grad = total(None if h is None else h @ weight.mT, None if H is None else self @ H.mT, c)
    return (
        torch.zeros_like(self) if H is None else grad_output @ H.conj(),
        torch.zeros_like(grad_output) if g_grad is None else g_grad.expand(grad_output.shape),
        torch.zeros_like(weight) if h is None else _weight_like(grad_output, h),
    )
