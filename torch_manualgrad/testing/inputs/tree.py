"""Arguments and results as flat lists of leaves; containers are whatever is registered as a pytree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.internals import pytree


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """Every leaf with its path, as in ``[0][1]['p']``."""
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def rebuild(tree: Any, replacements: Iterable[Any]) -> Any:
    """`tree` with its leaves, in the order of `leaves`, replaced."""
    return pytree.tree_unflatten(list(replacements), pytree.tree_structure(tree))


def tensors(tree: Any) -> list[Tensor]:
    """The leaves that are tensors."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def is_differentiable(x: Any) -> bool:
    """Whether `x` is a tensor that can have a derivative: floating point or complex."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def is_sparse(x: Tensor) -> bool:
    """Whether `x` is of a sparse layout: it has no strides, and cannot be moved along a direction."""
    return x.layout not in (torch.strided, torch.jagged)
