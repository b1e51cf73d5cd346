"""The gated linear unit $a s(b)$, of the halves $a$ and $b$ of a tensor, $s$ the sigmoid; and its backward operator.

With $g$ the cotangent of $a s(b)$, those of $a$ and $b$ are $g s(b)$ and $g a s(b) s(-b)$.

Args:
    dim: the dim along which $a$ and $b$ are the halves.
    input: $a$ and $b$, real.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import always, bind, formula, rule

from ..terms import sum_over_tangents

aten = torch.ops.aten


def _parts(input: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """$a$, $s(b)$, and $s'(b) = s(b) s(-b)$."""
    a, b = input.chunk(2, dim)
    s = b.sigmoid()
    return a, s, s * (-b).sigmoid()


@formula
def glu_jvp(self_p: Tensor, self_t: Tensor, dim: int) -> Tensor:
    """Tangent of $a s(b)$: $a_t s(b) + a s'(b) b_t$.

    Args:
        self_p: $a$ and $b$, real.
        self_t: their tangents.

    Returns:
        The shape of $a$.

    References:
        ATen glu_jvp, which has no derivative of its own.
    """
    a, s, ds = _parts(self_p, dim)
    a_t, b_t = self_t.chunk(2, dim)
    return a_t * s + a * ds * b_t


@formula
def glu_double_backward_grad_output(grad: Tensor, input: Tensor, dim: int) -> Tensor:
    """Cotangent of the cotangent $g$, given those of $g s(b)$ and $g a s'(b)$: the tangent of $a s(b)$ along them.

    Args:
        grad: both cotangents, the shape of ``input``.

    Returns:
        The shape of $a$.
    """
    return glu_jvp(input, grad, dim)


@formula
def glu_double_backward(grad: Tensor, grad_output: Tensor, input: Tensor, dim: int) -> Tensor:
    """Cotangents of $a, b$, given $h_a, h_b$ of $g s(b), g a s'(b)$: $g h_b s'(b)$, $g (h_a s'(b) + h_b a s''(b))$.

    The matrix is symmetric: the same function is the tangent of both along $h$.

    Args:
        grad: $h_a$ and $h_b$, the shape of ``input``.
        grad_output: $g$, the shape of $a$.

    Returns:
        The shape of ``input``.
    """
    a, s, ds = _parts(input, dim)
    h_a, h_b = grad.chunk(2, dim)
    dds = ds * (1 - 2 * s)
    return torch.cat([grad_output * h_b * ds, grad_output * (h_a * ds + h_b * a * dds)], dim)


rule(
    "aten::glu",
    vjp={"self": bind(aten.glu_backward.default, grad_output="grad")},
    jvp={"result": glu_jvp},
    improves="missing",
    defer_to_stock=always,  # only the derivative of the tangent is missing
    source="ATen glu_backward, glu_jvp; the derivatives of the latter are new",
)
rule(
    "aten::glu_backward",
    vjp={
        "grad_output": glu_double_backward_grad_output.bind(input="self"),
        "self": glu_double_backward.bind(input="self"),
    },
    jvp={
        "result": sum_over_tangents(
            bind(aten.glu_backward.default, grad_output="grad_output_t", self="self_p"),
            glu_double_backward.bind(grad="self_t", grad_output="grad_output_p", input="self_p"),
        )
    },
    improves="missing",
    defer_to_stock=always,
    source="ATen glu_double_backward, glu_double_backward_grad_output",
)
