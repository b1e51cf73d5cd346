"""Converts between lists of tensors and one vector, and between pytrees and lists."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.internals import pytree

__all__ = ["Layout", "Structure"]


class Layout:
    """The layout of a list of tensors as one vector.

    Args:
        like: tensors of these shapes and dtypes.
        real: whether complex numbers become pairs of real ones, for maps that are linear over the real numbers only.
    """

    def __init__(self, like: Sequence[Tensor], real: bool) -> None:
        self.shapes = [x.shape for x in like]
        self.dtypes = [x.dtype for x in like]
        dtype = functools.reduce(torch.promote_types, self.dtypes)
        self.real = real or dtype.is_complex and not all(d.is_complex for d in self.dtypes)
        dtype = dtype.to_real() if self.real else dtype
        self.coarsest = max(self.dtypes, key=lambda d: torch.finfo(d).eps)  # that of the products
        # half precision has no solvers, and too few digits for one
        self.dtype = torch.promote_types(dtype, torch.float32)
        self.sizes = [s.numel() * (2 if self.real and d.is_complex else 1) for s, d in zip(self.shapes, self.dtypes)]
        self.size = sum(self.sizes)

    def vector(self, values: Sequence[Tensor]) -> Tensor:
        """The tensors as one vector."""
        parts = [torch.view_as_real(x.resolve_conj()) if self.real and x.is_complex() else x for x in values]
        flat = [x.reshape(-1).to(self.dtype) for x in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def tensors(self, vector: Tensor) -> list[Tensor]:
        """The vector as tensors."""
        made = []
        for part, shape, dtype in zip(vector.split(self.sizes), self.shapes, self.dtypes):
            if self.real and dtype.is_complex:
                part = torch.complex(*part.reshape(*shape, 2).unbind(-1))
            made.append(part.reshape(shape).to(dtype))
        return made


class Structure:
    """A pytree without its tensors; `join` rebuilds it."""

    def __init__(self, tree: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(tree)
        self._constants = [None if isinstance(x, Tensor) else (x,) for x in leaves]

    def split(self, tree: Any) -> list[Tensor]:
        """The tensors of the tree, which this object does not keep."""
        return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """The pytree with these tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten([next(given) if c is None else c[0] for c in self._constants], self.spec)
