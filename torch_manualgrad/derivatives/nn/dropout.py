"""Dropout, rrelu and masked softmax: operators that take or return a mask or noise.

Derivatives treat random numbers as constants: dropout is $mask * x / (1 - p)$, rrelu is $noise * x$.

Args:
    grad: cotangent of the result, or tangent of the input.
    mask: the entries that were kept, the shape of ``grad``.
    scale: $1 / (1 - p)$, or 1 if no entry was dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_manualgrad.core.rule import ByMetadata, FromResult, bind, formula, rule
from torch_manualgrad.core.rule.catalogue import gap

from ..elementwise.softmax import softmax_differential
from ..terms import sum_over_tangents

__all__ = ["FUSED_DROPOUT"]


@formula
def infinitely_differentiable_native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Cotangent of the input of dropout, or tangent of the result: $grad * mask * scale$.

    Returns:
        The shape of ``grad``.
    """
    return grad * mask * scale


@formula
def native_dropout_double_backward(ggI: Tensor, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Cotangent of grad, given that of $grad * mask * scale$: $ggI * mask * scale$.

    Args:
        ggI: cotangent of the result.
        grad: only its dtype is used.

    Returns:
        The shape of ``grad``.
    """
    return (ggI * mask * scale).to(grad.dtype)


@formula
def _fused_dropout_backward(grad: Tensor, mask: Tensor, p1m: float) -> Tensor:
    """Cotangent of the input of _fused_dropout, or tangent of the result: $grad * mask / p$.

    Args:
        p1m: $p$, the probability that an entry is kept.

    Returns:
        The shape of ``grad``.
    """
    return grad * mask.to(grad.dtype) * (1 / p1m)


@formula
def rrelu_with_noise_backward(
    grad_output: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool
) -> Tensor:
    """Cotangent of $x$, given that of rrelu, or tangent of the result: $grad * noise$ in training, else leaky_relu's.

    Args:
        grad_output: cotangent of the result, or tangent of $x$.
        self: $x$, real; not read in training.
        noise: the factor of $x$ in training: 1 where $x > 0$.
        lower, upper: the interval that the noise was drawn from. Their mean is the slope in evaluation.
        training: whether the noise is the factor, instead of the slope in evaluation.

    Returns:
        The shape of ``self``.

    Note:
        Where not differentiable: at $x = 0$. The derivative is that of $x < 0$.
    """
    if training:
        return grad_output * noise
    return torch.where(self > 0, grad_output, grad_output * ((lower + upper) / 2))


@formula
def masked_softmax_differential(
    x: Tensor, output: Tensor, mask: Tensor, dim: int | None, mask_type: int | None
) -> Tensor:
    """Cotangent of the input of a masked softmax $y$, or tangent of $y$: $y (x - <x, y>)$, and 0 where it is masked.

    Args:
        x: cotangent of $y$, or tangent of the input.
        output: $y$, real.
        mask: the entries that are left out, bool: (L, L) for ``mask_type`` 0, (B, L) for 1, else the shape of $y$.
        dim: the dim along which $y$ sums to 1; None for the last.
        mask_type: 0, 1, 2 or None, as _masked_softmax takes it.

    Returns:
        The shape of ``output``.

    References:
        ATen _masked_softmax_backward, which takes masks of the shape of y only.
    """
    if mask_type == 1 and mask.shape != output.shape:
        mask = mask.reshape(mask.shape[0], *[1] * (output.dim() - 2), mask.shape[-1])
    return softmax_differential(x.masked_fill(mask, 0), output.masked_fill(mask, 0), -1 if dim is None else dim)


# -- the rules --------------------------------------------------------------------------------------------------------

_rrelu_backward = torch.ops.aten.rrelu_with_noise_backward.default


def _dropout(x: Tensor, mask: Tensor, p: float, train: bool | None) -> Tensor:
    """If ``train`` is None, PyTorch drops as in training. It returns an empty input itself, so the derivative is a view."""
    if x.numel() == 0:
        return x.view_as(x)
    scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
    return infinitely_differentiable_native_dropout_backward(x, mask, scale)


rule(
    "aten::native_dropout",
    vjp={"input": bind(_dropout, x="grad_result0", mask="result1")},
    jvp={"result0": bind(_dropout, x="input_t", mask="result1")},
    # if train is None, PyTorch's derivative lacks the scale
    defer_to_stock=ByMetadata(lambda _, p, train: train is not None),
    improves="values",
    source="ATen infinitely_differentiable_native_dropout_backward",
    finite=True,
)
rule(
    "aten::native_dropout_backward",
    vjp={
        "grad_output": native_dropout_double_backward.bind(ggI="grad", grad="grad_output"),
        "mask": lambda grad, grad_output, scale: grad * grad_output * scale,
    },
    jvp={"result": infinitely_differentiable_native_dropout_backward.bind(grad="grad_output_t")},
    improves="missing",
    source="ATen native_dropout_double_backward",
)


FUSED_DROPOUT = rule(
    "aten::_fused_dropout",
    vjp={"self": _fused_dropout_backward.bind(grad="grad_result0", mask="result1", p1m="p")},
    jvp={"result0": _fused_dropout_backward.bind(grad="self_t", mask="result1", p1m="p")},
    source="ATen _fused_dropout_backward",
    register=torch.cuda.is_available(),
)
if not torch.cuda.is_available():
    gap(FUSED_DROPOUT.name, reason="only GPUs have the operator; its rule is registered where such a GPU is available")


rule(
    "aten::rrelu_with_noise_functional",
    vjp={
        "self": bind(_rrelu_backward, grad_output="grad_result0", noise="noise_out", self_is_result=False),
        "noise": lambda: None,
    },
    jvp={"result0": rrelu_with_noise_backward.bind(grad_output="self_t", noise="noise_out")},
    not_differentiable="noise_out",
    improves="values",
    source="ATen rrelu_with_noise_backward, which PyTorch calls with the noise from before the call",
)
rule(
    "aten::rrelu_with_noise",
    vjp={"self": bind(_rrelu_backward, grad_output="grad", self_is_result=False), "noise": lambda: None},
    from_result=FromResult(
        bind(_rrelu_backward, grad_output="grad", self="result", self_is_result=True), nonnegative=("lower", "upper")
    ),
    jvp={"result": rrelu_with_noise_backward.bind(grad_output="self_t")},
    # PyTorch saves the noise before it is drawn: hooks that copy, such as those of checkpoint, save uninitialized memory
    improves="values",
    source="ATen rrelu_with_noise_backward",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule of the operator"),
)
rule(
    "aten::rrelu_with_noise_backward",
    vjp={
        "grad_output": bind(_rrelu_backward, grad_output="grad", self_is_result=False),
        "self": lambda grad: torch.zeros_like(grad),
        "noise": lambda grad, grad_output, training: grad * grad_output if training else None,
    },
    jvp={
        "result": sum_over_tangents(
            rrelu_with_noise_backward.bind(grad_output="grad_output_t"),
            lambda noise_t, grad_output, training: grad_output * noise_t if training else None,
        )
    },
    improves=("values", "missing"),
    source="ATen rrelu_with_noise_backward",
)


rule(
    "aten::_masked_softmax",
    vjp={"self": masked_softmax_differential.bind(x="grad", output="result")},
    jvp={"result": masked_softmax_differential.bind(x="self_t", output="result")},
    improves="missing",
    source="ATen _masked_softmax_backward",
)
