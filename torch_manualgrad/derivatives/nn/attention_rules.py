"""The rules of the CPU's fused attention and of its backward; the formulas are in `attention` and `attention_second`.

PyTorch has the first order in reverse mode only, to which plain calls are left; the rule of the backward gives the higher
orders. The log sum exp that attention returns is a constant to every derivative, as in PyTorch. The mask that is added to the
scores has derivatives too, which PyTorch has for unfused attention only. There is no dropout in this operator: attention with
dropout is made of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, bound_to, parameters, rule

from .attention import attention_backward, attention_jvp, attention_mask_backward
from .attention_second import attention_backward_jvp
from .normalization import random, uneven, untracked

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_GRADIENTS = ("grad_query", "grad_key", "grad_value")
_TANGENTS = parameters(attention_backward_jvp)[:-1]  # that of the mask is not wanted


def _double_vjp(
    grad_grad_query: Tensor | None,
    grad_grad_key: Tensor | None,
    grad_grad_value: Tensor | None,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, ...]:
    pairs = (query, grad_grad_query, key, grad_grad_key, value, grad_grad_value, attn_mask, None, is_causal, scale)
    of_g = attention_jvp(*pairs) if output_mask[0] else None
    if not any(output_mask[1:]):
        return of_g, None, None, None, None
    *others, of_mask = attention_backward_jvp(grad_out, None, *pairs, output_mask[4])
    return of_g, *others, of_mask if output_mask[4] else None


def _defer_to_stock(*values: Any) -> bool:
    """PyTorch has no derivative in the mask."""
    mask = values[5]
    return mask is None or not mask.requires_grad


# -- samples ----------------------------------------------------------------------------------------------------------


def _inputs(dtype: torch.dtype, device: torch.device | str) -> Iterable[tuple[list[Any], dict[str, Any]]]:
    """Query, key, value, dropout_p, is_causal; mask and scale."""

    def draw(*shape: int, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=device, seed=seed)

    if dtype.is_complex:
        return
    q, k, v = draw(1, 2, 3, 2), draw(1, 2, 4, 2, seed=1), draw(1, 2, 4, 2, seed=2)
    yield [q, k, v, 0.0, False], {"scale": None}
    yield [q, k[:, :1], v[:, :1], 0.0, True], {"scale": 0.8}
    yield [q, k, v, 0.0, False], {"attn_mask": draw(3, 4, seed=4)}
    yield [q, k, v, 0.0, True], {"attn_mask": draw(1, 2, 1, 4, seed=4)}
    # (N, L, H, d) in memory, as nn.MultiheadAttention and most models have them
    yield [*(draw(2, 3, 2, 2, seed=seed).transpose(1, 2) for seed in (5, 6, 7)), 0.0, False], {"scale": None}


def _samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for args, kwargs in _inputs(dtype, device):
        yield Sample(*args, **kwargs)


def _backward_samples(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for (q, k, v, *flags), kwargs in _inputs(dtype, device):
        saved = _forward(q, k, v, *flags, **kwargs)
        yield Sample(random(*q.shape, dtype=dtype, device=device, seed=3), q, k, v, *saved, *flags, **kwargs)


def _with_rows(x: Tensor) -> Tensor:
    """PyTorch's kernel reads rows as if they were contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _probe(*args: Any, **kwargs: Any) -> Tensor:
    """The first output, the only one that is differentiable."""
    q, k, v, *flags = args
    return _forward(*map(_with_rows, (q, k, v)), *flags, **kwargs)[0]


def _backward_probe(*args: Any, **kwargs: Any) -> list[Tensor]:
    """The backward with the outputs of its inputs, in place of any others."""
    g, *inputs, _, _, dropout_p, is_causal = args
    g, q, k, v = map(_with_rows, (g, *inputs))
    saved = _forward(*map(untracked, (q, k, v)), dropout_p, is_causal, **_untracked_mask(**kwargs))
    return uneven(*_backward(g, q, k, v, *saved, dropout_p, is_causal, **kwargs))


def _untracked_mask(attn_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    return {"attn_mask": None if attn_mask is None else untracked(attn_mask), **others}


# of samples, which are views as integers and back; a vmap over the cotangent alone needs none
_NO_BATCHES = dict.fromkeys(
    (*(f"vmap/over args[{i}]" for i in (1, 2, 3)), "vmap/over all", "vmap-grad"),
    ("PyTorch has no batching rule of a view of another dtype", "2.13"),
)
_SOURCE = "Vaswani et al., Attention is all you need (2017); Dao et al., FlashAttention (2022), appendix B"

rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    vjp={
        ("query", "key", "value"): attention_backward.bind(grad_out="grad_output", out="output"),
        "attn_mask": attention_mask_backward.bind(grad_out="grad_output"),
    },
    jvp={"output": attention_jvp},
    not_differentiable="logsumexp",
    defer_to_stock=_defer_to_stock,
    improves="missing",
    source=f"ATen _scaled_dot_product_flash_attention_for_cpu_backward; {_SOURCE}",
    samples=_samples,
    probe=_probe,
)
rule(
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    vjp={
        ("grad_out", "query", "key", "value", "attn_mask"): _double_vjp,
        ("out", "logsumexp"): lambda grad_grad_query: (None, None),
    },
    jvp={_GRADIENTS: bound_to(lambda *given: attention_backward_jvp(*given, False)[:3], _TANGENTS)},
    improves="missing",
    source=f"ATen has none; {_SOURCE}",
    samples=_backward_samples,
    probe=_backward_probe,
    gaps=_NO_BATCHES,
)
