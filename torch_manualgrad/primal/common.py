"""Helpers of the replacement primals: the matrices that they take, and the registration of their derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.internals import is_exporting
from ..core.rule import Formula

_DEVICES = frozenset({"cpu"})
_DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def serves(A: Tensor, sizes: tuple[int, int, int]) -> bool:
    """Whether the replacement primal decomposes a matrix, regardless of its values and its batch.

    Args:
        A: (*, m, n).
        sizes: the upper limits of the smaller dimension of a real matrix, of the smaller dimension of a complex matrix,
            and of the larger dimension.

    Returns:
        True if the replacement primal serves this shape, dtype and device.
    """
    if A.dim() < 2 or A.dtype not in _DTYPES or A.device.type not in _DEVICES:
        return False
    real, complex_, largest = sizes
    if is_exporting() and any(isinstance(n, torch.SymInt) for n in A.shape[-2:]):
        return False  # the exported program must serve every order that its caller allows
    return max(A.shape[-2:]) <= largest and min(A.shape[-2:]) <= (complex_ if A.is_complex() else real)


def finite(result: Tensor) -> bool:
    """Whether all entries are finite. A sum that overflows only costs time."""
    return bool(result.sum().isfinite())


def bind(op: Formula, backward: Callable[..., Tensor], differentiable: tuple[bool, ...]) -> None:
    """Attach the derivative, ``backward(*grads, *outputs)``, and vmap, which adds a batch dimension."""

    @op.impl_save_for_backward
    def _(inputs: Any, output: Any) -> Any:
        return tuple(output)

    def gradient(ctx: Any, saved: Any, *grads: Tensor | None) -> dict[str, Tensor]:
        return {"A": backward(*grads, *saved)}

    op.impl_backward(gradient, output_differentiability=differentiable)

    @op.impl_vmap
    def _(info: Any, in_dims: Any, A: Tensor, *options: Any) -> Any:
        outputs = op(A.movedim(in_dims.A, 0), *options)
        return outputs, (0,) * len(outputs)
