"""Rules and replacements acting on the operators themselves: scoped, nested, and undone in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from . import calls, compile_cache, sharding
from .autograd import Mode, apply, differentiated
from .bound import Bound
from .decorate import decorated
from .deferral import always
from .fast_path import picker
from .forward_mode import ForwardMode
from .in_place import InPlace, in_place_kernel, in_place_operator, reading_written
from .internals import PLAIN, is_composite, is_recorded_by_jit, only_autograd
from .names import Chosen, choose
from .registration import Registration, release_numbers, without_overrides
from .replacements import Replacements, replacements
from .rule import Rule, rules
from .schema import Signature, all_dense, is_dense, with_tensors

__all__ = ["Active", "Handle", "active", "install", "override", "unregister"]


class Layer(NamedTuple):
    """What one `install` or one entered `override` adds."""

    rules: tuple[Rule, ...]
    replacements: tuple[Replacements, ...]
    forward: bool
    strong_zero: bool
    named: bool
    forward_modes: tuple[ForwardMode, ...]
    copies_operands: bool


class _Active(NamedTuple):
    """What the kernel of one operator goes by: a rule, or else what only calls with tangents go by."""

    derivative: Bound | None
    defer_to_stock: Callable[..., bool] | None
    forward_mode: ForwardMode | None

    def defers(self, values: Sequence[Any]) -> bool:
        """Whether the call is stock's. With strong zeros only the library of calls can look after what stock gives."""
        stays = self.derivative is not None and self.derivative.strong_zero
        return not stays and self.defer_to_stock is not None and self.defer_to_stock(*values)


class _State(NamedTuple):
    """What follows from all layers together: the table that calls read, and what compiled graphs depend on."""

    table: dict[str, _Active]
    copies_operands: bool
    what: str
    code: str


_layers: list[tuple[Handle, Layer]] = []  # with the handle of each, in the order in which they came
_table: dict[str, _Active] = {}  # replaced as a whole, so that a call reads one state and no mixture
_copies_operands = False  # whether in-place operators copy operands that share memory with what they write to
_operators: dict[str, _Operator] = {}  # every operator that a rule has ever acted on
_in_place: dict[str, _InPlaceOperator] = {}  # every in-place operator with a kernel of ours


@functools.lru_cache(maxsize=128)  # so that entering again costs a look-up
def _resolved(layers: tuple[Layer, ...]) -> _State:
    rules = {rule.name: (rule, layer) for layer in layers for rule in layer.rules}
    forward_modes = {one.name: one for layer in layers for one in layer.forward_modes if one.name not in rules}
    table, what, code = {}, [], []
    for name, one in sorted(forward_modes.items()):
        table[name] = _Active(None, None, one)
        what.append(f"{name} {one.identity}")
        code.append(f"{name} {one.how} {one.fingerprint}")
    for name, (rule, layer) in sorted(rules.items()):
        derivative = rule.derivative_with_forward if layer.forward else rule.derivative
        if layer.strong_zero and derivative.forward is None:
            derivative = rule.derivative_with_strong_zero
        ours = layer.named or derivative.forward is not None
        defer_to_stock = None if ours else rule.defer_to_stock if rule.improves else always
        table[name] = _Active(derivative, defer_to_stock, None)
        how = " forward" * (derivative.forward is not None) + " defers" * (defer_to_stock is not None)
        how += " strong zero" * derivative.strong_zero
        what.append(f"{name} {rule.identity}{how}")
        code.append(f"{name} {rule.fingerprint}{how}")
    copies_operands = any(layer.copies_operands for layer in layers)
    what += ["copies operands"] * copies_operands
    code += ["copies operands"] * copies_operands
    return _State(table, copies_operands, "; ".join(what), compile_cache.digest("; ".join(code)))


def _changed() -> None:
    global _table, _copies_operands
    state = _resolved(tuple(layer for _, layer in _layers))
    _table, _copies_operands = state.table, state.copies_operands
    calls.activate(state.what, functools.partial(_for_calls, state))
    compile_cache.put("rules", state.what, state.code)


def _for_calls(state: _State) -> Iterator[tuple[str, calls.Way]]:
    for name, active in state.table.items():
        derivative = active.derivative
        if derivative is None or derivative.rule.sparse:
            yield name, calls.IN_PYTHON
        else:
            yield name, calls.ByRule(derivative, active.defer_to_stock)
    for name, one in _in_place.items():
        if one.functional in state.table:
            yield name, calls.IN_PYTHON
        elif state.copies_operands:
            yield name, calls.UnlessPlain(tuple(one.signature.tensor_like))


class _Operator:
    """One operator that rules have acted on, and its registration."""

    def __init__(self, rule: Rule | ForwardMode) -> None:
        self.name = rule.name
        # PyTorch's kernel of a composite operator stands at each device's key, before the one for all of them
        self._composite = is_composite(rule.aten)
        key = "AutogradCPU" if self._composite else "Autograd"
        self.registration = Registration(rule.aten, rule.signature, key, at="AutogradCPU")
        self._op = rule.aten
        if not self._composite:
            calls.before(rule.aten)
        self.registration.register(self._kernel(rule.signature))
        if not self._composite:
            calls.attach(rule.aten)
        if (op := in_place_operator(rule)) is not None:
            _register_in_place(InPlace(op, rule.aten))

    def release(self) -> None:
        if not self._composite:
            calls.detach(self._op)
        self.registration.release()

    def _kernel(self, signature: Signature) -> Callable[..., Any]:
        stock, may_take_numbers = self.registration.stock, self.registration.may_take_numbers
        bind, split = signature.bind, signature.split
        places, size, name = signature.tensor_like, len(signature.names), self.name
        tensors = picker(places)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            active = _table.get(name)
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


class _InPlaceOperator:
    """The in-place form of an operator, and its registration."""

    def __init__(self, one: InPlace) -> None:
        self.functional: str = one.functional.name()
        self.signature = Signature(one.op._schema)
        self._op, self._composite = one.op, is_composite(one.op)
        self._registration = Registration(
            one.op, self.signature, "AutogradCPU" if self._composite else "Autograd", at="AutogradCPU"
        )
        if not self._composite:
            calls.before(one.op)
        kernel = in_place_kernel(
            one.functional, one.op, self._registration.stock, self._active, lambda: _copies_operands and _not_off()
        )
        self._registration.register(kernel)
        if not self._composite:
            calls.attach(one.op)

    def _active(self) -> Bound | ForwardMode | None:
        active = _table.get(self.functional)
        if active is None or not _not_off():
            return None
        if active.derivative is None:
            return None if only_autograd() else active.forward_mode
        return active.derivative

    def release(self) -> None:
        if not self._composite:
            calls.detach(self._op)
        self._registration.release()


def _not_off() -> bool:
    return not without_overrides.depth


def _register_in_place(one: InPlace) -> None:
    name = one.op.name()
    if name not in _in_place:
        _in_place[name] = _InPlaceOperator(one)


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


@functools.lru_cache(maxsize=1)
def _reading_written(_rules: int) -> list[InPlace]:
    return reading_written(rules.values())


def _put(handle: Handle, layer: Layer) -> None:
    sharding.ensure_registered()
    with compile_cache.changes():
        acting: tuple[Rule | ForwardMode, ...] = (*layer.rules, *layer.forward_modes)
        for one in acting:
            if one.name not in _operators:
                _operators[one.name] = _Operator(one)
        if layer.copies_operands:
            for form in _reading_written(rules.version):
                _register_in_place(form)
        try:
            for replacement in layer.replacements:
                replacement.put(handle)
            _layers.append((handle, layer))
            _changed()
        except BaseException:
            _drop(handle, layer)
            raise


def _drop(handle: Handle, layer: Layer) -> None:
    with compile_cache.changes():
        _layers[:] = [entry for entry in _layers if entry[0] is not handle]
        for replacement in layer.replacements:
            replacement.drop(handle)
        _changed()


class Handle:
    """Rules, replacements and ways of forward mode that are active until `remove`. Removing twice does nothing."""

    def __init__(
        self,
        chosen: Chosen,
        forward: bool,
        names: Sequence[Any],
        strong_zero: bool = False,
        forward_modes: Sequence[ForwardMode] = (),
        copies_operands: bool = False,
    ) -> None:
        self.names = tuple(names)
        self.rules, self.replacements = chosen
        self.forward_modes = tuple(forward_modes)
        self._layer = Layer(
            self.rules, self.replacements, forward, strong_zero, bool(names), self.forward_modes, copies_operands
        )
        _put(self, self._layer)

    def remove(self) -> None:
        """Take these away; others that were installed before or after stay."""
        _drop(self, self._layer)
        self.rules, self.replacements, self.forward_modes = (), (), ()


def install(*names: Any, forward: bool = False, strong_zero: bool = False) -> Handle:
    """Let rules replace the derivatives of operators until ``handle.remove()``.

    It acts on the whole process, on every thread and on composite callers too (torch.norm reaches
    linalg_vector_norm). Of several rules for one operator the one installed last is active. A tensor computed under a
    rule keeps that rule's backward. What was once active stays registered for the life of the process, as another
    thread may be inside of it; after `Handle.remove` it passes calls on to PyTorch, which without the library of
    csrc/calls costs each a few microseconds. `unregister` takes it away.

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

    Returns:
        What takes them away again.

    Raises:
        KeyError: no rule of that name; the message names the nearest.
        TypeError: something else than a name, a function of torch, an operator of torch.ops, a rule or a replacement.
    """
    every = not names or any(isinstance(name, str) and name == "*" for name in names)
    return Handle(choose(names, strong_zero), forward, names, strong_zero, copies_operands=every)


class override:
    """`install` for the length of a ``with`` block; also a decorator, of functions, generators and coroutines.

    What ``names`` mean is looked up when the block is entered: rules registered since are among them. A decorated
    generator or coroutine is under the rules while its body runs, not while it waits.

    Blocks nest and may end in any order, also after an exception. Under torch.compile enter it outside of the compiled
    function: each set of rules gets its own graph, and entering again finds the graph again.
    """

    def __init__(self, *names: Any, forward: bool = False, strong_zero: bool = False) -> None:
        _refuse_in_graphs()
        choose(names)  # what is misspelt is refused here
        self._names, self._how = names, {"forward": forward, "strong_zero": strong_zero}
        self._handles: list[Handle] = []

    def __enter__(self) -> Handle:
        _refuse_in_graphs()
        self._handles.append(install(*self._names, **self._how))
        return self._handles[-1]

    def __exit__(self, *exception: object) -> None:
        self._handles.pop().remove()

    def __call__(self, function: Any) -> Any:
        return decorated(function, self)


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
    """What acts now, and why.

    Returns:
        For each operator the rule that was installed last, then what gives forward mode, then the replacements.
    """
    found = []
    with compile_cache.lock:
        acting = {rule.name: (handle, rule) for handle, layer in _layers for rule in layer.rules}
        for name, (handle, rule) in acting.items():
            derivative = _table[name].derivative
            found.append(
                Active(name, _why(handle, rule), derivative is not None and derivative.forward is not None, rule)
            )
        for name, acts in _table.items():
            if (one := acts.forward_mode) is not None:
                found.append(Active(name, f"forward mode by {one.how}", False, one))
        for replacement in replacements.values():
            if (holder := replacement.holder) is not None:
                found.append(Active(replacement.name, _why(holder, replacement), False, replacement))
    return found


def _why(handle: Any, acting: Rule | Replacements) -> str:
    if handle.names:
        return "named" if "*" not in [n for n in handle.names if isinstance(n, str)] else "*"
    return "improves " + (", ".join(acting.improves) if isinstance(acting, Rule) else "what PyTorch lacks there")


def unregister() -> None:
    """Give every operator that rules and replacements have acted on, and do not now, back to PyTorch.

    Calls then cost what they cost before the first `override`. Only where no other thread can be inside such a call:
    PyTorch frees a kernel although a thread is in it, and the process crashes. What is active stays.
    """
    with compile_cache.changes():
        for replacement in replacements.values():
            replacement.unregister()
        # what a replacement takes for PyTorch's own kernel may be a rule's
        kept = {*_table, *(name for replacement in replacements.values() for name in replacement.registered)}
        for name in [n for n in _operators if n not in kept]:
            _operators.pop(name).release()
        for name in [n for n, one in _in_place.items() if one.functional not in kept and not _copies_operands]:
            _in_place.pop(name).release()
        if not _operators and not _in_place:
            release_numbers()
