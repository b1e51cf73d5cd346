"""Turns a `Rule` into a `Derivative`. The names of a formula's parameters select the values of a call."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..engine.node import FACTS, functions, picker
from ..engine.strong_arithmetic import StrongArithmetic, linear_among
from ..engine.transpose import Transposed, transposing
from ..internals import (
    are_finite,
    at_next_level,
    below_autograd,
    constants_unwritten,
    transforms_usable,
    values_readable,
)
from ..libraries import refuse_recording
from ..op.implementation import check_count, check_gradient_of_rule, check_tangents, is_foreign, location_of
from ..schema import all_dense, blocksize, flatten, is_differentiable, tensors_in, unflatten
from .definition import Rule, saved_names
from .formulas import EMPTY, ArgumentBinding, Formula, parameters, sources

__all__ = [
    "RuleDerivative",
    "StrongRuleDerivative",
    "derivative_of",
]


class _Plan:
    """One formula, and the position of each of its arguments in the tuple of known values.

    Attributes:
        factors: the positions of the cotangents or tangents that it uses, if these are not all of them.
    """

    def __init__(
        self, rule: Rule, what: str, function: Callable[..., Any], names: Sequence[str], linear: Sequence[str]
    ) -> None:
        formula = function.formula if isinstance(function, ArgumentBinding) else function
        self.call = formula.run if isinstance(formula, Formula) else formula
        self.constants: tuple[Any, ...] = ()
        self.places: list[int] = []
        for source in sources(function):
            name, value = source
            if name in names:
                if names.count(name) > 1:
                    raise ValueError(
                        f"rule {rule.name}: the {what} formula asks for {name!r}, but two values have this name"
                    )
                self.places.append(names.index(name))
            elif name is None or isinstance(formula, Formula) and value is not EMPTY:
                self.places.append(len(names) + len(self.constants))
                self.constants += (value,)
            else:
                known = [*dict.fromkeys((*rule.signature.names, *rule.signature.output_names, *names))]
                raise ValueError(f"rule {rule.name}: the {what} formula asks for {name!r}, which is not one of {known}")
        self.pick = itemgetter(*self.places) if len(self.places) > 1 else self._pick
        factors = {names.index(n) for n in linear}
        asked = factors.intersection(self.places)
        self.factors = [] if asked == factors else sorted(asked)

    def _pick(self, known: Sequence[Any]) -> list[Any]:
        return [known[i] for i in self.places]

    def is_zero(self, known: Sequence[Any]) -> bool:
        """Whether the formula would receive no cotangent or tangent, although others exist."""
        return bool(self.factors) and all(known[i] is None for i in self.factors)

    def __call__(self, known: Sequence[Any]) -> Any:
        if self.constants:
            known = (*known, *self.constants)
        if torch.compiler.is_dynamo_compiling():  # Dynamo does not trace an itemgetter
            return self.call(*self._pick(known))
        return self.call(*self.pick(known))


def _is_of_this_package(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, ArgumentBinding) and isinstance(function.formula, (Formula, FunctionType)):
        function = function.formula
    if isinstance(function, Formula):
        function = function.reference
    return not is_foreign(inspect.unwrap(function))


# Facts: properties that a formula can use without saving the tensor. ``self_sizes`` is ``self.shape``.
_FACTS: dict[str, Callable[[Any], Any]] = {
    "sizes": lambda x: None if x is None else x.shape,
    "strides": lambda x: x.stride() if x is not None and x.layout is torch.strided else None,
    "storage_offset": lambda x: x.storage_offset() if x is not None and x.layout is torch.strided else None,
    "dtype": lambda x: None if x is None else x.dtype,
    "device": lambda x: None if x is None else x.device,
    "layout": lambda x: None if x is None else x.layout,
    "blocksize": lambda x: None if x is None else blocksize(x),
}


def _of_each(fact: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """The fact of each tensor in a list."""
    return lambda xs: None if xs is None else [fact(x) for x in xs]


class _Busy(threading.local):
    """Whether the rule's replacement forward runs on this thread. Its own calls of the operator then go to PyTorch."""

    now = False


class RuleDerivative(Transposed):
    """The derivative that the autograd kernel sees: formulas bound to the values of one call."""

    strong_zero = False
    bare = True  # whether `vjp` only calls the formulas
    finite: RuleDerivative | None = None  # one whose `vjp` only calls them, for finite results

    def __init__(
        self,
        rule: Rule,
        forward: Callable[..., Any] | None,
        vjp: Mapping[tuple[str, ...], Callable[..., Any]] | None = None,
    ) -> None:
        signature = rule.signature
        self.rule = rule
        self.forward = forward
        vjp = rule.vjp if vjp is None else vjp
        known = [*signature.names, *signature.output_names]
        self.saved = list(saved_names(rule, vjp))
        wanted = {p for f in vjp.values() for p in parameters(f)}
        # formulas of other packages are checked at each call, the package's own by its tests
        self.foreign = not all(map(_is_of_this_package, (*vjp.values(), *rule.jvp.values())))
        if self.foreign:
            wanted |= {f"{n}_sizes" for key in vjp for n in key}
        entries = {e.name: e for e in (*signature.arguments, *signature.returns)}
        facts = {
            name: (place, fact)
            for place, n in enumerate(known)
            if entries[n].is_tensor_like
            for fact in _FACTS
            if (name := f"{n}_{fact}") in wanted
        }
        self.facts = list(facts.values())
        lists = [known.index(n) for n in known if entries[n].is_tensor_list]
        constant_count = sum(not entries[n].is_tensor_like for n in self.saved)
        self._sizes = {i: constant_count + k for k, (i, fact) in enumerate(self.facts) if fact == "sizes"}
        self.fact_functions = [(i, _of_each(_FACTS[fact]) if i in lists else _FACTS[fact]) for i, fact in self.facts]
        tensors = [n for n in self.saved if entries[n].is_tensor_like]
        constants = [n for n in self.saved if not entries[n].is_tensor_like]
        self.tensor_places = [known.index(n) for n in tensors]
        self.constant_places = [known.index(n) for n in constants]
        self._lists = [i for i, n in enumerate(tensors) if entries[n].is_tensor_list]
        self.grad_names = signature.cotangent_names
        names = [*tensors, *constants, *facts, *self.grad_names, "output_mask"]
        self.vjps = [
            (_Plan(rule, "vjp", self.meant(f), names, self.grad_names), [signature.names.index(n) for n in key])
            for key, f in vjp.items()
        ]
        self.uses = [({p for p in plan.places if p < len(tensors)}, inputs) for plan, inputs in self.vjps]
        self._tensors, self._constants = picker(self.tensor_places), picker(self.constant_places)
        if self.bare and not self.foreign and signature.tensor_like == [0] and len(self.vjps) == 1:
            self.one_vjp = self.vjps[0][0]
        self.selective = not self._lists and any(len(uses) < len(tensors) for uses, _ in self.uses)
        self._kept: dict[tuple[bool, ...], list[bool]] = {}
        self.tables: dict[Any, int] = {}  # the numbers of the tables in csrc/calls, by their `defers`
        self.in_place_functions: dict[Any, Any] = {}  # see in_place.py
        self._without_vjp = [i for i in signature.tensor_like if not any(i in inputs for _, inputs in self.vjps)]
        tangents = [f"{n}_t" for n in signature.names]
        names = [*known, *[f"{n}_p" for n in signature.names], *tangents]
        differentiated = [tangents[i] for i in signature.tensor_like]
        self._jvps = [
            (
                _Plan(rule, "jvp", self.meant(f), names, differentiated),
                [signature.output_names.index(n) for n in key],
            )
            for key, f in rule.jvp.items()
        ]
        asked = {p for f in rule.jvp.values() for p in parameters(f)}
        self._without_jvp = [i for i in self._without_vjp if f"{signature.names[i]}_t" not in asked]
        self._busy = _Busy()
        if forward is not None:
            self.run = forward
        super().__init__(rule.aten, signature, [n not in rule.not_differentiable for n in signature.output_names])
        if rule.reads_grad_mode:
            self.run = torch.enable_grad()(
                self.run
            )  # an autograd function switches it off, but the operator must see the caller's state

    @functools.cached_property
    def saved_names(self) -> tuple[tuple[str, ...], list[int], tuple[str, ...]]:
        known = [*self.signature.names, *self.signature.output_names]
        facts = [f"{known[i]}_{FACTS.get(fact, fact)}" for i, fact in self.facts]
        tensors = tuple(known[i] for i in self.tensor_places)
        return tensors, self._lists, (*[known[i] for i in self.constant_places], *facts)

    @functools.cached_property
    def pushed_places(self) -> Sequence[int]:
        count, known = len(self.signature.names), len(self.signature.names) + len(self.signature.returns)
        if self._jvps:
            read = {p - known if p >= known else p for plan, _ in self._jvps for p in plan.places if p < known + count}
        else:
            read = set(self.constant_places)
        return sorted(p for p in read if p < count and p not in self.signature.tensor_like)

    @property
    def has_lists(self) -> bool:
        """Whether an argument or a result of the operator is a list of tensors."""
        return bool(self.signature.lists or self.signature.output_lists)

    def meant(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The formula to call for ``function``; a subclass may return a variant."""
        return function

    @functools.cached_property
    def plain_call(self) -> Callable[..., Any] | None:
        """``(values, *tensors) -> result`` for plain calls, with the derivative; None for an operator with lists."""
        found: Callable[..., Any] | None = functions(self).plain
        return found

    @property
    def plain_backward(self) -> Callable[..., Any] | None:
        """The backward of `plain_call`."""
        found: Callable[..., Any] | None = functions(self).plain_backward
        return found

    @functools.cached_property
    def _from_result(self) -> tuple[RuleDerivative, list[int]] | None:
        """The derivative that reads the result, not the input, and the positions of arguments that must be >= 0."""
        given, names = self.rule.from_result, self.signature.names
        if given is None or self.strong_zero or self.forward is not None:
            return None
        vjp = {**self.rule.vjp, (names[0],): given.vjp}
        return RuleDerivative(self.rule, None, vjp), [names.index(n) for n in given.nonnegative]

    def in_place(self, values: Sequence[Any]) -> RuleDerivative:
        """The derivative of a plain in-place call, which overwrites its first argument."""
        if self._from_result is None:
            return self
        derivative, nonnegative = self._from_result
        return derivative if all(values[i] >= 0 for i in nonnegative) else self

    def of_call(self, values: Sequence[Any]) -> RuleDerivative:
        """The derivative of a call, which may depend on these arguments."""
        return self

    def takes(self, values: Sequence[Any]) -> bool:
        """Whether the formulas handle these tensors: not nested ones, and sparse ones only if `Rule.sparse` is set."""
        return not any(x.is_nested for x in tensors_in(values)) if self.rule.sparse else all_dense(values)

    def redispatch(self, keyset: Any, values: Sequence[Any]) -> Any:
        if self.forward is None or self._busy.now:
            return super().redispatch(keyset, values)
        args, kwargs = self.signature.split(values)
        self._busy.now = True
        try:
            with below_autograd():
                return self.forward(*args, **kwargs)
        finally:
            self._busy.now = False

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        known = (*inputs, *outputs)
        tensors: Sequence[Any] = self._tensors(known)
        constants = self._constants(known)
        if self.facts:
            constants += tuple([fact(known[i]) for i, fact in self.fact_functions])
        if not self._lists:
            return tensors, constants
        tensors, lengths = flatten(tensors, self._lists)
        return tensors, (lengths, constants)

    def is_narrowed(self, tensors: Sequence[Any], grads: Sequence[Any]) -> bool:
        if self._lists:
            return True
        count = len(self.signature.names)
        saved = [x for x, place in zip(tensors, self.tensor_places) if place < count]
        arguments, given = ([x for x in xs if x is not None and is_differentiable(x)] for xs in (saved, grads))
        return not arguments or any(torch.promote_types(g.dtype, x.dtype) != g.dtype for g in given for x in arguments)

    def kept(self, tensors: Sequence[Any], needs: tuple[bool, ...]) -> Sequence[Any]:
        mask = self._kept.get(needs)
        if mask is None:
            wanted = {i for i, needed in zip(self.signature.tensor_like, needs) if needed}
            used = {place for places, inputs in self.uses if wanted.intersection(inputs) for place in places}
            mask = self._kept[needs] = [i in used for i in range(len(tensors))]
        return [x if yes else None for x, yes in zip(tensors, mask)]

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        result: list[Any] = [None] * len(needed)
        for grad in grads:
            if grad is not None:
                break
        else:
            return result
        if self._lists:
            lengths, static = static
            tensors = unflatten(tensors, lengths)
        for i in self._without_vjp:
            if any(needed[i]) if isinstance(needed[i], list) else needed[i]:
                raise NotImplementedError(
                    f"rule {self.rule.name}: the gradient of {self.signature.names[i]!r} is needed, and the rule has no vjp "
                    "for it; if the gradient is zero, give a vjp that returns None"
                )
        known = (*tensors, *static, *grads)
        for plan, inputs in self.vjps:
            if plan.factors and plan.is_zero(known):
                continue
            if len(inputs) == 1:
                (at,) = inputs
                if any(needed[at]) if isinstance(needed[at], list) else needed[at]:
                    result[at] = plan((*known, (needed[at],)))
                continue
            mask = [needed[i] for i in inputs]
            if any(any(m) if isinstance(m, list) else m for m in mask):
                found = plan((*known, mask))
                if not isinstance(found, (tuple, list)) or len(found) != len(inputs):
                    check_count(self.rule.name, "vjp", [self.signature.names[i] for i in inputs], found)
                for i, g in zip(inputs, found):
                    result[i] = None if needed[i] is False else g
        if self.foreign:
            refuse_recording("another package's vjp")  # likewise if one of ours differentiates a function itself
            for i, grad in enumerate(result):
                if i in self._sizes:
                    name, size = self.signature.names[i], static[self._sizes[i]]
                    check_gradient_of_rule(self.rule.name, name, grad, size, grads)
        return result

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        if not self._jvps:
            return super().jvp(inputs, outputs, tangents)
        for i in self._without_jvp:
            t = tangents[i]
            if t is not None and not (isinstance(t, (list, tuple)) and all(x is None for x in t)):
                raise NotImplementedError(
                    f"rule {self.rule.name}: {self.signature.names[i]!r} has a tangent, and the rule has neither a jvp nor a "
                    "vjp for it; if its derivative is zero, give a vjp that returns None"
                )
        result: list[Any] = [None] * len(outputs)
        known = (*inputs, *outputs, *inputs, *tangents)
        for plan, places in self._jvps:
            if plan.factors and plan.is_zero(known):
                continue
            if self.foreign:
                with transforms_usable(), constants_unwritten(tangents, f"the jvp of rule {self.rule.name}"):
                    found = plan(known)
            else:
                found = plan(known)
            if len(places) == 1:
                found = (found,)
            elif not isinstance(found, (tuple, list)) or len(found) != len(places):
                check_count(self.rule.name, "jvp", [self.signature.output_names[i] for i in places], found)
            for i, t in zip(places, found):
                result[i] = t
        if self.foreign:
            given = result[0] if len(result) == 1 else result
            return check_tangents(self.signature, location_of(self._jvps[0][0].call), outputs, given)
        return result


class StrongRuleDerivative(RuleDerivative):
    """The derivative in which a cotangent or tangent of 0 gives 0.

    A formula may have a variant with strong zeros, its attribute ``strong``, which then replaces it. Formulas without a
    variant run as they are. If a result is not finite, they run again under `StrongArithmetic`; a finite result needs
    no second run, because 0 times a finite number is 0. If values cannot be read, they run under `StrongArithmetic`
    directly.

    Some plain calls on the CPU are left to PyTorch when zeros are not strong. For these, PyTorch's gradients are
    computed first, and returned if they are finite (csrc/calls/stock.h).

    A derivative calls operators whose arguments are cotangents or tangents. Their zeros are strong in the derivatives
    of these calls too, in every order: `of_call` returns the derivative for these arguments.

    Args:
        rule: the rule.
        linear: the places of the arguments that are cotangents or tangents, besides a backward operator's ``grad...``.
    """

    strong_zero = True

    def __init__(self, rule: Rule, linear: frozenset[int] = frozenset()) -> None:
        self.bare = not linear and all(hasattr(f, "strong") for f in (*rule.vjp.values(), *rule.jvp.values()))
        super().__init__(rule, None)
        self._linear = [i for i, name in enumerate(self.signature.names) if name.startswith("grad") or i in linear]
        count = len(self.signature.names)
        outputs = range(count, count + len(self.signature.returns)) if self._linear else ()  # they are linear, too
        kept = [] if self._lists else self.tensor_places
        self._saved_linear = [i for i, place in enumerate(kept) if place in (*self._linear, *outputs)]
        self._of_calls: dict[frozenset[int], StrongRuleDerivative] = {}

    @functools.cached_property
    def finite(self) -> RuleDerivative | None:  # type: ignore[override]
        return None if self.bare else _InPlainArithmetic(self.rule)

    def of_call(self, values: Sequence[Any]) -> StrongRuleDerivative:
        linear = frozenset(linear_among(values)).difference(self._linear)
        if not linear:
            return self
        if linear not in self._of_calls:
            self._of_calls[linear] = StrongRuleDerivative(self.rule, linear)
        return self._of_calls[linear]

    def meant(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return getattr(function, "strong", function)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        vjp = super().vjp
        if self.bare or torch.compiler.is_dynamo_compiling() or transposing():
            return vjp(needed, tensors, static, grads)
        linear = _factors([*grads, *[tensors[i] for i in self._saved_linear]])
        if values_readable(linear):
            found = vjp(needed, tensors, static, grads)
            if are_finite(tensors_in(found)):
                return found
        with StrongArithmetic(linear):
            return vjp(needed, tensors, static, grads)

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        jvp = super().jvp
        if self.bare or torch.compiler.is_dynamo_compiling():
            return jvp(inputs, outputs, tangents)
        if values_readable(_factors(tangents)):
            found = jvp(inputs, outputs, tangents)
            if are_finite(tensors_in(found)):
                return found

        def strong(inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
            with StrongArithmetic(_factors([*tangents, *[inputs[i] for i in self._linear]])):
                return jvp(inputs, outputs, tangents)

        return at_next_level(strong, inputs, outputs, tangents)


class _InPlainArithmetic(StrongRuleDerivative):
    """The formulas of a `StrongRuleDerivative`, run once, whatever their results."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.bare = True


def _factors(values: Sequence[Any]) -> list[Tensor]:
    return [x for x in tensors_in(values) if is_differentiable(x)]


def derivative_of(rule: Rule, *, forward: bool = False, strong_zero: bool = False) -> RuleDerivative:
    """The derivative of a rule. The first call makes it, later ones return the same object.

    Args:
        rule: the rule.
        forward: use the rule's replacement forward, if it has one.
        strong_zero: return the `StrongRuleDerivative`, if `Rule.has_strong_zero`. It has no effect if the forward is
            replaced.

    Raises:
        ValueError: the name of a formula's parameter matches no value of a call.
    """
    if forward and rule.forward is not None:
        how = "forward"
    else:
        how = "strong zero" if strong_zero and rule.has_strong_zero else "plain"
    found: RuleDerivative | None = rule.derivatives.get(how)
    if found is None:
        if how == "strong zero":
            found = StrongRuleDerivative(rule)
        else:
            found = RuleDerivative(rule, rule.forward if how == "forward" else None)
        rule.derivatives[how] = found
    return found
