"""Dropout, rrelu and masked softmax: elementwise maps and a softmax whose mask or noise the operator is given, or returns.

What is drawn at random is a constant of the derivatives: dropout is mask * x / (1 - p), rrelu is noise * x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import FromResult, Sample, formula, rule
from torch_manualgrad.core.rule.catalogue import gap

from ..elementwise.softmax import softmax_differential
from .normalization import first_of, random

__all__ = ["FUSED_DROPOUT"]


@formula
def infinitely_differentiable_native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Cotangent of the input of dropout, or tangent of the result: grad * mask * scale.

    Args:
        grad: cotangent of the result, or tangent of the input.
        mask: what was kept, the shape of ``grad``.
        scale: 1 / (1 - p), or 1 where nothing was dropped.

    Returns:
        The shape of ``grad``.

    References:
        ATen infinitely_differentiable_native_dropout_backward.
    """
    return grad * mask * scale


@formula
def native_dropout_double_backward(ggI: Tensor, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Cotangent of grad, given that of grad * mask * scale: ggI * mask * scale.

    Args:
        ggI: cotangent of the result.
        grad: for its dtype.
        mask, scale: see `infinitely_differentiable_native_dropout_backward`.

    Returns:
        The shape of ``grad``.

    References:
        ATen native_dropout_double_backward.
    """
    return (ggI * mask * scale).to(grad.dtype)


@formula
def _fused_dropout_backward(grad: Tensor, mask: Tensor, p1m: float) -> Tensor:
    """Cotangent of the input of _fused_dropout, or tangent of the result: grad * mask / p.

    Args:
        grad: cotangent of the result, or tangent of the input.
        mask: what was kept, the shape of ``grad``.
        p1m: p, the probability to be kept.

    Returns:
        The shape of ``grad``.

    References:
        ATen _fused_dropout_backward.
    """
    return grad * mask.to(grad.dtype) * (1 / p1m)


@formula
def rrelu_with_noise_backward(
    grad_output: Tensor, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool
) -> Tensor:
    """Cotangent of x, given that of rrelu, or tangent of the result: grad * noise in training, else that of leaky_relu.

    Args:
        grad_output: cotangent of the result, or tangent of x.
        self: x, real; not read in training.
        noise: what x was multiplied by in training: 1 where x > 0.
        lower, upper: between which the noise was drawn; their mean is the slope in evaluation.
        training: which of the two.

    Returns:
        The shape of ``self``.

    Note:
        Where not differentiable: at x = 0, where the derivative is that of x < 0.

    References:
        ATen rrelu_with_noise_backward.
    """
    if training:
        return grad_output * noise
    return torch.where(self > 0, grad_output, grad_output * ((lower + upper) / 2))


@formula
def masked_softmax_differential(
    x: Tensor, output: Tensor, mask: Tensor, dim: int | None, mask_type: int | None
) -> Tensor:
    """Cotangent of the input of a masked softmax y, or tangent of y: y (x - <x, y>), and 0 where it is masked.

    Args:
        x: cotangent of y, or tangent of the input.
        output: y, real.
        mask: what is left out, bool: (L, L) for mask_type 0, (B, L) for 1, else the shape of y.
        dim: along which y sums to 1; None for the last.
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


def _draw(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    return random(*shape, dtype=dtype, device=device, seed=seed)


def _dropout(x: Tensor, mask: Tensor, p: float, train: bool | None) -> Tensor:
    """Without ``train``, PyTorch drops as in training. It returns an empty input as it is, which asks for a view."""
    if x.numel() == 0:
        return x.view_as(x)
    scale = 1.0 if train is False else 0.0 if p == 1 else 1 / (1 - p)
    return infinitely_differentiable_native_dropout_backward(x, mask, scale)


def _dropout_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Of which nothing is random."""
    if not dtype.is_complex:
        x = _draw(2, 3, dtype=dtype, device=device)
        yield from (Sample(x, 0.4, False), Sample(x, 0.0, True), Sample(x, 1.0, True))


def _dropout_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    g = _draw(2, 3, dtype=dtype, device=device)
    yield Sample(g, g.abs() > 0.6, 2.5)


rule(
    "aten::native_dropout",
    vjp={"input": lambda grad_result0, result1, p, train: _dropout(grad_result0, result1, p, train)},
    jvp={"result0": lambda input_t, result1, p, train: _dropout(input_t, result1, p, train)},
    defer_to_stock=lambda _, p, train: train is not None,  # without it PyTorch forgets the scale
    improves="values",
    source="ATen infinitely_differentiable_native_dropout_backward",
    samples=_dropout_samples,
    probe=first_of("native_dropout"),
    finite=True,
)
rule(
    "aten::native_dropout_backward",
    vjp={
        "grad_output": native_dropout_double_backward.bind(ggI="grad", grad="grad_output"),
        "mask": lambda grad, grad_output, scale: grad * grad_output * scale,
    },
    jvp={
        "result": lambda grad_output_t, mask, scale: infinitely_differentiable_native_dropout_backward(
            grad_output_t, mask, scale
        )
    },
    improves="missing",
    source="ATen native_dropout_double_backward",
    samples=_dropout_backward_samples,
)


def _fused_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if not dtype.is_complex:
        yield Sample(_draw(2, 3, dtype=dtype, device="cuda"), 1.0)


FUSED_DROPOUT = rule(
    "aten::_fused_dropout",
    vjp={"self": lambda grad_result0, result1, p: _fused_dropout_backward(grad_result0, result1, p)},
    jvp={"result0": lambda self_t, result1, p: _fused_dropout_backward(self_t, result1, p)},
    source="ATen _fused_dropout_backward",
    samples=_fused_samples,
    probe=first_of("_fused_dropout"),
    register=torch.cuda.is_available(),
)
if not torch.cuda.is_available():
    gap(FUSED_DROPOUT.name, reason="only GPUs have the operator; its rule is in the registry where there is one")


def _rrelu_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    """Where both ends are the same, nothing is random."""
    if dtype.is_complex:
        return
    x = _draw(2, 3, dtype=dtype, device=device)
    yield Sample(x, torch.zeros_like(x), 0.1, 0.3, False)
    yield Sample(x, torch.zeros_like(x), 0.2, 0.2, True)


def _rrelu_probe(operator_name: str) -> Callable[..., Tensor]:
    """The first output; the noise is overwritten, by PyTorch's kernel as if all were contiguous."""

    def probe(self: Tensor, noise: Tensor, *rest: Any) -> Tensor:
        self = self.contiguous()
        found = getattr(torch.ops.aten, operator_name)(self, torch.zeros_like(self), *rest)
        result: Tensor = found if isinstance(found, Tensor) else found[0]
        return result

    return probe


def _rrelu_backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    g, x = (_draw(2, 3, dtype=dtype, device=device, seed=k) for k in (0, 1))
    noise = torch.where(x > 0, 1, 0.2 + 0.1 * g.sigmoid()).to(dtype)
    for training in (False, True):
        yield Sample(g, x, noise, 0.1, 0.3, training, False)


rule(
    "aten::rrelu_with_noise_functional",
    vjp={
        "self": lambda grad_result0, self, noise_out, lower, upper, training: torch.ops.aten.rrelu_with_noise_backward(
            grad_result0, self, noise_out, lower, upper, training, False
        ),
        "noise": lambda grad_result0: None,
    },
    jvp={
        "result0": lambda self, self_t, noise_out, lower, upper, training: (
            None if self_t is None else rrelu_with_noise_backward(self_t, self, noise_out, lower, upper, training)
        )
    },
    not_differentiable="noise_out",
    improves="values",
    source="ATen rrelu_with_noise_backward, which PyTorch gives the noise that the call began with",
    samples=_rrelu_samples,
    probe=_rrelu_probe("rrelu_with_noise_functional"),
)
rule(
    "aten::rrelu_with_noise",
    vjp={
        "self": lambda grad, self, noise, lower, upper, training: torch.ops.aten.rrelu_with_noise_backward(
            grad, self, noise, lower, upper, training, False
        ),
        "noise": lambda grad: None,
    },
    from_result=FromResult(
        lambda grad, result, noise, lower, upper, training: torch.ops.aten.rrelu_with_noise_backward(
            grad, result, noise, lower, upper, training, True
        ),
        nonnegative=("lower", "upper"),
    ),
    jvp={
        "result": lambda self, self_t, noise, lower, upper, training: (
            None if self_t is None else rrelu_with_noise_backward(self_t, self, noise, lower, upper, training)
        )
    },
    # PyTorch packs the noise before it is drawn: hooks that copy, those of checkpoint too, keep what was in memory
    improves="values",
    source="ATen rrelu_with_noise_backward",
    gaps=dict.fromkeys(("vmap", "vmap-grad"), "PyTorch has no batching rule of the operator"),
    samples=_rrelu_samples,
    probe=_rrelu_probe("rrelu_with_noise"),
)


def _rrelu_tangent(
    grad_output: Tensor,
    grad_output_t: Tensor | None,
    self: Tensor,
    noise: Tensor,
    noise_t: Tensor | None,
    lower: float,
    upper: float,
    training: bool,
) -> Tensor:
    found = torch.zeros_like(grad_output)
    if grad_output_t is not None:
        found = rrelu_with_noise_backward(grad_output_t, self, noise, lower, upper, training)
    return found if noise_t is None or not training else found + grad_output * noise_t


rule(
    "aten::rrelu_with_noise_backward",
    vjp={
        "grad_output": lambda grad, self, noise, lower, upper, training: torch.ops.aten.rrelu_with_noise_backward(
            grad, self, noise, lower, upper, training, False
        ),
        "self": lambda grad: torch.zeros_like(grad),
        "noise": lambda grad, grad_output, training: grad * grad_output if training else None,
    },
    jvp={"result": _rrelu_tangent},
    improves=("values", "missing"),
    source="ATen rrelu_with_noise_backward",
    samples=_rrelu_backward_samples,
)


def _masked_softmax_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    if dtype.is_complex:
        return
    x = _draw(2, 1, 3, 3, dtype=dtype, device=device)
    mask = torch.eye(3, dtype=torch.bool, device=device)
    yield Sample(x, mask.flip(0).expand(x.shape).clone(), None, 2)
    yield Sample(x, mask, 3, 0)
    yield Sample(x, mask[:2], 3, 1)
    yield Sample(x[0, 0], mask, 0, 2)


def _masked_softmax_probe(self: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    """PyTorch's kernel reads the mask as if both were contiguous."""
    return torch.ops.aten._masked_softmax(self.contiguous(), mask.contiguous(), *rest)


rule(
    "aten::_masked_softmax",
    vjp={"self": masked_softmax_differential.bind(x="grad", output="result")},
    jvp={"result": masked_softmax_differential.bind(x="self_t", output="result")},
    improves="missing",
    source="ATen _masked_softmax_backward",
    samples=_masked_softmax_samples,
    probe=_masked_softmax_probe,
)
