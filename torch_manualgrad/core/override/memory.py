"""``override(memory=True)``: the backward recomputes cheap results from the tensors that their nodes save.

Linear saves gelu(x) although the node of gelu saves x. Hooks on saved tensors keep a recipe instead: the operator, and
the tensors of its node. The hooks receive a tensor with its ``grad_fn``, so recipes follow from the graph:

    Kept     a tensor, with the version at which it was saved
    Recipe   an operator and its arguments, which are `Kept` or recipes again

The nodes keep all arguments in any case. If the graph does not have the value of an argument (the bias of a batch
normalization, the input of relu), the recipe is compared with the result bitwise before it replaces it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import activation
from ..internals import (
    HIDDEN,
    PLAIN,
    below_autograd,
    follow_refusals,
    in_functorch,
    is_autocast_enabled,
    is_functorch_wrapped,
    is_view,
    only_autograd,
    packed_by,
    put_saved_hooks,
    saved_hooks_allowed,
    saved_hooks_here,
    set_autocast_off,
    skipped_by_dynamo,
    take_saved_hooks,
    values_hidden,
    version_of,
)
from ..once import refuse_reload
from ..rule.recomputable import Argument, Recomputable, recomputables

__all__ = ["DEEPEST", "SMALLEST", "Kept", "Packed", "Recipe"]

refuse_reload(globals())

SMALLEST = 4096  # bytes; smaller tensors are not worth the time of Python
DEEPEST = 3  # operators in a chain of recipes; the next result is kept, to limit recomputation
CACHE = 1 << 20  # bytes compared at a time

_SOURCE = "torch_manualgrad.memory"  # in the metadata of a node: a weak reference to the holder of its result


class Kept:
    """A saved tensor, like PyTorch's: with its version, if writes to it are errors.

    Most saved tensors are packed as this object itself, which costs less than a `Packed`.
    """

    __slots__ = ("__weakref__", "replaced", "tensor", "version")
    depth: int = 0
    certain: bool = True

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self.tensor, self.version = tensor, version
        self.replaced: Packed | None = None  # a recipe for the same tensor, which is no longer kept here

    def is_unchanged(self) -> bool:
        return self.version is not None and version_of(self.tensor) == self.version

    def read(self) -> Tensor:
        if self.version is not None and version_of(self.tensor) != self.version:
            self._raise()
        return self.tensor

    def _raise(self) -> None:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; expected version "
            f"{self.version} instead. Hint: enable anomaly detection to find the operation that failed to compute "
            "its gradient, with torch.autograd.set_detect_anomaly(True)."
        )

    def replace(self, recipe: Recipe) -> None:
        """Release the memory of the tensor; the recipe computes it."""
        self.replaced = Packed(recipe)
        self.tensor = _NOTHING

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it keeps alive, some perhaps several times."""
        if self.replaced is None:
            yield self.tensor
        else:
            yield from self.replaced.tensors()


_NOTHING = torch.empty(0, device="cpu")


class Recipe:
    """A result that is computed when it is read, and kept until all nodes that saved it have read it."""

    __slots__ = (
        "__weakref__",
        "_lock",
        "_pending",
        "_readers",
        "_value",
        "certain",
        "constants",
        "depth",
        "entry",
        "sources",
        "strides",
        "version",
    )

    def __init__(
        self, entry: Recomputable, sources: Sequence[Source | None], constants: Sequence[Any], certain: bool
    ) -> None:
        self.entry, self.sources, self.constants, self.certain = entry, tuple(sources), tuple(constants), certain
        self.depth: int = 1 + max(x.depth for x in self.sources if x is not None)
        self.version = 0
        self.strides: tuple[int, ...] | None = None  # of the result; None: those of the call
        self._readers: set[int] = set()
        self._pending: set[int] = set()  # the readers that have not read the value yet
        self._value: Tensor | None = None
        self._lock = threading.RLock()

    def read(self, reader: Packed | None = None) -> Tensor:
        with self._lock:
            value = self._value
            if value is None:
                with _forward_again():
                    found = [(None, False) if x is None else _read(x) for x in self.sources]
                    value = self.call(found)
                self._pending = set(self._readers)
            self._pending.discard(id(reader))
            self._value = value if self._pending else None
        return value

    def call(self, arguments: Sequence[tuple[Tensor | None, bool]], part: bool = False) -> Tensor:
        """The result for arguments, each with whether it is unshared, so that the result may reuse its memory."""
        values = [value for value, _ in arguments]
        function = self.entry.call
        for i, in_place in self.entry.in_place.items():
            value, mine = arguments[i]
            if mine and value is not None and all(_is_like(value, x) for x in values):
                function = in_place
                break
        result: Tensor = function(*values, *self.constants)
        if not part and self.strides is not None and result.stride() != self.strides:
            strided = torch.empty_strided(result.shape, self.strides, dtype=result.dtype, device=result.device)
            result = strided.copy_(result)
        return result

    @property
    def is_held(self) -> bool:
        """Whether its value is kept for other readers."""
        return self._value is not None

    def count(self, reader: Packed) -> None:
        self._readers.add(id(reader))

    def forget(self, reader: Packed) -> None:  # without the lock, because the garbage collector may call it anywhere
        self._readers.discard(id(reader))
        self._pending.discard(id(reader))
        if not self._pending:
            self._value = None


def _read(source: Source) -> tuple[Tensor, bool]:
    value: Tensor = source.read()
    return value, isinstance(source, Recipe) and not source.is_held


def _is_like(x: Tensor, y: Tensor | None) -> bool:
    return y is None or (x.shape == y.shape and x.dtype is y.dtype)


Source = Kept | Recipe


class Packed:
    """The graph's replacement of one saved tensor: a recipe, and the view of its value that the tensor is."""

    __slots__ = ("recipe", "view")

    def __init__(self, recipe: Recipe, view: tuple[Any, ...] | None = None) -> None:
        self.recipe, self.view = recipe, view
        recipe.count(self)

    def __del__(self) -> None:
        self.recipe.forget(self)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that it keeps alive, some perhaps several times."""
        sources: list[Any] = [self.recipe]
        while sources:
            source = sources.pop()
            if isinstance(source, Recipe):
                sources += [*source.sources, *source.constants]
            elif isinstance(source, Kept):
                yield from source.tensors()
            elif isinstance(source, Tensor):
                yield source


def _source_of(packed: Any) -> Source | None:
    """The source of a packed value; None if another hook packed it, or it is a view of a recipe's value."""
    if isinstance(packed, Kept):
        return packed if packed.replaced is None else packed.replaced.recipe
    return packed.recipe if isinstance(packed, Packed) and packed.view is None else None


@contextmanager
def _forward_again() -> Iterator[None]:
    """Like in the kernel of a forward: nothing is tracked, cast or saved."""
    if is_autocast_enabled():
        with set_autocast_off(), torch.no_grad(), below_autograd():
            yield
    else:
        with torch.no_grad(), below_autograd():
            yield


# -- hooks ------------------------------------------------------------------------------------------------------------


@skipped_by_dynamo
def _pack(tensor: Tensor) -> Kept | Packed:
    node = tensor.grad_fn
    # a result saved by its own node also has its grad_fn: keeping that would make a cycle that is never freed
    own = tensor if node is None else tensor.detach()
    if type(tensor) not in PLAIN or in_functorch() or tensor.is_inference() or is_functorch_wrapped(tensor):
        return Kept(own, None)
    kept = Kept(own, version_of(tensor))
    if node is None or tensor.nbytes < SMALLEST:
        return kept
    whole = tensor
    if is_view(tensor):
        whole = tensor._base  # type: ignore[assignment]
    if type(whole.grad_fn).__name__ not in recomputables:
        if kept.version == 0 and tensor.output_nr == 0 and _may_recompute(tensor):
            _remember(node, kept)
        return kept
    if not _may_recompute(tensor) or (whole is not tensor and not _has_its_bits(tensor, whole)):
        return kept
    recipe = _recipe_of(whole)
    if recipe is None:
        if kept.version == 0 and tensor.output_nr == 0:
            _remember(node, kept)
        return kept
    if whole is tensor:
        return Packed(recipe)
    return Packed(recipe, (tensor.size(), tensor.stride(), tensor.storage_offset() - whole.storage_offset()))


def _has_its_bits(view: Tensor, whole: Tensor) -> bool:
    bits = view.is_conj(), view.is_neg(), whole.is_conj(), whole.is_neg()
    return not any(bits) and whole.dtype is view.dtype


def _may_recompute(tensor: Tensor) -> bool:
    """False with tangents, under a tracer, or after the block was left on another thread."""
    plain = tensor.layout is torch.strided and only_autograd() and not values_hidden()
    return plain and threading.get_ident() in _threads


@skipped_by_dynamo
def _unpack(packed: Kept | Packed) -> Tensor:
    if isinstance(packed, Kept):
        if packed.replaced is None:  # `Kept.read` inlined, for most saved tensors
            tensor, version = packed.tensor, packed.version
            return tensor if version is None or version_of(tensor) == version else packed.read()
        packed = packed.replaced
    value = packed.recipe.read(packed)
    if packed.view is None:
        return value
    with torch.no_grad(), below_autograd():
        return value.as_strided(*packed.view)


_HOOKS = (_pack, _unpack)


# -- recipes ----------------------------------------------------------------------------------------------------------


def _remember(node: Any, source: Source) -> None:
    metadata = getattr(node, "metadata", None)
    if metadata is not None:
        metadata[_SOURCE] = weakref.ref(source)


def _remembered(node: Any) -> Source | None:
    metadata = getattr(node, "metadata", None)
    found = None if metadata is None else metadata.get(_SOURCE)
    return None if found is None else found()


def _recipe_of(x: Tensor) -> Recipe | None:
    """A recipe for a tensor that is not a view; None if there is none, or it is not worth it."""
    node = x.grad_fn
    entry = recomputables.get(type(node).__name__)
    if entry is None or x.output_nr != 0:
        return None
    known = _remembered(node)
    if isinstance(known, Recipe):
        return known if known.version == version_of(x) else None
    result = None
    if entry.result is not None:
        result = packed_by(node, entry.result)
        if result is HIDDEN:  # a C++ node of a rule: its saved tensors came first
            result = known
        if not _is_kept_result(result, x):
            return None
    elif version_of(x) != 0:  # modified since
        return None
    recipe = _made(node, entry, x)
    if recipe is None or recipe.depth > DEEPEST or not (recipe.certain or _gives_the_bits_of(recipe, x)):
        return None
    recipe.certain, recipe.version, recipe.strides = True, version_of(x), x.stride()
    _remember(node, recipe)
    if result is not None:
        result.replace(recipe)
    return recipe


def _is_kept_result(result: Any, x: Tensor) -> bool:
    """Whether a node has saved exactly this tensor, in its current version, by our hooks."""
    if not isinstance(result, Kept) or result.replaced is not None or not result.is_unchanged():
        return False
    y = result.tensor
    return y.data_ptr() == x.data_ptr() and y.shape == x.shape and y.stride() == x.stride() and y.dtype is x.dtype


def _gives_the_bits_of(recipe: Recipe, x: Tensor) -> bool:
    """Compares a few rows at a time, which stay in the cache; everything if a result depends on other rows."""
    with _forward_again():
        count = x.shape[0] if x.dim() else 1
        step = max(1, count * CACHE // max(1, x.nbytes))
        for start in range(0, count, step) if step < count else ():
            rows = (x.shape, start, min(step, count - start))
            if not _bits(_evaluated(recipe, rows)[0], x.narrow(0, *rows[1:])):
                if start:
                    return False
                break
        else:
            if step < count:
                return True
        return _bits(_evaluated(recipe)[0], x)


Rows = tuple[torch.Size, int, int]  # of tensors of this shape: the first row, and the number of rows


def _evaluated(source: Source, rows: Rows | None = None) -> tuple[Tensor, bool]:
    """A value that is not kept, or some of its rows, and whether it is unshared."""
    if isinstance(source, Kept):
        value = source.read()
        return value.narrow(0, *rows[1:]) if rows is not None and value.shape == rows[0] else value, False
    arguments = [(None, False) if s is None else _evaluated(s, rows) for s in source.sources]
    return source.call(arguments, part=rows is not None), True


_compare: Any = None
if os.name == "posix":
    _compare = ctypes.CDLL(None).memcmp  # twice as fast as torch.equal
    _compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are bitwise identical, including nan and signed zeros."""
    if x.dtype is not y.dtype or x.shape != y.shape:
        return False
    if _compare is not None and x.is_cpu and x.is_contiguous() and y.is_contiguous():
        return not _compare(x.data_ptr(), y.data_ptr(), x.nbytes)
    if x.is_complex():
        x, y = torch.view_as_real(x), torch.view_as_real(y)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.equal(x.view(integers), y.view(integers))


def _made(node: Any, entry: Recomputable, x: Tensor | None) -> Recipe | None:
    """The recipe of a node's first result; ``x`` is the result, if available."""
    certain, sources = not hasattr(node, "saved_tensors"), []  # a Python node: a rule's, perhaps with its own forward
    for argument in entry.arguments:
        given = _source(node, argument)
        if given is None:
            return None
        found, sure = given
        if found is None and not argument.optional:
            return None
        certain = certain and sure
        sources.append(found)
    constants = [getattr(node, f"_saved_{name}", HIDDEN) for name in entry.constants]
    if HIDDEN in constants:
        return None
    if entry.takes_dtype:
        if x is None:
            return None
        constants.append(x.dtype)
    elif x is not None and not _of_dtype(sources[0], x.dtype):
        return None
    if all(s is None for s in sources):
        return None
    if entry.complete is not None:
        with _forward_again():
            complete = entry.complete(*[s if s is None else _evaluated(s)[0] for s in sources], *constants)
        if complete is None:
            return None
        constants = list(complete)
    return Recipe(entry, sources[: entry.kept], constants, certain)


def _of_dtype(source: Source | None, dtype: torch.dtype) -> bool:
    return not isinstance(source, Kept) or source.tensor.dtype is dtype


def _source(node: Any, argument: Argument) -> tuple[Source | None, bool] | None:
    """The source of an argument of a call, and whether it is certain to have the value of the call.

    None if the argument was written to since, or was saved outside of the block. An argument without a source, which may
    be an optional one that was not given, is ``(None, ...)``.
    """
    if argument.name is not None:
        packed = packed_by(node, argument.name)
        if isinstance(packed, Kept | Packed):
            source = _source_of(packed)
            if source is None or (isinstance(source, Kept) and not source.is_unchanged()):
                return None
            return source, source.certain
        if packed is None and (argument.edge is None or argument.optional):
            return None, True
        if isinstance(packed, Tensor) and not packed.dim() and not packed.requires_grad:
            return Kept(packed, version_of(packed)), False  # a number, which hooks do not receive
        if packed is not None and packed is not HIDDEN:  # saved outside of the block
            return None
    if argument.edge is None or argument.edge >= len(node.next_functions):
        return None, False
    before, number = node.next_functions[argument.edge]
    return (None if before is None else _result_of(before, number)), False


def _result_of(node: Any, number: int) -> Source | None:
    """The source of a node's result: holds it, or computes it."""
    variable = getattr(node, "variable", None)
    if variable is not None:  # a leaf
        plain = type(variable) in PLAIN and variable.layout is torch.strided
        return Kept(variable, version_of(variable)) if plain else None
    if number != 0:
        return None
    known = _remembered(node)
    if known is not None:
        return known if isinstance(known, Recipe) or (known.replaced is None and known.is_unchanged()) else None
    entry = recomputables.get(type(node).__name__)
    if entry is None:
        return None
    if entry.result is not None:
        return _source_of(packed_by(node, entry.result))
    return _made(node, entry, None)


# -- the threads with the hooks ---------------------------------------------------------------------------------------


class _Here(threading.local):
    put = False  # whether the hooks are on this thread's stack


_here = _Here()
_threads: frozenset[int] = frozenset()  # those inside of such a block
_following_refusals = False


@activation.following
def _follow() -> None:
    global _threads, _following_refusals
    wanted = frozenset(h.packs_on for h in activation.truth.entries if h.packs_on and not h.abandoned)
    if not wanted and not _here.put and not _following_refusals:
        return
    _threads = wanted
    if bool(wanted) != _following_refusals:
        follow_refusals(*((_step_aside, _follow) if wanted else (None, None)))
        _following_refusals = bool(wanted)
    if threading.get_ident() not in wanted:
        if _here.put:
            _here.put = False
            take_saved_hooks(_HOOKS)
    elif not _here.put and saved_hooks_allowed() and saved_hooks_here() is None:
        put_saved_hooks(_HOOKS)
        _here.put = True


def _step_aside() -> None:
    """Called before torch.func refuses hooks."""
    hooks = saved_hooks_here()
    if _here.put and hooks is not None and hooks[0] is _pack:
        _here.put = False
        take_saved_hooks(_HOOKS)
