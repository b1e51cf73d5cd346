"""The properties of a function's further arguments that a pattern depends on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError, described
from ..core.internals import in_functorch, pytree, value_of

__all__ = ["Constants"]


def _is_differentiable(x: Tensor) -> bool:
    return x.layout is torch.strided and (x.is_floating_point() or x.is_complex())


def _indices(x: Tensor) -> Tensor:
    return x.detach().to_sparse_coo().coalesce().indices()


class Constants:
    """The arguments of a pattern: the shapes of tensors, the values of integers, and the patterns of sparse matrices.

    Args:
        args: those for which the pattern was found.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        leaves, self._spec = pytree.tree_flatten(tuple(args))
        self._leaves = [self._kept(x) for x in leaves]

    @staticmethod
    def _kept(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.layout is not torch.strided:
            return (x.shape, x.layout, _indices(x))
        return (x.shape, None if _is_differentiable(x) else x.detach().clone())

    def check(self, args: Sequence[Any]) -> None:
        """Raise if the pattern may differ for these arguments.

        Values of tensors are not compared in a graph or a transform, where they cannot be read.

        Raises:
            ArgumentError: an argument has another structure, shape or value.
        """
        leaves, spec = pytree.tree_flatten(tuple(args))
        if spec != self._spec:
            raise ArgumentError(f"args: the plan was prepared for arguments like {self._spec}, got {spec}")
        for kept, x in zip(self._leaves, leaves):
            if not self._agrees(kept, x):
                raise ArgumentError(
                    "args: the plan was prepared for another shape or value of an argument, and its pattern may not hold for "
                    f"{described(x)}. Shapes, integers and the places in sparse matrices have to stay the same"
                )

    @staticmethod
    def _agrees(kept: Any, x: Any) -> bool:
        if not isinstance(x, Tensor):
            return kept is x or (type(kept) is type(x) and isinstance(x, float)) or bool(kept == x)
        if not isinstance(kept, tuple) or kept[0] != x.shape or (kept[-1] is None) != _is_differentiable(x):
            return False
        hidden = torch.compiler.is_compiling() or (in_functorch() and value_of(x) is not x)
        if kept[-1] is None or hidden:
            return True
        if len(kept) == 3:
            return x.layout is kept[1] and torch.equal(_indices(x), kept[2])
        return torch.equal(x.detach(), kept[1])
