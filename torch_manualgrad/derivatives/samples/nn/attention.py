"""Samples of _scaled_dot_product_flash_attention_for_cpu, _scaled_dot_product_flash_attention_for_cpu_backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_manualgrad.core.rule import Sample, probe_for, samples_for

from ..drawing import random
from .drawing import uneven, untracked

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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


@samples_for("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for args, kwargs in _inputs(dtype, device):
        yield Sample(*args, **kwargs)


@samples_for("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def backward(dtype: torch.dtype, device: torch.device | str) -> Iterable[Sample]:
    for (q, k, v, *flags), kwargs in _inputs(dtype, device):
        saved = _forward(q, k, v, *flags, **kwargs)
        yield Sample(random(*q.shape, dtype=dtype, device=device, seed=3), q, k, v, *saved, *flags, **kwargs)


def _with_rows(x: Tensor) -> Tensor:
    """PyTorch's kernel reads rows as if they were contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@probe_for("aten::_scaled_dot_product_flash_attention_for_cpu")
def attention_probe(*args: Any, **kwargs: Any) -> Tensor:
    """The first output, the only one that is differentiable."""
    q, k, v, *flags = args
    return _forward(*map(_with_rows, (q, k, v)), *flags, **kwargs)[0]


@probe_for("aten::_scaled_dot_product_flash_attention_for_cpu_backward")
def backward_probe(*args: Any, **kwargs: Any) -> list[Tensor]:
    """The backward with the outputs of its own inputs, whatever outputs it is given."""
    g, *inputs, _, _, dropout_p, is_causal = args
    g, q, k, v = map(_with_rows, (g, *inputs))
    saved = _forward(*map(untracked, (q, k, v)), dropout_p, is_causal, **_untracked_mask(**kwargs))
    return uneven(*_backward(g, q, k, v, *saved, dropout_p, is_causal, **kwargs))


def _untracked_mask(attn_mask: Tensor | None = None, **others: Any) -> dict[str, Any]:
    return {"attn_mask": None if attn_mask is None else untracked(attn_mask), **others}
