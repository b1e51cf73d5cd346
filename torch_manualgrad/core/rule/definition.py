"""Rules as data: which formulas are the derivative of which operator, bound by the names of arguments."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import packages
from ..compile_cache import fingerprint
from ..internals import is_composite
from ..op.custom_op import CustomOp
from ..registry import Registry
from ..schema import Argument, signature_of
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
    "real",
    "rules",
    "saved_names",
    "where_finite",
]


class CompiledVjp(NamedTuple):
    """The compiled formula that gives what the rule's vjp gives, in plain calls: these need no Python.

    It stands for the vjp where all floating tensors among its arguments are of one precision, on a device of its
    kernels, and within ``largest``; elsewhere, and where the backward is differentiated, the vjp itself is called.

    Attributes:
        inputs: whose gradients are its results, in their order: a name, or several.
        formula: one with a compiled kernel.
        bind: for parameters of the kernel that are not called as in the rule: the name there, or a value that is not a
            string, or a pair of the name and what stands for None. ``needs_<input>`` is whether that gradient is
            wanted; the result for one that is not is passed over.
        largest: for matrices, the most rows or columns, of a dtype of linear algebra; None: every shape and dtype.
        only: values that constants of the call must have, by their names.
        real: complex numbers are left to the vjp.
        contiguous: inputs and outputs that must be contiguous.
        one_batch: matrices or vectors that must have the batch dims of the first of these, which are matrices.
        square: inputs and outputs that must be square matrices.
        nonzero: inputs and outputs that must be on the CPU, where it costs little to ask, and have no zero.
        declines: the kernel has one more result, a 0-dim bool: true where it leaves the call to the vjp, or, if this is
            a function, where that is called and the results stand. For the CPU only: to read it would synchronize with
            a GPU.
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
    declines: bool | Callable[[], None] = False

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs, as a tuple."""
        return (self.inputs,) if isinstance(self.inputs, str) else self.inputs

    @property
    def operator(self) -> CustomOp:
        """The opaque operator that has the compiled kernel."""
        return self.formula.overloads.get("kernel", self.formula)


# -- calls that a rule leaves to PyTorch ------------------------------------------------------------------------------
#
# The library of calls reads these as data, so that such a call never enters Python; it has to call any other function.


def always(*_: Any) -> bool:
    """``defer_to_stock`` of a rule whose operator PyTorch differentiates rightly in reverse mode, in every order: all calls."""
    return True


def where_finite(*_: Any) -> bool:
    """``defer_to_stock`` of a rule whose operator PyTorch differentiates rightly in first order, where that is finite.

    The node of a plain call first runs PyTorch's derivative, in C++. It calls the rule if a gradient is not finite, or is
    differentiated again. Any other call is the rule's, as this function says; without the library of calls, all are.
    """
    return False


def real(self: Tensor, *_: Any) -> bool:
    """``defer_to_stock`` of a rule that is better for complex numbers only: calls whose first argument is real."""
    return not self.is_complex()


class ButManySmall(NamedTuple):
    """``defer_to_stock`` of a rule for batches of square matrices: on the CPU, all calls but many small ones.

    Attributes:
        order: the largest real matrices that the rule takes.
        complex_order: the largest complex ones.
        entries: the fewest that these have in all.
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
    """The vjp of an operator in place as a function of its result: a plain call then keeps no copy of what stood there.

    Attributes:
        vjp: for the first argument, which is written to; it reads ``result`` where the rule's own reads that.
        nonnegative: names of numbers among the arguments; if one is negative, the rule's own vjp is used.
    """

    vjp: Callable[..., Any]
    nonnegative: tuple[str, ...] = ()


# -- rules ---------------------------------------------------------------------------------------------------------------

# What a rule may claim over PyTorch's own derivative; a rule that claims any is on in a plain override.
IMPROVEMENTS = ("values", "missing", "speed")

_numbers = itertools.count(1)

Formulas = Mapping[str | tuple[str, ...], Callable[..., Any]]


class Rule:
    """The derivative of one operator. Made by `rule`; listed in ``mg.rules``.

    An operator may write to arguments that its results do not share memory with, such as running statistics. These are
    constants of the derivative; what stands in them after the call is what the operator itself writes.

    Attributes:
        name: the operator, ``"aten::norm.Scalar"``.
        aten: the operator itself, an ``OpOverload``.
        vjp, jvp: the formulas by the inputs, the outputs, that they give.
        formulas: the `Formula` objects that these are or call.
        residuals: names of the inputs and outputs that are kept for the backward.
        claims: what it has over PyTorch's own, some of "values", "missing", "speed", each with the first torch in which
            that is so no longer, or None.
        improves: the claims that hold on this torch.
        source: where the mathematics comes from.
        gaps: mode -> reason, for what raises on this torch.
        samples: ``(dtype, device) -> iterable of Sample``, or None. Those of this package are in `derivatives.samples`, and
            `elementwise` draws its own where there are none.
        probe: the function that checks differentiate instead of the operator. It calls the operator on an input made
            to fulfil a condition (Hermitian), or removes a choice in its outputs (the phase of a vector).
        forward: a replacement for the operator's own forward, used under ``override(forward=True)`` only.
        defer_to_stock: which calls an ``override()`` without names leaves to PyTorch: a function of the operator's arguments, or
            None. It is asked where only reverse derivatives can follow; to be true only where PyTorch's are right in
            every order, and faster.
        compiled_vjp: the compiled formula that is the whole vjp, if there is one: plain calls then go without Python.
        from_result: the vjp of the operator in place as a function of its result, if there is one.
        has_strong_zero: whether ``override(strong_zero=True)`` means another derivative: not where the
            formulas, and PyTorch's kernel in each of its instruction sets, choose, or multiply with finite numbers,
            whatever the input: ``finite=True``, which is assumed of kind "linear". Sparse tensors have none.
        drops_graph: the operator is composite, and has no derivative all the same, as autograd sees none of what it calls.
            The rule gives it one, on the CPU.
        reads_grad_mode: whether the operator's kernel returns more, as a workspace, where grad mode is on.
        sparse: whether the formulas take sparse tensors too; else these keep PyTorch's derivatives.
        kind: "rule"; "elementwise" or "linear" for operators of one element or linear ones, as `elementwise` and
            `linear_in` make them.
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
        self.aten = operator(name)
        self.name = name.removesuffix(".default")
        self.signature = signature_of(self.aten)
        check_functional(f"rule {name}", self.aten, may_write=True, may_be_composite=drops_graph)
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
        self._samples, self._default_samples, self._probe = samples, default_samples, probe
        self.forward = forward
        self.defer_to_stock = defer_to_stock
        self.compiled_vjp = compiled_vjp
        self.from_result = from_result
        self.sparse, self.drops_graph, self.reads_grad_mode = sparse, drops_graph, reads_grad_mode
        self.kind = kind
        self.not_differentiable = (
            (not_differentiable,) if isinstance(not_differentiable, str) else tuple(not_differentiable)
        )
        self.identity = str(next(_numbers))
        self.derivatives: dict[str, Any] = {}  # what `derivative_of` has made of it
        self.vjp = self._keyed("vjp", vjp, self.signature.arguments)
        self.jvp = self._keyed("jvp", jvp, self.signature.returns)
        if not self.vjp and not self.jvp:
            raise ValueError(f"rule {name}: neither a vjp nor a jvp is given")
        for output in self.not_differentiable:
            if output not in self.signature.output_names:
                raise ValueError(
                    f"rule {name}: not_differentiable={output!r} is not one of {self.signature.output_names}"
                )
        if compiled_vjp is not None:
            self._check(compiled_vjp)
        self.has_strong_zero = not (kind == "linear" if finite is None else finite) and not sparse

    @property
    def samples(self) -> Sampler | None:
        """``(dtype, device) -> iterable of Sample``: given with the rule, registered for it, or the default. None if none."""
        return self._samples or find_sampler(self.name) or self._default_samples

    @property
    def probe(self) -> Callable[..., Any]:
        """The function that checks differentiate: the operator, unless a probe was given or registered."""
        return self._probe or find_probe(self.name) or self.aten

    def replace_primal(self, forward: Callable[..., Any]) -> None:
        """Set the replacement for the operator's own forward, which ``override(forward=True)`` uses.

        Raises:
            RuntimeError: the rule was used under ``override(forward=True)`` before.
        """
        if "forward" in self.derivatives:
            raise RuntimeError(
                f"rule {self.name}: its forward is in use; replace it before the first override(forward=True)"
            )
        self.forward = forward

    def __deepcopy__(self, memo: Any) -> Rule:
        return self  # as an OpOverload: there is one of each

    def _keyed(self, what: str, formulas: Formulas | None, entries: Sequence[Argument]) -> dict[tuple[str, ...], Any]:
        known = [e.name for e in entries if e.is_tensor_like]
        keyed = {(k,) if isinstance(k, str) else tuple(k): f for k, f in (formulas or {}).items()}
        for key, function in keyed.items():
            try:
                parameters(function)
            except (TypeError, ValueError):
                raise ValueError(
                    f"rule {self.name}: the {what} for {', '.join(key)} must be a function with named parameters, got "
                    f"{function!r}"
                ) from None
        names = [n for key in keyed for n in key]
        for n in names:
            if n not in known:
                raise ValueError(f"rule {self.name}: {what} is given for {n!r}, which is not one of {list(known)}")
            if names.count(n) > 1:
                raise ValueError(f"rule {self.name}: {what} is given twice for {n!r}")
        return keyed

    def _check(self, compiled: CompiledVjp) -> None:
        """It must bind as the vjp that it stands for, and there must be one vjp, for its inputs alone."""
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
        if results != len(compiled.names) + bool(compiled.declines):
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
        return " ".join(map(_code, (*self.vjp.values(), *self.jvp.values(), *self.formulas)))

    def __repr__(self) -> str:
        formulas = ", ".join(f.__name__ for f in self.formulas)
        return f"<Rule {self.name}: {formulas}>" if formulas else f"<Rule {self.name}>"


def saved_names(rule: Rule, vjp: Mapping[tuple[str, ...], Callable[..., Any]]) -> tuple[str, ...]:
    """Which inputs and outputs of the rule's operator these formulas for the vjp ask for."""
    wanted = {p for f in vjp.values() for p in parameters(f)}
    if rule.compiled_vjp is not None:  # its conditions are asked of constants
        wanted |= set(rule.compiled_vjp.only)
    return tuple(n for n in (*rule.signature.names, *rule.signature.output_names) if n in wanted)


def _code(function: Callable[..., Any]) -> str:
    """The `fingerprint` of what a rule calls."""
    if isinstance(function, ArgumentBinding):
        return f"{_code(function.formula)} {function!r}"
    return fingerprint(function.reference if isinstance(function, Formula) else function)


def check_functional(what: str, op: Any, *, may_write: bool = False, may_be_composite: bool = False) -> None:
    """Refuse operators whose derivative cannot be exchanged; ``what`` is to be bound to ``op``.

    Args:
        may_write: to arguments that it does not return, which are constants of the derivative.
        may_be_composite: and yet have a derivative of its own.
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
