"""Rules and replacements acting on the operators themselves: scoped, nested, and undone in any order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import resolve_name

from . import activation, calls, sharding
from .autograd import Mode, apply, differentiated
from .bound import Bound
from .decorate import decorated
from .fast_path import picker
from .forward_mode import ForwardMode
from .in_place import InPlace, in_place_kernel, in_place_operator, reading_written
from .internals import PLAIN, is_composite, is_recorded_by_jit, only_autograd
from .module_override import ModuleOverride, override_module
from .names import Chosen, choose
from .once import refuse_reload
from .registration import Registration, release_numbers, without_overrides
from .replacements import Replacements, replacements
from .rule import Rule, rules
from .schema import Signature, all_dense, is_dense, with_tensors
from .state import Layer, here, resolved

__all__ = ["SCOPES", "Active", "Handle", "active", "install", "override", "uninstall", "unregister"]

refuse_reload(globals())

SCOPES = ("process", "thread")

_operators: dict[str, _Operator] = {}  # every operator that a rule has ever acted on
_in_place: dict[str, _InPlaceOperator] = {}  # every in-place operator with a kernel of ours


@functools.lru_cache(maxsize=128)  # so that entering again costs a look-up
def _in_calls(layer: Layer, _rules: int) -> calls.CallsLayer:
    """The layer in the library of calls, with its operators registered. ``_rules`` is the version of `rules`."""
    _ensure_registered(layer)
    by_rule: list[calls.Served] = []
    others: list[calls.Served] = []  # where no layer has a rule for the operator
    table = resolved((layer,)).table
    for name, acting in table.items():
        derivative = acting.derivative
        if derivative is None or derivative.rule.sparse:
            way: calls.Way = calls.IN_PYTHON
        else:
            way = calls.ByRule(derivative, acting.defer_to_stock)
        (others if derivative is None else by_rule).append(calls.Served(name, way))
    for name, one in _in_place.items():
        if one.functional in table:
            of_rule = table[one.functional].derivative is not None
            (by_rule if of_rule else others).append(calls.Served(name, calls.IN_PYTHON))
        elif layer.copies_operands:
            others.append(calls.Served(name, calls.UnlessPlain(tuple(one.signature.tensor_like))))
    nested = any(one.name == "nested" for one in layer.replacements)
    return calls.CallsLayer(layer, by_rule, others, nested)


class _Registered:
    """An operator with a kernel of ours at the dispatcher key Autograd.

    `release` takes back a `register` that was interrupted after any of its steps.
    """

    def __init__(self, op: Any, signature: Signature) -> None:
        self.signature, self._op = signature, op
        # PyTorch's kernel of a composite operator stands at each device's key, before the one for all of them
        self._composite = is_composite(op)
        key = "AutogradCPU" if self._composite else "Autograd"
        self.registration = Registration(op, signature, key, at="AutogradCPU")
        self.complete = False

    def register(self) -> None:
        if not self._composite:
            calls.before(self._op)
        self.registration.register(self._kernel())
        if not self._composite:
            calls.attach(self._op)
        self.complete = True

    def release(self) -> None:
        self.complete = False
        if not self._composite:
            calls.detach(self._op)
        self.registration.release()

    def _kernel(self) -> Callable[..., Any]:
        raise NotImplementedError


class _InPlaceOperator(_Registered):
    """The in-place form of an operator."""

    def __init__(self, one: InPlace) -> None:
        super().__init__(one.op, Signature(one.op._schema))
        self.functional: str = one.functional.name()
        self._functional = one.functional

    def _kernel(self) -> Callable[..., Any]:
        return in_place_kernel(
            self._functional,
            self._op,
            self.registration.stock,
            self._active,
            lambda: here().copies_operands and not without_overrides.depth,
        )

    def _active(self) -> Bound | ForwardMode | None:
        active = here().table.get(self.functional)
        if active is None or without_overrides.depth:
            return None
        if active.derivative is None:
            return None if only_autograd() else active.forward_mode
        return active.derivative


class _Operator(_Registered):
    """An operator that rules have acted on."""

    def __init__(self, rule: Rule | ForwardMode) -> None:
        super().__init__(rule.aten, rule.signature)
        self.name = rule.name

    def _kernel(self) -> Callable[..., Any]:
        signature = self.signature
        stock, may_take_numbers = self.registration.stock, self.registration.may_take_numbers
        bind, split = signature.bind, signature.split
        places, size, name = signature.tensor_like, len(signature.names), self.name
        tensors = picker(places)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            active = here().table.get(name)
            if active is None or without_overrides.depth or is_recorded_by_jit():
                return stock(keyset, *args, **kwargs)
            derivative = active.derivative
            if derivative is None:
                assert active.forward_mode is not None
                return active.forward_mode(stock, keyset, args, kwargs)
            values = args if len(args) == size else bind(args, kwargs)
            if derivative.fast_call is not None and only_autograd():
                tracking = torch.is_grad_enabled()
                grad = False if not tracking and derivative.forward is None else _differentiable(values, places)
                if grad is False or grad and not tracking:
                    return derivative.run_below(values)
                if grad:
                    if active.defers(values):
                        return stock(keyset, *args, **kwargs)
                    return derivative.fast_call(values, *tensors(values))
            if derivative.forward is not None and not all_dense(values):
                return stock(keyset, *args, **kwargs)
            if may_take_numbers:
                values = with_tensors(signature, list(values))
            mode = differentiated(signature, values)
            if mode is Mode.PLAIN_NOTHING:
                return derivative.run_below(values)
            if mode is Mode.NOTHING:
                return derivative.redispatch(keyset, values)
            if not derivative.takes(values):
                args, kwargs = split(values)
                return stock(keyset, *args, **kwargs)
            return apply(derivative, keyset, mode, values)

        return kernel


def _differentiable(values: Sequence[Any], places: Sequence[int]) -> bool | None:
    """Whether one requires grad of what are all plain dense tensors, or absent; None if they are something else."""
    grad = False
    for i in places:
        x = values[i]
        if type(x) in PLAIN:
            if x.requires_grad:
                grad = True
            if not is_dense(x):
                return None
        elif x is not None:
            return None
    return grad


def _ensure_registered(layer: Layer) -> None:
    """Put the kernels of a layer in place. They pass calls on until it is active."""
    acting: tuple[Rule | ForwardMode, ...] = (*layer.rules, *layer.forward_modes)
    for one in acting:
        _register(_operators, one.name, functools.partial(_Operator, one))
        if (op := in_place_operator(one)) is not None:
            form = InPlace(op, one.aten)
            _register(_in_place, op.name(), functools.partial(_InPlaceOperator, form))
    if layer.copies_operands:
        for form in reading_written(rules.values()):
            _register(_in_place, form.op.name(), functools.partial(_InPlaceOperator, form))
    for replacement in layer.replacements:
        replacement.ensure_registered()


def _register(table: dict[str, Any], name: str, make: Callable[[], _Registered]) -> None:
    found = table.get(name)
    if found is None or not found.complete:
        if found is not None:  # an interrupt has left it half registered
            found.release()
        table[name] = found = make()
        found.register()


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
    ) -> None:
        self.names = tuple(names)
        self.installed = installed
        # of a handle for forward mode alone nothing else is asked
        every = not forward_modes and (not names or any(isinstance(name, str) and name == "*" for name in names))
        self.layer = Layer(*chosen, forward, strong_zero, bool(names), tuple(forward_modes), copies_operands=every)
        if scope == "thread":
            self.thread = calls.this_thread()
            activation.scoped = True
        with activation.lock:
            sharding.ensure_registered()  # distributed tensors may have been imported since the last entry
            self._in_calls = _in_calls(self.layer, rules.version)  # kept as long as this is
        self.number = self._in_calls.number

    def __repr__(self) -> str:
        names = ", ".join(name if isinstance(name, str) else repr(name) for name in self.names) or "every improvement"
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
    def replacements(self) -> tuple[Replacements, ...]:
        """The replacements that it keeps active."""
        return self.layer.replacements if self.is_active else ()

    @property
    def forward_modes(self) -> tuple[ForwardMode, ...]:
        """What it keeps active for calls with tangents."""
        return self.layer.forward_modes if self.is_active else ()

    def activate(self) -> None:
        """Activate these, as a whole or not at all."""
        activation.activate(self)

    def remove(self) -> None:
        """Take these away; others that were installed before or after stay. Removing twice does nothing."""
        if self.is_active:
            activation.deactivate(self)


def install(*names: Any, forward: bool = False, strong_zero: bool = False, scope: str = "process") -> Handle:
    """Let rules replace the derivatives of operators until ``handle.remove()``.

    It acts on the whole process, on every thread and on composite callers too (torch.norm reaches
    linalg_vector_norm). Of several rules for one operator the one installed last is active. A tensor computed under a
    rule keeps that rule's backward. What was once active stays registered for the life of the process, as another
    thread may be inside of it; after `Handle.remove` it passes calls on to PyTorch, which without the library of
    csrc/calls costs each a few microseconds. `unregister` gives such operators back to PyTorch; `uninstall` removes all
    installs, also those whose handle is lost.

    The replacement "nested" puts the functions of `torch_manualgrad.nested` in the place of calls on PyTorch's nested
    tensors, of both layouts; calls on dense tensors do not meet it. Values then agree with PyTorch's to rounding. What PyTorch gives
    as a view (select, split, chunk, transpose, values) may be a copy: write to the tensor itself. A jagged result refuses
    to be changed in place. In-place operators and inference mode, which has no autograd, stay PyTorch's. What cannot be
    carried raises, and stands in ``torch_manualgrad.nested.operators.LIMITS``.

    Args:
        names: functions ("linalg.svd", "det", ``torch.cdist``, ``torch.Tensor.norm``), which mean every operator with a
            rule that they reach; operators ("aten::linalg_vector_norm", without an overload: all overloads that have a
            rule; ``torch.ops.aten.linalg_svd``); `Rule` or `Replacements` objects; "nested" is a replacement. None given:
            every rule that improves on stock, and every replacement; a rule then leaves calls to PyTorch that PyTorch
            differentiates rightly in every order, and faster (`Rule.defer_to_stock`). "*": all rules, and every
            replacement. What this torch lacks (``mg.rules.absent``) is left out, and is an error where it is all that a
            name means.
        forward: let a rule that has a replacement primal use it; else forward values are bitwise identical to PyTorch's.
        strong_zero: a cotangent or tangent of exactly 0 gives exactly 0 in every rule, whatever it is multiplied by: the
            gradient through a branch that `torch.where` did not take, or that a mask removed, is 0 and not nan. It takes
            no part in sums of products either, as in those of matrices. Where the derivative of an elementwise operator
            is exactly 0, it also hides a cotangent of nan. In decompositions and solutions a matrix is one thing: its
            gradient is 0 if all its cotangents are. Without names, all rules that have zeros to keep are active, too.
            On CUDA their backward waits for the device, to see whether all is finite. Where a replacement primal is used, for
            sparse tensors, under compiled autograd and, but for elementwise rules, for batches of gradients
            (``is_grads_batched=True``) it has no effect.
        scope: "process", or "thread": only calls of this thread, on top of what is active for the process; other threads
            keep what they have. A backward follows the thread scope in which its graph was built, also after the block and
            on whichever thread it runs. It needs the library of csrc/calls.

    Returns:
        What takes them away again.

    Raises:
        KeyError: no rule of that name; the message names the nearest.
        TypeError: something else than a name, a function of torch, an operator of torch.ops, a rule or a replacement;
            ``forward`` or ``strong_zero`` is not a bool.
        ValueError: there is no such ``scope``.
        RuntimeError: ``scope="thread"`` without the library of csrc/calls.
    """
    _check(forward, strong_zero, scope)
    handle = Handle(choose(names, strong_zero), forward, names, strong_zero, scope=scope, installed=True)
    handle.activate()
    return handle


def uninstall() -> None:
    """Remove everything that `install` has activated, also where its handle is lost. Blocks that are entered stay.

    What `torch_manualgrad.forward_ad.enable` and ``decompositions`` activated without a ``with`` block is removed, too.
    """
    for handle in activation.truth.entries:
        if handle.installed:
            handle.remove()


def _check(forward: Any, strong_zero: Any, scope: Any) -> None:
    for name, value in (("forward", forward), ("strong_zero", strong_zero)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(map(repr, SCOPES))}, got {scope!r}")
    if scope == "thread" and not (calls.loaded() and activation.in_library):
        raise RuntimeError(
            'scope="thread" needs the compiled calls (csrc/calls), which are not loaded here: `manualgrad env` says why'
        )


class override(activation.Block):  # type: ignore[misc]
    """`install` for the length of a ``with`` block; also a decorator, of functions, generators and coroutines.

    What ``names`` mean is looked up when the block is entered: rules registered since are among them. A decorated
    generator or coroutine is under the rules while its body runs, not while it waits.

    Blocks nest and may end in any order, also after an exception. A block is entered and left as a whole, whatever signal
    arrives meanwhile; without the library of csrc/calls, docs/replacing.md says what an interrupt may leave. Under
    torch.compile enter it outside of the compiled function: each set of rules gets its own graph, and entering again finds
    the graph again.
    """

    def __init__(self, *names: Any, forward: bool = False, strong_zero: bool = False, scope: str = "process") -> None:
        _refuse_in_graphs()
        _check(forward, strong_zero, scope)
        if len(names) == 1 and inspect.isroutine(names[0]) and not resolve_name(names[0]):
            raise TypeError(f"a decorator needs its parentheses, @override(), to be applied to {names[0]!r}")
        choose(names)  # what is misspelt is refused here
        self._names, self._forward, self._strong_zero, self._scope = names, forward, strong_zero, scope
        self._entered: list[Handle] = []

    def _prepare(self) -> Handle:
        _refuse_in_graphs()
        chosen = choose(self._names, self._strong_zero)
        return Handle(chosen, self._forward, self._names, self._strong_zero, scope=self._scope)

    def _not_entered(self) -> None:
        raise RuntimeError(
            "this override was left more often than it was entered" + " on this thread" * (self._scope == "thread")
        )

    def again(self) -> override:
        """A new block of the same rules."""
        return override(*self._names, forward=self._forward, strong_zero=self._strong_zero, scope=self._scope)

    def __call__(self, function: Any) -> Any:
        return decorated(function, self.again)

    def __reduce__(self) -> Any:
        how: dict[str, Any] = {"forward": self._forward, "strong_zero": self._strong_zero, "scope": self._scope}
        return functools.partial(override, *self._names, **how), ()

    @staticmethod
    def module(
        module: torch.nn.Module, *names: Any, forward: bool = False, strong_zero: bool = False
    ) -> ModuleOverride:
        """Rules for the calls of one module, and for their backwards, until ``remove()`` or for a ``with`` block.

        Other modules keep what they have, also where they call the same operators, and so do other threads. The backward
        follows whichever thread runs it. Copies of the module have the rules, too.

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
    """A rule, a replacement, or what gives an operator forward mode, that acts now.

    Attributes:
        name: the operator, or the replacement.
        why: "named" in the override; "*"; or "improves values, speed" under an override without names; "forward mode by
            decomposition", or by a rule or by transposition.
        forward: whether a forward of the rule's own is in the place of PyTorch's.
        acting: the `Rule`, `Replacements` or `ForwardMode` itself.
    """

    name: str
    why: str
    forward: bool
    acting: Rule | Replacements | ForwardMode = field(repr=False)


def active() -> list[Active]:
    """What acts now on this thread, and why.

    Kernels stay registered after an override, and pass calls on: these do not act, and are not listed. What stays active
    after an `install` is.

    Returns:
        For each operator the rule that was installed last, then what gives forward mode, then the replacements.
    """
    state = here()
    # of a thread that follows the scope of a graph, nobody knows who entered it
    thread = calls.this_thread() if activation.scoped else 0
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
    """Give every operator whose rules and replacements are no longer active back to PyTorch.

    It deactivates nothing: rules that are active stay active, and their kernels registered. `active` lists them,
    `uninstall` removes those of `install`. Calls of the other operators then cost what they cost before the first
    `override`.

    Only where no other thread can be inside such a call: PyTorch frees a kernel although a thread is in it, and the process
    crashes. A graph that was built under ``scope="thread"`` finds no rules in its backward any more, but those that it has.
    """
    with activation.lock:
        layers = [handle.layer for handle in activation.truth.entries if not handle.abandoned]
        held = {replacement for layer in layers for replacement in layer.replacements}
        for replacement in replacements.values():
            if replacement not in held:
                replacement.unregister()
        # what a replacement takes for PyTorch's own kernel may be a rule's
        kept = {one.name for layer in layers for one in (*layer.rules, *layer.forward_modes)}
        kept |= {name for replacement in replacements.values() for name in replacement.registered}
        copies = any(layer.copies_operands for layer in layers)
        _in_calls.cache_clear()
        for table, unused in (
            (_operators, [n for n in _operators if n not in kept]),
            (_in_place, [n for n, one in _in_place.items() if one.functional not in kept and not copies]),
        ):
            for name in unused:
                table[name].release()
                table.pop(name)
        if not _operators and not _in_place:
            release_numbers()
