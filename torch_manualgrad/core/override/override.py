"""`override` and `install`: activate rules and replacements, for a block, a thread, a module or the process."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import resolve_name

from .. import activation
from ..engine import sharding
from ..libraries import calls_library
from ..once import refuse_reload
from ..rule.definition import Rule, rules
from . import compiled_calls, memory as _memory  # noqa: F401  # it depends on the active handles
from .decorate import decorated
from .forward_mode import ForwardMode
from .kernels import in_calls, release_all_but
from .names import Chosen, choose
from .replacements import Replacements, replacements
from .state import Layer, Replacing, here

__all__ = [
    "SCOPES",
    "Active",
    "Handle",
    "ModuleOverride",
    "active",
    "active_rules",
    "install",
    "override",
    "override_module",
    "under_active_rules",
    "uninstall",
    "unregister",
]


refuse_reload(globals())

SCOPES = ("process", "thread")


class Handle(activation.ActiveHandle):
    """Rules, replacements and ways of forward mode that are active from `activate` until `remove`."""

    def __init__(
        self,
        chosen: Chosen,
        forward: bool,
        names: Sequence[Any],
        strong_zero: bool = False,
        forward_modes: Sequence[ForwardMode] = (),
        scope: str = "process",
        installed: bool = False,
        memory: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.installed = installed
        # a handle only for forward mode changes nothing else
        every = not forward_modes and (not names or any(isinstance(name, str) and name == "*" for name in names))
        self.layer = Layer(*chosen, forward, strong_zero, bool(names), tuple(forward_modes), copies_operands=every)
        if scope == "thread":
            self.thread = compiled_calls.this_thread()
            activation.scoped = True
        if memory:
            self.packs_on = threading.get_ident()
        with activation.lock:
            sharding.ensure_registered()  # distributed tensors may have been imported since the last entry
            self._in_calls = in_calls(self.layer, rules.version)  # kept as long as this handle
        self.number = self._in_calls.number

    def __repr__(self) -> str:
        names = ", ".join(name if isinstance(name, str) else repr(name) for name in self.names)
        if self.layer.forward_modes and not self.layer.rules:
            names = f"forward mode of {len(self.layer.forward_modes)} operators"
        names = names or "every improvement"
        scope = "one thread" if self.thread else "the process"
        return f"<{names} for {scope}: {'active' if self.is_active else 'removed'}>"

    @property
    def is_active(self) -> bool:
        return any(one is self for one in activation.truth.entries) and not self.abandoned

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that it keeps active."""
        return self.layer.rules if self.is_active else ()

    @property
    def replacements(self) -> tuple[Replacing, ...]:
        """The replacements that it keeps active."""
        return self.layer.replacements if self.is_active else ()

    @property
    def forward_modes(self) -> tuple[ForwardMode, ...]:
        """The ways of forward mode that it keeps active."""
        return self.layer.forward_modes if self.is_active else ()

    def activate(self) -> None:
        """Activate these, all or none."""
        activation.activate(self)

    def remove(self) -> None:
        """Deactivate these; others, installed before or after, stay. Removing twice does nothing."""
        if self.is_active:
            activation.deactivate(self)


def install(
    *names: Any, forward: bool = False, strong_zero: bool = False, scope: str = "process", memory: bool = False
) -> Handle:
    """Let rules replace the derivatives of operators until ``handle.remove()``.

    It acts on the whole process, on every thread and on composite callers too (torch.norm reaches
    linalg_vector_norm). Of several rules for one operator the last one installed is active. A tensor computed under a
    rule keeps that rule's backward. A registered kernel stays for the life of the process, because a call may be in
    flight in another thread. After `Handle.remove` it forwards calls to PyTorch, which costs a few microseconds per
    call without the library of csrc/calls. `unregister` gives such operators back to PyTorch. `uninstall` removes all
    installs, including those whose handle is lost.

    The replacement "nested" runs the functions of `torch_manualgrad.nested` instead of PyTorch's operators on PyTorch's
    nested tensors of both layouts. Calls on dense tensors are not affected. Values then agree with PyTorch's to
    rounding. Results that are views in PyTorch (select, split, chunk, transpose, values) may be copies: write to the
    tensor itself. A jagged result cannot be changed in place. In-place operators and inference mode, which has no
    autograd, stay PyTorch's. Unsupported calls raise; ``torch_manualgrad.nested.operators.LIMITS`` lists them.

    Args:
        names: functions ("linalg.svd", "det", ``torch.cdist``, ``torch.Tensor.norm``), which select every operator with
            a rule that they reach; operators ("aten::linalg_vector_norm", without an overload: all overloads with a
            rule; ``torch.ops.aten.linalg_svd``); `Rule` or `Replacements` objects; "nested" is a replacement. None
            given: every rule that improves on stock, and every replacement; a rule then leaves calls to PyTorch for
            which PyTorch is right in every order, and faster (`Rule.defer_to_stock`). "*": all rules, and every
            replacement. Operators that this torch lacks (``mg.rules.absent``) are skipped; a name with no other
            operators is an error.
        forward: use the replacement primals of the rules that have one. Otherwise forward values are bitwise identical
            to PyTorch's.
        strong_zero: a cotangent or tangent of exactly 0 gives exactly 0 in every rule, whatever it is multiplied by:
            the gradient through a branch that `torch.where` did not take, or that a mask removed, is 0 and not nan.
            Sums of products, for example matrix products, skip such terms. Where the derivative of an elementwise
            operator is exactly 0, the result is 0 even for a cotangent of nan. Decompositions and solutions treat a
            matrix as a whole: its gradient is 0 if all its cotangents are. Without names, all rules with strong zeros
            are active, too. On CUDA their backward synchronizes with the device, to check whether all values are
            finite. It has no effect with a replacement primal, for sparse tensors, under compiled autograd and, except
            for elementwise rules, for batches of gradients (``is_grads_batched=True``).
        scope: "process", or "thread": only calls of this thread, in addition to the rules of the process; other threads
            keep theirs. A backward uses the thread scope in which its graph was built, even after the block and on any
            thread. It needs the library of csrc/calls.
        memory: save less for the backward. The backward recomputes the results of elementwise functions and
            normalizations from tensors that the graph saves in any case; gradients stay bitwise identical. It acts on
            calls of the thread that enters the block. It costs 3 to 11 percent of the time of a training step. It has
            no effect inside of ``torch.utils.checkpoint`` and of other hooks on saved tensors, inside of torch.func's
            transforms and in compiled graphs. docs/memory.md lists the operators.

    Returns:
        The handle that removes them again.

    Raises:
        KeyError: no rule of that name; the message suggests the nearest.
        TypeError: an entry of ``names`` is not a name, a function of torch, an operator of torch.ops, a rule or a
            replacement; ``forward``, ``strong_zero`` or ``memory`` is not a bool.
        ValueError: an unknown ``scope``.
        RuntimeError: ``scope="thread"`` without the library of csrc/calls.
    """
    _check(forward, strong_zero, scope, memory)
    chosen = choose(names, strong_zero)
    handle = Handle(chosen, forward, names, strong_zero, scope=scope, installed=True, memory=memory)
    handle.activate()
    return handle


def uninstall() -> None:
    """Remove everything that `install` activated, even if its handle is lost. Blocks that are entered stay active.

    This includes `torch_manualgrad.forward_ad.enable` and ``decompositions`` without a ``with`` block.
    """
    for handle in activation.truth.entries:
        if handle.installed:
            handle.remove()


def _check(forward: Any, strong_zero: Any, scope: Any, memory: Any) -> None:
    for name, value in (("forward", forward), ("strong_zero", strong_zero), ("memory", memory)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(map(repr, SCOPES))}, got {scope!r}")
    if scope == "thread" and not (compiled_calls.loaded() and activation.in_library):
        raise RuntimeError(
            'scope="thread" needs the compiled calls (csrc/calls), which are not loaded here: `manualgrad env` says why'
        )


class override(activation.Block):  # type: ignore[misc]
    """`install` for a ``with`` block; also a decorator of functions, generators and coroutines.

    ``names`` are resolved when the block is entered, so they include rules registered since. The rules apply to a
    decorated generator or coroutine while its body runs, not while it waits.

    Blocks nest and may end in any order, also after an exception. Entering and leaving is atomic, even if a signal
    arrives; docs/replacing.md describes interrupts without the library of csrc/calls. Under torch.compile, enter the
    block outside of the compiled function. Each set of rules has its own graph, which is reused for the same rules.
    """

    def __init__(
        self,
        *names: Any,
        forward: bool = False,
        strong_zero: bool = False,
        scope: str = "process",
        memory: bool = False,
    ) -> None:
        _refuse_in_graphs()
        _check(forward, strong_zero, scope, memory)
        if len(names) == 1 and inspect.isroutine(names[0]) and not resolve_name(names[0]):
            raise TypeError(f"a decorator needs its parentheses, @override(), to be applied to {names[0]!r}")
        choose(names)  # raises for misspelt names
        self._names, self._forward, self._strong_zero, self._scope = names, forward, strong_zero, scope
        self._memory = memory
        self._entered: list[Handle] = []

    def _prepare(self) -> Handle:
        _refuse_in_graphs()
        chosen = choose(self._names, self._strong_zero)
        return Handle(chosen, self._forward, self._names, self._strong_zero, scope=self._scope, memory=self._memory)

    def _not_entered(self) -> None:
        raise RuntimeError(
            "this override was left more often than it was entered" + " on this thread" * (self._scope == "thread")
        )

    def again(self) -> override:
        """A new block with the same rules."""
        return override(*self._names, **self._how)

    def __call__(self, function: Any) -> Any:
        return decorated(function, self.again)

    def __reduce__(self) -> Any:
        return functools.partial(override, *self._names, **self._how), ()

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "forward": self._forward,
            "strong_zero": self._strong_zero,
            "scope": self._scope,
            "memory": self._memory,
        }

    @staticmethod
    def module(
        module: torch.nn.Module, *names: Any, forward: bool = False, strong_zero: bool = False
    ) -> ModuleOverride:
        """Activate rules for the calls of one module and their backwards, until ``remove()`` or for a ``with`` block.

        Other modules keep their derivatives, even for the same operators, and so do other threads. The rules apply to
        the backward on whichever thread it runs. Copies of the module have the rules, too.

        Args:
            module: the module; its ``forward`` is replaced on the instance.
            names, forward, strong_zero: as for `install`.

        Raises:
            RuntimeError: there is no library of csrc/calls; see ``scope`` of `install`.
        """
        return override_module(module, override(*names, forward=forward, strong_zero=strong_zero, scope="thread"))


def _refuse_in_graphs() -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError("override() cannot be entered inside a compiled function; enter it around the call")


@dataclass(frozen=True)
class Active:
    """An active rule, replacement, or way of forward mode.

    Attributes:
        name: the operator, or the replacement.
        why: "named" in the override; "*"; or "improves values, speed" under an override without names; "forward mode by
            decomposition", or by a rule or by transposition.
        forward: whether the rule's own forward replaces PyTorch's.
        acting: the `Rule`, `Replacements` or `ForwardMode` itself.
    """

    name: str
    why: str
    forward: bool
    acting: Rule | Replacements | ForwardMode = field(repr=False)


def active() -> list[Active]:
    """List the rules, ways of forward mode and replacements that are active on this thread, and why.

    Kernels stay registered after an override and forward calls to PyTorch. These are not active, and are not listed.

    Returns:
        For each operator the last rule installed, then the ways of forward mode, then the replacements.
    """
    state = here()
    # a thread in the scope of a graph has no handle
    thread = compiled_calls.this_thread() if activation.scoped else 0
    entries = [h for h in activation.truth.entries if not h.abandoned]
    handles = [h for h in entries if not h.thread] + [h for h in entries if h.thread and h.thread == thread]
    found = []
    for name, acts in state.table.items():
        if acts.derivative is not None:
            rule = acts.derivative.rule
            holder = next((h for h in reversed(handles) if rule in h.layer.rules), None)
            found.append(Active(name, _why(holder, rule), acts.derivative.forward is not None, rule))
    for name, acts in state.table.items():
        if (one := acts.forward_mode) is not None:
            found.append(Active(name, f"forward mode by {one.how}", False, one))
    for replacement in state.replacements:
        holder = next((h for h in reversed(handles) if replacement in h.layer.replacements), None)
        found.append(Active(replacement.name, _why(holder, replacement), False, replacement))
    return found


def _why(handle: Handle | None, acting: Rule | Replacements) -> str:
    if handle is None:
        return "the scope of the graph"
    if handle.names:
        return "named" if "*" not in [n for n in handle.names if isinstance(n, str)] else "*"
    return "improves " + (", ".join(acting.improves) if isinstance(acting, Rule) else "what PyTorch lacks there")


def unregister() -> None:
    """Unregister our kernels of every operator without active rules and replacements.

    It deactivates nothing: rules that are active stay active, and their kernels registered. `active` lists them,
    `uninstall` removes those of `install`. Calls of the other operators then cost the same as before the first
    `override`.

    Call it only while no other thread is inside such a call: PyTorch frees a kernel even if a thread is in it, and the
    process crashes. The backward of a graph built under ``scope="thread"`` then finds no rules except its own.
    """
    with activation.lock:
        layers = [handle.layer for handle in activation.truth.entries if not handle.abandoned]
        held = {replacement for layer in layers for replacement in layer.replacements}
        for replacement in replacements.values():
            if replacement not in held:
                replacement.unregister()
        # the kernel that a replacement calls as PyTorch's own may belong to a rule
        kept = {one.name for layer in layers for one in (*layer.rules, *layer.forward_modes)}
        kept |= {name for replacement in replacements.values() for name in replacement.registered}
        copies = any(layer.copies_operands for layer in layers)
        release_all_but(kept, in_place=copies)


# -- for derivatives that the package computes itself --------------------------------------------------------------------------


class _Beyond(override):
    """An override with the improvements for those operators that no active rule covers."""

    def __init__(self, chosen: Chosen) -> None:
        super().__init__(scope="process" if calls_library is None else "thread")
        self._chosen = chosen

    def _prepare(self) -> Handle:
        return Handle(self._chosen, False, (), scope=self._scope)


@functools.lru_cache(maxsize=64)
def _chosen_beyond(_active: str, improvements: Chosen) -> Chosen:
    """The improvements beyond the derivatives that are active here; ``_active`` is their text in `State`."""
    state = here()
    return Chosen(
        tuple(r for r in improvements.rules if r.name not in state.table or state.table[r.name].derivative is None),
        tuple(one for one in improvements.replacements if one not in state.replacements),
    )


def active_rules() -> Any:
    """Context manager: the active rules, and those that improve on PyTorch for operators without an active one.

    Graphs call operators whose derivative PyTorch may lack, where the program itself does not.
    """
    chosen = _chosen_beyond(here().what, choose(()))
    return _Beyond(chosen) if any(chosen) else nullcontext()


def under_active_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that the package differentiates itself: its graph has the derivatives of `active_rules`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with active_rules():
            return function(*args, **kwargs)

    return call


# -- an override of one module: its calls, and their backwards, wherever the module is used ---------------------------------


class _Forward:
    """Replaces ``module.forward``. It is copied and pickled with the module."""

    def __init__(self, module: torch.nn.Module, before: Any, block: override) -> None:
        self.module, self.before, self.block = module, before, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chain = [one for one in _chain(self) if isinstance(one, _Forward)]
        return self._call([one.block for one in chain], chain[-1].before, args, kwargs)

    def _call(self, blocks: list[override], own: Any, args: Any, kwargs: Any) -> Any:
        if blocks:  # in reverse order: the last request is innermost
            with blocks.pop().again():
                return self._call(blocks, own, args, kwargs)
        if own is not None:
            return own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class ModuleOverride:
    """The handle of ``override.module``: its rules are active until `remove`, or until the ``with`` block ends."""

    def __init__(self, module: torch.nn.Module, block: override) -> None:
        self.module = module
        self._forward = _Forward(module, module.__dict__.get("forward"), block)
        module.__dict__["forward"] = self._forward

    def __repr__(self) -> str:
        now = self.module.__dict__.get("forward")
        state = "active" if any(one is self._forward for one in _chain(now)) else "removed"
        return f"<an override of {type(self.module).__name__}: {state}>"

    def remove(self) -> None:
        """Restore the module's own forward. Removing twice does nothing.

        Raises:
            RuntimeError: another override or patch of the module came later, and must be removed first.
        """
        now = self.module.__dict__.get("forward")
        if now is self._forward:
            if self._forward.before is None:
                del self.module.__dict__["forward"]
            else:
                self.module.__dict__["forward"] = self._forward.before
        elif any(one is self._forward for one in _chain(now)):
            raise RuntimeError("the forward of this module was replaced again since; undo that first")

    def __enter__(self) -> ModuleOverride:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _chain(forward: Any) -> list[Any]:
    """This forward, followed by the forwards that each has replaced."""
    found = []
    while forward is not None:
        found.append(forward)
        forward = forward.before if isinstance(forward, _Forward) else None
    return found


def override_module(module: Any, block: override) -> ModuleOverride:
    """Enter ``block`` around each call of ``module``."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"override.module takes a torch.nn.Module, got {module!r}")
    return ModuleOverride(module, block)
