"""What a `Ragged` has of a tensor by itself; operators, indexing and torch's functions are in `tensor_like`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

    from .ragged import Ragged

__all__ = ["TensorProperties"]


class TensorProperties:
    """Size, dtype, device and gradient of a `Ragged`, and its length and iteration."""

    __slots__ = ()

    if TYPE_CHECKING:
        values: Tensor
        shape: tuple[int | None, ...]

        @property
        def batch(self) -> int: ...
        def like(self, values: Tensor, shape: Sequence[int | None] | None = None) -> Ragged: ...
        def to(self, *args: Any, **kwargs: Any) -> Ragged: ...
        def components(self) -> list[Tensor]: ...

    def dim(self) -> int:
        """The number of dims, the batch included."""
        return len(self.shape)

    @property
    def ndim(self) -> int:
        """The same as `dim`."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one size of it.

        Args:
            dim: one dim, or None for the whole shape.

        Returns:
            The shape, or a size; None for a ragged dim.

        Raises:
            IndexError: there is no such dim.
        """
        return self.shape if dim is None else self.shape[self.wrapped(dim)]

    def wrapped(self, dim: int, *, name: str = "dim") -> int:
        """``dim`` as a number from 0 (the batch).

        Raises:
            IndexError: there is no such dim.
        """
        if not -self.dim() <= dim < self.dim():
            raise IndexError(f"{name}: {dim} is out of range for a nested tensor of {self.dim()} dims")
        return dim % self.dim()

    def __len__(self) -> int:
        return self.batch

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.components())

    def __bool__(self) -> bool:
        return bool(self.values)  # for one entry; else an error, as for a tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values, the offsets and the sizes."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Whether gradients of the values are wanted."""
        return self.values.requires_grad

    @property
    def is_leaf(self) -> bool:
        """Whether the values are a leaf of autograd's graph."""
        return self.values.is_leaf

    @property
    def grad_fn(self) -> Any:
        """The node of autograd's graph that made the values, or None."""
        return self.values.grad_fn

    @property
    def grad(self) -> Ragged | None:
        """The gradient that has been accumulated in the values, in the same components; None if there is none."""
        return None if self.values.grad is None else self.like(self.values.grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Say whether gradients of the values are wanted.

        Args:
            requires_grad: whether they are.

        Returns:
            The Ragged itself.

        Raises:
            RuntimeError: as ``Tensor.requires_grad_``.
        """
        self.values.requires_grad_(requires_grad)
        return self

    def cpu(self) -> Ragged:
        """The Ragged on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device | None = None) -> Ragged:
        """The Ragged on a GPU, by default the current one."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )
