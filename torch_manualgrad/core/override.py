"""Rules and families acting on the operators themselves: scoped, nested, and undone in any order."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import in_force
from .autograd import Mode, apply, differentiated
from .families import Family, families
from .internals import PLAIN, below_autograd, only_autograd, release
from .rule import Bound, Rule, rules
from .schema import tensors_in, with_tensors

__all__ = ["Handle", "install", "override"]


class _Overridden:
    """One operator while rules act on it: the registration, and the rules in the order in which they came."""

    def __init__(self, rule: Rule) -> None:
        self.name = rule.name
        self.entries: list[tuple[object, Rule, Bound, bool]] = []
        self.derivative: Bound | None = None
        self.leaves: Callable[..., bool] | None = None
        self.operator = rule.aten
        self.signature = rule.signature
        self.may_take_numbers = len(rule.signature.tensor_like) > 1  # as in x * 2
        self.stock = torch.library.get_kernel(rule.aten, "AutogradCPU")
        namespace, _, name = rule.name.partition("::")
        self.library = torch.library.Library(namespace, "IMPL")
        with warnings.catch_warnings():  # PyTorch says once a process that a kernel is overridden: that is the point
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            self.library.impl(name, self._kernel(), "Autograd", with_keyset=True, allow_override=True)

    def put(self, key: object, rule: Rule, forward: bool, named: bool) -> None:
        derivative = rule.derivative_with_forward if forward else rule.derivative
        self.entries.append((key, rule, derivative, named))
        self._changed()

    def drop(self, key: object) -> None:
        self.entries = [e for e in self.entries if e[0] is not key]
        self._changed()

    def _changed(self) -> None:
        if self.entries:
            _, rule, self.derivative, named = self.entries[-1]
            self.leaves = None if named or self.derivative.forward is not None else rule.leaves
            forward = " forward" * (self.derivative is not rule.derivative)
            in_force.put(self.name, rule.identity + forward, rule.fingerprint + forward)
        else:
            self.derivative = None
            in_force.put(self.name, "")

    def _kernel(self) -> Any:
        signature, bind = self.signature, self.signature.bind
        may_take_numbers, places, size = self.may_take_numbers, signature.tensor_like, len(signature.names)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            derivative = self.derivative
            if derivative is None:
                return self.stock.call_boxed(keyset, *args, **kwargs)
            if derivative.short_call is not None and only_autograd():
                recording = torch.is_grad_enabled()
                if not recording and derivative.forward is None:
                    with below_autograd():
                        return derivative.run(*args, **kwargs)
                values = args if len(args) == size else bind(args, kwargs)
                grad = _plain_and_differentiable(values, places)
                if grad is False or grad and not recording:
                    with below_autograd():
                        return derivative.run(*args, **kwargs)
                if grad:
                    leaves = self.leaves  # once: another thread may be changing what is in force
                    if leaves is not None and leaves(*values):
                        return self.stock.call_boxed(keyset, *args, **kwargs)
                    return derivative.short_call(args, kwargs, values)
            if derivative.forward is not None and not _all_dense((*args, *kwargs.values())):
                return self.stock.call_boxed(keyset, *args, **kwargs)
            values = bind(args, kwargs)
            if may_take_numbers:
                args, kwargs = signature.split(with_tensors(signature, values))
            mode = differentiated(signature, values)
            if mode is Mode.PLAIN_NOTHING:
                with below_autograd():
                    return derivative.run(*args, **kwargs)
            if mode is Mode.NOTHING:
                return derivative.redispatch(keyset, values)
            if not _all_dense(values):
                return self.stock.call_boxed(keyset, *args, **kwargs)
            return apply(derivative, keyset, mode, values, args, kwargs)

        return kernel


def _plain_and_differentiable(values: Sequence[Any], places: Sequence[int]) -> bool | None:
    """Whether one requires grad of what are all plain dense tensors, or absent; None if they are something else."""
    grad = False
    for i in places:
        x = values[i]
        if type(x) in PLAIN:
            if x.requires_grad:
                grad = True
            if not _dense(x):
                return None
        elif x is not None:
            return None
    return grad


def _dense(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def _all_dense(values: Sequence[Any]) -> bool:
    """What the formulas are for: sparse and nested tensors keep PyTorch's derivatives."""
    return all(_dense(x) for x in tensors_in(values))


_overridden: dict[str, _Overridden] = {}


def _put(key: object, chosen: Sequence[Rule | Family], forward: bool, named: bool) -> None:
    with in_force.changes():
        try:
            for rule in chosen:
                if isinstance(rule, Family):
                    rule.put(key)
                    continue
                if rule.name not in _overridden:
                    _overridden[rule.name] = _Overridden(rule)
                _overridden[rule.name].put(key, rule, forward, named)
        except BaseException:
            _drop(key, chosen)
            raise


def _drop(key: object, chosen: Sequence[Rule | Family]) -> None:
    with in_force.changes():
        for rule in chosen:
            if isinstance(rule, Family):
                rule.drop(key)
                continue
            one = _overridden.get(rule.name)
            if one is None:
                continue
            one.drop(key)
        _release()


def _release() -> None:
    """Take away registrations that have no rule left.

    Not while other threads run: one may be inside the kernel, which the dispatcher frees at once. Until then the kernel
    passes everything on to PyTorch's. Except where it may be given numbers, which no Python kernel receives under
    torch.func.
    """
    alone = threading.active_count() == 1
    for one in [o for o in _overridden.values() if not o.entries and (alone or o.may_take_numbers)]:
        release(one.library)
        del _overridden[one.name]


Chosen = list[Rule | Family]


def _choose(names: Sequence[str | Rule | Any]) -> Chosen:
    """What is meant by ``names``; none: every rule that improves on stock, and all families; "*": all."""
    if not names:
        return [r for r in rules.values() if r.improves] + [*families.values()]
    chosen: dict[str, Rule | Family] = {}
    for name in names:
        found: Sequence[Rule | Family]
        if isinstance(name, (Rule, Family)):
            found = [name]
        elif name == "*":
            found = [*rules.values(), *families.values()]
        elif isinstance(name, str) and name in families:
            found = [families[name]]
        else:
            if not isinstance(name, str):
                given, name = name, getattr(name, "_name", None) or getattr(name, "_qualified_op_name", None)
                if not isinstance(name, str):
                    raise TypeError(f"override takes names, operators of torch.ops and rules, got {given!r}")
            full = name if "::" in name else f"aten::{name}"
            full = full.removesuffix(".default")
            found = [rules[full]] if full in rules else [r for n, r in rules.items() if n.startswith(f"{full}.")]
            if not found:
                raise KeyError(rules.missing(full))
        chosen |= {r.name: r for r in found}
    return list(chosen.values())


class Handle:
    """Rules and families in force until `remove`. Removing twice does nothing."""

    def __init__(self, chosen: Sequence[Rule | Family], forward: bool, named: bool) -> None:
        self.rules = tuple(c for c in chosen if isinstance(c, Rule))
        self.families = tuple(c for c in chosen if isinstance(c, Family))
        _put(self, chosen, forward, named)

    def remove(self) -> None:
        """Take these away; others that were installed before or after stay."""
        _drop(self, (*self.rules, *self.families))
        self.rules, self.families = (), ()


def install(*names: Any, forward: bool = False) -> Handle:
    """Let rules replace the derivatives of operators until ``handle.remove()``.

    Args:
        names: operators ("aten::linalg_vector_norm", or without "aten::"; without an overload: all overloads that have
            a rule), ``OpOverload``, `Rule` or `Family` objects; "nested" is a family. None given: every rule that improves
            on stock, and every family; a rule then leaves calls to PyTorch that it differentiates rightly in every
            order, and faster (`Rule.leaves`). "*": all rules, and every family.
        forward: let a rule that has a forward of its own use it; else forward values are PyTorch's, to the bit.

    It acts on the whole process, on every thread and on composite callers too (torch.norm reaches
    linalg_vector_norm). Of several rules for one operator the one installed last is in force. A tensor computed under a
    rule keeps that rule's backward. While other threads live, what is removed stays registered and passes calls on to
    PyTorch, which costs them a few microseconds.

    The family "nested" puts the functions of `torch_manualgrad.nested` in the place of calls on PyTorch's nested tensors, of
    both layouts; calls on dense tensors do not meet it. Values then agree with PyTorch's to rounding. What PyTorch gives
    as a view (select, split, chunk, transpose, values) may be a copy: write to the tensor itself. A jagged result refuses
    to be changed in place. In-place operators and inference mode, which has no autograd, stay PyTorch's. What cannot be
    carried raises, and stands in ``torch_manualgrad.nested.operators.LIMITS``.

    Raises:
        KeyError: no rule of that name; the message names the nearest.
        TypeError: something else than a name, an operator of torch.ops, a rule or a family.
    """
    return Handle(_choose(names), forward, bool(names))


class override:
    """`install` for the length of a ``with`` block; also a decorator.

    Blocks nest and may end in any order, also after an exception. Under torch.compile enter it outside of the compiled
    function: each set of rules gets its own graph, and entering again finds the graph again.
    """

    def __init__(self, *names: Any, forward: bool = False) -> None:
        self._chosen = _choose(names)
        self._forward, self._named = forward, bool(names)
        self._handles: list[Handle] = []

    def __enter__(self) -> Handle:
        if torch.compiler.is_compiling():
            raise RuntimeError("override() cannot be entered inside a compiled function; enter it around the call")
        self._handles.append(Handle(self._chosen, self._forward, self._named))
        return self._handles[-1]

    def __exit__(self, *exception: object) -> None:
        self._handles.pop().remove()

    def __call__(self, function: Any) -> Any:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inside
