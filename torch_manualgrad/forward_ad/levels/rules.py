"""Selects the jvp of an operator: from its rule, a custom op's own, or else PyTorch's, through torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.engine.derivative import Derivative
from ...core.forward import jvps
from ...core.internals import below_levels, has_autograd_kernel
from ...core.op.custom_op import current_derivative
from ...core.op.derivatives import ReferenceDerivative
from ...core.rule import Rule, parameters, rules
from ...core.rule.derivative import derivative_of
from ...core.schema import Signature, flatten, is_differentiable, tensors_in, unflatten
from .state import Levels, give, innermost, outside, tangent

__all__ = ["jvp_of", "not_differentiable", "recomputed", "reference_of", "rule_of"]

# (values, outputs, tangents of the values, the outer levels) -> tangents of the outputs; None for zero
Jvp = Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Levels], Sequence[Any]]

_UNKNOWN = (
    "the operator has neither a rule in torch_manualgrad.rules nor a jvp of PyTorch's. Give it a rule "
    "(torch_manualgrad.rule), or make it a torch_manualgrad.custom_op with impl_jvp."
)

# Operators that composite functions call, or that are composite and call no other, if they see no differentiated input. At
# dual levels they cannot see one.
_REFERENCES: dict[str, Callable[..., Any]] = {
    "aten::_linalg_eigvals": lambda self: torch.linalg.eig(self)[0],
    "aten::max_pool1d": lambda self, *args, **kwargs: torch.ops.aten.max_pool1d_with_indices(self, *args, **kwargs)[0],
}


def reference_of(name: str) -> Callable[..., Any] | None:
    """The function that runs instead of the operator, if the operator's derivative is that of the function."""
    derivative = current_derivative(name)
    if isinstance(derivative, ReferenceDerivative):
        return derivative.reference
    return _REFERENCES.get(name)


def jvp_of(op: Any, name: str, signature: Signature) -> Jvp:
    """The jvp of an operator; the outer levels must be visible when it is called.

    Raises:
        NotImplementedError: none is known.
    """
    if (rule := rule_of(name)) is not None:
        return functools.partial(_by_rule, rule)
    if (derivative := current_derivative(name)) is not None:
        return functools.partial(_by_derivative, derivative)
    if (known := jvps.get(name)) is not None:
        return functools.partial(_by_program, known)
    if name.startswith("aten::") and has_autograd_kernel(op):
        return functools.partial(_by_torch, op, name, signature)
    raise NotImplementedError(f"{name}: an argument has a tangent at a dual level, and {_UNKNOWN}")


# Outputs that are constant except for jumps: permutations, masks, random numbers, and the sum of given weights.
_CONSTANT = ("P", "is_target", "noise_out", "total_weight")


def rule_of(name: str) -> Rule | None:
    return rules[name] if name in rules else None


@functools.cache
def recomputed(rule: Rule | None) -> tuple[int, ...]:
    """The positions of inputs whose tangents a rule ignores: it recomputes them, or keeps them constant."""
    if rule is None:
        return ()
    read = {p.removesuffix("_t") for f in rule.jvp.values() for p in parameters(f) if p.endswith("_t")}
    known = read or {n for key in rule.vjp for n in key}  # a vjp may include the part of an input in others
    return tuple(i for i in rule.signature.tensor_like if rule.signature.names[i] not in known)


@functools.cache
def not_differentiable(rule: Rule | None) -> tuple[int, ...]:
    """The positions of the outputs without tangents in a rule, although they depend on the inputs smoothly."""
    if rule is None:
        return ()
    names = [n for n in rule.not_differentiable if n not in _CONSTANT]
    return tuple(i for i, n in enumerate(rule.signature.output_names) if n in names)


def _by_rule(
    rule: Rule, values: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any], outer: Levels
) -> Sequence[Any]:
    for i in recomputed(rule):  # PyTorch's forward mode takes the derivative in these as zero, but it is not
        if rule.signature.names[i] in ("weight", "scale") and tangents[i] is not None:
            raise NotImplementedError(
                f"{rule.name}: its argument {rule.signature.names[i]} has a tangent at a dual level, but its rule does "
                "not differentiate it; pass the argument without a tangent, by detach() or unpack_dual"
            )
    return _by_derivative(derivative_of(rule), values, outputs, tangents, outer)


def _is_tracked(x: Tensor, levels: Levels) -> bool:
    """Whether autograd tracks a tensor, or its tangents at these levels."""
    parts = [(level, t) for level in levels if (t := tangent(x, level)) is not None]
    return x.requires_grad or any(_is_tracked(t, outside(levels, level)) for level, t in parts)


def _by_program(
    jvp: Callable[..., Any], values: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any], outer: Levels
) -> Sequence[Any]:
    # it differentiates at its own points, whose tangents would otherwise require grad
    with below_levels():
        tracked = any(_is_tracked(x, outer) for x in tensors_in([*values, *tangents]))
    with torch.set_grad_enabled(tracked and torch.is_grad_enabled()):
        found: Sequence[Any] = jvp(values, outputs, tangents)
    return found


def _by_derivative(
    derivative: Derivative, values: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any], outer: Levels
) -> Sequence[Any]:
    found = derivative.jvp(values, outputs, tangents)  # also under autocast, already applied to the operator
    return [t if yes else None for t, yes in zip(found, derivative.differentiable)]


def _by_torch(
    op: Any,
    name: str,
    signature: Signature,
    values: Sequence[Any],
    outputs: Sequence[Any],
    tangents: Sequence[Any],
    outer: Levels,
) -> Sequence[Any]:
    """By torch.func.jvp, nested once per level: it does not see tangents, so they are passed as arguments.

    A value with tangents at n levels becomes a tree of depth n with 2**n coefficients.
    """
    with below_levels():
        flat, lengths = flatten(values, signature.lists)
        flat_tangents = [t for ts in tangents for t in (ts if isinstance(ts, list) else [ts])]
        known = [*tensors_in(flat), *tensors_in(flat_tangents)]
        levels = [level for level in outer if innermost(known, [level]) is not None]
        places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and is_differentiable(x)]

        def smooth(*inputs: Tensor) -> tuple[Tensor, ...]:
            full = list(flat)
            for i, x in zip(places, inputs):
                full[i] = x
            args, kwargs = signature.split(unflatten(full, lengths))
            return tuple(o for o in tensors_in(signature.outputs(op(*args, **kwargs))) if is_differentiable(o))

        trees = [(_tree(flat[i], levels), _tree(_or_zero(flat_tangents[i], flat[i]), levels)) for i in places]
        try:
            _, found = _lifted(smooth, len(levels) + 1)(*trees)
        except RuntimeError as error:
            if "independent of the inputs" not in str(error):
                raise
            raise NotImplementedError(f"{name}: an argument has a tangent at a dual level, and {_UNKNOWN}") from error
        count = sum(is_differentiable(o) for o in tensors_in(outputs))
        made = iter([_assembled(found, j, levels) for j in range(count)])
    return [
        [next(made) if is_differentiable(o) else None for o in output]
        if isinstance(output, (list, tuple))
        else next(made)
        if isinstance(output, Tensor) and is_differentiable(output)
        else None
        for output in outputs
    ]


def _or_zero(t: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if t is None else t


def _tree(x: Tensor, levels: Levels) -> Any:
    """A tensor, or the pair of trees of its value and of its tangent at the last level."""
    if not levels:
        return x
    *rest, last = levels
    return _tree(x, rest), _tree(_or_zero(tangent(x, last), x), rest)


def _lifted(function: Callable[..., Any], depth: int) -> Callable[..., Any]:
    """A function of tensors as a function of trees, by ``depth`` nested jvps."""
    if not depth:
        return function
    inner = _lifted(function, depth - 1)

    def pairs(*trees: Any) -> Any:
        primals, tangents = tuple(t[0] for t in trees), tuple(t[1] for t in trees)
        return torch.func.jvp(inner, primals, tangents, strict=depth == 1)  # strict: an error instead of zero

    return pairs


def _assembled(tree: Any, place: int, levels: Levels) -> Tensor:
    """One output, with its tangents, from a tree whose leaves are tuples of outputs."""
    if not levels:
        return tree[place].clone()
    *rest, last = levels
    made = _assembled(tree[0], place, rest)
    give(made, last, _assembled(tree[1], place, rest), levels, own=True)
    return made
