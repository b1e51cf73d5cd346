"""Functions of torch that read values to check their arguments, or write to new tensors, rewritten with operators on jets.

The checks are PyTorch's: each function is first called with the values, and that result is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FUNCTIONS"]


def _cov(self: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    torch.cov(self.detach(), correction=correction, fweights=fweights, aweights=_value(aweights))
    x = self.reshape(1, -1) if self.ndim < 2 else self
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        total = x.shape[1]
        centred, norm = x - x.sum(1, keepdim=True) / total, max(total - correction, 0)
        return (centred @ centred.mH / norm).squeeze()
    total = weights.sum()
    centred = x - (x * weights).sum(1, keepdim=True) / total
    if correction == 0:
        norm = total
    else:
        norm = total - correction * (1 if aweights is None else (weights * aweights).sum() / total)
    norm = torch.where(norm > 0, norm, 0)
    return ((centred * weights) @ centred.mH / norm).squeeze()


def _corrcoef(input: Any) -> Any:
    c = _cov(input)
    if c.ndim == 0:
        return c / c
    variances = c.diagonal()
    deviations = (variances.real if c.is_complex() else variances).sqrt()
    c = c / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def _gaussian_nll_loss(
    input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    F.gaussian_nll_loss(_value(input), _value(target), _value(var), full, eps, reduction)
    if not isinstance(var, Tensor):
        var = torch.full_like(_value(input), var)
    if var.shape != input.shape and input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    var = var + (var.detach().clamp(min=eps) - var.detach())  # PyTorch clamps the value, and keeps the derivative
    loss = (var.log() + (input - target) ** 2 / var) * 0.5
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    if mode != "circular":
        return torch.ops.aten.pad(input, pad, mode, value)
    F.pad(_value(input), pad, mode, value)
    for k, (before, after) in enumerate(zip(pad[::2], pad[1::2])):
        dim = input.ndim - 1 - k
        first, last = max(-before, 0), input.shape[dim] - max(-after, 0)  # negative numbers remove elements first
        places = torch.arange(-max(before, 0), last - first + max(after, 0), device=input.device) % (last - first)
        input = input.index_select(dim, first + places)
    return input


def _vander(x: Any, N: int | None = None, increasing: bool = False) -> Any:
    torch.vander(_value(x), N, increasing)
    powers = torch.arange(len(x) if N is None else N, dtype=x.dtype, device=x.device)
    return x.unsqueeze(-1) ** (powers if increasing else powers.flip(0))


def _value(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


# by the functions that reach ``__torch_function__``
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.pad: _pad,
    torch.vander: _vander,
}
