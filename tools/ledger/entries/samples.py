"""Inputs and derivatives that the entries share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def vectors(t: Tensor, *shape: int, seed: int = 0) -> Tensor:
    """Points on a curve with curvature in every entry."""
    return draw(*shape, seed=seed) + t * draw(*shape, seed=seed + 50) + 0.3 * t * t * draw(*shape, seed=seed + 90)


def matrix(t: Tensor, n: int = 3, seed: int = 0) -> Tensor:
    return vectors(t, n, n, seed=seed) + 3 * torch.eye(n, dtype=t.dtype)


def definite(t: Tensor, n: int = 3) -> Tensor:
    a = matrix(t, n)
    return a @ a.mT


def gradient(f: Any, *inputs: Tensor) -> list[Tensor]:
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    found = torch.autograd.grad(f(*inputs), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def second(f: Any, x: Tensor, v: Tensor) -> Tensor:
    """A Hessian times a vector, reverse over reverse."""
    x = x.detach().clone().requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad((g * v).sum(), x)[0]
