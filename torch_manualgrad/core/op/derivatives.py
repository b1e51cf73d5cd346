"""Derivatives of custom ops: from a registered backward or jvp, from the reference, or from `torch.library`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.derivative import Derivative
from ..engine.kernel import any_tangent
from ..engine.node import functions, pull_back
from ..engine.strong_arithmetic import StrongArithmetic, linear_among, running
from ..engine.transpose import Transposed
from ..internals import (
    PLAIN,
    below_autograd,
    constants_unwritten,
    in_functorch,
    is_autocast_enabled,
    only_autograd,
    pytree,
    saved_tensors_are_hooked,
    transforms_usable,
    unwrap_if_dead,
)
from ..schema import Signature, flatten, tensors_in, unflatten
from .implementation import BackwardContext, Implementation, check_gradients, check_tangents, is_foreign

__all__ = [
    "JvpOnly",
    "LibraryDerivative",
    "ReferenceDerivative",
    "SavedBackward",
    "Selected",
    "select",
    "user_jvp",
]


# types that are leaves of pytrees
_LEAVES = {*PLAIN, type(None), bool, int, float, complex, str, torch.dtype, torch.device}


class _Kept(NamedTuple):
    """The residuals of a call that are not tensors.

    Attributes:
        rest: for each leaf of the result of save_for_backward None if it is a tensor, else (x,). None if the result is
            one tensor.
        spec: the structure of the result; None for a tuple of leaves.
        shapes: the arguments, with tensors replaced by their shapes, to check gradients.
        origin: arguments and outputs, with tensors replaced by `Tensor`, if the backward must call save_for_backward
            again.
        linear: the places of the saved tensors that are cotangents or tangents of a call in `strong_arithmetic`.
    """

    rest: list[Any] | None
    spec: Any
    shapes: list[Any]
    origin: list[Any] | None
    linear: Sequence[int]


class SavedBackward(Transposed):
    """The derivative by save_for_backward and backward, and a jvp if there is one."""

    pure = False

    def __init__(
        self, op: Any, signature: Signature, save: Implementation, backward: Implementation, jvp: Implementation | None
    ):
        self.foreign = is_foreign(backward.function)
        self.save = save
        self.rule = backward
        self.tangent_rule = jvp
        super().__init__(op, signature, backward.output_differentiability)

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        return _packed(self._save(inputs, outputs), inputs, outputs)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        kept: _Kept = static
        if grads[0] is None and not any(True for _ in tensors_in(grads)):
            return [None] * len(kept.shapes)
        tensors = [unwrap_if_dead(t) for t in tensors]
        if kept.linear:  # the call had strong zeros, and so do its derivatives
            with StrongArithmetic(tensors_in([*grads, *[tensors[i] for i in kept.linear]])):
                return self._vjp(needed, tensors, kept, grads)
        return self._vjp(needed, tensors, kept, grads)

    def _vjp(self, needed: Sequence[Any], tensors: Sequence[Any], kept: _Kept, grads: Sequence[Any]) -> Sequence[Any]:
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

    @property
    def has_own_jvp(self) -> bool:
        return self.tangent_rule is not None

    def plain_bodies(self) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        one_tensor = len(self.signature.returns) == 1
        return _plain_bodies(self) if one_tensor and all(self.differentiable) else None

    def _save(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        # Dynamo traces backwards, but not guards
        with transforms_usable() if self.foreign and not torch.compiler.is_dynamo_compiling() else nullcontext():
            return self.save.function(self.signature.Inputs(*inputs), _named_outputs(self.signature, outputs))


class _Context(NamedTuple):
    """The attributes that `pull_back` reads."""

    saved_tensors: tuple[Tensor | None, ...]
    static: _Kept


def _plain_bodies(derivative: SavedBackward) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A faster forward and backward than those of `node.plain_function`, for plain calls."""
    signature, save, rule = derivative.signature, derivative.save.function, derivative.rule
    places, names, Inputs = signature.tensor_like, signature.tensor_names, signature.Inputs
    run, count = derivative.run, len(signature.names)
    by_place = signature.positional == count
    new = tuple.__new__  # a named tuple's own is in Python

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
        plain = type(grad) in PLAIN and kept.origin is None and not kept.linear
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

    return forward, backward


def _packed(saved: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor], _Kept]:
    """The result of save_for_backward as tensors and everything else."""
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
                # It was computed here and has no history: the next derivative recomputes it from all of these.
                origin = [_without_tensors(v) for v in (*inputs, *outputs)]
                tensors = [*tensors, *known]
                return tensors, _Kept(rest, spec, shapes, origin, linear_among(tensors))
    linear = linear_among(tensors) if running.mode is not None else ()
    return tensors, tuple.__new__(_Kept, (rest, spec, shapes, None, linear))


def _unpacked(kept: _Kept, tensors: Sequence[Any]) -> Any:
    """The result of save_for_backward, with these tensors."""
    rest, spec, *_ = kept
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

    foreign = True

    def __init__(self, op: Any, signature: Signature, jvp: Implementation):
        self.tangent_rule = jvp
        super().__init__(op, signature)

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
    with transforms_usable() if is_foreign(rule.function) else nullcontext():
        with constants_unwritten(tangents, f"the jvp of {signature.name}"):
            found = rule.function(signature.Inputs(*inputs), _named_outputs(signature, outputs), tangents)
    return check_tangents(signature, rule.location, outputs, found)


# -- the derivative of the reference, and the selection of a derivative ----------------------------------------------------------


class Selected(NamedTuple):
    """The derivative that the autograd kernel uses: selected when registrations change, read at every call."""

    derivative: Derivative | None = None
    autograd: Implementation | None = None
    error: str | None = None
    reverse: bool = False


def select(
    name: str,
    op: Any,
    signature: Signature,
    current: Mapping[str, Implementation],
    reference: Callable[..., Any] | None,
) -> Selected:
    """Select the derivative of a custom op from its implementations.

    Args:
        name: of the op.
        op: its ``OpOverload``.
        signature: of the op.
        current: its implementations now, by their kinds.
        reference: the function that is differentiated if no derivative is registered; None for none.
    """
    get = current.get
    save, backward, jvp = get("save_for_backward"), get("backward"), get("jvp")
    if (whole := get("autograd")) is not None:
        return Selected(autograd=whole)
    if (save is None) != (backward is None) and (reference is None or backward is None):
        found, missing = ("backward", "save_for_backward") if save is None else ("save_for_backward", "backward")
        return Selected(
            error=f"{name} has a {found} implementation, written at {current[found].location}, but no "
            f"{missing} implementation. A gradient needs both: register the other with impl_{missing}."
        )
    if save is not None and backward is not None:
        return Selected(SavedBackward(op, signature, save, backward, jvp), reverse=True)
    if reference is not None:
        return Selected(ReferenceDerivative(op, signature, reference, backward, jvp), reverse=True)
    return Selected(JvpOnly(op, signature, jvp)) if jvp is not None else Selected()


class ReferenceDerivative(Transposed):
    """The derivative of the reference implementation itself, for an op whose reference is differentiable.

    Reverse: the reference is differentiated when the backward runs, so the forward costs only its kernel. Forward, and
    if the backward will run in the middle of a call (torch.func.vjp cannot): the reference runs instead of the op, see
    `CustomOp.kernel`. A backward or a jvp that computes the same in fewer operations may replace either; the residuals
    of the backward are the inputs. With strong zeros the reference is differentiated: zeros are strong in each of its
    products, and the other formulas may have other factors.
    """

    @property
    def pure(self) -> bool:  # type: ignore[override]
        return self.rule is not None or not saved_tensors_are_hooked() and not only_autograd()

    def __init__(
        self,
        op: Any,
        signature: Signature,
        reference: Callable[..., Any],
        backward: Implementation | None = None,
        jvp: Implementation | None = None,
    ):
        self.reference = reference
        self.foreign = is_foreign(reference)
        self.rule, self.tangent_rule = backward, jvp
        self.tensor_places = [i for i in signature.tensor_like if i not in signature.lists]
        self.constant_places = [i for i in range(len(signature.names)) if i not in self.tensor_places]
        self.uses = [({*range(len(self.tensor_places))}, signature.tensor_like)]
        super().__init__(op, signature)

    @property
    def plain_backward(self) -> Callable[..., Any] | None:
        """The backward of plain calls."""
        found: Callable[..., Any] | None = functions(self).plain_backward
        return found

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        constants = tuple(inputs[i] for i in self.constant_places)
        return [inputs[i] for i in self.tensor_places], (*constants, linear_among(inputs))

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        values: list[Any] = [None] * len(needed)
        for i, t in zip(self.tensor_places, tensors):
            values[i] = None if t is None else unwrap_if_dead(t)
        for i, constant in zip(self.constant_places, static):
            values[i] = constant
        # a call in csrc/calls has only the constants
        linear = static[-1] if len(static) > len(self.constant_places) else ()
        if linear:  # the call had strong zeros, and so do its derivatives
            with StrongArithmetic(tensors_in([*grads, *[values[i] for i in linear]])):
                return self._vjp(needed, values, grads)
        if self.rule is not None:
            context = BackwardContext({self.signature.names[i]: needed[i] for i in self.signature.tensor_like})
            found = self.rule.function(context, self.signature.Inputs(*values), *grads)
            shapes = [v.shape if isinstance(v, Tensor) else _shapes(v) for v in values]
            return check_gradients(self.signature, self.rule.location, shapes, found)
        return self._vjp(needed, values, grads, plain=not in_functorch())

    @property
    def has_own_jvp(self) -> bool:
        return self.tangent_rule is not None

    def jvp(self, inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        if self.tangent_rule is None:
            return super().jvp(inputs, outputs, tangents)
        return user_jvp(self.signature, self.tangent_rule, inputs, outputs, self.signature.Inputs(*tangents))

    def _vjp(self, needed: Sequence[Any], values: list[Any], grads: Sequence[Any], plain: bool = False) -> Any:
        places = [i for i, n in enumerate(needed) if n]
        if not torch.compiler.is_dynamo_compiling() and (plain or saved_tensors_are_hooked()):
            return self._plain_vjp(places, values, grads)

        def of_needed(*wanted: Tensor) -> Any:
            full = list(values)
            for i, w in zip(places, wanted):
                full[i] = w
            args, kwargs = self.signature.split(full)
            return self.reference(*args, **kwargs)

        outputs, pullback = torch.func.vjp(of_needed, *[values[i] for i in places])  # type: ignore[misc]
        full = [torch.zeros_like(o) if g is None else g for o, g in zip(self.signature.outputs(outputs), grads)]
        result: list[Any] = [None] * len(values)
        for i, g in zip(places, pullback(full[0] if len(full) == 1 else tuple(full))):
            result[i] = g
        return result

    def _plain_vjp(self, places: Sequence[int], values: list[Any], grads: Sequence[Any]) -> Sequence[Any]:
        """The vjp in plain autograd, which is faster, and unlike torch.func works under hooks on saved tensors."""
        differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            for i in places:  # a separate node, because one tensor may be two arguments
                x = values[i]
                values[i] = x.view_as(x) if differentiable and x.requires_grad else x.detach().requires_grad_()
            args, kwargs = self.signature.split(values)
            outputs = self.signature.outputs(self.reference(*args, **kwargs))
            pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None and o.requires_grad]
        wanted = [values[i] for i in places]
        found: Sequence[Any] = [None] * len(wanted)
        if pairs:
            found = torch.autograd.grad(
                [o for o, _ in pairs], wanted, [g for _, g in pairs], create_graph=differentiable, allow_unused=True
            )
        result: list[Any] = [None] * len(values)
        for i, x, g in zip(places, wanted, found):
            # a zero, as from torch.func.vjp: with None the caller's graph would miss its input
            result[i] = torch.zeros_like(x) if g is None else g
        return result


# -- operators of `torch.library.custom_op` -------------------------------------------------------------------------------
# PyTorch's own kernel supports neither tangents nor torch.func. This derivative runs ``setup_context`` again each time,
# from the inputs and outputs, so that its results have a history in every order.


class _LibraryContext:
    """The first argument of setup_context and backward."""

    def __init__(self, needs_input_grad: tuple[Any, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        """Nothing to do: a backward ignores them."""


class LibraryDerivative(Transposed):
    """The vjp from setup_context and backward; the jvp by transposition."""

    pure = False
    foreign = True

    def __init__(self, op: Any, setup_context: Callable[..., Any] | None, backward: Callable[..., Any]) -> None:
        self._setup_context, self._backward = setup_context, backward
        super().__init__(op, Signature(op._schema))
        self._places = (self.signature.lists, [len(self.signature.names) + i for i in self.signature.output_lists])

    def residuals(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Sequence[Tensor | None], Any]:
        leaves, lengths = flatten((*inputs, *outputs), [*self._places[0], *self._places[1]])
        constants = [None if isinstance(v, Tensor) else (v,) for v in leaves]
        return [v if isinstance(v, Tensor) else None for v in leaves], (constants, lengths)

    def vjp(self, needed: Sequence[Any], tensors: Sequence[Any], static: Any, grads: Sequence[Any]) -> Sequence[Any]:
        constants, lengths = static
        values = unflatten([unwrap_if_dead(t) if c is None else c[0] for t, c in zip(tensors, constants)], lengths)
        count = len(self.signature.names)
        args, keywords = self.signature.split(values[:count])
        outputs = values[count:]
        context = _LibraryContext(tuple(needed[: len(args)]))
        if self._setup_context is not None:
            given: dict[str, Any] = {"keyword_only_inputs": keywords} if keywords else {}
            output = tuple(outputs) if len(outputs) != 1 else outputs[0]
            self._setup_context(ctx=context, inputs=tuple(args), output=output, **given)
        if context.materialize_grads:
            grads = [_full(g, o) for g, o in zip(grads, outputs)]
        found = self._backward(context, *grads)
        found = found if isinstance(found, tuple) else (found,)
        return [*found, *[None] * (count - len(found))]


def _full(grad: Any, output: Any) -> Any:
    if isinstance(output, (list, tuple)):
        return [_full(g, o) for g, o in zip(grad or [None] * len(output), output)]
    return torch.zeros_like(output) if grad is None and isinstance(output, Tensor) else grad
