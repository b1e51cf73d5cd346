"""Anderson acceleration of a fixed-point iteration."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["anderson"]

MEMORY = 5


def anderson(g: Callable[[Tensor], Tensor], x: Tensor, rtol: float, atol: float, maxiter: int) -> Tensor:
    """A fixed point of $g$, by Anderson acceleration, or plain iteration if the acceleration does not help.

    Args:
        g: a function of a vector.
        x: the starting point, (n,).
        rtol: stop where $||g(x) - x|| <= rtol ||x||$.
        atol: stop where $||g(x) - x|| <= atol$.
        maxiter: the largest number of evaluations of $g$.

    Returns:
        (n,).

    References:
        Walker and Ni, SIAM J. Numer. Anal. 49 (2011) 1715.
    """
    points: list[Tensor] = []
    residuals: list[Tensor] = []
    best = math.inf
    for _ in range(maxiter):
        value = g(x)
        f = value - x
        size = float(torch.linalg.vector_norm(f))
        if size <= max(rtol * float(torch.linalg.vector_norm(x)), atol) or not math.isfinite(size):
            return value
        if size > 2 * best:  # restart with a plain step
            points, residuals = [], []
        best = min(best, size)
        points, residuals = [*points[-MEMORY:], x], [*residuals[-MEMORY:], f]
        x = value
        if len(points) > 1:
            dX = torch.stack([b - a for a, b in zip(points, points[1:])])
            dF = torch.stack([b - a for a, b in zip(residuals, residuals[1:])])
            gram = dF.conj() @ dF.mT
            shift = 10 * torch.finfo(x.dtype).eps * gram.diagonal().real.sum()
            gram = gram + shift * torch.eye(len(dF), dtype=x.dtype, device=x.device)
            weights, _ = torch.linalg.solve_ex(gram, dF.conj() @ f)
            accelerated = value - weights @ (dX + dF)
            if bool(accelerated.isfinite().all()):
                x = accelerated
    return x
