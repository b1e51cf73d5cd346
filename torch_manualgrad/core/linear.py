"""Rules of operators that are linear in some of their inputs: the tangent is the operator itself, on the tangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .binding import bound_to
from .rule import Formulas, Rule, exists, operator, rule
from .schema import Signature

__all__ = ["linear_in"]


def linear_in(name: str, vjp: Formulas, *, source: str = "ATen derivatives.yaml", **about: Any) -> Rule | None:
    """Bind an operator that is linear in some inputs, all together, to their cotangents; enter it in ``mg.rules``.

    ``linear_in("aten::flip", {"self": lambda grad, dims: grad.flip(dims)})``. Linear in several inputs together is
    ``lerp`` in its first two; ``mm`` is linear in each of two, which is another thing.

    The vjp is given, not found: the transpose of an operator is the derivative that PyTorch has for it, and would lead
    back to this rule.

    Args:
        name: the operator, of one output.
        vjp: input, or tuple of inputs, that it is linear in -> formula for the cotangent, bound by name as in `rule`.
        source: where the vjp comes from.
        about: further arguments of `rule`, such as ``samples``.

    Returns:
        The rule; None where this torch lacks the operator, as declared by ``since`` or ``until``.

    Raises:
        ValueError: the operator returns several outputs, or `rule` refuses the rest.
    """
    if not exists(name):
        return rule(name, **about)
    op = operator(name)
    signature = Signature(op._schema)
    if len(signature.returns) != 1:
        raise ValueError(f"linear_in {name}: the operator has {len(signature.returns)} outputs, and one is expected")
    (output,) = signature.output_names
    inputs = [n for key in vjp for n in ((key,) if isinstance(key, str) else key)]
    jvp: Formulas = {output: _on_tangents(op, signature, inputs)}
    return rule(name, vjp=vjp, jvp=jvp, kind="linear", source=source, **about)


def _on_tangents(op: Any, signature: Signature, linear: list[str]) -> Callable[..., Any]:
    """``op`` with the tangents in place of the inputs that it is linear in."""

    def jvp(*known: Any) -> Any:
        values = list(known[: len(signature.names)])
        tangents = dict(zip(linear, known[len(signature.names) :]))
        for name, tangent in tangents.items():
            place = signature.names.index(name)
            values[place] = _tangent(values[place], tangent)
        args, kwargs = signature.split(values)
        return op(*args, **kwargs)

    jvp.is_operator = True  # type: ignore[attr-defined]  # and adds no constant, as padding with a number does
    return bound_to(jvp, [*signature.names, *[f"{n}_t" for n in linear]])


def _tangent(primal: Any, tangent: Any) -> Any:
    if isinstance(primal, (list, tuple)):
        return [_tangent(p, t) for p, t in zip(primal, tangent or [None] * len(primal))]
    return torch.zeros_like(primal) if tangent is None and isinstance(primal, Tensor) else tangent
