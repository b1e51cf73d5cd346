"""`Ragged`: a batch of tensors of one number of dims whose sizes differ in some of them, packed into one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.internals import JaggedStructure, pytree
from .layouts import from_jagged, from_strided, strided_components, to_jagged, to_strided, tracked
from .packing import flat_from_packed, packed_from_flat, readable, row_strides, segments

__all__ = ["Ragged"]


class Ragged:
    """A batch of components of unequal sizes, packed: ordinary tensors, and so differentiable in every mode.

    Frozen, its offsets and sizes too; a pytree whose leaves are values, offsets and sizes: it goes through torch.func,
    vmap (over a further dim of the values) and torch.compile. Offsets and sizes are checked where they can be read
    without synchronizing (on the CPU). Methods that read them on a GPU synchronize once, and their docstrings say so.

    It behaves as a tensor: operators, ``len``, iteration and indexing over components, ``dtype``, ``to``. The functions
    of `torch_manualgrad.nested` and elementwise ones of torch are methods, and ``torch.softmax`` and the like take it.

    Attributes:
        values: with one ragged dim, the components concatenated along it: the component's shape with T, the sum of
            their lengths, in its place. With several, the components flattened (row-major) and concatenated: (N,).
        offsets: (B + 1,), int32 or int64: where components begin along that dim, from 0 to T (or N).
        shape: (B, ...), as of a nested tensor, with None for each ragged dim. Dim 0 is the batch.
        sizes: with several ragged dims, (B, number of them), integers: each component's sizes there; else None.

    Raises:
        ValueError: offsets that decrease, do not start at 0 or do not end with the buffer, or a shape that does not fit
            the values.
        TypeError: offsets of another dtype.
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
        _set(self, values, offsets, tuple(shape), sizes)
        self._check_structure()
        self._check_values()
        if offsets.device.type == "cpu" and not torch.compiler.is_compiling() and type(offsets) is Tensor:
            self._check_contents()

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
        """B, the number of components."""
        return self.offsets.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """(B,): the components' lengths along the packed dim."""
        return self.offsets.diff()

    # -- a tensor's methods; operators, indexing and the functions of torch are in `tensor_like` -----------------------

    if TYPE_CHECKING:  # methods that `tensor_like` adds

        def __getattr__(self, name: str) -> Any: ...

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

    def requires_grad_(self, requires_grad: bool = True) -> Ragged:
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

    def to(self, *args: Any, **kwargs: Any) -> Ragged:
        """Convert the values to another dtype or device. Offsets and sizes stay integers, and move with the values.

        Args:
            args: those of ``Tensor.to``, or another Ragged, whose dtype and device are taken.
            kwargs: those of ``Tensor.to``.

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

    def cpu(self) -> Ragged:
        """The Ragged on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | str | torch.device | None = None) -> Ragged:
        """The Ragged on a GPU, by default the current one."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    __array_ufunc__ = None  # so that NumPy numbers defer operators to this class

    # -- structure, again ----------------------------------------------------------------------------------------------

    def wrapped(self, dim: int, *, name: str = "dim") -> int:
        """``dim`` as a number from 0 (the batch).

        Raises:
            IndexError: there is no such dim.
        """
        if not -self.dim() <= dim < self.dim():
            raise IndexError(f"{name}: {dim} is out of range for a nested tensor of {self.dim()} dims")
        return dim % self.dim()

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
            values: packed as those of this Ragged.
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
        made._check_values()
        if values.shape[made.packed_dim] != self.values.shape[self.packed_dim] and self.sizes is None:
            raise ValueError(
                f"values: expected {self.values.shape[self.packed_dim]} along dim {made.packed_dim}, where components "
                f"lie, got shape {list(values.shape)}"
            )
        return made

    # -- components ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_components(components: Sequence[Tensor], *, ragged_dims: Sequence[int] | None = None) -> Ragged:
        """Pack tensors of one number of dims: a copy.

        Args:
            components: B of them, at least one.
            ragged_dims: which dims (1 is a component's first) are ragged; by default those in which sizes differ, and
                dim 1 if none do.

        Returns:
            The batch.

        Raises:
            ValueError: no components, components without dims, or sizes that differ in a dim that is not to be ragged.
        """
        if not components:
            raise ValueError("components: expected at least one; with none, give Ragged the values and the shape")
        sizes = [list(c.shape) for c in components]
        if not all(sizes) or len({len(s) for s in sizes}) > 1:
            raise ValueError(f"components: expected one number of dims, at least 1, got shapes {sizes}")
        shape = _ragged_shape(sizes, ragged_dims)
        ragged = [d for d, n in enumerate(shape) if n is None]
        device = components[0].device
        if len(ragged) == 1:
            values = torch.cat(list(components), ragged[0] - 1)
            lengths, chosen = [s[ragged[0] - 1] for s in sizes], None
        else:
            values = torch.cat([c.reshape(-1) for c in components])
            lengths = [math.prod(s) for s in sizes]
            chosen = torch.tensor([[s[d - 1] for d in ragged] for s in sizes], device=device)
        return Ragged(values, _offsets(lengths, device), shape, chosen)

    def component(self, index: int) -> Tensor:
        """The component ``index``, from 0: a view of ``values``. Reads the offsets, which synchronizes with a GPU."""
        at, sizes = self.read()
        part = self.values.narrow(self.packed_dim, at[index], at[index + 1] - at[index])
        return part if sizes is None else part.reshape(self._full(sizes[index]))

    def components(self) -> list[Tensor]:
        """The B components, views of ``values``. Reads the offsets, which synchronizes with a GPU."""
        at, sizes = self.read()
        # one split: with one narrow per component, each gradient would be a full buffer
        parts = self.values.split([b - a for a, b in zip(at, at[1:])], self.packed_dim) if self.batch else ()
        return list(parts) if sizes is None else [p.reshape(self._full(n)) for p, n in zip(parts, sizes)]

    def _full(self, ragged_sizes: Sequence[int]) -> list[int]:
        """A component's shape, given its sizes in the ragged dims."""
        sizes = iter(ragged_sizes)
        return [next(sizes) if n is None else n for n in self.shape[1:]]

    # -- flat ----------------------------------------------------------------------------------------------------------

    def flat(self) -> Tensor:
        """The components one after the other, each row-major, (N,). Does not synchronize."""
        return self.values if self.sizes is not None else flat_from_packed(self.values, self.offsets, self.packed_dim)

    @staticmethod
    def from_flat(flat: Tensor, sizes: Tensor, shape: Sequence[int | None]) -> Ragged:
        """The inverse of `flat`: components of ``sizes`` (B, D) and of that ``shape``, one after the other."""
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

        The jagged layout shares memory and offsets, unless there are holes between the components: a copy leaves them
        out, which synchronizes with a GPU. The strided layout is copied where it has a gradient or is not in order.

        Args:
            nested: the nested tensor.
            ragged_dims: for the strided layout, as in `from_components`.

        Returns:
            The batch.

        Raises:
            TypeError: not a nested tensor.
            ValueError: a strided one without components or whose components have no dims.
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
        return Ragged.from_flat(flat, sizes.to(flat.device), _ragged_shape(sizes.tolist(), ragged_dims))

    def to_nested(self, layout: torch.layout) -> Tensor:
        """Convert to a torch nested tensor; differentiable in reverse.

        Args:
            layout: ``torch.jagged``: shares values and offsets. ``torch.strided``: reads the sizes, which synchronizes
                with a GPU; a copy where there is a gradient.

        Returns:
            The nested tensor.

        Raises:
            ValueError: another layout; several ragged dims as jagged; no components as strided.
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
        nested: Tensor = to_jagged(self.values, JaggedStructure(self.offsets, None, self.ragged_dims[0], {}))
        return nested

    # -- padded -------------------------------------------------------------------------------------------------------

    def to_padded(self, value: float = 0.0, length: int | Sequence[int] | None = None) -> Tensor:
        """Fill the components up with ``value`` to common sizes in the ragged dims. Differentiable.

        Args:
            value: the padding.
            length: those sizes, at least the longest; None: the longest, which synchronizes with a GPU.

        Returns:
            (B, ...), dense.

        Raises:
            ValueError: a ``length`` that is too short (on the CPU; on a GPU it cuts).
        """
        sizes = self.component_sizes()
        ragged = [d - 1 for d in self.ragged_dims]
        if length is None:
            at, read = self.read()
            rows = [[b - a] for a, b in zip(at, at[1:])] if read is None else read
            length = [max(column) for column in zip(*rows)] if rows else [0] * len(ragged)
        length = [length] if isinstance(length, int) else list(length)
        if len(length) != len(ragged) or min(length) < 0:
            raise ValueError(f"length: expected {len(ragged)} sizes that are not negative, got {length}")
        if readable(sizes) and self.batch and (sizes[:, ragged].amax(0) > torch.tensor(length)).any():
            raise ValueError(f"length: {length} is shorter than components of {sizes[:, ragged].amax(0).tolist()}")
        if self.sizes is None:
            return self._padded_rows(value, length[0])
        full = [n if n is not None else length[ragged.index(d)] for d, n in enumerate(self.shape[1:])]
        positions = self.offsets[:-1].reshape([-1] + [1] * len(full))
        inside = torch.ones_like(positions, dtype=torch.bool)
        for d, n in enumerate(full):
            coordinate = torch.arange(n, device=sizes.device).reshape([n] + [1] * (len(full) - d - 1))
            of_dim = [-1] + [1] * len(full)
            positions = positions + coordinate * row_strides(sizes)[:, d].reshape(of_dim)
            inside = inside & (coordinate < sizes[:, d].reshape(of_dim))
        return _filled(self.values, 0, value, positions, inside)

    def _padded_rows(self, value: float, length: int) -> Tensor:
        local = torch.arange(length, device=self.offsets.device)
        rows = _filled(
            self.values, self.packed_dim, value, self.offsets[:-1, None] + local, local < self.lengths[:, None]
        )
        return rows.movedim(self.packed_dim, 0)

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
            offsets: (B + 1,), as of `Ragged`; None if ``lengths`` are given.
            ragged_dim: along which dim of ``padded``.
            total: the sum of the lengths; None: it is read, which synchronizes with a GPU.

        Returns:
            The batch.

        Raises:
            ValueError: neither or both of lengths and offsets; lengths out of range (read on the CPU; on a GPU
                positions beyond the end repeat the last).
            IndexError: no such dim.
            TypeError: lengths of another dtype.
        """
        if (lengths is None) == (offsets is None):
            raise ValueError("lengths, offsets: expected one of the two")
        if not -padded.dim() <= ragged_dim < padded.dim() or ragged_dim % padded.dim() == 0:
            raise IndexError(f"ragged_dim: {ragged_dim} is no component dim of a tensor of shape {list(padded.shape)}")
        given = offsets if lengths is None else lengths
        assert given is not None
        ragged_dim %= padded.dim()
        if given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths or offsets: expected int32 or int64, got {given.dtype}")
        batch, longest = padded.shape[0], padded.shape[ragged_dim]
        if given.shape != (batch + (lengths is None),):
            raise ValueError(
                f"lengths or offsets: shape {list(given.shape)} does not fit {batch} components of {list(padded.shape)}"
            )
        if offsets is None:
            offsets = cumulated(given)
        lengths = offsets.diff()
        if readable(lengths) and batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= longest:
            raise ValueError(f"lengths: expected from 0 to {longest}, got {lengths.tolist()}")
        total = int(offsets[-1]) if total is None else total
        which = segments(offsets, total)
        positions = which * longest + torch.arange(total, device=offsets.device) - offsets[which]
        if total and not batch * longest:
            raise ValueError(f"total: {total} positions cannot come from padded of shape {list(padded.shape)}")
        rows = padded.movedim(ragged_dim, 1).flatten(0, 1)
        values = rows.index_select(0, positions.clamp(0, max(batch * longest - 1, 0))).movedim(0, ragged_dim - 1)
        shape: list[int | None] = list(padded.shape)
        shape[ragged_dim] = None
        return Ragged(values, offsets, shape)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_structure(self) -> None:
        offsets, sizes, ragged = self.offsets, self.sizes, self.ragged_dims
        if offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"offsets: expected int32 or int64, got {offsets.dtype}")
        if not ragged or ragged[0] == 0 or min(n for n in self.shape if n is not None) < 0:
            raise ValueError(
                f"shape: expected the batch and sizes, at least one of them ragged (None), got {self.shape}"
            )
        if list(offsets.shape) != [(self.shape[0] or 0) + 1]:
            raise ValueError(
                f"offsets: expected shape [{(self.shape[0] or 0) + 1}] for {self.shape}, got {list(offsets.shape)}"
            )
        if (sizes is None) != (len(ragged) == 1):
            raise ValueError(
                f"sizes: given exactly if several dims are ragged, which of {self.shape} are {list(ragged)}"
            )
        if sizes is not None and list(sizes.shape) != [self.shape[0], len(ragged)]:
            raise ValueError(f"sizes: expected shape {[self.shape[0], len(ragged)]}, got {list(sizes.shape)}")
        if sizes is not None and sizes.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"sizes: expected int32 or int64, got {sizes.dtype}")

    def _check_values(self) -> None:
        values, expected = self.values, self.shape[1:] if self.sizes is None else (None,)
        if values.dim() != len(expected) or any(e is not None and e != n for e, n in zip(expected, values.shape)):
            raise ValueError(f"values: shape {list(values.shape)} does not fit {self!r}, packed as {list(expected)}")

    def _check_contents(self) -> None:
        at, sizes = self.read()
        end = self.values.shape[self.packed_dim]
        if at[0] != 0:
            raise ValueError(f"offsets: expected to start at 0, got {at[0]}")
        for i, (a, b) in enumerate(zip(at, at[1:])):
            if b < a:
                raise ValueError(f"offsets: they decrease from {a} to {b} at component {i}")
        if at[-1] != end:
            raise ValueError(f"offsets: expected to end with the buffer at {end}, got {at[-1]}")
        if sizes is not None:
            counts = [math.prod(self._full(n)) for n in sizes]
            if any(n < 0 for row in sizes for n in row) or counts != [b - a for a, b in zip(at, at[1:])]:
                raise ValueError(f"sizes: components of {counts} entries do not fit offsets {at}")


def _set(made: Ragged, values: Any, offsets: Any, shape: tuple[int | None, ...], sizes: Any, read: Any = None) -> None:
    put = object.__setattr__
    put(made, "values", values)
    put(made, "offsets", offsets)
    put(made, "shape", shape)
    put(made, "sizes", sizes)
    put(made, "_read", read)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    at = [0]
    for n in lengths:
        at.append(at[-1] + n)
    return torch.tensor(at, device=device)


def cumulated(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths.dtype)


def _ragged_shape(sizes: Sequence[Sequence[int]], ragged_dims: Sequence[int] | None) -> list[int | None]:
    """The shape of components of these sizes, with None in the dims that differ or are asked for."""
    differ = [d for d, n in enumerate(zip(*sizes), 1) if len(set(n)) > 1]
    chosen = list(ragged_dims) if ragged_dims is not None else differ or [1]
    dims = len(sizes[0])
    if not chosen or not all(1 <= d <= dims for d in chosen) or not set(differ) <= set(chosen):
        raise ValueError(f"ragged_dims: {chosen}, where components of {dims} dims differ in dims {differ}")
    return [len(sizes), *(None if d in chosen else n for d, n in enumerate(sizes[0], 1))]


def _filled(values: Tensor, dim: int, value: float, positions: Tensor, inside: Tensor) -> Tensor:
    """``values`` at ``positions`` along ``dim``, ``value`` where not ``inside``. Their dims replace ``dim``."""
    end = values.shape[dim]
    filler = values.new_full([1 if d == dim else n for d, n in enumerate(values.shape)], value)
    extended = torch.cat([values, filler], dim)
    found = extended.index_select(dim, torch.where(inside, positions, end).flatten())
    return found.unflatten(dim, positions.shape)


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
