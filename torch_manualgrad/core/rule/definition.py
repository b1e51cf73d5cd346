"""Rules as data: the formulas for the derivative of an operator, bound by the names of arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import packages
from ..compile_cache import fingerprint, note_file
from ..internals import is_composite
from ..once import is_defining
from ..op.custom_op import CustomOp
from ..registry import Registry
from ..schema import Argument, Signature, signature_of
from ..versions import parse, reached
from .formulas import ArgumentBinding, Formula, called_formulas, parameters
from .samples import Sampler, find_probe, find_sampler

__all__ = [
    "IMPROVEMENTS",
    "ButManySmall",
    "CompiledVjp",
    "Formulas",
    "FromResult",
    "Rule",
    "always",
    "check_functional",
    "exists",
    "operator",
    "primal_for",
    "real",
    "rules",
    "saved_names",
    "where_finite",
]


class CompiledVjp(NamedTuple):
    """The compiled formula with the results of the rule's vjp, for plain calls: these need no Python.

    It replaces the vjp if all floating tensors among its arguments have one precision, on a device of its kernels, and
    within ``largest``; otherwise, and if the backward is differentiated, the vjp itself is called.

    Attributes:
        inputs: whose gradients are its results, in order: a name, or several.
        formula: one with a compiled kernel.
        bind: for parameters of the kernel with other names than in the rule: the rule's name, or a value that is not a
            string, or a pair of the name and a replacement for None. ``needs_<input>`` is whether that gradient is
            needed; otherwise its result is ignored.
        largest: for matrices, the most rows or columns, with a dtype of linear algebra; None: every shape and dtype.
        only: values that constants of the call must have, by their names.
        real: complex numbers are left to the vjp.
        contiguous: inputs and outputs that must be contiguous.
        one_batch: matrices or vectors that must have the batch dims of the first of these, which are matrices.
        square: inputs and outputs that must be square matrices.
        nonzero: inputs and outputs that must be on the CPU, where the check is cheap, and have no zero.
        reports: the kernel has one more result, a 0-dim bool: if true, this function is called.
        on_cpu: only for calls on the CPU.
    """

    inputs: str | tuple[str, ...]
    formula: Formula
    bind: Mapping[str, Any] = {}
    largest: int | None = None
    only: Mapping[str, Any] = {}
    real: bool = False
    contiguous: tuple[str, ...] = ()
    one_batch: tuple[str, ...] = ()
    square: tuple[str, ...] = ()
    nonzero: tuple[str, ...] = ()
    reports: Callable[[], None] | None = None
    on_cpu: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs, as a tuple."""
        return (self.inputs,) if isinstance(self.inputs, str) else self.inputs

    @property
    def operator(self) -> CustomOp:
        """The opaque operator that has the compiled kernel."""
        return self.formula.overloads.get("kernel", self.formula)


# -- calls that a rule leaves to PyTorch ------------------------------------------------------------------------------
# The library of calls reads these as data, so such a call never enters Python; any other function must be called.


def always(*_: Any) -> bool:
    """``defer_to_stock`` of a rule for an operator whose PyTorch derivative is right in reverse mode in every order:
    all calls."""
    return True


def where_finite(*_: Any) -> bool:
    """``defer_to_stock`` of a rule for an operator whose PyTorch derivative is right in first order if it is finite.

    The node of a plain call first runs PyTorch's derivative, in C++. It calls the rule if a gradient is not finite, or is
    differentiated again. The rule takes any other call, which is what this function returns; without the library of
    calls, it takes all.
    """
    return False


def real(self: Tensor, *_: Any) -> bool:
    """``defer_to_stock`` of a rule that is better only for complex numbers: calls whose first argument is real."""
    return not self.is_complex()


class ByMetadata(NamedTuple):
    """``defer_to_stock`` with a cached result: it depends on no values, and runs once per combination of the rest.

    Attributes:
        function: of the operator's arguments. It may read sizes, strides, dtypes, devices and requires_grad, and the
            non-tensor arguments.
    """

    function: Callable[..., bool]

    def __call__(self, *args: Any) -> bool:
        return self.function(*args)


class ButManySmall(NamedTuple):
    """Calls with batches of square matrices that a rule or a replacement forward leaves to PyTorch: on the CPU, all but
    many small ones.

    Attributes:
        order: of the largest real matrices that it takes.
        complex_order: of the largest complex ones.
        entries: the fewest entries that these have in total.
    """

    order: int
    complex_order: int
    entries: int

    def __call__(self, A: Tensor, *others: Any) -> bool:
        if A.dim() < 2:
            return True  # it raises
        largest = self.complex_order if A.is_complex() else self.order
        return A.is_cpu and (A.shape[-1] > largest or A.numel() < self.entries)


@dataclass(frozen=True)
class FromResult:
    """The vjp of an in-place operator as a function of its result: a plain call then keeps no copy of the old values.

    Attributes:
        vjp: for the first argument, which is written to; it reads ``result`` instead of the argument.
        nonnegative: names of numbers among the arguments; if one is negative, the rule's own vjp is used.
    """

    vjp: Callable[..., Any]
    nonnegative: tuple[str, ...] = ()


# -- rules ---------------------------------------------------------------------------------------------------------------

# The possible claims over PyTorch's own derivative; a plain override activates the rules with a claim.
IMPROVEMENTS = ("values", "missing", "speed")

_numbers = itertools.count(1)

Formulas = Mapping[str | tuple[str, ...], Callable[..., Any]]


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Rule:
    """The derivative of one operator: frozen data. Made by `rule`; listed in ``mg.rules``.

    An operator may write to arguments that share no memory with its results, such as running statistics. These are
    constants of the derivative. After the call they have the values that the operator itself writes.

    A rule of ``mg.rules`` is pickled by its name.

    Attributes:
        name: the operator, ``"aten::norm.Scalar"``.
        aten: the operator itself, an ``OpOverload``.
        signature: its arguments and results.
        vjp, jvp: the formulas, by the inputs or outputs that they are for.
        formulas: the `Formula` objects that these are or call.
        residuals: names of the inputs and outputs that are saved for the backward.
        claims: its advantages over PyTorch's own derivative, some of "values", "missing", "speed", each with the first
            torch that no longer needs it, or None.
        source: of the mathematics.
        not_differentiable: names of outputs without a derivative.
        gaps: mode -> reason, for modes that raise on this torch.
        given_samples, default_samples: the samples given with the rule, and the fallback.
        given_probe, given_forward: the probe and the replacement forward given with the rule.
        defer_to_stock: selects the calls that an ``override()`` without names leaves to PyTorch: a function of the
            operator's arguments, or None. Called only in reverse mode. It returns True only where PyTorch is right in
            every order, and faster.
        compiled_vjp: the compiled formula that is the whole vjp, if there is one. Plain calls then run without Python.
        from_result: the vjp of the in-place operator as a function of its result, if there is one.
        sparse: whether the formulas take sparse tensors too; else these keep PyTorch's derivatives.
        drops_graph: the operator is composite, and still has no derivative, because autograd sees none of the calls
            inside. The rule gives it one, on the CPU.
        reads_grad_mode: whether the operator's kernel returns more, such as a workspace, if grad mode is on.
        has_strong_zero: whether ``override(strong_zero=True)`` changes the derivative: not if the formulas, and
            PyTorch's kernel in each instruction set, choose or multiply with finite numbers for every input:
            ``finite=True``, which is assumed for kind "linear". Never for sparse tensors.
        kind: "rule"; "elementwise" or "linear" for rules made by `elementwise` and `linear_in`.
        module: the module that defines the rule.
        identity: a number that is unique among the rules of this process.
        is_built_in: whether it is one of this package's own.
    """

    name: str
    aten: Any
    signature: Signature
    vjp: Mapping[tuple[str, ...], Any]
    jvp: Mapping[tuple[str, ...], Any]
    claims: Mapping[str, str | None]
    source: str
    not_differentiable: tuple[str, ...]
    gaps: Mapping[str, str]
    given_samples: Sampler | None
    default_samples: Sampler | None
    given_probe: Callable[..., Any] | None
    given_forward: Callable[..., Any] | None
    defer_to_stock: Callable[..., bool] | None
    compiled_vjp: CompiledVjp | None
    from_result: FromResult | None
    sparse: bool
    drops_graph: bool
    reads_grad_mode: bool
    has_strong_zero: bool
    kind: str
    module: str
    identity: str
    is_built_in: bool

    def __init__(
        self,
        name: str,
        vjp: Formulas | None,
        jvp: Formulas | None,
        *,
        improves: str | Sequence[str] | Mapping[str, str | None] = (),
        source: str = "",
        not_differentiable: str | Sequence[str] = (),
        gaps: Mapping[str, str | tuple[str, str]] | None = None,
        samples: Sampler | None = None,
        default_samples: Sampler | None = None,
        probe: Callable[..., Any] | None = None,
        forward: Callable[..., Any] | None = None,
        defer_to_stock: Callable[..., bool] | None = None,
        compiled_vjp: CompiledVjp | None = None,
        from_result: FromResult | None = None,
        sparse: bool = False,
        drops_graph: bool = False,
        reads_grad_mode: bool = False,
        finite: bool | None = None,
        kind: str = "rule",
    ) -> None:
        aten = operator(name)
        name, signature = name.removesuffix(".default"), signature_of(aten)
        improves = (improves,) if isinstance(improves, str) else improves
        ending = {mode: (g, None) if isinstance(g, str) else g for mode, g in (gaps or {}).items()}
        constant = (not_differentiable,) if isinstance(not_differentiable, str) else tuple(not_differentiable)
        self.__dict__.update(
            name=name,
            aten=aten,
            signature=signature,
            vjp=MappingProxyType(_keyed(name, "vjp", vjp, signature.arguments)),
            jvp=MappingProxyType(_keyed(name, "jvp", jvp, signature.returns)),
            claims=MappingProxyType(dict(improves) if isinstance(improves, Mapping) else dict.fromkeys(improves)),
            source=source,
            not_differentiable=constant,
            gaps=MappingProxyType(
                {mode: reason for mode, (reason, until) in ending.items() if until is None or not reached(until)}
            ),
            given_samples=samples,
            default_samples=default_samples,
            given_probe=probe,
            given_forward=forward,
            defer_to_stock=defer_to_stock,
            compiled_vjp=compiled_vjp,
            from_result=from_result,
            sparse=sparse,
            drops_graph=drops_graph,
            reads_grad_mode=reads_grad_mode,
            has_strong_zero=not (kind == "linear" if finite is None else finite) and not sparse,
            kind=kind,
            module=_defining_module(),
            identity=str(next(_numbers)),
            is_built_in=is_defining(),
        )
        if self.is_built_in:
            for function in (*self.vjp.values(), *self.jvp.values()):
                note_file(getattr(function, "derivative", getattr(function, "formula", function)))
        self._check()

    def _check(self) -> None:
        name = self.name
        check_functional(f"rule {name}", self.aten, may_write=True, may_be_composite=self.drops_graph)
        for claim, until in self.claims.items():
            if claim not in IMPROVEMENTS:
                raise ValueError(f"rule {name}: improves={claim!r} is unknown; expected some of {list(IMPROVEMENTS)}")
            if until is not None:
                parse(until)
        if not self.vjp and not self.jvp:
            raise ValueError(f"rule {name}: neither a vjp nor a jvp is given")
        for output in self.not_differentiable:
            if output not in self.signature.output_names:
                raise ValueError(
                    f"rule {name}: not_differentiable={output!r} is not one of {self.signature.output_names}"
                )
        if self.compiled_vjp is not None:
            self._check_compiled(self.compiled_vjp)

    @functools.cached_property
    def improves(self) -> tuple[str, ...]:
        """The claims that hold on this torch."""
        return tuple(claim for claim, until in self.claims.items() if until is None or not reached(until))

    @property
    def samples(self) -> Sampler | None:
        """``(dtype, device) -> iterable of Sample``: given with the rule, registered, or the default; or None."""
        return self.given_samples or find_sampler(self.name) or self.default_samples

    @property
    def probe(self) -> Callable[..., Any]:
        """The function that checks differentiate instead of the operator, unless none was given or registered.

        It calls the operator on an input made to fulfil a condition (Hermitian), or removes a choice in its outputs (the
        phase of a vector).
        """
        return self.given_probe or find_probe(self.name) or self.aten

    @property
    def forward(self) -> Callable[..., Any] | None:
        """The replacement forward, given or registered by `primal_for`; only for ``override(forward=True)``."""
        return self.given_forward or _primals.get(self, (None, None))[0]

    @property
    def left_by_forward(self) -> ButManySmall | None:
        """The calls that the replacement forward leaves to PyTorch, if `primal_for` was told."""
        return None if self.given_forward else _primals.get(self, (None, None))[1]

    @functools.cached_property
    def derivatives(self) -> dict[str, Any]:
        """The derivatives that `derivative_of` has made from it."""
        return {}

    def __copy__(self) -> Rule:
        return self  # like an OpOverload: there is one of each

    def __deepcopy__(self, memo: Any) -> Rule:
        return self

    def __reduce__(self) -> Any:
        if rules.get(self.name) is not self:
            raise pickle.PicklingError(
                f"rule {self.name}: it is not in mg.rules, and only rules that are there can be pickled, by their name"
            )
        return _registered, (self.name,)

    def _check_compiled(self, compiled: CompiledVjp) -> None:
        """It must bind like the vjp that it replaces, and there must be one vjp, for exactly its inputs."""
        if list(self.vjp) != [compiled.names]:
            raise ValueError(f"rule {self.name}: compiled_vjp is for {compiled.names}, the vjp for {list(self.vjp)}")
        outputs = self.signature.output_names
        asked = {p for f in self.vjp.values() for p in parameters(f)}
        cotangents = {*self.signature.cotangent_names}
        known = asked & {*self.signature.names, *outputs} | cotangents | {f"needs_{n}" for n in compiled.names}
        for parameter in compiled.operator.signature.names:
            source = compiled.bind.get(parameter, parameter)
            name = source[0] if isinstance(source, tuple) else source
            if isinstance(name, str) and name not in known:
                raise ValueError(f"rule {self.name}: compiled_vjp asks for {name!r}, which the vjp does not")
        for name in (*compiled.contiguous, *compiled.one_batch, *compiled.square, *compiled.nonzero):
            if name not in asked:
                raise ValueError(
                    f"rule {self.name}: compiled_vjp has a condition on {name!r}, which the vjp does not ask for"
                )
        for name in compiled.only:
            if name not in self.signature.names or name in self.signature.tensor_names:
                raise ValueError(f"rule {self.name}: compiled_vjp has a condition on {name!r}, which is no constant")
        results = len(compiled.operator.signature.returns)
        if results != len(compiled.names) + (compiled.reports is not None):
            raise ValueError(
                f"rule {self.name}: compiled_vjp has {results} results for {len(compiled.names)} gradients"
            )

    @functools.cached_property
    def formulas(self) -> tuple[Formula, ...]:
        """The formulas that the vjp and the jvp are or call, found by `called_formulas`."""
        return called_formulas([*self.vjp.values(), *self.jvp.values()])

    @property
    def residuals(self) -> tuple[str, ...]:
        return saved_names(self, self.vjp)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The code of the formulas; for a rule of this package only the part that is not in its recorded files."""
        given = (*self.vjp.values(), *self.jvp.values())
        if self.is_built_in:
            return " ".join(repr(f) for f in given if isinstance(f, ArgumentBinding))
        return " ".join(map(_code, (*given, *self.formulas)))

    def __repr__(self) -> str:
        formulas = ", ".join(f.__name__ for f in self.formulas)
        return f"<Rule {self.name}: {formulas}>" if formulas else f"<Rule {self.name}>"


def _defining_module() -> str:
    """The module outside of this folder whose code runs."""
    frame, own = inspect.currentframe(), __name__.rpartition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").startswith(own):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


def _registered(name: str) -> Rule:
    return rules[name]


_primals: weakref.WeakKeyDictionary[Rule, tuple[Callable[..., Any], ButManySmall | None]] = weakref.WeakKeyDictionary()


def primal_for(rule: Rule, leaves: ButManySmall | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the function that replaces the forward of the rule's operator under ``override(forward=True)``.

    Args:
        rule: the rule.
        leaves: calls that the function passes on to PyTorch. C++ serves them, without Python.

    Raises:
        ValueError: the rule has one already.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if rule.forward is not None:
            raise ValueError(f"rule {rule.name} has a replacement forward already: {rule.forward!r}")
        _primals[rule] = function, leaves
        return function

    return register


def _keyed(rule: str, what: str, formulas: Formulas | None, entries: Sequence[Argument]) -> dict[tuple[str, ...], Any]:
    """The formulas, each under a tuple of names, which must be those of ``entries``."""
    known = [e.name for e in entries if e.is_tensor_like]
    keyed = {(k,) if isinstance(k, str) else tuple(k): f for k, f in (formulas or {}).items()}
    for key, function in keyed.items():
        try:
            parameters(function)
        except (TypeError, ValueError):
            raise ValueError(
                f"rule {rule}: the {what} for {', '.join(key)} must be a function with named parameters, got "
                f"{function!r}"
            ) from None
    names = [n for key in keyed for n in key]
    for n in names:
        if n not in known:
            raise ValueError(f"rule {rule}: {what} is given for {n!r}, which is not one of {list(known)}")
        if names.count(n) > 1:
            raise ValueError(f"rule {rule}: {what} is given twice for {n!r}")
    return keyed


def saved_names(rule: Rule, vjp: Mapping[tuple[str, ...], Callable[..., Any]]) -> tuple[str, ...]:
    """The inputs and outputs of the rule's operator that these formulas for the vjp use."""
    wanted = {p for f in vjp.values() for p in parameters(f)}
    if rule.compiled_vjp is not None:  # its conditions read constants
        wanted |= set(rule.compiled_vjp.only)
    return tuple(n for n in (*rule.signature.names, *rule.signature.output_names) if n in wanted)


def _code(function: Callable[..., Any]) -> str:
    """The `fingerprint` of a function that a rule calls."""
    if isinstance(function, ArgumentBinding):
        return f"{_code(function.formula)} {function!r}"
    return fingerprint(function.reference if isinstance(function, Formula) else function)


def check_functional(what: str, op: Any, *, may_write: bool = False, may_be_composite: bool = False) -> None:
    """Refuse operators whose derivative cannot be replaced; ``what`` is bound to ``op``.

    Args:
        may_write: to arguments that it does not return, which are constants of the derivative.
        may_be_composite: but with its own derivative.
    """
    kind, returns = what.split()[0], op._schema.returns
    returned = not returns or any(r.alias_info is not None for r in returns)
    if op._schema.is_mutable and (returned or not may_write):
        does = "writes to an argument that it returns" if may_write else "writes to an argument"
        raise ValueError(f"{what}: the operator {does}; bind the {kind} to its functional form")
    if returned and returns:
        raise ValueError(f"{what}: the operator returns a view of an argument, whose derivative is PyTorch's own")
    if is_composite(op) and not may_be_composite:
        raise ValueError(
            f"{what}: the operator is composite, and has no derivative of its own; bind {kind}s to what it calls"
        )


def exists(name: str) -> bool:
    """Whether there is an operator of that name."""
    try:
        operator(name)
    except ValueError:
        return False
    return True


def operator(name: str) -> Any:
    """The ``OpOverload`` called ``namespace::name`` or ``namespace::name.overload``.

    Raises:
        TypeError: not a string.
        ValueError: there is none.
    """
    if not isinstance(name, str):
        raise TypeError(f"rule: name: expected a string such as 'aten::sin', got {name!r}")
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None) if rest else None
    op = getattr(found, overload or "default", None)
    if op is not None:
        return op
    hint = "expected 'namespace::name' or 'namespace::name.overload'"
    if found is not None:
        hint = f"expected one of {', '.join(f'{namespace}::{packet}.{o}' for o in found.overloads())}"
    elif near := difflib.get_close_matches(packet, dir(getattr(torch.ops, namespace)), n=3):
        hint = f"did you mean {' or '.join(f'{namespace}::{n}' for n in near)}?"
    raise ValueError(f"rule {name!r}: there is no such operator; {hint}")


rules: Registry[Rule] = Registry(
    "rule", packages.load, instead="register=False gives a rule that is in no table, for `override` and `install`"
)
