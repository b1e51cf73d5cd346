"""The derivative of a custom op that is registered for it: save_for_backward and backward, or a jvp alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .autograd import Derivative, any_tangent
from .autograd_function import function_class, pull_back
from .gradients import check_gradients, check_tangents
from .implementation import BackwardContext, Implementation
from .internals import PLAIN, below_autograd, is_autocast_enabled, pytree, unwrap_if_dead
from .schema import Signature, tensors_in

if TYPE_CHECKING:
    from .op import CustomOp

__all__ = ["JvpOnly", "Pair", "user_jvp"]

# types of which pytrees have no parts
_LEAVES = {*PLAIN, type(None), bool, int, float, complex, str, torch.dtype, torch.device}


class _Kept(NamedTuple):
    """What a call keeps beside tensors.

    Attributes:
        rest: of the leaves of what save_for_backward returned, None for each tensor and (x,) for any other; None where it
            returned one tensor.
        spec: the tree that they are of; None for a tuple of them.
        shapes: the arguments, with its shape in place of each tensor: to check gradients against.
        origin: arguments and outputs, with `Tensor` in place of each tensor, where the backward is to save again.
    """

    rest: list[Any] | None
    spec: Any
    shapes: list[Any]
    origin: list[Any] | None


class Pair(Derivative):
    """save_for_backward and backward, and a jvp if there is one."""

    pure = False

    def __init__(self, op: CustomOp, save: Implementation, backward: Implementation, jvp: Implementation | None):
        self.save = save
        self.rule = backward
        self.tangent_rule = jvp
        super().__init__(op.op, op.signature, backward.output_differentiability)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return _packed(self._save(inputs, outputs), inputs, outputs)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        kept: _Kept = static
        if grads[0] is None and not any(True for _ in tensors_in(grads)):
            return [None] * len(kept.shapes)
        tensors = [unwrap_if_dead(t) for t in tensors]
        if kept.origin is not None and (torch.is_grad_enabled() or any_tangent(tensors)):
            known = iter(tensors[1 if kept.rest is None else sum(r is None for r in kept.rest) :])
            values = [_with_tensors(v, known) for v in kept.origin]
            saved = self._save(values[: len(kept.shapes)], values[len(kept.shapes) :])
        else:
            saved = _unpacked(kept, tensors)
        context = BackwardContext({self.signature.names[i]: needed[i] for i in self.signature.tensor_like})
        found = self.rule.function(context, saved, *grads)
        return check_gradients(self.signature, self.rule.location, kept.shapes, found)

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        if self.tangent_rule is None:
            return super().jvp(inputs, outputs, tangents)
        return user_jvp(self.signature, self.tangent_rule, inputs, outputs, self.signature.Inputs(*tangents))

    def make_fast_function(self) -> Any:
        return _fast_function(self)

    def _save(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return self.save.function(self.signature.Inputs(*inputs), _named_outputs(self.signature, outputs))


class _Context(NamedTuple):
    """What `pull_back` reads."""

    saved_tensors: tuple[Tensor | None, ...]
    static: _Kept


def _fast_function(derivative: Pair) -> Any:
    """`Derivative.fast_function` of a pair: the same, where most calls meet nothing that has to be asked for."""
    signature, save, rule = derivative.signature, derivative.save.function, derivative.rule
    places, names, Inputs = signature.tensor_like, signature.tensor_names, signature.Inputs
    run, count = derivative.run, len(signature.names)
    by_place = signature.positional == count
    new = tuple.__new__  # that of a named tuple is in Python

    def forward(ctx: Any, values: Any, *_: Any) -> Any:
        if by_place:
            with below_autograd():
                result = run(*values)
        else:
            result = derivative.run_below(values)
        tensors, ctx.static = _packed(save(new(Inputs, values), result), values, (result,))
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return result

    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return (None, *[None] * len(places))
        saved, kept = ctx.saved_tensors, ctx.static
        plain = type(grad) in PLAIN and kept.origin is None
        tensors = []
        for x in saved:
            plain = plain and type(x) in PLAIN
            tensors.append(unwrap_if_dead(x))
        if not plain or torch.compiler.is_dynamo_compiling() or is_autocast_enabled():
            needed: list[Any] = [None] * count
            for i, wanted in zip(places, ctx.needs_input_grad[1:]):
                needed[i] = wanted
            found = pull_back(derivative, _Context(saved, kept), needed, (grad,))
            return (None, *[found[i] for i in places])
        context = new(BackwardContext, (dict(zip(names, ctx.needs_input_grad[1:])),))
        found = rule.function(context, _unpacked(kept, tensors), grad)
        found = check_gradients(signature, rule.location, kept.shapes, found)
        return (None, *[found[i] for i in places])

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise AssertionError("a plain call has no tangents")

    return function_class(derivative, forward, backward, jvp).apply


def _packed(saved: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor], _Kept]:
    """The tensors of what save_for_backward returned, and what is kept beside them."""
    shapes = [v.shape if isinstance(v, Tensor) else _shapes(v) for v in inputs]
    rest = spec = None
    tensors: Sequence[Tensor]
    if isinstance(saved, Tensor):
        tensors = (saved,)
    else:
        leaves = saved
        if type(saved) is not tuple or not _LEAVES.issuperset(map(type, saved)):
            leaves, spec = pytree.tree_flatten(saved)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        rest = [None if isinstance(x, Tensor) else (x,) for x in leaves]
    for x in tensors:
        for other in (*inputs, *outputs):
            if x is other:
                break
        else:
            known = list(tensors_in((*inputs, *outputs)))
            if not any(x is other for other in known) and (x.is_floating_point() or x.is_complex()):
                # It was computed here and has no history: the next derivative computes it again, from all of these.
                origin = [_without_tensors(v) for v in (*inputs, *outputs)]
                return [*tensors, *known], _Kept(rest, spec, shapes, origin)
    return tensors, tuple.__new__(_Kept, (rest, spec, shapes, None))


def _unpacked(kept: _Kept, tensors: Sequence[Any]) -> Any:
    """What save_for_backward returned, with these tensors."""
    rest, spec, _, _ = kept
    if rest is None:
        return tensors[0]
    given = iter(tensors)
    leaves = [next(given) if r is None else r[0] for r in rest]
    return tuple(leaves) if spec is None else pytree.tree_unflatten(leaves, spec)


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return [_shapes(v) for v in value] if isinstance(value, (list, tuple)) else value


def _without_tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    return [_without_tensors(v) for v in value] if isinstance(value, (list, tuple)) else value


def _with_tensors(value: Any, tensors: Any) -> Any:
    if value is Tensor:
        return next(tensors)
    return [_with_tensors(v, tensors) for v in value] if isinstance(value, list) else value


class JvpOnly(Derivative):
    """A jvp without a backward."""

    def __init__(self, op: CustomOp, jvp: Implementation):
        self.tangent_rule = jvp
        super().__init__(op.op, op.signature)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return (), None

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        return user_jvp(self.signature, self.tangent_rule, inputs, outputs, self.signature.Inputs(*tangents))


def _named_outputs(signature: Signature, outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(signature.returns) == 1 else signature.Outputs(*outputs)


def user_jvp(
    signature: Signature, rule: Implementation, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Any
) -> list[Any]:
    """The tangents of the outputs, by a registered jvp. ``tangents`` has an attribute for each input."""
    found = rule.function(signature.Inputs(*inputs), _named_outputs(signature, outputs), tangents)
    return check_tangents(signature, rule.location, outputs, found)
