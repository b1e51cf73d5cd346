"""`checkpoint` and its calls: arguments, tensors that the function reads, random numbers and a policy."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..arguments import described
from ..core.captures import HiddenTensorError, Watch, substituted, substituting, suspects
from ..core.closures import as_of_now
from ..core.copies import copied_with
from ..core.forward import has_series
from ..core.internals import (
    breaks_graphs,
    function_arguments_replaced,
    in_clean_state,
    is_compiled,
    is_exporting,
    is_functorch_wrapped,
    needs_reverse,
    only_autograd,
    own_levels_are_open,
    run_uncompiled,
    saved_tensors_unhooked,
    value_of,
    version_of,
    wrapped_attributes,
)
from ..custom_rules.randomness import RandomState
from ..custom_rules.trees import Tree, distinct, result_tree
from ..programs.functions import Values, in_this_autocast
from ..programs.operator import call
from .graphs import in_graph, takes
from .policies import Log, Policy, Replay
from .program import Recomputed

__all__ = ["checkpoint"]

_SMALL = 16384  # the most elements of a buffer that is copied in each call

_GRAPH = "torch_manualgrad.checkpoint runs outside of compiled graphs"


class _Reading(Watch):
    """A context that replaces the tensors that a function can reach.

    Args:
        what: the name of the function in errors.
        values: the tensor for each original, by the id of this.
        known: tracked tensors, by their ids, with names.
        detached: as in `Watch`.
        changed: the names of buffers that have changed since the call, by their ids: reading one raises.
    """

    def __init__(
        self,
        what: str,
        values: Mapping[int, Tensor],
        known: Mapping[int, tuple[Tensor, str]],
        detached: bool,
        changed: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        advice = "Pass it as an argument, so that it is differentiated."
        super().__init__(what, known, advice, detached)
        self.values, self.changed = values, changed
        self.leaves: dict[int, weakref.ref[Tensor]] = {}  # made by the function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.values or self.changed:
            args = tuple([self.replaced(x) for x in args])
            kwargs = {name: self.replaced(x) for name, x in kwargs.items()} if kwargs else kwargs
        if not self.detached:
            given = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            tracked = {id(x) for x in given if x.requires_grad}
            found = func(*args, **kwargs) if kwargs else func(*args)
            for x in (
                *given,
                found,
            ):  # also one that begins to require grad; not one that is returned unchanged, as by contiguous
                if isinstance(x, Tensor) and x.requires_grad and x.is_leaf and id(x) not in tracked:
                    self.leaves[id(x)] = weakref.ref(x)
            return found
        return super().__torch_function__(func, types, args, kwargs)

    def changed_error(self, name: str) -> RuntimeError:
        """The error for a changed tensor with this name."""
        return RuntimeError(
            f"checkpoint: the tensor {name}, which {self.what} reads, was written to after the call, so that the backward "
            "cannot compute the same again"
        )

    def replaced(self, x: Any) -> Any:
        """The replacement of ``x``."""
        if isinstance(x, Tensor):
            if id(x) in self.changed:
                raise self.changed_error(self.changed[id(x)])
            return self.values.get(id(x), x)
        if type(x) in (list, tuple):
            return type(x)([self.replaced(y) for y in x])
        return x


class _Call(Recomputed):
    """A call of a function of trees.

    Args:
        function: called.
        tree: all arguments, as ``(args, kwargs)``.
        known: the tracked tensors that the function can reach, with their places among the inputs.
        needs: for each input whether autograd tracks it.
        policy: what to save, or None.
        name: of the function, in errors.
        held: the tensors of the modules that the function can reach.
        modes: these modules, and whether each is in training.
        untracked: the other tensors that the function can reach, with names.
        plain: whether no transform and no dual level is active in the call.
        compiled: whether the function can reach one that ``torch.compile`` has made.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tree: Tree,
        known: Mapping[int, tuple[Tensor, str]],
        places: Sequence[int],
        needs: Sequence[bool],
        policy: Policy | None,
        name: str,
        held: Sequence[tuple[dict[str, Any], str, Any]],
        modes: Sequence[tuple[torch.nn.Module, bool]],
        untracked: Sequence[tuple[Tensor, str]],
        plain: bool,
        compiled: bool,
    ) -> None:
        self.tree, self.policy, self.name, self._needs = tree, policy, name, needs
        self._count = sum(tree.is_tensor)
        self._first, self._later = in_this_autocast(function), in_this_autocast(as_of_now(function))
        self._held, self._plain, self._modes = held, plain, modes
        self._compiled = compiled
        # compiled functions read their tensors in no mode: those of modules are exchanged there
        self._is_swapped = compiled and plain and bool(known) and known.keys() <= {id(x) for *_, x in held}
        self._stays_compiled = self._is_swapped or compiled and plain and not known
        # batch norm writes to its buffers without autograd's notice
        buffers = {id(x): x for x in _buffers_of(modes) if id(x) not in known and not x.requires_grad}
        small = [(i, x) for i, x in buffers.items() if x.numel() <= _SMALL and not is_functorch_wrapped(x)]
        with in_clean_state() if small and not plain else contextlib.nullcontext():  # a transform would wrap the copies
            self._copies = {i: x.detach().clone() for i, x in small}
        self._versions = [(x, _version(x)) for i, x in buffers.items() if i not in self._copies]
        self._untracked = [(x, what, _version(x)) for x, what in untracked]
        self._written: set[int] = set()  # the ids of the other buffers that the call writes to
        self._known = dict(known)
        super().__init__(self._computed)
        self._read = list(zip(places, [x for x, _ in known.values()]))
        self.out: Tree | None = None
        self._random: RandomState | None = None
        self._saved: list[tuple[int, Any, Any, list[torch.device]]] = []

    @property
    def result(self) -> Tree:
        """The structure of the result."""
        assert self.out is not None, "the function has not run"
        return self.out

    def _reading(self, values: Sequence[Any], detached: bool, changed: Mapping[int, str]) -> _Reading:
        read = {id(x): values[i] for i, x in self._read}
        return _Reading(self.name, read, self._known, detached, changed)

    def _called(self, function: Callable[..., Any], values: Sequence[Any], reading: _Reading) -> Any:
        """The result of the user's function, for these arguments and these values of the tensors that it reads."""
        args, kwargs = self.tree.join(values[: self._count])
        with contextlib.ExitStack() as stack:
            if self._is_swapped:
                for name in reading.changed.values():
                    raise reading.changed_error(name)
                held = [(t, key, reading.values[id(x)]) for t, key, x in self._held if id(x) in reading.values]
                stack.enter_context(_put_back(held, self._modes))
                return function(*args, **kwargs)
            if self._stays_compiled:  # the graph shows what the function has read
                return function(*args, **kwargs)
            stack.enter_context(run_uncompiled(self._compiled))  # Dynamo cannot trace the mode
            stack.enter_context(reading)
            if reading.values:
                stack.enter_context(substituting(reading.replaced))
                stack.enter_context(function_arguments_replaced(reading.replaced))
            return function(*args, **kwargs)

    def run(self, tensors: Values) -> list[Tensor]:
        self._random = RandomState(tensors, self.name, self._stays_compiled)
        kept: list[Tensor] = []
        versions = [_version(x) for x in tensors[: self._count]]
        if self._plain:
            # with a graph, as in the backward: without one PyTorch may call different operators
            read = [x.detach().requires_grad_(yes) for x, yes in zip(tensors, self._needs)]
            reading = self._reading(read, False, {})
            log = Log(self.policy) if self.policy is not None else contextlib.nullcontext()
            with torch.enable_grad(), saved_tensors_unhooked(), log, self._random.seen():
                out = self._called(self._first, read, reading)
            self._check_writes(tensors, versions)
            self._check_graph(result_tree(out, self.name).tensors, read, reading)
            self._written = {id(x) for x, version in self._versions if _version(x) != version}
            for x in read:  # the graph belongs to this call only: the backward makes its own
                if x.requires_grad:
                    x.register_hook(self._refuse_gradient)
            if isinstance(log, Log):
                kept, self._saved = log.chosen()
        else:
            with self._random.seen():
                out = self._called(self._first, tensors, self._reading(tensors, True, {}))
            self._check_writes(tensors, versions)
        self._untracked = [(x, what, version) for x, what, version in self._untracked if _version(x) == version]
        self.out = result_tree(out, self.name)
        results = distinct(self.out.tensors, tensors)
        self.out.release()
        self._outputs = len(results)
        return [*results, *kept]

    def _check_writes(self, tensors: Values, versions: Sequence[int]) -> None:
        for i, (x, version) in enumerate(zip(tensors, versions)):
            if _version(x) != version:
                raise RuntimeError(
                    f"checkpoint: {self.name} writes to tensor {i} of its arguments, of shape {list(x.shape)}, so that the "
                    "backward cannot compute the same again"
                )

    def again(self, values: Sequence[Any], kept: Values) -> Sequence[Tensor]:
        assert self._random is not None
        replay = Replay(kept, self._saved, self.name) if kept else None
        # the recomputation writes to copies
        copies = {id(x): self._copies.get(id(x), x) for _, _, x in self._held}
        held = [
            (t, key, copies[id(x)].clone() if id(x) in self._copies or id(x) in self._written else x)
            for t, key, x in self._held
        ]
        before = {id(x): version for x, version in self._versions if id(x) not in self._written}
        changed = {id(x): key for _, key, x in self._held if id(x) in before and _version(x) != before[id(x)]}
        changed |= {id(x): what for x, what, version in self._untracked if _version(x) != version}
        with self._random.restored(), _put_back(held, self._modes), replay or contextlib.nullcontext():
            found = self._called(self._later, values, self._reading(values, False, changed))
        if replay is not None:
            replay.check()
        return Tree(found).tensors

    def _refuse_gradient(self, grad: Tensor) -> None:
        raise HiddenTensorError(
            f"checkpoint: a gradient goes through a tensor that {self.name} has left in another place than its result, such as "
            "an attribute or a list, where it would be lost; return the tensor"
        )

    def _check_graph(self, results: Values, read: Values, reading: _Reading) -> None:
        """Raise if the graph of the results has a tensor that is not an input and was not made in the call."""
        inputs = {id(x) for x in read} | {i for i, leaf in reading.leaves.items() if leaf() is not None}
        nodes = [x.grad_fn for x in results]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            x = getattr(node, "variable", None)
            if isinstance(x, Tensor) and id(x) not in inputs:
                named = self._known.get(id(x))
                name = named[1] if named is not None else f"a tensor of shape {list(x.shape)}, or one computed from it"
                raise reading.error(name)
            nodes += [after for after, _ in node.next_functions]

    def _computed(self, values: Sequence[Any]) -> Sequence[Tensor]:
        return self.again(values, [])


def _held_by(objects: Iterable[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """The parameters and buffers of the modules among some objects, with their dictionaries and keys."""
    found: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                for tensors in (module._parameters, module._buffers):
                    found.update({(id(tensors), key): (tensors, key, x) for key, x in tensors.items()})
    return list(found.values())


def _modes_of(objects: Iterable[Any]) -> list[tuple[torch.nn.Module, bool]]:
    """The modules among some objects, and whether each is in training."""
    return [(m, m.training) for thing in objects if isinstance(thing, torch.nn.Module) for m in thing.modules()]


def _buffers_of(modes: Sequence[tuple[torch.nn.Module, bool]]) -> list[Tensor]:
    return [x for module, _ in modes for x in module._buffers.values() if x is not None]


def _version(x: Tensor) -> int:
    return version_of(value_of(x))


@contextlib.contextmanager
def _put_back(
    held: Sequence[tuple[dict[str, Any], str, Any]], modes: Sequence[tuple[torch.nn.Module, bool]]
) -> Iterator[None]:
    """A context that restores tensors and modes of modules; ``torch.func.functional_call`` may have removed them."""
    before = [(tensors, key, tensors.get(key)) for tensors, key, _ in held]
    now = [(module, module.training) for module, _ in modes]
    _set(held)
    _set_modes(modes)
    try:
        yield
    finally:
        _set(before)
        _set_modes(now)


def _set_modes(modes: Sequence[tuple[torch.nn.Module, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def _set(held: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    for tensors, key, x in held:
        if tensors.get(key) is not x:
            tensors[key] = x


def checkpoint(f: Callable[..., Any], policy: Policy | None = None) -> Callable[..., Any]:
    """The same function with less memory: the graph keeps the arguments, and the backward recomputes the rest.

    It works in all modes, at every order, under torch.func and ``vmap``, and nested. A derivative is a function of the same kind,
    so second derivatives save memory too. Without reverse mode, the function is called directly.

        block = mg.checkpoint(net.block)
        loss(block(x)).backward()

    Args:
        f: a function or module of pytrees. Tensors that it reads by closure, as globals or as attributes, such as the
            parameters of a module, are differentiated. It must do the same each time for the same arguments. The
            recomputation draws the same random numbers.
        policy: the results that are saved instead of recomputed: `checkpointing.save_products`,
            `checkpointing.save_names`, `checkpointing.save_budget` or `checkpointing.offload`. None saves nothing. Policies
            act in the first backward of ``torch.autograd``; elsewhere everything is recomputed.

    Returns:
        The function.

    Raises:
        TypeError: f is not a function, or policy is not a policy.
        HiddenTensorError: in a call: f reads a tracked tensor that was not found. Pass it as an argument.
        RuntimeError: in a backward with a policy: f called different operators than in the forward.

    References:
        ``jax.checkpoint``; Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """
    if not callable(f):
        raise TypeError(f"checkpoint: f: expected a function, got {described(f)}")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"checkpoint: policy: expected None or a policy of mg.checkpointing, got {described(policy)}")
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f, wrapped_attributes(f), updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if is_exporting():  # an exported program has only operators
            return f(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and takes(policy):
            return in_graph(f, policy, args, kwargs)
        return _checkpointed(f, policy, name, args, kwargs)

    return copied_with(checkpointed, checkpoint, f, policy)


@breaks_graphs(_GRAPH)
def _checkpointed(
    f: Callable[..., Any], policy: Policy | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    plain = only_autograd()
    if plain and not torch.is_grad_enabled() or own_levels_are_open() or has_series((args, kwargs)):
        return f(*args, **kwargs)
    tree = Tree((args, kwargs))
    tensors = tree.tensors
    if any(not isinstance(x, Tensor) and hasattr(type(x), "__torch_function__") for x in tree.leaves):
        return f(*args, **kwargs)
    others = [(x, "an argument") for x in tree.leaves if not isinstance(x, Tensor)]
    reached: dict[int, Any] = {}
    if isinstance(f, torch.nn.Module) and any(map(is_lazy, f.parameters())):
        return f(*args, **kwargs)  # a lazy module, whose first call makes its parameters
    untracked: dict[int, tuple[Tensor, str]] = {}
    known = suspects([(f, name), *others], reached, untracked)
    inputs, places = [substituted(x) for x in tensors], []
    for original, _ in known.values():
        x = substituted(original)
        place = next((i for i, y in enumerate(inputs) if y is x), len(inputs))
        places.append(place)
        if place == len(inputs):
            inputs.append(x)
    tree.release()
    if not any(map(needs_reverse, inputs)):
        return f(*args, **kwargs)
    needs = [x.requires_grad for x in inputs]
    held, modes = _held_by(reached.values()), _modes_of(reached.values())
    of_modules = {id(x) for *_, x in held}
    made = _Call(
        f,
        tree,
        known,
        places,
        needs,
        policy if plain else None,
        name,
        held,
        modes,
        [x for i, x in untracked.items() if i not in of_modules],
        plain,
        any(map(is_compiled, reached.values())),
    )
    found = call(made, inputs)
    return made.result.join(found)
