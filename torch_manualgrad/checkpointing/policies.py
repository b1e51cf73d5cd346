"""Policies select the results that the forward saves, so that the backward does not recompute them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from ..arguments import ArgumentError, described
from ..core.internals import DispatchMode, example_of, is_exporting, pytree, version_of
from ..core.op.define import custom_op

__all__ = ["Log", "Policy", "Replay", "checkpoint_name", "offload", "save_budget", "save_names", "save_products"]

Choice = Callable[["Sequence[Any]"], "Sequence[Any]"]


class Policy:
    """Selects the results to save; `save_products`, `save_names`, `save_budget` and `offload` are or make policies.

    Args:
        name: in ``repr``.
        choose: selects among the events of a call.
        considers: whether the result of an operator may be chosen; others are not kept until the end of the call.
        saves: ``(op, args) -> bool``, whether the result of a call in a graph is saved; None if that depends on other calls.
        on_host: whether results are saved in the memory of the host, and not of their device.

    Attributes:
        contexts: the policy for ``torch.utils.checkpoint``, which compiled functions use.
    """

    def __init__(
        self,
        name: str,
        choose: Choice,
        considers: Callable[[Any], bool] = lambda op: True,
        saves: Callable[[Any, Sequence[Any]], bool] | None = None,
        on_host: bool = False,
    ) -> None:
        self._name, self.choose, self.considers, self.saves, self.on_host = name, choose, considers, saves, on_host
        self.contexts = functools.partial(create_selective_checkpoint_contexts, _InGraphs(self))

    def __repr__(self) -> str:
        return self._name


def _flops(op: Any) -> Callable[..., int] | None:
    return flop_registry.get(op._overloadpacket)


def _is_product(op: Any) -> bool:
    return _flops(op) is not None


class _InGraphs:
    """A policy as a function that ``torch.utils.checkpoint`` calls for each operator."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = self.policy.saves
        assert saves is not None
        return CheckpointPolicy.MUST_SAVE if saves(op, args) else CheckpointPolicy.PREFER_RECOMPUTE

    @property
    def of_region(self) -> Callable[[Sequence[tuple[Any, Any, Any, Any]]], list[bool]] | None:
        """Whether each call ``(op, args, kwargs, result)`` of a region has its result saved; None if calls decide
        alone."""
        return None if self.policy.saves is not None else self._chosen

    def _chosen(self, calls: Sequence[tuple[Any, Any, Any, Any]]) -> list[bool]:
        events = []
        for i, (op, args, kwargs, result) in enumerate(calls):
            count, leaves = _flops(op), pytree.tree_leaves(result)
            if count is not None and self.policy.considers(op):
                flops = example_of(count(*args, **kwargs, out_val=result))
                held = sum(example_of(x.numel()) * x.element_size() for x in leaves if isinstance(x, Tensor))
                events.append(Candidate(i, flops, held))
        chosen = {event.place for event in self.policy.choose(events)}
        return [i in chosen for i in range(len(calls))]


#: Saves the results that cost most to recompute: matrix products, convolutions and attention.
save_products = Policy(
    "save_products",
    lambda events: events,
    _is_product,
    lambda op, args: _is_product(op),
)


def save_names(*names: str) -> Policy:
    """A policy that saves the tensors that the function has named with `checkpoint_name`.

    Args:
        names: those of the tensors to save.

    Raises:
        TypeError: one is not a string.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"names: expected strings, got {name!r}")
    chosen = frozenset(names)
    return Policy(
        f"save_names({', '.join(map(repr, names))})",
        lambda events: [e for e in events if e.names & chosen],
        saves=lambda op, args: op is _named.op and args[1] in chosen,
    )


def save_budget(limit: int) -> Policy:
    """A policy that saves matrix products, convolutions and attention, at most ``limit`` bytes in each call.

    Those with the most floating point operations per byte come first, as ``torch.utils.flop_counter`` counts them in
    the call.

    Args:
        limit: the largest number of bytes.

    Raises:
        ArgumentError: a negative number.
    """
    if limit < 0:
        raise ArgumentError(f"limit: expected a number of bytes that is not negative, got {limit}")

    def choose(events: Sequence[Any]) -> Sequence[Any]:
        chosen, left = [], limit
        for event in sorted(events, key=lambda e: -e.flops / max(e.bytes, 1)):
            if event.bytes <= left:
                chosen.append(event)
                left -= event.bytes
        return chosen

    return Policy(f"save_budget({limit})", choose, _is_product)


def offload(policy: Policy) -> Policy:
    """A policy that saves what another one selects, in the memory of the host; the backward copies it back.

    Copies from and to CUDA go through pinned memory, and the host does not wait for them.

    Args:
        policy: such as `save_products`.

    Raises:
        TypeError: it is not a policy.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: expected a policy of mg.checkpointing, got {described(policy)}")
    return Policy(f"offload({policy!r})", policy.choose, policy.considers, policy.saves, on_host=True)


def _on_host(x: Tensor) -> Tensor:
    """A copy in the memory of the host; the tensor itself if it is there."""
    if not x.is_cuda:
        return x.cpu()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


_names = threading.local()


@custom_op("manualgrad_graphs::named(Tensor x, str name) -> Tensor")
def _named(x: Tensor, name: str) -> Tensor:
    return x.clone()


@_named.impl_backward
def _(ctx: Any, saved: Any, grad: Tensor) -> Any:
    return {"x": grad}


@_named.impl_save_for_backward
def _(inputs: Any, output: Any) -> Any:
    return ()


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Name a tensor, for `save_names`. Otherwise this is the identity, and returns its argument; in a graph a copy.

    Args:
        x: any tensor.
        name: several tensors may have the same.

    Raises:
        TypeError: the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    if torch.compiler.is_dynamo_compiling() and not is_exporting():
        return _named(x, name)
    log = getattr(_names, "log", None)
    if log is not None and isinstance(x, Tensor):
        log.named(x, name)
    return x


class Candidate(NamedTuple):
    """A call of an operator in a graph.

    Attributes:
        place: among all calls.
        flops: those that it takes.
        bytes: of the result.
    """

    place: int
    flops: int
    bytes: int


class Event:
    """A call of an operator that returned new tensors.

    Attributes:
        index: among all calls.
        op: the operator.
        names: of the result.
        flops: those that the call took.
        bytes: of the result.
    """

    def __init__(self, index: int, op: Any, tensors: Sequence[Tensor], spec: Any, flops: int) -> None:
        self.index, self.op, self.spec, self.flops = index, op, spec, flops
        self.names: set[str] = set()
        self._tensors: list[Any] = [weakref.ref(x) for x in tensors]
        self._versions = [version_of(x) for x in tensors]
        self._held: Sequence[Tensor] | None = None
        self.bytes = sum(x.nbytes for x in tensors)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Keep the tensors until the call is over."""
        self._held = tensors

    def result(self) -> list[Tensor] | None:
        """The tensors as they were returned; None if they are gone or were written to."""
        found = [x() for x in self._tensors]
        for x, version in zip(found, self._versions):
            if x is None or version_of(x) != version:
                return None
        return found


def _makes_tensors(op: Any) -> bool:
    """Whether an operator returns new tensors, and the same ones for the same arguments."""
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return all(r.alias_info is None for r in op._schema.returns)


class Log(DispatchMode):
    """Records the operator calls of a function, and chooses the results to save.

    Args:
        policy: that chooses.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy, self.count = policy, 0
        self.events: list[Event] = []
        self._of: dict[int, Event] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _makes_tensors(func):  # such as detach, which autograd may or may not call
            return result
        index, self.count = self.count, self.count + 1
        if self.policy.considers(func):
            leaves, spec = pytree.tree_flatten(result)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if tensors and len(tensors) == len(leaves):
                count = _flops(func)
                flops = count(*args, **(kwargs or {}), out_val=result) if count is not None else 0
                event = Event(index, func, tensors, spec, flops)
                if count is not None:
                    event.hold(tensors)
                self.events.append(event)
                self._of.update((id(x), event) for x in tensors)
        return result

    def named(self, x: Tensor, name: str) -> None:
        """Note that a tensor has a name."""
        event = self._of.get(id(x))
        if event is not None and any(y is x for y in event.result() or ()):
            event.names.add(name)
            event.hold(event.result() or ())

    def __enter__(self) -> Any:
        self._before, _names.log = getattr(_names, "log", None), self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        _names.log = self._before
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def chosen(self) -> tuple[list[Tensor], list[tuple[int, Any, Any, list[torch.device]]]]:
        """The tensors to save, and for each call its index, the operator, and the structure and devices of its result."""
        tensors: list[Tensor] = []
        calls = []
        for event in sorted(self.policy.choose(self.events), key=lambda e: e.index):
            found = event.result()
            if found is not None:
                calls.append((event.index, event.op, event.spec, [x.device for x in found]))
                found = [x.detach() for x in found]
                tensors += map(_on_host, found) if self.policy.on_host else found
        return tensors, calls


class Replay(DispatchMode):
    """Returns saved results instead of calling the operators again.

    Args:
        tensors: the saved ones.
        calls: as `Log.chosen` returns them.
        what: the name of the function in errors.
    """

    def __init__(
        self, tensors: Sequence[Tensor], calls: Sequence[tuple[int, Any, Any, list[torch.device]]], what: str
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        given = iter(tensors)
        self._saved = {i: (op, spec, [(next(given), d) for d in devices]) for i, op, spec, devices in calls}
        self.what, self._count = what, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _makes_tensors(func):
            return func(*args, **(kwargs or {}))
        index, self._count = self._count, self._count + 1
        saved = self._saved.pop(index, None)
        if saved is None:
            return func(*args, **(kwargs or {}))
        op, spec, tensors = saved
        if op is not func:
            raise self.error(f"{func} in place of {op}")
        return pytree.tree_unflatten([x.to(d, non_blocking=True).detach() for x, d in tensors], spec)

    def check(self) -> None:
        """Raise if some calls were not repeated.

        Raises:
            RuntimeError: some were not.
        """
        if self._saved:
            raise self.error("fewer operators")

    def error(self, found: str) -> RuntimeError:
        """The error for a function that called a different operator."""
        return RuntimeError(
            f"checkpoint: {self.what} was called again in the backward, and called {found}. It has to do the same for the same "
            "arguments; without a policy this is not checked"
        )
