"""Runs a function and records, for each element of each tensor, the inputs that it depends on.

The dependence belongs to memory, element by element, so that views and in-place writes need no rules: a view reads the
entries of its storage. A dependence holds for all values, not only for those of the run: for ``relu`` at a negative
number, both sides of ``torch.where``, a product with 0. Operations that depend on the values, such as reading a number
from a tensor, raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import ArgumentError
from ..core.internals import DispatchMode, decompositions, memory_of, pytree
from .rows import RowTable, compressed, expanded

__all__ = ["Call", "PatternError", "Trace"]


class PatternError(RuntimeError):
    """A function whose pattern cannot be found, or a pattern that misses entries of the derivative."""


# In place, but no element changes.
_RESHAPES = {"squeeze_", "unsqueeze_", "transpose_", "t_", "as_strided_", "swapaxes_", "swapdims_"}
# They read shapes, dtypes and devices, but no values.
_ABOUT_SHAPES = {
    "is_same_size", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "_has_same_storage_numel",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_empty_strided",
}  # fmt: skip
# Errors of a rule or a decomposition for an unsupported form of the operator.
_UNKNOWN_FORM = (RuntimeError, IndexError, TypeError, ValueError, KeyError)


@dataclass
class _Memory:
    """The dependence of a storage, for each unit of a fixed number of bytes."""

    ids: Tensor
    unit: int


@dataclass
class Call:
    """A call of an operator, for rules.

    Attributes:
        name: of the operator, without namespace, overload, and the underscore of an in-place one.
        op: the overload.
        args: the arguments, by the names of the schema, with defaults.
        outputs: the tensors that it returned, or wrote to.
        trace: has the dependences.
    """

    name: str
    op: Any
    args: dict[str, Any]
    outputs: list[Tensor]
    trace: Trace

    @property
    def table(self) -> RowTable:
        return self.trace.table

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among the arguments, those of lists too, and the names of the arguments."""
        for name, value in self.args.items():
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(x, Tensor):
                    yield name, x

    def ids(self, x: Any) -> Tensor | None:
        """The dependence of a tensor, in its shape; None for a constant."""
        return self.trace.ids(x) if isinstance(x, Tensor) else None

    def followed(self, *names: str) -> list[Tensor]:
        """The dependences of these arguments, without those of constants."""
        found = [self.ids(self.args.get(name)) for name in names]
        return [x for x in found if x is not None]

    def square(self, ids: Tensor) -> None:
        """The inputs of each of these sets interact with each other."""
        if self.trace.second:
            self.trace.squares.append(torch.unique(ids))

    def product(self, a: Tensor, b: Tensor) -> None:
        """The inputs of each set of ``a`` interact with those of the set of ``b`` at its position."""
        if self.trace.second:
            a, b = (x.reshape(-1) for x in torch.broadcast_tensors(a, b))
            size = self.table.count
            key = torch.unique(a * size + b)
            self.trace.products.append((torch.div(key, size, rounding_mode="floor"), key % size))


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements of a tensor may share memory; False only if they do not."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


Rule = Callable[[Call], "list[Tensor] | None"]


class Trace(DispatchMode):
    """A context that follows dependences on the elements of one tensor.

    Args:
        x: the input.
        rule_for: the rule of an operator, or None.
        second: whether to record interactions, for second derivatives.
    """

    def __init__(self, x: Tensor, rule_for: Callable[[str, Any], Rule | None], second: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = RowTable(x.numel())
        self.rule_for, self.second = rule_for, second
        self.squares: list[Tensor] = []
        self.products: list[tuple[Tensor, Tensor]] = []
        self.conservative: dict[str, int] = {}
        self.bytes = 0
        self._memories: dict[int, _Memory] = {}
        self._alive: list[Tensor] = []  # freed memory could be allocated again
        self._inside: list[Any] = []
        self.put(x, torch.arange(1, x.numel() + 1, device="cpu").reshape(x.shape))

    # -- dependences of tensors -------------------------------------------------------------------------------------------

    def _memory(self, x: Tensor) -> _Memory | None:
        key = memory_of(x)
        return None if key is None else self._memories.get(key)

    def is_followed(self, x: Tensor) -> bool:
        """Whether its values depend on the input, in any way."""
        return self._memory(x) is not None

    def _units(self, memory: _Memory, unit: int) -> Tensor:
        if unit == memory.unit:
            return memory.ids
        if unit < memory.unit:
            return memory.ids.repeat_interleave(memory.unit // unit)
        parts = memory.ids[: len(memory.ids) // (unit // memory.unit) * (unit // memory.unit)]
        return self.table.joined([*parts.reshape(-1, unit // memory.unit).unbind(1)])

    def ids(self, x: Tensor) -> Tensor | None:
        """The dependence of a tensor, in its shape; None for a constant."""
        memory = self._memory(x)
        if memory is None:
            return None
        return self._units(memory, x.element_size()).as_strided(x.shape, x.stride(), x.storage_offset())

    def put(self, x: Tensor, ids: Tensor) -> None:
        """Give a tensor this dependence."""
        key, unit = memory_of(x), x.element_size()
        if key is None:
            return  # zeros without memory, made by transforms
        memory = self._memories.get(key)
        if memory is None:
            size = x.untyped_storage().nbytes() // unit
            memory = self._memories[key] = _Memory(torch.zeros(size, dtype=torch.int64, device="cpu"), unit)
            self._alive.append(x.detach())
        elif unit < memory.unit:
            memory.ids, memory.unit = self._units(memory, unit), unit
        if not (x.is_floating_point() or x.is_complex()):
            ids = torch.zeros_like(ids)  # discrete values depend on the input, but have no derivative
        ratio, ids = unit // memory.unit, ids.reshape(x.shape)
        strides = [stride * ratio for stride in x.stride()]
        for k in range(ratio):
            written = memory.ids.as_strided(x.shape, strides, x.storage_offset() * ratio + k)
            if not _may_overlap(x):
                written.copy_(ids.clone())  # they may share memory
                continue
            # several elements at one address: it depends on all of them
            places = torch.arange(len(memory.ids), device="cpu").as_strided(
                written.shape, strides, written.storage_offset()
            )
            found = self.table.unions(places.reshape(-1), ids.reshape(-1), len(memory.ids))
            memory.ids[places.reshape(-1)] = found[places.reshape(-1)]

    # -- calls ------------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(map(self.is_followed, given)):
            return func(*args, **kwargs)
        schema, tags = func._schema, func.tags
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments.update(zip((a.name for a in schema.arguments), args))
        arguments.update(kwargs)
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        name = schema.name.partition("::")[2]
        known = schema.name.startswith(("aten::", "prims::"))
        if torch.Tag.dynamic_output_shape in tags and self._depends_by_position(arguments):
            raise PatternError(f"f: the shape of the result of {func} depends on the values of x; pass pattern=")
        if name in _RESHAPES or name in _ABOUT_SHAPES:
            return func(*args, **kwargs)
        if not all("Tensor" in str(r.type) for r in schema.returns):
            raise PatternError(
                f"f: {func} returns a number that depends on the values of x. A pattern holds for all values, and what "
                "branches on one, or computes with it in Python, cannot be followed; use torch.where, or pass pattern="
            )
        inplace = written == [schema.arguments[0].name] and name.endswith("_") and isinstance(args[0], Tensor)
        name = name[:-1] if inplace else name
        rule = self.rule_for(name, func) if known and (inplace or not written) else None
        result = func(*args, **kwargs)
        if inplace:
            outputs = [args[0]]
        else:
            outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            for other in written:
                outputs += [x for x in pytree.tree_leaves(arguments[other]) if isinstance(x, Tensor)]
            if not written and self._is_view(outputs, given):
                return result
        if not outputs:
            return result
        for x in outputs:
            if x.is_nested or x.layout is not torch.strided:
                kind = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
                raise PatternError(f"f: {func} returns {kind} that depends on x; pass pattern=")
        call = Call(name, func, arguments, outputs, self)
        found = self._by_rule(rule, call)
        if found is None and known and not written and func not in self._inside:
            found = self._by_parts(call, args, kwargs)
        if found is None:
            found = self._everything(call)
        for x, ids in zip(outputs, found):
            self.put(x, ids)
            self.bytes += x.numel() * x.element_size()
        return result

    def _by_rule(self, rule: Rule | None, call: Call) -> list[Tensor] | None:
        """The dependences of the outputs by a rule; None if it does not cover the call."""
        if rule is None:
            return None
        try:
            found = rule(call)
        except (ArgumentError, PatternError):
            raise
        except _UNKNOWN_FORM:
            return None
        if found is None or [ids.shape for ids in found] != [x.shape for x in call.outputs]:
            return None
        return found

    def _is_view(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
        """Whether each output shares its memory with an argument, and so has its dependence already."""
        memories = {memory_of(x) for x in given} - {None}
        return bool(outputs) and all(memory_of(x) in memories for x in outputs)

    def _depends_by_position(self, arguments: dict[str, Any]) -> bool:
        """Whether a mask of the call depends on the input; for operators without a mask, whether any argument does."""
        chosen = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor) and self.is_followed(x)]
        selects = any(name in arguments for name in ("indices", "mask", "index"))
        return any(not selects or x.dtype in (torch.bool, torch.uint8) for x in chosen)

    def _by_parts(self, call: Call, args: Any, kwargs: Any) -> list[Tensor] | None:
        """The dependences of the outputs, by following a decomposition of the operator."""
        decomposition = decompositions.get(call.op, call.op.decompose)
        self._inside.append(call.op)
        conservative = dict(self.conservative)
        try:
            with self:
                result = decomposition(*args, **kwargs)
        except ArgumentError:
            raise
        except (PatternError, AssertionError, *_UNKNOWN_FORM):
            self.conservative = conservative
            return None
        finally:
            self._inside.pop()
        parts = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if result is NotImplemented or [x.shape for x in parts] != [x.shape for x in call.outputs]:
            return None
        found = [self.ids(x) for x in parts]
        return [
            torch.zeros(x.shape, dtype=torch.int64, device="cpu") if ids is None else ids
            for x, ids in zip(parts, found)
        ]

    def _everything(self, call: Call) -> list[Tensor]:
        """Every element of each output depends on everything that any argument depends on."""
        self.conservative[str(call.op)] = self.conservative.get(str(call.op), 0) + 1
        ids = [found.reshape(-1) for _, x in call.tensors() if (found := call.ids(x)) is not None]
        everything = self.table.union_of(torch.cat(ids))
        call.square(torch.tensor([everything], device="cpu"))
        return [torch.full(x.shape, everything, device="cpu") for x in call.outputs]

    # -- patterns ---------------------------------------------------------------------------------------------------------

    def jacobian(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The pattern of a result, as sorted rows: (crow, col)."""
        ids = self.ids(y)
        if ids is None:
            return torch.zeros(y.numel() + 1, dtype=torch.int64, device="cpu"), torch.zeros(
                0, dtype=torch.int64, device="cpu"
            )
        row, column = self.table.columns(ids.reshape(-1))
        return compressed(row, y.numel()), column

    def hessian(self) -> tuple[Tensor, Tensor]:
        """The pattern of all interactions, as sorted rows: (crow, col)."""
        n, keys = self.table.inputs, [torch.zeros(0, dtype=torch.int64, device="cpu")]
        if self.squares:
            ids = torch.unique(torch.cat(self.squares))
            self.products.append((ids, ids))
        for a, b in self.products:
            sizes = self.table.sizes(b)
            run, left = self.table.columns(a)
            start = torch.cumsum(sizes, 0) - sizes
            _, right = self.table.columns(b)
            pair, place = expanded(start[run], sizes[run])
            left, right = left[pair], right[place]
            keys.append(torch.unique(torch.cat([left * n + right, right * n + left])))
        key = torch.unique(torch.cat(keys))
        return compressed(torch.div(key, n, rounding_mode="floor"), n), key % n
