"""`Ragged`: a batch of tensors with equal numbers of dims but different sizes, packed into one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import described
from ..core.internals import JaggedStructure, pytree
from .layouts import from_jagged, from_strided, strided_components, to_jagged, to_strided, tracked
from .packing import (
    cumulated,
    filled,
    flat_from_packed,
    offsets_of,
    packed_from_flat,
    ragged_shape,
    readable,
    row_strides,
    segments,
    taken,
)

__all__ = ["Ragged", "check_values"]

_SHOWN = 3  # components at each end of what is printed


class Ragged:
    """A batch of components of unequal sizes, packed into ordinary tensors, and so differentiable in every mode.

    A Ragged, its offsets and its sizes are frozen. It is a pytree with the leaves values, offsets and sizes, so it works
    with torch.func, vmap (over an additional dim of the values) and torch.compile. Offsets and sizes are checked where they
    can be read without synchronizing (on the CPU). Methods that read them on a GPU synchronize once, and their docstrings
    say so.

    It behaves like a tensor: operators, ``len``, iteration and indexing over components, ``dtype``, ``to``. The functions
    of `torch_manualgrad.nested` and elementwise functions of torch are methods, and torch's functions, such as
    ``torch.softmax``, take it.

    Attributes:
        values: with one ragged dim, the components concatenated along it: the component's shape with $T$, the sum of
            their lengths, in its place. With several, the components flattened (row-major) and concatenated: (N,).
        offsets: (B + 1,), int32 or int64: where components begin along that dim, from 0 to $T$ (or $N$).
        shape: (B, ...), as for a nested tensor, with None for each ragged dim. Dim 0 is the batch.
        sizes: with several ragged dims, ($B$, number of them), integers: each component's ragged sizes; else None.

    Raises:
        ValueError: offsets that decrease, do not start at 0 or do not end with the buffer, or a shape that does not fit
            the values.
        TypeError: offsets of another dtype, or an argument of another type.
    """

    __slots__ = ("_read", "offsets", "shape", "sizes", "values")

    values: Tensor
    offsets: Tensor
    shape: tuple[int | None, ...]
    sizes: Tensor | None
    _read: tuple[list[int], list[list[int]] | None] | None  # offsets and sizes, once they have been read

    def __init__(
        self, values: Tensor, offsets: Tensor, shape: Sequence[int | None], sizes: Tensor | None = None
    ) -> None:
        _check_types(values, offsets, shape, sizes)
        _set(self, values, offsets, tuple(shape), sizes)
        _check_structure(self)
        check_values(self)
        if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and type(offsets) is Tensor:
            _check_contents(self)

    @staticmethod
    def trusted(values: Tensor, offsets: Tensor, shape: Sequence[int | None]) -> Ragged:
        """A Ragged with one ragged dim whose parts are known to fit: nothing is checked, and no offsets are read."""
        made = Ragged.__new__(Ragged)
        _set(made, values, offsets, tuple(shape), None)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Ragged is frozen: cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Ragged, (self.values, self.offsets, self.shape, self.sizes)

    def __repr__(self) -> str:
        text = self.summary()
        if not all(isinstance(x, Tensor) and readable(x) for x in (self.values, self.offsets)):
            return text
        shown = list(range(self.batch)) if self.batch <= 2 * _SHOWN else [*range(_SHOWN), *range(-_SHOWN, 0)]
        with torch.no_grad():
            rows = [str(self.component(i % self.batch)) for i in shown]
        if self.batch > 2 * _SHOWN:
            rows.insert(_SHOWN, "...")
        rows = [row.replace("\n", "\n  ") for row in rows]
        return f"{text[:-1]}, [\n  " + ",\n  ".join(rows) + "\n])" if rows else text

    def summary(self) -> str:
        """Shape, dtype, device and requires_grad, in one line; a star marks a ragged dim."""
        shape = ", ".join("*" if s is None else str(s) for s in self.shape)
        if not isinstance(self.values, Tensor):
            return f"Ragged({shape})"
        place = "" if self.device.type == "cpu" else f", device='{self.device}'"
        history = ", requires_grad=True" if self.requires_grad else ""
        return f"Ragged(({shape}), {self.dtype}{place}{history})"

    # -- structure ----------------------------------------------------------------------------------------------------

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        return tuple(d for d, size in enumerate(self.shape) if size is None)

    @property
    def packed_dim(self) -> int:
        """The dim of ``values`` along which components lie: 0 with several ragged dims."""
        return self.ragged_dims[0] - 1 if self.sizes is None else 0

    @property
    def batch(self) -> int:
        """$B$, the number of components."""
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """(B,): the components' lengths along the packed dim."""
        return self.offsets.diff()

    # -- a tensor's methods; torch's functions, operators and indexing are in `tensor_like` ---------------------------------

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
    def is_nested(self) -> bool:
        """False: a Ragged is not a nested tensor of PyTorch."""
        return False

    @property
    def requires_grad(self) -> bool:
        """Whether the values require grad."""
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
        """The gradient accumulated in the values, with the same components; None if there is none."""
        return None if self.values.grad is None else self.like(self.values.grad)

    def requires_grad_(self, requires_grad: bool = True) -> Ragged:
        """Set whether the values require grad.

        Args:
            requires_grad: the new value.

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

    if TYPE_CHECKING:  # methods that `tensor_like` adds

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, key: Any) -> Any: ...
        def __add__(self, other: Ragged | Tensor | complex) -> Ragged: ...
        def __radd__(self, other: Tensor | complex) -> Ragged: ...
        def __sub__(self, other: Ragged | Tensor | complex) -> Ragged: ...
        def __rsub__(self, other: Tensor | complex) -> Ragged: ...
        def __mul__(self, other: Ragged | Tensor | complex) -> Ragged: ...
        def __rmul__(self, other: Tensor | complex) -> Ragged: ...
        def __truediv__(self, other: Ragged | Tensor | complex) -> Ragged: ...
        def __rtruediv__(self, other: Tensor | complex) -> Ragged: ...
        def __floordiv__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __rfloordiv__(self, other: Tensor | float) -> Ragged: ...
        def __mod__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __rmod__(self, other: Tensor | float) -> Ragged: ...
        def __pow__(self, other: Ragged | Tensor | complex) -> Ragged: ...
        def __rpow__(self, other: Tensor | complex) -> Ragged: ...
        def __matmul__(self, other: Ragged | Tensor) -> Any: ...
        def __rmatmul__(self, other: Tensor) -> Any: ...
        def __and__(self, other: Ragged | Tensor | int) -> Ragged: ...
        def __or__(self, other: Ragged | Tensor | int) -> Ragged: ...
        def __xor__(self, other: Ragged | Tensor | int) -> Ragged: ...
        def __eq__(self, other: Any) -> Ragged: ...  # type: ignore[override]
        def __ne__(self, other: Any) -> Ragged: ...  # type: ignore[override]
        def __lt__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __le__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __gt__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __ge__(self, other: Ragged | Tensor | float) -> Ragged: ...
        def __neg__(self) -> Ragged: ...
        def __pos__(self) -> Ragged: ...
        def __abs__(self) -> Ragged: ...
        def __invert__(self) -> Ragged: ...

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """Convert the values to another dtype or device. Offsets and sizes stay integers, and move with the values.

        Args:
            args: as for ``Tensor.to``, or another Ragged, whose dtype and device are used.
            kwargs: as for ``Tensor.to``.

        Returns:
            The converted Ragged; itself, if nothing changes.
        """
        if args and isinstance(args[0], Ragged):
            args = (args[0].values, *args[1:])
        values = self.values.to(*args, **kwargs)
        if values is self.values:
            return self
        if values.device == self.offsets.device:
            return self.like(values)
        made = Ragged.__new__(Ragged)
        moved = [None if x is None else x.to(values.device) for x in (self.offsets, self.sizes)]
        _set(made, values, moved[0], self.shape, moved[1], self._read)
        return made

    __array_ufunc__ = None  # so that NumPy numbers defer operators to this class

    # -- structure, again ----------------------------------------------------------------------------------------------

    def segment_ids(self) -> Tensor:
        """The component of each position along the packed dim, (T,). Does not synchronize."""
        return segments(self.offsets, self.values.shape[self.packed_dim])

    def component_sizes(self) -> Tensor:
        """Every component's shape, (B, D), int64. Does not synchronize."""
        columns = iter([self.lengths] if self.sizes is None else self.sizes.unbind(1))
        full = [next(columns).long() if n is None else self._constant(n) for n in self.shape[1:]]
        return torch.stack(full, 1)

    def _constant(self, size: int) -> Tensor:
        return torch.full((self.batch,), size, dtype=torch.int64, device=self.offsets.device)

    def read(self) -> tuple[list[int], list[list[int]] | None]:
        """Offsets and sizes as numbers; synchronizes with a GPU the first time."""
        if self._read is None:
            numbers = self.offsets.tolist(), None if self.sizes is None else self.sizes.tolist()
            object.__setattr__(self, "_read", numbers)
        assert self._read is not None
        return self._read

    def read_offsets(self) -> list[int]:
        """The offsets as numbers; see `read`."""
        return self.read()[0]

    def like(self, values: Tensor, shape: Sequence[int | None] | None = None) -> Ragged:
        """Other values in the same components.

        Args:
            values: packed like the values of this Ragged.
            shape: the new shape, if dense dims differ or the ragged dim moved; None for the same.

        Returns:
            The new Ragged.

        Raises:
            ValueError: values that do not fit.
        """
        made = Ragged.__new__(Ragged)
        read = None if torch.compiler.is_compiling() else self._read
        _set(made, values, self.offsets, self.shape if shape is None else tuple(shape), self.sizes, read)
        if shape is None and values.shape == self.values.shape:
            return made
        check_values(made)
        if values.shape[made.packed_dim] != self.values.shape[self.packed_dim] and self.sizes is None:
            raise ValueError(
                f"values: expected {self.values.shape[self.packed_dim]} along dim {made.packed_dim}, where components "
                f"lie, got shape {list(values.shape)}"
            )
        return made

    # -- components ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_components(components: Sequence[Tensor], *, ragged_dims: Sequence[int] | None = None) -> Ragged:
        """Pack a copy of tensors with equal numbers of dims.

        Args:
            components: $B$ tensors, at least one.
            ragged_dims: which dims (1 is a component's first) are ragged; by default those whose sizes differ, and
                dim 1 if none differ.

        Returns:
            The batch.

        Raises:
            TypeError: not a sequence of dense tensors.
            ValueError: no components, components without dims, or sizes that differ in a dim that may not be ragged.
        """
        if not isinstance(components, Iterable) or isinstance(components, (Tensor, str)):
            raise TypeError(f"components: expected a sequence of tensors, got {described(components)}")
        components = [_dense(f"components[{k}]", c) for k, c in enumerate(components)]
        if not components:
            raise ValueError("components: expected at least one; to pack none, call Ragged with values and shape")
        sizes = [list(c.shape) for c in components]
        if not all(sizes) or len({len(s) for s in sizes}) > 1:
            raise ValueError(f"components: expected equal numbers of dims, at least 1, got shapes {sizes}")
        shape = ragged_shape(sizes, ragged_dims)
        ragged = [d for d, n in enumerate(shape) if n is None]
        device = components[0].device
        if len(ragged) == 1:
            values = torch.cat(list(components), ragged[0] - 1)
            lengths, chosen = [s[ragged[0] - 1] for s in sizes], None
        else:
            values = torch.cat([c.reshape(-1) for c in components])
            lengths = [math.prod(s) for s in sizes]
            chosen = torch.tensor([[s[d - 1] for d in ragged] for s in sizes], device=device)
        return Ragged(values, offsets_of(lengths, device), shape, chosen)

    def component(self, index: int) -> Tensor:
        """The component ``index``, from 0: a view of ``values``. Reads the offsets, which synchronizes with a GPU."""
        at, sizes = self.read()
        part = self.values.narrow(self.packed_dim, at[index], at[index + 1] - at[index])
        return part if sizes is None else part.reshape(self.component_shape(sizes[index]))

    def components(self) -> list[Tensor]:
        """The $B$ components, views of ``values``. Reads the offsets, which synchronizes with a GPU."""
        at, sizes = self.read()
        # one split: with one narrow per component, each gradient would be a full buffer
        parts = self.values.split([b - a for a, b in zip(at, at[1:])], self.packed_dim) if self.batch else ()
        return list(parts) if sizes is None else [p.reshape(self.component_shape(n)) for p, n in zip(parts, sizes)]

    def component_shape(self, ragged_sizes: Sequence[int]) -> list[int]:
        """A component's shape, given its sizes in the ragged dims."""
        sizes = iter(ragged_sizes)
        return [next(sizes) if n is None else n for n in self.shape[1:]]

    # -- flat ----------------------------------------------------------------------------------------------------------

    def flat(self) -> Tensor:
        """The components one after the other, each row-major, (N,). Does not synchronize."""
        return self.values if self.sizes is not None else flat_from_packed(self.values, self.offsets, self.packed_dim)

    @staticmethod
    def from_flat(flat: Tensor, sizes: Tensor, shape: Sequence[int | None]) -> Ragged:
        """The inverse of `flat`: components with these ``sizes`` (B, D) and this ``shape``, one after the other."""
        ragged = [d for d, n in enumerate(shape) if n is None]
        if len(ragged) == 1:
            offsets, total = cumulated(sizes[:, ragged[0] - 1]), 0
            dense = math.prod(n for n in shape[1:] if n is not None)
            total = flat.shape[0] // dense if dense else int(offsets[-1])
            packed = [total if n is None else n for n in shape[1:]]
            return Ragged(packed_from_flat(flat, offsets, packed, ragged[0] - 1), offsets, shape)
        return Ragged(flat, cumulated(sizes.prod(1)), shape, sizes[:, [d - 1 for d in ragged]])

    # -- torch's nested tensors ----------------------------------------------------------------------------------------

    @staticmethod
    def from_nested(nested: Tensor, *, ragged_dims: Sequence[int] | None = None) -> Ragged:
        """Convert a torch nested tensor of either layout; differentiable in reverse.

        The result shares memory and offsets with a jagged tensor. If there are holes between the components, it is a copy
        without them, which synchronizes with a GPU. A strided tensor is copied if autograd tracks it or its components are
        not in order.

        Args:
            nested: the nested tensor.
            ragged_dims: for the strided layout, as in `from_components`.

        Returns:
            The batch.

        Raises:
            TypeError: not a nested tensor.
            ValueError: a strided tensor without components, or whose components have no dims.
        """
        if not isinstance(nested, Tensor) or not nested.is_nested:
            raise TypeError(f"nested: expected a nested tensor, got {type(nested).__name__}")
        if nested.layout is torch.jagged:
            values, offsets, dim = from_jagged(nested)
            shape: list[int | None] = [offsets.shape[0] - 1, *values.shape]
            shape[dim] = None
            return Ragged(values, offsets, shape)
        if nested.dim() < 2:
            raise ValueError("nested: a strided nested tensor needs components with at least one dim")
        if tracked(nested) and nested.size(0):
            return Ragged.from_components(strided_components(nested), ragged_dims=ragged_dims)
        flat, sizes = from_strided(nested)
        return Ragged.from_flat(flat, sizes.to(flat.device), ragged_shape(sizes.tolist(), ragged_dims))

    def to_nested(self, layout: torch.layout) -> Tensor:
        """Convert to a torch nested tensor; differentiable in reverse.

        Args:
            layout: ``torch.jagged`` shares values and offsets. ``torch.strided`` reads the sizes, which synchronizes
                with a GPU, and copies if autograd tracks the values.

        Returns:
            The nested tensor.

        Raises:
            ValueError: another layout; several ragged dims for jagged; no components for strided.
        """
        if layout is torch.strided:
            if not self.batch:
                raise ValueError("to_nested: a strided nested tensor without components has no sizes; use torch.jagged")
            if tracked(self.values):
                return torch.nested.as_nested_tensor(self.components())
            return to_strided(self.flat(), self.component_sizes().cpu())
        if layout is not torch.jagged:
            raise ValueError(f"layout: expected torch.strided or torch.jagged, got {layout}")
        if self.sizes is not None:
            raise ValueError(f"layout: torch.jagged has one ragged dim, this has {list(self.ragged_dims)}")
        structure = JaggedStructure(self.offsets, None, self.ragged_dims[0], {})
        nested: Tensor = to_jagged(self.values, structure, view=True)
        return nested

    # -- padded -------------------------------------------------------------------------------------------------------

    def to_padded(self, value: float = 0.0, length: int | Sequence[int] | None = None) -> Tensor:
        """Pad the components with ``value`` to common sizes in the ragged dims. Differentiable.

        Args:
            value: the padding.
            length: the common sizes, at least the longest; None for the longest, which synchronizes with a GPU.

        Returns:
            (B, ...), dense.

        Raises:
            ValueError: a ``length`` that is too short (on the CPU; on a GPU components are truncated).
        """
        return _padded(self, value, length)

    @staticmethod
    def from_padded(
        padded: Tensor,
        lengths: Tensor | None = None,
        *,
        offsets: Tensor | None = None,
        ragged_dim: int = 1,
        total: int | None = None,
    ) -> Ragged:
        """The first ``lengths[b]`` entries along one dim of each component of a dense tensor. Differentiable.

        Args:
            padded: (B, ...).
            lengths: (B,), int32 or int64; None if ``offsets`` are given.
            offsets: (B + 1,), as in `Ragged`; None if ``lengths`` are given.
            ragged_dim: the dim of ``padded`` along which entries are taken.
            total: the sum of the lengths; None to read it, which synchronizes with a GPU.

        Returns:
            The batch.

        Raises:
            ValueError: neither or both of lengths and offsets; lengths out of range (read on the CPU; on a GPU
                positions beyond the end repeat the last).
            IndexError: no such dim.
            TypeError: an argument is not a dense tensor, or lengths are of another dtype.
        """
        _dense("padded", padded)
        for name, x in (("lengths", lengths), ("offsets", offsets)):
            if x is not None:
                _dense(name, x)
        values, offsets, ragged_dim = taken(padded, lengths, offsets, ragged_dim, total)
        shape: list[int | None] = list(padded.shape)
        shape[ragged_dim] = None
        return Ragged(values, offsets, shape)


# -- checks of the parts ----------------------------------------------------------------------------------------------


def _dense(name: str, x: Any) -> Tensor:
    """The argument ``name``, a dense tensor.

    Raises:
        TypeError: it is not one.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {described(x)}")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense Tensor, got {described(x)}")
    return x


def _check_types(values: Any, offsets: Any, shape: Any, sizes: Any) -> None:
    """Check that a user's arguments are tensors and sizes. Transforms build other batches without this check."""
    _dense("values", values)
    _dense("offsets", offsets)
    if values.is_meta != offsets.is_meta:
        raise ValueError(
            f"offsets: expected a tensor on {values.device}, where values are, got one on {offsets.device}"
        )
    if sizes is not None and not isinstance(sizes, Tensor):
        raise TypeError(f"sizes: expected a Tensor or None, got {described(sizes)}")
    if sizes is not None and (sizes.is_nested or sizes.layout is not torch.strided):
        raise TypeError(f"sizes: expected a dense Tensor, got {described(sizes)}")
    if sizes is not None and sizes.is_meta != values.is_meta:
        raise ValueError(f"sizes: expected a tensor on {values.device}, where values are, got one on {sizes.device}")
    if not isinstance(shape, (list, tuple)) or not all(n is None or isinstance(n, (int, torch.SymInt)) for n in shape):
        raise TypeError(f"shape: expected a list or tuple, each entry an int or None, got {described(shape)}")


def _check_structure(x: Ragged) -> None:
    offsets, sizes, ragged = x.offsets, x.sizes, x.ragged_dims
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets: expected int32 or int64, got {offsets.dtype}")
    if not ragged or ragged[0] == 0 or any(n is not None and n < 0 for n in x.shape):
        raise ValueError(f"shape: expected the batch and sizes, at least one of them ragged (None), got {x.shape}")
    if list(offsets.shape) != [(x.shape[0] or 0) + 1]:
        raise ValueError(f"offsets: expected shape [{(x.shape[0] or 0) + 1}] for {x.shape}, got {list(offsets.shape)}")
    if (sizes is None) != (len(ragged) == 1):
        raise ValueError(f"sizes: given exactly if several dims are ragged; those of {x.shape} are {list(ragged)}")
    if sizes is not None and list(sizes.shape) != [x.shape[0], len(ragged)]:
        raise ValueError(f"sizes: expected shape {[x.shape[0], len(ragged)]}, got {list(sizes.shape)}")
    if sizes is not None and sizes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"sizes: expected int32 or int64, got {sizes.dtype}")


def check_values(x: Ragged) -> None:
    values, expected = x.values, x.shape[1:] if x.sizes is None else (None,)
    if values.dim() != len(expected) or any(e is not None and e != n for e, n in zip(expected, values.shape)):
        raise ValueError(f"values: shape {list(values.shape)} does not fit {x.summary()}, packed as {list(expected)}")


def _check_contents(x: Ragged) -> None:
    at, sizes = x.read()
    end = x.values.shape[x.packed_dim]
    if at[0] != 0:
        raise ValueError(f"offsets: expected to start at 0, got {at[0]}")
    for i, (a, b) in enumerate(zip(at, at[1:])):
        if b < a:
            raise ValueError(f"offsets: they decrease from {a} to {b} at component {i}")
    if at[-1] != end:
        raise ValueError(f"offsets: expected to end with the buffer at {end}, got {at[-1]}")
    if sizes is not None:
        counts = [math.prod(x.component_shape(n)) for n in sizes]
        if any(n < 0 for row in sizes for n in row) or counts != [b - a for a, b in zip(at, at[1:])]:
            raise ValueError(f"sizes: components of {counts} entries do not fit offsets {at}")


# -- padding ---------------------------------------------------------------------------------------------------------------


def _padded(x: Ragged, value: float, length: int | Sequence[int] | None) -> Tensor:
    """`Ragged.to_padded`."""
    sizes = x.component_sizes()
    ragged = [d - 1 for d in x.ragged_dims]
    if length is None:
        at, read = x.read()
        rows = [[b - a] for a, b in zip(at, at[1:])] if read is None else read
        length = [max(column) for column in zip(*rows)] if rows else [0] * len(ragged)
    length = [length] if isinstance(length, int) else list(length)
    if len(length) != len(ragged) or min(length) < 0:
        raise ValueError(f"length: expected {len(ragged)} sizes that are not negative, got {length}")
    if readable(sizes) and x.batch and (sizes[:, ragged].amax(0) > torch.tensor(length, device=sizes.device)).any():
        raise ValueError(f"length: {length} is shorter than components of {sizes[:, ragged].amax(0).tolist()}")
    if x.sizes is None:
        return _padded_rows(x, value, length[0])
    full = [n if n is not None else length[ragged.index(d)] for d, n in enumerate(x.shape[1:])]
    positions = x.offsets[:-1].reshape([-1] + [1] * len(full))
    inside = torch.ones_like(positions, dtype=torch.bool)
    for d, n in enumerate(full):
        coordinate = torch.arange(n, device=sizes.device).reshape([n] + [1] * (len(full) - d - 1))
        of_dim = [-1] + [1] * len(full)
        positions = positions + coordinate * row_strides(sizes)[:, d].reshape(of_dim)
        inside = inside & (coordinate < sizes[:, d].reshape(of_dim))
    return filled(x.values, 0, value, positions, inside)


def _padded_rows(x: Ragged, value: float, length: int) -> Tensor:
    local = torch.arange(length, device=x.offsets.device)
    rows = filled(x.values, x.packed_dim, value, x.offsets[:-1, None] + local, local < x.lengths[:, None])
    return rows.movedim(x.packed_dim, 0)


# -- construction -----------------------------------------------------------------------------------------------------------


def _set(made: Ragged, values: Any, offsets: Any, shape: tuple[int | None, ...], sizes: Any, read: Any = None) -> None:
    put = object.__setattr__
    put(made, "values", values)
    put(made, "offsets", offsets)
    put(made, "shape", shape)
    put(made, "sizes", sizes)
    put(made, "_read", read)


def _flatten(ragged: Ragged) -> tuple[list[Any], Any]:
    leaves = [ragged.values, ragged.offsets]
    return (leaves if len(ragged.ragged_dims) == 1 else [*leaves, ragged.sizes]), ragged.shape


def _unflatten(leaves: Any, shape: Any) -> Ragged:
    made = Ragged.__new__(Ragged)
    values, offsets, *sizes = leaves
    _set(made, values, offsets, shape, sizes[0] if sizes else None)
    return made


# torch.load accepts it by default; `Ragged` checks its parts
torch.serialization.add_safe_globals([Ragged])
pytree.register_pytree_node(Ragged, _flatten, _unflatten, serialized_type_name="torch_manualgrad.nested.Ragged")
