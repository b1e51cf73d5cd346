"""A Jacobian with a diagonal factor in front, from an elementwise function, stored as two tensors.

The factors of consecutive elementwise functions multiply without the Jacobian, and a matrix product applies them to a
few directions at a time, which stay in the cache. Unread parts are never multiplied: the end of a Laplacian needs only
the trace. The rules for jets make the two tensors, so nothing writes to them; both are plain, so they may be multiplied
anywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_manualgrad.core.internals import only_autograd, values_readable

__all__ = ["BLOCK", "Scaled", "matmul", "reshaped", "times", "whole"]

BLOCK = 2**18  # elements; a few tensors of this size fit into the cache


class Scaled(NamedTuple):
    """``factor * term``; the term has the directions in front."""

    factor: Tensor
    term: Tensor


def whole(x: Any) -> Any:
    """Multiply a `Scaled`; anything else is returned unchanged."""
    return x.factor * x.term if isinstance(x, Scaled) else x


def times(factor: Tensor, term: Any) -> Any:
    """``factor * term``, as a `Scaled` if both are plain."""
    if isinstance(term, Scaled):
        return Scaled(factor * term.factor, term.term)
    return Scaled(factor, term) if _plain(factor, term) else factor * term


def matmul(x: Any, y: Tensor) -> Tensor:
    """x @ y."""
    if not isinstance(x, Scaled):
        return torch.matmul(x, y)
    factor, term = x
    if not _plain(factor, y if torch.is_grad_enabled() else y.detach()):
        return torch.matmul(factor * term, y)
    found = term.new_empty(*term.shape[:-1], y.shape[-1])
    size = max(1, BLOCK // max(1, factor.numel()))
    for part, out in zip(term.split(size), found.split(size)):
        torch.matmul(factor * part, y, out=out)
    return found


def reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    """A term along many curves, reshaped."""
    if isinstance(x, Scaled):
        return Scaled(x.factor.reshape(shape), x.term.reshape(x.term.shape[0], *shape))
    return x.reshape(x.shape[0], *shape)


def _plain(*tensors: Tensor) -> bool:
    """Whether these tensors are plain: not tracked, and without modes or transforms around them."""
    return (
        not torch.compiler.is_dynamo_compiling()
        and not any(x.requires_grad for x in tensors)
        and only_autograd()
        and values_readable(tensors)
    )
