"""The memory of a tangent: a shadow of its primal's storage.

The layout contract of PyTorch's forward mode (``autograd_meta.cpp``, "Forward Grad View/inplace"): a tangent has the
sizes, strides, offset, storage size, conj and neg bits of its primal; the tangent of a view is a view of its base's
tangent; an operation in place changes the tangent in place. PyTorch stores a tangent with each tensor, and forwards
changes between views and bases. Here a storage has a shadow of the same size, and every tensor on the storage reads its
tangent through its own sizes, strides, offset and bits. The whole contract follows, in every order of views, writes and
duals.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...arguments import checked
from ...core.engine.kernel import any_tangent
from ...core.internals import neg_view, nested_strides, storage_of, strided_nested

__all__ = ["Shadow", "Shadows", "copied", "detached", "has_same_meta", "is_dense", "unexpanded"]


@checked
def has_same_meta(base: Tensor, other: Tensor) -> bool:
    """Whether the same indices refer to the same places in storages of the same size, with the same bits.

    Args:
        base: a tensor, (*).
        other: a tensor, (*).

    Returns:
        True if sizes, strides (of dims of more than one element), offset, storage size in elements, conj and neg bits are
        equal. Of tensors without elements, strides and offset do not count.

    References:
        ``torch::autograd::utils::has_same_meta``.
    """
    a, b = storage_of(base), storage_of(other)
    if a is None or b is None or a.nbytes() // base.itemsize != b.nbytes() // other.itemsize:
        return False
    if (base.is_conj(), base.is_neg()) != (other.is_conj(), other.is_neg()) or base.shape != other.shape:
        return False
    if base.numel() == 0:
        return True
    strides = zip(base.shape, base.stride(), other.stride())
    return base.storage_offset() == other.storage_offset() and all(s == t for n, s, t in strides if n != 1)


def is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill its storage, each at a different place."""
    storage = storage_of(x)
    if storage is None or x.storage_offset() or x.numel() * x.itemsize != storage.nbytes():
        return False
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride()) if n != 1):
        if stride != expected and x.numel():
            return False
        expected *= size
    return True


def _whole(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The storage of ``x`` as a vector of ``dtype``, by default that of ``x``; a view, without the bits of ``x``."""
    storage = storage_of(x)
    assert storage is not None
    x = _without_bits(x)
    flat = x.as_strided((storage.nbytes() // x.itemsize,), (1,), 0)
    if dtype in (None, x.dtype):
        return flat
    if x.is_complex() and dtype is x.dtype.to_real():
        return torch.view_as_real(flat).reshape(-1)
    if not x.is_complex() and dtype is not None and dtype.is_complex and dtype.to_real() is x.dtype:
        return torch.view_as_complex(flat.view(-1, 2))
    raise NotImplementedError(
        f"the memory of a tensor with a tangent, of {x.dtype}, is read as {dtype}; a tangent cannot be"
    )


def _without_bits(x: Tensor) -> Tensor:
    x = neg_view(x) if x.is_neg() else x
    return x.conj() if x.is_conj() else x


def _with_bits_of(x: Tensor, of: Tensor) -> Tensor:
    x = x.conj() if of.is_conj() else x
    return neg_view(x) if of.is_neg() else x


def _seen(flat: Tensor, x: Tensor) -> Tensor:
    """The entries of the vector at the positions of ``x`` in its storage, with the bits of ``x``."""
    return _with_bits_of(flat.as_strided(x.shape, x.stride(), x.storage_offset()), x)


class Shadow:
    """The tangents of all tensors on one storage.

    Args:
        base: covers the shadow's storage, each place once, with the geometry of a tensor on the shadowed storage.
        unknown: if the tangents are unknown, a description of the tensor.
    """

    __slots__ = ("base", "unknown")

    def __init__(self, base: Tensor, unknown: str = "") -> None:
        self.base, self.unknown = base, unknown

    @classmethod
    def zeros(cls, x: Tensor) -> Shadow:
        """The shadow of the storage of ``x``, zero everywhere."""
        storage = storage_of(x)
        assert storage is not None
        return cls(torch.zeros(storage.nbytes() // x.itemsize, dtype=x.dtype, device=x.device))

    def of(self, x: Tensor) -> Tensor:
        """The tangent of ``x``, a tensor on the shadowed storage."""
        base = self.base
        if x.is_nested:
            return strided_nested(self.of(x.values()), *nested_strides(x))
        if (
            base.dtype is x.dtype
            and base.shape == x.shape
            and base.stride() == x.stride()
            and not (x.storage_offset() or x.is_conj() or x.is_neg())
        ):
            return base
        return _seen(_whole(base, x.dtype), x)


class Shadows:
    """The shadows of storages at one level; each lives as long as its storage.

    Reads need no lock: each is one look-up in a dictionary.
    """

    def __init__(self) -> None:
        # A storage has one Python object for its lifetime, and weak references end before the id is reused.
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], Shadow]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, storage: torch.UntypedStorage | None) -> Shadow | None:
        entry = self._entries.get(id(storage))
        return None if entry is None else entry[1]

    def put(self, storage: torch.UntypedStorage, shadow: Shadow) -> None:
        entries, key = self._entries, id(storage)
        entries[key] = (weakref.ref(storage, lambda _: entries.pop(key, None)), shadow)

    def clear(self) -> None:
        self._entries.clear()


def copied(x: Tensor) -> Tensor:
    """``x`` on a copy of its storage: the same metadata, connected to ``x`` for autograd and PyTorch's forward mode.

    Raises:
        RuntimeError: elements of ``x`` overlap other than by ``expand``, and autograd tracks it.
    """
    if is_dense(x) and not (x.is_conj() or x.is_neg()):
        made = x.clone(memory_format=torch.preserve_format)
        if has_same_meta(made, x):
            return made
    flat = _whole(x.detach()).clone()
    if torch.is_grad_enabled() and x.requires_grad or any_tangent([x]):
        core = unexpanded(x, x)
        _seen(flat, core).copy_(core)
    return _seen(flat, x)


def detached(x: Tensor) -> Tensor:
    """The values of ``x`` on a new storage, without history or tangent."""
    if x.is_nested:
        return strided_nested(copied(x.values().detach()), *nested_strides(x))
    return copied(x.detach())


def unexpanded(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with one element in each dim where ``like``, of the same sizes, has stride 0."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride())):
        if size > 1 and not stride:
            x = x.narrow(dim, 0, 1)
    return x
