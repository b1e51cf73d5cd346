"""Forward mode for operators that lack it: replaces calls in which an input has a tangent.

All other calls stay PyTorch's, and so does reverse mode, except in forward mode over reverse mode of torch.func, where
the tensors that PyTorch's backward saved are constants. There are three ways:

- a decomposition, a Python function of differentiable operators that runs instead;
- a rule, which is active only for such calls;
- PyTorch's own reverse mode, transposed: u -> vjp(u) is linear, and its vjp at the tangents is the jvp.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compile_cache import fingerprint
from ..engine.kernel import Mode, any_tangent, apply, differentiated
from ..engine.transpose import Transposed, differentiating_backward, transposing
from ..internals import (
    dual,
    forward_mode_outside,
    fresh_alias,
    fresh_variable,
    is_autocast_enabled,
    library_backward,
    only_autograd,
    primal,
    set_autocast_off,
    tangent,
    unwrap_if_dead,
)
from ..op.derivatives import LibraryDerivative
from ..rule.derivative import RuleDerivative
from ..schema import Signature, flatten, tensors_in, unflatten, with_tensors

__all__ = ["ForwardMode", "by_decomposition", "by_derivative", "by_transposition"]

_numbers = itertools.count(1)
# One per operator and function, because compiled graphs are cached for each.
_once = functools.lru_cache(maxsize=1024)


class ForwardMode:
    """Forward mode for one operator.

    Args:
        op: the ``OpOverload``.
        how: "decomposition", "rule" or "transposition".
        run: ``(keyset, mode, values) -> result`` for calls in which an input has a tangent, or will have one when
            reverse mode is differentiated; returns NotImplemented to leave the call to PyTorch.
        code: the `fingerprint` of the code that it runs.
    """

    def __init__(self, op: Any, how: str, run: Callable[[Any, Mode, list[Any]], Any], code: str = "") -> None:
        self.aten, self.how, self._run, self.fingerprint = op, how, run, code
        self.name: str = op.name()
        self.signature = Signature(op._schema)
        self.identity = f"{how} {next(_numbers)}"

    def __repr__(self) -> str:
        return f"<ForwardMode {self.name} by {self.how}>"

    def __call__(self, stock: Callable[..., Any], keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call at the key Autograd."""
        if not only_autograd():
            values = self.signature.bind(args, kwargs)
            mode = differentiated(self.signature, values)
            if mode is Mode.DUAL or mode is Mode.REVERSE and forward_mode_outside():
                found = self._run(keyset, mode, values)
                if found is not NotImplemented:
                    return found
        return stock(keyset, *args, **kwargs)


@_once
def by_decomposition(op: Any, function: Callable[..., Any]) -> ForwardMode:
    """``function`` instead of ``op``; it takes every argument of the schema, keyword-only ones by name."""
    signature = Signature(op._schema)
    returns = len(signature.returns)

    def run(keyset: Any, mode: Mode, values: list[Any]) -> Any:
        args, kwargs = signature.split(values)
        with set_autocast_off() if is_autocast_enabled() else nullcontext():
            found = function(*args, **kwargs)
        if returns != 1 and (not isinstance(found, tuple) or len(found) != returns):
            got = f"a tuple of {len(found)}" if isinstance(found, tuple) else type(found).__name__
            raise RuntimeError(f"the decomposition of {op.name()}: expected a tuple of {returns} outputs, got {got}")
        return found

    return ForwardMode(op, "decomposition", run, fingerprint(function))


@_once
def by_derivative(derivative: RuleDerivative) -> ForwardMode:
    """A rule's derivative."""
    rule = derivative.rule

    def run(keyset: Any, mode: Mode, values: list[Any]) -> Any:
        values = with_tensors(rule.signature, values)
        return apply(derivative, keyset, mode, values) if derivative.takes(values) else NotImplemented

    return ForwardMode(rule.aten, "rule", run, rule.fingerprint)


def by_transposition(op: Any, differentiable: tuple[bool, ...] | None = None) -> ForwardMode:
    """The transpose of the operator's own reverse mode; ``differentiable`` has a bool for each output."""
    return _by_transposition(op, differentiable, library_backward(op))


@_once
def _by_transposition(
    op: Any, differentiable: tuple[bool, ...] | None, registered: tuple[Any, Callable[..., Any]] | None
) -> ForwardMode:
    signature = Signature(op._schema)
    if registered is None:
        derivative: Transposed = _Transposed(op, signature, differentiable)
    else:
        derivative = LibraryDerivative(op, *registered)

    def run(keyset: Any, mode: Mode, values: list[Any]) -> Any:
        if mode is Mode.REVERSE and registered is None:
            return NotImplemented
        return apply(derivative, keyset, mode, with_tensors(signature, values))

    return ForwardMode(op, "transposition", run, " ".join(map(fingerprint, registered or ())))


class _Transposed(Transposed):
    """Autograd's derivative of the operator at this level: each derivative runs the forward again under it."""

    pure = False

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        leaves, lengths = flatten(inputs, self.signature.lists)
        constants = [None if isinstance(v, Tensor) else (v,) for v in leaves]
        return [v if isinstance(v, Tensor) else None for v in leaves], (constants, lengths)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        if any_tangent(list(tensors_in((*tensors, *grads)))):
            return self._vjp_of_duals(needed, tensors, static, grads)
        constants, lengths = static
        again = torch.is_grad_enabled()
        leaves = [unwrap_if_dead(t) if c is None else c[0] for t, c in zip(tensors, constants)]
        wanted: list[Any] = []
        for n, length in zip(needed, lengths):
            wanted += [n] if length is None else n or [False] * length
        places = [i for i, yes in enumerate(wanted) if yes]
        with torch.enable_grad():
            for i in places:
                leaves[i] = _variable(leaves[i])
            args, kwargs = self.signature.split(unflatten(leaves, lengths))
            outputs, _ = flatten(self.signature.outputs(self.op(*args, **kwargs)), self.signature.output_lists)
            cotangents, _ = flatten(grads, self.signature.output_lists)
            pairs = [(o, g) for o, g in zip(outputs, cotangents) if g is not None and o is not None and o.requires_grad]
            found: list[Any] = [None] * len(leaves)
            if pairs:
                results = torch.autograd.grad(
                    [o for o, _ in pairs],
                    [leaves[i] for i in places],
                    [g for _, g in pairs],
                    create_graph=again,
                    allow_unused=True,
                )
                for i, g in zip(places, results):
                    found[i] = g
        return unflatten(found, lengths)

    def _vjp_of_duals(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Any) -> Sequence[Any]:
        """The vjp of dual tensors, which the operator itself would pass back here: its tangents by transposition
        too."""
        again, lists, count = torch.is_grad_enabled(), self.signature.output_lists, len(tensors)
        cotangents, lengths = flatten(grads, lists)
        known = [*tensors, *cotangents]
        tangents = {i: t for i, x in enumerate(known) if x is not None and (t := tangent(x)) is not None}
        known = [None if x is None else primal(x) for x in known]
        with torch.enable_grad(), differentiating_backward(self.signature.name):
            for i in tangents:
                known[i] = _variable(known[i])
            found, spread = flatten(
                self.vjp(needed, known[:count], static, unflatten(known[count:], lengths)), self.signature.lists
            )
            smooth = [k for k, g in enumerate(found) if g is not None and g.requires_grad]
            variables = [fresh_variable(found[k]) for k in smooth]
            pulled: Sequence[Any] = ()
            if smooth:
                outputs, inputs = [found[k] for k in smooth], [known[i] for i in tangents]
                pulled = torch.autograd.grad(outputs, inputs, variables, create_graph=True, allow_unused=True)
            pairs = [(p, t) for p, t in zip(pulled, tangents.values()) if p is not None]
            results: Sequence[Any] = [None] * len(smooth)
            if pairs:
                outputs, along = [p for p, _ in pairs], [t for _, t in pairs]
                results = torch.autograd.grad(outputs, variables, along, create_graph=again, allow_unused=True)
        found = [g if again or g is None else g.detach() for g in found]
        for k, t in zip(smooth, results):
            if t is not None:
                found[k] = dual(found[k], t)
        return unflatten(found, spread)


def _variable(x: Tensor) -> Tensor:
    """A separate node for an argument, because one tensor may be two arguments."""
    if x.requires_grad:
        return x.view_as(x)
    return fresh_alias(x) if transposing() else x.detach().requires_grad_()
