"""Rules: which formulas are the derivative of which operator, bound by the names of arguments."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from . import packages
from .autograd import Derivative, function_name
from .compile_cache import fingerprint
from .compiled_vjp import ButManySmall, CompiledVjp
from .fast_path import fast_call
from .formula import Formula
from .internals import below_autograd, is_composite
from .registry import Registry
from .sample import Sample
from .schema import Argument, Signature, flatten, unflatten
from .versions import parse, reached

__all__ = ["IMPROVEMENTS", "ButManySmall", "CompiledVjp", "Rule", "Sample", "operator", "rule", "rules"]

# What a rule may claim over PyTorch's own derivative; a rule that claims any is on in a plain override.
IMPROVEMENTS = ("values", "missing", "speed")

_numbers = itertools.count(1)

Formulas = Mapping[str | tuple[str, ...], Callable[..., Any]]


class Rule:
    """The derivative of one operator. Made by `rule`; listed in ``mg.rules``.

    Attributes:
        name: the operator, ``"aten::norm.Scalar"``.
        aten: the operator itself, an ``OpOverload``.
        vjp, jvp: the formulas by the inputs, the outputs, that they give.
        formulas: the `Formula` objects among these, and those that the bindings call.
        residuals: names of the inputs and outputs that are kept for the backward.
        claims: what it has over PyTorch's own, some of "values", "missing", "speed", each with the first torch in which
            that is so no longer, or None.
        improves: the claims that hold on this torch.
        source: where the mathematics comes from.
        gaps: mode -> reason, for what raises on this torch.
        samples: ``(dtype, device) -> iterable of Sample``, or None.
        probe: what the checks differentiate in place of the bare operator: a function through it which sees to a
            condition on its input (Hermitian) or removes a choice in its outputs (the phase of a vector).
        forward: a replacement for the operator's own forward, used under ``override(forward=True)`` only.
        defer_to_stock: which calls an ``override()`` without names leaves to PyTorch: a function of the operator's arguments, or
            None. It is asked where only reverse derivatives can follow; to be true only where PyTorch's are right in
            every order, and faster.
        compiled_vjp: the compiled formula that is the whole vjp, if there is one: plain calls then go without Python.
    """

    def __init__(
        self,
        name: str,
        vjp: Formulas | None,
        jvp: Formulas | None,
        *,
        improves: str | Sequence[str] | Mapping[str, str | None] = (),
        source: str = "",
        not_differentiable: Sequence[str] = (),
        gaps: Mapping[str, str | tuple[str, str]] | None = None,
        samples: Callable[..., Iterable[Sample]] | None = None,
        probe: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
        defer_to_stock: Callable[..., bool] | None = None,
        compiled_vjp: CompiledVjp | None = None,
    ) -> None:
        self.name = name.removesuffix(".default")
        self.aten = operator(name)
        self.signature = Signature(self.aten._schema)
        if self.aten._schema.is_mutable:
            raise ValueError(f"rule {name}: the operator writes to an argument; bind the rule to its functional form")
        if any(r.alias_info is not None for r in self.aten._schema.returns):
            raise ValueError(
                f"rule {name}: the operator returns a view of an argument, whose derivative is PyTorch's own"
            )
        if is_composite(self.aten):
            raise ValueError(
                f"rule {name}: the operator is composite, and has no derivative of its own; bind rules to what it calls"
            )
        improves = (improves,) if isinstance(improves, str) else improves
        self.claims: dict[str, str | None] = (
            dict(improves) if isinstance(improves, Mapping) else dict.fromkeys(improves)
        )
        for claim, until in self.claims.items():
            if claim not in IMPROVEMENTS:
                raise ValueError(f"rule {name}: improves={claim!r} is unknown; expected some of {list(IMPROVEMENTS)}")
            if until is not None:
                parse(until)
        self.improves = tuple(claim for claim, until in self.claims.items() if until is None or not reached(until))
        self.source = source
        ending = {mode: (g, None) if isinstance(g, str) else g for mode, g in (gaps or {}).items()}
        self.gaps = {mode: reason for mode, (reason, until) in ending.items() if until is None or not reached(until)}
        self.samples = samples
        self.probe = probe or self.aten
        self.forward = forward
        self.defer_to_stock = defer_to_stock
        self.compiled_vjp = compiled_vjp
        self.not_differentiable = (
            (not_differentiable,) if isinstance(not_differentiable, str) else tuple(not_differentiable)
        )
        self.identity = str(next(_numbers))
        self.vjp = self._keyed("vjp", vjp, self.signature.arguments)
        self.jvp = self._keyed("jvp", jvp, self.signature.returns)
        if not self.vjp and not self.jvp:
            raise ValueError(f"rule {name}: neither a vjp nor a jvp is given")
        for output in self.not_differentiable:
            if output not in self.signature.output_names:
                raise ValueError(f"rule {name}: not_differentiable={output!r} is none of {self.signature.output_names}")
        if compiled_vjp is not None:
            self._check(compiled_vjp)
        self.derivative = Bound(self, None)
        self.derivative_with_forward = self.derivative if forward is None else Bound(self, forward)

    def replace_primal(self, forward: Callable[..., Any]) -> None:
        """Set the replacement for the operator's own forward, which ``override(forward=True)`` uses."""
        self.forward, self.derivative_with_forward = forward, Bound(self, forward)

    def _keyed(self, what: str, formulas: Formulas | None, entries: Sequence[Argument]) -> dict[tuple[str, ...], Any]:
        known = [e.name for e in entries if e.is_tensor_like]
        keyed = {(k,) if isinstance(k, str) else tuple(k): f for k, f in (formulas or {}).items()}
        for key, function in keyed.items():
            try:
                _parameters(function)
            except (TypeError, ValueError):
                raise ValueError(
                    f"rule {self.name}: the {what} for {', '.join(key)} must be a function with named parameters, got "
                    f"{function!r}"
                ) from None
        names = [n for key in keyed for n in key]
        for n in names:
            if n not in known:
                raise ValueError(f"rule {self.name}: {what} is given for {n!r}, which is none of {list(known)}")
            if names.count(n) > 1:
                raise ValueError(f"rule {self.name}: {what} is given twice for {n!r}")
        return keyed

    def _check(self, compiled: CompiledVjp) -> None:
        """It must bind as the vjp that it stands for, and there must be one vjp, for its inputs alone."""
        if list(self.vjp) != [compiled.names]:
            raise ValueError(f"rule {self.name}: compiled_vjp is for {compiled.names}, the vjp for {list(self.vjp)}")
        outputs = self.signature.output_names
        grads = ["grad"] if len(outputs) == 1 else [f"grad_{n}" for n in outputs]
        asked = {p for f in self.vjp.values() for p in _parameters(f)}
        known = asked & {*self.signature.names, *outputs} | {*grads} | {f"needs_{n}" for n in compiled.names}
        for parameter in compiled.formula.signature.names:
            source = compiled.bind.get(parameter, parameter)
            name = source[0] if isinstance(source, tuple) else source
            if isinstance(name, str) and name not in known:
                raise ValueError(f"rule {self.name}: compiled_vjp asks for {name!r}, which the vjp does not")
        for name in (*compiled.only, *compiled.contiguous, *compiled.one_batch):
            if name not in asked:
                raise ValueError(
                    f"rule {self.name}: compiled_vjp has a condition on {name!r}, which the vjp does not ask for"
                )
        results = len(compiled.operator.signature.returns)
        if results != len(compiled.names) + compiled.declines:
            raise ValueError(
                f"rule {self.name}: compiled_vjp has {results} results for {len(compiled.names)} gradients"
            )

    @property
    def formulas(self) -> tuple[Formula, ...]:
        found: dict[str, Formula] = {}
        for function in (*self.vjp.values(), *self.jvp.values()):
            if isinstance(function, Formula):
                found[function.name] = function
            else:
                code = getattr(function, "__code__", None)
                for name in code.co_names if code else ():
                    if isinstance(value := function.__globals__.get(name), Formula):
                        found[value.name] = value
        return tuple(found.values())

    @property
    def residuals(self) -> tuple[str, ...]:
        return tuple(self.derivative.saved)

    @functools.cached_property
    def fingerprint(self) -> str:
        return " ".join(fingerprint(getattr(f, "reference", f)) for f in (*self.vjp.values(), *self.jvp.values()))

    def __repr__(self) -> str:
        return f"<Rule {self.name}: {', '.join(f.__name__ for f in self.formulas)}>"


class _Plan:
    """One formula with the places of its arguments in an environment of known names."""

    def __init__(self, rule: str, what: str, function: Callable[..., Any], names: Sequence[str]) -> None:
        self.call = function.run if isinstance(function, Formula) else function
        self.parameters = _parameters(function)
        unknown = [p for p in self.parameters if p not in names]
        if unknown:
            raise ValueError(f"rule {rule}: the {what} formula asks for {unknown[0]!r}, which is none of {list(names)}")
        twice = [p for p in self.parameters if names.count(p) > 1]
        if twice:
            raise ValueError(f"rule {rule}: the {what} formula asks for {twice[0]!r}, which names two things here")
        self.places = [names.index(p) for p in self.parameters]
        self.pick = itemgetter(*self.places) if len(self.places) > 1 else self._pick

    def _pick(self, known: Sequence[Any]) -> list[Any]:
        return [known[i] for i in self.places]

    def __call__(self, known: Sequence[Any]) -> Any:
        if torch.compiler.is_dynamo_compiling():  # which does not trace an itemgetter
            return self.call(*self._pick(known))
        return self.call(*self.pick(known))


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The names to bind; one with a default is bound only if it is positional, so that a lambda may carry constants."""
    source = function.reference if isinstance(function, Formula) else function
    return [p.name for p in inspect.signature(source).parameters.values() if p.kind is not p.KEYWORD_ONLY]


# What a formula may ask of a tensor without keeping it: the parameter ``self_sizes`` is ``self.shape``.
_FACTS: dict[str, Callable[[Tensor], Any]] = {
    "sizes": lambda x: x.shape,
    "strides": lambda x: x.stride() if x.layout is torch.strided else None,
    "dtype": lambda x: x.dtype,
}


class _Busy(threading.local):
    """Whether a rule's own forward is running on this thread: what it calls of the operator itself is then PyTorch's."""

    now = False


class Bound(Derivative):
    """The derivative that the autograd kernel sees: formulas bound to the values of one call."""

    one_precision = True

    def __init__(self, rule: Rule, forward: Callable[..., Any] | None) -> None:
        signature = rule.signature
        self.rule = rule
        self.forward = forward
        known = [*signature.names, *signature.output_names]
        wanted = {p for f in rule.vjp.values() for p in _parameters(f)}
        self.saved = [n for n in known if n in wanted]
        entries = {e.name: e for e in (*signature.arguments, *signature.returns)}
        facts = {f"{n}_{fact}": (known.index(n), fact) for n in known if entries[n].is_tensor for fact in _FACTS}
        facts = {n: fact for n, fact in facts.items() if n in wanted}
        self.facts = list(facts.values())
        self.fact_functions = [(i, _FACTS[fact]) for i, fact in self.facts]
        tensors = [n for n in self.saved if entries[n].is_tensor_like]
        constants = [n for n in self.saved if not entries[n].is_tensor_like]
        self.tensor_places = [known.index(n) for n in tensors]
        self.constant_places = [known.index(n) for n in constants]
        self._lists = [i for i, n in enumerate(tensors) if entries[n].is_tensor_list]
        grads = ["grad"] if len(signature.returns) == 1 else [f"grad_{n}" for n in signature.output_names]
        self.grad_names = grads
        names = [*tensors, *constants, *facts, *grads, "output_mask"]
        self.vjps = [
            (_Plan(rule.name, "vjp", f, names), [signature.names.index(n) for n in key]) for key, f in rule.vjp.items()
        ]
        self.uses = [({p for p in plan.places if p < len(tensors)}, inputs) for plan, inputs in self.vjps]
        self.selective = not self._lists and any(len(uses) < len(tensors) for uses, _ in self.uses)
        self._kept: dict[tuple[bool, ...], list[bool]] = {}
        self._without_vjp = [i for i in signature.tensor_like if not any(i in inputs for _, inputs in self.vjps)]
        names = [*known, *[f"{n}_p" for n in signature.names], *[f"{n}_t" for n in signature.names]]
        self._jvps = [
            (_Plan(rule.name, "jvp", f, names), [signature.output_names.index(n) for n in key])
            for key, f in rule.jvp.items()
        ]
        self._busy = _Busy()
        if forward is not None:
            self.run = forward
        super().__init__(rule.aten, signature, [n not in rule.not_differentiable for n in signature.output_names])
        self.fast_call, self.fast_backward = fast_call(self)
        self.node_name = f"{function_name(signature)}Backward"

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
        tensors: Sequence[Any] = [known[i] for i in self.tensor_places]
        constants = [known[i] for i in self.constant_places]
        if self.facts:
            constants += [fact(known[i]) for i, fact in self.fact_functions]
        if not self._lists:
            return tensors, constants
        tensors, lengths = flatten(tensors, self._lists)
        return tensors, (lengths, constants)

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
                    f"rule {self.rule.name}: the gradient of {self.signature.names[i]!r} is asked for, and no vjp is given "
                    "for it; one that returns None says that it is zero"
                )
        known = (*tensors, *static, *grads)
        for plan, inputs in self.vjps:
            if len(inputs) == 1:
                (at,) = inputs
                if any(needed[at]) if isinstance(needed[at], list) else needed[at]:
                    result[at] = plan((*known, (needed[at],)))
                continue
            mask = [needed[i] for i in inputs]
            if any(any(m) if isinstance(m, list) else m for m in mask):
                for i, g in zip(inputs, plan((*known, mask))):
                    result[i] = g
        return result

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        if not self._jvps:
            return super().jvp(inputs, outputs, tangents)
        result: list[Any] = [None] * len(outputs)
        known = (*inputs, *outputs, *inputs, *tangents)
        for plan, places in self._jvps:
            found = plan(known)
            for i, t in zip(places, (found,) if len(places) == 1 else found):
                result[i] = t
        return result


def exists(name: str) -> bool:
    """Whether there is an operator of that name."""
    try:
        operator(name)
    except ValueError:
        return False
    return True


def operator(name: str) -> Any:
    """The ``OpOverload`` called ``namespace::name`` or ``namespace::name.overload``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if rest:
        try:
            return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError:
            pass
    raise ValueError(
        f"rule {name!r}: there is no such operator; expected 'namespace::name' or 'namespace::name.overload'"
    )


rules: Registry[Rule] = Registry("rule", packages.load)


def rule(
    name: str,
    *,
    vjp: Formulas | None = None,
    jvp: Formulas | None = None,
    register: bool = True,
    since: str | None = None,
    until: str | None = None,
    **about: Any,
) -> Any:
    """Bind formulas to the operator ``name``, and enter the rule in ``mg.rules``.

    Args:
        name: ``"aten::linalg_lu"``, ``"aten::norm.Scalar"``; any operator, not only aten's.
        vjp: input, or tuple of inputs, -> formula for its gradient.
        jvp: output, or tuple of outputs, -> formula for its tangent; without any, a jvp is derived from the vjp.
        register: False gives a rule that is in no table, to hand to `override`.
        since: the first torch that has the operator, as "2.11".
        until: the first torch that has it no longer.
        about: the further attributes of `Rule`. ``improves`` is a claim, several, or a dictionary from each to the first
            torch in which it holds no longer: ``{"values": "2.15", "speed": None}``. A gap is a reason, or a reason and
            the first torch in which it is one no longer.

    A formula's parameters are bound by their names: inputs and outputs of the schema (``result``, ``result0``, ...
    where unnamed), ``grad`` or ``grad_<output>``, ``<input>_p`` and ``<input>_t`` for primal and tangent, and
    ``output_mask``, which says which of the inputs of its key need a gradient. ``<name>_sizes``, ``<name>_strides`` and
    ``<name>_dtype`` of an input or output are to be had in a vjp without keeping the tensor. A tensor is kept for the
    backward only if a formula for an input that requires grad names it. A missing cotangent or tangent is None.

    Returns:
        The rule; None where ``since`` or ``until`` says that this torch lacks the operator, which is then in
        ``mg.rules.absent``.

    Raises:
        ValueError: no such operator, a name that is in no schema, or a second rule for the same operator.
    """
    if reason := _absent(name, since, until):
        if register:
            rules.without(name.removesuffix(".default"), reason)
        return None
    made = Rule(name, vjp, jvp, **about)
    return rules.add(made.name, made) if register else made


def _absent(name: str, since: str | None, until: str | None) -> str:
    """Why this torch does not have the operator, if that is so and was to be expected."""
    reason = ""
    if since is not None and not reached(since):
        reason = f"torch {torch.__version__} has no {name}, which comes with {since}"
    if until is not None and reached(until):
        reason = f"torch {torch.__version__} has no {name}, which is gone since {until}"
    return reason if reason and not exists(name) else ""
